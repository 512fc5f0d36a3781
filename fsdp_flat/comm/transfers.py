"""Runs of elements from rank to rank, each straight from where it lies to where it belongs.

State dicts are made of these: nothing is gathered or cut afterwards, so a save needs the memory of its result and
moves each element once. Only short runs, for which the message costs more than the copy, travel packed together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm.collectives import moves_by_gloo
from fsdp_flat.comm.groups import Axis
from fsdp_flat.layout import Moves

__all__ = ["Lanes", "Transfers"]

# Where a message costs more than a copy depends on the network; both sides only have to draw the line alike.
_SHORT_NBYTES = 1 << 16
# Packed runs take memory until they are unpacked, so not everything is under way at once.
_MOST_UNDER_WAY_NBYTES = 1 << 26


class Transfers:
    """Point-to-point transfers along one axis.

    Every rank of the axis has to add the same tensors in the same order; between two ranks, runs arrive in the order
    in which they were added.

    Args:
        axis: the ranks.
        device: the device of compute, over which the group communicates. Tensors elsewhere make a stop there.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        group = axis.group
        self._axis = axis
        # gloo sends CPU tensors only. Other backends want all transfers at once.
        self._one_by_one = group is not None and moves_by_gloo(group, device)
        self._device = torch.device("cpu") if self._one_by_one else device
        self._begun: list[Any] = []
        self._batch: list[dist.P2POp] = []
        self._after: list[Callable[[], object]] = []
        self._alive: list[torch.Tensor] = []
        self._short_sends: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._short_receives: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def add(self, moves: Moves, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        """Begin to move one tensor.

        Args:
            moves: how this rank takes part.
            source: 1-D, what this rank holds; None if it sends nothing.
            target: 1-D, where what it wants is to go, of the dtype that the sources have; None if it wants nothing.
        """
        if moves.kept is not None and source is not None and target is not None:
            target[moves.kept[1]].copy_(source[moves.kept[0]])
        for rank, run in moves.receives:
            assert target is not None
            self._enter(target[run], rank, self._short_receives, self._receive)
        for rank, run in moves.sends:
            assert source is not None
            self._enter(source[run], rank, self._short_sends, self._send)

    def wait(self) -> None:
        """Return when everything that was added has arrived."""
        for (rank, _), runs in self._short_receives.items():
            packed = torch.empty(sum(run.numel() for run in runs), dtype=runs[0].dtype, device=runs[0].device)
            self._receive(packed, rank)
            self._after.append(partial(_unpack, packed, runs))
        for (rank, _), runs in self._short_sends.items():
            self._send(torch.cat(runs), rank)
        if self._batch:
            self._begun.extend(dist.batch_isend_irecv(self._batch))
        for work in self._begun:
            work.wait()
        for finish in self._after:
            finish()
        self._begun, self._batch, self._after, self._alive = [], [], [], []
        self._short_sends, self._short_receives = {}, {}

    def _enter(
        self,
        run: torch.Tensor,
        rank: int,
        short: dict[tuple[int, torch.dtype], list[torch.Tensor]],
        begin: Callable[[torch.Tensor, int], None],
    ) -> None:
        # Both sides see the same length and dtype, so they decide alike.
        if run.nbytes < _SHORT_NBYTES:
            short.setdefault((rank, run.dtype), []).append(run)
        else:
            begin(run.contiguous(), rank)

    def _send(self, run: torch.Tensor, to: int) -> None:
        run = run.to(self._device)
        self._alive.append(run)
        if self._one_by_one:
            self._begun.append(dist.isend(run, dst=self._world_rank(to), group=self._axis.group))
        else:
            self._batch.append(dist.P2POp(dist.isend, run, self._world_rank(to), self._axis.group))

    def _receive(self, run: torch.Tensor, source: int) -> None:
        target = run
        if run.device.type != self._device.type:
            run = torch.empty_like(run, device=self._device)
            self._after.append(lambda: target.copy_(run))
        if self._one_by_one:
            self._begun.append(dist.irecv(run, src=self._world_rank(source), group=self._axis.group))
        else:
            self._batch.append(dist.P2POp(dist.irecv, run, self._world_rank(source), self._axis.group))

    def _world_rank(self, rank: int) -> int:
        assert self._axis.group is not None
        return dist.get_global_rank(self._axis.group, rank)


class Lanes:
    """Transfers along several axes, under way together as far as memory goes.

    Every rank of the axes has to add the same tensors in the same order.
    """

    def __init__(self) -> None:
        self._by_axis: dict[Axis, Transfers] = {}
        self._nbytes_under_way = 0

    def add(
        self,
        axis: Axis,
        device: torch.device,
        moves: Moves,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        *,
        nbytes: int,
    ) -> None:
        """Begin to move one tensor, or some before it first where many are on their way.

        Args:
            axis: the ranks.
            device: the device of compute.
            moves, source, target: as :meth:`Transfers.add` takes them.
            nbytes: bytes of the whole tensor, the same on every rank.
        """
        if self._nbytes_under_way + nbytes > _MOST_UNDER_WAY_NBYTES:
            self.wait()
        self._nbytes_under_way += nbytes
        if axis not in self._by_axis:
            self._by_axis[axis] = Transfers(axis, device)
        self._by_axis[axis].add(moves, source, target)

    def wait(self) -> None:
        """Return when everything that was added has arrived."""
        for transfers in self._by_axis.values():
            transfers.wait()
        self._nbytes_under_way = 0


def _unpack(packed: torch.Tensor, runs: list[torch.Tensor]) -> None:
    for run, part in zip(runs, packed.split([run.numel() for run in runs]), strict=True):
        run.copy_(part)
