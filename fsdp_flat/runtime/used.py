"""Which parameters got a gradient on any rank: one small all-reduce a backward pass.

A parameter that no rank used keeps ``.grad`` None, as in plain torch; one that only some ranks used gets
the mean with zeros, as under DDP. A rank needs the answer only for parameters that it did not use itself,
so a rank that used everything joins the exchange and does not look at it before its gradients are published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from fsdp_flat.comm import UnitGroups, begin_all_reduce
from fsdp_flat.flat import FlatParamHandle

__all__ = ["UsedExchange"]


class UsedExchange:
    """The exchange, and what of it is still on its way."""

    def __init__(self) -> None:
        self._in_flight: list[Callable[[], object]] = []

    def begin(
        self, used: dict[FlatParamHandle, bytes], groups: dict[FlatParamHandle, UnitGroups]
    ) -> Callable[[FlatParamHandle], Sequence[bool]]:
        """Begin the exchange; the returned function says for a handle which parameters any rank used.

        Every rank of the groups must call this with the same handles in the same order.
        """
        by_groups: dict[UnitGroups, list[FlatParamHandle]] = {}
        for handle in used:
            by_groups.setdefault(groups[handle], []).append(handle)
        answers: dict[FlatParamHandle, Callable[[], Sequence[int]]] = {}
        for where, handles in by_groups.items():
            fetch = self._exchange(where, [used[handle] for handle in handles], handles[0].spec.device)
            for index, handle in enumerate(handles):
                answers[handle] = partial(_row, fetch, index)

        def everywhere(handle: FlatParamHandle) -> Sequence[bool]:
            if all(used[handle]):
                return [True] * len(used[handle])
            return [bool(flag) for flag in answers[handle]()]

        return everywhere

    def finish(self) -> None:
        """Wait for what is on its way, so that no work outlives its process group.

        On accelerators this orders streams and does not block the host.
        """
        for wait in self._in_flight:
            wait()
        self._in_flight.clear()

    def _exchange(self, groups: UnitGroups, flags: list[bytes], device: torch.device) -> Callable[[], list[list[int]]]:
        if groups.num_ranks == 1:
            return lambda: [list(row) for row in flags]
        joined = torch.frombuffer(bytearray(b"".join(flags)), dtype=torch.uint8).to(device, torch.int32)
        first, second = (axis for axis in (groups.shard, groups.replicate))
        pending = begin_all_reduce(joined, first)
        if first.size > 1 and second.size > 1:
            pending.wait()
        if second.size > 1:
            pending = begin_all_reduce(joined, second)
        self._in_flight.append(pending.wait)
        lengths = [len(row) for row in flags]
        return lambda: [row.tolist() for row in pending.wait().split(lengths)]


def _row(fetch: Callable[[], list[list[int]]], index: int) -> list[int]:
    return fetch()[index]
