"""Holds the gradients of a handle that wait for a reduction, or for the rest of a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from fsdp_flat.flat.arrangement import VisibleParam, can_chunk, grad_places, split_grad
from fsdp_flat.flat.buffers import FlatBuffer, MemoryPool
from fsdp_flat.flat.guards import set_grad
from fsdp_flat.flat.torch_flat import chunk_cat
from fsdp_flat.layout import FlatLayout

_DTYPE = attrgetter("dtype")


class FlatGradBuffer:
    """Collects the gradients of parameters, and copies them into a flat buffer at once when closed.

    It is closed after the parameters were freed, so that the buffer can reuse their memory. Later gradients are added
    to the buffer.

    Attributes:
        grads_ready: one byte per parameter: 1 where it has a gradient.
        waiting: the gradients that are not in the flat buffer yet, by the parameter's index.
        is_exposed: a caller has views of the buffer, so its memory must not be reused.
        kind: dtype and device of the buffer.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = FlatBuffer(torch.empty(layout.numel, dtype=dtype, device=device))
        flat = self._buffer.tensor
        self._layout, self.kind = layout, (dtype, device)
        self._places = grad_places(flat, layout)
        # The gradient as a matrix with a row for each rank, if one operation can write it.
        self._rows = flat.view(layout.world_size, -1) if can_chunk(layout) else None
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
                grads = list(map(self.waiting.__getitem__, range(len(self._places))))
                if set(map(_DTYPE, grads)) == {self._rows.dtype}:  # it converts slowly
                    chunk_cat(grads, 0, self._layout.world_size, out=self._rows)
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


def apply_hooks(hooks: Mapping[int, Callable[..., Any]], grad: torch.Tensor) -> torch.Tensor:
    """Pass a gradient through gradient hooks of a parameter that is not in the autograd graph."""
    for hook in hooks.values():
        result = hook(grad)
        grad = grad if result is None else result
    return grad


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
