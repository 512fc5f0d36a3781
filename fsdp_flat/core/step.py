"""Runs the steps of one tree of units: forwards, backwards, and recovery.

Each unit gets a step when it is built. At the first use of a root, its step becomes that of all units below. A unit
that is called before its root is the root of a small tree, until the real root's first use takes it over.

Forward: ``begin_forward`` and ``enter`` unshard a unit and free the one before; ``end_forward`` does what the order
(:class:`Order`) decides of the parameters. Backward: autograd calls ``outputs_reached`` and ``inputs_complete``; the
cursor (:class:`Backward`) then calls ``_post_backward``, which reshards the unit and begins its reductions
(:class:`Reductions`); ``_end_of_backward`` has ranks exchange a few bytes and sets the gradients
(:class:`EndOfBackward`).
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_flat.api import BackwardPrefetch
from fsdp_flat.comm import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    RECOMPUTED,
    CollectiveLog,
    Place,
    Progress,
    RankGroup,
    Streams,
    pairs_by_order,
    profiled,
    report_error,
    report_left_out,
)
from fsdp_flat.core.backward import Backward, ForwardRecord, Iteration
from fsdp_flat.core.buffers import MemoryPool
from fsdp_flat.core.checks import check_units, log_units
from fsdp_flat.core.differences import late_gradients, raise_difference
from fsdp_flat.core.events import EVENTS, LOGGER
from fsdp_flat.core.finish import Answers, EndOfBackward
from fsdp_flat.core.memory import MemoryEvent, MemoryState, WeightsVersion
from fsdp_flat.core.options import AfterForward, Phase
from fsdp_flat.core.order import Order
from fsdp_flat.core.reduction import Reductions
from fsdp_flat.core.torch_core import dynamo_disabled, graph_task_id, queue_callback, running_node_number
from fsdp_flat.core.unit import Unit, units_of
from fsdp_flat.errors import PhaseError, UsageError
from fsdp_flat.layout import clean_fqn

# Seconds that a process which ends waits for other ranks to end their last backwards.
_EXIT_PATIENCE_S = 2.0


class Step:
    """Runs the units at and below one root.

    Attributes:
        root: the outermost unit; its parameters stay unsharded between forward and backward, by default.
        root_module: returns the module of the root, or None if it is gone.
        units: every unit, parents before children; the root alone before the tree's first use.
        is_built: the tree has been used: ``units`` are all of its units.
        order: the order in which units run, and what follows from it.
        reductions: the reductions in flight.
        end: ends backwards.
        at_next_forward: called once, at the begin of the next forward.
        at_units: called once each, at the begin of one unit's forward after another; the rest when the outermost ends.
        streams: streams of every all-gather and reduce-scatter, shared so that each is ordered after the optimizer and
            the allocator can share blocks between units.
        pool: memory of the units' buffers while a step runs; empty between steps.
        collective_log: order of the collectives issued since ranks last compared it.
        trace: None, or a list to which ``(event, unit name)`` is appended; see :func:`fsdp_flat.composable.trace`.
        meter: None, or what measures the events of units; see :func:`fsdp_flat.step_metrics`.
        clipped_norm: the norm before the last clipping of the tree's gradients, or None.
        logs_events: the logger takes events; looked up when the first forward or a backward begins.
        backward: the running backward, or None.
        has_unfinalized_gradients: a backward has ended, and ``finalize_backward`` has yet to set its gradients.
        has_lost_gradients: a step was aborted, with gradients that ``finalize_backward`` would have set.
        has_trained: a backward has gone through a forward of the root.
    """

    def __init__(self, device: torch.device) -> None:
        self.root: Unit
        self.units: list[Unit] = []
        self.is_built = False
        self.pool = MemoryPool()
        self.streams = Streams(device)
        self.reductions = Reductions(self.streams)
        self.collective_log = CollectiveLog()
        self.order = Order((), on_accelerator=self.streams.is_accelerator)
        self.end = EndOfBackward((), lambda: None, self.reductions, self.collective_log)
        self.trace: list[tuple[str, str]] | None = None
        self.meter: Any = None
        self.clipped_norm: torch.Tensor | None = None
        self.at_next_forward: list[Callable[[], object]] = []
        self.at_units: list[Callable[[], object]] = []
        self.logs_events = LOGGER.isEnabledFor(logging.DEBUG)
        self.has_lost_gradients = False
        self.has_unfinalized_gradients = False
        self.has_trained = False
        self.backward: Backward | None = None
        self._buffers_full: bool | None = None
        # Units with others inside, where streams overlap all-gathers with compute.
        self._outer: frozenset[Unit] = frozenset()

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
        self.order = Order(units, on_accelerator=self.streams.is_accelerator)
        self.root_module, self.units, self.root = weakref.ref(root_module), units, units[0]
        self._take_over_units()
        settings = {unit.averages_ignored for unit in self.units} - {None}
        if self.root.averages_ignored is None and len(settings) == 1:
            # A new root around earlier roots takes over the setting that callers gave these.
            self.root.averages_ignored = settings.pop()
        if self.streams.is_accelerator:
            self._outer = frozenset(unit for unit in units if len(units_of(unit.module)) > 1)
        # Units that are not sharded: every rank has their parameters in full.
        self._replicated = [unit for unit in self.units if unit.param_groups and not unit.needs_all_gather]
        self.end = EndOfBackward(units, self.root_module, self.reductions, self.collective_log)
        self.is_built = True
        _built_steps.add(self)
        self._cast_buffers()
        log_units(self.units)
        return self

    def _take_over_units(self) -> None:
        """Take over units from other steps, except from one whose backward is running."""
        for unit in self.units:
            before = unit.step
            if before is not self and before.backward is None:
                before.recover()
                self.trace = self.trace if self.trace is not None else before.trace
                self.meter = self.meter or before.meter
                self.order.adopt(before.order, pending=before.root in self.units)
                self.at_next_forward += before.at_next_forward
                before.at_next_forward = []
                unit.use_step(self)

    def may_be_of_one_replica(self, unit: Unit) -> bool:
        """Return whether ``unit``, called now, is an inner unit by itself, of a tree that other replicas may not know.

        A replica may run forwards of this step's root alone, until a backward follows one. The unit is then the root of
        a small tree, as on the other replicas.
        """
        if self.has_trained or unit is self.root:
            return False
        begins = self.order.iteration is None and self.backward is None
        return begins and unit.options.groups.replicate.size > 1

    def use_memory(self, streams: Streams, pool: MemoryPool) -> None:
        """Use the streams and the memory of another tree from now on."""
        self.streams, self.pool, self.reductions.streams = streams, pool, streams
        for unit in self.units:
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

    def begin_forward(self, unit: Unit, compiler: Any = None) -> ForwardRecord:
        """Record the begin of a unit's forward, which is a recomputation inside a backward of this tree.

        ``compiler`` is the compiler of the code that calls the unit, or None.
        """
        if self.backward is not None and graph_task_id() != -1:
            Progress.place = Progress.place._replace(phase=RECOMPUTED)
            if not unit.holds_graph:  # else the node may be one that the earlier backward has made, on another thread
                self.backward.recompute(running_node_number())
            return ForwardRecord(unit, None)
        if self.order.iteration is None:
            self._begin_iteration(compiler)
            # An evaluation may run other units than a forward that a backward follows.
            if unit is self.root and torch.is_grad_enabled():
                self.order.spend_budget(self.end.exchange.any_rank_of_replica)
        return self.order.begin_forward(unit)

    def _begin_iteration(self, compiler: Any) -> None:
        """Begin an outermost forward."""
        self.recover()
        self._take_over_units()
        _, num_steps, num_forwards, _ = Progress.place
        Progress.place = Place(FORWARD, num_steps, num_forwards + 1, not self.root.control.sync_gradients)
        iteration = Iteration(compiler)
        for guard in EVENTS.tree_built:
            guard(self, iteration)
        self.streams.optimizer_stepped()
        while self.at_next_forward:
            self.at_next_forward.pop()()
        self.order.begin_iteration(iteration)
        self._cast_buffers()
        # Modules in these units may be called by themselves, and gradients must reach the unsharded parameters.
        for replicated in self._replicated:
            if replicated.phase is Phase.IDLE:
                replicated.unshard()

    def enter(self, record: ForwardRecord) -> None:
        """Unshard a unit for its forward, free the unit before, and begin the all-gather of the next one.

        In this order the all-gather of a unit does not wait for the compute of the unit before: that is freed once the
        all-gather has taken memory. On accelerators, that of the first unit inside has then to take memory too.
        """
        unit = record.unit
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
        full_precision = unit.wants_full_precision
        if unit.depth == 1 and unit.phase is not Phase.BACKWARD and full_precision != unit.full_precision:
            unit.use_full_precision(full_precision)
        unit.unshard()
        record.weights = unit.gathered_version
        if self.at_units:
            self.at_units.pop()()
        self.order.prefetched.pop(unit, None)
        if record.iteration is not None:
            if self.order.retained and unit.param_groups and unit not in self._outer:
                self.order.free_retained(last_use_is_known=self.backward is None)
            self.order.prefetch_forward(unit)

    def end_forward(self, record: ForwardRecord, *, expects_backward: bool, is_open_ended: bool) -> None:
        """End a unit's forward.

        With ``expects_backward`` a backward may reach the forward, on this rank or on others; if it is open-ended,
        without passing a hooked output.
        """
        unit, iteration, order = record.unit, record.iteration, self.order
        if iteration is not None:
            order.end_forward(record, iteration, expects_backward=expects_backward, is_open_ended=is_open_ended)
        unit.leave()
        after = order.after_forward(unit, iteration, expects_backward=expects_backward, is_open_ended=is_open_ended)
        if after is AfterForward.RESHARD:
            unit.reshard()
        elif after is AfterForward.RETAIN:
            unit.retain(MemoryEvent.RETAIN_POST_FORWARD)
            order.retain(record, self.streams.last_use())

    def end_iteration(self) -> None:
        """End the outermost forward."""
        iteration = self.order.iteration
        assert iteration is not None
        while self.at_units:
            self.at_units.pop()()
        self.order.end_iteration(self._replicated)
        if self.streams.is_accelerator:
            self.streams.free_staging()
        Progress.place = Progress.place._replace(phase=BETWEEN)
        if not iteration.expects_backward:
            # No backward follows to wait for copies of shards, and the caller may write to shards next.
            self.streams.wait_for_host_copies()
        self.pool.clear()
        self.collective_log.trim()

    def recover(self) -> None:
        """Abort a step whose backward raised, if there is one, and read what ranks exchanged in the last backward."""
        self.logs_events = LOGGER.isEnabledFor(logging.DEBUG)
        if self.backward is not None and (graph_task_id() == -1 or self.backward.is_lost):
            # Other ranks wait for the rest of it, unless theirs raised there too; other replicas for reductions alone.
            reduces = any(unit.control.sync_gradients for unit in self.units)
            rank_groups = _rank_groups(self.units) if reduces else {unit.options.groups.shard for unit in self.units}
            report_left_out(rank_groups, "left a backward by an exception")
            self.abort()
        if self.end.unread is not None:
            self.read_exchange()

    def fail(self, error: BaseException) -> None:
        """Reset every unit after a forward that raised, and report the reason to ranks that wait for this one.

        Gradients of earlier backwards stay, as on FSDP1.
        """
        report_error(_rank_groups(self.units), error)
        if self.order.leaves_units_out():
            shard_groups = {(unit.options.groups.shard, unit.options.device) for unit in self.units}
            by_order = [group for group, device in shard_groups if pairs_by_order(group, device)]
            report_left_out(by_order, "left a forward by an exception")
        self.order.fail()
        Progress.place = Progress.place._replace(phase=BETWEEN)
        for unit in self.units:
            unit.abort()
        self.collective_log.trim()
        self.pool.clear()

    def abort(self) -> None:
        """Abort a step after an exception: reset every unit to sharded and idle, and drop gradients of the step."""
        if self.root.control.finalizes_by_hand and (self.has_unfinalized_gradients or self.backward is not None):
            self.has_lost_gradients = True
        self.backward, self.has_unfinalized_gradients = None, False
        Progress.place = Progress.place._replace(phase=BETWEEN)
        self.order.forget()
        self.end.abort()
        for unit in self.units:
            unit.abort(drops_gradients=True)
        self.pool.clear()

    # -- backward ------------------------------------------------------------------------------------------------

    def _in_backward(self) -> Backward:
        """Return the running backward; begin it if autograd has just reached this tree."""
        if self.backward is not None and not self.backward.is_lost:
            return self.backward
        backward = self._begin_backward()
        backward.include(self.order.pending.of_backward(self.end.exchange.any_rank_of_replica))
        callback = partial(self._end_of_backward)
        backward.callback = weakref.ref(callback)
        queue_callback(callback)
        return backward

    def _begin_backward(self) -> Backward:
        self.recover()
        self._take_over_units()
        self.backward = Backward(self._unshard_for_backward, self._post_backward)
        in_no_sync = not self.root.control.sync_gradients
        Progress.place = Progress.place._replace(phase=BACKWARD, in_no_sync=in_no_sync)
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
        if Progress.place.phase != BACKWARD:
            Progress.place = Progress.place._replace(phase=BACKWARD)
        if record.iteration is not None:
            backward.reach(record)
        if self.order.retained:
            self.order.free_retained(before=unit)
        with unit.event("pre_backward"):
            unit.pre_backward(record.weights)
        self.order.prefetched.pop(unit, None)
        self.order.prefetch_backward(unit, BackwardPrefetch.BACKWARD_PRE, backward)

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
        self.reductions.finish_complete()

    def _unshard_for_backward(self, unit: Unit, weights: WeightsVersion) -> None:
        """Begin the all-gather of a unit at the end of a forward that this rank's backward has passed."""
        if unit.needs_all_gather and unit.step is self:
            assert self.backward is not None
            self.order.free_retained(before=unit)
            unit.use_full_precision(weights.full_precision)
            unit.gather()
            self.order.prefetched.pop(unit, None)
            self.order.prefetch_backward(unit, BackwardPrefetch.BACKWARD_PRE, self.backward)

    def _post_backward(self, unit: Unit) -> None:
        """Reshard a unit and reduce its gradient, in this order, so that the reduction can use the freed memory.

        A prefetch by ``BACKWARD_POST`` comes first: then its all-gather waits for no compute of the unit, and is before
        the reduction in the order of collectives.
        """
        assert self.backward is not None
        if unit.step is not self:
            return  # the unit is under two roots, and the other root's step runs it
        with unit.event("post_backward"):
            self.order.prefetch_backward(unit, BackwardPrefetch.BACKWARD_POST, self.backward)
            unit.post_backward(keeps_graph=self.backward.keeps_graph)
            if unit.control.sync_gradients:
                for param_group in unit.param_groups:
                    if param_group.slots.num_trainable:
                        self.reductions.note_used(param_group)
                for param_group in unit.param_groups:
                    if param_group.slots.num_trainable:
                        self.reductions.begin(unit, param_group)

    @dynamo_disabled
    def _end_of_backward(self, *, by_hand: bool = False) -> None:
        """Pass all remaining events; reduce and set the gradients, unless a later call is to set them."""
        backward, end, has_met = self.backward, self.end, False
        assert backward is not None
        block = profiled("root_post_backward", self.root.name)
        with block if self.meter is None else self.meter.measured("root_post_backward", self.root, block):
            backward.finish()
            self.order.drop_prefetched()
            self.order.free_retained()
            for unit in self.units:
                if unit.phase is Phase.BACKWARD or not (backward.keeps_graph or unit.is_at_rest):
                    unit.post_backward(keeps_graph=backward.keeps_graph)
            control = self.root.control
            self.has_unfinalized_gradients = control.finalizes_by_hand and not by_hand
            finalizes = not self.has_unfinalized_gradients and (control.is_last_backward or control.finalizes_by_hand)
            if finalizes and end.begin(backward):
                answers = end.meet(backward)
                if end.unread is None:
                    self._follow(answers)
                end.set_grads(answers)
                has_met = True
        self.backward = None
        self.has_trained |= self.root in backward.units
        if end.unread is None and not backward.keeps_iterations:
            self.order.pending.remove(backward.iterations)
        self.pool.clear()
        Progress.place = Progress.place._replace(phase=BETWEEN)
        self.root.log_event("root_post_backward")
        if has_met:
            # Last: a warning may raise on one rank alone, and no rank waits for it after this.
            for guard in EVENTS.after_reduce:
                guard(self)

    def _follow(self, answers: Answers) -> None:
        """Note what other ranks have answered; abort the step and raise if ranks differ."""
        outcome = answers.outcome
        assert outcome is not None
        answers.backward.keeps_iterations |= outcome.retains_graph
        try:
            if outcome.differing is not None:
                self.abort()
                lines, groups = (answers.averaged, answers.calls), outcome.differing
                raise_difference(self.collective_log, *lines, self.units, groups, is_late=answers.is_late)
        finally:
            self.collective_log.clear()

    def read_exchange(self) -> None:
        """Read what ranks exchanged in the last backward, if this rank has not waited for it; raise if they differ.

        It waits until every rank has ended that backward.
        """
        answers = self.end.read()
        if answers is None:
            return
        self._follow(answers)
        if not answers.backward.keeps_iterations:
            self.order.pending.remove(answers.backward.iterations)
        if answers.unreduced:
            self.abort()
            raise late_gradients(answers.unreduced)


def _rank_groups(units: Iterable[Unit]) -> set[RankGroup]:
    """Return all groups in which other ranks may wait for this one."""
    rank_groups: set[RankGroup] = set()
    for unit in units:
        rank_groups.update(unit.options.groups.rank_groups)
        for param_group in unit.param_groups:
            smaller, separate = param_group.comm.smaller_group, param_group.comm.choice.reduce_group
            rank_groups.update(param_group.comm.options.groups.rank_groups)
            rank_groups.update([separate] if separate else [], [smaller.rank_group] if smaller else [])
        with suppress(UsageError):  # groups were destroyed
            rank_groups.update(unit.options.groups.as_one)
    return rank_groups


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
    units = [step.root for step in _built_steps if step.end.unread is not None and mesh in _meshes_of(step)]
    read_exchanges(units)


def _meshes_of(step: Step) -> list[DeviceMesh]:
    shown = [
        param for unit in step.units for param_group in unit.param_groups for param in param_group.slots.visible_params
    ]
    return list(dict.fromkeys(param.device_mesh for param in shown if isinstance(param, DTensor)))


@atexit.register
def _log_unread() -> None:
    until = time.monotonic() + _EXIT_PATIENCE_S
    for step in list(_built_steps):
        with suppress(Exception):  # process groups may be gone
            step.end.log_unread(until)


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
    unit.own_step = step
    unit.use_step(step)


def reset_step(units: Iterable[Unit]) -> None:
    """Take a tree apart, so that its next use builds it again."""
    for unit in list(units):
        new_step(unit)
