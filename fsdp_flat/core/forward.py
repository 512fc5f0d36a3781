"""Runs the forward of a unit: unshard, compute, reshard, and hook inputs and outputs for backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fsdp_flat.comm import NOTHING, transforms_are_active
from fsdp_flat.core.backward import ForwardRecord
from fsdp_flat.core.casts import cast_floats
from fsdp_flat.core.containers import CallInputs, Inputs, are_tensors, differentiable_tensors, map_tensors
from fsdp_flat.core.events import EVENTS
from fsdp_flat.core.options import Phase
from fsdp_flat.core.outputs import take_history, without_views
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.torch_core import (
    VERSION_OF,
    active_compiler,
    dynamo_disabled,
    dynamo_disabled_here,
    graph_task_id,
)
from fsdp_flat.core.unit import Unit
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.layout import FSDP_WRAPPED_MODULE


@dynamo_disabled_here
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the wrapped module with unsharded parameters, as the wrapper class's ``forward``.

    Every rank of the unit's groups must call this.
    """
    # Look it up again: the wrapped module may have been replaced (activation checkpointing, torch.compile, adapters).
    wrapped = self._modules[FSDP_WRAPPED_MODULE]
    assert wrapped is not None
    # An attribute raises if the wrapper is not in use any more.
    return run_forward(self, cast(Unit, self._unit), args, kwargs, wrapped)


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
        return forward.leave(call(*args, **kwargs))
    except BaseException as error:
        forward.fail(error)
        raise


class _Call(NamedTuple):
    """Holds what one module of a unit was called with.

    Attributes:
        given: arguments and keyword arguments as the module gets them.
        hooked: the caller's tensors that aliases with a backward hook replaced, each with its alias and the alias's
            version before the module runs.
        inputs: finds and replaces tensors in the arguments; None if one tensor is the only argument.
    """

    given: Inputs
    hooked: Sequence[tuple[torch.Tensor, torch.Tensor, int]] = ()
    inputs: CallInputs | None = None


class UnitForward:
    """Runs one forward of a unit, from the all-gather to the hooks on its outputs.

    In a unit of several modules, one object serves all of them: :meth:`enter` is called before each module,
    :meth:`leave_one` after each but the last, and :meth:`leave` after the last.

    Attributes:
        unit: the unit.
        record: what the backward knows of the forward.
        is_outermost: the forward begins and ends an iteration.
        call: what the module under way was called with; None before and between calls.
        output: what the module under way has returned.
        changed: indices of the parameters to whose data the module has assigned other values.
    """

    __slots__ = ("_has_entered", "_step", "call", "changed", "is_outermost", "output", "record", "unit")

    @dynamo_disabled
    def __init__(self, wrapper: nn.Module, unit: Unit, *, compiler: Any = None) -> None:
        self.unit = unit
        step = unit.own_step if unit.step.may_be_of_one_replica(unit) else unit.step
        self._step = step = step if step.is_built else step.build(wrapper)
        self.record = record = step.begin_forward(unit, compiler)
        self.is_outermost = record.iteration is not None and len(record.iteration.order) == 1
        self._has_entered = False
        self.call: _Call | None = None
        self.output: Any = None
        self.changed: dict[ParamGroup, list[int]] = {}

    @dynamo_disabled
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Unshard the parameters, prefetch the next unit, and prepare the inputs.

        In a unit of several modules, calls after the first only prepare the inputs, without hooks: the unit's part of
        the backward is complete once the inputs of the first module have their gradients.
        """
        unit, step, record, is_first = self.unit, self._step, self.record, not self._has_entered
        with unit.event("pre_forward") if is_first else NOTHING:
            if self.is_outermost and step.streams.is_accelerator:
                device = unit.options.device
                args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device, non_blocking=True))
            if is_first:
                step.enter(record)
                self._has_entered = True
            if unit.cast_inputs is not None and not record.weights.full_precision:
                precision = unit.options.precision
                if precision.cast_forward_inputs or (unit is step.root and precision.cast_root_forward_inputs):
                    args, kwargs = unit.cast_inputs(args, kwargs)
            call = _Call((args, kwargs))
            if unit.param_groups:
                call = _with_hooked_inputs(record, args, kwargs, hooks=is_first and torch.is_grad_enabled())
        self.call = call
        return call.given

    @dynamo_disabled
    def after_compute(self) -> None:
        """Restore parameters whose data the module has assigned, and tell guards that it has computed."""
        for param_group in self.unit.param_groups:
            changes = param_group.slots.diff()
            if changes.assigned or changes.data:
                self.changed[param_group] = param_group.slots.restore(changes)
        for guard in EVENTS.after_compute:
            guard(self)

    @dynamo_disabled
    def fail(self, error: BaseException) -> None:
        """Leave a forward that raised ``error``.

        Inside a backward, activation checkpointing may raise to end a recomputation, and the parameters stay unsharded.
        Elsewhere the unit is resharded, and an outermost forward aborts the step.
        """
        for guard in EVENTS.step_raised:
            guard(self._step, error)
        if self.call is not None and self.call.inputs is not None:
            self.call.inputs.restore()
        self.call = None
        recomputes = graph_task_id() != -1
        for param_group in self.unit.param_groups:
            if param_group.slots.shows_unsharded:
                param_group.slots.restore(param_group.slots.diff())
        if self.is_outermost and not recomputes:
            self._step.fail(error)
            return
        if self._has_entered:
            unit = self.unit
            unit.leave()
            # In a recomputation, which raises to stop early, the backward goes on.
            if not recomputes and unit.phase is Phase.IDLE and not unit.holds_graph:
                unit.reshard()
        if self.is_outermost:
            self._step.end_iteration()

    @dynamo_disabled
    def leave_one(self, output: Any) -> Any:
        """Hook the outputs of a module that is not the last of its unit to run; return them."""
        self.output = output
        self._hook_outputs()
        return self.output

    @dynamo_disabled
    def leave(self, output: Any) -> Any:
        """Hook the outputs, and reshard the parameters or keep them for backward; return the outputs.

        Without an output to hook, a backward may still reach the forward if a graph of the parameters is alive: outputs
        may be in a generator, or stored outside of the model. A forward that returns its inputs alone (a layer that
        this rank skips) is excepted, since the graph may be that of an earlier step.
        """
        self.output = output
        assert self.call is not None
        given, is_hidden = self.call.given, False
        is_reached = self._hook_outputs()
        if not is_reached and torch.is_grad_enabled() and not are_tensors(output, among=given):
            is_hidden = any(param_group.is_in_a_graph for param_group in self.unit.param_groups)
        self._close(is_reached or is_hidden, is_open_ended=is_hidden)
        return self.output

    def leave_open_ended(self) -> None:
        """End a forward without hooking outputs, and keep the parameters unsharded for a backward that may follow."""
        self._close(torch.is_grad_enabled(), is_open_ended=True)

    def _hook_outputs(self) -> bool:
        """Cast the outputs, and register backward hooks; return whether a backward may reach the unit."""
        unit, record, call = self.unit, self.record, self.call
        assert call is not None
        dtype = unit.options.precision.output_dtype
        if dtype is not None:
            self.output = cast_floats(self.output, dtype)
        self.after_compute()
        for given, alias, version in call.hooked:
            if alias._version != version:
                take_history(given, alias)
        self.output = output = without_views(self.output, call.inputs, unit.param_groups)
        self.call = None
        written: list[torch.Tensor] = []
        if call.inputs is not None:
            written = call.inputs.written()
            call.inputs.restore()
        # An outermost unit without parameters has its outputs hooked too: a backward begins there.
        if not torch.is_grad_enabled() or not (unit.param_groups or self.is_outermost):
            return False
        if isinstance(output, torch.Tensor):
            found = [output] if output.requires_grad else []
        else:
            found = differentiable_tensors(output)
        # A backward may come through these before it needs the unit's parameters.
        found += written
        if unit.param_groups:
            found += unit.stored_tensors.find()
        if not found:
            return False
        hook = functools.partial(_outputs_reached, record)
        if record.iteration is not None and self.is_outermost:
            record.iteration.outputs.append(weakref.ref(hook))
        for tensor in found:
            # A leaf that the forward passes through outlives the graph, and so would a hook on it.
            if not tensor.is_leaf:
                tensor.register_hook(hook)
                hooks: Any = tensor._backward_hooks
                # Run before hooks that the module has registered, which may compute with the parameters.
                for key in list(hooks)[:-1] if len(hooks) > 1 else ():
                    hooks[key] = hooks.pop(key)
        return bool(unit.param_groups)

    def _close(self, is_reached: bool, *, is_open_ended: bool) -> None:
        """End the forward. A backward may reach it if ``is_reached``, without a hooked output if ``is_open_ended``."""
        unit, step, record = self.unit, self._step, self.record
        if self.is_outermost:
            # End forwards of units of several modules of which some did not run.
            order = step.order
            unfinished, order.unfinished_forwards = order.unfinished_forwards, {}
            for forward, _ in unfinished.values():
                forward.leave_open_ended()
        with unit.event("post_forward"):
            # Outputs may require gradients on some ranks only, so a trainable unit expects a backward on all ranks.
            # The forward of a method under no_grad begins with gradients enabled, but its nested units run without.
            in_grad = torch.is_grad_enabled() and not (self.is_outermost and record.ran_without_gradients)
            expects_backward = is_reached or (in_grad and unit.is_trainable)
            step.end_forward(record, expects_backward=expects_backward, is_open_ended=is_open_ended)
            if self.is_outermost:
                step.end_iteration()


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
    hooked = list(zip(given, aliases, map(VERSION_OF, aliases), strict=True))
    return _Call((aliases, kwargs) if inputs is None else inputs.replaced(given, aliases), hooked, inputs)


@dynamo_disabled
def _outputs_reached(record: ForwardRecord, _grad: torch.Tensor) -> None:
    # Several outputs may be reached. A root may have taken over the unit since the forward, with another step.
    task = graph_task_id()
    if record.task != task:
        record.unit.step.outputs_reached(record, task)


class _PostBackwardNode(torch.autograd.Function):
    """Passes the inputs of a forward through, and calls the step once the gradients of all of them exist.

    The outputs are aliases, not views: a module may change its input in place, which autograd refuses for views that a
    custom function returns.
    """

    @staticmethod
    def forward(ctx: Any, record: ForwardRecord, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.record = record
        ctx.set_materialize_grads(False)
        if record.iteration is not None:
            record.iteration.post_backward_nodes.append(weakref.ref(ctx))
        return tuple(map(torch.Tensor.detach, tensors))

    @staticmethod
    @dynamo_disabled_here
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        record = ctx.record
        record.unit.step.inputs_complete(record)
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _record: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tangents
