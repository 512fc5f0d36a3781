"""Implements collectives on flat 1-D tensors. Every call begins asynchronous work and returns a :class:`Pending`.

Every rank of the group must make the same calls in the same order. Only this module selects the implementation, by
backend and device of the tensors:

* CPU tensors of ranks on one host, in a gloo group: shared memory, from which each rank reads the slices it needs.
* gloo on other CPU tensors: an all-gather is one broadcast per rank, each directly into its slice; a reduce-scatter is
  an all-to-all of slices followed by a local sum. gloo's all_gather allocates and copies a second full buffer, and its
  reduce_scatter clones its input and all-reduces it, so it moves twice the bytes.
* gloo on accelerator tensors: broadcasts, and an all-reduce of which a slice is kept.
* everything else (NCCL, fake groups): the backend's all_gather and reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm import _torch
from fsdp_flat.comm.failures import WatchedWork, unit_names
from fsdp_flat.comm.rank_groups import RankGroup, destroyed_error, moves_by_gloo
from fsdp_flat.comm.shm import ExpectedMessage, HostTransport, transport_of


class Pending:
    """Represents asynchronous work. ``wait`` may be called more than once; only the first call has an effect.

    Args:
        works: the work; None for work that is complete.
        result: the work's output.
        finish: computes the result from the output, once the work is complete.
        scratch: temporary tensors of the work.
        alive: tensors to keep alive until the work is complete.

    Attributes:
        result: the result, valid after ``wait``.
        scratch: temporary tensors of the work, whose memory may be reused after ``wait``.
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

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return self._works is None or all(work is None or work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        """Block until the result is ready (on an accelerator: until the current stream may use it), and return it."""
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

PlaceRows = Callable[[int, torch.Tensor], None]
"""Copies ``(first rank, rows)`` to where they belong; ``rows`` is 2-D, each row the input of one more rank."""


class Collectives(Protocol):
    """Describes the collectives of one shard group on flat tensors."""

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        """Begin to all-gather ``full`` (1-D, numel a multiple of the group size), which contains this rank's slice."""
        ...

    def begin_all_gather_rows(self, own: torch.Tensor, place: PlaceRows) -> Pending:
        """Begin to all-gather ``own`` (1-D), whose elements from every rank ``place`` copies to where they belong."""
        ...

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        """Begin to sum ``full`` over the group; the result is this rank's slice, in separate memory.

        Args:
            full: 1-D, its numel a multiple of the group size; it may be overwritten.
            empty_like: allocates the temporary tensors in ``scratch`` of the returned :class:`Pending`.
        """
        ...


def own_slice(full: torch.Tensor, rank_group: RankGroup) -> torch.Tensor:
    """Return this rank's slice of ``full``, without views of the slices of thousands of other ranks."""
    numel = full.numel() // rank_group.size
    return full[rank_group.rank * numel : (rank_group.rank + 1) * numel]


def begin_staged_all_gather(
    begin: Callable[[torch.Tensor], Pending],
    rank_group: RankGroup,
    own: torch.Tensor,
    place: PlaceRows,
    staging: torch.Tensor | None = None,
) -> Pending:
    """Implement ``begin_all_gather_rows`` by an all-gather into a temporary tensor in rank order.

    Args:
        begin: begins to all-gather the temporary tensor in place.
        rank_group: the ranks.
        own: as for ``begin_all_gather_rows``.
        place: likewise.
        staging: the temporary tensor (1-D); None allocates it.
    """
    if staging is None:
        staging = own.new_empty(rank_group.size * own.numel())
    own_slice(staging, rank_group).copy_(own)
    pending = begin(staging)

    def finish() -> torch.Tensor:
        with torch.no_grad():
            place(0, pending.wait().view(rank_group.size, -1))
        return own

    return Pending([pending], own, finish, alive=(staging,))


def begin_all_reduce(
    tensor: torch.Tensor, rank_group: RankGroup, *, largest: bool = False, collective: str = "an all-reduce"
) -> Pending:
    """Begin to all-reduce ``tensor`` in place, by sum or (``largest``) by maximum; errors name ``collective``."""
    if rank_group.size == 1:
        return Pending((), tensor)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    work = dist.all_reduce(tensor, op=op, group=rank_group.group, async_op=True)
    if tensor.device.type == "cpu":
        others = [rank for rank in range(rank_group.size) if rank != rank_group.rank]
        return Pending([WatchedWork(work, rank_group, lambda: collective, others)], tensor)
    return Pending([work], tensor)


class _RankGroupCollectives:
    def __init__(self, rank_group: RankGroup) -> None:
        assert rank_group.group is not None
        self.rank_group = rank_group
        self.group = rank_group.group
        self.rank = rank_group.rank
        self.size = rank_group.size
        self._others = [rank for rank in range(rank_group.size) if rank != rank_group.rank]

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        raise NotImplementedError

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        raise NotImplementedError

    def begin_all_gather_rows(self, own: torch.Tensor, place: PlaceRows) -> Pending:
        return begin_staged_all_gather(self.begin_all_gather, self.rank_group, own, place)


class BackendCollectives(_RankGroupCollectives):
    """Calls the backend's all_gather and reduce_scatter."""

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        work = _torch.all_gather_single(full, own_slice(full, self.rank_group), group=self.group, async_op=True)
        return Pending([work], full)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        out = full.new_empty(full.numel() // self.size)
        work = _torch.reduce_scatter_single(out, full, group=self.group, async_op=True)
        return Pending([work], out, alive=(full,))


class GlooAcceleratorCollectives(_RankGroupCollectives):
    """Uses gloo on accelerator tensors, for tests of several ranks on one device."""

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        return Pending(_begin_broadcasts(self, full), full)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        work = dist.all_reduce(full, group=self.group, async_op=True)
        return Pending([work], full, lambda: own_slice(full, self.rank_group).clone())


class GlooCollectives(_RankGroupCollectives):
    """Uses gloo on CPU tensors, with the fewest bytes and copies. ``unit`` is the unit id."""

    def __init__(self, rank_group: RankGroup, unit: int = 0) -> None:
        super().__init__(rank_group)
        self._unit = unit

    def _describe(self, operation: str) -> str:
        return f"the {operation} of unit {unit_names(self.group).get(self._unit, '')!r}"

    def _watched(self, work: Any, operation: str, sources: list[int]) -> WatchedWork:
        return WatchedWork(work, self.rank_group, partial(self._describe, operation), sources)

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        # This rank's broadcast waits for all other ranks.
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
        # With two ranks, each sends one half and adds its other half to the one that it receives.
        halves = full.chunk(2)
        own, sent = halves[self.rank], halves[1 - self.rank]
        received = torch.empty_like(own)
        splits = [0, own.numel()] if self.rank == 0 else [own.numel(), 0]
        begun = dist.all_to_all_single(received, sent, splits, splits, group=self.group, async_op=True)
        work = self._watched(begun, "reduce-scatter", self._others)
        return Pending([work], full, lambda: received.add_(own))


class HostCollectives(_RankGroupCollectives):
    """Uses shared memory for CPU tensors; results equal gloo's bit for bit. ``unit`` is the unit id."""

    def __init__(self, rank_group: RankGroup, transport: HostTransport, unit: int) -> None:
        super().__init__(rank_group)
        self._transport = transport
        self._unit = unit

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        chunks = full.chunk(self.size)
        self._transport.send("gather", [(chunks[self.rank], self._others)], unit=self._unit)
        messages = self._expect("gather", chunks[self.rank].nbytes)
        return Pending(messages.values(), full, lambda: _filled(full, chunks, messages))

    def begin_all_gather_rows(self, own: torch.Tensor, place: PlaceRows) -> Pending:
        self._transport.send("gather", [(own, self._others)], unit=self._unit)
        messages = self._expect("gather", own.nbytes)
        place(self.rank, own.view(1, -1))
        return Pending(messages.values(), own, lambda: _placed(own, place, messages))

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        chunks = full.chunk(self.size)
        self._transport.send("reduction", [(chunks[rank], (rank,)) for rank in self._others], unit=self._unit)
        messages = self._expect("reduction", chunks[self.rank].nbytes)
        return Pending(messages.values(), full, lambda: self._summed(chunks[self.rank], messages), alive=(full,))

    def _expect(self, purpose: str, nbytes: int) -> dict[int, ExpectedMessage]:
        return {rank: self._transport.expect(purpose, rank, nbytes, unit=self._unit) for rank in self._others}

    def _summed(self, own: torch.Tensor, messages: dict[int, ExpectedMessage]) -> torch.Tensor:
        parts = {rank: message.content(own.dtype) for rank, message in messages.items()}
        total = _sum([parts.get(rank, own) for rank in range(self.size)])
        for message in messages.values():
            message.close()
        return total


def _filled(full: torch.Tensor, chunks: tuple[torch.Tensor, ...], messages: dict[int, ExpectedMessage]) -> torch.Tensor:
    for rank, message in messages.items():
        chunks[rank].copy_(message.content(full.dtype))
        message.close()
    return full


def _placed(own: torch.Tensor, place: PlaceRows, messages: dict[int, ExpectedMessage]) -> torch.Tensor:
    with torch.no_grad():
        for rank, message in messages.items():
            place(rank, message.content(own.dtype).view(1, -1))
            message.close()
    return own


class CpuCollectives(_RankGroupCollectives):
    """Uses shared memory for the CPU tensors of a gloo group if its ranks have it, else gloo.

    The first call determines which.
    """

    def __init__(self, rank_group: RankGroup, unit: int = 0, name: str = "") -> None:
        super().__init__(rank_group)
        self._unit = unit
        self._name = name
        self._chosen: Collectives | None = None

    def _choose(self) -> Collectives:
        if self._chosen is None:
            unit_names(self.group).setdefault(self._unit, self._name)
            transport = transport_of(self.rank_group)
            self._chosen = (
                GlooCollectives(self.rank_group, self._unit)
                if transport is None
                else HostCollectives(self.rank_group, transport, self._unit)
            )
        return self._chosen

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        return self._choose().begin_all_gather(full)

    def begin_all_gather_rows(self, own: torch.Tensor, place: PlaceRows) -> Pending:
        return self._choose().begin_all_gather_rows(own, place)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        return self._choose().begin_reduce_scatter(full, empty_like)


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    # In rank order on every rank, and in fp32 for 16-bit floats, so that the result neither depends on timing nor
    # loses precision with more ranks.
    if len(parts) == 2:
        return torch.add(*parts)
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide, copy=True).add_(parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total.to(dtype)


def _begin_broadcasts(group_collectives: _RankGroupCollectives, full: torch.Tensor) -> list[Any]:
    try:
        ranks = dist.get_process_group_ranks(group_collectives.group)
    except (KeyError, ValueError) as error:
        raise destroyed_error(group_collectives.group) from error
    return [
        dist.broadcast(chunk, src=source, group=group_collectives.group, async_op=True)
        for chunk, source in zip(full.chunk(group_collectives.size), ranks, strict=True)
    ]


def collectives_for(
    rank_group: RankGroup, device: torch.device, *, unit: int = 0, name: str = "", backend: bool = False
) -> Collectives | None:
    """Return the cheapest collectives for a group on ``device``; None for a single rank, which needs none.

    Args:
        rank_group: the ranks.
        device: the compute device.
        unit: id of the tensors' unit, equal on every rank; 0 for none. Transports that send the id raise an error if
            ranks issue collectives of different units.
        name: name of the unit in that error.
        backend: use the backend's all_gather and reduce_scatter, also where others are cheaper.
    """
    if rank_group.group is None or rank_group.size == 1:
        return None
    if not backend and moves_by_gloo(rank_group.group, device):
        return (
            CpuCollectives(rank_group, unit, name) if device.type == "cpu" else GlooAcceleratorCollectives(rank_group)
        )
    return BackendCollectives(rank_group)
