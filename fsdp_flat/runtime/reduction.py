"""Reduces gradients, and holds the communication state that all units of one root share.

A gradient is summed over the shard group, then over the replicate group; then its mean is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_flat.comm import CollectiveLog, Collectives, Pending, Streams, begin_all_reduce, profiled, unrecorded
from fsdp_flat.flat import MemoryPool, ParamGroup, VisibleParam, add_reduced
from fsdp_flat.runtime.options import UnitOptions

LOGGER = logging.getLogger("fsdp_flat")


def predivide_factor(num_ranks: int) -> float:
    """Return FSDP1's factor for dividing before the sum, a power of two near the square root of ``num_ranks``."""
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
        predivide_factor: part of ``divide_factor`` that divides before the sum; None is the library's choice, for fp16.
        hook: communication hook that replaces the reduction, called with ``hook_state`` first.
        dtype: dtype in which gradients are communicated, for the built-in low-precision hooks.
        all_reduce: sum gradients over the replicate group too; False keeps sums over the shard group for a later
            backward.
        all_reduce_hook: called with the shard of each reduced gradient.
        all_reduce_hook_stream: accelerator stream that is current in the hook; None for that of reduce-scatters.
        max_in_flight: number of reductions in flight with this unit's; None is the library's choice.
        zeros_for_unused: trainable parameters that no rank has used get gradients of zeros, not None.
    """

    divide_factor: float | torch.Tensor | None = None
    predivide_factor: float | None = None
    hook: Callable[..., Any] | None = None
    hook_state: Any = None
    dtype: torch.dtype | None = None
    all_reduce: bool = True
    all_reduce_hook: Callable[[torch.Tensor], object] | None = None
    all_reduce_hook_stream: Any = None
    max_in_flight: int | None = None
    zeros_for_unused: bool = False


class Reduction:
    """Reduces one flat gradient to this rank's shard of the mean gradient.

    It begins at once with the sum over the shard group; :meth:`advance` goes on with the sum over the replicate group,
    and :meth:`finish` divides. fp16 is divided before the sum too, as in FSDP1, because the sum could overflow. Other
    dtypes are summed unscaled and only the shard is scaled, which is one pass over less data.

    Attributes:
        needs_all_reduce: the sum over the replicate group has not begun.
        is_partial: the gradient is summed over the shard group only, for a later backward.
        result: the gradient of this rank's shard (1-D, in the parameters' dtype or the kept reduce dtype), set by
            :meth:`finish`: the mean, or the sum divided by the caller's factor, unless the factor is a tensor. None
            for a partial one: that is a sum in the reduce dtype, which stays with the handle.
    """

    def __init__(
        self,
        handle: ParamGroup,
        options: UnitOptions,
        *,
        collectives: Collectives | None,
        streams: Streams,
        policy: ReductionPolicy,
    ) -> None:
        self.handle = handle
        self.result: torch.Tensor | None = None
        self._streams = streams
        self._policy = policy
        self._replicate = options.groups.replicate
        self.needs_all_reduce = policy.all_reduce and self._replicate.size > 1
        self.is_partial = not policy.all_reduce and self._replicate.size > 1
        # Divisor that makes the sum the mean, and what the sum has been divided by.
        self._mean_divisor = options.groups.shard.size * self._replicate.size
        self._divided_by: float | torch.Tensor = 1.0
        with unrecorded():
            flat, gradient = handle.grads.take_flat()
            # Hooks may keep their arguments, and if nothing is sharded, the flat buffer becomes the gradient.
            self._used_up = None if collectives is None or policy.hook is not None else gradient
            if policy.dtype is not None:
                flat = flat.to(policy.dtype)
            # Memory of the compute stream: kept until that stream has waited for the reduction that reads it.
            self._alive = [flat]
            if policy.hook is not None:
                self._pending = Pending((), self._call_hook(flat, shards=options.strategy.shards))
                return
            prescale = policy.predivide_factor
            if prescale is None and flat.dtype == torch.float16:
                prescale = predivide_factor(self._mean_divisor)
            if prescale not in (None, 1.0):
                self._divided_by = prescale
                flat.div_(prescale)
            with streams.reduce_scatters:
                if collectives is not None:
                    self._pending = collectives.begin_reduce_scatter(flat, handle.pool)
                    return
                self._pending = Pending((), flat)
                if self.needs_all_reduce:
                    self.advance()

    def _call_hook(self, flat: torch.Tensor, *, shards: bool) -> torch.Tensor:
        """Call the hook, which divides by itself; under hybrid sharding the mean over the replicate group remains."""
        hook, state = self._policy.hook, self._policy.hook_state
        assert hook is not None
        if not shards:
            self._mean_divisor, self.needs_all_reduce, self.is_partial = 1, False, False
            hook(state, flat)
            return flat
        self._mean_divisor = self._replicate.size
        out = flat.new_zeros(self.handle.layout.shard_numel)
        hook(state, flat, out)
        return out

    def advance(self) -> None:
        """Wait for the sum over the shard group, and begin the sum over the replicate group."""
        self.needs_all_reduce = False
        with unrecorded(), self._streams.reduce_scatters:
            shard, partial = self._pending.wait(), self.handle.grads.partial.take()
            if partial is not None:
                shard.add_(partial)
                # If nothing is sharded, its memory is the compute stream's too.
                self._alive.append(partial)
            collective = f"the all-reduce of unit {self.handle.spec.unit_name!r}"
            self._pending = begin_all_reduce(shard, self._replicate, collective=collective)

    @property
    def is_done(self) -> bool:
        """True if :meth:`finish` needs neither waiting nor communication. Ranks may see different values."""
        hooked = self._policy.all_reduce_hook is not None
        return self._replicate.size == 1 and not hooked and self._pending.is_completed()

    def finish(self) -> None:
        """Wait for the communication and set the result."""
        if self.needs_all_reduce:
            self.advance()
        handle, policy, streams = self.handle, self._policy, self._streams
        with unrecorded(), streams.reduce_scatters:
            shard = self._pending.wait()
            if self.is_partial:
                handle.grads.partial.add(shard)
            else:
                self._divide(shard)
                if policy.all_reduce_hook is not None:
                    with streams.also_on(policy.all_reduce_hook_stream):
                        policy.all_reduce_hook(shard)
                dtype = shard.dtype if handle.spec.keep_reduce_dtype else handle.orig_dtype
                if shard.dtype != dtype or shard.device != handle.spec.shard_device:
                    shard = streams.copy_to(shard, handle.spec.shard_device, dtype)
                self.result = shard
        self._free()

    def _divide(self, shard: torch.Tensor, *, by_tensor: bool = False) -> None:
        """Divide by the part of the divisor that ``shard`` has not been divided by.

        A divisor that is a tensor may not be complete yet, so only the last division (``by_tensor``) is by it.
        """
        factor = None if self._policy.hook is not None else self._policy.divide_factor
        divisor = self._mean_divisor if factor is None else factor
        is_missing = by_tensor if isinstance(divisor, torch.Tensor) else divisor != self._divided_by
        if is_missing:
            shard.div_(divisor / self._divided_by)
            self._divided_by = divisor

    def _free(self) -> None:
        # The memory returns to the compute stream, which must therefore wait for the reduction that reads it.
        self._streams.wait_for_reduce_scatters()
        self._alive.clear()
        gradient, self._used_up = self._used_up, None
        if gradient is not None:
            self.handle.grads.recycle(gradient)
        del self._pending  # and with it the sum, if it is not the result

    def take_result(self) -> torch.Tensor | None:
        """Return the result, divided by the caller's factor as it is now; None for a partial reduction.

        The factor is read again: a caller may complete it while backward runs, or set another one between backwards
        whose gradients are set together.
        """
        if self.result is not None:
            self._divide(self.result, by_tensor=True)
        return self.result

    def hand_over(self, shard: torch.Tensor, used: bytes) -> None:
        """Add ``shard``, the sum of the results of all reductions of the handle, to its gradients.

        ``used`` has one byte per parameter: 1 if any rank has used it.
        """
        partial = self.handle.grads.partial
        if partial.used is not None:
            used = partial.add_used(used)
        if partial.shard is None:
            partial.used = None
        if self._policy.zeros_for_unused:
            used = bytes(self.handle.shown.requires_grad())
        add_reduced(self.handle, shard, used)

    def discard(self) -> None:
        """Wait for the communication and drop the result."""
        if self.needs_all_reduce:
            self.advance()
        self._pending.wait()
        self._free()


class Reductions:
    """Runs the reductions of one backward, in the same order on every rank.

    At most ``most`` are in flight while backward goes on, so that few flat gradients wait for the network.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_flight: list[Reduction] = []
        self._finished: dict[ParamGroup, list[Reduction]] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing was reduced."""
        return not self._in_flight and not self._finished

    def begin(
        self,
        handle: ParamGroup,
        options: UnitOptions,
        *,
        collectives: Collectives | None,
        streams: Streams,
        policy: ReductionPolicy,
    ) -> None:
        """Begin a reduction, after earlier ones have advanced, and the oldest have made room for it."""
        for earlier in self._in_flight:
            if earlier.needs_all_reduce:
                earlier.advance()
        while len(self._in_flight) >= (policy.max_in_flight or self._most):
            self._finish_oldest()
        with profiled("reduce_scatter", handle.spec.unit_name):
            self._in_flight.append(Reduction(handle, options, collectives=collectives, streams=streams, policy=policy))

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.pop(0)
        reduction.finish()
        self._finished.setdefault(reduction.handle, []).append(reduction)

    def finish_done(self) -> None:
        """Finish reductions that are complete, to free their memory."""
        while self._in_flight and self._in_flight[0].is_done:
            self._finish_oldest()

    def finish_all(self) -> None:
        """Wait for all reductions."""
        while self._in_flight:
            self._finish_oldest()

    def _wait(self, streams: Streams) -> None:
        """Wait for all reductions, and let compute and the host use the results."""
        self.finish_all()
        streams.wait_for_reduce_scatters()
        streams.wait_for_host_copies()

    def reset(self, streams: Streams) -> None:
        """Wait for all reductions and drop them; their errors add nothing to the cause of the reset."""
        in_flight, self._in_flight = self._in_flight, []
        for reduction in in_flight:
            with suppress(RuntimeError):
                reduction.discard()
        self._finished = {}
        streams.wait_for_reduce_scatters()
        streams.wait_for_host_copies()

    def clear(self, handle: ParamGroup, chosen: Iterable[VisibleParam], streams: Streams) -> None:
        """Fill the results for some parameters of a handle with zeros, as far as no gradient contains them yet."""
        if self.is_empty:
            return
        self._wait(streams)
        for reduction in self._finished.get(handle, ()):
            result = reduction.result
            if result is not None:
                for each in chosen:
                    each.part_of(result).zero_()

    def set_grads(self, streams: Streams, used: Mapping[ParamGroup, bytes]) -> None:
        """Wait for all reductions, and add the results to the gradients of their handles.

        ``used`` holds for each handle and parameter whether any rank has used it.
        """
        self._wait(streams)
        finished, self._finished = self._finished, {}
        for handle, reductions in finished.items():
            total: torch.Tensor | None = None
            for reduction in reductions:
                result = reduction.take_result()
                if result is not None:
                    total = result if total is None else total.add_(result)
                    last = reduction
            if total is not None:
                last.hand_over(total, used[handle])
            if handle.grads.partial.shard is not None:
                handle.grads.partial.add_used(used[handle])


class CommContext:
    """Holds the streams, memory pool, reductions in flight, and records of one tree of units.

    A unit starts with its own context; the root's first use replaces it with one for the tree.

    Attributes:
        streams: streams of every all-gather and reduce-scatter, shared so that each is ordered after the optimizer and
            the allocator can share blocks between units.
        pool: memory of the units' buffers while a step runs; empty between steps.
        reductions: reductions of the running backward.
        used: for each handle one byte per parameter: 1 if the reductions have a gradient of this rank for it.
        collectives: order of the collectives issued since ranks last compared it.
        trace: None, or a list to which ``(event, unit name)`` is appended; see :func:`fsdp_flat.composable.trace`.
        logs_events: the logger takes events; looked up when the first forward or a backward begins.
        unread: what :meth:`recover` has yet to read of the exchange of ranks in the last backward, or None.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = Streams(device)
        self.pool = MemoryPool()
        # Without streams, one reduction keeps the network busy and takes the least memory.
        self.reductions = Reductions(2 if self.streams.is_accelerator else 1)
        self.used: dict[ParamGroup, bytes] = {}
        self.collectives = CollectiveLog()
        self.trace: list[tuple[str, str]] | None = None
        self.logs_events = LOGGER.isEnabledFor(logging.DEBUG)
        self.unread: Any = None

    def recover(self) -> None:
        """Abort a step whose backward raised, and read what ranks exchanged; before the first use there is neither."""
