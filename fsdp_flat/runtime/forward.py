"""Runs the forward of a unit: unshard, compute, reshard, and hook inputs and outputs for backward."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fsdp_flat.comm import profiled
from fsdp_flat.errors import UsageError, some_of
from fsdp_flat.flat import active_compiler, dynamo_disabled, dynamo_disabled_here, graph_task_id, is_alias, local_of
from fsdp_flat.layout import COMPILED_MODULE, FSDP_WRAPPED_MODULE, clean_fqn
from fsdp_flat.runtime.backward import ForwardRecord
from fsdp_flat.runtime.memory import WeightsVersion
from fsdp_flat.runtime.options import AfterForward
from fsdp_flat.runtime.schedule import Schedule, schedule_of
from fsdp_flat.runtime.tensors import (
    CallInputs,
    are_tensors,
    cast_floats,
    differentiable_tensors,
    map_tensors,
    tensors_in,
)
from fsdp_flat.runtime.torch_runtime import preserve_version
from fsdp_flat.runtime.unit import Unit, unit_of
from fsdp_flat.user_warnings import warn_user


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
        forward.check()
    except BaseException as error:
        forward.fail(error)
        raise
    return forward.leave(output)


class _ModuleCall:
    """Holds the inputs that one module of a unit gets: all, hooked ones, and those in containers if there are any."""

    __slots__ = ("given", "hooked", "inputs")

    def __init__(self) -> None:
        self.given: Any = None
        self.hooked: list[_HookedInput] = []
        self.inputs: CallInputs | None = None


class UnitForward:
    """Runs one forward of a unit, from the all-gather to the hooks on its outputs."""

    __slots__ = ("_calls", "_entered", "_outermost", "_record", "_schedule", "_unit")

    @dynamo_disabled
    def __init__(self, wrapper: nn.Module, unit: Unit, *, compiler: Any = None) -> None:
        self._unit = unit
        self._schedule = schedule = schedule_of(wrapper, unit)
        if not unit.options.use_orig_params:
            wrapped = wrapper._modules[FSDP_WRAPPED_MODULE]
            assert wrapped is not None
            _check_compiles(schedule, unit, wrapped, compiler)
        self._entered = False
        self._calls: list[_ModuleCall] = []
        self._outermost = False
        if schedule.recomputes:
            self._record = ForwardRecord(unit, None, WeightsVersion(unit.wants_full_precision, -1, -1))
        else:
            self._outermost = schedule.iteration is None
            self._record = schedule.begin_forward(unit)

    @dynamo_disabled
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard the parameters, prefetch the next unit, and prepare the inputs.

        In a unit of several modules this is called for each; all after the first only prepare the inputs. The unit's
        part of the backward is complete once the first module's inputs have their gradients.
        """
        unit, schedule, record = self._unit, self._schedule, self._record
        is_first, call = not self._entered, _ModuleCall()
        self._calls.append(call)
        with profiled("pre_forward", unit.name):
            if self._outermost and schedule.streams.is_accelerator:
                device = unit.options.device
                args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device, non_blocking=True))
            if is_first:
                self._unshard()
            if unit.cast_inputs is not None and not record.weights.full_precision:
                precision = unit.options.precision
                if precision.cast_forward_inputs or (unit is schedule.root and precision.cast_root_forward_inputs):
                    args, kwargs = unit.cast_inputs(args, kwargs)
            if unit.handles:
                args, kwargs = self._hook_inputs(call, args, kwargs, hooks=is_first and torch.is_grad_enabled())
        call.given = args, kwargs
        return args, kwargs

    def _hook_inputs(
        self, call: _ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any], *, hooks: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keep the inputs; if ``hooks``, put an autograd node on those that require gradients.

        Without such inputs, the forward's part of the backward ends with the backward.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            if not hooks or not args[0].requires_grad:
                return args, kwargs
            aliases = _PostBackwardNode.apply(self._record, args[0])
            call.hooked.append(_HookedInput(args[0], aliases[0], aliases[0]._version))
            return aliases, kwargs
        call.inputs = inputs = CallInputs(args, kwargs)
        given = inputs.trainable() if hooks else []
        if not given:
            return args, kwargs
        aliases = _PostBackwardNode.apply(self._record, *given)
        call.hooked += [_HookedInput(each, alias, alias._version) for each, alias in zip(given, aliases, strict=True)]
        return inputs.replaced(given, aliases)

    def _unshard(self) -> None:
        unit, schedule, record = self._unit, self._schedule, self._record
        unit.log_event("pre_forward")
        if record.iteration is not None and schedule.rank_checks.in_forward:
            schedule.rank_checks.before_forward(unit)
        unit.enter_forward()
        self._entered = True
        schedule.mark_in_use(unit)
        record.weights = unit.gathered
        if record.iteration is not None:
            schedule.prefetch_forward(unit)

    @dynamo_disabled
    def check(self) -> None:
        """Raise a UsageError if the computation has changed parameters, which would be lost."""
        for handle in self._unit.handles:
            handle.check_after_compute()

    @dynamo_disabled
    def fail(self, error: BaseException) -> None:
        """Leave a forward that raised ``error``; raise a UsageError from it if ignored parameters explain it.

        Inside a backward this may be a checkpoint that has recomputed enough; the parameters stay unsharded for that
        backward. Elsewhere the step ends, unless an outer caller catches the exception.
        """
        if self._calls and (inputs := self._calls.pop().inputs) is not None:
            inputs.restore()
        recomputes = graph_task_id() != -1
        for handle in self._unit.handles:
            handle.restore_unsharded_params()
        if self._outermost and not recomputes:
            self._schedule.fail(error)
        else:
            if self._entered:
                self._unit.exit_forward(AfterForward.KEEP_UNSHARDED if recomputes else AfterForward.RESHARD)
            if self._outermost:
                self._schedule.end_iteration()
        if type(error) is RuntimeError and not self._record.weights.full_precision:
            _check_ignored_dtypes(self._unit, error)

    @dynamo_disabled
    def pass_through(self, output: Any) -> Any:
        """Hook the outputs of a module that is not the last of its unit to run; return them."""
        return self._hooked(output)[0]

    @dynamo_disabled
    def leave(self, output: Any) -> Any:
        """Hook the outputs, and reshard the parameters or keep them for backward; return the outputs.

        A backward may reach a forward although none of its outputs was found, if its graph is alive: the outputs are in
        a generator, or stored outside of the model. Not so if it returns inputs alone: a layer that this rank skips
        does, and a graph of an earlier step may be alive.
        """
        call, found = self._calls[-1], output
        output, returns = self._hooked(output)
        hidden = False
        if not returns and torch.is_grad_enabled() and not are_tensors(found, among=call.given):
            hidden = any(handle.grads.are_in_a_graph for handle in self._unit.handles)
        self._close(returns or hidden, open_ended=hidden)
        return output

    def _hooked(self, output: Any) -> tuple[Any, bool]:
        """Cast and hook the outputs; return them, and whether a backward may reach them."""
        call = self._calls.pop()
        for hooked in call.hooked:
            hooked.follow_changes()
        dtype = self._unit.options.precision.output_dtype
        output = output if dtype is None else cast_floats(output, dtype)
        flats = [handle.buffer.tensor for handle in self._unit.handles if handle.buffer.owns_memory]
        copied = functools.partial(_outside, flats)
        if flats and isinstance(output, torch.Tensor):
            output = copied(output)
        elif flats and any(copied(tensor) is not tensor for tensor in tensors_in(output)):
            output = map_tensors(output, copied)
        if call.inputs is None:
            return output, _hook_outputs(self._record, output, [], always=self._outermost)
        if flats:
            call.inputs.replace(copied)
        returns = _hook_outputs(self._record, output, call.inputs.written(), always=self._outermost)
        call.inputs.restore()
        return output, returns

    def leave_open(self) -> None:
        """Leave a forward without outputs to hook, and keep the parameters for any backward that follows."""
        self._close(torch.is_grad_enabled(), open_ended=True)

    def _close(self, is_reached: bool, *, open_ended: bool = False) -> None:
        """End the forward; ``is_reached`` if a backward may reach it, ``open_ended`` if not through hooked outputs."""
        unit, schedule, record = self._unit, self._schedule, self._record
        if self._outermost:
            # Units of several modules of which some did not run.
            groups, schedule.open_groups = schedule.open_groups, {}
            for forward, _ in groups.values():
                forward.leave_open()
        with profiled("post_forward", unit.name):
            unit.log_event("post_forward")
            iteration = record.iteration
            # Outputs may require gradients on some ranks only, so the next action must depend on the unit alone. The
            # outermost forward of a method under no_grad begins with gradients enabled, but its units run without.
            is_outermost = iteration is not None and iteration.order[0].members is unit.members
            in_grad = torch.is_grad_enabled() and not (is_outermost and schedule.ran_units_without_gradients)
            expects_backward = is_reached or (in_grad and unit.is_trainable)
            after = self._after_forward(expects_backward=expects_backward, open_ended=open_ended)
            schedule.end_forward(record, expects_backward=expects_backward and not open_ended)
            unit.exit_forward(after)
            if after is AfterForward.PARK:
                schedule.keep_until_next_unit(unit)
            if self._outermost:
                schedule.end_iteration()

    def _after_forward(self, *, expects_backward: bool, open_ended: bool) -> AfterForward:
        """Choose what becomes of the parameters.

        * They stay if a backward may follow and would find them: inside a backward (a recomputation), if the unit does
          not reshard after forward, or if nothing would unshard it, because its outputs are not hooked.
        * The buffers stay if the backward of this iteration would all-gather them.
        """
        unit, iteration = self._unit, self._record.iteration
        wanted = unit.control.reshard_after_forward
        if wanted is None:
            wanted = not self._schedule.is_outermost(unit)
        # A re-entrant checkpoint runs its units without gradients; the iteration shows that a backward may follow.
        trains = iteration is not None and iteration.trains
        may_follow = expects_backward or (trains and unit.shows_dtensors and unit.is_trainable)
        if may_follow and (open_ended or iteration is None or not wanted or not unit.frees_buffers):
            return AfterForward.KEEP_UNSHARDED
        if trains and unit.needs_all_gather and unit.control.unshard_in_backward and not open_ended:
            return AfterForward.PARK
        return AfterForward.RESHARD


# Names of dtypes in the texts of torch's operators.
_DTYPE_NAMES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16", torch.float64: "double"}


def _check_ignored_dtypes(unit: Unit, error: RuntimeError) -> None:
    """Raise a UsageError if torch names the unit's compute dtype in ``error`` and that of ignored parameters."""
    computes = unit.options.precision.param_dtype
    words = set(re.findall(r"\w+", str(error).lower()))
    if computes is None or _DTYPE_NAMES.get(computes) not in words:
        return
    ignored = [(name, param) for name, param in unit.module.named_parameters() if unit.ignored.has(param)]
    others = [
        f"{clean_fqn(name)!r} ({param.dtype})"
        for name, param in ignored
        if param.dtype != computes and _DTYPE_NAMES.get(param.dtype) in words
    ]
    if others:
        raise UsageError(
            f"{error}\nUnit {unit.name!r} computes in {computes}, and parameters that it ignores keep their dtype: "
            f"{some_of(others, 4)}. Convert the ignored module to {computes} before it is ignored, or cast its inputs "
            "to its dtype and its outputs back (forward hooks do), or run the model under torch.autocast."
        ) from error


def _check_compiles(schedule: Schedule, unit: Unit, wrapped: nn.Module, compiler: Any) -> None:
    """Warn once if torch.compile would skip a unit because it has no original parameters.

    ``compiler`` compiles the code that calls the unit; it is None if nothing does.
    """
    modules = [wrapped] if schedule.looked_for_compiled else list(wrapped.modules())
    schedule.looked_for_compiled = True
    if not schedule.warned_uncompiled and (compiler or any(_is_compiled(module) for module in modules)):
        schedule.warned_uncompiled = True
        warn_user(
            f"torch.compile leaves modules of unit {unit.name!r}, and of every other unit below "
            f"{schedule.root.name!r}, as they are: it compiles modules of units with use_orig_params=True only. "
            "Training goes on without compilation; pass use_orig_params=True to have it."
        )


def _is_compiled(module: nn.Module) -> bool:
    asked = COMPILED_MODULE in module._modules or module._compiled_call_impl is not None
    return asked and getattr(module, "_is_fsdp_managed_module", False)


def _hook_outputs(record: ForwardRecord, output: Any, written: list[torch.Tensor], *, always: bool) -> bool:
    """Register backward hooks on the outputs; return whether a backward may need the unit's parameters.

    Those ``written`` to inputs are outputs too.

    With ``always`` those of a unit without parameters too, so that a backward begins at the outermost unit.
    """
    unit = record.unit
    if not torch.is_grad_enabled() or not (unit.handles or always):
        return False
    if isinstance(output, torch.Tensor):
        outputs = [output] if output.requires_grad else []
    else:
        outputs = differentiable_tensors(output)
    outputs += written
    stored = unit.stored
    stored.num_until_search -= 1
    if unit.handles:
        is_search_due = stored.num_until_search <= 0 or sum(map(len, stored.attributes)) != stored.num_attributes
        if stored.places or is_search_due:
            outputs += stored.tensors()
    if not outputs:
        return False
    hook = functools.partial(_outputs_reached, record)
    if record.iteration is not None and always:
        record.iteration.outputs.append(weakref.ref(hook))
    for tensor in outputs:
        # A leaf that is passed through outlives the graph, and so would its hook.
        if not tensor.is_leaf:
            tensor.register_hook(hook)
            hooks: Any = tensor._backward_hooks
            # First, before hooks of the module itself, which may compute with the parameters.
            for key in list(hooks)[:-1] if len(hooks) > 1 else ():
                hooks[key] = hooks.pop(key)
    return bool(unit.handles)


def _outside(flats: Sequence[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor for the caller, as a copy if it is a view of a buffer, whose memory is freed meanwhile."""
    local = local_of(tensor)
    if local.layout is not torch.strided:
        return tensor  # without a storage
    for flat in flats:
        if is_alias(local, flat):
            return tensor.clone()
    return tensor


def _schedule_now(unit: Unit) -> Schedule:
    # A root may have taken over the unit since the forward.
    assert isinstance(unit.context, Schedule)
    return unit.context


@dynamo_disabled
def _outputs_reached(record: ForwardRecord, _grad: torch.Tensor) -> None:
    _schedule_now(record.unit).outputs_reached(record)


class _PostBackwardNode(torch.autograd.Function):
    """Passes the inputs of a forward through, and runs a callback once the gradients of all of them exist.

    The outputs are new aliases, not views created here: a module may change its input in place (:class:`_HookedInput`).
    """

    @staticmethod
    def forward(ctx: Any, record: ForwardRecord, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.record = record
        ctx.set_materialize_grads(False)
        if record.iteration is not None:
            record.iteration.post_backward_nodes.append(weakref.ref(ctx))
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    @dynamo_disabled
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        record = ctx.record
        _schedule_now(record.unit).inputs_complete(record, ctx)
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

    If the module changes the alias in place (``ReLU(inplace=True)``), the caller's tensor, which shares its memory,
    must get the autograd history of the change too.
    """

    given: torch.Tensor
    alias: torch.Tensor
    version: int

    def follow_changes(self) -> None:
        """Give the caller's tensor the autograd history of the module's in-place changes."""
        if self.alias._version != self.version:
            # Values that autograd saved stay valid: the data does not change here.
            with preserve_version(self.given):
                _TakeHistory.apply(self.given, self.alias)
