"""Runs the forward of a unit: unshard, compute, reshard, and hook inputs and outputs for backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fsdp_flat.comm import profiled, transforms_are_active
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.flat import (
    VERSION_OF,
    active_compiler,
    dynamo_disabled,
    dynamo_disabled_here,
    graph_task_id,
    is_alias,
    local_of,
)
from fsdp_flat.layout import FSDP_WRAPPED_MODULE
from fsdp_flat.runtime.backward import ForwardRecord
from fsdp_flat.runtime.casts import cast_floats
from fsdp_flat.runtime.containers import (
    CallInputs,
    Inputs,
    are_tensors,
    differentiable_tensors,
    map_tensors,
    tensors_in,
)
from fsdp_flat.runtime.options import AfterForward
from fsdp_flat.runtime.schedule import Schedule, schedule_of
from fsdp_flat.runtime.torch_runtime import preserve_version
from fsdp_flat.runtime.unit import Unit, unit_of


@dynamo_disabled_here
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the wrapped module with unsharded parameters, as the wrapper class's ``forward``.

    Every rank of the unit's groups must call this.
    """
    # Look it up again: the wrapped module may have been replaced (activation checkpointing, torch.compile, adapters).
    wrapped = self._modules[FSDP_WRAPPED_MODULE]
    assert wrapped is not None
    unit = unit_of(self)
    if unit is None:
        unit = cast(Unit, self._unit)  # raises: the wrapper is not in use any more
    return run_forward(self, unit, args, kwargs, wrapped)


@dynamo_disabled_here
def run_forward(
    wrapper: nn.Module, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
) -> Any:
    """Run ``call`` (the wrapped module, or a method of it) with the unit's parameters unsharded.

    Every rank of the unit's groups must call this in the same order of units.
    """
    forward = UnitForward(wrapper, unit, compiler=active_compiler())
    try:
        args, kwargs = forward.enter(args, kwargs)
        output = call(*args, **kwargs)
        forward.check_after_compute()
    except BaseException as error:
        forward.fail(error)
        raise
    return forward.leave(output)


class _Call(NamedTuple):
    """Holds what one module of a unit was called with.

    Attributes:
        given: arguments and keyword arguments as the module gets them.
        hooked: the caller's tensors that aliases with a backward hook replaced.
        inputs: finds and replaces tensors in the arguments; None if one tensor is the only argument.
    """

    given: Inputs
    hooked: Sequence[_HookedInput] = ()
    inputs: CallInputs | None = None


class UnitForward:
    """Runs one forward of a unit, from the all-gather to the hooks on its outputs.

    In a unit of several modules, one object serves all of them: :meth:`enter` is called before each module,
    :meth:`leave_one` after each but the last, and :meth:`leave` after the last.
    """

    __slots__ = ("_calls", "_is_outermost", "_record", "_schedule", "_unit")

    @dynamo_disabled
    def __init__(self, wrapper: nn.Module, unit: Unit, *, compiler: Any = None) -> None:
        self._unit = unit
        self._schedule = schedule = schedule_of(wrapper, unit)
        # The calls of the unit's modules that are under way; None before the first call.
        self._calls: list[_Call] | None = None
        self._record = record = schedule.begin_forward(unit, compiler)
        self._is_outermost = record.iteration is not None and len(record.iteration.order) == 1

    @dynamo_disabled
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Unshard the parameters, prefetch the next unit, and prepare the inputs.

        In a unit of several modules, calls after the first only prepare the inputs, without hooks: the unit's part of
        the backward is complete once the inputs of the first module have their gradients.
        """
        unit, schedule, record, is_first = self._unit, self._schedule, self._record, self._calls is None
        with profiled("pre_forward", unit.name):
            if self._is_outermost and schedule.streams.is_accelerator:
                device = unit.options.device
                args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device, non_blocking=True))
            if self._calls is None:
                unit.log_event("pre_forward")
                if record.iteration is not None and schedule.rank_checks.in_forward:
                    schedule.rank_checks.before_forward(unit)
                unit.enter_forward(record.weights.full_precision)
                unit.finish_unshard_current()
                if record.iteration is not None:
                    schedule.make_room(unit)
                self._calls = []
                record.weights = unit.gathered_version
                schedule.prefetch_forward(record)
            if unit.cast_inputs is not None and not record.weights.full_precision:
                precision = unit.options.precision
                if precision.cast_forward_inputs or (unit is schedule.root and precision.cast_root_forward_inputs):
                    args, kwargs = unit.cast_inputs(args, kwargs)
            call = _Call((args, kwargs))
            if unit.handles:
                call = _with_hooked_inputs(record, args, kwargs, hooks=is_first and torch.is_grad_enabled())
        self._calls.append(call)
        return call.given

    @dynamo_disabled
    def check_after_compute(self) -> None:
        """Raise a UsageError if the computation has changed parameters: a reshard would lose the changes."""
        for handle in self._unit.handles:
            handle.check_after_compute()

    @dynamo_disabled
    def fail(self, error: BaseException) -> None:
        """Leave a forward that raised ``error``.

        Inside a backward, activation checkpointing may raise to end a recomputation, and the parameters stay unsharded.
        Elsewhere the unit is resharded, and an outermost forward aborts the step.
        """
        if self._calls and (inputs := self._calls.pop().inputs) is not None:
            inputs.restore()
        recomputes = graph_task_id() != -1
        for handle in self._unit.handles:
            handle.restore_unsharded_params()
        if self._is_outermost and not recomputes:
            self._schedule.fail(error)
            return
        if self._calls is not None:
            self._unit.exit_forward(AfterForward.STAY_UNSHARDED if recomputes else AfterForward.RESHARD)
        if self._is_outermost:
            self._schedule.end_iteration()

    @dynamo_disabled
    def leave_one(self, output: Any) -> Any:
        """Hook the outputs of a module that is not the last of its unit to run; return them."""
        return self._hook_outputs(output)[0]

    @dynamo_disabled
    def leave(self, output: Any) -> Any:
        """Hook the outputs, and reshard the parameters or keep them for backward; return the outputs.

        Without an output to hook, a backward may still reach the forward if a graph of the parameters is alive: outputs
        may be in a generator, or stored outside of the model. A forward that returns its inputs alone (a layer that
        this rank skips) is excepted, since the graph may be that of an earlier step.
        """
        assert self._calls is not None
        given, original = self._calls[-1].given, output
        output, is_reached = self._hook_outputs(output)
        is_hidden = False
        if not is_reached and torch.is_grad_enabled() and not are_tensors(original, among=given):
            is_hidden = any(handle.is_in_a_graph for handle in self._unit.handles)
        self._close(is_reached or is_hidden, is_open_ended=is_hidden)
        return output

    def leave_open_ended(self) -> None:
        """End a forward without hooking outputs, and keep the parameters unsharded for a backward that may follow."""
        self._close(torch.is_grad_enabled(), is_open_ended=True)

    def _hook_outputs(self, output: Any) -> tuple[Any, bool]:
        """Cast the outputs, and register backward hooks; return them, and whether a backward may reach the unit."""
        unit, record = self._unit, self._record
        assert self._calls is not None
        call = self._calls.pop()
        for hooked in call.hooked:
            if hooked.alias._version != hooked.version:
                hooked.follow_changes()
        dtype = unit.options.precision.output_dtype
        output = output if dtype is None else cast_floats(output, dtype)
        output = _copy_parts_of_buffers(unit, output, call.inputs)
        written: list[torch.Tensor] = []
        if call.inputs is not None:
            written = call.inputs.written()
            call.inputs.restore()
        # An outermost unit without parameters has its outputs hooked too: a backward begins there.
        if not torch.is_grad_enabled() or not (unit.handles or self._is_outermost):
            return output, False
        if isinstance(output, torch.Tensor):
            found = [output] if output.requires_grad else []
        else:
            found = differentiable_tensors(output)
        found += written
        if unit.handles:
            found += unit.stored.tensors()
        if not found:
            return output, False
        hook = functools.partial(_outputs_reached, record)
        if record.iteration is not None and self._is_outermost:
            record.iteration.outputs.append(weakref.ref(hook))
        for tensor in found:
            # A leaf that the forward passes through outlives the graph, and so would a hook on it.
            if not tensor.is_leaf:
                tensor.register_hook(hook)
                hooks: Any = tensor._backward_hooks
                # Run before hooks that the module has registered, which may compute with the parameters.
                for key in list(hooks)[:-1] if len(hooks) > 1 else ():
                    hooks[key] = hooks.pop(key)
        return output, bool(unit.handles)

    def _close(self, is_reached: bool, *, is_open_ended: bool) -> None:
        """End the forward. A backward may reach it if ``is_reached``, without a hooked output if ``is_open_ended``."""
        unit, schedule, record = self._unit, self._schedule, self._record
        if self._is_outermost:
            # End forwards of units of several modules of which some did not run.
            unfinished, schedule.unfinished_forwards = schedule.unfinished_forwards, {}
            for forward, _ in unfinished.values():
                forward.leave_open_ended()
        with profiled("post_forward", unit.name):
            unit.log_event("post_forward")
            # Outputs may require gradients on some ranks only, so a trainable unit expects a backward on all ranks.
            # The forward of a method under no_grad begins with gradients enabled, but its nested units run without.
            in_grad = torch.is_grad_enabled() and not (self._is_outermost and schedule.ran_without_gradients(record))
            expects_backward = is_reached or (in_grad and unit.is_trainable)
            after = self._after_forward(expects_backward=expects_backward, is_open_ended=is_open_ended)
            schedule.end_forward(record, after, expects_backward=expects_backward, is_open_ended=is_open_ended)
            if self._is_outermost:
                schedule.end_iteration()

    def _after_forward(self, *, expects_backward: bool, is_open_ended: bool) -> AfterForward:
        """Choose what becomes of the parameters; :meth:`Unit.exit_forward` names exceptions.

        * They stay unsharded if a backward may follow, and one of these holds: the forward is a recomputation inside a
          backward; the unit's ``reshard_after_forward`` is off (None is off for the outermost unit); no hooked output
          may unshard the unit in backward; or a reshard would free nothing.
        * They are parked in an iteration: the modules show sharded parameters, and the buffers stay until the next
          unit's all-gather has taken memory (:meth:`Schedule.make_room`), or for the backward of the last unit.
        * Else they are freed.
        """
        unit, iteration = self._unit, self._record.iteration
        wanted = unit.control.reshard_after_forward
        if wanted is None:
            wanted = unit is not self._schedule.root
        # In a re-entrant checkpoint units run without gradients, but the iteration began with gradients enabled.
        trains = iteration is not None and iteration.trains
        may_follow = expects_backward or (trains and unit.is_trainable)
        if may_follow and (is_open_ended or iteration is None or not wanted or not unit.frees_buffers):
            return AfterForward.STAY_UNSHARDED
        if iteration is not None and unit.needs_all_gather and unit.control.unshard_in_backward and not is_open_ended:
            return AfterForward.PARK
        return AfterForward.RESHARD


def _with_hooked_inputs(record: ForwardRecord, args: tuple[Any, ...], kwargs: dict[str, Any], *, hooks: bool) -> _Call:
    """Return the call of a module; with ``hooks`` its inputs that require gradients get an autograd node.

    Without such inputs, the unit's post-backward runs once the backward passes an earlier forward, or ends.
    """
    inputs = None
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        given = [args[0]] if hooks and args[0].requires_grad else []
    else:
        inputs = CallInputs(args, kwargs)
        given = inputs.trainable() if hooks else []
    if not given:
        return _Call((args, kwargs), (), inputs)
    if transforms_are_active():
        raise UnsupportedError(
            f"Unit {record.unit.name!r} was called inside a transform of torch.func that runs backward (grad, vjp, "
            "jacrev, hessian), which does not call the hooks by which a unit unshards its parameters. Call backward() "
            "or torch.autograd.grad; torch.func.jvp and jacfwd; or transform the plain module, by "
            "torch.func.functional_call with this model's full state dict."
        )
    aliases = _PostBackwardNode.apply(record, *given)
    hooked = list(map(_HookedInput, given, aliases, map(VERSION_OF, aliases)))
    return _Call((aliases, kwargs) if inputs is None else inputs.replaced(given, aliases), hooked, inputs)


def _copy_parts_of_buffers(unit: Unit, output: Any, inputs: CallInputs | None) -> Any:
    """Return the outputs, with views of the unit's buffers replaced by copies: a reshard frees the buffers."""
    buffers = []
    for handle in unit.handles:
        if handle.buffer.owns_memory:
            buffers.append(handle.buffer.tensor)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        local = local_of(tensor)
        if local.layout is torch.strided:  # tensors of other layouts have no storage
            for buffer in buffers:
                if is_alias(local, buffer):
                    return tensor.clone()
        return tensor

    if not buffers:
        return output
    if inputs is not None:
        inputs.replace(copied)
    if isinstance(output, torch.Tensor):
        return copied(output)
    if any(copied(tensor) is not tensor for tensor in tensors_in(output)):
        return map_tensors(output, copied)
    return output


@dynamo_disabled
def _outputs_reached(record: ForwardRecord, _grad: torch.Tensor) -> None:
    # A root may have taken over the unit since the forward, with another schedule.
    cast(Schedule, record.unit.context).outputs_reached(record)


class _PostBackwardNode(torch.autograd.Function):
    """Passes the inputs of a forward through, and calls the schedule once the gradients of all of them exist.

    The outputs are aliases, not views: a module may change its input in place (:class:`_HookedInput`), which autograd
    refuses for views that a custom function returns.
    """

    @staticmethod
    def forward(ctx: Any, record: ForwardRecord, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.record = record
        ctx.set_materialize_grads(False)
        if record.iteration is not None:
            record.iteration.post_backward_nodes.append(weakref.ref(ctx))
        return tuple(map(torch.Tensor.detach, tensors))

    @staticmethod
    @dynamo_disabled
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        record = ctx.record
        record.unit.context.inputs_complete(record)
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _record: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tangents


class _TakeHistory(torch.autograd.Function):
    """Gives ``tensor`` the autograd history of ``alias``, which shares its memory and was changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, grads[0]


class _HookedInput(NamedTuple):
    """Holds an input of the caller and the alias of it that the module gets.

    If the module changes the alias in place (``ReLU(inplace=True)``), the caller's tensor, which shares the alias's
    memory, must get the autograd history of the change too. ``version`` is the alias's version before the module runs.
    """

    given: torch.Tensor
    alias: torch.Tensor
    version: int

    def follow_changes(self) -> None:
        """Give the caller's tensor the autograd history of the module's in-place changes."""
        # The data does not change here, so values that autograd saved stay valid.
        with preserve_version(self.given):
            _TakeHistory.apply(self.given, self.alias)
