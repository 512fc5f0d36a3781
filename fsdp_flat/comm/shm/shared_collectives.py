"""Implements the all-gather and the reduce-scatter of a unit by messages through shared memory."""

from __future__ import annotations

import torch

from fsdp_flat.comm.flat_collectives import CollectiveOverrides, GlooCollectives, PlacesRows, ReusesMemory, sum_in_order
from fsdp_flat.comm.given_up import Pending
from fsdp_flat.comm.rank_groups import RankGroup
from fsdp_flat.comm.shm.connect import Hosts, connect
from fsdp_flat.comm.shm.host_collectives import HostCollectives
from fsdp_flat.comm.shm.transport import SharedMemoryTransport
from fsdp_flat.comm.streams import unrecorded

_OWN = CollectiveOverrides()


class SharedMemoryCollectives(GlooCollectives):
    """Uses shared memory for CPU tensors if the group's ranks have it, else gloo; the results are equal bit for bit.

    The first call determines which, by a collective, unless a ``transport`` is given. A group that spans hosts uses
    both (``HostCollectives``).
    """

    def __init__(
        self,
        rank_group: RankGroup,
        unit: int = 0,
        name: str = "",
        *,
        choice: CollectiveOverrides = _OWN,
        transport: SharedMemoryTransport | None = None,
    ) -> None:
        super().__init__(rank_group, unit, name)
        self._choice = choice
        self._transport = transport
        self._elsewhere = GlooCollectives(rank_group, unit, name)
        self._is_connected = transport is not None

    def _connect(self) -> SharedMemoryTransport | None:
        self._is_connected, found = True, connect(self.rank_group)
        if isinstance(found, Hosts):
            self._elsewhere = HostCollectives(self.rank_group, self._unit, self._name, hosts=found, choice=self._choice)
        else:
            self._transport = found
        return self._transport

    def begin_all_gather(self, tensor: torch.Tensor, target: PlacesRows | None = None) -> Pending:
        transport = self._transport if self._is_connected else self._connect()
        self._calls.add("the all-gather", self._unit)
        try:
            if transport is None:
                return self._elsewhere.begin_all_gather(tensor, target)
            slices = tensor.chunk(self.size) if target is None else ()
            own = slices[self.rank] if target is None else tensor

            def place(rows: dict[int, torch.Tensor]) -> torch.Tensor:
                if target is None:
                    for rank, row in rows.items():
                        slices[rank].copy_(row)
                    return tensor
                with unrecorded():
                    for rank, row in rows.items():
                        target.place(rank, row.view(1, -1))
                return tensor

            transport.send("gather", dict.fromkeys(self._others, own), unit=self._unit)
            if target is not None:
                target.place(self.rank, own.view(1, -1))
            return transport.expect("gather", self._others, own, place, unit=self._unit)
        except BaseException:
            self._calls.withdraw()
            raise

    def begin_reduce_scatter(self, full: torch.Tensor, pool: ReusesMemory | None = None) -> Pending:
        transport = self._transport if self._is_connected else self._connect()
        self._calls.add("the reduce-scatter", self._unit)
        try:
            if transport is None:
                return self._elsewhere.begin_reduce_scatter(full, pool)
            slices = full.chunk(self.size)

            def add(received: dict[int, torch.Tensor]) -> torch.Tensor:
                parts = list(slices)
                for rank, part in received.items():
                    parts[rank] = part
                return sum_in_order(parts)

            sent = dict(enumerate(slices))
            del sent[self.rank]
            transport.send("reduction", sent, unit=self._unit)
            return transport.expect("reduction", self._others, slices[self.rank], add, unit=self._unit)
        except BaseException:
            self._calls.withdraw()
            raise
