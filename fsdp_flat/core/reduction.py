"""Reduces the flat gradients of parameter groups to this rank's shards of mean gradients.

A gradient is summed over the shard group, then over the replicate group; then its mean is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fsdp_flat.comm import (
    Pending,
    RankGroup,
    Streams,
    averages_exactly,
    begin_all_reduce,
    keep,
    settled,
    unrecorded,
)
from fsdp_flat.core.gradients import without
from fsdp_flat.core.options import ReductionPolicy
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.unit import Unit
from fsdp_flat.core.visible_params import VisibleParam

# Flat gradients whose reductions are in flight take at most this many times the memory of the largest one, by default.
_MOST_OF_LARGEST = 1.75


def predivide_factor(num_ranks: int) -> float:
    """Return FSDP1's factor for dividing before the sum, a power of two near the square root of ``num_ranks``."""
    factor = 1
    while num_ranks % factor == 0 and num_ranks / factor > factor:
        factor *= 2
    return float(factor)


class Reduction:
    """Reduces one flat gradient to this rank's shard of the mean gradient.

    It begins at once with the sum over the shard group; :meth:`advance` goes on with the sum over the replicate group,
    and :meth:`finish` divides. fp16 is divided before the sum too, as in FSDP1, because the sum could overflow. Other
    dtypes are summed unscaled and only the shard is scaled, which is one pass over less data, or none where the backend
    averages by numbers that are equal to the bit.

    Attributes:
        param_group: the parameter group.
        needs_all_reduce: the sum over the replicate group has not begun.
        is_partial: the gradient is summed over the shard group only, for a later backward.
        nbytes: bytes of the flat gradient.
    """

    def __init__(self, param_group: ParamGroup, policy: ReductionPolicy, streams: Streams) -> None:
        self.param_group = param_group
        self._streams = streams
        self._policy = policy
        comm = param_group.comm
        groups, collectives = comm.options.groups, comm.step_collectives
        self._replicate = groups.replicate
        self.needs_all_reduce = policy.all_reduce and self._replicate.size > 1
        self.is_partial = not policy.all_reduce and self._replicate.size > 1
        # Divisor that makes the sum the mean, and what the sum has been divided by.
        self._mean_divisor = groups.shard.size * self._replicate.size
        self._divided_by = 1.0
        with unrecorded():
            flat, gradient = param_group.grads.take_flat(comm.reduce_buffers)
            # Hooks may keep their arguments, and if nothing is sharded, the flat buffer becomes the gradient.
            self._used_up = None if collectives is None or policy.hook is not None else gradient
            if policy.dtype is not None:
                flat = flat.to(policy.dtype)
            self.nbytes = flat.nbytes
            # Memory of the compute stream: kept until that stream has waited for the reduction that reads it.
            self._alive = [flat]
            if policy.hook is not None:
                self._pending = Pending((), self._call_hook(flat, shards=comm.options.strategy.shards))
                return
            prescale = policy.predivide_factor
            if prescale is None and flat.dtype == torch.float16:
                prescale = predivide_factor(self._mean_divisor)
            if prescale not in (None, 1.0):
                self._divided_by = prescale
                flat.div_(prescale)
            with streams.reduce_scatters:
                if collectives is not None:
                    if streams.is_accelerator and collectives.can_average and self._averages(groups.shard, flat):
                        self._pending = collectives.begin_average(flat)
                    else:
                        self._pending = collectives.begin_reduce_scatter(flat, param_group.pool)
                    return
                self._pending = Pending((), flat)
                if self.needs_all_reduce:
                    self.advance()

    def _averages(self, rank_group: RankGroup, tensor: torch.Tensor) -> bool:
        """Return whether the backend is to average over a group, and note that the sum is divided then."""
        if self._policy.sums_only or not averages_exactly(rank_group, tensor):
            return False
        self._divided_by *= rank_group.size
        return True

    def _call_hook(self, flat: torch.Tensor, *, shards: bool) -> torch.Tensor:
        """Call the hook, which divides by itself; under hybrid sharding the mean over the replicate group remains."""
        hook, state = self._policy.hook, self._policy.hook_state
        assert hook is not None
        if not shards:
            self._mean_divisor, self.needs_all_reduce, self.is_partial = 1, False, False
            hook(state, flat)
            return flat
        self._mean_divisor = self._replicate.size
        out = flat.new_zeros(self.param_group.layout.shard_numel)
        hook(state, flat, out)
        return out

    def advance(self) -> None:
        """Wait for the sum over the shard group, and begin the sum over the replicate group."""
        self.needs_all_reduce = False
        with unrecorded(), self._streams.reduce_scatters:
            shard, partial = self._pending.wait(), self.param_group.grads.partial.take(self._divided_by)
            if partial is not None:
                shard.add_(partial)
                # If nothing is sharded, its memory is the compute stream's too.
                self._alive.append(partial)
            collective = f"the all-reduce of unit {self.param_group.spec.unit_name!r}"
            averages = self._streams.is_accelerator and self._averages(self._replicate, shard)
            self._pending = begin_all_reduce(shard, self._replicate, averages=averages, collective=collective)

    @property
    def is_done(self) -> bool:
        """True if :meth:`finish` needs neither waiting nor communication. Ranks may see different values."""
        hooked = self._policy.all_reduce_hook is not None
        return self._replicate.size == 1 and not hooked and self._pending.is_completed()

    def finish(self) -> None:
        """Wait for the communication, and leave the result with the gradients of the parameter group.

        It is the gradient of this rank's shard (``grads.reduced``; 1-D, in the parameters' dtype or the kept reduce
        dtype), or the sum of a partial reduction (``grads.partial``; in the reduce dtype).
        """
        if self.needs_all_reduce:
            self.advance()
        param_group, policy, streams = self.param_group, self._policy, self._streams
        with unrecorded(), streams.reduce_scatters:
            shard = self._pending.wait()
            if self.is_partial:
                param_group.grads.partial.add(shard, self._divided_by)
            else:
                reduced = ReducedGrad(shard, policy, self._mean_divisor, self._divided_by)
                reduced.divide()
                if policy.all_reduce_hook is not None:
                    with streams.also_on(policy.all_reduce_hook_stream):
                        policy.all_reduce_hook(shard)
                dtype = shard.dtype if param_group.spec.keep_reduce_dtype else param_group.orig_dtype
                if shard.dtype != dtype or shard.device != param_group.spec.shard_device:
                    reduced.shard = streams.copy_to(shard, param_group.spec.shard_device, dtype)
                param_group.grads.reduced.append(reduced)
        self.free()

    def free(self) -> None:
        """Free what the reduction has read, once the communication is complete."""
        # The memory returns to the compute stream, which must therefore wait for the reduction that reads it.
        self._streams.wait_for_reduce_scatters()
        self._alive.clear()
        gradient, self._used_up = self._used_up, None
        if gradient is not None:
            self.param_group.grads.recycle(gradient)
        del self._pending  # and with it the sum, if it is not the result

    def discard(self) -> None:
        """Drop the result, and free what the reduction has read once the communication is complete."""
        if settled(self._pending):
            self.free()
        else:
            keep(self._pending, *self._alive, self._used_up)


@dataclass(slots=True)
class ReducedGrad:
    """Holds this rank's shard of a reduced gradient until ``.grad`` is set.

    Attributes:
        shard: the mean (1-D, ``shard_numel``), or the sum divided by the caller's factor, unless that is a tensor.
        policy: the settings of the unit.
        mean_divisor: divisor that makes the sum over ranks the mean.
        divided_by: what the sum has been divided by.
    """

    shard: torch.Tensor
    policy: ReductionPolicy
    mean_divisor: float
    divided_by: float | torch.Tensor

    def divide(self, *, by_tensor: bool = False) -> None:
        """Divide by the part of the divisor that the shard has not been divided by.

        The caller's factor is read at each call. A factor that is a tensor may not be complete yet, so only the last
        division (``by_tensor``) is by it.
        """
        factor = None if self.policy.hook is not None else self.policy.divide_factor
        divisor = self.mean_divisor if factor is None else factor
        is_missing = by_tensor if isinstance(divisor, torch.Tensor) else divisor != self.divided_by
        if is_missing:
            self.shard.div_(divisor / self.divided_by)
            self.divided_by = divisor


class Reductions:
    """Runs the reductions of a tree, a few at a time, until their gradients are set.

    Attributes:
        streams: those of the tree.
        used: for each parameter group one byte per parameter: 1 if the reductions have a gradient of this rank for it.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.used: dict[ParamGroup, bytes] = {}
        self._in_flight: list[Reduction] = []
        self._largest_nbytes = 0

    def note_used(self, param_group: ParamGroup) -> bool:
        """Mark parameters that have gradients as used in this backward; return whether there are any."""
        if param_group.grads.unreduced:
            param_group.grads.hide_unreduced()  # drops gradients that the caller has cleared
        grads_ready, before = param_group.grads.ready(), self.used.get(param_group)
        has_any = any(grads_ready)
        if before is None:
            self.used[param_group] = grads_ready
        elif has_any:
            self.used[param_group] = bytes(map(max, grads_ready, before))
        return has_any

    def begin(self, unit: Unit, param_group: ParamGroup) -> None:
        """Begin to reduce the gradient of a parameter group (zeros if there is none).

        Reductions follow each other in the same order on every rank. A few are in flight while backward goes on, so
        that few flat gradients wait for the network. Every rank of the group's process groups must call this.
        """
        param_group.comm.issued.append(("reduction", param_group.comm))
        for earlier in self._in_flight:
            if earlier.needs_all_reduce:
                earlier.advance()
        nbytes = param_group.layout.numel * param_group.grads.reduce_dtype.itemsize
        self._largest_nbytes = max(self._largest_nbytes, nbytes)
        # Without streams, one reduction keeps the network busy and takes the least memory. With streams, two keep
        # compute from waiting, where they take little more than the largest one, which every step has to hold.
        most, most_nbytes = unit.policy.max_in_flight, math.inf
        if most is None:
            most = 2 if self.streams.is_accelerator else 1
            most_nbytes = _MOST_OF_LARGEST * self._largest_nbytes
        while len(self._in_flight) >= most or (
            most > 1 and nbytes + sum(each.nbytes for each in self._in_flight) > most_nbytes
        ):
            self._in_flight.pop(0).finish()
        with unit.event("reduce_scatter"):
            reduction = Reduction(param_group, unit.policy, self.streams)
        self._in_flight.append(reduction)
        if unit.step.meter is not None and param_group.comm.options.groups.num_ranks > 1:
            unit.step.meter.reduced_nbytes += reduction.nbytes

    def finish_complete(self) -> None:
        """Free what reductions hold that are complete; accelerators free it in the order of their streams."""
        while not self.streams.is_accelerator and self._in_flight and self._in_flight[0].is_done:
            self._in_flight.pop(0).finish()

    def finish(self) -> None:
        """Wait for the communication of all reductions."""
        while self._in_flight:
            self._in_flight.pop(0).finish()

    def wait(self) -> None:
        """Wait for all reductions, and let compute and the host use the results."""
        self.finish()
        self.streams.wait_for_reduce_scatters()
        self.streams.wait_for_host_copies()

    def has_any(self, param_groups: Iterable[ParamGroup]) -> bool:
        """Return whether reductions are in flight, or gradients of ``param_groups`` are reduced and not set yet."""
        return bool(self._in_flight) or any(param_group.grads.reduced for param_group in param_groups)

    def clear(self, param_group: ParamGroup, chosen: Sequence[VisibleParam], *, set_to_none: bool) -> None:
        """Fill reduced gradients of some parameters of a group with zeros, as far as ``.grad`` has none of them yet."""
        if self.has_any([param_group]):
            self.wait()
            for grad in param_group.grads.reduced:
                for each in chosen:
                    each.part_of(grad.shard).zero_()
        if set_to_none and param_group in self.used:
            indices = [index for each in chosen for index in each.indices]
            self.used[param_group] = without(self.used[param_group], indices)

    def drop(self, param_groups: Iterable[ParamGroup]) -> None:
        """Drop all reductions, and what they have left with ``param_groups``."""
        self.used = {}
        in_flight, self._in_flight = self._in_flight, []
        for reduction in in_flight:
            reduction.discard()
        for param_group in param_groups:
            param_group.grads.reduced = []
        self.streams.wait_for_reduce_scatters()
        self.streams.wait_for_host_copies()
