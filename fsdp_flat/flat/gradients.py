"""Reads and sets the gradients of the parameters that an optimizer holds: reduced, unreduced, or full in a summon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from fsdp_flat.flat.arrangement import VisibleParam, views_of
from fsdp_flat.flat.guards import ShardedGrad, UnreducedGrad, set_grad
from fsdp_flat.flat.params import PLAIN, TensorAdapter
from fsdp_flat.flat.torch_flat import unguarded
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
    with unguarded():
        for each, grad in zip(views.visible, views.reduced_grads(shard_grad), strict=True):
            # A parameter with no elements on this rank gets no gradient, so norms and optimizers skip it.
            if each.is_elsewhere or not (all_used or any(used[each.indices.start : each.indices.stop])):
                continue
            param = each.param
            if param.grad is not None:
                grad = param.grad.add_(grad)
            # A gradient of an earlier step, of the caller, or made by autograd itself is not marked yet.
            if views.is_split and type(grad) is torch.Tensor:
                grad = ShardedGrad.of(grad, param)
            if grad is not param.grad:
                set_grad(param, grad)
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
    for index, (is_there, grad) in enumerate(zip(there, views_of(whole, views.layout), strict=True)):
        if is_there:
            views.full_param(index).grad = views.params[index].adapter.from_local(grad)


def restore_sharded_grad(views: Views, own: torch.Tensor) -> None:
    """Copy ``own`` (1-D, ``shard_numel``) into this rank's gradient after :func:`show_full_grads`."""
    with unguarded():
        for each, grad in zip(views.visible, views.grads(), strict=True):
            if grad is not None:
                grad.copy_(each.part_of(own))


def grads_by_adapter(views: Views, *, one_by_one: bool = False) -> Iterator[tuple[TensorAdapter, torch.Tensor | None]]:
    """Iterate over this rank's gradients for the optimizer, each with the adapter of its parameter.

    With ``one_by_one`` a flat gradient is yielded as those of its parameters, without the padding.
    """
    all_plain = all(entry.adapter is PLAIN for entry in views.params)
    for each, grad in zip(views.visible, views.grads(), strict=True):
        if not one_by_one and (len(each.indices) == 1 or all_plain):
            yield views.params[each.indices.start].adapter, grad
            continue
        for index in each.indices:
            local, part = views.local_shards[index], grad
            if grad is not None and grad.numel() != local.numel:
                part = grad[local.in_shard.to_slice()]
            yield views.params[index].adapter, part


class GradChange(Enum):
    """Enumerates the changes that a caller makes to an unreduced gradient."""

    NONE = 0
    DROPPED = 1
    ZEROED = 2
    WRITTEN = 3


class UnreducedLocalGrad:
    """Sets the ``.grad`` of a parameter between two backwards inside ``no_sync``, and restores it afterwards."""

    __slots__ = ("_before", "_grad", "_is_split", "_param", "_version", "indices")

    def __init__(self, visible: VisibleParam, local_shard: torch.Tensor, *, is_split: bool) -> None:
        self.indices, self._param, self._is_split = visible.indices, visible.param, is_split
        self._before = self._param.grad
        # An existing gradient is reduced, but a step must wait until the local gradient that adds to it is reduced.
        shown = local_shard.to(self._param.dtype) if self._before is None else self._before
        set_grad(self._param, UnreducedGrad.of(shown, self._param))
        self._grad = self._param.grad
        assert self._grad is not None
        self._version = self._grad._version

    def change(self) -> GradChange:
        """Return the caller's change since the gradient was shown; one that replaces the tensor is none."""
        grad = self._param.grad
        if grad is None:
            return GradChange.DROPPED
        if grad is not self._grad or grad._version == self._version:
            return GradChange.NONE
        if not grad.count_nonzero():
            return GradChange.ZEROED
        return GradChange.WRITTEN if self._before is None else GradChange.NONE

    def take_back(self) -> None:
        """Restore the previous ``.grad``; a gradient that was filled with zeros stays zero, as in plain torch."""
        param, before = self._param, self._before
        if param.grad is self._grad:
            if before is None and param.numel() > 0 and self.change() is GradChange.ZEROED:
                before = torch.zeros_like(param)
                before = ShardedGrad.of(before, param) if self._is_split else before
            set_grad(param, before)
