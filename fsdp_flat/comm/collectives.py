"""Collectives on flat 1-D tensors. Every call begins work and returns a :class:`Pending`.

What a gather or a reduction is made of depends on the backend and on where the tensors live, and only here:

* gloo on CPU tensors: a gather is one broadcast a rank, each straight into its slice; a reduction is an
  all-to-all of slices followed by a local sum. gloo's own all_gather allocates and copies a second full
  buffer, and its reduce_scatter clones its input and all-reduces it, so it moves twice the bytes.
* gloo on accelerator tensors: broadcasts, and an all-reduce of which a slice is kept.
* everything else (NCCL, fake groups): the backend's own all_gather and reduce_scatter.

Every rank of the group must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm import _torch
from fsdp_flat.comm.groups import Axis

__all__ = [
    "Collectives",
    "EmptyLike",
    "Pending",
    "begin_all_reduce",
    "collectives_for",
    "is_simulated",
    "moves_by_gloo",
    "own_slice",
]


class Pending:
    """Work that was begun. ``wait`` may be called more than once; only the first call does something.

    Args:
        works: what is under way; None for work that is over.
        result: what the work gives.
        finish: makes the result of it, once the work is over.
        scratch: tensors that serve the work alone.
        alive: tensors to keep until the work is over.

    Attributes:
        result: what the work gives, valid after ``wait``.
        scratch: tensors that served the work alone and whose memory is free after ``wait``.
    """

    __slots__ = ("_alive", "_finish", "_works", "result", "scratch")

    def __init__(
        self,
        works: Iterable[Any],
        result: torch.Tensor,
        finish: Callable[[], torch.Tensor] | None = None,
        scratch: tuple[torch.Tensor, ...] = (),
        alive: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self._works: tuple[Any, ...] | None = tuple(works)
        self._finish = finish
        self._alive = alive
        self.result = result
        self.scratch = scratch

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._works is None or all(work is None or work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        """Block until the result is there (on an accelerator: until the current stream may use it)."""
        if self._works is not None:
            works, self._works = self._works, None
            for work in works:
                if work is not None:
                    work.wait()
            if self._finish is not None:
                self.result = self._finish()
                self._finish = None
            self._alive = ()
        return self.result


EmptyLike = Callable[[torch.Tensor], torch.Tensor]


class Collectives(Protocol):
    """How one shard axis gathers and reduces flat tensors."""

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        """Fill ``full`` (1-D, numel a multiple of the axis size) from every rank's slice; the own one is in place."""
        ...

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        """Sum ``full`` over the axis; the result is this rank's slice, a tensor of its own. ``full`` is used up.

        Args:
            full: 1-D, its numel a multiple of the axis size.
            empty_like: gives memory for what the pending result names as scratch.
        """
        ...


def own_slice(full: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's slice of ``full``, without making those of thousands of others."""
    numel = full.numel() // axis.size
    return full.narrow(0, axis.rank * numel, numel)


class _Axial:
    def __init__(self, axis: Axis) -> None:
        assert axis.group is not None
        self.axis = axis
        self.group = axis.group
        self.rank = axis.rank
        self.size = axis.size


class BackendCollectives(_Axial):
    """The backend's own all_gather and reduce_scatter."""

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        work = _torch.all_gather_single(full, own_slice(full, self.axis), group=self.group, async_op=True)
        return Pending([work], full)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        out = full.new_empty(full.numel() // self.size)
        work = _torch.reduce_scatter_single(out, full, group=self.group, async_op=True)
        return Pending([work], out, alive=(full,))


class GlooAcceleratorCollectives(_Axial):
    """gloo on accelerator tensors, for tests of several ranks on one device."""

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        return Pending(_begin_broadcasts(self, full), full)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        work = dist.all_reduce(full, group=self.group, async_op=True)
        return Pending([work], full, lambda: own_slice(full, self.axis).clone())


class GlooCollectives(_Axial):
    """gloo on CPU tensors, with the fewest bytes and copies."""

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        return Pending(_begin_broadcasts(self, full), full)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        if self.size == 2:
            return self._begin_swap(full)
        received = empty_like(full)
        work = dist.all_to_all_single(received, full, group=self.group, async_op=True)
        return Pending([work], full, lambda: self._sum(received), scratch=(received,), alive=(full,))

    def _begin_swap(self, full: torch.Tensor) -> Pending:
        # Of two ranks each sends one half and adds the other to what it receives, which is the result.
        halves = full.chunk(2)
        own, sent = halves[self.rank], halves[1 - self.rank]
        received = torch.empty_like(own)
        splits = [0, own.numel()] if self.rank == 0 else [own.numel(), 0]
        work = dist.all_to_all_single(received, sent, splits, splits, group=self.group, async_op=True)
        return Pending([work], full, lambda: received.add_(own))

    def _sum(self, received: torch.Tensor) -> torch.Tensor:
        # In rank order on every rank, and in fp32 for the short floats, so that the result neither
        # depends on timing nor loses bits to the number of ranks.
        chunks = received.chunk(self.size)
        dtype = received.dtype
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        total = chunks[0].to(wide, copy=True)
        for chunk in chunks[1:]:
            total.add_(chunk)
        return total.to(dtype)


def _begin_broadcasts(axial: _Axial, full: torch.Tensor) -> list[Any]:
    return [
        dist.broadcast(chunk, src=source, group=axial.group, async_op=True)
        for chunk, source in zip(full.chunk(axial.size), dist.get_process_group_ranks(axial.group), strict=True)
    ]


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` only pretends to communicate (torch's "fake" backend), so that nothing can be compared."""
    return dist.get_backend(group) == "fake"


def collectives_for(axis: Axis, device: torch.device) -> Collectives:
    """The cheapest gather and reduction for an axis of more than one rank on ``device``."""
    assert axis.group is not None
    if moves_by_gloo(axis.group, device):
        return GlooCollectives(axis) if device.type == "cpu" else GlooAcceleratorCollectives(axis)
    return BackendCollectives(axis)


def moves_by_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo is what moves tensors of ``device`` in ``group``."""
    if is_simulated(group):
        return False
    try:
        return group._get_backend(device).name() == "gloo"
    except RuntimeError:
        return False


def begin_all_reduce(tensor: torch.Tensor, axis: Axis, *, largest: bool = False) -> Pending:
    """Sum ``tensor`` over ``axis`` in place, or with ``largest`` take the maximum."""
    if axis.size == 1:
        return Pending((), tensor)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    return Pending([dist.all_reduce(tensor, op=op, group=axis.group, async_op=True)], tensor)
