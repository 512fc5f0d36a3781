"""Reads and sets gradients of the parameters that an optimizer holds, also full ones in ``summon_full_params``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fsdp_flat.core.flat_parameter import set_grad
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.params import PLAIN, TensorAdapter
from fsdp_flat.core.slots import apply_hooks


def add_reduced(group: ParamGroup, shard_grad: torch.Tensor, used: Sequence[int]) -> None:
    """Add a reduced gradient (1-D, ``shard_numel``) to the ``.grad`` of the optimizer's parameters.

    ``used`` holds for each parameter whether any rank has used it; unused ones get no gradient.
    """
    slots = group.slots
    first = slots.visible_params[0]
    if first is group.storage.flat_param and any(used):
        shard_grad = apply_hooks(first._backward_hooks or {}, shard_grad)
    hooked, all_used, may_change = [], all(used), False
    for each, grad in zip(slots.visible, slots.plan.reduced_grads(slots, shard_grad), strict=True):
        if not (all_used or any(used[each.indices.start : each.indices.stop])):
            continue
        param = each.param
        is_hooked = bool(param._post_accumulate_grad_hooks) or hasattr(param, "_in_backward_optimizers")
        may_change |= is_hooked
        # A parameter without elements on this rank gets no gradient, so norms and optimizers skip it.
        if each.is_elsewhere:
            continue
        if param.grad is None:
            set_grad(param, grad)
        else:
            param.grad.add_(grad)
        if is_hooked:
            hooked.append(param)
    if may_change:
        group.note_update()  # also on ranks whose parameters are not among these
    # Run the user's gradient hooks and in-backward optimizers: torch does not, as these parameters are in no graph.
    for param in hooked:
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            hook(param)
        for optimizer in getattr(param, "_in_backward_optimizers", ()):
            optimizer.step()
            optimizer.zero_grad()


def sharded_grad_of(group: ParamGroup) -> torch.Tensor:
    """Return a copy of this rank's gradient (1-D, ``shard_numel``), zero where there is none."""
    whole = torch.zeros_like(group.flat_param.data)
    for each, grad in zip(group.slots.visible, group.slots.visible_grads(), strict=True):
        if grad is not None:
            each.part_of(whole).copy_(grad)
    return whole


def have_grads(group: ParamGroup) -> list[bool]:
    """Return for each original parameter whether this rank's local shard has a gradient."""
    grads = zip(group.slots.visible, group.slots.visible_grads(), strict=True)
    return [grad is not None for each, grad in grads for _ in each.indices]


def show_full_grads(group: ParamGroup, whole: torch.Tensor, there: Sequence[bool]) -> None:
    """Set ``.grad`` of shown full parameters to views of ``whole`` (1-D, ``layout.numel``), if ``there``."""
    for index, (is_there, grad) in enumerate(zip(there, group.layout.views(whole), strict=True)):
        if is_there:
            group.slots.full_param(index).grad = group.params[index].adapter.from_local(grad)


def restore_sharded_grad(group: ParamGroup, own: torch.Tensor) -> None:
    """Copy ``own`` (1-D, ``shard_numel``) into this rank's gradient after :func:`show_full_grads`."""
    for each, grad in zip(group.slots.visible, group.slots.visible_grads(), strict=True):
        if grad is not None:
            grad.copy_(each.part_of(own))


def grads_by_adapter(
    group: ParamGroup, *, one_by_one: bool = False
) -> Iterator[tuple[nn.Parameter, TensorAdapter, torch.Tensor | None]]:
    """Iterate over the parameters that an optimizer holds, each with its adapter and this rank's gradient.

    With ``one_by_one`` the gradient of a flat parameter is split into those of the original ones, without padding.
    """
    all_plain = all(entry.adapter is PLAIN for entry in group.params)
    for each, grad in zip(group.slots.visible, group.slots.visible_grads(), strict=True):
        if not one_by_one and (len(each.indices) == 1 or all_plain):
            yield each.param, group.params[each.indices.start].adapter, grad
            continue
        for index in each.indices:
            local, part = group.local_shards[index], grad
            if grad is not None and grad.numel() != local.numel:
                part = grad[local.in_shard.to_slice()]
            yield each.param, group.params[index].adapter, part
