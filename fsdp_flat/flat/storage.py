"""Manages the memory of flat buffers, and the gradients that wait in one until they are reduced."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from fsdp_flat.errors import UnsupportedError, UsageError
from fsdp_flat.flat.arrangement import can_chunk, grad_places, split_grad
from fsdp_flat.flat.gradients import ReduceScatteredGrad, UnreducedGrad, apply_hooks
from fsdp_flat.flat.params import PLAIN, ManagedParam
from fsdp_flat.flat.torch_flat import (
    chunk_cat,
    dynamo_disabled,
    dynamo_disabled_here,
    is_in_a_graph,
    swap_memory,
)
from fsdp_flat.flat.views import Views
from fsdp_flat.layout import FlatLayout, RowLayout

_MOST_IDLE = 2
# Number of gradients between two calls of on_ready, which looks for completed reductions: a system call a rank.
_GRADS_PER_CALL = 8
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class MemoryPool:
    """Keeps a few freed blocks of CPU memory, so that the next buffer does not page-fault.

    The memory moves from one storage object to another: a view of a freed buffer, which autograd may hold, keeps an
    empty storage and never sees the data of another unit. Accelerators have caching allocators, so the pool keeps
    nothing for them, nor if torch cannot move memory between storages.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.UntypedStorage]] = {}
        self._blank: list[torch.UntypedStorage] = []  # objects without memory

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate ``nbytes`` for an empty ``storage``; the content is undefined."""
        idle = self._idle.get(nbytes)
        if idle and storage.device.type == "cpu":
            swap_memory(storage, idle[-1])
            self._blank.append(idle.pop())
        else:
            storage.resize_(nbytes)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of ``storage``, unless a numpy array uses it too."""
        nbytes = storage.nbytes()
        # A numpy array that a caller has made of a view points to memory that torch marks as not resizable.
        if nbytes == 0 or not storage.resizable():
            return
        idle = self._idle.setdefault(nbytes, [])
        if swap_memory is None or storage.device.type != "cpu" or len(idle) >= _MOST_IDLE:
            storage.resize_(0)
            return
        kept = self._blank.pop() if self._blank else torch.UntypedStorage(0)
        swap_memory(kept, storage)
        idle.append(kept)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape, dtype and device of ``tensor`` and undefined content."""
        idle = self._idle.get(tensor.nbytes)
        if not idle or tensor.device.type != "cpu":
            return torch.empty_like(tensor)
        fresh = torch.empty(0, dtype=tensor.dtype)
        return fresh.set_(idle.pop(), 0, tensor.shape)  # type: ignore[call-overload]

    def clear(self) -> None:
        """Return all memory of the pool to the system."""
        self._idle.clear()


class FlatBuffer:
    """Holds a 1-D tensor whose memory can be freed and allocated again while views of it exist.

    Autograd saves views of unsharded parameters. The storage object therefore stays and is resized to zero; once the
    same values are all-gathered again, all saved views are valid.

    Args:
        tensor: the tensor.
        owns_memory: False for the shard of a unit that is not sharded, which is its own buffer and is never freed.
    """

    def __init__(self, tensor: torch.Tensor, *, owns_memory: bool = True) -> None:
        self.tensor, self.owns_memory = tensor, owns_memory
        self._nbytes = tensor.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated."""
        return self.tensor.untyped_storage().nbytes()

    def alloc(self, pool: MemoryPool) -> None:
        """Allocate memory from ``pool`` unless it is allocated; the content is undefined."""
        if self.owns_memory:
            storage = self.tensor.untyped_storage()
            if storage.nbytes() != self._nbytes:
                pool.fill(storage, self._nbytes)

    def free(self, pool: MemoryPool) -> None:
        """Return the memory to ``pool``."""
        if self.owns_memory:
            pool.empty(self.tensor.untyped_storage())


class FlatGradBuffer:
    """Collects the gradients of parameters, and copies them into a flat buffer at once when closed.

    It is closed after the parameters were freed, so that the buffer can reuse their memory. Later gradients are added
    to the buffer.

    Attributes:
        grads_ready: one byte per parameter: 1 where it has a gradient.
        waiting: the gradients that are not in the flat buffer yet, by the parameter's index.
        is_exposed: a caller has views of the buffer, so its memory must not be reused.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = FlatBuffer(torch.empty(layout.numel, dtype=dtype, device=device))
        flat = self._buffer.tensor
        self._layout = layout
        self._places = grad_places(flat, layout)
        # The gradient as a matrix with a row for each rank, if one operation can write it.
        self._rows = flat.view(layout.world_size, -1) if can_chunk(layout) else None
        self._paddings = [flat[interval.to_slice()] for interval in layout.paddings()]
        self.waiting: dict[int, torch.Tensor] = {}
        self.grads_ready = bytearray(len(layout.param_infos))
        self.is_exposed = False
        self._buffer.free(MemoryPool())

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the buffer has this dtype and device."""
        return self._buffer.tensor.dtype == dtype and self._buffer.tensor.device == device

    @property
    def nbytes(self) -> int:
        """Number of bytes of the waiting gradients and of the buffer."""
        return self._buffer.nbytes + sum(grad.nbytes for grad in self.waiting.values())

    def add_grad(self, index: int, grad: torch.Tensor) -> None:
        """Add the gradient of parameter ``index`` (the parameter's shape, any float dtype)."""
        if grad.is_sparse:
            grad = grad.to_dense()
        if not self.grads_ready[index]:
            self.grads_ready[index] = 1
            self.waiting[index] = grad
        elif index in self.waiting:
            self.waiting[index] = torch.add(self.waiting[index].to(self._buffer.tensor.dtype), grad)
        else:
            for place, piece in zip(self._places[index], self._split(index, grad), strict=True):
                place.add_(piece)

    def clear(self, indices: Iterable[int], *, set_to_none: bool) -> None:
        """Fill the gradients of parameters with zeros, or drop them."""
        for index in indices:
            waiting = self.waiting.pop(index, None)
            if waiting is None and self._buffer.nbytes:
                torch._foreach_zero_(self._places[index])
            if set_to_none:
                self.grads_ready[index] = 0
            elif waiting is not None:
                self.waiting[index] = torch.zeros_like(waiting)  # autograd may hold the tensor too

    def close(self, pool: MemoryPool) -> torch.Tensor:
        """Return the complete flat gradient: zero in the padding and for parameters without a gradient."""
        if self._buffer.nbytes == 0:
            self._buffer.alloc(pool)
            if self._rows is not None and len(self.waiting) == len(self._places):
                grads = [self.waiting[index] for index in range(len(self._places))]
                if {grad.dtype for grad in grads} == {self._rows.dtype}:  # it converts slowly
                    chunk_cat(grads, 0, self._layout.world_size, out=self._rows)
                    self.waiting.clear()
                    return self._buffer.tensor
            for padding in self._paddings:
                padding.zero_()
            for places, there in zip(self._places, self.grads_ready, strict=True):
                if not there:
                    torch._foreach_zero_(places)
        if self.waiting:
            pieces = list(self.waiting.values())
            if isinstance(self._layout, RowLayout):
                pieces = [piece for index, grad in self.waiting.items() for piece in self._split(index, grad)]
            torch._foreach_copy_([place for index in self.waiting for place in self._places[index]], pieces)
            self.waiting.clear()
        return self._buffer.tensor

    def _split(self, index: int, grad: torch.Tensor) -> list[torch.Tensor]:
        return split_grad(grad, self._layout, index) if isinstance(self._layout, RowLayout) else [grad]

    def release(self, pool: MemoryPool) -> None:
        """Drop all gradients and return the memory to ``pool``; no views of the buffer may be in use."""
        self._buffer.free(pool)
        self.grads_ready = bytearray(len(self._places))


class HandleGradients:
    """Collects the gradients of a handle's unsharded parameters until they are reduced.

    Args:
        params: the parameters as they were when they were flattened, with the user's gradient hooks.
        views: the handle's views.

    Attributes:
        on_ready: called after the first gradient of the handle in a backward, and again after every few.
        fast_buffer: takes a parameter's first gradient in a backward if that needs no conversion; None where
            :meth:`accept` has to be called: before the backward's first gradient, and for DTensors of the caller's.
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
        self.fast_buffer: FlatGradBuffer | None = None
        self._num_accepted = 0  # in this backward
        self._spare_buffer: FlatGradBuffer | None = None
        self._unreduced: list[UnreducedGrad] = []
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
        shown = list(map(_REQUIRES_GRAD, unsharded_params))
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
            spare, self._spare_buffer = self._spare_buffer, None
            if spare is None or not spare.fits(self.buffer_dtype, grad.device):
                spare = FlatGradBuffer(self._layout, self.buffer_dtype, grad.device)
            self._buffer = spare
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
        self.fast_buffer = self._buffer if self._are_plain else None

    def end_backward(self) -> None:
        """Have the next gradient count as the first one of a backward."""
        self.fast_buffer, self._num_accepted = None, 0

    # -- waiting gradients ---------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """True if a gradient may wait to be reduced."""
        return self._buffer is not None

    @property
    def ready(self) -> bytes:
        """One byte per parameter: 1 where a gradient waits."""
        return bytes(len(self._layout.param_infos)) if self._buffer is None else bytes(self._buffer.grads_ready)

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

    def expose_unreduced(self, pool: MemoryPool) -> None:
        """Set ``.grad`` to the waiting, unreduced gradient (unsharded shapes) between backwards inside ``no_sync``."""
        views = self.views
        if self._buffer is None or self._unreduced or not views.exposes_unreduced:
            return
        flat, ready = self._buffer.close(pool), self.ready
        if not torch._has_compatible_shallow_copy_type(views.flat_param, flat):
            return  # an offloaded parameter cannot have a gradient on some kinds of devices
        self._buffer.is_exposed = True
        waiting = views.unreduced_grads(flat)
        self._unreduced = [
            UnreducedGrad(each, grad)
            for each, grad in zip(views.visible, waiting, strict=True)
            if any(ready[each.indices.start : each.indices.stop])
        ]

    def hide_unreduced(self) -> bool:
        """Undo :meth:`expose_unreduced`, and drop the gradients that the caller has set to None.

        Returns:
            Whether any was exposed.
        """
        shown, self._unreduced = self._unreduced, []
        dropped = [index for each in shown if each.take_back() for index in each.indices]
        if dropped and self._buffer is not None:
            self._buffer.clear(dropped, set_to_none=True)
            if not any(self._buffer.grads_ready):
                self._buffer = None
                self.end_backward()
        return bool(shown)


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
    buffer, index = owner.fast_buffer, unsharded_param._fsdp_flat_index  # type: ignore[attr-defined]
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
