"""Selects how ranks exchange data: the only file that knows of shared memory, which ``shm`` implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import irecv, isend

from fsdp_flat.comm.failures import NamedWork, keep_waiting_in_thread, named_errors
from fsdp_flat.comm.flat_collectives import (
    CollectiveOverrides,
    Collectives,
    CustomCollectives,
    GlooAcceleratorCollectives,
)
from fsdp_flat.comm.given_up import Pending, give_up
from fsdp_flat.comm.rank_groups import RankGroup, ended_ranks, moves_by_gloo
from fsdp_flat.comm.shm import SharedMemoryCollectives, channel_of, known_transport, shares_memory
from fsdp_flat.errors import PeerFailureError

_OWN = CollectiveOverrides()
TRANSFER = "a transfer between ranks, for a state dict"


def collectives_for(
    rank_group: RankGroup, device: torch.device, choice: CollectiveOverrides = _OWN, *, unit: int = 0, name: str = ""
) -> Collectives | None:
    """Return the cheapest collectives for a group on ``device``; None for a single rank, which needs none.

    ``unit`` is the id of the tensors' unit, equal on every rank, or 0. Messages through shared memory contain it: an
    error, with the ``name``, says that ranks issue collectives of different units.
    """

    def of_library(rank_group: RankGroup) -> Collectives:
        if choice.backend or not moves_by_gloo(rank_group.process_group, device):
            return Collectives(rank_group, unit, name)
        if device.type == "cpu":
            return SharedMemoryCollectives(rank_group, unit, name, choice=choice)
        return GlooAcceleratorCollectives(rank_group, unit, name)

    if rank_group.group is None or rank_group.size == 1:
        return None
    own = of_library(rank_group)
    if choice == choice.of_library:
        return own
    return CustomCollectives(own, own if choice.reduce_group is None else of_library(choice.reduce_group), choice)


def pairs_by_order(rank_group: RankGroup, device: torch.device) -> bool:
    """Return whether gloo moves CPU tensors of a group: it takes any collective for the next one of another rank.

    Messages through shared memory say what they are.
    """
    if rank_group.group is None or device.type != "cpu" or not moves_by_gloo(rank_group.group, device):
        return False
    return not shares_memory(rank_group)


def collectives_by(rank_group: RankGroup, transport: Any) -> Collectives:
    """Return the collectives of ranks on one host that send and expect messages by ``transport``."""
    return SharedMemoryCollectives(rank_group, transport=transport)


class Channel(Protocol):
    """Describes a way to send runs of elements (1-D) between the ranks of one group."""

    device: torch.device

    def send(self, run: torch.Tensor, ranks: Sequence[int]) -> None: ...

    def receive(self, run: torch.Tensor, source: int) -> None: ...

    # Blocks until all runs have been received, and those that were sent may be changed.
    def wait(self) -> None: ...


def channel_for(rank_group: RankGroup, device: torch.device, to_read: list[Any]) -> Channel:
    """Return a channel for a group on ``device``.

    ``to_read`` is for all channels that are used together: those where a rank may wait until others have read.
    """
    if rank_group.group is not None and moves_by_gloo(rank_group.group, device):
        device = torch.device("cpu")  # gloo sends CPU tensors only
        channel = channel_of(rank_group, to_read)
        if channel is not None:
            return channel
    return GroupChannel(rank_group.group, device, to_read)


class GroupChannel:
    """Uses the process group's p2p operations, in one batch. A single rank has no group and nothing to transfer."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, to_read: Sequence[Channel]) -> None:
        self.device = device
        self._group = group
        self._to_read = to_read
        self._batch: list[dist.P2POp] = []

    def send(self, run: torch.Tensor, ranks: Sequence[int]) -> None:
        """Prepare to send a run to ranks."""
        self._batch += [dist.P2POp(isend, run, group=self._group, group_peer=rank) for rank in ranks]

    def receive(self, run: torch.Tensor, source: int) -> None:
        """Prepare to receive a run from a rank."""
        self._batch.append(dist.P2POp(irecv, run, group=self._group, group_peer=source))

    def wait(self) -> None:
        """Send and receive all runs."""
        # Ranks that this one would wait for may wait until it has read what they sent through shared memory.
        for channel in self._to_read:
            channel.wait()
        batch, self._batch = self._batch, []
        if not batch:
            return
        assert self._group is not None
        rank_group = RankGroup.of(self._group)
        with named_errors(TRANSFER, rank_group):
            works = dist.batch_isend_irecv(batch)
        pending = Pending([NamedWork(work, rank_group, lambda: TRANSFER) for work in works], batch[0].tensor)
        if not moves_by_gloo(self._group, self.device):
            pending.wait()
            return
        try:
            keep_waiting_in_thread(pending.wait, rank_group, {each.group_peer for each in batch}, TRANSFER)
        except BaseException:
            give_up(pending)
            raise


def absences(rank_group: RankGroup, *, asks_gloo: bool) -> dict[int, tuple[type[Exception], str]]:
    """Return ranks that come to no barrier now, each with an error and what the rank does; none if that is unknown."""
    transport = known_transport(rank_group)
    found = {} if transport is None else transport.absences()
    for rank in ended_ranks(rank_group) if asks_gloo else ():
        found.setdefault(rank, (PeerFailureError, "has ended or closed its connections"))
    return found
