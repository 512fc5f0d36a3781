"""Defines the handle, which owns a flat parameter, its unsharded buffer, unsharded parameters and gradients.

A handle never communicates. It allocates the buffer that another object all-gathers into, and prepares the flat
gradient that another object reduces.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from fsdp_flat.errors import PhaseError, UnsupportedError, UsageError
from fsdp_flat.flat._torch import dynamo_disabled, is_in_a_graph
from fsdp_flat.flat.flat_views import FlatViews
from fsdp_flat.flat.guards import new_flat_parameter, unguarded
from fsdp_flat.flat.handle_spec import LEGAL_MOVES, HandleSpec, ShardState
from fsdp_flat.flat.optimizers import check_before_first_step
from fsdp_flat.flat.orig_views import OrigViews
from fsdp_flat.flat.storage import (
    AliasBuffer,
    DtypeBuffer,
    Expiry,
    FlatBuffer,
    FlatGradBuffer,
    MemoryPool,
    UnreducedLocalGrad,
    set_grad,
)
from fsdp_flat.flat.tensor_adapter import PLAIN
from fsdp_flat.flat.views import Views
from fsdp_flat.flat.walk import FlattenedBy, ManagedParam
from fsdp_flat.layout import FlatLayout, alignment_numel

__all__ = ["FlatParamHandle"]


class FlatParamHandle:
    """Owns one flat parameter.

    Args:
        params: at least one parameter, all of one dtype (and one ``requires_grad`` with ``use_orig_params=True``).
        spec: the handle's configuration.

    Attributes:
        layout: the flat layout.
        flat_param: the rank's shard, 1-D, ``layout.shard_numel`` elements.
        views: the tensors that the modules point at.
        on_grad_ready: called after each gradient that the handle receives.
        pool: memory pool of the buffers; the units of a tree share one.
        storage_epoch: number of times the shard was replaced; graphs recorded before that cannot be run backward.
    """

    def __init__(self, params: Sequence[ManagedParam], spec: HandleSpec) -> None:
        self.spec = spec
        self._offloads = spec.offloads
        first = params[0].param
        trainable = first.dtype.is_floating_point and first.requires_grad
        self._use_dtypes((spec.master_dtype if trainable else None) or first.dtype, first.dtype)
        self.layout = FlatLayout.build(
            [(entry.fqn, tuple(entry.shape)) for entry in params],
            world_size=spec.world_size,
            align_numel=alignment_numel(self.compute_dtype.itemsize, use_orig_params=spec.use_orig_params),
            tail_multiple=spec.num_ranks if spec.use_orig_params and spec.world_size == 1 else None,
        )
        self.on_grad_ready: Callable[[], None] = lambda: None
        check_before_first_step()
        is_split = spec.world_size > 1 or any(entry.adapter.groups for entry in params)
        self.flat_param = new_flat_parameter(
            self._shard_of(params), requires_grad=first.requires_grad, is_sharded=is_split and not spec.use_orig_params
        )
        self.storage_epoch = 0
        self.pool = MemoryPool()
        self._state = ShardState.SHARDED
        self._grad_buffer: FlatGradBuffer | None = None
        self._spare_grad_buffer: FlatGradBuffer | None = None
        self._unreduced: list[UnreducedLocalGrad] = []
        self._num_trainable = 0
        self._synced: list[bool] = [False] * len(params)
        self._dtype_buffers: dict[torch.dtype, DtypeBuffer] = {}
        self._adapters = {index: entry.adapter for index, entry in enumerate(params) if entry.adapter is not PLAIN}
        unsharded_params = self._use_dtype_buffer(params)
        kind = OrigViews if spec.use_orig_params else FlatViews
        self.views: Views = kind(
            params, unsharded_params, self.layout, spec.rank, self.flat_param, spec.module, spec.unit_name
        )
        self._mark_params()
        self._sync_requires_grad()

    def _use_dtypes(self, stored: torch.dtype, given: torch.dtype) -> None:
        """Set the shard's dtype to ``stored``, and the compute dtype to the spec's (floats only) or else ``given``."""
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
        for local_shard in self.layout.local_shards(self.spec.rank):
            flat = params[local_shard.index].param.detach().reshape(-1)
            shard[local_shard.in_shard.to_slice()].copy_(flat[local_shard.in_param.to_slice()])
        return shard

    def _use_dtype_buffer(self, params: Sequence[ManagedParam]) -> tuple[nn.Parameter, ...]:
        """Select the buffer and the unsharded parameters of the compute dtype; they are created on first use."""
        dtype_buffer = self._dtype_buffers.get(self.compute_dtype)
        if dtype_buffer is None:
            buffer = self._new_buffer()
            own = buffer.tensor[self.layout.shard(self.spec.rank).to_slice()]
            unsharded_params = tuple(self._new_unsharded_params(params, buffer))
            # What nothing is freed of cannot be used too late.
            expiry = Expiry(() if isinstance(buffer, AliasBuffer) else unsharded_params)
            dtype_buffer = DtypeBuffer(buffer, own, unsharded_params, expiry)
            self._dtype_buffers[self.compute_dtype] = dtype_buffer
            expiry.expire()
            buffer.free(MemoryPool())
        self.buffer, self._own_slice, self._expiry = dtype_buffer.buffer, dtype_buffer.own_slice, dtype_buffer.expiry
        return dtype_buffer.unsharded_params

    def _new_buffer(self) -> FlatBuffer:
        shard = self.flat_param.data
        self._shard_pointer = shard.data_ptr()
        same = self.layout.world_size == 1 and self.compute_dtype == shard.dtype and self.spec.device == shard.device
        return AliasBuffer(shard) if same else FlatBuffer(self.layout.numel, self.compute_dtype, self.spec.device)

    def use_full_precision(self, full: bool) -> None:
        """Switch compute to the shard's dtype from the next unshard on, or back to the low-precision dtype."""
        wanted = self.orig_dtype if full else self._low_dtype
        if wanted != self.compute_dtype:
            assert self._state is ShardState.SHARDED
            self.compute_dtype = wanted
            self._switch_unsharded_params()

    def _switch_unsharded_params(self) -> None:
        self.views.use_unsharded_params(self._use_dtype_buffer(self.views.params))
        # Unsharded parameters that were in use before still have their flags and hooks.
        self._synced = [unsharded_param.requires_grad for unsharded_param in self.views.unsharded_params]
        self._sync_requires_grad()

    @property
    def uses_low_precision(self) -> bool:
        """Return whether compute has a different dtype than the shard."""
        return self._low_dtype != self.orig_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients are reduced."""
        return self._reduce_dtype if self.compute_dtype == self._low_dtype else self.compute_dtype

    def _new_unsharded_params(self, params: Sequence[ManagedParam], buffer: FlatBuffer) -> list[nn.Parameter]:
        unsharded_params = []
        for entry, param_info in zip(params, self.layout.param_infos, strict=True):
            view = buffer.tensor[param_info.interval.to_slice()].view(param_info.shape)
            # ``.data`` gives the parameter a separate version counter, which refills of the buffer do not change.
            unsharded_param = nn.Parameter(entry.adapter.from_local(view.data), requires_grad=False)
            # Attributes that a forward reads from parameters (weight decay flags, parallel dims) stay readable.
            unsharded_param.__dict__.update(entry.param.__dict__)
            unsharded_params.append(unsharded_param)
        return unsharded_params

    def rename(self, unit_name: str) -> None:
        """Rename the unit, once the tree that it belongs to is known."""
        self.spec = replace(self.spec, unit_name=unit_name)
        self.views.unit_name = unit_name
        self._mark_params()

    def _mark_params(self) -> None:
        for entry, param_info in zip(self.views.params, self.layout.param_infos, strict=True):
            entry.mark(FlattenedBy(entry.fqn, self.spec.unit_name, param_info.shape))

    # -- shard state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ShardState:
        """Shard state of the parameters; only this class sets it."""
        return self._state

    def _move(self, target: ShardState) -> None:
        if (self._state, target) not in LEGAL_MOVES:
            raise PhaseError(
                f"Unit {self.spec.unit_name!r} cannot go from {self._state.value} to {target.value} on rank "
                f"{self.spec.rank} of its shard group. This is a defect of fsdp_flat; please report the traceback."
            )
        self._state = target

    def begin_unshard(self) -> torch.Tensor:
        """Allocate the buffer, copy the local shard into place, and return the buffer for the all-gather."""
        self._move(ShardState.UNSHARDING)
        self.buffer.alloc(self.pool)
        with unguarded():
            shard = self.flat_param.data
        if self._offloads:
            # Copy in the shard's dtype first: a converting copy between devices would block the host.
            self._own_slice.copy_(shard.to(self.spec.device, non_blocking=True))
        elif not isinstance(self.buffer, AliasBuffer):
            self._own_slice.copy_(shard)
        return self.buffer.tensor

    def finish_unshard(self) -> None:
        """Mark the buffer as filled."""
        self._move(ShardState.UNSHARDED)
        self._expiry.renew()

    def reshard(self) -> None:
        """Mark the parameters as sharded; :meth:`free` or :meth:`undo_reshard` must follow."""
        self._move(ShardState.SHARDED)

    def free(self) -> None:
        """Free the buffer after :meth:`reshard`."""
        assert self._state is ShardState.SHARDED
        self._expiry.expire()
        self.buffer.free(self.pool)

    def undo_reshard(self) -> None:
        """Mark the parameters as unsharded again; the buffer was not freed yet."""
        self._move(ShardState.UNSHARDING)
        self._move(ShardState.UNSHARDED)

    def reset(self) -> None:
        """Reset to the sharded state from any state after an exception, and drop all gradients."""
        self._state = ShardState.SHARDED
        self._expiry.expire()
        self.buffer.free(self.pool)
        self.views.use_sharded_views()
        self.drop_gradient()

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def is_trainable(self) -> bool:
        """Return whether any parameter of the handle requires a gradient."""
        return self._num_trainable > 0

    @property
    def is_in_a_graph(self) -> bool:
        """Return whether a caller holds an autograd graph that can still produce gradients for the handle."""
        return any(
            unsharded_param.requires_grad and is_in_a_graph(unsharded_param)
            for unsharded_param in self.views.unsharded_params
        )

    def use_unsharded_views(self) -> None:
        """Point the modules at the unsharded parameters, with the ``requires_grad`` that the user set."""
        self._sync_requires_grad()
        self.views.use_unsharded_views()

    def _sync_requires_grad(self) -> None:
        unsharded_params, before = self.views.unsharded_params, self._synced
        shown = [unsharded_param.requires_grad for unsharded_param in unsharded_params]
        if shown != before:
            self.views.adopt_requires_grad(shown, before)
        wanted = self.views.requires_grad()
        if wanted == shown == before:
            return
        for index, (unsharded_param, want, was) in enumerate(zip(unsharded_params, wanted, before, strict=True)):
            unsharded_param.requires_grad_(want)
            if want and not was:
                unsharded_param.register_post_accumulate_grad_hook(_grad_hook(self, index))
            elif was and not want:
                unsharded_param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._synced = wanted
        self._num_trainable = sum(wanted)

    @dynamo_disabled
    def _accept_grad(self, index: int, unsharded_param: torch.Tensor) -> None:
        grad, unsharded_param.grad = unsharded_param.grad, None
        if grad is None:
            return  # the graph reaches the parameter, but the loss does not depend on it: an unused output
        if grad.requires_grad:
            raise UnsupportedError(
                f"A gradient of {self.layout.param_infos[index].fqn!r} (unit {self.spec.unit_name!r}) is itself "
                "differentiable (create_graph=True). Second-order gradients through sharded parameters are not "
                "supported; take them with respect to inputs by torch.autograd.grad, or leave these modules unwrapped."
            )
        if self._unreduced:
            self._hide_unreduced_grads()
        if self._grad_buffer is None:
            self._grad_buffer = self._new_grad_buffer(grad.device)
        grad = grad.detach()
        views = self.views
        with unguarded():
            is_hooked = views.hooks[index] or views.params[index].param._backward_hooks
        if is_hooked:
            grad = views.run_hooks(index, grad)
        if self._adapters:
            grad = self._adapters.get(index, PLAIN).to_local(grad)
        self._grad_buffer.add_grad(index, grad)
        self.on_grad_ready()

    def _new_grad_buffer(self, device: torch.device) -> FlatGradBuffer:
        grad_buffer, self._spare_grad_buffer = self._spare_grad_buffer, None
        if grad_buffer is None or not grad_buffer.fits(self.grad_buffer_dtype, device):
            return FlatGradBuffer(self.layout, self.grad_buffer_dtype, device)
        return grad_buffer

    @property
    def num_grads_ready(self) -> int:
        """Number of parameters whose gradient waits in the handle."""
        return 0 if self._grad_buffer is None else self._grad_buffer.num_grads_ready

    @property
    def grads_ready(self) -> bytes:
        """One byte per parameter: 1 where a gradient waits in the handle."""
        return (
            bytes(len(self.layout.param_infos)) if self._grad_buffer is None else bytes(self._grad_buffer.grads_ready)
        )

    def _params_with_grad(self) -> list[int]:
        return [index for index, has_landed in enumerate(self.grads_ready) if has_landed]

    def take_grads_ready(self) -> bytes:
        """Drop gradients that the caller has cleared, and return :attr:`grads_ready`, before gradients are reduced."""
        self._hide_unreduced_grads()
        return self.grads_ready

    def take_gradient(self) -> tuple[torch.Tensor, FlatGradBuffer | None]:
        """Return the flat gradient and remove it from the handle.

        Returns:
            The gradient (1-D, ``layout.numel``, reduce dtype), zero for parameters without one; and its buffer, to
            :meth:`recycle` once the gradient is no longer used, or None.
        """
        self._hide_unreduced_grads()
        grad_buffer, self._grad_buffer = self._grad_buffer, None
        if grad_buffer is None:
            return torch.zeros(self.layout.numel, dtype=self.reduce_dtype, device=self.spec.device), None
        closed = grad_buffer.close(self.pool)
        flat = closed.to(self.reduce_dtype)
        if flat is not closed:
            self.recycle(grad_buffer)
            return flat, None
        return flat, grad_buffer

    def recycle(self, grad_buffer: FlatGradBuffer) -> None:
        """Keep a used buffer object for the next gradient, and return its memory to the pool."""
        if not grad_buffer.is_exposed:
            grad_buffer.release(self.pool)
            self._spare_grad_buffer = grad_buffer

    @property
    def grad_buffer_dtype(self) -> torch.dtype:
        """Dtype of waiting gradients, at least as wide as the compute dtype."""
        return torch.promote_types(self.compute_dtype, self.reduce_dtype)

    def drop_gradient(self) -> None:
        """Drop all gradients."""
        self._grad_buffer = None
        for shown in self._unreduced:
            shown.take_back()
        self._unreduced = []
        for unsharded_param in self.views.unsharded_params:
            unsharded_param.grad = None

    def expose_unreduced_grads(
        self, copy_to: Callable[[torch.Tensor, torch.device, torch.dtype], torch.Tensor]
    ) -> None:
        """Set ``.grad`` to this rank's shard of the waiting, unreduced gradient inside ``no_sync``.

        It costs no memory unless shards are offloaded. A later missing ``.grad`` means that the caller has cleared
        the gradients.

        Args:
            copy_to: copies a tensor to a device and dtype, unless it has them already.
        """
        if self._grad_buffer is not None and not self._unreduced:
            self._grad_buffer.is_exposed = True
            own = self._grad_buffer.close(self.pool)[self.layout.shard(self.spec.rank).to_slice()]
            self._unreduced = self.views.expose_unreduced_grads(
                copy_to(own, self.spec.shard_device, self.orig_dtype), self.grads_ready
            )

    def _hide_unreduced_grads(self) -> None:
        partial, self._unreduced = self._unreduced, []
        if not partial:
            return
        kept = [shown for shown in partial if not shown.is_cleared]
        if any(shown.is_changed for shown in kept):
            raise UsageError(
                f"Gradients of unit {self.spec.unit_name!r} were changed in place between backwards inside no_sync. "
                "There they are this rank's own, not yet reduced, and it holds a local shard of them only: scale or "
                "clip after the first backward outside of no_sync."
            )
        hidden = set(self._params_with_grad()).difference(*(shown.param_infos for shown in partial))
        if hidden and kept and len(kept) < len(partial):
            raise UsageError(
                f"Gradients of some parameters of unit {self.spec.unit_name!r} were cleared between backwards inside "
                f"no_sync, and others were kept. Rank {self.spec.rank} of the shard group has no elements of "
                f"{self.layout.param_infos[min(hidden)].fqn!r}, so no .grad that shows whether its gradient is one of "
                "them. Clear all gradients of a unit at once, or clear some after the first backward outside of "
                "no_sync."
            )
        for shown in partial:
            if self._grad_buffer is not None and shown not in kept:
                for index in shown.param_infos:
                    self._grad_buffer.forget(index)
            shown.take_back()
        if not kept:
            self._grad_buffer = None

    # -- changes of the whole module -----------------------------------------------------------------------------

    def adopt_changes(self) -> None:
        """Adopt tensors that the user assigned to sharded parameters or to the flat parameter's data."""
        with unguarded():
            if not self._is_current(self.flat_param.data):
                self.convert(lambda tensor: tensor)
            self.views.adopt_changes()

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` (of ``Module.to`` and similar methods) to the shard, and rebuild everything derived from it."""
        was_partial = bool(self._unreduced)
        self._hide_unreduced_grads()
        with unguarded():
            self._convert(fn)
        if was_partial:
            self.expose_unreduced_grads(lambda tensor, device, dtype: tensor.to(device=device, dtype=dtype))

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
        self.storage_epoch += 1
        self._use_dtypes(converted.dtype, converted.dtype)
        moved = converted.device != self.spec.shard_device
        self.spec = replace(
            self.spec, shard_device=converted.device, device=converted.device if moved else self.spec.device
        )
        self._dtype_buffers.clear()
        self._switch_unsharded_params()
        self.views.bind_shard(rebuilt=True)
        self.views.use_sharded_views()

    def is_changed_by(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Return whether ``fn`` changes the dtype or device of tensors."""
        probe = fn(self.flat_param.data[:0])
        return probe.dtype != self.orig_dtype or probe.device != self.spec.shard_device

    def _is_current(self, shard: torch.Tensor) -> bool:
        return (
            shard.data_ptr() == self._shard_pointer
            and shard.dtype == self.orig_dtype
            and shard.device == self.spec.shard_device
        )

    def copy_to(self, params: Sequence[ManagedParam], module: nn.Module, flat_param: nn.Parameter) -> FlatParamHandle:
        """Create an independent handle of the same layout for copied modules; gradients are not copied.

        Args:
            params: the managed parameters of the copy, in layout order, with their sites in the copied modules.
            module: the copy of the spec's module.
            flat_param: the copy of the shard, from :func:`new_flat_parameter`.
        """
        twin = copy.copy(self)
        twin.spec = replace(self.spec, module=module)
        twin.flat_param = flat_param
        twin.on_grad_ready = lambda: None
        twin._state = ShardState.SHARDED
        twin._grad_buffer, twin._spare_grad_buffer, twin._unreduced = None, None, []
        twin.pool = MemoryPool()
        twin._num_trainable, twin._synced, twin._dtype_buffers = 0, [False] * len(params), {}
        unsharded_params = twin._use_dtype_buffer(params)
        spec = twin.spec
        twin.views = type(self.views)(
            params, unsharded_params, twin.layout, spec.rank, flat_param, module, spec.unit_name
        )
        twin._sync_requires_grad()
        return twin


def _grad_hook(handle: FlatParamHandle, index: int) -> Callable[[torch.Tensor], None]:
    """Create the post-accumulate-grad hook of unsharded parameter ``index``.

    It must not own the handle, which holds the parameter's autograd node: a cycle through autograd's C++ objects is
    never collected, so no wrapped model would ever be freed.
    """
    owner = weakref.ref(handle)

    def grads_ready(unsharded_param: torch.Tensor) -> None:
        there = owner()
        if there is not None:
            there._accept_grad(index, unsharded_param)

    return grads_ready
