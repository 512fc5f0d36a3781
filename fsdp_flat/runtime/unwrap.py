"""Unwraps a model: restores the plain module with full parameters, without wrappers and hooks."""

from __future__ import annotations

from torch import nn

from fsdp_flat.errors import UsageError
from fsdp_flat.layout import FSDP_WRAPPED_MODULE
from fsdp_flat.runtime.compiled import show_compiled_name
from fsdp_flat.runtime.schedule import Schedule
from fsdp_flat.runtime.summon import all_gather_full, check_idle
from fsdp_flat.runtime.tensors import drop_full_precision
from fsdp_flat.runtime.unit import Unit, unit_of, units_of


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain module inside a wrapped model, with full parameters on every rank and nothing of fsdp_flat left.

    Units are all-gathered one after another, so the peak is the plain model and one unit. With ``use_orig_params=True``
    the Parameter objects stay the same. Gradients are dropped, and an optimizer that was built for the wrapped model
    has state in the shapes of shards: build a new one. The old wrappers raise when they are used.

    Every rank must call this, between steps.

    Args:
        model: a wrapper that is not nested in another one, or any module that holds such wrappers; the latter is
            changed in place. An activation-checkpoint wrapper stays.

    Returns:
        The wrapped module, or ``model`` itself if it is not a wrapper. Modules of ``fully_shard`` get their own class
        back, in place.

    Raises:
        PhaseError: inside forward, backward or ``summon_full_params``.
        UsageError: ``model`` is nested in another wrapper.
    """
    units = units_of(model)
    for unit in units:
        check_idle(unit, "unwrap")
        if isinstance(unit.context, Schedule) and unit.context.root not in units:
            root = unit.context.root.name
            raise UsageError(
                f"unwrap was called on {unit.name!r}, which is nested in {root!r}. Pass the outermost "
                "wrapper, or the module that holds it."
            )
    for unit in units:
        _restore_full(unit)
    modules = list(model.modules())
    wrapped = {child: child._modules[FSDP_WRAPPED_MODULE] for child in modules if _is_wrapper(child)}
    for child in modules:
        for name, grandchild in child._modules.items():
            if grandchild is not None:
                child._modules[name] = _inner(grandchild, wrapped)
        _restore_class(child)
        drop_full_precision(child)
        show_compiled_name(child)
        # Wrapping set the first two attributes; without the third a wrapper is no longer a wrapper.
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params", *(("_unit",) if child in wrapped else ())):
            child.__dict__.pop(mark, None)
    return _inner(model, wrapped)


def _is_wrapper(module: nn.Module) -> bool:
    unit = unit_of(module)
    return unit is not None and not unit.shows_dtensors


def _restore_class(module: nn.Module) -> None:
    """Undo what ``fully_shard`` has changed of a module besides its parameters."""
    unit = unit_of(module)
    if unit is not None and unit.options.rows is not None:
        for hook in unit.options.rows.hooks:
            hook.remove()
        for name in ("_unit", *unit.forward_methods):
            module.__dict__.pop(name, None)
        # The class of a sharded module is derived from two: that of fully_shard, and its own.
        module.__class__ = type(module).__bases__[1]


def _restore_full(unit: Unit) -> None:
    unit.reshard()
    for handle in unit.handles:
        handle.adopt_changes()
    wholes = all_gather_full(unit, lambda handle: handle.flat_param.data)
    for handle, whole in zip(unit.handles, wholes, strict=True):
        handle.views.unflatten(whole)
    unit.buffers.cast(full=True)


def _inner(module: nn.Module, wrapped: dict[nn.Module, nn.Module | None]) -> nn.Module:
    """Return the module inside a wrapper, through nested wrappers; return any other module as it is."""
    while module in wrapped:
        inner = wrapped[module]
        assert inner is not None
        module = inner
    return module
