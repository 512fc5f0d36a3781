"""Implements collectives on flat 1-D tensors. Every call begins asynchronous work and returns a :class:`Pending`.

Every rank of the group must make the same calls in the same order. Only this module selects the implementation, by
backend and device of the tensors:

* CPU tensors of ranks on one host, in a gloo group: shared memory, from which each rank reads the slices it needs.
* gloo on other CPU tensors: an all-gather is one broadcast per rank, each directly into its slice; a reduce-scatter is
  an all-to-all of slices followed by a local sum. gloo's all_gather allocates and copies a second full buffer, and its
  reduce_scatter clones its input and all-reduces it, so it moves twice the bytes.
* gloo on accelerator tensors, for tests: broadcasts, and an all-reduce of which a slice is kept.
* everything else (NCCL, fake groups): the backend's all_gather and reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm import torch_comm
from fsdp_flat.comm.custom import AllGather, Allocate, ReduceScatter
from fsdp_flat.comm.exchanges import WatchedWork, unit_names
from fsdp_flat.comm.rank_groups import RankGroup, destroyed_error, moves_by_gloo
from fsdp_flat.comm.shm import Message, SharedMemoryTransport, transport_of
from fsdp_flat.comm.streams import Pending, unrecorded

EmptyLike = Callable[[torch.Tensor], torch.Tensor]
Finish = Callable[[], object]


class PlacesRows(Protocol):
    """Describes a receiver of the rows of an all-gather, each the input of one rank: ``RowTarget`` (``flat``)."""

    def place(self, first: int, rows: torch.Tensor) -> object: ...

    # The function is called once, when all rows are there, and may free the memory.
    def stage(self, own: torch.Tensor, rank: int, num_ranks: int) -> tuple[torch.Tensor, Finish]: ...


class Collectives:
    """Runs the collectives of one shard group of more than one rank on flat tensors: here, those of its backend."""

    def __init__(self, rank_group: RankGroup) -> None:
        assert rank_group.group is not None
        self.rank_group = rank_group
        self.group = rank_group.group
        self.rank = rank_group.rank
        self.size = rank_group.size

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        """Begin to all-gather ``full`` (1-D, numel a multiple of the group size), which contains this rank's slice."""
        return Pending([self._gather_into(full)], full)

    def begin_all_gather_rows(self, own: torch.Tensor, target: PlacesRows) -> Pending:
        """Begin to all-gather ``own`` (1-D), a row of ``target``."""
        return self._begin_staged(own, *target.stage(own, self.rank, self.size))

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        """Begin to sum ``full`` (1-D, numel a multiple of the group size), which may be overwritten, over the group.

        The result is this rank's slice, in separate memory. ``empty_like`` allocates :attr:`Pending.scratch`.
        """
        out = full.new_empty(full.numel() // self.size)
        work = torch_comm.reduce_scatter_single(out, full, group=self.group, async_op=True)
        return Pending([work], out, alive=(full,))

    def _gather_into(self, full: torch.Tensor) -> Any:
        """Begin to all-gather ``full``, which contains this rank's slice, and return the work."""
        return torch_comm.all_gather_single(full, self._own_slice(full), group=self.group, async_op=True)

    def _own_slice(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of ``full``, without views of the slices of thousands of other ranks."""
        numel = full.numel() // self.size
        return full[self.rank * numel : (self.rank + 1) * numel]

    def _begin_staged(self, own: torch.Tensor, staging: torch.Tensor, place_all: Finish) -> Pending:
        """Begin to all-gather this rank's slice of ``staging`` there; ``place_all`` follows.

        The slice is a copy of ``own``, the result: ranks get its values, whatever a caller writes to the shard
        meanwhile.
        """
        work = self._gather_into(staging)

        def finish() -> torch.Tensor:
            with unrecorded():
                place_all()
            return own

        return Pending([work], own, finish)

    def _begin_broadcasts(self, full: torch.Tensor) -> list[Any]:
        try:
            ranks = dist.get_process_group_ranks(self.group)
        except (KeyError, ValueError) as error:
            raise destroyed_error(self.group) from error
        chunks = zip(full.chunk(self.size), ranks, strict=True)
        return [dist.broadcast(chunk, src=source, group=self.group, async_op=True) for chunk, source in chunks]


class GlooAcceleratorCollectives(Collectives):
    """Uses gloo on accelerator tensors, for tests of several ranks on one device."""

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        work = dist.all_reduce(full, group=self.group, async_op=True)
        return Pending([work], full, lambda: self._own_slice(full).clone())

    def _gather_into(self, full: torch.Tensor) -> Pending:
        return Pending(self._begin_broadcasts(full), full)


class CpuCollectives(Collectives):
    """Uses shared memory for the CPU tensors of a gloo group if its ranks have it, else gloo; equal bit for bit.

    The first call determines which, by a collective. Errors name the unit by its id ``unit`` and ``name``.
    """

    def __init__(self, rank_group: RankGroup, unit: int = 0, name: str = "") -> None:
        super().__init__(rank_group)
        self._others = rank_group.others
        self._unit = unit
        self._name = name
        self._transport: SharedMemoryTransport | None = None
        self._has_chosen = False

    # Not a cached_property: before Python 3.12 it holds a lock of all instances, and this waits for other ranks.
    def _choose(self) -> SharedMemoryTransport | None:
        """Return the shared-memory transport; None for gloo."""
        if not self._has_chosen:
            unit_names(self.group).setdefault(self._unit, self._name)
            self._transport = transport_of(self.rank_group)
            self._has_chosen = True
        return self._transport

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        transport = self._choose()
        if transport is None:
            broadcasts = enumerate(self._begin_broadcasts(full))
            return Pending([self._watched(work, "all-gather", source) for source, work in broadcasts], full)
        chunks = full.chunk(self.size)
        messages = self._swap(transport, "gather", [(chunks[self.rank], self._others)])

        def finish() -> torch.Tensor:
            for rank, message in messages.items():
                chunks[rank].copy_(message.content(full.dtype))
                message.close()
            return full

        return Pending(messages.values(), full, finish)

    def begin_all_gather_rows(self, own: torch.Tensor, target: PlacesRows) -> Pending:
        transport = self._choose()
        if transport is None:
            return super().begin_all_gather_rows(own, target)
        messages = self._swap(transport, "gather", [(own, self._others)])
        target.place(self.rank, own.view(1, -1))

        def finish() -> torch.Tensor:
            with torch.no_grad():
                for rank, message in messages.items():
                    target.place(rank, message.content(own.dtype).view(1, -1))
                    message.close()
            return own

        return Pending(messages.values(), own, finish)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        transport = self._choose()
        chunks = full.chunk(self.size)
        own = chunks[self.rank]
        if transport is not None:
            messages = self._swap(transport, "reduction", [(chunks[rank], (rank,)) for rank in self._others])

            def finish() -> torch.Tensor:
                parts = {rank: message.content(own.dtype) for rank, message in messages.items()}
                total = _sum([parts.get(rank, own) for rank in range(self.size)])
                for message in messages.values():
                    message.close()
                return total

            return Pending(messages.values(), full, finish, alive=(full,))
        if self.size == 2:
            # Each rank sends one half and adds its other half to the one that it receives.
            half = torch.empty_like(own)
            splits = [0, own.numel()] if self.rank == 0 else [own.numel(), 0]
            sent = chunks[1 - self.rank]
            work = dist.all_to_all_single(half, sent, splits, splits, group=self.group, async_op=True)
            return Pending([self._watched(work, "reduce-scatter", self.rank)], full, lambda: half.add_(own))
        received = empty_like(full)
        work = dist.all_to_all_single(received, full, group=self.group, async_op=True)
        watched = self._watched(work, "reduce-scatter", self.rank)
        return Pending([watched], full, lambda: _sum(received.chunk(self.size)), scratch=(received,), alive=(full,))

    def _gather_into(self, full: torch.Tensor) -> Pending:
        return self.begin_all_gather(full)

    def _swap(
        self, transport: SharedMemoryTransport, purpose: str, sent: list[tuple[torch.Tensor, Sequence[int]]]
    ) -> dict[int, Message]:
        """Send tensors to their ranks, and expect one of the same length from every other rank."""
        transport.send(purpose, sent, unit=self._unit)
        nbytes = sent[0][0].nbytes
        return {rank: transport.expect(purpose, rank, nbytes, unit=self._unit) for rank in self._others}

    def _watched(self, work: Any, operation: str, source: int) -> WatchedWork:
        """Watch a work that waits for the rank ``source``, or for all others if that is this rank."""
        sources = self._others if source == self.rank else [source]
        return WatchedWork(work, self.rank_group, partial(self._describe, operation), sources)

    def _describe(self, operation: str) -> str:
        return f"the {operation} of unit {unit_names(self.group).get(self._unit, '')!r}"


@dataclass(frozen=True, slots=True)
class CollectiveChoice:
    """Holds the parts of a unit's collectives that a caller has replaced.

    Attributes:
        gather_memory: allocates the outputs of all-gathers, which are copied from there; None uses the unit's buffers.
        reduce_memory: allocates the inputs and outputs of reduce-scatters; None uses the unit's buffers.
        reduce_group: group of the shard group's ranks for reduce-scatters; None uses the shard group.
        backend: the library's are the backend's all_gather and reduce_scatter, also where others are cheaper.
    """

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    gather_memory: Allocate | None = None
    reduce_memory: Allocate | None = None
    reduce_group: RankGroup | None = None
    backend: bool = False


_OWN = CollectiveChoice()


class CustomCollectives(Collectives):
    """Replaces parts of the library's collectives, of which reduce-scatters may have another group, by a caller's.

    With memory of the caller's and no collective, the backend's is called in that memory.
    """

    def __init__(self, own: Collectives, own_reductions: Collectives, choice: CollectiveChoice) -> None:
        super().__init__(own.rank_group)
        self._own = own
        self._own_reductions = own_reductions
        self._choice = choice

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        if not self._replaces_gather_of(full):
            return self._own.begin_all_gather(full)
        if self._choice.gather_memory is None:
            return super().begin_all_gather(full)
        pending = self._begin_in_memory(self._own_slice(full), lambda rows: full.copy_(rows.view(-1)))
        return Pending([pending], full)

    def begin_all_gather_rows(self, own: torch.Tensor, target: PlacesRows) -> Pending:
        if not self._replaces_gather_of(own):
            return self._own.begin_all_gather_rows(own, target)
        if self._choice.gather_memory is None:
            return super().begin_all_gather_rows(own, target)
        return self._begin_in_memory(own, partial(target.place, 0))

    def _replaces_gather_of(self, tensor: torch.Tensor) -> bool:
        # Quantized all-gathers are for floats; integer parameters use the library's all-gather.
        is_replaced = self._choice.all_gather is not None or self._choice.gather_memory is not None
        return is_replaced and tensor.is_floating_point()

    def _begin_in_memory(self, own: torch.Tensor, place: Callable[[torch.Tensor], object]) -> Pending:
        assert self._choice.gather_memory is not None
        staging = self._choice.gather_memory((self.size * own.numel(),), dtype=own.dtype, device=own.device)
        rows = staging.view(self.size, -1)
        rows[self.rank].copy_(own)
        return self._begin_staged(own, staging, partial(place, rows))

    def _gather_into(self, full: torch.Tensor) -> Any:
        all_gather = self._choice.all_gather or torch_comm.all_gather_single
        return all_gather(full, self._own_slice(full), self.group, async_op=True)

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        reduce_scatter, memory = self._choice.reduce_scatter, self._choice.reduce_memory
        if reduce_scatter is None and memory is None:
            return self._own_reductions.begin_reduce_scatter(full, empty_like)
        group = self._own_reductions.group
        if memory is not None:
            full = memory((full.numel(),), dtype=full.dtype, device=full.device).copy_(full)
        out = (memory or torch.empty)((full.numel() // self.size,), dtype=full.dtype, device=full.device)
        if reduce_scatter is None:
            work = torch_comm.reduce_scatter_single(out, full, group=group, async_op=True)
        else:
            work = reduce_scatter(out, full, group, dist.ReduceOp.SUM, async_op=True)
        # The result becomes a gradient, which outlives memory of the caller.
        return Pending([work], out, None if memory is None else out.clone, alive=(full,))


def collectives_for(
    rank_group: RankGroup,
    device: torch.device,
    choice: CollectiveChoice = _OWN,
    *,
    unit: int = 0,
    name: str = "",
) -> Collectives | None:
    """Return the cheapest collectives for a group on ``device``; None for a single rank, which needs none.

    ``unit`` is the id of the tensors' unit, equal on every rank, or 0. Transports that send it raise an error, with the
    ``name``, if ranks issue collectives of different units.
    """

    def of_library(rank_group: RankGroup) -> Collectives:
        assert rank_group.group is not None
        if choice.backend or not moves_by_gloo(rank_group.group, device):
            return Collectives(rank_group)
        if device.type == "cpu":
            return CpuCollectives(rank_group, unit, name)
        return GlooAcceleratorCollectives(rank_group)

    if rank_group.group is None or rank_group.size == 1:
        return None
    own = of_library(rank_group)
    if replace(choice, backend=False) == _OWN:
        return own
    return CustomCollectives(own, own if choice.reduce_group is None else of_library(choice.reduce_group), choice)


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
