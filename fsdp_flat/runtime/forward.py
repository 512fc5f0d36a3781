"""The forward of a unit: gather, run, free, and hook the outputs for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_flat.flat import in_backward
from fsdp_flat.runtime.tensors import differentiable_tensors, map_tensors
from fsdp_flat.runtime.tree import Tree, tree_of
from fsdp_flat.runtime.unit import Unit, Use

__all__ = ["run_forward"]


def run_forward(wrapper: nn.Module, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the wrapped module with its parameters gathered.

    Every rank of the unit's groups must call this in the same order of units.
    """
    tree = tree_of(wrapper, unit)
    recomputing = in_backward() != -1
    outermost = False if recomputing else tree.begin_forward(unit)
    tree.note("pre_forward", unit)
    entered = False
    try:
        if outermost and unit.streams.is_accelerator:
            args, kwargs = _to_device((args, kwargs), unit.options.device)
        unit.enter_forward()
        entered = True
        if not recomputing:
            tree.prefetch_forward(unit)
        use = Use(unit, tree.current_pass)
        if unit.cast_inputs is not None and not use.full_precision and tree.casts_inputs_of(unit):
            args, kwargs = unit.cast_inputs(args, kwargs)
        if unit.gate_inputs and torch.is_grad_enabled():
            args, kwargs = _gate(use, args, kwargs)
        output = unit.module(*args, **kwargs)
    except BaseException:
        # Inside backward this may be a checkpoint that has recomputed enough; the parameters stay for the
        # backward that follows. Elsewhere the step is over, unless a caller further out catches this.
        if outermost:
            tree.abort()
        elif entered:
            unit.exit_forward(keep=recomputing)
        raise
    keep = _hook_outputs(tree, use, output, recomputing=recomputing)
    tree.note("post_forward", unit)
    unit.exit_forward(keep=keep)
    if outermost:
        tree.end_forward()
    return output


def _hook_outputs(tree: Tree, use: Use, output: Any, *, recomputing: bool) -> bool:
    """Have backward announce itself; returns whether the parameters are to stay gathered until then."""
    if not torch.is_grad_enabled():
        return False
    unit = use.unit
    outputs = differentiable_tensors(output)
    if not outputs:
        return False
    if unit.handles:
        tree.record(use)
        for tensor in outputs:
            tensor.register_hook(lambda _grad: unit_tree(unit).pre_backward(use))
    return recomputing or unit is tree.root or not unit.options.strategy.reshard_after_forward


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
