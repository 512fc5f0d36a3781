"""Collectives on flat 1-D tensors. Every call begins work and returns a :class:`Pending`.

Every rank of the group must make the same calls in the same order. The way a collective takes depends on the backend
and on where the tensors live, and only here:

* CPU tensors of ranks that share a host, in a gloo group: through shared memory, where each rank reads the parts it
  needs.
* gloo on other CPU tensors: an all-gather is one broadcast a rank, each straight into its slice; a reduce-scatter is an
  all-to-all of slices followed by a local sum. gloo's own all_gather allocates and copies a second full
  buffer, and its reduce_scatter clones its input and all-reduces it, so it moves twice the bytes.
* gloo on accelerator tensors: broadcasts, and an all-reduce of which a slice is kept.
* everything else (NCCL, fake groups): the backend's own all_gather and reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm import _torch
from fsdp_flat.comm.causes import WatchedWork
from fsdp_flat.comm.groups import Axis, destroyed, moves_by_gloo
from fsdp_flat.comm.mailbox import Letter, Mailbox
from fsdp_flat.comm.neighbours import mailbox_of

__all__ = ["Collectives", "EmptyLike", "Pending", "begin_all_reduce", "collectives_for", "own_slice"]


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

    def name_units(self, names: dict[int, str]) -> None:
        """Takes the names of units by id, for errors."""
        ...

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
    return full[axis.rank * numel : (axis.rank + 1) * numel]


def begin_all_reduce(
    tensor: torch.Tensor, axis: Axis, *, largest: bool = False, doing: str = "an all-reduce"
) -> Pending:
    """Sum ``tensor`` over ``axis`` in place, or with ``largest`` take the maximum; errors call it ``doing``."""
    if axis.size == 1:
        return Pending((), tensor)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    work = dist.all_reduce(tensor, op=op, group=axis.group, async_op=True)
    if tensor.device.type == "cpu":
        others = [rank for rank in range(axis.size) if rank != axis.rank]
        return Pending([WatchedWork(work, axis, lambda: doing, others)], tensor)
    return Pending([work], tensor)


class _Axial:
    def __init__(self, axis: Axis) -> None:
        assert axis.group is not None
        self.axis = axis
        self.group = axis.group
        self.rank = axis.rank
        self.size = axis.size

    def name_units(self, names: dict[int, str]) -> None:
        """Does nothing: what is moved carries no ids; ranks compare their logs of collectives instead."""


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
    """gloo on CPU tensors, with the fewest bytes and copies.

    Args:
        axis: the ranks.
        name: gives the name of the unit whose tensors they are, for errors.
    """

    def __init__(self, axis: Axis, name: Callable[[], str] = str) -> None:
        super().__init__(axis)
        self._name = name
        self._others = [rank for rank in range(axis.size) if rank != axis.rank]

    def _watched(self, work: Any, operation: str, sources: list[int]) -> WatchedWork:
        return WatchedWork(work, self.axis, lambda: f"the {operation} of unit {self._name()!r}", sources)

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        # The own broadcast waits for all others.
        sources = [[rank] if rank != self.rank else self._others for rank in range(self.size)]
        works = zip(_begin_broadcasts(self, full), sources, strict=True)
        return Pending([self._watched(work, "all-gather", waited_for) for work, waited_for in works], full)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        if self.size == 2:
            return self._begin_swap(full)
        received = empty_like(full)
        begun = dist.all_to_all_single(received, full, group=self.group, async_op=True)
        work = self._watched(begun, "reduce-scatter", self._others)
        return Pending([work], full, lambda: _sum(received.chunk(self.size)), scratch=(received,), alive=(full,))

    def _begin_swap(self, full: torch.Tensor) -> Pending:
        # Of two ranks each sends one half and adds the other to what it receives, which is the result.
        halves = full.chunk(2)
        own, sent = halves[self.rank], halves[1 - self.rank]
        received = torch.empty_like(own)
        splits = [0, own.numel()] if self.rank == 0 else [own.numel(), 0]
        begun = dist.all_to_all_single(received, sent, splits, splits, group=self.group, async_op=True)
        work = self._watched(begun, "reduce-scatter", self._others)
        return Pending([work], full, lambda: received.add_(own))


class HostCollectives(_Axial):
    """CPU tensors through memory that all ranks share; the same bits as by gloo. ``unit`` is its number."""

    def __init__(self, axis: Axis, mailbox: Mailbox, unit: int) -> None:
        super().__init__(axis)
        self._mailbox = mailbox
        self._unit = unit
        self._others = [rank for rank in range(axis.size) if rank != axis.rank]

    def name_units(self, names: dict[int, str]) -> None:
        """See :class:`Collectives`."""
        self._mailbox.names.update(names)

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        chunks = full.chunk(self.size)
        self._mailbox.send("gather", [(chunks[self.rank], self._others)], unit=self._unit)
        letters = self._expect("gather", chunks[self.rank].nbytes)
        return Pending(letters.values(), full, lambda: _filled(full, chunks, letters))

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        chunks = full.chunk(self.size)
        self._mailbox.send("reduction", [(chunks[rank], (rank,)) for rank in self._others], unit=self._unit)
        letters = self._expect("reduction", chunks[self.rank].nbytes)
        return Pending(letters.values(), full, lambda: self._summed(chunks[self.rank], letters), alive=(full,))

    def _expect(self, purpose: str, nbytes: int) -> dict[int, Letter]:
        return {rank: self._mailbox.expect(purpose, rank, nbytes, unit=self._unit) for rank in self._others}

    def _summed(self, own: torch.Tensor, letters: dict[int, Letter]) -> torch.Tensor:
        parts = {rank: letter.content(own.dtype) for rank, letter in letters.items()}
        total = _sum([parts.get(rank, own) for rank in range(self.size)])
        for letter in letters.values():
            letter.close()
        return total


def _filled(full: torch.Tensor, chunks: tuple[torch.Tensor, ...], letters: dict[int, Letter]) -> torch.Tensor:
    for rank, letter in letters.items():
        chunks[rank].copy_(letter.content(full.dtype))
        letter.close()
    return full


class CpuCollectives(_Axial):
    """CPU tensors of a gloo group, by shared memory if all ranks have it in common, which the first call finds out."""

    def __init__(self, axis: Axis, unit: int = 0, name: str = "") -> None:
        super().__init__(axis)
        self._unit = unit
        self._names = {unit: name}
        self._chosen: Collectives | None = None

    def name_units(self, names: dict[int, str]) -> None:
        """See :class:`Collectives`."""
        self._names = names
        if isinstance(self._chosen, HostCollectives):
            self._chosen.name_units(names)

    def _choose(self) -> Collectives:
        if self._chosen is None:
            mailbox = mailbox_of(self.axis)
            own = None if mailbox is None else HostCollectives(self.axis, mailbox, self._unit)
            self._chosen = GlooCollectives(self.axis, lambda: self._names.get(self._unit, "")) if own is None else own
            self._chosen.name_units(self._names)
        return self._chosen

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        return self._choose().begin_all_gather(full)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        return self._choose().begin_reduce_scatter(full, empty_like)


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    # In rank order on every rank, and in fp32 for the short floats, so that the result neither
    # depends on timing nor loses bits to the number of ranks.
    if len(parts) == 2:
        return torch.add(*parts)
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide, copy=True).add_(parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total.to(dtype)


def _begin_broadcasts(axial: _Axial, full: torch.Tensor) -> list[Any]:
    try:
        ranks = dist.get_process_group_ranks(axial.group)
    except KeyError as error:
        raise destroyed(axial.group) from error
    return [
        dist.broadcast(chunk, src=source, group=axial.group, async_op=True)
        for chunk, source in zip(full.chunk(axial.size), ranks, strict=True)
    ]


def collectives_for(axis: Axis, device: torch.device, *, unit: int = 0, name: str = "") -> Collectives | None:
    """The cheapest gather and reduction for an axis on ``device``; None for one rank alone, which needs none.

    Args:
        axis: the ranks.
        device: the device of compute.
        unit: number of the unit whose tensors they are, the same on every rank; 0 for none. Where ranks tell each
            other, tensors of another unit are an error.
        name: what that error calls the unit.
    """
    if axis.group is None or axis.size == 1:
        return None
    if moves_by_gloo(axis.group, device):
        return CpuCollectives(axis, unit, name) if device.type == "cpu" else GlooAcceleratorCollectives(axis)
    return BackendCollectives(axis)
