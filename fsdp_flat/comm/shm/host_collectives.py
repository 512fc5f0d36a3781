"""Implements the all-gather and the reduce-scatter of a unit whose shard group spans hosts, in two levels.

Within a host ranks exchange tensors through shared memory; between hosts each byte is sent once, by gloo. For each
rank, one rank of every other host is the carrier of its slices: the one in the same position among the ranks of its
host.

* All-gather: each rank shares its slice with its host and sends it to its carriers, which relay it to their hosts.
* Reduce-scatter: each rank shares with the carriers on its host the slices that they carry. A carrier adds them in the
  order of ranks and sends the sum to the rank that the slice belongs to, which adds the sums of all hosts in the order
  of the hosts' first ranks. Sums of 16-bit floats are computed in fp32, and rounded once for each host and at the end.

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

from fsdp_flat.comm.flat_collectives import GlooCollectives, PlacesRows, ReusesMemory, sum_in_order
from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.comm.shm.connect import Hosts
from fsdp_flat.comm.streams import Pending, unrecorded


class _TwoParts:
    """Waits for the first part of a collective, begins the second by ``proceed``, and waits for that.

    Args:
        queue: collectives of which the second part has not begun, oldest first; this one is appended.
        first: works of the first part.
        proceed: begins the second part; returns its work, or None if nothing remains.
    """

    def __init__(self, queue: deque[_TwoParts], first: Sequence[Any], proceed: Callable[[], Any]) -> None:
        self._queue, self._first, self._proceed = queue, first, proceed
        self._second: Any = None
        queue.append(self)

    def is_completed(self) -> bool:
        begin_second_parts(self._queue)
        return self not in self._queue and (self._second is None or self._second.is_completed())

    def wait(self) -> None:
        while self in self._queue:
            self._queue[0].begin_second()
        if self._second is not None:
            self._second.wait()

    @property
    def has_first(self) -> bool:
        return all(work.is_completed() for work in self._first)

    def begin_second(self) -> None:
        """Wait for the first part and begin the second one, of the oldest collective."""
        self._queue.popleft()
        for work in self._first:
            work.wait()
        self._second = self._proceed()


def begin_second_parts(queue: deque[_TwoParts]) -> None:
    """Begin the second parts of collectives whose first part is complete, up to the oldest for which it is not."""
    while queue and queue[0].has_first:
        queue[0].begin_second()


class HostCollectives(GlooCollectives):
    """Uses shared memory within the ``hosts`` of a group and gloo between them, for CPU tensors."""

    def __init__(self, rank_group: RankGroup, unit: int = 0, name: str = "", *, hosts: Hosts) -> None:
        super().__init__(rank_group, unit, name)
        self._hosts = hosts
        (self._local,) = (ranks for ranks in hosts.ranks if self.rank in ranks)
        self._peers = [rank for rank in self._local if rank != self.rank]
        # The ranks of other hosts whose slices each rank of this host carries.
        self._carried = {rank: self._carried_by(rank) for rank in self._local}
        # Of each host the rank that adds this rank's slices: its carrier, or on its own host itself.
        position = self._local.index(self.rank)
        self._adders = [self.rank if self.rank in ranks else ranks[position % len(ranks)] for ranks in hosts.ranks]
        self._carriers = sorted(rank for rank in self._adders if rank != self.rank)

    def _carried_by(self, rank: int) -> list[int]:
        carried: list[int] = []
        for ranks in self._hosts.ranks:
            if ranks is not self._local:
                carried += ranks[self._local.index(rank) :: len(self._local)]
        return sorted(carried)

    def _begin_second_parts(self) -> None:
        begin_second_parts(self._hosts.gathers)
        begin_second_parts(self._hosts.sums)

    def begin_all_gather(self, tensor: torch.Tensor, target: PlacesRows | None = None) -> Pending:
        self._begin_second_parts()
        slices = tensor.chunk(self.size) if target is None else ()
        own = slices[self.rank] if target is None else tensor
        carried = self._carried[self.rank]

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

        direct, relayed = self._hosts.direct, self._hosts.relayed
        if self._peers:
            direct.send("gather", dict.fromkeys(self._peers, own), unit=self._unit)
        if target is not None:
            target.place(self.rank, own.view(1, -1))
        rows = own.new_empty(len(carried), own.numel())
        crossing = self._cross(self.group, own.repeat(len(self._carriers)), self._carriers, rows, carried, "all-gather")

        def relay() -> None:
            for row in rows if self._peers else ():
                relayed.send("gather", dict.fromkeys(self._peers, row), unit=self._unit)

        def finish() -> torch.Tensor:
            for rank, row in zip(carried, rows):
                place(rank, row)
            return tensor

        works: list[Any] = [_TwoParts(self._hosts.gathers, [crossing], relay)]
        works += [direct.expect("gather", [peer], own, partial(read, peer), unit=self._unit) for peer in self._peers]
        works += [
            relayed.expect("gather", [peer], own, partial(read, rank), unit=self._unit)
            for peer in self._peers
            for rank in self._carried[peer]
        ]
        return Pending(works, tensor, finish)

    def begin_reduce_scatter(self, full: torch.Tensor, pool: ReusesMemory | None = None) -> Pending:
        self._begin_second_parts()
        slices, carried = full.chunk(self.size), self._carried[self.rank]
        direct = self._hosts.direct
        for peer in self._peers:
            for rank in (peer, *self._carried[peer]):
                direct.send("reduction", {peer: slices[rank]}, unit=self._unit)
        sums: dict[int, torch.Tensor] = {}

        def add(rank: int, received: dict[int, torch.Tensor]) -> torch.Tensor:
            sums[rank] = sum_in_order([received.get(local, slices[rank]) for local in self._local])
            return sums[rank]

        first = [
            direct.expect("reduction", self._peers, slices[rank], partial(add, rank), unit=self._unit)
            for rank in (self.rank, *carried)
        ]
        others = full.new_empty(len(self._carriers), slices[self.rank].numel())

        def exchange() -> Any:
            sent = torch.cat([full[:0], *(sums[rank] for rank in carried)])
            group = self._hosts.reductions.group
            return self._cross(group, sent, carried, others, self._carriers, "reduce-scatter")

        def add_hosts() -> torch.Tensor:
            by_rank = {self.rank: sums[self.rank], **dict(zip(self._carriers, others))}
            return sum_in_order([by_rank[rank] for rank in self._adders])

        return Pending([_TwoParts(self._hosts.sums, first, exchange)], full, add_hosts)

    def _cross(
        self,
        group: dist.ProcessGroup | None,
        sent: torch.Tensor,
        targets: Sequence[int],
        received: torch.Tensor,
        sources: Sequence[int],
        operation: str,
    ) -> Any:
        """Begin to send a part of ``sent`` to each of ``targets``, and to receive one of ``received`` from ``sources``.

        The parts, of equal length, are in the order of the ranks.
        """

        def splits(tensor: torch.Tensor, ranks: Sequence[int]) -> list[int]:
            nbytes = tensor.nbytes // max(1, len(ranks))
            return [nbytes if rank in ranks else 0 for rank in range(self.size)]

        work = dist.all_to_all_single(
            # As bytes, for gloo does not send every dtype.
            received.view(-1).view(torch.uint8),
            sent.view(torch.uint8),
            splits(received, sources),
            splits(sent, targets),
            group=group,
            async_op=True,
        )
        return self._watched(work, operation, sources)
