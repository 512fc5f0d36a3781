"""The handle: owner of one flat parameter, its gathered buffer, its leaves and its gradients.

A handle knows tensors of one process. It prepares a buffer that somebody else gathers into, and
closes a gradient that somebody else reduces; it never communicates.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn

from fsdp_flat.errors import PhaseError, UnsupportedError, UsageError
from fsdp_flat.flat._torch import is_in_a_graph, look_before_first_steps
from fsdp_flat.flat.flat_param import new_flat_parameter
from fsdp_flat.flat.flat_views import FlatViews
from fsdp_flat.flat.guards import unguarded
from fsdp_flat.flat.guise import PLAIN
from fsdp_flat.flat.optimizers import check_optimizer
from fsdp_flat.flat.orig_views import OrigViews
from fsdp_flat.flat.storage import AliasBuffer, FlatBuffer, GradientWindow, MemoryPool, PartialGrad, set_grad
from fsdp_flat.flat.untraced import untraced
from fsdp_flat.flat.views import Views
from fsdp_flat.flat.walk import FlattenedBy, ManagedParam
from fsdp_flat.layout import FlatLayout, alignment_numel

__all__ = ["FlatParamHandle", "HandleSpec", "ShardState"]


class ShardState(Enum):
    """Where a handle's parameters are."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"

    # By identity: Enum's own takes longer than the moves that look it up.
    __hash__ = object.__hash__


_LEGAL_MOVES = {
    (ShardState.SHARDED, ShardState.UNSHARDING),
    (ShardState.UNSHARDING, ShardState.UNSHARDED),
    (ShardState.UNSHARDED, ShardState.SHARDED),
}


@dataclass(frozen=True, slots=True)
class HandleSpec:
    """What a handle is built for.

    Attributes:
        unit_name: name of the unit, for error texts.
        module: the unit's module, inside wrappers for checkpoints and compilation; it shows a flat parameter.
        rank: this rank on the shard axis.
        world_size: size of the shard axis.
        num_ranks: ranks over which gradients are averaged; the tail of an unsharded layout is padded to it.
        use_orig_params: the constructor's argument.
        device: device of compute.
        shard_device: device of the shard and its gradient.
        compute_dtype: dtype of the gathered parameters; None keeps the original one.
        reduce_dtype: dtype in which gradients are reduced; None follows ``compute_dtype``.
        master_dtype: dtype of the shard; None keeps the original one.
        keep_reduce_dtype: sharded gradients stay in ``reduce_dtype``.
    """

    unit_name: str
    module: nn.Module
    rank: int
    world_size: int
    num_ranks: int
    use_orig_params: bool
    device: torch.device
    shard_device: torch.device
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    keep_reduce_dtype: bool = False

    @property
    def offloads(self) -> bool:
        """Whether shards are on the host, in pinned memory, and compute is on an accelerator."""
        return self.shard_device.type == "cpu" and self.device.type != "cpu"


class FlatParamHandle:
    """Owner of one flat parameter.

    Args:
        params: parameters of one dtype (and, with original parameters, one ``requires_grad``), at least one.
        spec: what the handle is built for.

    Attributes:
        layout: where each parameter lies.
        flat_param: the rank's shard, 1-D, ``layout.shard_numel`` elements.
        views: what modules point at.
        on_landed: called after each gradient that lands here.
        pool: where buffers take memory from and give it back to; the units of a tree share one.
        generation: how often the shard was replaced; graphs recorded before that cannot be run backward.
    """

    def __init__(self, params: Sequence[ManagedParam], spec: HandleSpec) -> None:
        self.spec = spec
        first = params[0].param
        trainable = first.dtype.is_floating_point and first.requires_grad
        self._use_dtypes((spec.master_dtype if trainable else None) or first.dtype, first.dtype)
        self.layout = FlatLayout.build(
            [(entry.fqn, tuple(entry.shape)) for entry in params],
            world_size=spec.world_size,
            align_numel=alignment_numel(self.compute_dtype.itemsize, use_orig_params=spec.use_orig_params),
            tail_multiple=spec.num_ranks if spec.use_orig_params and spec.world_size == 1 else None,
        )
        self.on_landed: Callable[[], None] = lambda: None
        look_before_first_steps(check_optimizer)
        is_split = spec.world_size > 1 or any(entry.guise.groups for entry in params)
        self.flat_param = new_flat_parameter(
            self._shard_of(params), requires_grad=first.requires_grad, is_part=is_split and not spec.use_orig_params
        )
        self.generation = 0
        self.pool = MemoryPool()
        self._state = ShardState.SHARDED
        self._window: GradientWindow | None = None
        self._spare_window: GradientWindow | None = None
        self._partial: list[PartialGrad] = []
        self._num_trainable = 0
        self._synced: list[bool] = [False] * len(params)
        self._variants: dict[torch.dtype, _Variant] = {}
        self._guises = {index: entry.guise for index, entry in enumerate(params) if entry.guise is not PLAIN}
        leaves = self._use_variant(params)
        kind = OrigViews if spec.use_orig_params else FlatViews
        self.views: Views = kind(params, leaves, self.layout, spec.rank, self.flat_param, spec.module, spec.unit_name)
        for entry, slot in zip(params, self.layout.slots, strict=True):
            entry.mark(FlattenedBy(entry.fqn, spec.unit_name, slot.shape))
        self._sync_requires_grad()

    def _use_dtypes(self, stored: torch.dtype, given: torch.dtype) -> None:
        """The shard is of dtype ``stored``; compute is in the spec's (for floats), else as the model was given."""
        spec, floating = self.spec, given.is_floating_point
        self.orig_dtype = stored
        self._low_dtype = (spec.compute_dtype if floating else None) or given
        self._reduce_dtype = (spec.reduce_dtype if floating else None) or self._low_dtype
        self.compute_dtype = self._low_dtype

    def _shard_of(self, params: Sequence[ManagedParam]) -> torch.Tensor:
        spec = self.spec
        shard = torch.empty(
            self.layout.shard_numel, dtype=self.orig_dtype, device=spec.shard_device, pin_memory=spec.offloads
        )
        own = self.layout.shard(self.spec.rank)
        for padding in self.layout.paddings():
            shard[own.intersect(padding).shift(-own.start).to_slice()].zero_()
        for piece in self.layout.shard_slots(self.spec.rank):
            flat = params[piece.index].param.detach().reshape(-1)
            shard[piece.in_shard.to_slice()].copy_(flat[piece.in_param.to_slice()])
        return shard

    def _use_variant(self, params: Sequence[ManagedParam]) -> tuple[nn.Parameter, ...]:
        """Point buffer and leaves at those of the compute dtype; they are made on first use."""
        variant = self._variants.get(self.compute_dtype)
        if variant is None:
            buffer = self._new_buffer()
            own = buffer.tensor[self.layout.shard(self.spec.rank).to_slice()]
            variant = _Variant(buffer, own, tuple(self._new_leaves(params, buffer)))
            self._variants[self.compute_dtype] = variant
            buffer.free(MemoryPool())
        self.buffer, self._own_slice = variant.buffer, variant.own_slice
        return variant.leaves

    def _new_buffer(self) -> FlatBuffer:
        shard = self.flat_param.data
        self._shard_pointer = shard.data_ptr()
        same = self.layout.world_size == 1 and self.compute_dtype == shard.dtype and self.spec.device == shard.device
        return AliasBuffer(shard) if same else FlatBuffer(self.layout.numel, self.compute_dtype, self.spec.device)

    def use_full_precision(self, full: bool) -> None:
        """Compute in the shard's own dtype from the next unshard on, or again in the low one."""
        wanted = self.orig_dtype if full else self._low_dtype
        if wanted != self.compute_dtype:
            assert self._state is ShardState.SHARDED
            self.compute_dtype = wanted
            self._show_other_leaves()

    def _show_other_leaves(self) -> None:
        self.views.use_leaves(self._use_variant(self.views.params))
        # A variant that was in use before has its flags and hooks still.
        self._synced = [leaf.requires_grad for leaf in self.views.leaves]
        self._sync_requires_grad()

    @property
    def computes_low(self) -> bool:
        """Whether compute has another dtype than the shard."""
        return self._low_dtype != self.orig_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients are reduced."""
        return self._reduce_dtype if self.compute_dtype == self._low_dtype else self.compute_dtype

    def _new_leaves(self, params: Sequence[ManagedParam], buffer: FlatBuffer) -> list[nn.Parameter]:
        leaves = []
        for entry, slot in zip(params, self.layout.slots, strict=True):
            view = buffer.tensor[slot.interval.to_slice()].view(slot.shape)
            # ``.data`` gives the leaf a version counter of its own, which refills of the buffer do not touch.
            leaf = nn.Parameter(entry.guise.shown(view.data), requires_grad=False)
            # Marks that code in forward reads off parameters (weight decay flags, parallel dims) stay readable.
            leaf.__dict__.update(entry.param.__dict__)
            leaves.append(leaf)
        return leaves

    def rename(self, unit_name: str) -> None:
        """The unit is called something else in the tree that it turned out to belong to."""
        self.spec = replace(self.spec, unit_name=unit_name)
        self.views.unit_name = unit_name
        for entry, slot in zip(self.views.params, self.layout.slots, strict=True):
            entry.mark(FlattenedBy(entry.fqn, unit_name, slot.shape))

    # -- where the data is ---------------------------------------------------------------------------------------

    @property
    def state(self) -> ShardState:
        """Where the parameters are; written by this class alone."""
        return self._state

    def _move(self, target: ShardState) -> None:
        if (self._state, target) not in _LEGAL_MOVES:
            raise PhaseError(
                f"Unit {self.spec.unit_name!r} cannot go from {self._state.value} to {target.value} on rank "
                f"{self.spec.rank} of its shard group. This is a defect of fsdp_flat; please report the traceback."
            )
        self._state = target

    def begin_unshard(self) -> torch.Tensor:
        """Give the buffer memory, put the own shard in place, and return it to be gathered into."""
        self._move(ShardState.UNSHARDING)
        self.buffer.alloc(self.pool)
        with unguarded():
            shard = self.flat_param.data
        if self.spec.offloads:
            # In the shard's dtype first: a copy that converts on the way would wait for the host.
            self._own_slice.copy_(shard.to(self.spec.device, non_blocking=True))
        elif not isinstance(self.buffer, AliasBuffer):
            self._own_slice.copy_(shard)
        return self.buffer.tensor

    def finish_unshard(self) -> None:
        """The buffer is filled."""
        self._move(ShardState.UNSHARDED)

    def reshard(self) -> None:
        """The parameters are used no more; :meth:`free` has to follow, unless :meth:`reuse` takes the buffer back."""
        self._move(ShardState.SHARDED)

    def free(self) -> None:
        """Free the buffer that :meth:`reshard` has left."""
        assert self._state is ShardState.SHARDED
        self.buffer.free(self.pool)

    def reuse(self) -> None:
        """Be unsharded with the buffer that :meth:`reshard` has left."""
        self._move(ShardState.UNSHARDING)
        self._move(ShardState.UNSHARDED)

    def abandon(self) -> None:
        """After an exception: sharded again whatever was going on, and no gradient kept."""
        self._state = ShardState.SHARDED
        self.buffer.free(self.pool)
        self.views.show_shard()
        self.drop_gradient()

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter here is to get a gradient."""
        return self._num_trainable > 0

    @property
    def is_in_a_graph(self) -> bool:
        """Whether somebody holds an autograd graph through which gradients can still come."""
        return any(leaf.requires_grad and is_in_a_graph(leaf) for leaf in self.views.leaves)

    def show_full(self) -> None:
        """Point the modules at the leaves, which follow what the user set ``requires_grad`` to."""
        self._sync_requires_grad()
        self.views.show_full()

    def _sync_requires_grad(self) -> None:
        leaves, before = self.views.leaves, self._synced
        shown = [leaf.requires_grad for leaf in leaves]
        if shown != before:
            self.views.adopt_requires_grad(shown, before)
        wanted = self.views.requires_grad()
        if wanted == shown == before:
            return
        for index, (leaf, want, was) in enumerate(zip(leaves, wanted, before, strict=True)):
            leaf.requires_grad_(want)
            if want and not was:
                leaf.register_post_accumulate_grad_hook(_landing(self, index))
            elif was and not want:
                leaf._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._synced = wanted
        self._num_trainable = sum(wanted)

    @untraced
    def _landed(self, index: int, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return  # the graph reaches the leaf, but nothing of the loss comes from there: an output nobody used
        if grad.requires_grad:
            raise UnsupportedError(
                f"A gradient of {self.layout.slots[index].fqn!r} (unit {self.spec.unit_name!r}) is itself "
                "differentiable (create_graph=True). Second-order gradients through sharded parameters are not "
                "supported; take them with respect to inputs by torch.autograd.grad, or leave these modules unwrapped."
            )
        if self._partial:
            self._withdraw_partial()
        if self._window is None:
            self._window = self._new_window(grad.device)
        grad = grad.detach()
        views = self.views
        with unguarded():
            is_hooked = views.hooks[index] or views.params[index].param._backward_hooks
        if is_hooked:
            grad = views.run_hooks(index, grad)
        if self._guises:
            grad = self._guises.get(index, PLAIN).local(grad)
        self._window.land(index, grad)
        self.on_landed()

    def _new_window(self, device: torch.device) -> GradientWindow:
        window, self._spare_window = self._spare_window, None
        if window is None or not window.fits(self.window_dtype, device):
            return GradientWindow(self.layout, self.window_dtype, device)
        return window

    @property
    def num_landed(self) -> int:
        """Parameters that have a gradient waiting here."""
        return 0 if self._window is None else self._window.num_landed

    @property
    def landed(self) -> bytes:
        """One byte a parameter: 1 where a gradient waits here."""
        return bytes(len(self.layout.slots)) if self._window is None else bytes(self._window.landed)

    def _landed_slots(self) -> list[int]:
        return [index for index, has_landed in enumerate(self.landed) if has_landed]

    def take_landed(self) -> bytes:
        """As :attr:`landed`, for gradients about to be reduced: those that the caller has cleared are dropped."""
        self._withdraw_partial()
        return self.landed

    def take_gradient(self) -> tuple[torch.Tensor, GradientWindow | None]:
        """The flat gradient (1-D, ``layout.numel``, reduce dtype), zero where nothing came; it leaves the handle.

        Returns:
            The gradient, and what to :meth:`recycle` once nobody needs it any more, if there is anything.
        """
        self._withdraw_partial()
        window, self._window = self._window, None
        if window is None:
            return torch.zeros(self.layout.numel, dtype=self.reduce_dtype, device=self.spec.device), None
        closed = window.close(self.pool)
        flat = closed.to(self.reduce_dtype)
        if flat is not closed:
            self.recycle(window)
            return flat, None
        return flat, window

    def recycle(self, window: GradientWindow) -> None:
        """Keep an emptied window for the next gradient; its memory is free for others."""
        if not window.is_shown:
            window.release(self.pool)
            self._spare_window = window

    @property
    def window_dtype(self) -> torch.dtype:
        """Dtype in which gradients wait: never shorter than that in which they are computed."""
        return torch.promote_types(self.compute_dtype, self.reduce_dtype)

    def drop_gradient(self) -> None:
        """Forget what came."""
        self._window = None
        for shown in self._partial:
            shown.withdraw()
        self._partial = []
        for leaf in self.views.leaves:
            leaf.grad = None

    def show_partial(self, copy_to: Callable[[torch.Tensor, torch.device, torch.dtype], torch.Tensor]) -> None:
        """Inside ``no_sync``: lets ``.grad`` show this rank's part of the waiting gradient, not yet reduced.

        It costs no memory, unless shards are offloaded, and shows by its absence that the caller has cleared the
        gradients.

        Args:
            copy_to: copies a tensor to another device and dtype, if it is not there.
        """
        if self._window is not None and not self._partial:
            self._window.is_shown = True
            own = self._window.close(self.pool)[self.layout.shard(self.spec.rank).to_slice()]
            self._partial = self.views.show_partial(copy_to(own, self.spec.shard_device, self.orig_dtype), self.landed)

    def _withdraw_partial(self) -> None:
        partial, self._partial = self._partial, []
        if not partial:
            return
        kept = [shown for shown in partial if not shown.is_cleared]
        if any(shown.is_changed for shown in kept):
            raise UsageError(
                f"Gradients of unit {self.spec.unit_name!r} were changed in place between backwards inside no_sync. "
                "There they are this rank's own, not yet reduced, and it holds a slice of them only: scale or clip "
                "after the first backward outside of no_sync."
            )
        hidden = set(self._landed_slots()).difference(*(shown.slots for shown in partial))
        if hidden and kept and len(kept) < len(partial):
            raise UsageError(
                f"Gradients of some parameters of unit {self.spec.unit_name!r} were cleared between backwards inside "
                f"no_sync, and others were kept. Rank {self.spec.rank} of the shard group has no elements of "
                f"{self.layout.slots[min(hidden)].fqn!r}, so no .grad that shows whether its gradient is one of them. "
                "Clear all gradients of a unit at once, or clear some after the first backward outside of no_sync."
            )
        for shown in partial:
            if self._window is not None and shown not in kept:
                for index in shown.slots:
                    self._window.forget(index)
            shown.withdraw()
        if not kept:
            self._window = None

    # -- whole-module changes ------------------------------------------------------------------------------------

    def adopt_changes(self) -> None:
        """Take over what the user assigned to sharded parameters or to the flat parameter's data."""
        with unguarded():
            if not self._is_current(self.flat_param.data):
                self.convert(lambda tensor: tensor)
            self.views.adopt_changes()

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` (``Module.to`` and its like) to the shard and rebuild what is made of it."""
        was_partial = bool(self._partial)
        self._withdraw_partial()
        with unguarded():
            self._convert(fn)
        if was_partial:
            self.show_partial(lambda tensor, device, dtype: tensor.to(device=device, dtype=dtype))

    def _convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        converted = fn(self.flat_param.data)
        if self.spec.offloads and converted.device.type == "cpu":
            converted = converted.pin_memory()
        grad, self.flat_param.grad = self.flat_param.grad, None
        self.flat_param.data = converted
        if grad is not None:
            set_grad(self.flat_param, fn(grad))
        if not self._is_current(converted):
            self._rebuild(converted)

    def _rebuild(self, converted: torch.Tensor) -> None:
        self.generation += 1
        self._use_dtypes(converted.dtype, converted.dtype)
        moved = converted.device != self.spec.shard_device
        self.spec = replace(
            self.spec, shard_device=converted.device, device=converted.device if moved else self.spec.device
        )
        self._variants.clear()
        self._show_other_leaves()
        self.views.bind_shard(rebuilt=True)
        self.views.show_shard()

    def is_changed_by(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Whether ``fn`` gives tensors another dtype or device."""
        probe = fn(self.flat_param.data[:0])
        return probe.dtype != self.orig_dtype or probe.device != self.spec.shard_device

    def _is_current(self, shard: torch.Tensor) -> bool:
        return (
            shard.data_ptr() == self._shard_pointer
            and shard.dtype == self.orig_dtype
            and shard.device == self.spec.shard_device
        )

    def copy_to(self, params: Sequence[ManagedParam], module: nn.Module, flat_param: nn.Parameter) -> FlatParamHandle:
        """An independent handle of the same layout on copies of the modules; gradients are not copied.

        Args:
            params: the managed parameters of the copy, in the layout's order, with their places in the copied modules.
            module: the copy of the spec's module.
            flat_param: the copy of the shard, from :func:`new_flat_parameter`.
        """
        twin = copy.copy(self)
        twin.spec = replace(self.spec, module=module)
        twin.flat_param = flat_param
        twin.on_landed = lambda: None
        twin._state = ShardState.SHARDED
        twin._window, twin._spare_window, twin._partial = None, None, []
        twin.pool = MemoryPool()
        twin._num_trainable, twin._synced, twin._variants = 0, [False] * len(params), {}
        leaves = twin._use_variant(params)
        spec = twin.spec
        twin.views = type(self.views)(params, leaves, twin.layout, spec.rank, flat_param, module, spec.unit_name)
        twin._sync_requires_grad()
        return twin


def _landing(handle: FlatParamHandle, index: int) -> Callable[[torch.Tensor], None]:
    """The hook of leaf ``index``. It must not own the handle, which holds the leaf's autograd node: a cycle through
    autograd's C++ objects is never collected, and with it no wrapped model would ever be freed."""
    owner = weakref.ref(handle)

    def landed(leaf: torch.Tensor) -> None:
        there = owner()
        if there is not None:
            there._landed(index, leaf)

    return landed


@dataclass(frozen=True, slots=True)
class _Variant:
    """A gathered buffer, this rank's slice of it and the leaves that view it, in one compute dtype."""

    buffer: FlatBuffer
    own_slice: torch.Tensor
    leaves: tuple[nn.Parameter, ...]
