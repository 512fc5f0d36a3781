"""Reduces gradients, and holds the communication state that all units of one root share.

A gradient is summed over the shard group, then over the replicate group; then its mean is taken.

The state is passed down: a unit uses its context and never looks up its root. It belongs to the runtime, not to
``comm``, because it also owns the memory pool of the flat buffers, and packages of one layer must not import each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from fsdp_flat.comm import CollectiveLog, Collectives, Pending, Streams, begin_all_reduce, streams_for, unrecorded
from fsdp_flat.flat import FlatParamHandle, MemoryPool
from fsdp_flat.runtime.options import UnitOptions

__all__ = ["LOW_PRECISION_HOOKS", "CommContext", "Reduction", "ReductionPolicy", "Reductions", "predivide_factor"]


LOW_PRECISION_HOOKS: Mapping[Callable[..., Any], torch.dtype] = MappingProxyType(
    {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}
)
"""Dtype in which each of torch's low-precision hooks communicates gradients.

The hooks cast, call the backend and cast back; gloo has no kernels for some of their calls. A reduction in the hook's
dtype gives the same result on every backend.
"""


def predivide_factor(num_ranks: int) -> float:
    """Return FSDP1's factor for dividing before the sum, a power of two near the square root of ``num_ranks``.

    Source of the rule: CONTRACT (f doubles from 1 while num_ranks % f == 0 and num_ranks / f > f).
    """
    factor = 1
    while num_ranks % factor == 0 and num_ranks / factor > factor:
        factor *= 2
    return float(factor)


@dataclass(slots=True)
class ReductionPolicy:
    """Holds the settings for combining one unit's gradients over ranks; read when a reduction begins and ends.

    Attributes:
        divide_factor: divides the sum over ranks, a number or a scalar tensor; None is the number of ranks, which gives
            the mean.
        hook: communication hook that replaces the reduction, called with ``hook_state``.
        hook_state: the first argument of ``hook``.
        dtype: dtype in which gradients are communicated, for the built-in low-precision hooks.
    """

    divide_factor: float | torch.Tensor | None = None
    hook: Callable[..., Any] | None = None
    hook_state: Any = None
    dtype: torch.dtype | None = None


class Reduction:
    """Reduces one flat gradient to this rank's shard of the mean gradient.

    fp16 is divided in two steps around the sum, as in FSDP1, because the sum could overflow. Other dtypes are summed
    unscaled and only the shard is scaled, which is one pass over less data.
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
            flat, gradient = handle.grads.take(handle.pool)
            # Hooks may keep their arguments, and if nothing is sharded, the flat buffer becomes the gradient.
            self._used_up = None if collectives is None or policy.hook is not None else gradient
            if policy.dtype is not None:
                flat = flat.to(policy.dtype)
            # Memory of the compute stream: kept until that stream has waited for the reduction that reads it.
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
        """Call the communication hook, which divides by itself.

        For a hybrid strategy the mean over the replicate group remains to be taken.
        """
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
        """Wait for the sum over the shard group and begin the all-reduce over the replicate group, if there is one."""
        if self._replicated or self._groups.replicate.size == 1:
            return
        self._replicated = True
        with unrecorded(), self._streams.reduce_scatters:
            self._scratch = self._pending.scratch
            self._pending = begin_all_reduce(
                self._pending.wait(),
                self._groups.replicate,
                collective=f"the all-reduce of unit {self.handle.spec.unit_name!r}",
            )

    @property
    def is_done(self) -> bool:
        """True if :meth:`finish` needs neither waiting nor communication. Ranks may see different values."""
        return self._groups.replicate.size == 1 and self._pending.is_completed()

    def _free(self) -> None:
        # The memory returns to the compute stream, which must therefore wait for the reduction that reads it.
        self._streams.wait_for_reduce_scatters()
        self._flat = None
        for scratch in (*self._scratch, *self._pending.scratch):
            self.handle.pool.empty(scratch.untyped_storage())
        gradient, self._used_up = self._used_up, None
        if gradient is not None:
            self.handle.grads.recycle(gradient, self.handle.pool)

    def finish(self) -> torch.Tensor:
        """Return the mean gradient of this rank's shard (1-D, in the parameters' dtype or the kept reduce dtype)."""
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
        """Factor for the mean that :meth:`finish` returns; None unless the caller has set a divisor."""
        factor = self._policy.divide_factor
        return None if factor is None or self._policy.hook is not None else self._groups.num_ranks / factor


class Reductions:
    """Runs the reductions of one backward, in the same order on every rank.

    Few are in flight, so that few flat gradients wait for the network.

    Args:
        most: maximum number of reductions in flight while backward goes on.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_flight: list[Reduction] = []
        self._last: dict[FlatParamHandle, Reduction] = {}
        self.results: dict[FlatParamHandle, list[torch.Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing was reduced."""
        return not self._in_flight and not self.results

    def add(self, begin: Callable[[], Reduction]) -> None:
        """Begin a reduction; advance older ones, and finish the oldest if too many are in flight, to free memory."""
        for earlier in self._in_flight:
            earlier.advance()
        while len(self._in_flight) >= self._most:
            self._finish_oldest()
        self._in_flight.append(begin())

    def finish_done(self) -> None:
        """Finish reductions that are complete, to free their memory."""
        while self._in_flight and self._in_flight[0].is_done:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.pop(0)
        shard = reduction.finish()
        self._last[reduction.handle] = reduction
        self.results.setdefault(reduction.handle, []).append(shard)

    def finish_all(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._finish_oldest()

    def reset(self, streams: Streams) -> None:
        """Wait for all reductions and drop them; their errors add nothing to the cause of the reset."""
        while self._in_flight:
            with suppress(RuntimeError):
                self._finish_oldest()
        self.finish(streams)

    def finish(self, streams: Streams) -> dict[FlatParamHandle, torch.Tensor]:
        """Wait for all reductions; return the sharded mean gradients by handle, ready for compute and for the host."""
        self.finish_all()
        streams.wait_for_reduce_scatters()
        streams.wait_for_host_copies()
        gathered, self.results = self.results, {}
        results: dict[FlatParamHandle, torch.Tensor] = {}
        for handle, (first, *others) in gathered.items():
            for other in others:
                first.add_(other)
            results[handle] = first
        # Apply factors last: a factor may be a tensor that the caller completes while backward runs.
        for handle, reduction in self._last.items():
            scale = reduction.rescale
            if scale is not None:
                results[handle].mul_(scale)
        self._last.clear()
        return results


class CommContext:
    """Holds the streams, memory pool, reductions in flight, and records of one tree of units.

    A unit starts with its own context; the root's first use replaces it with one for the tree.

    Args:
        device: the compute device.

    Attributes:
        streams: streams of every all-gather and reduce-scatter, shared so that each is ordered after the optimizer and
            the allocator can share blocks between units.
        pool: memory of the units' buffers while a step runs; empty between steps.
        reductions: reductions of the running backward.
        collectives: order of the collectives issued since ranks last compared it.
        trace: None, or a list to which ``(event, unit name)`` is appended; see :func:`fsdp_flat.composable.trace`.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams: Streams = streams_for(device)
        self.pool = MemoryPool()
        # Without streams, one reduction keeps the network busy and takes the least memory.
        self.reductions = Reductions(2 if self.streams.is_accelerator else 1)
        self.collectives = CollectiveLog()
        self.trace: list[tuple[str, str]] | None = None
