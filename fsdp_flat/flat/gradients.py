"""Collects the gradients of a handle until they are reduced, and shows them inside ``no_sync``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import UnsupportedError, UsageError
from fsdp_flat.flat.buffers import FlatBuffer, MemoryPool
from fsdp_flat.flat.handle_spec import HandleSpec
from fsdp_flat.flat.layout_views import VisibleParam, can_chunk, grad_places, split_grad, views_of
from fsdp_flat.flat.params import PLAIN, ManagedParam
from fsdp_flat.flat.torch_flat import chunk_cat, dynamo_disabled, dynamo_disabled_here, is_alias, is_in_a_graph
from fsdp_flat.layout import Layout

_DTYPE = attrgetter("dtype")
_REQUIRES_GRAD = attrgetter("requires_grad")
_PARAM_REQUIRES_GRAD = attrgetter("param.requires_grad")
# chunk_cat copies tensors that are not contiguous one by one.
_CONTIGUOUS = torch.Tensor.contiguous
# Number of gradients between two calls of on_grads_ready, which makes a system call a rank.
_GRADS_PER_CALL = 8


class FlatGradBuffer:
    """Collects the gradients of parameters, and copies them into a flat buffer at once when closed.

    Close it after the parameters are freed, so that the flat buffer can reuse their memory. Gradients that come after a
    close are added to the flat buffer.

    Attributes:
        grads_ready: one byte per parameter: 1 where it has a gradient.
        waiting: the gradients that are not in the flat buffer yet, by the parameter's index.
        is_exposed: a caller has views of the buffer, so its memory must not be reused.
        kind: dtype and device of the buffer.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, *, on_accelerator: bool | None = None
    ) -> None:
        on_accelerator = device.type != "cpu" if on_accelerator is None else on_accelerator
        self._buffer = FlatBuffer(torch.empty(layout.numel, dtype=dtype, device=device))
        flat = self._buffer.tensor
        self._layout, self.kind = layout, (dtype, device)
        self._places = grad_places(flat, layout)
        # The flat gradient as (world_size, shard_numel), if one operation can write it; else None.
        self._by_rank = flat.view(layout.world_size, -1) if can_chunk(layout, on_accelerator=on_accelerator) else None
        # Dtypes of gradients that the operation takes. On accelerators its kernel converts this pair; other pairs, and
        # all on the CPU, it copies one by one.
        self._chunked = {dtype}
        if on_accelerator and dtype == torch.float32:
            self._chunked.add(torch.bfloat16)
        self._paddings = [flat[interval.to_slice()] for interval in layout.paddings()]
        self.waiting: dict[int, torch.Tensor] = {}
        self.grads_ready = bytearray(len(layout.param_infos))
        self.is_exposed = False
        self._buffer.free(MemoryPool())

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
            for place, piece in zip(self._places[index], split_grad(grad, self._layout, index), strict=True):
                place.add_(piece)

    def clear(self, indices: Iterable[int], *, set_to_none: bool) -> None:
        """Fill the gradients of parameters with zeros, or drop them (``set_to_none``)."""
        for index in indices:
            waiting = self.waiting.pop(index, None)
            if waiting is None and self._buffer.nbytes:
                torch._foreach_zero_(self._places[index])
            if set_to_none:
                self.grads_ready[index] = 0
            elif waiting is not None:
                self.waiting[index] = torch.zeros_like(waiting)  # not in place: autograd may hold the tensor

    def close(self, pool: MemoryPool) -> torch.Tensor:
        """Return the flat gradient (1-D, ``layout.numel``): zero in padding and for parameters without a gradient."""
        if self._buffer.alloc(pool):
            if self._by_rank is not None and len(self.waiting) == len(self._places):
                grads = list(map(self.waiting.__getitem__, range(len(self._places))))
                dtypes = set(map(_DTYPE, grads))
                if len(dtypes) == 1 and dtypes <= self._chunked:
                    chunk_cat(list(map(_CONTIGUOUS, grads)), 0, self._layout.world_size, out=self._by_rank)
                    self.waiting.clear()
                    return self._buffer.tensor
            for padding in self._paddings:
                padding.zero_()
            for index, there in enumerate(self.grads_ready):
                if not there:
                    torch._foreach_zero_(self._places[index])
        if self.waiting:
            places, pieces = [], []
            for index, grad in self.waiting.items():
                places += self._places[index]
                pieces += split_grad(grad, self._layout, index)
            torch._foreach_copy_(places, pieces)
            self.waiting.clear()
        return self._buffer.tensor

    def release(self, pool: MemoryPool) -> None:
        """Drop all gradients and return the memory to ``pool``; no views of the buffer may be in use."""
        self._buffer.free(pool)
        self.grads_ready = bytearray(len(self._places))


def without(flags: bytes, indices: Iterable[int]) -> bytes:
    """Return ``flags``, one byte per parameter, with 0 for the parameters at ``indices``."""
    changed = bytearray(flags)
    for index in indices:
        changed[index] = 0
    return bytes(changed)


@dataclass(slots=True)
class ReduceScatteredGrad:
    """Holds this rank's shard of a gradient that is summed over the shard group, and not over the replicate group yet.

    Attributes:
        shard: the sum (1-D, ``shard_numel``, reduce dtype); None if there is none, or once it was added to another.
        used: one byte per parameter: 1 if any rank has used it; None until ranks have exchanged it.
    """

    shard: torch.Tensor | None = None
    used: bytes | None = None

    def add(self, shard: torch.Tensor) -> None:
        """Add the sum of another backward."""
        self.shard = shard if self.shard is None else self.shard.add_(shard)

    def add_used(self, used: bytes) -> bytes:
        """Add the parameters that another backward has used (``used``), and return those of all backwards."""
        self.used = used if self.used is None else bytes(map(max, used, self.used))
        return self.used

    def take(self) -> torch.Tensor | None:
        """Return the sum and remove it."""
        shard, self.shard = self.shard, None
        return shard


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``param.grad``, which may have another shape, dtype or device than ``param``.

    Gradients have another dtype with ``keep_low_precision_grads``, and another shape inside ``no_sync``.
    """
    if grad is None or (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device):
        param.grad = grad
        return
    # torch rejects such a gradient unless it is assigned through ``.data``.
    param.grad = torch.empty_like(param)
    param.grad.data = grad


def apply_hooks(hooks: Mapping[int, Callable[..., Any]], grad: torch.Tensor) -> torch.Tensor:
    """Pass a gradient through gradient hooks of a parameter that is not in the autograd graph."""
    for hook in hooks.values():
        result = hook(grad)
        grad = grad if result is None else result
    return grad


class UnreducedGrad:
    """Shows the gradient that waits inside ``no_sync`` as the ``.grad`` of a parameter, until the next backward.

    As in FSDP1, ``.grad`` is this rank's own gradient, in the unsharded shape. It shares memory with the waiting one,
    so in-place changes by a caller change both. The previous ``.grad``, a reduced gradient, stays here meanwhile. What
    clears ``.grad`` clears both.

    Args:
        visible: the parameter.
        waiting: the gradient.
        is_sharded: the parameter's data is a local shard.

    Attributes:
        indices: the gradient's parameters, as indices in the layout.
    """

    __slots__ = ("_before", "_is_sharded", "_param", "_shown", "_waiting", "indices")

    def __init__(self, visible: VisibleParam, waiting: torch.Tensor, *, is_sharded: bool) -> None:
        self.indices, self._param, self._waiting = visible.indices, visible.param, waiting.detach()
        self._is_sharded = is_sharded
        self._before = self._param.grad
        if self._before is not None:
            # Tells a caller who clears the gradient (0.0) from one who scales a gradient of zeros (-0.0).
            first = self._waiting.view(-1)[:1]
            first.masked_fill_(first == 0, -0.0)
        set_grad(self._param, waiting)
        self._shown = self._param.grad

    def take_back(self) -> bool:
        """Restore the previous ``.grad``, as zeros if the caller has filled ``.grad`` with zeros.

        Returns:
            Whether the waiting gradient is to be dropped, and ``.grad`` was left as it is: the caller has set it to
            None, or to a gradient of the local shard, the only other one that torch lets a caller assign.
        """
        grad, waiting = self._param.grad, self._waiting
        if grad is None:
            return True
        if not is_alias(grad, waiting):
            is_local = self._is_sharded and grad is not self._shown and grad.shape == self._param.shape
            if is_local or grad.shape != waiting.shape:
                return True
            waiting.copy_(grad.detach())
        if self._before is not None:
            is_cleared = waiting.view(-1).view(torch.uint8).any() == 0  # any() of bytes is a byte
            self._before.detach().masked_fill_(is_cleared.to(self._before.device), 0)
        set_grad(self._param, self._before)
        return False


class GradientCollector:
    """Collects the gradients of a handle's unsharded parameters until they are reduced: a part of every handle.

    Attributes:
        on_grads_ready: called after the first gradient of the handle in a backward, and after every few more.
        num_trainable: number of parameters that require a gradient.
        grad_dtype: dtype of waiting gradients, at least as wide as the compute dtype and ``reduce_dtype``.
        reduce_dtype: dtype in which gradients are reduced.
        partial_grad: gradient that a later backward sums over the replicate group.
    """

    # Attributes of the handle that this class is a part of.
    spec: HandleSpec
    layout: Layout
    params: tuple[ManagedParam, ...]
    unsharded_params: tuple[nn.Parameter, ...]
    flat_param: nn.Parameter
    visible: tuple[VisibleParam, ...]
    pool: MemoryPool
    # ``.grad`` shows unreduced gradients inside ``no_sync``.
    exposes_unreduced = True

    grad_dtype: torch.dtype
    reduce_dtype: torch.dtype

    def _init_gradients(self, params: Sequence[ManagedParam]) -> None:
        """Set up the state, with the gradient hooks of ``params``, the user's original parameters."""
        self.on_grads_ready: Callable[[], None] = lambda: None
        self.num_trainable = 0
        self._grad_hooks = [entry.param._backward_hooks for entry in params]
        self._are_plain = all(entry.adapter is PLAIN for entry in params)
        self._synced_requires_grad = [False] * len(params)
        self._accept_hook = partial(_accept, weakref.ref(self))
        self._grad_buffer: FlatGradBuffer | None = None
        # The buffer to which a hook may add a parameter's first gradient without accept_grad. None before the first
        # gradient of a backward, and if the user's parameters are DTensors.
        self._fast_buffer: FlatGradBuffer | None = None
        self._num_accepted = 0  # in this backward
        self._spare_grad_buffer: FlatGradBuffer | None = None
        self._unreduced: list[UnreducedGrad] = []
        self.partial_grad = ReduceScatteredGrad()

    def describe(self, index: int) -> str:
        """Return the FQN of a parameter and its unit, for error texts."""
        return f"{self.layout.param_infos[index].fqn!r} of unit {self.spec.unit_name!r}"

    # -- what the kinds of handles differ in -------------------------------------------------------------------------

    def adopt_requires_grad(self, shown: Sequence[bool], before: Sequence[bool]) -> None:
        """Adopt the ``requires_grad`` that the user set on unsharded parameters (``shown``, formerly ``before``)."""
        for entry, now, was in zip(self.params, shown, before, strict=True):
            if now != was:
                entry.param.requires_grad_(now)

    def unreduced_grads(self, flat_grad: torch.Tensor) -> list[torch.Tensor]:
        """Return the unreduced gradient of each visible parameter, as views of an unsharded flat gradient."""
        return views_of(flat_grad, self.layout)

    def requires_grad(self) -> list[bool]:
        """Return for each original parameter whether it requires a gradient."""
        flags = list(map(_PARAM_REQUIRES_GRAD, self.visible))
        return flags if len(flags) > 1 else flags * len(self.params)

    # -- gradients of unsharded parameters -----------------------------------------------------------------------

    def _use_grad_dtypes(self, compute_dtype: torch.dtype, reduce_dtype: torch.dtype, device: torch.device) -> None:
        """Switch to the handle's unsharded parameters of ``compute_dtype`` on ``device``."""
        self.grad_dtype = torch.promote_types(compute_dtype, reduce_dtype)
        self.reduce_dtype, self._grad_device = reduce_dtype, device
        # Unsharded parameters that were in use before still have their flags and hooks.
        self._synced_requires_grad = [param.requires_grad for param in self.unsharded_params]
        self.sync_requires_grad()

    def sync_requires_grad(self) -> None:
        """Give the unsharded parameters the ``requires_grad`` that the user set, and hooks for their gradients."""
        unsharded_params, before = self.unsharded_params, self._synced_requires_grad
        shown = list(map(_REQUIRES_GRAD, unsharded_params))
        if shown != before:
            self.adopt_requires_grad(shown, before)
        wanted = self.requires_grad()
        if wanted == shown == before:
            return
        for index, (param, want, was) in enumerate(zip(unsharded_params, wanted, before, strict=True)):
            param.requires_grad_(want)
            if want and not was:
                param._fsdp_flat_index = index  # type: ignore[attr-defined]
                param.register_post_accumulate_grad_hook(self._accept_hook)
            elif was and not want:
                param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._synced_requires_grad = wanted
        self.num_trainable = sum(wanted)

    @property
    def is_in_a_graph(self) -> bool:
        """Return whether a caller holds an autograd graph that can still produce gradients."""
        return any(param.requires_grad and is_in_a_graph(param) for param in self.unsharded_params)

    @dynamo_disabled
    def accept_grad(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient of unsharded parameter ``index`` (its shape), which waits until it is reduced.

        Raises:
            UnsupportedError: the gradient is differentiable (``create_graph=True``).
            UsageError: a gradient hook changes the gradient's shape.
        """
        if grad.requires_grad:
            raise UnsupportedError(
                f"A gradient of {self.describe(index)} is itself "
                "differentiable (create_graph=True). Second-order gradients through sharded parameters are not "
                "supported; take them with respect to inputs by torch.autograd.grad, or leave these modules unwrapped."
            )
        if self._unreduced:
            self.hide_unreduced_grads()
        if self._grad_buffer is None:
            spare, self._spare_grad_buffer = self._spare_grad_buffer, None
            if spare is None or spare.kind != (self.grad_dtype, grad.device):
                spare = FlatGradBuffer(self.layout, self.grad_dtype, grad.device)
            self._grad_buffer = spare
        entry = self.params[index]
        hooks = entry.param._backward_hooks or self._grad_hooks[index]
        if hooks:
            shape, grad = grad.shape, apply_hooks(hooks, grad)
            if grad.shape != shape:
                raise UsageError(
                    f"A gradient hook of {self.describe(index)} returned a tensor of shape {tuple(grad.shape)} "
                    f"on rank {self.spec.rank} of the shard group; expected the gradient's shape "
                    f"{tuple(shape)}. Return a tensor of this shape, or None."
                )
        if entry.adapter is not PLAIN:
            grad = entry.adapter.to_local(grad)
        self._grad_buffer.add_grad(index, grad)
        if self._num_accepted % _GRADS_PER_CALL == 0:
            self.on_grads_ready()
        self._num_accepted += 1
        self._fast_buffer = self._grad_buffer if self._are_plain else None

    def end_backward(self) -> None:
        """Have the next gradient count as the first one of a backward."""
        self._fast_buffer, self._num_accepted = None, 0

    # -- waiting gradients ---------------------------------------------------------------------------------------

    @property
    def has_waiting_grads(self) -> bool:
        """True if a gradient may wait to be reduced."""
        return self._grad_buffer is not None

    def grads_ready(self) -> bytes:
        """Return one byte per parameter: 1 where a gradient waits."""
        buffer = self._grad_buffer
        return bytes(len(self.params)) if buffer is None else bytes(buffer.grads_ready)

    def take_flat_grad(self) -> tuple[torch.Tensor, FlatGradBuffer | None]:
        """Return the flat gradient, with memory from the handle's pool, and remove it.

        Returns:
            The gradient (1-D, ``layout.numel``, reduce dtype), zero for parameters without one; and None, or a buffer
            for :meth:`recycle_grad_buffer` once the gradient is no longer used.
        """
        if self._unreduced:
            self.hide_unreduced_grads()
        self.end_backward()
        buffer, self._grad_buffer = self._grad_buffer, None
        if buffer is None:
            return torch.zeros(self.layout.numel, dtype=self.reduce_dtype, device=self._grad_device), None
        closed = buffer.close(self.pool)
        if closed.dtype == self.reduce_dtype:
            return closed, buffer
        flat = closed.to(self.reduce_dtype)
        self.recycle_grad_buffer(buffer)
        return flat, None

    def recycle_grad_buffer(self, buffer: FlatGradBuffer) -> None:
        """Keep a used buffer object for the next gradient, and return its memory to the handle's pool."""
        if not buffer.is_exposed:
            buffer.release(self.pool)
            self._spare_grad_buffer = buffer

    def drop_grads(self) -> None:
        """Drop all gradients."""
        self.end_backward()
        self._grad_buffer = None
        self.partial_grad = ReduceScatteredGrad()
        for shown in self._unreduced:
            shown.take_back()
        self._unreduced = []
        for unsharded_param in self.unsharded_params:
            unsharded_param.grad = None

    def clear_grads(self, chosen: Sequence[VisibleParam], *, set_to_none: bool) -> None:
        """Drop gradients of visible parameters that are not completely reduced yet, or fill them with zeros."""
        if set_to_none and len(chosen) == len(self.visible):
            self.drop_grads()
            return
        indices = [index for each in chosen for index in each.indices]
        if self._grad_buffer is not None:
            self._grad_buffer.clear(indices, set_to_none=set_to_none)
        if self.partial_grad.shard is not None:
            for each in chosen:
                each.part_of(self.partial_grad.shard).zero_()
            if set_to_none and self.partial_grad.used is not None:
                self.partial_grad.used = without(self.partial_grad.used, indices)
        for index in indices:
            grad = self.unsharded_params[index].grad
            if set_to_none:
                self.unsharded_params[index].grad = None
            elif grad is not None:
                grad.zero_()

    # -- unreduced gradients inside no_sync ----------------------------------------------------------------------

    def show_unreduced_grads(self) -> None:
        """Set ``.grad`` to the waiting, unreduced gradients (unsharded shapes) between backwards inside ``no_sync``."""
        if self._grad_buffer is None or self._unreduced or not self.exposes_unreduced:
            return
        flat, ready = self._grad_buffer.close(self.pool), self._grad_buffer.grads_ready
        if not torch._has_compatible_shallow_copy_type(self.flat_param, flat):
            return  # an offloaded parameter cannot have a gradient on some kinds of devices
        self._grad_buffer.is_exposed = True
        waiting = self.unreduced_grads(flat)
        self._unreduced = [
            UnreducedGrad(each, grad, is_sharded=self.layout.world_size > 1)
            for each, grad in zip(self.visible, waiting, strict=True)
            if any(ready[each.indices.start : each.indices.stop])
        ]

    def hide_unreduced_grads(self) -> bool:
        """Undo :meth:`show_unreduced_grads`, and drop the gradients that the caller has set to None.

        Returns:
            Whether any gradient was shown.
        """
        shown, self._unreduced = self._unreduced, []
        dropped = [index for each in shown if each.take_back() for index in each.indices]
        if dropped and self._grad_buffer is not None:
            self._grad_buffer.clear(dropped, set_to_none=True)
            if not any(self._grad_buffer.grads_ready):
                self._grad_buffer = None
                self.end_backward()
        return bool(shown)


@dynamo_disabled_here
def _accept(collector: weakref.ref[GradientCollector], unsharded_param: torch.Tensor) -> None:
    """Take the gradient of an unsharded parameter, as its post-accumulate-grad hook.

    The hook must not own the collector, which holds the parameter's autograd node: a cycle through autograd's C++
    objects is never collected, so no wrapped model would ever be freed. The hook runs for every gradient, and takes
    most of them without a call of ``accept_grad``.
    """
    owner, grad = collector(), unsharded_param.grad
    # The graph may reach the parameter although the loss does not depend on it: an unused output.
    if owner is None or grad is None:
        return
    unsharded_param.grad = None
    buffer, index = owner._fast_buffer, unsharded_param._fsdp_flat_index  # type: ignore[attr-defined]
    if buffer is None or buffer.grads_ready[index] or grad.requires_grad or grad.is_sparse:
        owner.accept_grad(index, grad)
        return
    if owner.params[index].param._backward_hooks or owner._grad_hooks[index]:
        owner.accept_grad(index, grad)
        return
    buffer.grads_ready[index] = 1
    buffer.waiting[index] = grad
    if not len(buffer.waiting) % _GRADS_PER_CALL:
        owner.on_grads_ready()
