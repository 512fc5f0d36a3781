"""The exchange of ranks at the end of each backward: one small all-reduce of bytes over each group, on the host.

It answers three questions, before gradients are published and an optimizer can step:

* which parameters got a gradient on any rank. One that no rank used keeps ``.grad`` None, as in plain torch; one that
  only some ranks used gets the mean with zeros, as under DDP;
* which handles still hold gradients that were not reduced in their unit's turn (from ``no_sync``, or because a weight
  was used outside of its unit's forward) on any rank, so that all ranks reduce them;
* whether all ranks issued the same collectives in the same order.

The tensors are on the CPU whatever the compute device is, so the host never waits for compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fsdp_flat.comm import Axis, CollectiveLog, UnitGroups, begin_all_reduce, host_group, is_simulated
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.runtime.unit import Unit

__all__ = ["BackwardExchange"]

_DOING = "the exchange of ranks in a backward"


class BackwardExchange:
    """The exchange between the ranks of one tree's units. Every rank must make the same calls.

    Args:
        units: every unit of the tree, in the same order on every rank.
        log: the order of collectives.
    """

    def __init__(self, units: Sequence[Unit], log: CollectiveLog) -> None:
        self._log = log
        self._handles: dict[UnitGroups, list[FlatParamHandle]] = {}
        for unit in units:
            if unit.handles and unit.options.groups.num_ranks > 1:
                self._handles.setdefault(unit.options.groups, []).extend(unit.handles)
        self._axes: dict[UnitGroups, list[Axis]] = {}
        self._in_flight: dict[UnitGroups, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Whether each flag is true on any rank; equally many on all of them. Waits for the other ranks."""
        tensor = torch.tensor(flags, dtype=torch.uint8)
        for groups in self._handles:
            for axis in self._axes_of(groups):
                begin_all_reduce(tensor, axis, largest=True, doing=_DOING).wait()
        return [bool(flag) for flag in tensor.tolist()]

    def begin(self, used: Mapping[FlatParamHandle, bytes], unreduced: set[FlatParamHandle]) -> None:
        """Begins the exchange.

        Args:
            used: by handle, one byte a parameter: 1 where it got a gradient on this rank. Absent handles have none.
            unreduced: handles that hold gradients still to be reduced.
        """
        for groups, handles in self._handles.items():
            flags = [used.get(handle) or bytes(len(handle.layout.slots)) for handle in handles]
            late = bytes([handle in unreduced for handle in handles])
            digest = self._log.digest(groups)
            # The greatest byte over ranks is taken: with its complement that is the least one too.
            row = bytearray(b"".join([*flags, late, digest, bytes([255 - byte for byte in digest])]))
            tensor = torch.frombuffer(row, dtype=torch.uint8)
            self._in_flight[groups] = (tensor, self._begin_maximum(tensor, groups))

    def _begin_maximum(self, tensor: torch.Tensor, groups: UnitGroups) -> Callable[[], torch.Tensor]:
        pending = None
        for axis in self._axes_of(groups):
            if pending is not None:
                pending.wait()
            pending = begin_all_reduce(tensor, axis, largest=True, doing=_DOING)
        return (lambda: tensor) if pending is None else pending.wait

    def _axes_of(self, groups: UnitGroups) -> list[Axis]:
        if groups not in self._axes:
            self._axes[groups] = [
                Axis.of(host_group(axis.group))
                for axis in groups.axes
                if axis.group is not None and axis.size > 1 and not is_simulated(axis.group)
            ]
        return self._axes[groups]

    def finish(self, used: dict[FlatParamHandle, bytes], unreduced: set[FlatParamHandle]) -> UnitGroups | None:
        """Waits for the other ranks.

        Args:
            used: as for :meth:`begin`; becomes true where any rank used a parameter.
            unreduced: as for :meth:`begin`; gains the handles of which any rank holds gradients.

        Returns:
            Groups whose ranks issued different collectives, or None.
        """
        differing = None
        for groups, (_, wait) in self._in_flight.items():
            row = bytes(wait().numpy())
            position = 0
            handles = self._handles[groups]
            for handle in handles:
                num_slots = len(handle.layout.slots)
                used[handle] = row[position : position + num_slots]
                position += num_slots
            late = row[position : position + len(handles)]
            unreduced.update([handle for handle, is_late in zip(handles, late, strict=True) if is_late])
            greatest, least = row[position + len(handles) :][:8], row[-8:]
            if greatest != bytes([255 - byte for byte in least]):
                differing = differing or groups
        self._in_flight.clear()
        return differing
