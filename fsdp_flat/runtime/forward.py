"""The forward of a unit: gather, run, free, and hook the outputs for backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import OptionError
from fsdp_flat.flat import active_compiler, in_backward, untraced, untraced_here
from fsdp_flat.runtime.tensors import differentiable_tensors, map_tensors
from fsdp_flat.runtime.tree import Tree, tree_of
from fsdp_flat.runtime.unit import Unit, unit_of
from fsdp_flat.runtime.use import Use

__all__ = ["register_forward_method", "run_forward", "unshard_for"]


@untraced_here
def run_forward(
    wrapper: nn.Module, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
) -> Any:
    """Run ``call`` (the wrapped module, or a method of it) with the unit's parameters gathered.

    Every rank of the unit's groups must call this in the same order of units.
    """
    forward = _Forward(wrapper, unit, compiler=active_compiler())
    try:
        args, kwargs = forward.enter(args, kwargs)
        output = call(*args, **kwargs)
    except BaseException:
        forward.fail()
        raise
    forward.leave(output)
    return output


@contextmanager
def unshard_for(module: nn.Module) -> Iterator[None]:
    """Have whole parameters of the units at and below ``module`` inside the block, also for autograd.

    What is computed inside may be used in a loss: the gradients reach the parameters, and they stay gathered
    until the end of that backward. For looking at or changing parameters use ``summon_full_params``.

    Every rank must enter this. The block counts as a forward of the units.

    Args:
        module: a wrapper, or any module that holds wrappers.

    Raises:
        PhaseError: inside ``summon_full_params``.
    """
    entered: list[_Forward] = []
    try:
        for child in list(module.modules()):
            unit = unit_of(child)
            if unit is not None:
                forward = _Forward(child, unit)
                entered.append(forward)
                forward.enter((), {})
        yield
    except BaseException:
        for forward in reversed(entered):
            forward.fail()
        raise
    for forward in reversed(entered):
        forward.leave_open()


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a wrapped module run with its parameters gathered, as its forward does.

    Args:
        module: a wrapper. For any other module nothing is done, as with FSDP2's function of this kind.
        method_name: name of a method of the wrapped module, ``"generate"`` for example.

    Raises:
        OptionError: the wrapped module has no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(unit.module, method_name, None)
    if not callable(method):
        raise OptionError(
            f"{type(unit.module).__name__} has no method {method_name!r} to run with gathered parameters."
        )

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        return run_forward(module, unit, args, kwargs, method)

    module.__dict__[method_name] = gathered
    unit.forward_methods.add(method_name)


class _Forward:
    """One forward of a unit, from the gather to the hooks on its outputs."""

    __slots__ = ("_entered", "_outermost", "_recomputing", "_tree", "_unit", "_use")

    @untraced
    def __init__(self, wrapper: nn.Module, unit: Unit, *, compiler: Any = None) -> None:
        self._unit = unit
        self._tree = tree_of(wrapper, unit)
        if not unit.options.use_orig_params:
            self._tree.check_compiles(unit, compiler)
        self._recomputing = in_backward() != -1
        self._outermost = False
        self._entered = False
        self._use = Use(unit, None)

    @untraced
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather, begin the next gather, and prepare the inputs."""
        unit, tree = self._unit, self._tree
        if not self._recomputing:
            self._outermost = tree.begin_forward(unit)
        tree.note("pre_forward", unit)
        if self._outermost and unit.streams.is_accelerator:
            args, kwargs = _to_device((args, kwargs), unit.options.device)
        unit.enter_forward()
        self._entered = True
        if not self._recomputing:
            tree.prefetch_forward(unit)
        use = self._use
        use.record = tree.current_pass
        use.version = unit.gathered_version
        if unit.cast_inputs is not None and not use.full_precision and tree.casts_inputs_of(unit):
            args, kwargs = unit.cast_inputs(args, kwargs)
        if unit.gate_inputs and torch.is_grad_enabled():
            args, kwargs = _gate(use, args, kwargs)
        return args, kwargs

    @untraced
    def fail(self) -> None:
        """The forward raised.

        Inside backward this may be a checkpoint that has recomputed enough; the parameters stay for the backward
        that follows. Elsewhere the step is over, unless a caller further out catches the exception.
        """
        if self._outermost:
            self._tree.abort()
        elif self._entered:
            self._unit.exit_forward(keep=self._recomputing)

    @untraced
    def leave(self, output: Any) -> None:
        """Hook the outputs and free the parameters, or keep them for backward."""
        self._close(_hook_outputs(self._tree, self._use, output))

    def leave_open(self) -> None:
        """There is no output to hook: keep the parameters for whatever backward follows."""
        self._close(torch.is_grad_enabled(), open_ended=True)

    def _close(self, expects_backward: bool, *, open_ended: bool = False) -> None:
        unit, tree = self._unit, self._tree
        tree.note("post_forward", unit)
        reshards = unit.options.strategy.reshard_after_forward and unit is not tree.root
        keep = expects_backward and (open_ended or self._recomputing or not reshards)
        # A re-entrant checkpoint runs its units without gradients, so the pass says whether a backward may come.
        keep_memory = not keep and not open_ended and unit is not tree.root and unit.gathers and tree.pass_trains
        unit.exit_forward(keep=keep, keep_memory=keep_memory)
        if keep_memory:
            tree.note_kept(unit)
        if self._outermost:
            self._tree.end_forward()


def _hook_outputs(tree: Tree, use: Use, output: Any) -> bool:
    """Have backward announce itself; returns whether there may be one."""
    if not torch.is_grad_enabled():
        return False
    unit = use.unit
    outputs = differentiable_tensors(output)
    if unit.handles:
        outputs += unit.stored.tensors()
    if not outputs:
        return False
    if unit.handles:
        tree.record(use)
        hook = functools.partial(_reached, use)
        for tensor in outputs:
            tensor.register_hook(hook)
    return True


@untraced
def _reached(use: Use, _grad: torch.Tensor) -> None:
    """Backward has reached an output of ``use``."""
    unit_tree(use.unit).pre_backward(use)


def unit_tree(unit: Unit) -> Tree:
    """The tree that a unit belongs to now (its root may have taken it over since forward)."""
    assert unit.tree is not None
    return unit.tree


class _InputGate(torch.autograd.Function):
    """Passes tensors through, and says when the gradients of all of them are there.

    The outputs are fresh aliases, not views made in here: a module may change its input in place.
    """

    @staticmethod
    def forward(ctx: Any, use: Use, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.use.unit.inputs_complete(ctx.use)
        return (None, *grads)


def _gate(use: Use, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found[id(tensor)] = tensor
        return tensor

    map_tensors((args, kwargs), note)
    unique = list(found.values())
    if not unique:
        return args, kwargs
    gated = dict(zip(map(id, unique), _InputGate.apply(use, *unique), strict=True))
    use.waits_for_inputs = True
    args, kwargs = map_tensors((args, kwargs), lambda tensor: gated.get(id(tensor), tensor))
    return args, kwargs


def _to_device(value: Any, device: torch.device) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))
