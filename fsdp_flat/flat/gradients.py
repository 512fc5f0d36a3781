"""Collects the gradients of a handle until they are reduced, and sets those of the parameters of an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import UnsupportedError, UsageError
from fsdp_flat.flat._torch import dynamo_disabled, dynamo_disabled_here, is_in_a_graph, unguarded
from fsdp_flat.flat.arrangement import VisibleParam, views_of
from fsdp_flat.flat.params import PLAIN, ManagedParam, TensorAdapter
from fsdp_flat.flat.sharded_grad import ShardedGrad, UnreducedGrad, set_grad
from fsdp_flat.flat.storage import FlatGradBuffer, MemoryPool
from fsdp_flat.flat.views import Views

# Number of gradients between two calls of on_ready, which looks for completed reductions: a system call a rank.
_GRADS_PER_CALL = 8


@dataclass(slots=True)
class ReduceScatteredGrad:
    """Holds this rank's shard of a gradient that is summed over the shard group, and not over the replicate group yet.

    Attributes:
        shard: the sum, 1-D, in the reduce dtype; None if there is none, or once another gradient contains it.
        used: for each parameter, whether any rank has used it; empty if that is not known.
    """

    shard: torch.Tensor | None = None
    used: Sequence[int] = ()

    def add(self, shard: torch.Tensor) -> None:
        """Add another sum."""
        self.shard = shard if self.shard is None else self.shard.add_(shard)

    def add_used(self, used: Sequence[int]) -> None:
        """Add the parameters that another backward has used."""
        self.used = bytes(map(max, used, self.used)) if self.used else used

    def take(self) -> torch.Tensor | None:
        """Return the sum and remove it."""
        shard, self.shard = self.shard, None
        return shard


class HandleGradients:
    """Collects the gradients of a handle's unsharded parameters until they are reduced.

    Args:
        params: the parameters as they were when they were flattened, with the user's gradient hooks.
        views: the handle's views.

    Attributes:
        on_ready: called after the first gradient of the handle in a backward, and again after every few.
        open_buffer: the buffer that takes a parameter's first gradient without a call of :meth:`accept`: from the
            first gradient of a backward, once ``on_ready`` has returned, to :meth:`end_backward`; else None. None too
            if a parameter is a DTensor of the caller's, whose gradients have to be converted.
        buffer_dtype: dtype of waiting gradients, at least as wide as the compute dtype and ``reduce_dtype``.
        partial: gradient that a later backward completes.
        hooks: the gradient hooks of each parameter before it was flattened, or None.
    """

    buffer_dtype: torch.dtype
    reduce_dtype: torch.dtype

    def __init__(self, params: Sequence[ManagedParam], views: Views) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self.num_trainable = 0
        self.views = views
        self._layout = views.layout
        self.hooks = [entry.param._backward_hooks for entry in params]
        self._are_plain = all(entry.adapter is PLAIN for entry in params)
        self._synced = [False] * len(params)
        self._hook = partial(_accept, weakref.ref(self))
        self._buffer: FlatGradBuffer | None = None
        self.open_buffer: FlatGradBuffer | None = None
        self._num_accepted = 0  # in this backward
        self._spare_buffer: FlatGradBuffer | None = None
        self._unreduced: list[_UnreducedLocalGrad] = []
        self.partial = ReduceScatteredGrad()

    # -- gradients of unsharded parameters -----------------------------------------------------------------------

    def use_dtypes(self, compute_dtype: torch.dtype, reduce_dtype: torch.dtype, device: torch.device) -> None:
        """Follow the views to other unsharded parameters, of ``compute_dtype``, on ``device``."""
        self.buffer_dtype = torch.promote_types(compute_dtype, reduce_dtype)
        self.reduce_dtype, self._device = reduce_dtype, device
        # Unsharded parameters that were in use before still have their flags and hooks.
        self._synced = [param.requires_grad for param in self.views.unsharded_params]
        self.sync_requires_grad()

    def sync_requires_grad(self) -> None:
        """Give the unsharded parameters the ``requires_grad`` that the user set, and hooks for their gradients."""
        unsharded_params, before = self.views.unsharded_params, self._synced
        shown = [param.requires_grad for param in unsharded_params]
        if shown != before:
            self.views.adopt_requires_grad(shown, before)
        wanted = self.views.requires_grad()
        if wanted == shown == before:
            return
        for index, (param, want, was) in enumerate(zip(unsharded_params, wanted, before, strict=True)):
            param.requires_grad_(want)
            if want and not was:
                param._fsdp_flat_index = index  # type: ignore[attr-defined]
                param.register_post_accumulate_grad_hook(self._hook)
            elif was and not want:
                param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._synced = wanted
        self.num_trainable = sum(wanted)

    @property
    def are_in_a_graph(self) -> bool:
        """Return whether a caller holds an autograd graph that can still produce gradients."""
        return any(param.requires_grad and is_in_a_graph(param) for param in self.views.unsharded_params)

    @dynamo_disabled
    def accept(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient of unsharded parameter ``index`` (its shape), which waits until it is reduced.

        Raises:
            UnsupportedError: it is differentiable.
            UsageError: a gradient hook changes its shape.
        """
        if grad.requires_grad:
            raise UnsupportedError(
                f"A gradient of {self._layout.param_infos[index].fqn!r} (unit {self.views.unit_name!r}) is itself "
                "differentiable (create_graph=True). Second-order gradients through sharded parameters are not "
                "supported; take them with respect to inputs by torch.autograd.grad, or leave these modules unwrapped."
            )
        if self._unreduced:
            self.hide_unreduced()
        if self._buffer is None:
            self._buffer = self._new_buffer(grad.device)
        entry = self.views.params[index]
        hooks = entry.param._backward_hooks or self.hooks[index]
        if hooks:
            shape, grad = grad.shape, apply_hooks(hooks, grad)
            if grad.shape != shape:
                raise UsageError(
                    f"A gradient hook of {self._layout.param_infos[index].fqn!r} (unit {self.views.unit_name!r}) "
                    f"returned a tensor of shape {tuple(grad.shape)} on rank {self.views.rank} of the shard group; "
                    f"expected the gradient's shape {tuple(shape)}. Return a tensor of this shape, or None."
                )
        if entry.adapter is not PLAIN:
            grad = entry.adapter.to_local(grad)
        self._buffer.add_grad(index, grad)
        if self._num_accepted % _GRADS_PER_CALL == 0:
            self.on_ready()
        self._num_accepted += 1
        self.open_buffer = self._buffer if self._are_plain else None

    def end_backward(self) -> None:
        """Have the next gradient count as the first one of a backward."""
        self.open_buffer, self._num_accepted = None, 0

    def _new_buffer(self, device: torch.device) -> FlatGradBuffer:
        spare, self._spare_buffer = self._spare_buffer, None
        fits = spare is not None and spare.fits(self.buffer_dtype, device)
        return spare if spare and fits else FlatGradBuffer(self._layout, self.buffer_dtype, device)

    # -- waiting gradients ---------------------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        """Number of parameters whose gradient waits."""
        return sum(self.ready)

    @property
    def ready(self) -> bytes:
        """One byte per parameter: 1 where a gradient waits."""
        return bytes(len(self._layout.param_infos)) if self._buffer is None else bytes(self._buffer.grads_ready)

    def take_ready(self) -> bytes:
        """Drop gradients that the caller has cleared, and return :attr:`ready`, before gradients are reduced."""
        self.hide_unreduced()
        return self.ready

    def take(self, pool: MemoryPool) -> tuple[torch.Tensor, FlatGradBuffer | None]:
        """Return the flat gradient, with memory from ``pool``, and remove it.

        Returns:
            The gradient (1-D, ``layout.numel``, reduce dtype), zero for parameters without one; and its buffer, to
            :meth:`recycle` once the gradient is no longer used, or None.
        """
        self.hide_unreduced()
        self.end_backward()
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return torch.zeros(self._layout.numel, dtype=self.reduce_dtype, device=self._device), None
        closed = buffer.close(pool)
        if closed.dtype == self.reduce_dtype:
            return closed, buffer
        flat = closed.to(self.reduce_dtype)
        self.recycle(buffer, pool)
        return flat, None

    def recycle(self, buffer: FlatGradBuffer, pool: MemoryPool) -> None:
        """Keep a used buffer object for the next gradient, and return its memory to ``pool``."""
        if not buffer.is_exposed:
            buffer.release(pool)
            self._spare_buffer = buffer

    def drop(self) -> None:
        """Drop all gradients."""
        self.end_backward()
        self._buffer = None
        self.partial = ReduceScatteredGrad()
        for shown in self._unreduced:
            shown.take_back()
        self._unreduced = []
        for unsharded_param in self.views.unsharded_params:
            unsharded_param.grad = None

    def zero(self) -> None:
        """Fill all gradients that are not reduced yet with zeros; exposed ones are the caller's to fill."""
        if self._buffer is not None:
            self._buffer.clear(range(len(self.ready)), set_to_none=False)
        if self.partial.shard is not None:
            self.partial.shard.zero_()
        for unsharded_param in self.views.unsharded_params:
            if unsharded_param.grad is not None:
                unsharded_param.grad.zero_()

    # -- unreduced gradients inside no_sync ----------------------------------------------------------------------

    def expose_unreduced(self, pool: MemoryPool, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Set ``.grad`` to this rank's shard of the waiting, unreduced gradient inside ``no_sync``.

        A later missing ``.grad`` means that the caller has cleared it. It costs no memory unless shards are offloaded:
        ``convert`` converts a tensor to the shard's dtype and device.
        """
        views = self.views
        if self._buffer is None or self._unreduced or not views.exposes_unreduced:
            return
        self._buffer.is_exposed = True
        shard = convert(self._buffer.close(pool)[self._layout.shard(views.rank).to_slice()])
        ready = self.ready
        there = [each for each in views.visible if any(ready[each.indices.start : each.indices.stop])]
        # If this rank has no elements of any of them, empty gradients show whether the caller has cleared them.
        with unguarded():
            self._unreduced = [
                _UnreducedLocalGrad(each, each.part_of(shard), is_split=views.is_split)
                for each in [each for each in there if not each.is_elsewhere] or there
            ]

    def hide_unreduced(self) -> bool:
        """Undo :meth:`expose_unreduced`, and drop gradients that the caller has cleared; return whether any was set.

        Zeros are a gradient: the optimizer of each rank steps a parameter with them, also where another rank had none.

        Raises:
            UsageError: gradients were changed, or some were cleared and this rank cannot know which.
        """
        shown, self._unreduced = self._unreduced, []
        if not shown:
            return False
        with unguarded():
            changes = [(each, each.change()) for each in shown]
            dropped = [each for each, change in changes if change is _Change.DROPPED]
            zeroed = [each for each, change in changes if change is _Change.ZEROED]
            hidden = {index for index, is_ready in enumerate(self.ready) if is_ready}
            hidden.difference_update(*(each.indices for each in shown))
            self._check_changes([change for _, change in changes], hidden)
            for each in shown:
                each.take_back()
        all_cleared = len(dropped) + len(zeroed) == len(shown)
        if self._buffer is not None:
            without = hidden if all_cleared and not zeroed else set()
            with_zeros = hidden if all_cleared and zeroed else set()
            self._buffer.clear(without.union(*(each.indices for each in dropped)), set_to_none=True)
            self._buffer.clear(with_zeros.union(*(each.indices for each in zeroed)), set_to_none=False)
            if not any(self._buffer.grads_ready):
                self._buffer = None
                self.end_backward()
        return True

    def _check_changes(self, changes: Sequence[_Change], hidden: set[int]) -> None:
        views = self.views
        if _Change.WRITTEN in changes:
            raise UsageError(
                f"Gradients of unit {views.unit_name!r} were changed in place between backwards inside no_sync. There "
                "they are this rank's own, not yet reduced, and it holds a local shard of them only: scale or clip "
                "after the first backward outside of no_sync."
            )
        num_kept = changes.count(_Change.NONE)
        if hidden and 0 < num_kept < len(changes):
            raise UsageError(
                f"Gradients of some parameters of unit {views.unit_name!r} were cleared between backwards inside "
                f"no_sync, and others were kept. Rank {views.rank} of the shard group has no elements of "
                f"{self._layout.param_infos[min(hidden)].fqn!r}, so no .grad that shows whether its gradient is one of "
                "them. Clear all gradients of a unit at once, or clear some after the first backward outside of "
                "no_sync."
            )


class _Change(Enum):
    """Enumerates the changes that a caller makes to an unreduced gradient."""

    NONE = 0
    DROPPED = 1
    ZEROED = 2
    WRITTEN = 3


class _UnreducedLocalGrad:
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

    def change(self) -> _Change:
        """Return the caller's change since the gradient was shown; one that replaces the tensor is none."""
        grad = self._param.grad
        if grad is None:
            return _Change.DROPPED
        if grad is not self._grad or grad._version == self._version:
            return _Change.NONE
        if not grad.count_nonzero():
            return _Change.ZEROED
        return _Change.WRITTEN if self._before is None else _Change.NONE

    def take_back(self) -> None:
        """Restore the previous ``.grad``; a gradient that was filled with zeros stays zero, as in plain torch."""
        param, before = self._param, self._before
        if param.grad is self._grad:
            if before is None and param.numel() > 0 and self.change() is _Change.ZEROED:
                before = torch.zeros_like(param)
                before = ShardedGrad.of(before, param) if self._is_split else before
            set_grad(param, before)


@dynamo_disabled_here
def _accept(gradients: weakref.ref[HandleGradients], unsharded_param: torch.Tensor) -> None:
    """Take the gradient of an unsharded parameter, as its post-accumulate-grad hook.

    The hook must not own the gradients, which hold the parameter's autograd node: a cycle through autograd's C++
    objects is never collected, so no wrapped model would ever be freed. It runs once a gradient, so it does what most
    gradients need by itself.
    """
    owner, grad = gradients(), unsharded_param.grad
    # The graph may reach the parameter although the loss does not depend on it: an unused output.
    if owner is None or grad is None:
        return
    unsharded_param.grad = None
    buffer, index = owner.open_buffer, unsharded_param._fsdp_flat_index  # type: ignore[attr-defined]
    if buffer is None or buffer.grads_ready[index] or grad.requires_grad or grad.is_sparse:
        owner.accept(index, grad)
        return
    if owner.views.params[index].param._backward_hooks or owner.hooks[index]:
        owner.accept(index, grad)
        return
    buffer.grads_ready[index] = 1
    buffer.waiting[index] = grad
    if not len(buffer.waiting) % _GRADS_PER_CALL:
        owner.on_ready()


# -- gradients of the parameters of an optimizer ---------------------------------------------------------------------


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
                param.grad.add_(grad)
            else:
                set_grad(param, ShardedGrad.of(grad, param) if views.is_split else grad)
            if param._post_accumulate_grad_hooks or hasattr(param, "_in_backward_optimizers"):
                hooked.append(param)
    for param in hooked:
        _run_grad_hooks(param)


def apply_hooks(hooks: Mapping[int, Callable[..., Any]], grad: torch.Tensor) -> torch.Tensor:
    """Pass a gradient through gradient hooks of a parameter that is not in the autograd graph."""
    for hook in hooks.values():
        result = hook(grad)
        grad = grad if result is None else result
    return grad


def _run_grad_hooks(param: nn.Parameter) -> None:
    """Run the user's gradient hooks and in-backward optimizers, which torch skips: ``param`` is not in the graph."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)
    for optimizer in getattr(param, "_in_backward_optimizers", ()):
        optimizer.step()
        optimizer.zero_grad()


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
