"""The reduction of one handle's gradient: sum over the shard axis, then over the replicate axis, then the mean."""

from __future__ import annotations

import torch

from fsdp_flat.comm import Collectives, Pending, Streams, UnitGroups, begin_all_reduce
from fsdp_flat.flat import FlatParamHandle

__all__ = ["Reduction", "Reductions", "predivide_factor"]


def predivide_factor(num_ranks: int) -> float:
    """FSDP1's factor for dividing before the sum: the power of two nearest the square root that divides.

    Source of the rule: CONTRACT (f doubles from 1 while num_ranks % f == 0 and num_ranks / f > f).
    """
    factor = 1
    while num_ranks % factor == 0 and num_ranks / factor > factor:
        factor *= 2
    return float(factor)


class Reduction:
    """One flat gradient on its way to becoming this rank's shard of the mean gradient.

    fp16 is divided in two steps around the sum, as FSDP1 does, because the sum could overflow. Every
    other dtype is summed as it is and only the shard is scaled, which is one pass over less data.
    """

    __slots__ = ("_groups", "_pending", "_postscale", "_replicated", "_streams", "handle")

    def __init__(
        self, handle: FlatParamHandle, groups: UnitGroups, collectives: Collectives | None, streams: Streams
    ) -> None:
        self.handle = handle
        self._groups = groups
        self._streams = streams
        num_ranks = groups.num_ranks
        prescale = 1.0
        with torch.no_grad():
            flat = handle.take_gradient()
            if flat.dtype == torch.float16:
                prescale = predivide_factor(num_ranks)
                flat.div_(prescale)
            self._postscale = num_ranks / prescale
            with streams.reducing():
                self._pending = Pending((), flat) if collectives is None else collectives.begin_reduce_scatter(flat)
                self._replicated = False
                if collectives is None:
                    self.advance()

    def advance(self) -> None:
        """Wait for the sum over the shard axis and begin the one over the replicate axis."""
        if self._replicated:
            return
        self._replicated = True
        with torch.no_grad(), self._streams.reducing():
            self._pending = begin_all_reduce(self._pending.wait(), self._groups.replicate)

    def finish(self) -> torch.Tensor:
        """The mean gradient of this rank's shard (1-D, the parameters' dtype)."""
        self.advance()
        with torch.no_grad(), self._streams.reducing():
            shard = self._pending.wait()
            if self._postscale != 1.0:
                shard.div_(self._postscale)
            dtype = shard.dtype if self.handle.spec.keep_reduce_dtype else self.handle.orig_dtype
            return shard.to(dtype=dtype, device=self.handle.spec.shard_device)


class Reductions:
    """The reductions of one backward pass, in the order in which every rank begins them.

    At most two are in flight, so that at most two flat gradients wait for the network.
    """

    def __init__(self) -> None:
        self._in_flight: list[Reduction] = []
        self.results: dict[FlatParamHandle, torch.Tensor] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was reduced."""
        return not self._in_flight and not self.results

    def add(self, reduction: Reduction) -> None:
        """Take a reduction that has just begun; older ones are moved on."""
        for earlier in self._in_flight:
            earlier.advance()
        self._in_flight.append(reduction)
        while len(self._in_flight) > 2:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.pop(0)
        shard = reduction.finish()
        before = self.results.get(reduction.handle)
        if before is None:
            self.results[reduction.handle] = shard
        else:
            before.add_(shard)

    def finish(self) -> dict[FlatParamHandle, torch.Tensor]:
        """Wait for everything; the sharded mean gradients by handle."""
        while self._in_flight:
            self._finish_oldest()
        results, self.results = self.results, {}
        return results
