"""The reduction of one handle's gradient: sum over the shard group, then over the replicate group, then the mean."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_flat.comm import Collectives, Pending, Streams, begin_all_reduce, unrecorded
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.runtime.options import UnitOptions

__all__ = ["Reduction", "ReductionPolicy", "Reductions", "predivide_factor"]


def predivide_factor(num_ranks: int) -> float:
    """FSDP1's factor for dividing before the sum: the power of two nearest the square root that divides.

    Source of the rule: CONTRACT (f doubles from 1 while num_ranks % f == 0 and num_ranks / f > f).
    """
    factor = 1
    while num_ranks % factor == 0 and num_ranks / factor > factor:
        factor *= 2
    return float(factor)


@dataclass(slots=True)
class ReductionPolicy:
    """How one unit's gradients are combined over ranks; read when a reduction begins and ends.

    Attributes:
        divide_factor: divides the sum over ranks, a number or a scalar tensor; None is the number of ranks, which
            makes it the mean.
        hook: a communication hook in place of the reduction, called with ``hook_state``.
        hook_state: the first argument of ``hook``.
        dtype: dtype in which gradients travel, for the built-in low-precision hooks.
    """

    divide_factor: float | torch.Tensor | None = None
    hook: Callable[..., Any] | None = None
    hook_state: Any = None
    dtype: torch.dtype | None = None


class Reduction:
    """One flat gradient on its way to becoming this rank's shard of the mean gradient.

    fp16 is divided in two steps around the sum, as FSDP1 does, because the sum could overflow. Every
    other dtype is summed as it is and only the shard is scaled, which is one pass over less data.
    """

    __slots__ = (
        "_flat",
        "_groups",
        "_pending",
        "_policy",
        "_postscale",
        "_replicated",
        "_scratch",
        "_streams",
        "_used_up",
        "handle",
    )

    def __init__(
        self,
        handle: FlatParamHandle,
        options: UnitOptions,
        collectives: Collectives | None,
        streams: Streams,
        policy: ReductionPolicy,
    ) -> None:
        self.handle = handle
        self._groups = options.groups
        num_ranks = options.groups.shard.size * options.groups.replicate.size
        self._streams = streams
        self._policy = policy
        self._replicated = False
        self._scratch: tuple[torch.Tensor, ...] = ()
        self._postscale: float = num_ranks
        with unrecorded():
            flat, gradient = handle.take_gradient()
            # Hooks may keep their arguments, and where nothing is sharded the flat buffer becomes the gradient.
            self._used_up = None if collectives is None or policy.hook is not None else gradient
            if policy.dtype is not None:
                flat = flat.to(policy.dtype)
            # Memory of compute: kept until compute has waited for the reduction that reads it.
            self._flat: torch.Tensor | None = flat
            if policy.hook is not None:
                self._pending = Pending((), self._call_hook(flat, shards=options.strategy.shards))
                return
            if flat.dtype == torch.float16:
                prescale = predivide_factor(num_ranks)
                flat.div_(prescale)
                self._postscale /= prescale
            with streams.reduce_scatters:
                if collectives is None:
                    self._pending = Pending((), flat)
                    self.advance()
                else:
                    self._pending = collectives.begin_reduce_scatter(flat, handle.pool.empty_like)

    def _call_hook(self, flat: torch.Tensor, *, shards: bool) -> torch.Tensor:
        """Hooks divide by themselves; the mean over the replicate group of a hybrid strategy is left to take."""
        hook, state = self._policy.hook, self._policy.hook_state
        assert hook is not None
        if not shards:
            self._postscale = 1.0
            self._replicated = True
            hook(state, flat)
            return flat
        self._postscale = self._groups.replicate.size
        out = flat.new_zeros(self.handle.layout.shard_numel)
        hook(state, flat, out)
        return out

    def advance(self) -> None:
        """Waits for the sum over the shard group and begins the one over the replicate group, if there is one."""
        if self._replicated or self._groups.replicate.size == 1:
            return
        self._replicated = True
        with unrecorded(), self._streams.reduce_scatters:
            self._scratch = self._pending.scratch
            self._pending = begin_all_reduce(
                self._pending.wait(),
                self._groups.replicate,
                doing=f"the all-reduce of unit {self.handle.spec.unit_name!r}",
            )

    @property
    def is_done(self) -> bool:
        """Whether :meth:`finish` needs neither waiting nor communication. Ranks may see different answers."""
        return self._groups.replicate.size == 1 and self._pending.is_done

    def _free(self) -> None:
        # Memory of compute goes back to compute, which therefore comes after the reduction that read it.
        self._streams.wait_for_reduce_scatters()
        self._flat = None
        for scratch in (*self._scratch, *self._pending.scratch):
            self.handle.pool.empty(scratch.untyped_storage())
        gradient, self._used_up = self._used_up, None
        if gradient is not None:
            self.handle.recycle(gradient)

    def finish(self) -> torch.Tensor:
        """The mean gradient of this rank's shard (1-D, the parameters' dtype)."""
        self.advance()
        spec = self.handle.spec
        with unrecorded(), self._streams.reduce_scatters:
            shard = self._pending.wait()
            if self._postscale != 1.0:
                shard.div_(self._postscale)
            dtype = shard.dtype if spec.keep_reduce_dtype else self.handle.orig_dtype
            if shard.dtype != dtype or shard.device != spec.shard_device:
                shard = self._streams.copy_to(shard, spec.shard_device, dtype)
        self._free()
        return shard

    @property
    def rescale(self) -> float | torch.Tensor | None:
        """Factor for the mean that :meth:`finish` gives, if the caller has set a divisor of their own."""
        factor = self._policy.divide_factor
        return None if factor is None or self._policy.hook is not None else self._groups.num_ranks / factor


class Reductions:
    """The reductions of one backward, in the order in which every rank begins them.

    Few are in flight, so that few flat gradients wait for the network.

    Args:
        most: reductions that may be in flight while backward goes on.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_flight: list[Reduction] = []
        self._last: dict[FlatParamHandle, Reduction] = {}
        self.results: dict[FlatParamHandle, list[torch.Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was reduced."""
        return not self._in_flight and not self.results

    def add(self, begin: Callable[[], Reduction]) -> None:
        """Begins a reduction; older ones are moved on, and finished where there are too many, to have their memory."""
        for earlier in self._in_flight:
            earlier.advance()
        while len(self._in_flight) >= self._most:
            self._finish_oldest()
        self._in_flight.append(begin())

    def finish_done(self) -> None:
        """Finishes reductions that have arrived, so that their memory is free."""
        while self._in_flight and self._in_flight[0].is_done:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.pop(0)
        shard = reduction.finish()
        self._last[reduction.handle] = reduction
        self.results.setdefault(reduction.handle, []).append(shard)

    def finish_all(self) -> None:
        """Waits for everything."""
        while self._in_flight:
            self._finish_oldest()

    def reset(self, streams: Streams) -> None:
        """Waits for everything and drops it. One that fails adds nothing to the reason for which it is dropped."""
        while self._in_flight:
            with suppress(RuntimeError):
                self._finish_oldest()
        self.finish(streams)

    def finish(self, streams: Streams) -> dict[FlatParamHandle, torch.Tensor]:
        """Waits for everything; the sharded mean gradients by handle, for use by compute and by the host."""
        self.finish_all()
        streams.wait_for_reduce_scatters()
        streams.wait_for_host_copies()
        gathered, self.results = self.results, {}
        results: dict[FlatParamHandle, torch.Tensor] = {}
        for handle, (first, *others) in gathered.items():
            for other in others:
                first.add_(other)
            results[handle] = first
        # Only now: a factor may be a tensor that the caller completes while backward runs.
        for handle, reduction in self._last.items():
            scale = reduction.rescale
            if scale is not None:
                results[handle].mul_(scale)
        self._last.clear()
        return results
