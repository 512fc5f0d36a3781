"""Reads and writes the gradients that an optimizer sees: a handle's sharded ones, or full ones inside a summon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fsdp_flat.flat.arrangement import views_of
from fsdp_flat.flat.guards import unguarded
from fsdp_flat.flat.tensor_adapter import PLAIN, TensorAdapter
from fsdp_flat.flat.views import Views


def sharded_grad_of(views: Views) -> torch.Tensor:
    """Return a copy of this rank's gradient (1-D, ``shard_numel``), zero where there is none."""
    with unguarded():
        whole = torch.zeros_like(views.flat_param.data)
        for each, grad in zip(views.visible, views.grads(), strict=True):
            if grad is not None:
                each.part_of(whole).copy_(grad)
    return whole


def have_grads(views: Views) -> list[bool]:
    """Return for each original parameter whether this rank's local shard has a gradient."""
    grads = zip(views.visible, views.grads(), strict=True)
    return [grad is not None for each, grad in grads for _ in each.indices]


def show_full_grads(views: Views, whole: torch.Tensor, there: Sequence[bool]) -> None:
    """Set full gradients on full parameters that are shown, if any rank has a gradient (``there``)."""
    with unguarded():
        for index, (is_there, grad) in enumerate(zip(there, views_of(whole, views.layout), strict=True)):
            if is_there:
                views.set_shown_grad(index, grad)


def restore_sharded_grad(views: Views, own: torch.Tensor) -> None:
    """Copy ``own`` (1-D, ``shard_numel``) into this rank's gradient after :func:`show_full_grads`."""
    with unguarded():
        for each, grad in zip(views.visible, views.grads(), strict=True):
            if grad is not None:
                grad.copy_(each.part_of(own))


def grads_by_adapter(views: Views) -> Iterator[tuple[TensorAdapter, torch.Tensor | None]]:
    """Iterate over this rank's gradients for the optimizer, each with the adapter of its parameter."""
    all_plain = all(entry.adapter is PLAIN for entry in views.params)
    for each, grad in zip(views.visible, views.grads(), strict=True):
        if len(each.indices) == 1 or all_plain:
            yield views.params[each.indices.start].adapter, grad
            continue
        for index in each.indices:
            part = None if grad is None else grad[views.local_shards[index].in_shard.to_slice()]
            yield views.params[index].adapter, part
