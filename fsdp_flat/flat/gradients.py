"""Reads and sets the gradients of the parameters that an optimizer holds: reduced, unreduced, or full in a summon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_flat.flat.arrangement import VisibleParam, views_of
from fsdp_flat.flat.guards import set_grad
from fsdp_flat.flat.params import PLAIN, TensorAdapter
from fsdp_flat.flat.views import Views


@dataclass(slots=True)
class ReduceScatteredGrad:
    """Holds this rank's shard of a gradient that is summed over the shard group, and not over the replicate group yet.

    Attributes:
        shard: the sum, 1-D, in the reduce dtype; None if there is none, or once another gradient contains it.
        used: one byte per parameter: 1 if any rank has used it; None until an exchange of ranks has shown it.
    """

    shard: torch.Tensor | None = None
    used: bytes | None = None

    def add(self, shard: torch.Tensor) -> None:
        """Add another sum."""
        self.shard = shard if self.shard is None else self.shard.add_(shard)

    def add_used(self, used: bytes) -> bytes:
        """Add the parameters that another backward has used, and return all."""
        self.used = used if self.used is None else bytes(map(max, used, self.used))
        return self.used

    def take(self) -> torch.Tensor | None:
        """Return the sum and remove it."""
        shard, self.shard = self.shard, None
        return shard


def add_reduced(views: Views, shard_grad: torch.Tensor, used: Sequence[int]) -> None:
    """Add a reduced gradient (1-D, ``shard_numel``) to the ``.grad`` of the optimizer's parameters.

    ``used`` holds for each parameter whether any rank has used it; others get no gradient.
    """
    if views.visible[0].param is views.flat_param and any(used):
        shard_grad = apply_hooks(views.flat_param._backward_hooks or {}, shard_grad)
    hooked, all_used = [], all(used)
    for each, grad in zip(views.visible, views.reduced_grads(shard_grad), strict=True):
        # A parameter with no elements on this rank gets no gradient, so norms and optimizers skip it.
        if each.is_elsewhere or not (all_used or any(used[each.indices.start : each.indices.stop])):
            continue
        param = each.param
        if param.grad is None:
            set_grad(param, grad)
        else:
            param.grad.add_(grad)
        if param._post_accumulate_grad_hooks or hasattr(param, "_in_backward_optimizers"):
            hooked.append(param)
    # The user's gradient hooks and in-backward optimizers, which torch skips: the parameter is not in the graph.
    for param in hooked:
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            hook(param)
        for optimizer in getattr(param, "_in_backward_optimizers", ()):
            optimizer.step()
            optimizer.zero_grad()


def apply_hooks(hooks: Mapping[int, Callable[..., Any]], grad: torch.Tensor) -> torch.Tensor:
    """Pass a gradient through gradient hooks of a parameter that is not in the autograd graph."""
    for hook in hooks.values():
        result = hook(grad)
        grad = grad if result is None else result
    return grad


def sharded_grad_of(views: Views) -> torch.Tensor:
    """Return a copy of this rank's gradient (1-D, ``shard_numel``), zero where there is none."""
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
    for index, (is_there, grad) in enumerate(zip(there, views_of(whole, views.layout), strict=True)):
        if is_there:
            views.full_param(index).grad = views.params[index].adapter.from_local(grad)


def restore_sharded_grad(views: Views, own: torch.Tensor) -> None:
    """Copy ``own`` (1-D, ``shard_numel``) into this rank's gradient after :func:`show_full_grads`."""
    for each, grad in zip(views.visible, views.grads(), strict=True):
        if grad is not None:
            grad.copy_(each.part_of(own))


def grads_by_adapter(
    views: Views, *, one_by_one: bool = False
) -> Iterator[tuple[nn.Parameter, TensorAdapter, torch.Tensor | None]]:
    """Iterate over the parameters that an optimizer holds, each with its adapter and this rank's gradient.

    With ``one_by_one`` a flat gradient is yielded as those of its parameters, without the padding.
    """
    all_plain = all(entry.adapter is PLAIN for entry in views.params)
    for each, grad in zip(views.visible, views.grads(), strict=True):
        if not one_by_one and (len(each.indices) == 1 or all_plain):
            yield each.param, views.params[each.indices.start].adapter, grad
            continue
        for index in each.indices:
            local, part = views.local_shards[index], grad
            if grad is not None and grad.numel() != local.numel:
                part = grad[local.in_shard.to_slice()]
            yield each.param, views.params[index].adapter, part


class UnreducedGrad:
    """Shows the gradient that waits inside ``no_sync`` as the ``.grad`` of a parameter, until the next backward.

    As in FSDP1 it is this rank's own and has the unsharded shape. It shares memory with the waiting gradient, so what a
    caller does to it is done to that.

    Attributes:
        indices: the layout's parameters that the gradient is of.
    """

    __slots__ = ("_before", "_param", "_shown", "indices")

    def __init__(self, visible: VisibleParam, waiting: torch.Tensor) -> None:
        self.indices, self._param = visible.indices, visible.param
        self._before = self._param.grad
        set_grad(self._param, waiting)
        assert self._param.grad is not None
        self._shown = self._param.grad

    def take_back(self) -> bool:
        """Restore the previous ``.grad``, and return whether the caller has set the gradient to None."""
        grad = self._param.grad
        if grad is None:
            return True
        if grad is not self._shown:
            if grad.shape != self._shown.shape:
                return False  # the caller's gradient of the local shard, to which the reduced one is added
            self._shown.copy_(grad)
        set_grad(self._param, self._before)
        return False
