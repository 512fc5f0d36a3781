"""Runs one unit: a wrapped module and its parameter groups, in one of the states of :mod:`memory`.

A unit is driven by the step of its tree (``step``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from fsdp_flat.comm import NOTHING, Pending, keep, profiled, profiler_is_on, settled, unrecorded, untransformed
from fsdp_flat.core.casts import BufferCasts, input_cast
from fsdp_flat.core.events import EVENTS, LOGGER
from fsdp_flat.core.memory import TRANSITIONS, MemoryEvent, MemoryState, WeightsVersion
from fsdp_flat.core.options import Ignored, Phase, ReductionPolicy, UnitControl, UnitOptions
from fsdp_flat.core.param_group import ParamGroup, begin_all_gathers, summary
from fsdp_flat.core.params import is_managed, modules_of
from fsdp_flat.core.stored_tensors import StoredTensors
from fsdp_flat.core.torch_core import graph_task_id, is_autocast_on, swap_memory
from fsdp_flat.errors import FsdpFlatError, OptionError, PhaseError, UsageError
from fsdp_flat.layout import FSDP_WRAPPED_MODULE

# FSDP's labels in profiles, of events that have another name in a trace.
_LABELS = {"unshard": "all_gather", "wait_for_unshard": "all_gather_wait"}
_SHARDED, _GATHERING, _UNSHARDED = MemoryState.SHARDED, MemoryState.GATHERING, MemoryState.UNSHARDED
# States in which the shards alone have the weights of the next forward.
_READ_AGAIN = (_SHARDED, MemoryState.RETAINED_POST_FORWARD, MemoryState.SHARDED_POST_FORWARD)


_Attached = TypeVar("_Attached")


@dataclass(eq=False, repr=False)
class Unit:
    """Holds one wrapped module and everything needed to run it sharded.

    Attributes:
        name: the path from the root's module; before the root's first use, the path that wrapping gave.
        options: the unit's options, with the process groups of its own mesh.
        param_groups: empty if all parameters belong to nested units or are ignored. Those of one mesh follow each
            other, and the unit's own mesh is first.
        own_modules: the modules at and below ``module`` that are in no nested unit, and not ignored.
        members: ``module`` alone, or several modules whose forwards, one after another, are one forward of the unit.
        step: runs the tree that the unit belongs to.
        own_step: runs the tree of the unit and those below.
        phase: what the unit is doing; the step and ``summon_full_params`` write it too.
        depth: number of the unit's forwards under way: a method that calls the module is one around another.
        needs_all_gather: an unshard communicates: some groups are sharded over more than one rank.
        state: the state of the parameters' memory; only :meth:`_move` sets it.
        gathered_version: the version of the weights that the buffers hold, or held last.
        holds_graph: the last backward recorded a graph (``create_graph=True``), which may need the buffers.
        clipped: the last call that has clipped the gradients over all ranks, with its norm; empty without one.
        averages_ignored: average over ranks the gradients of parameters that no unit manages; None until a caller says.
        stored_tensors: finds tensors that modules store in forward, through which a backward may reach the unit.
        forward_hooks: hooks of a caller that run the unit's forwards in the place of the module's call; else None.
    """

    module: nn.Module
    name: str
    options: UnitOptions
    param_groups: Sequence[ParamGroup]
    ignored: Ignored
    buffers: BufferCasts
    own_modules: tuple[nn.Module, ...]
    members: tuple[nn.Module, ...]
    unit_id: int
    step: Any  # the Step, which drives units: a unit reads its streams, memory and records

    def __post_init__(self) -> None:
        precision = self.options.precision
        dtype = precision.param_dtype
        self.cast_inputs = None if dtype is None else input_cast(self.module, dtype, precision.uncast_inputs)
        self.phase = Phase.IDLE
        self.depth = self.num_loads = 0
        self.clipped = ""
        self.control = UnitControl.of(self.options.strategy)
        self.policy = ReductionPolicy()
        self.holds_graph = False
        self.needs_all_gather = any(param_group.comm.state_collectives is not None for param_group in self.param_groups)
        # Groups of one mesh are all-gathered together.
        self._gathered_together = [param_groups for _, param_groups in self.by_mesh() if param_groups]
        # Until their end, its all-gathers take no memory but staging.
        self._is_staged = self.options.per_param is not None and not any(
            param_group.layout.gathers_in_place for param_group in self.param_groups
        )
        self.state = _SHARDED
        self.gathered_version = WeightsVersion(False, -1, -1, -1)
        self.full_precision = False
        self._pending_all_gathers: list[Pending] = []
        self.averages_ignored: bool | None = None
        self.stored_tensors = StoredTensors(self.own_modules)
        self.forward_hooks: Any = None
        self._attached: dict[type, Any] = {}
        self.own_step = self.step
        self.step.root, self.step.units = self, [self]  # alone, until the first use of the tree
        self.use_step(self.step)
        _UNITS.add(self)

    def attached(self, kind: type[_Attached]) -> _Attached:
        """Return what a layer above keeps of the unit: its object of a class of that layer, made at first use."""
        if kind not in self._attached:
            self._attached[kind] = kind()
        found: _Attached = self._attached[kind]
        return found

    def by_mesh(self) -> list[tuple[UnitOptions, list[ParamGroup]]]:
        """Return the parameter groups of each mesh with its options; the unit's own comes first, even without any."""
        found: dict[int, tuple[UnitOptions, list[ParamGroup]]] = {id(self.options): (self.options, [])}
        for param_group in self.param_groups:
            options = param_group.comm.options
            found.setdefault(id(options), (options, []))[1].append(param_group)
        return list(found.values())

    def rename(self, path: str) -> None:
        """Set the name to ``path``, unless that is empty."""
        self.name = path or self.name
        for param_group in self.param_groups:
            param_group.comm.rename(self.name)
            param_group.rename(param_group.comm.name)

    def use_step(self, step: Any) -> None:
        """Use ``step``: the streams, memory and records of the tree that the unit belongs to."""
        self.step = step
        for param_group in self.param_groups:
            param_group.use_pool(step.pool)
            param_group.comm.issued = step.collective_log.of(param_group.comm.options.groups)
            param_group.grads.on_ready = partial(step.grads_ready, self)

    def use_device(self, device: torch.device) -> None:
        """Compute on another device from now on, to which the parameters have moved; the tree gets new streams."""
        for options, param_groups in self.by_mesh():
            moved = replace(options, device=device)
            self.options = moved if options is self.options else self.options
            for param_group in param_groups:
                param_group.comm.use(moved, param_group.comm.choice)

    # -- sharded and unsharded state ---------------------------------------------------------------------------

    def summary(self) -> str:
        """Return the strategy, numbers of ranks, dtypes, and bytes of this rank's shard, in one line."""
        meshes = self.by_mesh()
        return "; ".join(summary(*mesh) for mesh in meshes if mesh[1] or len(meshes) == 1)

    @property
    def is_sharded(self) -> bool:
        """True if the modules show the sharded parameters, and no all-gather is in flight (buffers may be kept)."""
        return self.state is not _GATHERING and self.state is not _UNSHARDED

    @property
    def is_unsharded(self) -> bool:
        """True if the modules show the unsharded parameters, or the unit has none."""
        return self.state is _UNSHARDED or not self.param_groups

    @property
    def is_at_rest(self) -> bool:
        """True if the end of a backward has nothing to free."""
        return self.state is _SHARDED and not self.holds_graph

    @property
    def buffer_nbytes(self) -> int:
        """Number of bytes of the unsharded parameters on this rank; 0 if the shards are the buffers."""
        return sum(param_group.output.full_nbytes for param_group in self.param_groups)

    @property
    def is_trainable(self) -> bool:
        """True if any parameter requires a gradient."""
        return any(param_group.slots.num_trainable for param_group in self.param_groups)

    @property
    def reduces_gradients(self) -> bool:
        """True if a backward through the unit reduces its gradients."""
        return self.control.sync_gradients and self.is_trainable

    def log_event(self, event: str) -> None:
        """Append an event to the tree's trace, if there is one, and to the log."""
        step = self.step
        if step.trace is not None:
            step.trace.append((event, self.name))
        if step.logs_events:
            LOGGER.debug("%s of unit %r", event, self.name)

    def event(self, event: str) -> AbstractContextManager[Any]:
        """Log an event that takes a while; return the block in which it runs, a label in profiles."""
        step = self.step
        if step.trace is not None or step.logs_events:
            self.log_event(event)
        block = profiled(_LABELS.get(event, event), self.name) if profiler_is_on() else NOTHING
        return block if step.meter is None else step.meter.measured(event, self, block)

    def _move(self, event: MemoryEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def weights_version(self) -> WeightsVersion:
        """Return the version of the shards' values."""
        storage_epoch = weights_epoch = num_updates = 0
        for param_group in self.param_groups:
            storage_epoch += param_group.storage_epoch
            weights_epoch += param_group.weights_epoch()
            num_updates += param_group.num_updates
        return WeightsVersion(self.full_precision, storage_epoch, weights_epoch, num_updates)

    def adopt_assigned(self) -> None:
        """Adopt what the program assigned to sharded parameters, which are read next.

        Where kept buffers are read next, they lack what it assigned: guards are told.
        """
        if self.state in _READ_AGAIN:
            for param_group in self.param_groups:
                changes = param_group.slots.diff()
                if changes.assigned or changes.data:
                    param_group.adopt()
        elif self.state is not _UNSHARDED:
            for guard in EVENTS.before_reuse:
                guard(self)

    def gather(self) -> None:
        """Begin the all-gather, unless it has begun or the buffers can be used again.

        Every rank of the shard group must call this.
        """
        if not self.param_groups or self.state is _GATHERING or self.state is _UNSHARDED:
            return
        if self.state is not _SHARDED and self._reuse():
            return
        step = self.step
        # Buffers and shards must be ordinary tensors even if the first forward runs in inference mode.
        begins = step.streams.staged_all_gathers if self._is_staged else step.streams.all_gathers
        with self.event("unshard"), unrecorded(), untransformed(), begins:
            # The all-gather sends the values of now, whatever changes before it is complete.
            self.adopt_assigned()
            self.gathered_version = self.weights_version()
            for param_groups in self._gathered_together:
                begin_all_gathers(param_groups, step.trace, self._pending_all_gathers)
            self._move(MemoryEvent.GATHER)
            if self._is_staged and step.streams.is_accelerator:
                step.streams.free_staging()
            if self.options.offload_params and step.streams.is_accelerator:
                step.streams.shards_read()

    def _reuse(self) -> bool:
        """Show the unsharded parameters, and return True, if the buffers may be used as they are; else return False.

        A forward uses buffers that a backward has kept, if they hold the current version of the weights. A backward
        uses kept buffers even if weights have changed on this rank, since other ranks, where they have not changed,
        begin no all-gather that this rank could join. The guard of changed weights then raises.
        """
        self.adopt_assigned()
        in_backward, now = graph_task_id() != -1, self.weights_version()
        if in_backward and self.state is MemoryState.SHARDED_POST_FORWARD:
            return False
        if in_backward:
            is_usable = now.storage_epoch == self.gathered_version.storage_epoch
        else:
            is_usable = self.state is MemoryState.RETAINED_POST_BACKWARD and now == self.gathered_version
        if not is_usable:
            self.reshard()
            return False
        self.gathered_version = now  # that of a backward, whose weights may have changed, is for :meth:`pre_backward`
        self._move(MemoryEvent.REUSE)
        for param_group in self.param_groups:
            param_group.slots.show_unsharded()
        return True

    def wait(self) -> None:
        """Wait for the all-gather in flight, and point the modules at the unsharded parameters."""
        streams = self.step.streams
        # A caller's all-gather may take memory at its end, and so does torch's operator that places gathered shards.
        takes_memory = self.options.per_param is not None
        for param_group in self.param_groups:
            takes_memory |= param_group.comm.choice.all_gather is not None
        with self.event("wait_for_unshard"), untransformed():
            with streams.all_gathers if takes_memory else streams.ends_of_all_gathers:
                if takes_memory and streams.is_accelerator:
                    for param_group in self.param_groups:
                        param_group.output.alloc(param_group.pool)
                for pending in self._pending_all_gathers:
                    pending.wait()
                if self._is_staged and streams.is_accelerator:
                    streams.hold_staging(self._pending_all_gathers)
                    if self.phase is not Phase.FORWARD:  # in a forward, until the next unit's has begun
                        streams.free_staging()
            self._pending_all_gathers = []
            streams.wait_for_all_gathers()
            for param_group in self.param_groups:
                if param_group.output.arrived():
                    param_group.slots.use_output(param_group.output)
                param_group.slots.show_unsharded()
            self._move(MemoryEvent.WAIT)

    def unshard(self) -> None:
        """Unshard the parameters, with their current values, and point the modules at them."""
        if self.state is _UNSHARDED:
            for guard in EVENTS.before_reuse:
                guard(self)
            slots = [param_group.slots for param_group in self.param_groups]
            if self.phase is not Phase.BACKWARD and any(each.is_sharded_moved() for each in slots):
                self.reshard()  # an assignment to ``.data`` raises no version counter
            for each in slots if self.state is _UNSHARDED else ():
                each.show_unsharded()  # the user may have set ``requires_grad``
        if (
            (self.state is _GATHERING or self.state is _UNSHARDED)
            and self.needs_all_gather
            and self.phase is not Phase.BACKWARD
            and self.gathered_version != self.weights_version()
        ):
            # Shards may have changed after the all-gather began, on this rank or on others.
            self.reshard()
        if self.state is not _GATHERING:
            self.gather()
        if self.state is _GATHERING:
            self.wait()
        if not self.needs_all_gather:
            self.gathered_version = self.weights_version()

    @property
    def wants_full_precision(self) -> bool:
        """True if a forward now would run in full precision (eval mode with ``full_in_eval``)."""
        return self.options.precision.full_in_eval and not self.module.training

    def use_full_precision(self, full: bool) -> None:
        """Switch compute to the shards' dtype (``full``) or the low-precision one; free buffers of the other dtype."""
        if any(param_group.dtype_in(full) != param_group.compute_dtype for param_group in self.param_groups):
            self.reshard()
            # Buffers made in inference mode could not be used in training later.
            with unrecorded():
                for param_group in self.param_groups:
                    param_group.use_full_precision(full)
        self.full_precision = full

    def optimizer_params(self) -> dict[nn.Parameter, nn.Parameter]:
        """Map unsharded parameters that modules show between forwards to the parameters that an optimizer holds."""
        if self.is_sharded or self.depth > 0 or graph_task_id() != -1:
            return {}
        return {
            param: own
            for param_group in self.param_groups
            for param, own in param_group.slots.optimizer_param_of().items()
        }

    def show_names(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put ``tensors`` in the place of the modules' parameters, in their order, until :meth:`hide_names`."""
        remaining = iter(tensors)
        for param_group in self.param_groups:
            param_group.slots.show_names([next(remaining) for _ in param_group.layout.param_infos])

    def hide_names(self) -> None:
        """Undo :meth:`show_names`, if it was called: the modules hold their parameters again."""
        for param_group in self.param_groups:
            param_group.slots.hide_names()

    def check_idle(self, what: str) -> None:
        """Raise a PhaseError if a step or ``summon_full_params`` is in progress."""
        self.step.recover()
        if self.phase is not Phase.IDLE:
            raise PhaseError(
                f"{what} was called while unit {self.name!r} is {self.phase.value}. Call it between steps and outside "
                "of other summon_full_params contexts."
            )

    def reshard(self, last_use: Any = None) -> None:
        """Free the buffers, and shards kept for a smaller group, after waiting for an all-gather in flight.

        ``last_use`` is the event after the buffers' last use by compute, if it is known.
        """
        if self.state is _SHARDED:
            return
        if self.state is _GATHERING:
            self.wait()
        if self.state is _UNSHARDED:
            for param_group in self.param_groups:
                param_group.slots.show_sharded()
        is_freed = self.state is MemoryState.SHARDED_POST_FORWARD
        self._move(MemoryEvent.FREE)
        if not is_freed:
            self._free_buffers(last_use)
        for param_group in self.param_groups:
            param_group.kept_shards = None

    def retain(self, event: MemoryEvent) -> None:
        """Show the sharded parameters, and keep the buffers for backward or for the next forward, as ``event`` says."""
        if self.state is _GATHERING:
            self.wait()
        if self.state is _UNSHARDED:
            for param_group in self.param_groups:
                param_group.slots.show_sharded()
            self._move(event)

    def free_retained(self, last_use: Any = None) -> None:
        """Free buffers that a forward has kept, after each smaller group has copied the shards that it keeps.

        ``last_use`` is the event after their last use by compute, if it is known.
        """
        if self.state is not MemoryState.RETAINED_POST_FORWARD:
            return
        event = MemoryEvent.FREE
        for param_group in self.param_groups:
            if param_group.comm.smaller_group is not None:
                with unrecorded():
                    param_group.kept_shards = param_group.output.keep(param_group.comm.smaller_group.ranks)
                event, last_use = MemoryEvent.SHARD_POST_FORWARD, None
                self.step.streams.shards_written()
        self._move(event)
        self._free_buffers(last_use)

    def _free_buffers(self, last_use: Any = None) -> None:
        self.log_event("reshard")
        if is_autocast_on():
            # autocast caches low-precision copies of parameters, which are large and outdated after a step.
            torch.clear_autocast_cache()
        if not self.control.keeps_unsharded_storage:
            for param_group in self.param_groups:
                param_group.output.free(param_group.pool)
        self.step.streams.buffers_freed(last_use)

    def leave(self) -> None:
        """Note that a forward has ended, or raised."""
        self.depth -= 1
        if self.depth == 0 and self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE

    # -- backward ------------------------------------------------------------------------------------------------

    def pre_backward(self, weights: WeightsVersion) -> None:
        """Unshard the parameters for the backward of a forward that computed with ``weights``."""
        self.phase = Phase.BACKWARD
        if self.state is not _GATHERING and self.state is not _UNSHARDED:
            self.adopt_assigned()
        current = self.weights_version()
        if weights.storage_epoch == current.storage_epoch and self.control.unshard_in_backward:
            if weights.full_precision != self.full_precision:
                self.use_full_precision(weights.full_precision)
            self.unshard()
            current = self.gathered_version
        for guard in EVENTS.before_backward:
            guard(self, weights, current)
        for param_group in self.param_groups:
            if param_group.grads.waiting is not None:
                param_group.grads.lend()

    def post_backward(self, *, keeps_graph: bool) -> None:
        """End the unit's part of a backward: reshard the parameters, or keep the buffers by the unit's switches.

        With ``keeps_graph`` (``create_graph=True``) the buffers are kept: a second backward may go through tensors that
        this one computed from the parameters.
        """
        for param_group in self.param_groups:
            if self.state is _UNSHARDED:
                # Activation checkpointing may stop a recomputation before modules restore ``.data`` that they assigned.
                changes = param_group.slots.diff()
                if changes.assigned or changes.data:
                    param_group.slots.restore(changes)
            param_group.grads.collect()
        self.phase = Phase.IDLE if self.depth == 0 else Phase.FORWARD
        self.holds_graph = keeps_graph
        if self.depth > 0:
            return
        control = self.control
        reshards = control.reshard_after_backward
        if reshards is None:
            reshards = control.sync_gradients or control.reshard_after_forward is not False
        if keeps_graph or not reshards:
            self.retain(MemoryEvent.RETAIN_POST_BACKWARD)
        else:
            self.reshard()

    @property
    def has_hidden_gradients(self) -> bool:
        """True if there are gradients that ``.grad`` of the optimizer's parameters may not contain."""
        partial = any(
            param_group.grads.has_waiting or param_group.grads.partial.shard is not None
            for param_group in self.param_groups
        )
        return partial or self.step.reductions.has_any(self.param_groups)

    def clear_hidden_gradients(self, among: Container[torch.Tensor] | None = None, *, set_to_none: bool) -> None:
        """Drop such gradients, or fill them with zeros, of the optimizer's parameters ``among``, by default of all."""
        for param_group in self.param_groups if self.has_hidden_gradients else ():
            chosen = [each for each in param_group.slots.visible if among is None or each.param in among]
            if not chosen:
                continue  # those of another optimizer, perhaps of a model whose last step failed
            # Reductions first: one that ends may leave a partial gradient with the group.
            self.step.reductions.clear(param_group, chosen, set_to_none=set_to_none)
            param_group.grads.clear(chosen, set_to_none=set_to_none)

    def abort(self, *, drops_gradients: bool = False) -> None:
        """Reset to the sharded, idle state after an exception."""
        if self.phase is Phase.SUMMONED:
            return  # summon_full_params refused a forward, and its block continues
        self.depth, self.holds_graph = 0, False
        pendings, self._pending_all_gathers = self._pending_all_gathers, []
        unsettled = [pending for pending in pendings if not settled(pending)]
        # An all-gather in place goes on to write to the buffer, and to send from it.
        memory = [param_group.output.take_memory() for param_group in self.param_groups] if unsettled else []
        for pending in unsettled:
            keep(pending, *memory)
        frees = not self.control.keeps_unsharded_storage and not (unsettled and swap_memory is None)
        for param_group in self.param_groups:
            param_group.reset(frees=frees)
            if drops_gradients:
                param_group.grads.drop()
        self._move(MemoryEvent.ABORT)
        self.phase = Phase.IDLE
        self.step.streams.buffers_freed()


# All units of the process, for functions that are given parameters and not the model.
_UNITS: WeakSet[Unit] = WeakSet()


def units_holding(params: Iterable[torch.Tensor]) -> list[Unit]:
    """Return the units that manage any of ``params``, the parameters of an optimizer, in no particular order."""
    held = {param for param in params if is_managed(param)}
    if not held:
        return []
    return [
        unit
        for unit in list(_UNITS)
        if any(not held.isdisjoint(param_group.slots.visible_params) for param_group in unit.param_groups)
    ]


def clear_hidden_gradients(params: Iterable[torch.Tensor], *, set_to_none: bool) -> None:
    """Clear the gradients of ``params``, those of an optimizer, that ``.grad`` does not show."""
    hiding = [unit for unit in list(_UNITS) if unit.has_hidden_gradients]
    held = set(params) if hiding else set()
    for unit in hiding:
        unit.clear_hidden_gradients(held, set_to_none=set_to_none)


def units_in_backward() -> list[Unit]:
    """Return the units whose backward is under way, or raised, in no particular order."""
    return [unit for unit in list(_UNITS) if unit.phase is Phase.BACKWARD]


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of a wrapper or of a module of ``fully_shard``, or None for any other module."""
    unit = module.__dict__.get("_unit")
    return unit if isinstance(unit, Unit) else None


NOT_IN_USE = (
    "This wrapper is not in use any more (or was never built): fsdp_flat.unwrap has taken its module out. Use the "
    "module that unwrap returned."
)


def no_units(model: nn.Module) -> FsdpFlatError:
    """Return the error for a model without units, where some are needed."""
    if FSDP_WRAPPED_MODULE in model._modules:
        return UsageError(NOT_IN_USE)
    return OptionError(
        f"{type(model).__name__} holds no FullyShardedDataParallel, and no module that fully_shard was called on. "
        "Shard the model first."
    )


def own_unit(module: nn.Module) -> Unit:
    """Return the unit of a module that has one; raise a UsageError for a wrapper that ``unwrap`` has emptied."""
    unit = unit_of(module)
    if unit is None:
        raise UsageError(NOT_IN_USE)
    return unit


def units_of(module: nn.Module, *, recurse: bool = True) -> list[Unit]:
    """Return every unit at or below ``module``, parents before children; without ``recurse`` the module's own."""
    modules = modules_of(module) if recurse else (module,)
    return list(dict.fromkeys(unit for module in modules if (unit := unit_of(module)) is not None))
