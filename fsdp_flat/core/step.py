"""Runs the steps of one tree of units: order, prefetch, backward, reductions in flight, and recovery.

Each unit gets a step when it is built. At the first use of a root, its step becomes that of all units below. A unit
that is called before its root is the root of a small tree, until the real root's first use takes it over.

Forward: ``begin_forward`` and ``enter`` unshard a unit and free the one before; ``end_forward`` says what becomes of
the parameters. Backward: autograd calls ``outputs_reached`` and ``inputs_complete``; the cursor (:class:`Backward`)
then calls ``_post_backward``, which reshards the unit and begins its reductions; ``_end_of_backward`` exchanges a few
bytes with other ranks and sets the gradients.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, compress
from operator import attrgetter, not_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_flat.api import BackwardPrefetch
from fsdp_flat.comm import (
    CollectiveLog,
    RankGroup,
    Streams,
    pairs_by_order,
    profiled,
    profiler_is_on,
    report_error,
    report_left_out,
)
from fsdp_flat.core.averages import average_gradients, averaged_lines, unreduced_params
from fsdp_flat.core.backward import Backward, Event, ForwardRecord, Iteration, PendingIterations
from fsdp_flat.core.buffers import MemoryPool
from fsdp_flat.core.checks import (
    budget_of,
    check_units,
    late_gradients,
    log_units,
    log_unread_difference,
    raise_difference,
    report_kept,
)
from fsdp_flat.core.events import EVENTS
from fsdp_flat.core.exchange import BackwardExchange, Outcome
from fsdp_flat.core.gradients import without
from fsdp_flat.core.memory import MemoryEvent, MemoryState, WeightsVersion
from fsdp_flat.core.optimizer_grads import add_reduced
from fsdp_flat.core.options import AfterForward, Phase
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.reduction import LOGGER, Reduction
from fsdp_flat.core.torch_core import dynamo_disabled, graph_task_id, queue_callback
from fsdp_flat.core.unit import Unit, unit_of, units_of
from fsdp_flat.core.visible_params import VisibleParam
from fsdp_flat.errors import PhaseError, UsageError
from fsdp_flat.layout import clean_fqn

_OWNS_MEMORY = attrgetter("buffer.owns_memory")
_IN_USE = (MemoryState.GATHERING, MemoryState.UNSHARDED)
# Seconds that a process which ends waits for other ranks to end their last backwards.
_EXIT_PATIENCE_S = 2.0


class _Unread(NamedTuple):
    """Holds a backward whose exchange of ranks is still to be read: ranks have set gradients without waiting for it.

    Attributes:
        averaged: a line for each parameter outside of units whose gradient is averaged.
        outcome: the answers, on a rank that has waited and found a difference, which all ranks raise later; else None.
        unreduced: with an outcome, parameter groups whose gradients were not reduced, since other ranks had gone on.
    """

    backward: Backward
    averaged: list[str]
    outcome: Outcome | None = None
    unreduced: Collection[ParamGroup] = ()


class Step:
    """Runs the units at and below one root, and makes the decisions that concern all of them.

    Attributes:
        root: the outermost unit; its parameters stay unsharded between forward and backward, by default.
        root_module: returns the module of the root, or None if it is gone.
        units: every unit, parents before children; the root alone before the tree's first use.
        is_built: the tree has been used: ``units`` are all of its units.
        at_next_forward: called once, at the begin of the next forward.
        streams: streams of every all-gather and reduce-scatter, shared so that each is ordered after the optimizer and
            the allocator can share blocks between units.
        pool: memory of the units' buffers while a step runs; empty between steps.
        collectives: order of the collectives issued since ranks last compared it.
        trace: None, or a list to which ``(event, unit name)`` is appended; see :func:`fsdp_flat.composable.trace`.
        logs_events: the logger takes events; looked up when the first forward or a backward begins.
        used: for each parameter group one byte per parameter: 1 if the reductions have a gradient of this rank for it.
        iteration: the running iteration; None outside of a forward.
        backward: the running backward, or None.
        unfinished_forwards: for units of several modules: the forward under way, and the modules that have yet to run.
        last_order: by the unit that began a forward, the units that ran in the last such forward, in order.
        kept_for_backward: the units that the memory budget keeps unsharded from forward to backward.
        has_unfinalized_gradients: a backward has ended, and ``finalize_backward`` has yet to set its gradients.
        has_lost_gradients: a step was aborted, with gradients that ``finalize_backward`` would have set.
        unread: the last backward whose exchange of ranks this rank has not read (:meth:`read_exchange`), or None.
    """

    def __init__(self, device: torch.device) -> None:
        self.root: Unit
        self.units: list[Unit] = []
        self.is_built = False
        self.streams = Streams(device)
        self.pool = MemoryPool()
        self.collectives = CollectiveLog()
        self.trace: list[tuple[str, str]] | None = None
        self.at_next_forward: list[Callable[[], object]] = []
        self.logs_events = LOGGER.isEnabledFor(logging.DEBUG)
        # Without streams, one reduction keeps the network busy and takes the least memory.
        self._most_in_flight = 2 if self.streams.is_accelerator else 1
        self._in_flight: list[Reduction] = []
        self._position = 0
        self.last_order: dict[Unit, list[Unit]] = {}
        self._unspent_nbytes: int | None = None  # the memory budget, until units are chosen
        self.kept_for_backward: frozenset[Unit] = frozenset()
        self.has_lost_gradients = False
        self._buffers_full: bool | None = None
        self._begin_anew()

    def build(self, root_module: nn.Module) -> Step:
        """Take over all units at and below ``root_module``, the module of the step's own unit, at its first use."""
        units = units_of(root_module)
        paths: dict[Unit, list[str]] = {}
        for name, module in root_module.named_modules():
            for unit in units_of(module, recurse=False):
                paths.setdefault(unit, []).append(clean_fqn(name))
        for unit, names in paths.items():
            # A unit that is called without its root keeps the path from wrapping.
            unit.rename(", ".join(filter(None, names)))
        check_units(units)
        self._unspent_nbytes = budget_of(units)
        self.root_module, self.units, self.root = weakref.ref(root_module), units, units[0]
        self._take_over_units()
        settings = {unit.averages_ignored for unit in self.units} - {None}
        if self.root.averages_ignored is None and len(settings) == 1:
            # A new root around earlier roots takes over the setting that callers gave these.
            self.root.averages_ignored = settings.pop()
        # Units that are not sharded: every rank has their parameters in full.
        self._replicated = [unit for unit in self.units if unit.param_groups and not unit.needs_all_gather]
        self._exchange = BackwardExchange(self.units, self.collectives)
        self.is_built = True
        _built_steps.add(self)
        self._cast_buffers()
        log_units(self.units)
        return self

    def _begin_anew(self) -> None:
        """Forget the step, and everything that earlier steps have left for a later backward."""
        self._forget_forward()
        self.backward: Backward | None = None
        self._callback: weakref.ref[Any] | None = None
        self.used: dict[ParamGroup, bytes] = {}
        self._pending = PendingIterations()
        self.has_unfinalized_gradients = False
        # The last backward has left gradients unreduced, and ``.grad`` shows this rank's own.
        self.shows_unreduced = False
        # The next backward waits for the exchange at its end; else only if this rank needs an answer.
        self._waits_for_ranks = True
        self.unread: _Unread | None = None

    def _forget_forward(self) -> None:
        self.iteration: Iteration | None = None
        self._prefetched: dict[Unit, None] = {}  # units whose all-gathers began early, and that have yet to run
        # The last unit that ran forward, while its buffers stay; and an event after their last use.
        self._retained: Unit | None = None
        self._retained_after: Any = None
        self.unfinished_forwards: dict[Unit, tuple[Any, set[nn.Module]]] = {}

    def _take_over_units(self) -> None:
        """Take over units from other steps, except from one whose backward is running."""
        for unit in self.units:
            before = unit.step
            if before is not self and before.backward is None:
                before.recover()
                self.trace = self.trace if self.trace is not None else before.trace
                self._position = max(self._position, before._position)
                self.at_next_forward += before.at_next_forward
                before.at_next_forward = []
                if before.root in self.units:
                    self._pending.adopt(before._pending)
                unit.use_step(self)

    def _cast_buffers(self) -> None:
        """Cast buffers to the dtype in which the next forward computes."""
        full = self.root.wants_full_precision
        if full != self._buffers_full:
            self._buffers_full = full
            for unit in self.units:
                unit.buffers.cast(full=full)

    # -- forward -------------------------------------------------------------------------------------------------

    @property
    def recomputes(self) -> bool:
        """True if a forward now is a recomputation: a backward of this tree is running."""
        return self.backward is not None and graph_task_id() != -1

    @property
    def has_unset_gradients(self) -> bool:
        """True if a backward has ended, and a later one or ``finalize_backward`` is to set its gradients."""
        partial = any(
            param_group.grads.partial.shard is not None for unit in self.units for param_group in unit.param_groups
        )
        return self.has_unfinalized_gradients or partial or self.has_reductions

    def check_gradients_set(self, what: str) -> None:
        """Raise a UsageError if gradients of a backward are not set yet; ``what`` names the call that needs them."""
        if self.has_unset_gradients:
            raise UsageError(
                f"{what} was called on unit {self.root.name!r} after a backward whose gradients are not set yet, so "
                "its norm would lack them. First run the last backward of the step, with set_is_last_backward and "
                "set_requires_all_reduce switched on again, or call finalize_backward."
            )

    def begin_forward(self, unit: Unit, compiler: Any = None) -> ForwardRecord:
        """Record the begin of a unit's forward, which is a recomputation inside a backward of this tree.

        ``compiler`` is the compiler of the code that calls the unit, or None.
        """
        weights = WeightsVersion(unit.wants_full_precision, -1, -1, -1)
        if self.backward is not None and graph_task_id() != -1:
            return ForwardRecord(unit, None, weights)
        if self.iteration is None:
            self._begin_iteration(compiler)
            # An evaluation may run other units than a forward that a backward follows.
            if self._unspent_nbytes is not None and unit is self.root and torch.is_grad_enabled():
                self._spend_budget(self._unspent_nbytes)
        iteration = self.iteration
        assert iteration is not None
        iteration.order.append(unit)
        self._position += 1
        iteration.events.append(Event(self._position, unit, is_begin=True, in_grad=torch.is_grad_enabled()))
        return ForwardRecord(unit, iteration, weights, self._position)

    def _begin_iteration(self, compiler: Any) -> None:
        """Begin an outermost forward."""
        self.recover()
        self._take_over_units()
        iteration = Iteration(compiler)
        for guard in EVENTS.tree_built:
            guard(self, iteration)
        self.iteration = iteration
        if iteration.trains:
            self._pending.add(iteration)
        self.streams.optimizer_stepped()
        while self.at_next_forward:
            self.at_next_forward.pop()()
        self._cast_buffers()
        # Modules in these units may be called by themselves, and gradients must reach the unsharded parameters.
        for replicated in self._replicated:
            if replicated.phase is Phase.IDLE:
                replicated.unshard()

    def _spend_budget(self, nbytes: int) -> None:
        """Choose the units that stay unsharded from forward to backward: the last to run, as far as ``nbytes`` go.

        The order is that of the root's last forward, so nothing is chosen before the second one. The ranks of a replica
        keep what all of them have chosen, since a failed forward may have ended on some.
        """
        order, chosen = self.last_order.get(self.root, []), set()
        left_nbytes = nbytes
        candidates = [
            unit
            for unit in dict.fromkeys(reversed(order))
            if unit is not self.root and unit.control.reshard_after_forward is None and unit.needs_all_gather
        ]
        for unit in candidates:
            if unit.buffer_nbytes <= left_nbytes:
                left_nbytes -= unit.buffer_nbytes
                chosen.add(unit)
        flags = [not order, *[unit not in chosen for unit in self.units]]
        is_unknown, *freed = self._exchange.any_rank_of_replica(flags)
        if not is_unknown:
            self._unspent_nbytes = None
            self.kept_for_backward = frozenset(compress(self.units, map(not_, freed)))
            kept = [unit for unit in self.units if unit in self.kept_for_backward]
            report_kept(kept, candidates, nbytes)

    def enter(self, record: ForwardRecord) -> None:
        """Unshard a unit for its forward, free the unit before, and begin the all-gather of the next one.

        In this order the all-gather of a unit does not wait for the compute of the unit before: that is freed once the
        all-gather has taken memory.
        """
        unit, full_precision = record.unit, record.weights.full_precision
        unit.log_event("pre_forward")
        if unit.phase is Phase.SUMMONED:
            raise PhaseError(
                f"The forward of unit {unit.name!r} was called inside summon_full_params on rank "
                f"{unit.options.groups.shard.rank} of its shard group. Leave the context before running the model; to "
                "run it, or its generate(), many times with parameters all-gathered once, enter "
                "fsdp_flat.unshard_for(model) instead."
            )
        unit.depth += 1
        if unit.phase is Phase.IDLE:
            unit.phase = Phase.FORWARD
        if unit.depth == 1 and unit.phase is not Phase.BACKWARD and full_precision != unit.full_precision:
            unit.use_full_precision(full_precision)
        unit.unshard()
        record.weights = unit.gathered_version
        self._prefetched.pop(unit, None)
        if record.iteration is not None:
            if unit.param_groups and unit is not self._retained:
                self._free_retained()
            self._prefetch_forward(unit, record.iteration)

    def _free_retained(self, *, before: Unit | None = None) -> None:
        """Free the buffers of the last unit that ran, which its forward has kept for the backward.

        ``before`` is the unit whose backward is next; nothing is freed if it needs no memory. Its own buffers stay.
        """
        if (
            before is not None
            and before is not self._retained
            and (not before.needs_all_gather or before.state in _IN_USE or before is self.root)
        ):
            return
        unit, self._retained = self._retained, None
        last_use, self._retained_after = self._retained_after, None
        if unit is not None and unit is not before:
            # A backward may have computed with them since.
            unit.free_retained(last_use if self.backward is None else None)

    def end_forward(self, record: ForwardRecord, *, expects_backward: bool, is_open_ended: bool) -> None:
        """End a unit's forward.

        With ``expects_backward`` a backward may reach the forward, on this rank or on others; if it is open-ended,
        without passing a hooked output.
        """
        unit, iteration = record.unit, record.iteration
        if iteration is not None:
            self._position += 1
            record.end = self._position
            in_grad = torch.is_grad_enabled()
            # A trainable unit that runs without gradients is taken to be in a re-entrant checkpoint.
            recomputed = iteration.trains and not in_grad and unit.is_trainable
            is_hooked = expects_backward and not is_open_ended
            weights = record.weights if is_hooked or recomputed else None
            iteration.expects_backward |= is_hooked
            iteration.is_open_ended |= is_open_ended
            iteration.events.append(Event(self._position, unit, is_begin=False, in_grad=in_grad, weights=weights))
        unit.depth -= 1
        if unit.depth == 0 and unit.phase is Phase.FORWARD:
            unit.phase = Phase.IDLE
        after = self._after_forward(unit, iteration, expects_backward=expects_backward, is_open_ended=is_open_ended)
        if after is AfterForward.RESHARD:
            unit.reshard()
        elif after is AfterForward.RETAIN:
            unit.retain(MemoryEvent.RETAIN_POST_FORWARD)
            if unit is not self.root:
                if self._retained is not unit:
                    self._free_retained()
                self._retained, self._retained_after = unit, self.streams.last_use()

    def _after_forward(
        self, unit: Unit, iteration: Iteration | None, *, expects_backward: bool, is_open_ended: bool
    ) -> AfterForward:
        """Decide what becomes of a unit's unsharded parameters at the end of its forward."""
        # A forward inside another one of the unit: a method that calls the module goes on with the parameters.
        if unit.depth > 0:
            return AfterForward.STAY_UNSHARDED
        # A recomputation: the backward of the unit follows. And the graph of an earlier backward may need the buffers.
        if unit.phase is Phase.BACKWARD or unit.holds_graph:
            return AfterForward.STAY_UNSHARDED
        wanted = unit.control.reshard_after_forward
        if wanted is None:  # the backward of the outermost unit comes first, so it would all-gather again at once
            wanted = unit is not self.root and unit not in self.kept_for_backward
        # In a re-entrant checkpoint units run without gradients, but the iteration began with gradients enabled.
        may_follow = expects_backward or (iteration is not None and iteration.trains and unit.is_trainable)
        # Without a hooked output nothing may unshard the unit in backward.
        if may_follow and (is_open_ended or iteration is None or not wanted):
            return AfterForward.STAY_UNSHARDED
        if not unit.control.reshards_evaluations:
            return AfterForward.STAY_UNSHARDED
        # A reshard frees nothing if every buffer is a shard.
        if may_follow and not any(map(_OWNS_MEMORY, unit.param_groups)):
            return AfterForward.STAY_UNSHARDED
        # The modules show sharded parameters, and the buffers stay until the next unit's all-gather has taken memory,
        # or for the backward, of which the last unit of a forward is the first.
        if iteration is not None and unit.needs_all_gather and unit.control.unshard_in_backward and not is_open_ended:
            return AfterForward.RETAIN
        return AfterForward.RESHARD

    def leave_failed(self, unit: Unit, *, recomputes: bool) -> None:
        """End a unit's forward that raised; in a recomputation, which raises to stop early, the backward goes on."""
        unit.depth -= 1
        if unit.depth == 0 and unit.phase is Phase.FORWARD:
            unit.phase = Phase.IDLE
        if not recomputes and unit.depth == 0 and unit.phase is not Phase.BACKWARD and not unit.holds_graph:
            unit.reshard()

    def end_iteration(self) -> None:
        """End the outermost forward."""
        iteration = self.iteration
        assert iteration is not None
        self.last_order[iteration.order[0]] = iteration.order
        retained = self._retained
        # The last unit of a forward is the first of its backward, so it needs no second all-gather in between.
        if not iteration.expects_backward or (retained is not None and not retained.control.keeps_last):
            self._free_retained()
        self.root.free_retained()  # no unit follows it
        if not iteration.expects_backward:
            self._pending.remove([iteration])
            # Units of a method under no_grad may have kept buffers, as if in a re-entrant checkpoint.
            ran = () if iteration.is_open_ended else iteration.order
            for unit in dict.fromkeys([*self._replicated, *ran]):
                if unit.phase is Phase.IDLE and not unit.holds_graph and unit.control.reshards_evaluations:
                    unit.reshard()
            # No backward follows to wait for copies of shards, and the caller may write to shards next.
            self.streams.wait_for_host_copies()
        self.iteration = None
        self._drop_prefetched()
        self.pool.clear()
        self.collectives.trim()

    def recover(self) -> None:
        """Abort a step whose backward raised, if there is one, and read what ranks exchanged in the last backward."""
        self.logs_events = LOGGER.isEnabledFor(logging.DEBUG)
        if self.backward is not None and (graph_task_id() == -1 or self._lost_callback):
            self._abort_backward()
        if self.unread is not None:
            self.read_exchange()

    @property
    def _lost_callback(self) -> bool:
        """True if autograd, which alone holds the callback at the end of the backward, has dropped it."""
        return self._callback is None or self._callback() is None

    def fail(self, error: BaseException) -> None:
        """Reset every unit after a forward that raised, and report the reason to ranks that wait for this one.

        Gradients of earlier backwards stay, as on FSDP1.
        """
        report_error(self._rank_groups(), error)
        if self._leaves_units_out():
            shard_groups = {(unit.options.groups.shard, unit.options.device) for unit in self.units}
            by_order = [group for group, device in shard_groups if pairs_by_order(group, device)]
            report_left_out(by_order, "left a forward by an exception")
        iteration = self.iteration
        # Ranks that did not raise hold this forward for a backward if they have come to the same units.
        has_begun = iteration and any(unit is not self.root or unit.needs_all_gather for unit in iteration.order)
        if iteration and (not has_begun or iteration.is_alone):
            self._pending.remove([iteration])
        self._forget_forward()
        for unit in self.units:
            unit.abort()
        self.collectives.trim()
        self.pool.clear()

    def _leaves_units_out(self) -> bool:
        """Return whether other ranks may run units that this rank leaves out by an exception in a forward now."""
        iteration = self.iteration
        if iteration is None:
            return False
        begun = {*iteration.order, *self._prefetched}
        expected = self.last_order.get(iteration.order[0], self.units)
        # A backward follows on the others, or the units that ran after this one the last time.
        return iteration.trains or any(unit.needs_all_gather and unit not in begun for unit in expected)

    def _abort_backward(self) -> None:
        """Abort a step whose backward raised: other ranks wait for the rest of it, unless theirs raised there too."""
        reduces = any(unit.control.sync_gradients for unit in self.units)
        # Without reductions other replicas have no part in it.
        rank_groups = self._rank_groups() if reduces else {unit.options.groups.shard for unit in self.units}
        report_left_out(rank_groups, "left a backward by an exception")
        self.abort()

    def _rank_groups(self) -> set[RankGroup]:
        """Return all groups in which other ranks may wait for this one."""
        rank_groups: set[RankGroup] = set()
        for unit in self.units:
            rank_groups.update(unit.options.groups.rank_groups)
            for param_group in unit.param_groups:
                smaller, separate = param_group.comm.smaller_group, param_group.comm.choice.reduce_group
                rank_groups.update(param_group.comm.options.groups.rank_groups)
                rank_groups.update([separate] if separate else [], [smaller.rank_group] if smaller else [])
            with suppress(UsageError):  # groups were destroyed
                rank_groups.update(unit.options.groups.as_one)
        return rank_groups

    def abort(self) -> None:
        """Abort a step after an exception: reset every unit to sharded and idle, and drop gradients of the step."""
        if self.root.control.finalizes_by_hand and (self.has_unfinalized_gradients or self.backward is not None):
            self.has_lost_gradients = True
        self._begin_anew()
        self._drop_reductions()
        if self.is_built:
            self._exchange.abort()
        for unit in self.units:
            unit.abort(drops_gradients=True)
        self.pool.clear()

    # -- prefetch ------------------------------------------------------------------------------------------------

    def _begin_early(self, unit: Unit | None, event: str) -> None:
        # In GATHERING and UNSHARDED there is nothing to begin.
        if unit is not None and unit.needs_all_gather and unit.state not in _IN_USE and unit.step is self:
            unit.log_event(event)
            self._prefetched[unit] = None
            unit.gather()

    def _drop_prefetched(self) -> None:
        units, self._prefetched = self._prefetched, {}
        for unit in units:
            unit.reshard()

    def _prefetch_forward(self, unit: Unit, iteration: Iteration) -> None:
        """Begin early all-gathers: of the caller's list, else of the unit that ran next in the last iteration."""
        for module in unit.control.forward_prefetch:
            self._begin_early(unit_of(module), "forward_prefetch")
        if self._prefetched or unit.control.forward_prefetch:
            return
        # On CPUs (no streams) only an early all-gather overlaps compute, so forward prefetch is always on.
        if self.streams.is_accelerator and not unit.options.forward_prefetch:
            return
        running = iteration.order
        order, here = self.last_order.get(running[0]), len(running) - 1
        if order is not None and here < len(order) and order[here] is unit:
            for following in order[here + 1 :]:
                if following.needs_all_gather:
                    self._begin_early(following, "forward_prefetch")
                    return

    def _prefetch_backward(self, unit: Unit, mode: BackwardPrefetch) -> None:
        given = unit.control.backward_prefetch
        if given:
            for module in given if mode is BackwardPrefetch.BACKWARD_PRE else ():
                self._begin_early(unit_of(module), "backward_prefetch")
        elif unit.needs_all_gather and unit.options.backward_prefetch is mode and not self._prefetched:
            assert self.backward is not None
            self._begin_early(self.backward.next_all_gather(unit), "backward_prefetch")

    # -- backward ------------------------------------------------------------------------------------------------

    def _in_backward(self) -> Backward:
        """Return the running backward; begin it if autograd has just reached this tree."""
        if self.backward is not None and self._callback is not None and self._callback() is not None:
            return self.backward
        if self.backward is not None:
            self._abort_backward()  # autograd, which alone holds the callback at its end, has dropped it
        backward = self._begin_backward()
        backward.include(self._pending.of_backward(self._exchange.any_rank_of_replica))
        callback = partial(self._end_of_backward)
        self._callback = weakref.ref(callback)
        queue_callback(callback)
        return backward

    def _begin_backward(self) -> Backward:
        self.recover()
        self._take_over_units()
        self.backward = Backward(self._unshard_for_backward, self._post_backward)
        return self.backward

    def complete_accumulation(self) -> None:
        """Reduce and set, after backwards, the gradients that they have left unset. Every rank must call this."""
        self.recover()
        if self.backward is None:
            with torch.no_grad():
                self._begin_backward()
                self._end_of_backward(by_hand=True)

    def outputs_reached(self, record: ForwardRecord, task: int) -> None:
        """Unshard a unit for the backward of a forward whose outputs autograd has reached, in graph task ``task``."""
        record.task = task
        backward, unit = self._in_backward(), record.unit
        if record.iteration is not None:
            backward.reach(record)
        self._free_retained(before=unit)
        with profiled("pre_backward", unit.name):
            unit.pre_backward(record.weights)
        self._prefetched.pop(unit, None)
        self._prefetch_backward(unit, BackwardPrefetch.BACKWARD_PRE)

    @dynamo_disabled
    def inputs_complete(self, record: ForwardRecord) -> None:
        """End the backward of a forward, whose input gradients exist."""
        backward = self._in_backward()
        if record.iteration is None and torch.is_grad_enabled():
            return  # torch.autograd.grad inside a recomputed forward; the backward passes this graph again
        backward.complete(record)

    @dynamo_disabled
    def grads_ready(self, unit: Unit) -> None:
        """Record that parameters of a unit have got their gradients, and free what completed reductions hold."""
        if not self.is_built:
            return  # no forward has used the tree: the caller computes with parameters that ``unshard`` has shown
        if unit.phase is not Phase.BACKWARD:
            # Autograd passed no output of the unit: a parameter, or a tensor that the unit stored, was used directly.
            if unit.state is MemoryState.GATHERING:
                raise UsageError(
                    f"A backward came to the parameters of unit {unit.name!r} while they were being all-gathered: the "
                    "loss uses a tensor that the unit's forward stored and that is not among its outputs, so its "
                    "gradients may be wrong. Return that tensor from the forward too, or compute it inside "
                    "fsdp_flat.unshard_for(model)."
                )
            self._in_backward()
            unit.phase = Phase.BACKWARD
        # On the CPU, free what completed reductions hold; accelerators free it in the order of their streams.
        while not self.streams.is_accelerator and self._in_flight and self._in_flight[0].is_done:
            self._in_flight.pop(0).finish()

    def _unshard_for_backward(self, unit: Unit, weights: WeightsVersion) -> None:
        """Begin the all-gather of a unit at the end of a forward that this rank's backward has passed."""
        if unit.needs_all_gather and unit.step is self:
            self._free_retained(before=unit)
            unit.use_full_precision(weights.full_precision)
            unit.gather()
            self._prefetched.pop(unit, None)
            self._prefetch_backward(unit, BackwardPrefetch.BACKWARD_PRE)

    def _post_backward(self, unit: Unit) -> None:
        """Reshard a unit and reduce its gradient, in this order, so that the reduction can use the freed memory.

        A prefetch by ``BACKWARD_POST`` comes first: then its all-gather waits for no compute of the unit, and is before
        the reduction in the order of collectives.
        """
        assert self.backward is not None
        if unit.step is not self:
            return  # the unit is under two roots, and the other root's step runs it
        with profiled("post_backward", unit.name):
            unit.log_event("post_backward")
            self._prefetch_backward(unit, BackwardPrefetch.BACKWARD_POST)
            unit.post_backward(keeps_graph=self.backward.keeps_graph)
            if unit.control.sync_gradients:
                for param_group in unit.param_groups:
                    if param_group.shown.num_trainable:
                        self._take_grads_ready(param_group)
                for param_group in unit.param_groups:
                    if param_group.shown.num_trainable:
                        self._reduce(unit, param_group)

    def _reduce(self, unit: Unit, param_group: ParamGroup) -> None:
        """Begin to reduce the gradient of a parameter group (zeros if there is none).

        Reductions follow each other in the same order on every rank. A few are in flight while backward goes on, so
        that few flat gradients wait for the network. Every rank of the group's process groups must call this.
        """
        unit.log_event("reduce_scatter")
        param_group.comm.issued.append(("reduction", param_group.comm))
        for earlier in self._in_flight:
            if earlier.needs_all_reduce:
                earlier.advance()
        while len(self._in_flight) >= (unit.policy.max_in_flight or self._most_in_flight):
            self._in_flight.pop(0).finish()
        with profiled("reduce_scatter", param_group.spec.unit_name):
            self._in_flight.append(Reduction(param_group, unit.policy, self.streams))

    def _take_grads_ready(self, param_group: ParamGroup) -> bool:
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

    @dynamo_disabled
    def _end_of_backward(self, *, by_hand: bool = False) -> None:
        """Pass all remaining events; reduce and set the gradients, unless a later call is to set them."""
        backward = self.backward
        assert backward is not None
        with profiled("root_post_backward", self.root.name):
            backward.finish()
            self._drop_prefetched()
            self._free_retained()
            for unit in self.units:
                if unit.phase is Phase.BACKWARD or not (backward.keeps_graph or unit.is_at_rest):
                    unit.post_backward(keeps_graph=backward.keeps_graph)
            control = self.root.control
            self.has_unfinalized_gradients = control.finalizes_by_hand and not by_hand
            finalizes = not self.has_unfinalized_gradients and (control.is_last_backward or control.finalizes_by_hand)
            has_reduced = finalizes and self._finalize()
        self.backward = None
        self._callback = None
        if self.unread is None and not backward.keeps_iterations:
            self._pending.remove(backward.iterations)
        self.pool.clear()
        self.root.log_event("root_post_backward")
        if has_reduced:
            # Last: a warning may raise on one rank alone, and no rank waits for it after this.
            for guard in EVENTS.after_reduce:
                guard(self)

    def _finalize(self) -> bool:
        """Set the gradients of this backward, and of those of earlier backwards that are not set yet.

        Returns:
            Whether ranks have met: they have reduced gradients, or exchanged that there are none.
        """
        waiting = [unit for unit in self.units if not unit.control.sync_gradients]
        self.shows_unreduced = bool(waiting)
        for param_group in [param_group for unit in waiting for param_group in unit.param_groups]:
            param_group.grads.show_unreduced()
        if waiting and self._leaves_all_unreduced():
            return False
        reduced = [unit for unit in self.units if unit.control.sync_gradients]
        trains = any(unit.is_trainable for unit in self.units)
        averages = bool(self.root.averages_ignored)
        params = unreduced_params(self.root_module(), self.units) if averages or not trains else {}
        # All ranks take the same branch: it depends on the model alone, not on what this rank has called.
        if not reduced or not (trains or params):
            return False
        self._set_sharded_grads(reduced, averaged_lines(params, averages=averages))
        if averages and self.unread is None:
            any_rank = partial(self._exchange.any_rank, over=self.root.options.groups)
            average_gradients(params, self.root, any_rank)
        return True

    def _leaves_all_unreduced(self) -> bool:
        """Return whether the backward went through units alone that leave gradients unreduced, and no others have any.

        Ranks may run other numbers of such backwards, so these exchange nothing.
        """
        assert self.backward is not None
        units = self.backward.units
        is_reduced = self.has_reductions or any(any(flags) for flags in self.used.values())
        return bool(units) and not (
            is_reduced
            or any(unit.reduces_gradients for unit in units)
            or any(
                param_group.grads.has_waiting
                for unit in self.units
                if unit.reduces_gradients
                for param_group in unit.param_groups
            )
        )

    def reduce_by_hand(self, unit: Unit, param_groups: Sequence[ParamGroup]) -> None:
        """Reduce and set the gradients that backwards have left with parameter groups of one mesh, between backwards.

        Nothing happens on a rank where they have left none. Every other rank of the mesh must call this.
        """
        trained = [param_group for param_group in param_groups if param_group.shown.num_trainable]
        if self.backward is not None or not any(any(param_group.grads.ready()) for param_group in trained):
            return
        for param_group in trained:
            self._take_grads_ready(param_group)
        # Ranks may have used other parameters.
        own = [self.used.pop(param_group) for param_group in trained]
        flags = self._exchange.any_rank(list(map(bool, b"".join(own))), over=trained[0].comm.options.groups)
        used = iter(flags)
        with torch.no_grad():
            for param_group in trained:
                self._reduce(unit, param_group)
            self._set_grads(
                {param_group: bytes(map(next, [used] * len(each))) for param_group, each in zip(trained, own)}
            )
        self.pool.clear()

    def _set_sharded_grads(self, reduced: list[Unit], averaged: list[str]) -> None:
        """Reduce what is not reduced yet, and set the gradients once ranks have exchanged which of them exist."""
        param_groups = [param_group for unit in reduced for param_group in unit.param_groups]
        unreduced = {
            param_group
            for param_group in param_groups
            if param_group.grads.collect() and self._take_grads_ready(param_group)
        }
        used, self.used = self.used, {}
        unreduced = self._exchange_with_ranks(reduced, used, unreduced, averaged)
        for unit in reduced:
            for param_group in unit.param_groups:
                if param_group in unreduced or (unit.policy.all_reduce and param_group.grads.partial.shard is not None):
                    self._reduce(unit, param_group)
        self._set_grads(used)

    @property
    def has_reductions(self) -> bool:
        """True if gradients are being reduced, or are reduced and not set yet."""
        return bool(self._in_flight) or any(
            param_group.grads.reduced for unit in self.units for param_group in unit.param_groups
        )

    def _wait_for_reductions(self) -> None:
        """Wait for all reductions, and let compute and the host use the results."""
        while self._in_flight:
            self._in_flight.pop(0).finish()
        self.streams.wait_for_reduce_scatters()
        self.streams.wait_for_host_copies()

    def _set_grads(self, used: dict[ParamGroup, bytes]) -> None:
        """Wait for all reductions, and add the results to ``.grad`` of the parameters that an optimizer holds.

        ``used`` holds for each parameter group one byte per parameter: 1 if any rank has used it.
        """
        self._wait_for_reductions()
        for param_group, flags in used.items():
            partial, (reduced, param_group.grads.reduced) = param_group.grads.partial, (param_group.grads.reduced, [])
            if reduced:
                for grad in reduced:
                    grad.divide(by_tensor=True)
                    if grad is not reduced[0]:
                        reduced[0].shard.add_(grad.shard)
                all_flags = flags if partial.used is None else partial.add_used(flags)
                if partial.shard is None:
                    partial.used = None
                if reduced[0].policy.zeros_for_unused:
                    all_flags = bytes(param_group.shown.requires_grad())
                add_reduced(param_group, reduced[0].shard, all_flags)
            if partial.shard is not None:
                partial.add_used(flags)

    def _drop_reductions(self) -> None:
        """Drop all reductions."""
        in_flight, self._in_flight = self._in_flight, []
        for reduction in in_flight:
            reduction.discard()
        for param_group in [param_group for unit in self.units for param_group in unit.param_groups]:
            param_group.grads.reduced = []
        self.streams.wait_for_reduce_scatters()
        self.streams.wait_for_host_copies()

    def clear_reduced(self, param_group: ParamGroup, chosen: Sequence[VisibleParam], *, set_to_none: bool) -> None:
        """Fill reduced gradients of some parameters of a group with zeros, as far as ``.grad`` has none of them yet."""
        if self.has_reductions:
            self._wait_for_reductions()
            for grad in param_group.grads.reduced:
                for each in chosen:
                    each.part_of(grad.shard).zero_()
        if set_to_none and param_group in self.used:
            self.used[param_group] = without(
                self.used[param_group], [index for each in chosen for index in each.indices]
            )

    def _exchange_with_ranks(
        self,
        reduced: list[Unit],
        used: dict[ParamGroup, bytes],
        unreduced: set[ParamGroup],
        averaged: list[str],
    ) -> set[ParamGroup]:
        """Exchange what ranks have to know of each other, and wait for it if this rank needs it.

        Returns:
            The parameter groups that all ranks have to reduce yet.
        """
        backward, exchange = self.backward, self._exchange
        assert backward is not None
        is_needed = bool(unreduced) or self._needs_other_ranks(backward, reduced, used)
        # A collective of gloo that ends while torch's profiler stops makes torch write to freed memory.
        waits = is_needed or self._waits_for_ranks or not exchange.can_be_read_later or profiler_is_on()
        same, retains = "\n".join(averaged).encode(), backward.retains_graph
        exchange.begin(used, unreduced, same=same, retains_graph=retains, is_needed=is_needed, waits=waits)
        while self._in_flight:
            self._in_flight.pop(0).finish()
        if not waits:
            for param_group in chain.from_iterable(exchange.param_groups.values()):
                used.setdefault(param_group, bytes(len(param_group.layout.param_infos)))
            self.unread = _Unread(backward, averaged)
            return set()
        outcome = exchange.finish(used, unreduced)
        if outcome.went_on and (outcome.differing is not None or unreduced):
            # The ranks that have gone on raise it later, and so does this one.
            self.unread = _Unread(backward, averaged, outcome, unreduced)
            return set()
        self._take_outcome(outcome, backward, averaged, is_late=False)
        return unreduced

    def _needs_other_ranks(self, backward: Backward, reduced: list[Unit], used: dict[ParamGroup, bytes]) -> bool:
        """Return whether what follows depends on what other ranks have used, on their graphs, or on their settings."""
        root = self.root
        if backward.keeps_iterations or backward.retains_graph or root.control.finalizes_by_hand:
            return True
        if root.averages_ignored:
            return True
        return any(
            param_group.shown.num_trainable and used.get(param_group, b"").count(1) < param_group.shown.num_trainable
            for unit in reduced
            if not unit.policy.zeros_for_unused
            for param_group in unit.param_groups
        )

    def read_exchange(self) -> None:
        """Read what ranks exchanged in the last backward, if this rank has not waited for it; raise if they differ.

        It waits until every rank has ended that backward.
        """
        if self.unread is None:
            return
        unread, self.unread = self.unread, None
        outcome, unreduced = unread.outcome, set(unread.unreduced)
        if outcome is None:
            outcome = self._exchange.finish({}, unreduced)
        self._take_outcome(outcome, unread.backward, unread.averaged, is_late=True)
        if not unread.backward.keeps_iterations:
            self._pending.remove(unread.backward.iterations)
        if unreduced:
            self.abort()
            raise late_gradients(unreduced)

    def log_unread(self, until: float) -> None:
        """Log how ranks differed in the last backward if no call has read it; wait for them until ``until``.

        That is a time of ``time.monotonic``.
        """
        if self.unread is None:
            return
        unreduced = set(self.unread.unreduced)
        outcome = self.unread.outcome or self._exchange.finish_by(until, unreduced)
        if outcome is None:
            LOGGER.warning(
                "Rank %d of the shard group ends before other ranks have ended the last backward of unit %r, so it is "
                "not known whether all ranks ran the same in it.",
                self.root.options.groups.shard.rank,
                self.root.name,
            )
        elif outcome.differing is not None or unreduced:
            log_unread_difference(self.root, self.collectives, outcome.differing, unreduced)

    def _take_outcome(self, outcome: Outcome, backward: Backward, averaged: list[str], *, is_late: bool) -> None:
        """Follow the answers of other ranks; raise if ranks differ. It ``is_late`` if gradients are set already."""
        self._waits_for_ranks = outcome.is_needed
        backward.keeps_iterations |= outcome.retains_graph
        if outcome.differing is not None:
            self.abort()
            try:
                raise_difference(self.collectives, averaged, self.units, outcome.differing, is_late=is_late)
            finally:
                self.collectives.clear()
        self.collectives.clear()


# The steps of trees that were used, for which a mesh, or the end of the process, asks.
_built_steps: weakref.WeakSet[Step] = weakref.WeakSet()


def read_exchanges(units: Iterable[Unit]) -> None:
    """Raise on every rank if ranks differed in the last backward of a tree of ``units``, where all ranks meet anyway.

    Every rank must call this. It waits until all of them have ended that backward.
    """
    for step in sorted({unit.step for unit in units}, key=lambda step: step.root.unit_id):
        step.read_exchange()


def read_exchanges_on(mesh: DeviceMesh) -> None:
    """Raise as :func:`read_exchanges` for trees with parameters that are DTensors on ``mesh``."""
    units = [step.root for step in _built_steps if step.unread is not None and mesh in _meshes_of(step)]
    read_exchanges(units)


def _meshes_of(step: Step) -> list[DeviceMesh]:
    shown = [
        param for unit in step.units for param_group in unit.param_groups for param in param_group.shown.visible_params
    ]
    return list(dict.fromkeys(param.device_mesh for param in shown if isinstance(param, DTensor)))


@atexit.register
def _log_unread() -> None:
    until = time.monotonic() + _EXIT_PATIENCE_S
    for step in list(_built_steps):
        with suppress(Exception):  # process groups may be gone
            step.log_unread(until)


def step_of(module: nn.Module, unit: Unit) -> Step:
    """Return the step of a unit's tree, which is built with ``module`` as its root if it has not been used yet."""
    return unit.step if unit.step.is_built else unit.step.build(module)


def outermost_of(unit: Unit) -> Unit | None:
    """Return the outermost unit of a unit's tree; None before the tree's first use."""
    return unit.step.root if unit.step.is_built else None


def new_step(unit: Unit) -> None:
    """Give a unit a step of its own, in which it is the root."""
    step = Step(unit.options.device)
    step.root, step.units = unit, [unit]
    unit.use_step(step)


def reset_step(units: Iterable[Unit]) -> None:
    """Take a tree apart, so that its next use builds it again."""
    for unit in list(units):
        new_step(unit)
