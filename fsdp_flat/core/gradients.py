"""Collects the gradients of a parameter group until they are reduced, and shows them inside ``no_sync``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from fsdp_flat.comm import Allocate, is_accelerator
from fsdp_flat.core.buffers import FlatBuffer, MemoryPool
from fsdp_flat.core.flat_parameter import set_grad
from fsdp_flat.core.layout import Layout
from fsdp_flat.core.params import PLAIN
from fsdp_flat.core.slots import Slots
from fsdp_flat.core.torch_core import chunk_cat, dynamo_disabled_here, is_alias
from fsdp_flat.core.visible_params import VisibleParam
from fsdp_flat.errors import UnsupportedError

_DTYPE = attrgetter("dtype")
# chunk_cat copies tensors that are not contiguous one by one.
_CONTIGUOUS = torch.Tensor.contiguous
# Number of gradients between two calls of on_ready, which makes a system call a rank.
_GRADS_PER_CALL = 8


class FlatGradBuffer(FlatBuffer):
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
        on_accelerator = is_accelerator(device) if on_accelerator is None else on_accelerator
        flat = torch.empty(layout.numel, dtype=dtype, device=device)
        super().__init__(flat)
        self._layout, self.kind = layout, (dtype, device)
        self._places = layout.grad_places(flat)
        # The flat gradient as (world_size, shard_numel), if one operation can write it; else None.
        self._by_rank = (
            flat.view(layout.world_size, -1) if layout.can_chunk_cat(on_accelerator=on_accelerator) else None
        )
        self._on_accelerator = on_accelerator
        # Dtypes of gradients that the operation takes. On accelerators its kernel converts this pair; other pairs, and
        # all on the CPU, it copies one by one.
        self._chunked = {dtype}
        if on_accelerator and dtype == torch.float32:
            self._chunked.add(torch.bfloat16)
        self._paddings = [flat[interval.to_slice()] for interval in layout.paddings()]
        self.waiting: dict[int, torch.Tensor] = {}
        self.grads_ready = bytearray(len(layout.param_infos))
        self.is_exposed = False
        flat.untyped_storage().resize_(0)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the waiting gradients and of the buffer."""
        return self.tensor.untyped_storage().nbytes() + sum(grad.nbytes for grad in self.waiting.values())

    def add_grad(self, index: int, grad: torch.Tensor) -> None:
        """Add the gradient of parameter ``index`` (the parameter's shape, any float dtype)."""
        if grad.is_sparse:
            grad = grad.to_dense()
        if not self.grads_ready[index]:
            self.grads_ready[index] = 1
            self.waiting[index] = grad
        elif index in self.waiting:
            self.waiting[index] = torch.add(self.waiting[index].to(self.tensor.dtype), grad)
        else:
            for place, piece in zip(self._places[index], self._layout.split_grad(grad, index), strict=True):
                place.add_(piece)

    def clear(self, indices: Iterable[int], *, set_to_none: bool) -> None:
        """Fill the gradients of parameters with zeros, or drop them (``set_to_none``)."""
        for index in indices:
            waiting = self.waiting.pop(index, None)
            if waiting is None and self.tensor.untyped_storage().nbytes():
                torch._foreach_zero_(self._places[index])
            if set_to_none:
                self.grads_ready[index] = 0
            elif waiting is not None:
                self.waiting[index] = torch.zeros_like(waiting)  # not in place: autograd may hold the tensor

    def close(self, pool: MemoryPool, memory: Allocate | None = None) -> torch.Tensor:
        """Return the flat gradient (1-D, ``layout.numel``): zero in padding and for parameters without a gradient."""
        if self.alloc(pool, memory):
            is_complete = len(self.waiting) == len(self._places)
            if self._by_rank is not None and self.waiting and (is_complete or self._on_accelerator):
                dtypes = set(map(_DTYPE, self.waiting.values()))
                if len(dtypes) == 1 and dtypes <= self._chunked:
                    if not is_complete:
                        self._add_zeros()
                    grads = map(self.waiting.__getitem__, range(len(self._places)))
                    chunk_cat(list(map(_CONTIGUOUS, grads)), 0, self._layout.world_size, out=self._by_rank)
                    self.waiting.clear()
                    return self.tensor
            empty = self._paddings.copy()
            for index, there in enumerate(self.grads_ready):
                if not there:
                    empty += self._places[index]
            if empty:
                torch._foreach_zero_(empty)
        if self.waiting:
            places, pieces = [], []
            for index, grad in self.waiting.items():
                places += self._places[index]
                pieces += self._layout.split_grad(grad, index)
            torch._foreach_copy_(places, pieces)
            self.waiting.clear()
        return self.tensor

    def _add_zeros(self) -> None:
        """Add gradients of zeros, which share memory, for the parameters without one."""
        missing = {index: info for index, info in enumerate(self._layout.param_infos) if index not in self.waiting}
        like = next(iter(self.waiting.values()))
        zeros = like.new_zeros(max(info.numel for info in missing.values()))
        for index, info in missing.items():
            self.waiting[index] = zeros[: info.numel].view(info.shape)


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
        divided_by: what the sum has been divided by.
        used: one byte per parameter: 1 if any rank has used it; None until ranks have exchanged it.
    """

    shard: torch.Tensor | None = None
    divided_by: float = 1.0
    used: bytes | None = None

    def add(self, shard: torch.Tensor, divided_by: float) -> None:
        """Add the sum of another backward, which has been divided by ``divided_by``."""
        earlier = self.take(divided_by)
        self.shard, self.divided_by = shard if earlier is None else earlier.add_(shard), divided_by

    def add_used(self, used: bytes) -> bytes:
        """Add the parameters that another backward has used (``used``), and return those of all backwards."""
        self.used = used if self.used is None else bytes(map(max, used, self.used))
        return self.used

    def take(self, divided_by: float) -> torch.Tensor | None:
        """Return the sum, divided by ``divided_by``, and remove it."""
        shard, self.shard = self.shard, None
        return shard if shard is None or self.divided_by == divided_by else shard.mul_(self.divided_by / divided_by)


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


class Gradients:
    """Holds the gradients of a group's unsharded parameters until they are reduced: ``ParamGroup.grads``.

    While a backward runs, a gradient is where autograd puts it, in ``.grad`` of the unsharded parameter: hooks and
    custom functions may read, write, clear and replace it there. When the unit's part of the backward ends,
    :meth:`collect` takes what ``.grad`` holds. In a later backward of an accumulation, :meth:`lend` puts it back first.

    Args:
        slots: the group's parameters, as modules and optimizers see them.

    Attributes:
        on_ready: called after the first gradient of the group in a backward, and after every few more.
        dtype: dtype of waiting gradients, at least as wide as the compute dtype and ``reduce_dtype``.
        reduce_dtype: dtype in which gradients are reduced.
        waiting: collected gradients that are not being reduced; None if there are none.
        reduced: reduced gradients (``ReducedGrad``) of backwards whose ``.grad`` is not set yet.
        partial: gradient that a later backward sums over the replicate group.
        pool: memory pool of the buffers.
        accept_hook: the post-accumulate-grad hook of unsharded parameters.
        unreduced: what ``.grad`` shows inside ``no_sync``.
    """

    dtype: torch.dtype
    reduce_dtype: torch.dtype

    def __init__(self, slots: Slots, pool: MemoryPool) -> None:
        self._slots, self.pool = slots, pool
        self.on_ready: Callable[[], None] = lambda: None
        self.accept_hook = partial(_accept, weakref.ref(self))
        self.waiting: FlatGradBuffer | None = None
        self._lent: dict[int, torch.Tensor] = {}  # views of the flat buffer that ``.grad`` has, by index
        self._num_accepted = 0  # in this backward
        self._spare_buffer: FlatGradBuffer | None = None
        self.unreduced: list[UnreducedGrad] = []
        self.reduced: list[Any] = []
        self.partial = ReduceScatteredGrad()

    def use_dtypes(self, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        """Collect gradients of parameters in ``compute_dtype``, and reduce them in ``reduce_dtype``, from now on."""
        self.dtype, self.reduce_dtype = torch.promote_types(compute_dtype, reduce_dtype), reduce_dtype

    def collect(self) -> bool:
        """Take the gradients that ``.grad`` of the unsharded parameters holds, to be reduced; return whether any waits.

        They are added to those that wait already, less those that the program has dropped from ``.grad``.
        """
        self._num_accepted = 0
        if self._lent:
            self._take_lent()
        slots = self._slots
        for index, param in enumerate(slots.output.params):
            grad = param.grad
            if grad is None:
                continue
            param.grad = None
            if self.unreduced:
                self.hide_unreduced()
            if grad.requires_grad:
                grad = grad.detach()  # the program has set it
            adapter, buffer = slots.params[index].adapter, self.waiting
            if adapter is not PLAIN:
                grad = adapter.to_local(grad)
            if buffer is None:
                buffer, self._spare_buffer = self._spare_buffer, None
                if buffer is None or buffer.kind != (self.dtype, grad.device):
                    buffer = FlatGradBuffer(slots.layout, self.dtype, grad.device)
                self.waiting = buffer
            buffer.add_grad(index, grad)
        return self.waiting is not None

    def lend(self) -> None:
        """Put waiting gradients back into ``.grad`` of the unsharded parameters, for a backward that adds to them.

        As on FSDP2, those that wait in another dtype than the parameter's stay apart, and are added to when the unit's
        backward ends.
        """
        if self.unreduced:
            self.hide_unreduced()
        buffer, slots = self.waiting, self._slots
        if buffer is None or buffer.kind != (slots.output.params[0].dtype, slots.output.params[0].device):
            return
        views = slots.layout.views(buffer.tensor) if slots.plan.exposes_unreduced else []
        for index, (param, entry) in enumerate(zip(slots.output.params, slots.params, strict=True)):
            if not buffer.grads_ready[index] or param.grad is not None or entry.adapter is not PLAIN:
                continue
            grad = buffer.waiting.pop(index, None)
            if grad is None:
                grad = self._lent[index] = views[index]
            param.grad = grad
            buffer.grads_ready[index] = 0

    def _take_lent(self) -> None:
        """Take back views of the flat buffer from ``.grad``; drop the gradients in the buffer that it has no more."""
        buffer, (lent, self._lent) = self.waiting, (self._lent, {})
        assert buffer is not None
        for index, view in lent.items():
            param = self._slots.output.params[index]
            if param.grad is view and is_alias(view, buffer.tensor):
                param.grad = None
                buffer.grads_ready[index] = 1
            else:
                buffer.clear([index], set_to_none=True)
        if not any(buffer.grads_ready):
            self.waiting = None
            self.recycle(buffer)

    # -- waiting gradients ---------------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """True if a gradient may wait to be reduced, or to be collected."""
        return self.waiting is not None or any(param.grad is not None for param in self._slots.output.params)

    def ready(self) -> bytes:
        """Return one byte per parameter: 1 where a collected gradient waits."""
        return bytes(len(self._slots.params)) if self.waiting is None else bytes(self.waiting.grads_ready)

    def waiting_grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient of parameter ``index`` that waits (its shape), or None; a copy of the layout's order."""
        buffer, layout = self.waiting, self._slots.layout
        if buffer is None or not buffer.grads_ready[index]:
            return None
        waiting = buffer.waiting.get(index)
        return layout.views(layout.unsharded_of(buffer.tensor))[index] if waiting is None else waiting

    def take_flat(self, memory: Allocate | None = None) -> tuple[torch.Tensor, FlatGradBuffer | None]:
        """Return the flat gradient, with memory from the pool or by ``memory``, and remove it.

        Returns:
            The gradient (1-D, ``layout.numel``, reduce dtype), zero for parameters without one; and None, or a buffer
            for :meth:`recycle` once the gradient is no longer used.
        """
        if self.unreduced:
            self.hide_unreduced()
        buffer, self.waiting = self.waiting, None
        if buffer is None:
            slots = self._slots
            return torch.zeros(slots.layout.numel, dtype=self.reduce_dtype, device=slots.spec.device), None
        closed = buffer.close(self.pool, memory)
        if closed.dtype == self.reduce_dtype:
            return closed, buffer
        flat = closed.to(self.reduce_dtype)
        self.recycle(buffer)
        return flat, None

    def recycle(self, buffer: FlatGradBuffer) -> None:
        """Return the memory of a used buffer to the pool, and keep the object for the next gradient."""
        if not buffer.is_exposed:
            self.pool.empty(buffer.tensor.untyped_storage())
            buffer.grads_ready = bytearray(len(buffer.grads_ready))
            self._spare_buffer = buffer

    def drop(self) -> None:
        """Drop all gradients."""
        self.waiting, self._num_accepted = None, 0
        self._lent.clear()
        self.partial = ReduceScatteredGrad()
        for each in self.unreduced:
            each.take_back()
        self.unreduced = []
        for unsharded_param in self._slots.output.params:
            unsharded_param.grad = None

    def clear(self, chosen: Sequence[VisibleParam], *, set_to_none: bool) -> None:
        """Drop gradients of visible parameters that are not completely reduced yet, or fill them with zeros."""
        if set_to_none and len(chosen) == len(self._slots.visible):
            self.drop()
            return
        indices = [index for each in chosen for index in each.indices]
        if self.waiting is not None:
            self.waiting.clear(indices, set_to_none=set_to_none)
        if self.partial.shard is not None:
            for each in chosen:
                each.part_of(self.partial.shard).zero_()
            if set_to_none and self.partial.used is not None:
                self.partial.used = without(self.partial.used, indices)
        for index in indices:
            unsharded_param = self._slots.output.params[index]
            if set_to_none:
                unsharded_param.grad = None
            elif unsharded_param.grad is not None:
                unsharded_param.grad.zero_()

    # -- unreduced gradients inside no_sync ----------------------------------------------------------------------

    def show_unreduced(self) -> None:
        """Set ``.grad`` to the waiting, unreduced gradients (unsharded shapes) between backwards inside ``no_sync``."""
        self.collect()
        slots, buffer = self._slots, self.waiting
        if buffer is None or self.unreduced or not slots.plan.exposes_unreduced:
            return
        flat, ready = buffer.close(self.pool), buffer.grads_ready
        if not torch._has_compatible_shallow_copy_type(slots.visible_params[0], flat):
            return  # an offloaded parameter cannot have a gradient on some kinds of devices
        buffer.is_exposed = True
        self.unreduced = [
            UnreducedGrad(each, grad, is_sharded=slots.layout.world_size > 1)
            for each, grad in zip(slots.visible, slots.unreduced_grads(flat), strict=True)
            if any(ready[each.indices.start : each.indices.stop])
        ]

    def hide_unreduced(self) -> bool:
        """Undo :meth:`show_unreduced`, and drop the gradients that the caller has set to None.

        Returns:
            Whether any gradient was shown.
        """
        exposed, self.unreduced = self.unreduced, []
        dropped = [index for each in exposed if each.take_back() for index in each.indices]
        if dropped and self.waiting is not None:
            self.waiting.clear(dropped, set_to_none=True)
            if not any(self.waiting.grads_ready):
                self.waiting = None
        return bool(exposed)


@dynamo_disabled_here
def _accept(grads: weakref.ref[Gradients], unsharded_param: torch.Tensor) -> None:
    """Note the gradient of an unsharded parameter, as its post-accumulate-grad hook.

    It raises an UnsupportedError if the gradient is differentiable (``create_graph=True``). It must not own
    ``Gradients``, which holds the parameter's autograd node: a cycle through autograd's C++ objects is never collected,
    so no wrapped model would ever be freed.
    """
    owner, grad = grads(), unsharded_param.grad
    # The graph may reach the parameter although the loss does not depend on it: an unused output.
    if owner is None or grad is None:
        return
    if grad.requires_grad:
        index = unsharded_param._fsdp_flat_index  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"A gradient of {owner._slots.describe(index)} is itself differentiable (create_graph=True). Second-order "
            "gradients through sharded parameters are not supported; take them with respect to inputs by "
            "torch.autograd.grad, or leave these modules unwrapped."
        )
    if owner._num_accepted % _GRADS_PER_CALL == 0:
        owner.on_ready()
    owner._num_accepted += 1
