"""Implements the all-gather and the reduce-scatter of a unit whose shard group spans hosts, in two levels.

Within a host ranks exchange tensors through shared memory; between hosts each byte is sent once, by gloo. The ranks in
one position of each host, such as the first of each, form a rail.

* All-gather: each rank shares its slice with its host, exchanges slices with its rail, and relays those of other hosts
  to its host.
* Reduce-scatter: each rank adds its host's parts of the slices of its rail, in the order of ranks, exchanges the sums
  with its rail, and adds those of its own slice, in the order of ranks too. Sums of 16-bit floats are computed in fp32,
  and rounded once for each host and at the end.

A caller may choose that rows of wider floats are rounded to another dtype between hosts (``CollectiveOverrides``). In
an all-gather every rank gets the rounded values, this one too, so all compute with the same parameters; in a
reduce-scatter each rank adds its own host's sum as it is.

No thread is used. The second part of a collective, a relay or the exchange of sums, begins at the next call of this
rank after the first part is complete, and at the latest when it waits for the result. On each rank the second parts of
all all-gathers of a group begin in the order of the all-gathers, and those of reduce-scatters likewise, so they need no
identification; the two kinds use different connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm.custom import PACKINGS
from fsdp_flat.comm.failures import WatchedWork
from fsdp_flat.comm.flat_collectives import CollectiveOverrides, GlooCollectives, PlacesRows, ReusesMemory, sum_in_order
from fsdp_flat.comm.given_up import Pending
from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.comm.shm.connect import Hosts, local_ranks, rail_of
from fsdp_flat.comm.streams import unrecorded


class _TwoParts:
    """Waits for the first part of a collective, begins the second by ``proceed``, and waits for that.

    Args:
        rank_group: the group.
        queue: collectives of which the second part has not begun, oldest first; this one is appended.
        first: works of the first part.
        proceed: begins the second part; returns what is pending, or None if nothing remains.
    """

    blocks_host = True

    def __init__(
        self,
        rank_group: RankGroup,
        queue: deque[_TwoParts],
        first: Sequence[Any],
        proceed: Callable[[], Pending | None],
    ) -> None:
        self.rank_group, self._queue, self._first, self._proceed = rank_group, queue, first, proceed
        self._second: Pending | None = None
        queue.append(self)

    def is_completed(self) -> bool:
        begin_second_parts(self._queue)
        if self in self._queue:
            # A first part that has failed is followed by no second one, nor are those behind it.
            return self.has_first and self._queue[0].has_failed
        return self._second is None or self._second.is_completed()

    def wait(self) -> None:
        while self in self._queue:
            self._queue[0].begin_second()
        if self._second is not None:
            self._second.wait()

    def result(self) -> torch.Tensor:
        """Return the result of the second part, which is complete."""
        assert self._second is not None
        return self._second.wait()

    @property
    def has_first(self) -> bool:
        return all(work.is_completed() for work in self._first)

    @property
    def has_failed(self) -> bool:
        """True if a work of the first part has failed, so that :meth:`begin_second` would raise."""
        return any(isinstance(work, WatchedWork) and work.has_failed() for work in self._first)

    def begin_second(self) -> None:
        """Wait for the first part and begin the second one, of the oldest collective; not if a wait raises."""
        for work in self._first:
            work.wait()
        self._queue.popleft()
        self._first = ()
        self._second = self._proceed()


def begin_second_parts(queue: deque[_TwoParts]) -> None:
    """Begin the second parts of collectives whose first part is complete, up to the oldest for which it is not."""
    while queue and queue[0].has_first and not queue[0].has_failed:
        queue[0].begin_second()


class HostCollectives(GlooCollectives):
    """Uses shared memory within the ``hosts`` of a group and gloo between them, for CPU tensors."""

    def __init__(
        self, rank_group: RankGroup, unit: int = 0, name: str = "", *, hosts: Hosts, choice: CollectiveOverrides
    ) -> None:
        super().__init__(rank_group, unit, name)
        self._hosts = hosts
        self._choice = choice
        self._local = local_ranks(hosts.ranks, self.rank)
        self._peers = [rank for rank in self._local if rank != self.rank]
        self._rails = {rank: rail_of(hosts.ranks, rank) for rank in self._local}

    def _begin_second_parts(self) -> None:
        begin_second_parts(self._hosts.gathers)
        begin_second_parts(self._hosts.sums)

    def begin_all_gather(self, tensor: torch.Tensor, target: PlacesRows | None = None) -> Pending:
        self._begin_second_parts()
        slices = tensor.chunk(self.size) if target is None else ()
        own = slices[self.rank] if target is None else tensor
        # A copy, since a caller may write to its own memory while it is sent.
        sent, unpacked = _packed(own.clone(), self._choice.gathered_between_hosts)
        if sent.dtype is not own.dtype:
            own = unpacked(sent)
            if target is None:
                slices[self.rank].copy_(own)
        direct, relayed = self._hosts.direct, self._hosts.relayed
        others = [rank for rank in self._rails[self.rank] if rank != self.rank]

        def place(rank: int, row: torch.Tensor) -> None:
            if target is None:
                slices[rank].copy_(row)
                return
            with unrecorded():
                target.place(rank, row.view(1, -1))

        def read(rank: int, messages: dict[int, torch.Tensor]) -> torch.Tensor:
            (row,) = messages.values()
            place(rank, row)
            return tensor

        direct.send("gather", dict.fromkeys(self._peers, own), unit=self._unit)
        if target is not None:
            target.place(self.rank, own.view(1, -1))
        rows, crossing = self._cross(dict.fromkeys(others, sent), self._hosts.gather_groups, "all-gather")

        def relay() -> None:
            for rank, row in rows.items():
                rows[rank] = row = unpacked(row)
                relayed.send("gather", dict.fromkeys(self._peers, row), unit=self._unit)

        def finish() -> torch.Tensor:
            for rank, row in rows.items():
                place(rank, row)
            return tensor

        works: list[Any] = [_TwoParts(self.rank_group, self._hosts.gathers, crossing, relay)]
        for peer in self._peers:
            works.append(direct.expect("gather", [peer], own, partial(read, peer), unit=self._unit))
            for rank in self._rails[peer]:
                if rank != peer:
                    works.append(relayed.expect("gather", [peer], own, partial(read, rank), unit=self._unit))
        return Pending(works, tensor, finish)

    def begin_reduce_scatter(self, full: torch.Tensor, pool: ReusesMemory | None = None) -> Pending:
        self._begin_second_parts()
        slices, rail, direct = full.chunk(self.size), self._rails[self.rank], self._hosts.direct
        dtype = self._choice.reduced_between_hosts
        for peer in self._peers:
            for rank in self._rails[peer]:
                direct.send("reduction", {peer: slices[rank]}, unit=self._unit)

        def add(rank: int, received: dict[int, torch.Tensor]) -> torch.Tensor:
            parts = [received.get(local, slices[rank]) for local in self._local]
            return slices[rank].copy_(sum_in_order(parts))

        def exchange() -> Pending:
            packed = {rank: _packed(slices[rank], dtype) for rank in rail if rank != self.rank}
            sums = {rank: row for rank, (row, _) in packed.items()}
            received, works = self._cross(sums, self._hosts.reduce_groups, "reduce-scatter")

            def total() -> torch.Tensor:
                parts = {self.rank: slices[self.rank]}
                parts.update((rank, unpacked(received[rank])) for rank, (_, unpacked) in packed.items())
                return sum_in_order([parts[rank] for rank in rail])

            return Pending(works, full, total)

        first = [
            direct.expect("reduction", self._peers, slices[rank], partial(add, rank), unit=self._unit) for rank in rail
        ]
        two_parts = _TwoParts(self.rank_group, self._hosts.sums, first, exchange)
        return Pending([two_parts], full, two_parts.result)

    def _cross(
        self, rows: dict[int, torch.Tensor], groups: tuple[RankGroup, RankGroup], operation: str
    ) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Begin to send ``rows`` to the other ranks of the rail; return those received, by rank, and the works.

        Each direction has connections of its own. Else a rank that is ready to receive could not say so before the
        bytes that it sends itself have passed, and the two directions would take turns.
        """
        rail, row = self._rails[self.rank], next(iter(rows.values()))
        lower, higher = ([rank for rank in rail if rank < self.rank], [rank for rank in rail if rank > self.rank])
        received: dict[int, torch.Tensor] = {}
        works = []
        for group, targets, sources in zip(groups, (higher, lower), (lower, higher)):
            sent = rows[targets[0]] if len(targets) == 1 else torch.cat([row[:0], *(rows[rank] for rank in targets)])
            into = row.new_empty(len(sources), row.numel())
            received.update(zip(sources, into))
            of_source, to_target = ([row.nbytes * (rank in ranks) for rank in rail] for ranks in (sources, targets))
            # As bytes, for gloo does not send every dtype.
            out, sent = into.view(-1).view(torch.uint8), sent.view(torch.uint8)
            work = dist.all_to_all_single(out, sent, of_source, to_target, group=group.group, async_op=True)
            works.append(self._watched(work, operation, sources or targets))
        return received, works


def _packed(
    row: torch.Tensor, dtype: torch.dtype | None
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a row in the bytes of ``dtype`` if these are fewer, else as it is, and the function that reads it."""
    if dtype is None or not row.numel() or not row.is_floating_point() or row.itemsize <= dtype.itemsize:
        return row, lambda received: received
    packing, numel, own = PACKINGS[dtype], row.numel(), row.dtype
    return packing.pack(row.view(1, -1)).view(-1), lambda each: packing.unpack(each.view(1, -1), numel).view(-1).to(own)
