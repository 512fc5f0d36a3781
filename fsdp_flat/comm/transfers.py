"""Transfers runs of elements between ranks, each directly from its source to its target tensor.

State dicts use these transfers: no tensor is all-gathered or sliced afterwards, so a save needs only the memory of its
result and moves each element once. Only short runs, for which a message costs more than a copy, are packed together.
"""

from __future__ import annotations

import torch

from fsdp_flat.comm.calls import calls_of
from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.comm.routes import TRANSFER, Channel, channel_for
from fsdp_flat.layout import TransferPlan

# Sender and receiver have to use the same threshold.
_SHORT_NBYTES = 1 << 16
# Packed runs take memory until they are unpacked, so the bytes in flight are limited.
_MAX_IN_FLIGHT_NBYTES = 1 << 26


class P2PChannels:
    """Executes transfer plans by p2p messages in several groups, within a memory limit for each group.

    Every rank of a group must add the same tensors of the group in the same order; ranks of several groups add those of
    all in one order. What a rank adds in a group that others are not in changes no message of the other groups.
    """

    def __init__(self) -> None:
        self._packing: dict[RankGroup, _PackingChannel] = {}
        self._to_read: list[Channel] = []

    def add(
        self,
        transfer_plan: TransferPlan,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        *,
        rank_group: RankGroup,
        device: torch.device,
        nbytes: int = 0,
    ) -> None:
        """Begin to transfer one tensor; wait for earlier ones of the group if too many bytes are in flight.

        The group communicates on ``device``; other tensors are copied through it. ``source`` (1-D) has the elements
        that this rank holds; None if it sends and keeps nothing. ``target`` (1-D, of the sources' dtype) receives
        elements; None if this rank receives and keeps nothing. ``nbytes`` are those of the full tensor, equal on every
        rank of the group; 0 if the caller limits the bytes in flight.
        """
        if rank_group not in self._packing:
            self._packing[rank_group] = _PackingChannel(channel_for(rank_group, device, self._to_read), rank_group)
        self._packing[rank_group].add(transfer_plan, source, target, nbytes)

    def wait(self) -> None:
        """Block until all added tensors have been received, and sources may be changed."""
        for packing in self._packing.values():
            packing.wait()


class _PackingChannel:
    """Executes transfer plans in the channel of one group, and packs short runs until it waits.

    Ranks pack alike because they wait after the same tensors: when the bytes in flight would exceed the limit, and when
    all tensors have been added. What they add before each wait is one call of the group, also on a rank that sends and
    receives nothing of it.
    """

    def __init__(self, channel: Channel, rank_group: RankGroup) -> None:
        self._channel = channel
        self._calls = None if rank_group.group is None else calls_of(rank_group.group)
        self._has_begun = False
        self._nbytes = 0
        # Runs to pack, by other rank and dtype.
        self._short_receives: _Runs = {}
        self._short_sends: _Runs = {}
        # Received runs that are packed, or not on the device of their target, with their targets.
        self._copies: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def add(
        self, transfer_plan: TransferPlan, source: torch.Tensor | None, target: torch.Tensor | None, nbytes: int
    ) -> None:
        if self._nbytes + nbytes > _MAX_IN_FLIGHT_NBYTES:
            self.wait()
        if not self._has_begun and self._calls is not None:
            self._calls.add(TRANSFER)
        self._has_begun = True
        self._nbytes += nbytes
        if transfer_plan.kept is not None and source is not None and target is not None:
            target[transfer_plan.kept[1]].copy_(source[transfer_plan.kept[0]])
        for rank, run in transfer_plan.receives:
            assert target is not None
            part = target[run]
            if part.nbytes < _SHORT_NBYTES:
                self._short_receives.setdefault((rank, part.dtype), []).append(part)
            else:
                self._receive([part], rank)
        long_sends: dict[tuple[int, int], list[int]] = {}
        for rank, run in transfer_plan.sends:
            assert source is not None
            part = source[run]
            if part.nbytes < _SHORT_NBYTES:
                self._short_sends.setdefault((rank, part.dtype), []).append(part)
            else:
                long_sends.setdefault((run.start, run.stop), []).append(rank)
        for (start, stop), ranks in long_sends.items():
            assert source is not None
            self._channel.send(source[start:stop].contiguous().to(self._channel.device), ranks)

    def _receive(self, targets: list[torch.Tensor], source: int) -> None:
        """Begin to receive a run for several targets."""
        run = targets[0]
        if len(targets) > 1 or run.device.type != self._channel.device.type:
            numel = sum(target.numel() for target in targets)
            run = torch.empty(numel, dtype=run.dtype, device=self._channel.device)
            self._copies.append((run, targets))
        self._channel.receive(run, source)

    def wait(self) -> None:
        for (rank, _), targets in self._short_receives.items():
            self._receive(targets, rank)
        for (rank, _), runs in self._short_sends.items():
            self._channel.send(torch.cat(runs).to(self._channel.device), [rank])
        self._channel.wait()
        for received, targets in self._copies:
            for target, part in zip(targets, received.split([target.numel() for target in targets]), strict=True):
                target.copy_(part)
        self._short_receives, self._short_sends, self._copies, self._nbytes = {}, {}, [], 0
        self._has_begun = False


_Runs = dict[tuple[int, torch.dtype], list[torch.Tensor]]
