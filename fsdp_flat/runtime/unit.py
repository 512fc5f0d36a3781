"""Runs one unit: a wrapped module, its handles, and the collectives that all-gather and reduce them.

A unit is called by forwards (``forward``) and by the schedule of its tree (``schedule``), and calls neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from fsdp_flat.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateHandler,
    StateDictSettings,
    StateDictType,
)
from fsdp_flat.comm import Pending, profiled, unrecorded, untransformed
from fsdp_flat.errors import FsdpFlatError, OptionError, PhaseError, UsageError
from fsdp_flat.flat import ParamGroup, graph_task_id, is_managed, modules_of, without
from fsdp_flat.layout import FSDP_WRAPPED_MODULE
from fsdp_flat.runtime.casts import BufferCasts, input_cast
from fsdp_flat.runtime.materialize import Unwritten
from fsdp_flat.runtime.memory import TRANSITIONS, MemoryEvent, MemoryState, WeightsVersion
from fsdp_flat.runtime.options import AfterForward, Ignored, Phase, UnitControl
from fsdp_flat.runtime.reduction import LOGGER, CommContext, ReductionPolicy
from fsdp_flat.runtime.stored_tensors import StoredTensors
from fsdp_flat.runtime.torch_runtime import is_autocast_on
from fsdp_flat.runtime.unit_mesh import UnitMesh

_OWNS_MEMORY = attrgetter("buffer.owns_memory")


class FullParams(NamedTuple):
    """Holds the full parameters of a unit, in other memory than its buffers.

    Attributes:
        tensors: the unsharded flat tensor of each handle, 1-D, ``layout.numel`` elements in the original dtype.
        are_shown: the modules hold Parameters that are views of ``tensors``.
    """

    tensors: dict[ParamGroup, torch.Tensor]
    are_shown: bool


@dataclass(eq=False, repr=False)
class Unit:
    """Holds one wrapped module and everything needed to run it sharded.

    Attributes:
        name: the path from the root's module; before the root's first use, the path that wrapping gave.
        meshes: one per device mesh that parameters are sharded over; the unit's own is first, even without handles.
        members: ``module`` alone, or several modules whose forwards, one after another, are one forward of the unit.
        handles: the handles of all meshes; empty if all parameters belong to nested units or are ignored.
        options: the options of ``meshes[0]``.
        phase: what the unit is doing; ``Schedule.grads_ready`` and ``summon_full_params`` write it too.
        needs_all_gather: an unshard communicates: some handles are sharded over more than one rank.
        state: the state of the parameters' memory; only :meth:`_move` sets it.
        gathered_version: the version of the weights that the buffers hold, or held last.
        holds_graph: the last backward recorded a graph (``create_graph=True``), which may need the buffers.
        full: the full parameters, inside ``full_params`` and ``summon_full_params``; else None.
        averages_ignored: average over ranks the gradients of parameters that no unit manages; None until a caller says.
        outer: the outermost model in which a walk over modules has found the unit's module; None until then.
        path_from_outer: the path of the module there.
        undo: objects whose ``remove()`` undoes a change that wrapping made to modules, other than to parameters.
        unwritten: tensors that were moved from the meta device, without values; None if no rank had meta tensors.
    """

    module: nn.Module
    name: str
    meshes: Sequence[UnitMesh]
    ignored: Ignored
    buffers: BufferCasts
    stored: StoredTensors
    members: tuple[nn.Module, ...]

    def __post_init__(self) -> None:
        self.options = options = self.meshes[0].options
        precision = options.precision
        self.handles = [handle for mesh in self.meshes for handle in mesh.handles]
        dtype = precision.param_dtype
        self.cast_inputs = None if dtype is None else input_cast(self.module, dtype, precision.uncast_inputs)
        self.phase = Phase.IDLE
        self.control = UnitControl.of(options.strategy)
        self.state_dict_settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
        self.use_context(CommContext(options.device))
        self.policy = ReductionPolicy()
        self.is_nested = self.holds_graph = False
        self.needs_all_gather = any(mesh.handles and mesh.collectives is not None for mesh in self.meshes)
        self.state = MemoryState.SHARDED
        self.gathered_version = WeightsVersion(False, -1, -1, -1)
        self._full_precision = False
        self._pending_all_gathers: list[Pending] = []
        self._depth = 0
        self.full: FullParams | None = None
        self.forward_methods: set[str] = set()
        self.optim_state_handlers: dict[str, OptimStateHandler] = {}
        self.averages_ignored: bool | None = None
        self.outer: weakref.ref[nn.Module] | None = None
        self.path_from_outer = ""
        self.undo: list[Any] = []
        self.unwritten: list[Unwritten] | None = None
        _UNITS.add(self)

    def rename(self, path: str) -> None:
        """Set the name to ``path``, unless that is empty."""
        self.name = path or self.name
        for mesh in self.meshes:
            mesh.rename(self.name)

    def use_context(self, context: CommContext) -> None:
        """Use ``context``: the streams, memory and records of the tree that the unit belongs to."""
        self.context = context
        for mesh in self.meshes:
            mesh.use_context(context)

    def use_device(self, device: torch.device) -> None:
        """Compute on another device from now on, to which the parameters have moved; the tree gets new streams."""
        for mesh in self.meshes:
            mesh.use_device(device)
        self.options = self.meshes[0].options

    # -- sharded and unsharded state ---------------------------------------------------------------------------

    @property
    def unit_id(self) -> int:
        """Id of the unit in messages between ranks, equal on all ranks; 0 if it has none."""
        return self.meshes[0].unit_id

    def summary(self) -> str:
        """Return the strategy, numbers of ranks, dtypes, and bytes of this rank's shard, in one line."""
        return "; ".join(mesh.summary() for mesh in self.meshes if mesh.handles or len(self.meshes) == 1)

    @property
    def shows_sharded(self) -> bool:
        """True if the modules show the sharded parameters, and no all-gather is in flight (buffers may be kept)."""
        return self.state not in (MemoryState.GATHERING, MemoryState.READY)

    @property
    def is_ready(self) -> bool:
        """True if the modules show the unsharded parameters, or the unit has none."""
        return self.state is MemoryState.READY or not self.handles

    @property
    def is_at_rest(self) -> bool:
        """True if the end of a backward has nothing to free."""
        return self.state is MemoryState.SHARDED and not self.holds_graph

    @property
    def is_trainable(self) -> bool:
        """True if any parameter requires a gradient."""
        return any(handle.shown.num_trainable for handle in self.handles)

    @property
    def frees_buffers(self) -> bool:
        """True if a reshard frees memory: the buffer of some handle is not the handle's shard."""
        return any(map(_OWNS_MEMORY, self.handles))

    def log_event(self, event: str) -> None:
        """Append an event to the context's trace, if there is one, and to the log."""
        context = self.context
        if context.trace is not None:
            context.trace.append((event, self.name))
        if context.logs_events:
            LOGGER.debug("%s of unit %r", event, self.name)

    def _move(self, event: MemoryEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def adopt_changes(self) -> None:
        """Adopt tensors that the user assigned to sharded parameters.

        Raises:
            PhaseError: a parameter was assigned in GATHERING or KEPT, where the assignment would be lost.
        """
        for handle in self.handles:
            if self.state in (MemoryState.GATHERING, MemoryState.KEPT):
                handle.shown.check_not_assigned(shows_unsharded=False)
            elif self.state is not MemoryState.READY:
                handle.adopt_changes()

    def current_version(self) -> WeightsVersion:
        """Return the version of the shards' values, after :meth:`adopt_changes` if an all-gather may follow."""
        if self.shows_sharded:
            self.adopt_changes()
        storage_epoch = weights_epoch = num_updates = 0
        for handle in self.handles:
            storage_epoch += handle.storage_epoch
            weights_epoch += handle.weights_epoch()
            num_updates += handle.num_updates
        return WeightsVersion(self._full_precision, storage_epoch, weights_epoch, num_updates)

    def begin_unshard(self) -> None:
        """Begin the all-gather, unless it has begun or the buffers can be used again.

        Every rank of the shard group must call this.
        """
        if not self.handles or not self.shows_sharded or self._reuse():
            return
        self.log_event("unshard")
        context = self.context
        # Buffers and shards must be ordinary tensors even if the first forward runs in inference mode.
        with profiled("all_gather", self.name), unrecorded(), untransformed(), context.streams.all_gathers:
            # The all-gather sends the values of now, whatever changes before it is complete.
            self.gathered_version = self.current_version()
            for mesh in self.meshes:
                self._pending_all_gathers += mesh.begin_all_gather(context)
            self._move(MemoryEvent.GATHER)
            if self.options.offload_params and context.streams.is_accelerator:
                context.streams.shards_read()

    def _reuse(self) -> bool:
        """Show the unsharded parameters, and return True, if the buffers may be used as they are; else return False.

        A forward uses buffers that a backward has kept, if they hold the current version of the weights. A backward
        uses kept buffers even if weights have changed on this rank, since other ranks, where they have not changed,
        begin no all-gather that this rank could join. :meth:`pre_backward` then raises.
        """
        if self.state is MemoryState.SHARDED:
            return False
        in_backward, now = graph_task_id() != -1, self.current_version()
        if in_backward and self.state is MemoryState.SHRUNK:
            return False
        if in_backward:
            is_usable = now.storage_epoch == self.gathered_version.storage_epoch
        else:
            is_usable = self.state is MemoryState.KEPT and now == self.gathered_version
        if not is_usable:
            self.reshard()
            return False
        self.gathered_version = now
        self._move(MemoryEvent.REUSE)
        for handle in self.handles:
            handle.shown.show_unsharded()
        return True

    def finish_unshard(self) -> None:
        """Wait for the all-gather if one is in flight, and point the modules at the unsharded parameters."""
        if self.state is not MemoryState.GATHERING:
            return
        pendings, self._pending_all_gathers = self._pending_all_gathers, []
        streams = self.context.streams
        # A caller's all-gather may take memory at its end, and so does torch's operator that places gathered shards.
        takes_memory = [mesh for mesh in self.meshes if mesh.places_shards or mesh.choice.all_gather is not None]
        with profiled("all_gather_wait", self.name), untransformed():
            with streams.all_gathers if takes_memory else streams.ends_of_all_gathers:
                for pending in pendings:
                    pending.wait()
            streams.wait_for_all_gathers()
            for handle in self.handles:
                handle.finish_gather()
                handle.shown.show_unsharded()
            self._move(MemoryEvent.FINISH)
        self.log_event("wait_for_unshard")

    def unshard(self) -> None:
        """Unshard the parameters, with their current values, and point the modules at them."""
        self.begin_unshard_current()
        self.finish_unshard_current()

    def begin_unshard_current(self) -> None:
        """Begin the all-gather of the current values, unless the buffers have them or it has begun."""
        if not self.shows_sharded:
            if self.state is MemoryState.READY:
                for handle in self.handles:
                    handle.shown.check_not_assigned(shows_unsharded=True)
                    handle.shown.show_unsharded()  # the user may have set ``requires_grad``
            if (
                self.needs_all_gather
                and self.phase is not Phase.BACKWARD
                and self.gathered_version != self.current_version()
            ):
                # Shards may have changed after the all-gather began, on this rank or on others.
                self.reshard()
        self.begin_unshard()

    def finish_unshard_current(self) -> None:
        """Wait for the all-gather of :meth:`begin_unshard_current`, and point the modules at its parameters."""
        self.finish_unshard()
        if not self.needs_all_gather:
            self.gathered_version = self.current_version()

    @property
    def wants_full_precision(self) -> bool:
        """True if a forward now would run in full precision (eval mode with ``full_in_eval``)."""
        return self.options.precision.full_in_eval and not self.module.training

    def use_full_precision(self, full: bool) -> None:
        """Switch compute to the shards' dtype (``full``) or the low-precision one; free buffers of the other dtype."""
        if any(handle.dtype_in(full) != handle.compute_dtype for handle in self.handles):
            self.reshard()
            # Buffers made in inference mode could not be used in training later.
            with unrecorded():
                for handle in self.handles:
                    handle.use_full_precision(full)
        self._full_precision = full

    def optimizer_params(self) -> dict[nn.Parameter, nn.Parameter]:
        """Map unsharded parameters that modules show between forwards to the parameters that an optimizer holds."""
        if self.shows_sharded or self._depth > 0 or graph_task_id() != -1:
            return {}
        return {param: own for handle in self.handles for param, own in handle.shown.optimizer_param_of().items()}

    def show_names(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put ``tensors`` in the place of the modules' parameters, in handle order, until :meth:`hide_names`."""
        remaining = iter(tensors)
        for handle in self.handles:
            handle.shown.show_names([next(remaining) for _ in handle.layout.param_infos])

    def hide_names(self) -> None:
        """Undo :meth:`show_names`, if it was called: the modules hold their parameters again."""
        for handle in self.handles:
            handle.shown.hide_names(shows_unsharded=self.state is MemoryState.READY)

    def check_idle(self, what: str) -> None:
        """Raise a PhaseError if a step or ``summon_full_params`` is in progress."""
        self.context.recover()
        if self.phase is not Phase.IDLE:
            raise PhaseError(
                f"{what} was called while unit {self.name!r} is {self.phase.value}. Call it between steps and outside "
                "of other summon_full_params contexts."
            )

    def reshard(self) -> None:
        """Free the buffers, and shards kept for a smaller group, after waiting for an all-gather in flight."""
        if self.state is MemoryState.SHARDED:
            return
        self.finish_unshard()
        if self.state is MemoryState.READY:
            for handle in self.handles:
                handle.shown.show_sharded()
        is_freed = self.state is MemoryState.SHRUNK
        self._move(MemoryEvent.FREE)
        if not is_freed:
            self._free_buffers()
        for handle in self.handles:
            handle.kept_shards = None

    def park(self) -> None:
        """Show the sharded parameters, and keep the buffers for the backward that follows."""
        self._keep_buffers(MemoryEvent.PARK)

    def _keep_buffers(self, event: MemoryEvent) -> None:
        self.finish_unshard()
        if self.state is MemoryState.READY:
            for handle in self.handles:
                handle.shown.show_sharded()
            self._move(event)

    def shrink_parked(self, last_use: Any = None) -> None:
        """Free parked buffers, after each smaller group has copied the shards that it keeps for backward.

        ``last_use`` is the event after their last use by compute, if it is known.
        """
        if self.state is not MemoryState.PARKED:
            return
        shrinks = False
        for mesh in self.meshes:
            if mesh.smaller_group is not None:
                mesh.smaller_group.keep(mesh.handles)
                shrinks = True
        if shrinks:
            self._move(MemoryEvent.SHRINK)
            self._free_buffers()
        else:
            self._move(MemoryEvent.FREE)
            self._free_buffers(last_use)

    def _free_buffers(self, last_use: Any = None) -> None:
        self.log_event("reshard")
        if is_autocast_on():
            # autocast caches low-precision copies of parameters, which are large and outdated after a step.
            torch.clear_autocast_cache()
        if not self.control.keeps_unsharded_storage:
            for handle in self.handles:
                handle.free()
        self.context.streams.buffers_freed(last_use)

    # -- forward -------------------------------------------------------------------------------------------------

    def enter_forward(self, full_precision: bool) -> None:
        """Begin a forward, and its all-gather, in the dtype of the shards if ``full_precision``."""
        if self.phase is Phase.SUMMONED:
            raise PhaseError(
                f"The forward of unit {self.name!r} was called inside summon_full_params on rank "
                f"{self.options.groups.shard.rank} of its shard group. Leave the context before running the model; to "
                "run it, or its generate(), many times with parameters all-gathered once, enter "
                "fsdp_flat.unshard_for(model) instead."
            )
        self._depth += 1
        if self.phase is Phase.IDLE:
            self.phase = Phase.FORWARD
        if self._depth == 1 and self.phase is not Phase.BACKWARD and full_precision != self._full_precision:
            self.use_full_precision(full_precision)
        self.begin_unshard_current()

    def exit_forward(self, after: AfterForward) -> None:
        """End a forward, and leave the parameters as ``after`` says.

        With any ``after``, parameters stay unsharded inside another forward of the unit (of a method that calls the
        module), in a backward, and while the graph of a backward may need them (``holds_graph``).
        """
        self._depth -= 1
        if self._depth == 0 and self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
        if self._depth > 0 or self.phase is Phase.BACKWARD or self.holds_graph:
            return
        if after is AfterForward.RESHARD:
            self.reshard()
        elif after is AfterForward.PARK:
            self._keep_buffers(MemoryEvent.PARK)

    # -- backward ------------------------------------------------------------------------------------------------

    def pre_backward(self, weights: WeightsVersion) -> None:
        """Unshard the parameters for the backward of a forward with ``weights``; raise if weights have changed."""
        current = self.current_version()
        if weights.storage_epoch != current.storage_epoch:
            raise UsageError(
                f"Unit {self.name!r} was converted (.to, .float, .cuda, or an assignment to its flat parameter) after "
                "the forward of this backward, whose buffers are gone. Convert between steps."
            )
        self.phase = Phase.BACKWARD
        self.log_event("pre_backward")
        if self.control.unshard_in_backward:
            if weights.full_precision != self._full_precision:
                self.use_full_precision(weights.full_precision)
            self.unshard()
            current = self.gathered_version
        if weights.weights_epoch != current.weights_epoch:
            raise PhaseError(
                f"The weights of unit {self.name!r} were changed after the forward of this backward (by an optimizer "
                "step, load_state_dict, summon_full_params or an assignment), so its gradients would mix two sets of "
                "weights. Run backward before changing weights, or forward again after it."
            )

    def end_backward(self, *, keeps_graph: bool) -> None:
        """End the unit's part of a backward: reshard the parameters, or keep the buffers by the unit's switches.

        With ``keeps_graph`` (``create_graph=True``) the buffers are kept: a second backward may go through tensors that
        this one computed from the parameters.
        """
        for handle in self.handles:
            if self.state is MemoryState.READY:
                # Activation checkpointing may stop a recomputation before modules restore ``.data`` that they assigned.
                handle.restore_unsharded_params()
            handle.grads.end_backward()
        self.phase = Phase.IDLE if self._depth == 0 else Phase.FORWARD
        self.holds_graph = keeps_graph
        if self._depth > 0:
            return
        control = self.control
        reshards = control.reshard_after_backward
        if reshards is None:
            reshards = control.sync_gradients or control.reshard_after_forward is not False
        if keeps_graph or not reshards:
            self._keep_buffers(MemoryEvent.KEEP)
        else:
            self.reshard()

    @property
    def has_hidden_gradients(self) -> bool:
        """True if there are gradients that ``.grad`` of the optimizer's parameters may not contain."""
        partial = any(handle.grads.has_waiting or handle.grads.partial.shard is not None for handle in self.handles)
        return partial or not self.context.reductions.is_empty

    def clear_hidden_gradients(self, among: Container[torch.Tensor] | None = None, *, set_to_none: bool) -> None:
        """Drop such gradients, or fill them with zeros, of the optimizer's parameters ``among``, by default of all."""
        context = self.context
        for handle in self.handles if self.has_hidden_gradients else ():
            chosen = [each for each in handle.shown.visible if among is None or each.param in among]
            # Reductions first: one that ends may leave a partial gradient with the handle.
            context.reductions.clear(handle, chosen, context.streams)
            if set_to_none and handle in context.used:
                indices = [index for each in chosen for index in each.indices]
                context.used[handle] = without(context.used[handle], indices)
            handle.grads.clear(chosen, set_to_none=set_to_none)

    def begin_reductions(self, chosen: Container[ParamGroup] | None = None) -> None:
        """Begin to reduce the gradients (zeros if missing) of the ``chosen`` handles, by default all trainable ones.

        Every rank of the handles' groups must call this.
        """
        for mesh in self.meshes:
            for handle in mesh.handles:
                if handle not in chosen if chosen is not None else not handle.shown.num_trainable:
                    continue
                self.log_event("reduce_scatter")
                mesh.issued.append(("reduction", mesh))
                collectives, streams = mesh.step_collectives, self.context.streams
                self.context.reductions.begin(
                    handle, mesh.options, collectives=collectives, streams=streams, policy=self.policy
                )

    def abort(self) -> None:
        """Reset to the sharded, idle state after an exception, without partial gradients."""
        if self.phase is Phase.SUMMONED:
            return  # summon_full_params refused a forward, and its block continues
        self._depth, self.holds_graph = 0, False
        pendings, self._pending_all_gathers = self._pending_all_gathers, []
        for pending in pendings:
            # An exception here would hide the one that led to the abort.
            with suppress(RuntimeError):
                pending.wait()
        for handle in self.handles:
            handle.reset(
                frees=not self.control.keeps_unsharded_storage, shows_unsharded=self.state is MemoryState.READY
            )
        self._move(MemoryEvent.ABORT)
        self.phase = Phase.IDLE
        self.context.streams.buffers_freed()


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
        if any(not held.isdisjoint(handle.shown.visible_params) for handle in unit.handles)
    ]


def clear_hidden_gradients(params: Iterable[torch.Tensor], *, set_to_none: bool) -> None:
    """Clear the gradients of ``params``, those of an optimizer, that ``.grad`` does not show."""
    hiding = [unit for unit in list(_UNITS) if unit.has_hidden_gradients]
    held = set(params) if hiding else set()
    for unit in hiding:
        unit.clear_hidden_gradients(held, set_to_none=set_to_none)


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
