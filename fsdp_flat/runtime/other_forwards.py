"""Runs a unit in other ways than by calling its wrapper: as several modules, by a method, for a block of code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_flat.core import check_module, dynamo_disabled, dynamo_disabled_here, modules_of
from fsdp_flat.core.containers import differentiable_tensors
from fsdp_flat.core.forward import UnitForward, run_forward
from fsdp_flat.core.step import step_of
from fsdp_flat.core.unit import Unit, own_unit, unit_of, units_of
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.layout import FSDP_WRAPPED_MODULE
from fsdp_flat.runtime.unit_record import unit_record
from fsdp_flat.user_warnings import entered


class UnshardHandle:
    """Waits for the all-gather of a unit that ``unshard(async_op=True)`` has begun."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the all-gather, and point the modules at the unsharded parameters; a second call does nothing."""
        unit, self._unit = self._unit, None
        if unit is not None and not unit.is_sharded:
            unit.unshard()


class ForwardHooks:
    """Runs the forwards of a unit of one module by two hooks of a caller, in the place of the module's own call.

    torch's memory tracker takes FSDP2's two hooks away from a module, and registers others around their functions.

    Args:
        unit: the unit, which uses this object until ``forward_hooks`` is None again.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._opened: list[UnitForward] = []

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """Run ``call``, the module's own ``__call__``, in which the hooks call :meth:`enter` and :meth:`leave`."""
        num_opened = len(self._opened)
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            step = self._unit.step
            if len(self._opened) > num_opened:
                self._opened.pop().fail(error)
            elif step.is_built and step.order.iteration is None and not step.recomputes:
                step.fail(error)  # a hook that torch always calls has ended the forward
            raise

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a forward of the unit, and return its inputs."""
        forward = UnitForward(module, self._unit)
        try:
            inputs = forward.enter(args, kwargs)
        except BaseException as error:
            forward.fail(error)
            raise
        self._opened.append(forward)
        return inputs

    def leave(self, output: Any) -> Any:
        """End the forward that began last, and return its outputs."""
        return self._opened.pop().leave(output) if self._opened else output


@dynamo_disabled_here
def run_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
    """Run ``call``, the module's own ``__call__``, with the parameters of the module's unit unsharded.

    In a unit of several modules, these share one forward inside the forward of an outer unit, which ends it if some of
    them do not run. Otherwise each module's call is a forward of the unit.
    """
    unit = own_unit(module)
    if unit.forward_hooks is not None:
        return unit.forward_hooks.run(args, kwargs, call)
    if len(unit.members) > 1:
        step = step_of(module, unit)
        if not step.recomputes and step.order.iteration is not None:
            return _run_member(module, unit, args, kwargs, call)
    return run_forward(module, unit, args, kwargs, call)


@dynamo_disabled_here
def _run_member(
    module: nn.Module, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
) -> Any:
    """Run one of several modules of a unit, whose forward begins with the first to run and ends with the last."""
    step = step_of(module, unit)
    if unit not in step.order.unfinished_forwards:
        step.order.unfinished_forwards[unit] = UnitForward(module, unit), set(unit.members)
    forward, waiting = step.order.unfinished_forwards[unit]
    try:
        args, kwargs = forward.enter(args, kwargs)
        output = call(*args, **kwargs)
        waiting.discard(module)
        if waiting:
            return forward.leave_one(output)
        del step.order.unfinished_forwards[unit]
        return forward.leave(output)
    except BaseException as error:
        step.order.unfinished_forwards.pop(unit, None)
        forward.fail(error)
        raise


@entered
@contextmanager
def unshard_for(module: nn.Module) -> Iterator[None]:
    """Unshard the parameters of the units at and below ``module`` inside the block, also for autograd.

    Results computed inside may be used in a loss: the gradients reach the parameters, which stay unsharded until the
    end of that backward. To inspect or change parameters use ``summon_full_params``.

    Every rank must enter this. The block counts as a forward of the units.

    Args:
        module: a wrapper, or any module that holds wrappers.

    Raises:
        PhaseError: inside ``summon_full_params``.
    """
    entered: list[UnitForward] = []
    try:
        for child in list(modules_of(module)):
            for unit in units_of(child, recurse=False):
                forward = UnitForward(child, unit)
                entered.append(forward)
                forward.enter((), {})
        yield
        for forward in entered:
            forward.after_compute()
    except BaseException as error:
        for forward in reversed(entered):
            forward.fail(error)
        raise
    for forward in reversed(entered):
        forward.leave_open_ended()


@dynamo_disabled
def participate(module: nn.Module, *inputs: Any) -> None:
    """Join the collectives of units that other ranks run and this rank skips, without computing anything.

    Every rank of a unit's groups must run the unit equally often. If a model branches on its input (experts without
    tokens, a batch without images), the rank that skips a unit calls this instead, at the same point of its
    forward. In backward it adds zeros to the unit's gradient, so that the result is the mean over all ranks::

        for expert, tokens in zip(self.experts, routed):
            if len(tokens):
                outputs.append(expert(tokens))
            else:
                participate(expert, tokens)

    Args:
        module: a wrapper, or any module that holds wrappers; without wrappers nothing happens. Units nested in a unit
            follow in the order of their registration, in which the other ranks must run them.
        inputs: the inputs that the module would have got. Only whether their tensors require gradients matters, and
            only for units without trainable parameters, which other ranks unshard in backward for the gradients of
            their inputs. Without inputs, gradients are assumed to be required.

    Raises:
        PhaseError: inside ``summon_full_params``.
    """
    check_module(module)
    unit = unit_of(module)
    if unit is not None:
        run_module(module, (), {}, functools.partial(_participate_below, module, inputs))
    else:
        _participate_below(module, inputs)


def _participate_below(module: nn.Module, inputs: tuple[Any, ...]) -> torch.Tensor | None:
    """Run the units below ``module``; return a tensor that requires gradients if the outputs of ``module`` would."""
    for child in module.children():
        participate(child, *inputs)
    needs_grad = not inputs or bool(differentiable_tensors(inputs))
    return torch.zeros(()).requires_grad_() * 1 if needs_grad else None


class _Replaced(NamedTuple):
    """Names a method that a module got; ``remove`` gives it back that of its class, when the unit is unwrapped."""

    module: nn.Module
    method_name: str

    def remove(self) -> None:
        self.module.__dict__.pop(self.method_name, None)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a wrapped module run with unsharded parameters, as its forward does.

    Args:
        module: a wrapper. Any other module is ignored, as by FSDP2's ``register_fsdp_forward_method``.
        method_name: name of a method of the wrapped module, ``"generate"`` for example.

    Raises:
        OptionError: the wrapped module has no such method.
        OptionTypeError: an argument of the wrong type.
    """
    check_module(module)
    if not isinstance(method_name, str):
        raise OptionTypeError(f"method_name must be a str; got {method_name!r}.")
    unit = unit_of(module)
    if unit is None:
        return
    # A wrapper's module is looked up at each call: it may be replaced (activation checkpointing, torch.compile).
    inner = functools.partial(_wrapped_in, module)
    if inner() is not module:
        register_forward_method(inner(), method_name)  # of a wrapper inside this one: the method unshards both units
    method = getattr(inner(), method_name, None)
    if not callable(method):
        raise OptionError(
            f"{type(unit.module).__name__} has no method {method_name!r} to run with unsharded parameters."
        )
    own = method if inner() is module else None

    @functools.wraps(method)
    def run_unsharded(*args: Any, **kwargs: Any) -> Any:
        return run_forward(module, unit, args, kwargs, own or getattr(inner(), method_name))

    module.__dict__[method_name] = run_unsharded
    unit_record(unit).undo.append(_Replaced(module, method_name))


def _wrapped_in(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper, or a module that is a unit itself."""
    wrapped = module._modules.get(FSDP_WRAPPED_MODULE)
    return module if wrapped is None else wrapped
