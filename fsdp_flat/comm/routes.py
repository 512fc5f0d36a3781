"""Selects how ranks exchange data: the only file that knows of shared memory, which ``shm`` implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm.flat_collectives import (
    CollectiveChoice,
    Collectives,
    CustomCollectives,
    GlooAcceleratorCollectives,
)
from fsdp_flat.comm.rank_groups import RankGroup, moves_by_gloo
from fsdp_flat.comm.shm import SharedMemoryCollectives, channel_of, known_transport

_OWN = CollectiveChoice()


def collectives_for(
    rank_group: RankGroup, device: torch.device, choice: CollectiveChoice = _OWN, *, unit: int = 0, name: str = ""
) -> Collectives | None:
    """Return the cheapest collectives for a group on ``device``; None for a single rank, which needs none.

    ``unit`` is the id of the tensors' unit, equal on every rank, or 0. Messages through shared memory contain it: an
    error, with the ``name``, says that ranks issue collectives of different units.
    """

    def of_library(rank_group: RankGroup) -> Collectives:
        assert rank_group.group is not None
        if choice.backend or not moves_by_gloo(rank_group.group, device):
            return Collectives(rank_group)
        of_gloo = SharedMemoryCollectives if device.type == "cpu" else GlooAcceleratorCollectives
        return of_gloo(rank_group, unit, name)

    if rank_group.group is None or rank_group.size == 1:
        return None
    own = of_library(rank_group)
    if replace(choice, backend=False) == _OWN:
        return own
    return CustomCollectives(own, own if choice.reduce_group is None else of_library(choice.reduce_group), choice)


class Channel(Protocol):
    """Describes a way to send runs of elements (1-D) between the ranks of one group."""

    device: torch.device

    def send(self, run: torch.Tensor, ranks: Sequence[int]) -> None: ...

    def receive(self, run: torch.Tensor, source: int) -> None: ...

    # Blocks until all runs have been received, and those that were sent are read.
    def wait(self) -> None: ...


def channel_for(rank_group: RankGroup, device: torch.device, to_read: list[Any]) -> Channel:
    """Return a channel for a group on ``device``.

    ``to_read`` is for all channels that are used together: those whose senders wait until the receivers have read.
    """
    if rank_group.group is None or not moves_by_gloo(rank_group.group, device):
        return GroupChannel(rank_group.group, device, to_read, at_once=False)
    # gloo sends CPU tensors only.
    gloo = GroupChannel(rank_group.group, torch.device("cpu"), to_read, at_once=True)
    return channel_of(rank_group, to_read) or gloo


class GroupChannel:
    """Uses the process group's p2p operations, begun one by one (gloo) or as one batch for other backends.

    A single rank has no group and nothing to transfer.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, to_read: Sequence[Channel], *, at_once: bool
    ) -> None:
        self.device = device
        self._group = group
        self._to_read = to_read
        self._at_once = at_once
        self._works: list[Any] = []
        self._batch: list[dist.P2POp] = []
        self._alive: list[torch.Tensor] = []

    def send(self, run: torch.Tensor, ranks: Sequence[int]) -> None:
        """Begin to send a run to ranks."""
        for rank in ranks:
            self._begin(dist.isend, run, rank)

    def receive(self, run: torch.Tensor, source: int) -> None:
        """Begin to receive a run from a rank."""
        self._begin(dist.irecv, run, source)

    def _begin(self, operation: Callable[..., Any], run: torch.Tensor, rank: int) -> None:
        assert self._group is not None
        peer = dist.get_global_rank(self._group, rank)
        self._alive.append(run)
        if self._at_once:
            self._works.append(operation(run, peer, group=self._group))
        else:
            self._batch.append(dist.P2POp(operation, run, peer, self._group))

    def wait(self) -> None:
        """Block until all runs have been received, and those that were sent are read."""
        # Ranks that this one would wait for may wait until it has read what they sent.
        for channel in self._to_read:
            channel.wait()
        if self._batch:
            self._works = dist.batch_isend_irecv(self._batch)
        for work in self._works:
            work.wait()
        self._works, self._batch, self._alive = [], [], []


def absences(rank_group: RankGroup) -> dict[int, tuple[type[Exception], str]]:
    """Return ranks that come to no barrier now, each with an error and what the rank does; none if that is unknown."""
    transport = known_transport(rank_group)
    return {} if transport is None else transport.absences()
