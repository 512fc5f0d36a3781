"""Converts wrapped models (``.to``, ``.float``), copies them (``copy.deepcopy``), and unwraps them.

A copy has the same layout on copied modules, with a separate shard. Nothing is communicated. During the copy the
modules hold None in place of the unit's parameters, so neither unsharded nor sharded values are copied with them; the
copy's parameters are built from the copied shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import UsageError
from fsdp_flat.flat import PLAIN, FlatParamHandle, ShardedPlaceholder, Site, clear_padding, copy_flat_parameter
from fsdp_flat.layout import COMPILED_MODULE, FSDP_WRAPPED_MODULE
from fsdp_flat.runtime.materialize import marking_empty, unwritten_params
from fsdp_flat.runtime.options import Ignored
from fsdp_flat.runtime.other_forwards import register_forward_method
from fsdp_flat.runtime.schedule import Schedule
from fsdp_flat.runtime.summon import all_gather_full
from fsdp_flat.runtime.tensors import drop_full_precision
from fsdp_flat.runtime.unit import Phase, Unit, own_unit, unit_of, units_of

# The name component that torch.compile adds.
_WORD = COMPILED_MODULE + "."
_COPYING = "fsdp_flat is copying an outer unit"
_COPIED = "units that fsdp_flat has copied"


def convert_unit(unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor], convert_others: Callable[[], object]) -> bool:
    """Apply ``fn`` to the unit's shards instead of its visible parameters.

    Args:
        unit: the unit.
        fn: the conversion, as :meth:`nn.Module._apply` takes it.
        convert_others: converts the tensors that no unit manages; called while modules hold no sharded parameters.

    Returns:
        Whether shards were converted. In the middle of a step nothing is, if ``fn`` would change nothing.

    Raises:
        PhaseError: in the middle of a step, and ``fn`` would change a shard.
    """
    unit.context.recover()
    if unit.phase is not Phase.IDLE:
        if any(handle.is_changed_by(fn) for handle in unit.handles):
            unit.check_idle("A conversion (.to, .float, .cuda, ...)")
        return False
    unit.reshard()
    unit.adopt_changes()
    for handle in unit.handles:
        handle.views.remove()
    try:
        convert_others()
    finally:
        for handle in unit.handles:
            handle.views.use_sharded_views()
    for handle in unit.handles:
        was_meta = handle.flat_param.is_meta
        handle.convert(marking_empty(fn) if was_meta else fn)
        # Fake tensors, which have no values, stay on the meta device.
        if was_meta and not handle.flat_param.is_meta and type(handle.flat_param.data) is torch.Tensor:
            clear_padding(handle.flat_param.data, handle.layout, handle.spec.rank)
            unit.unwritten = [*(unit.unwritten or ()), *unwritten_params(handle)]
    return True


def copy_wrapper(wrapper: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Copy a wrapper, its unit and the module inside; nested wrappers copy themselves in the process.

    Process groups, meshes and constructor arguments are shared with the original. Gradients are not copied, as
    ``copy.deepcopy`` of ordinary parameters does not copy them either; so a copy synchronizes gradients, and its next
    backward is a last one. It has the other switches of the original, and the same collectives. Modules to prefetch
    become their copies; those that are not copied are left out.

    Args:
        wrapper: the wrapper.
        memo: the memo of ``copy.deepcopy``. Parameters already in it (those of a copied optimizer) are reused.

    Raises:
        PhaseError: inside forward, backward or ``summon_full_params``.
        UsageError: the module holds parameters of an outer unit, which is not being copied.
    """
    unit = own_unit(wrapper)
    twin = type(wrapper).__new__(type(wrapper))
    memo[id(wrapper)] = twin
    copied = _copy_unit(unit, memo)
    remade = {"_unit", "_handle_names", "_load", *unit.forward_methods}
    for name, value in wrapper.__dict__.items():
        if name not in remade:
            twin.__dict__[name] = copy.deepcopy(value, memo)
    twin.__dict__["_unit"] = copied
    for method in unit.forward_methods:
        register_forward_method(twin, method)
    return twin


def _copy_unit(unit: Unit, memo: dict[Any, Any]) -> Unit:
    unit.check_idle("copy.deepcopy")
    groups = unit.options.groups
    for shared in (groups.shard.group, groups.replicate.group, groups.mesh):
        if shared is not None:
            memo[id(shared)] = shared
    outermost = _COPYING not in memo
    if outermost:
        _check_complete(unit)
        memo[_COPYING] = True
    try:
        unit.adopt_changes()
        for handle in unit.handles:
            _copy_params(handle, memo)
        with ExitStack() as stack:
            for handle in unit.handles:
                stack.enter_context(handle.views.detached())
            module = copy.deepcopy(unit.module, memo)
    finally:
        if outermost:
            del memo[_COPYING]
    handles = [_copy_handle(handle, memo) for handle in unit.handles]
    ignored = Ignored(
        frozenset(memo.get(id(child), child) for child in unit.ignored.modules),
        frozenset(memo.get(id(param), param) for param in unit.ignored.params),
    )
    buffers, stored = copy.deepcopy(unit.buffers, memo), copy.deepcopy(unit.stored, memo)
    twin = Unit(module, unit.name, unit.options, handles, ignored, buffers, stored, unit.unit_id)
    twin.optim_state_handlers.update(unit.optim_state_handlers)
    twin.policy = copy.copy(unit.policy)
    twin.control = replace(unit.control, sync_gradients=True, is_last_backward=True)
    twin.use_collectives(unit.collective_choice)
    twin.averages_ignored = unit.averages_ignored
    twin.state_dict_settings = copy.deepcopy(unit.state_dict_settings)
    twin.is_nested = unit.is_nested and not outermost
    for handle in handles:
        handle.views.use_sharded_views()
    memo.setdefault(_COPIED, []).append((unit, twin))
    if outermost:
        _map_prefetched(memo)
    return twin


def _map_prefetched(memo: dict[Any, Any]) -> None:
    """Replace modules to prefetch by their copies, in all units copied so far: one may name modules copied after it."""
    for unit, twin in memo[_COPIED]:
        for lists in ("forward_prefetch", "backward_prefetch"):
            modules = getattr(unit.control, lists)
            setattr(twin.control, lists, tuple(memo[id(module)] for module in modules if id(module) in memo))


def _copy_params(handle: FlatParamHandle, memo: dict[Any, Any]) -> None:
    # Copy parameters before modules, so that other references to these parameters refer to their copies.
    memo[id(handle.flat_param)] = copy_flat_parameter(handle.flat_param, memo.get(id(handle.flat_param)))
    for entry in handle.views.params:
        if id(entry.param) not in memo:
            kind = type(entry.param) if entry.adapter is PLAIN else nn.Parameter
            twin = kind(entry.param.data, requires_grad=entry.param.requires_grad)
            memo[id(entry.param)] = twin
        marks = entry.param.__dict__
        if "_fsdp_flattened" in marks:
            memo[id(entry.param)]._fsdp_flattened = marks["_fsdp_flattened"]


def _copy_handle(handle: FlatParamHandle, memo: dict[Any, Any]) -> FlatParamHandle:
    params = [
        replace(
            entry,
            param=memo[id(entry.param)],
            sites=tuple(Site(copy.deepcopy(site.module, memo), site.name, site.fqn) for site in entry.sites),
        )
        for entry in handle.views.params
    ]
    return handle.copy_to(params, copy.deepcopy(handle.spec.module, memo), memo[id(handle.flat_param)])


def _check_complete(unit: Unit) -> None:
    """Raise if a module below the unit holds a parameter of an outer unit, whose values would not be copied."""
    managed = {
        (id(site.module), site.name)
        for inner in (unit, *units_of(unit.module))
        for handle in inner.handles
        for entry in handle.views.params
        for site in entry.sites
    }
    for module in unit.module.modules():
        held = [each for each in module._parameters.items() if getattr(each[1], "_fsdp_flattened", False)]
        held += [each for each in module.__dict__.items() if isinstance(each[1], ShardedPlaceholder)]
        for name, tensor in held:
            if (id(module), name) not in managed and getattr(tensor, "_is_flat_param", False) is False:
                raise UsageError(
                    f"{name!r} of a {type(module).__name__} in unit {unit.name!r} is shared with a unit further out, "
                    "which holds it, so this unit cannot be copied alone. Copy the outermost wrapper."
                )


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
        unit.check_idle("unwrap")
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
        # Wrapping set the first three attributes; without the fourth a wrapper is no longer a wrapper.
        marks = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_fsdp_has_managed_params")
        for mark in (*marks, *(("_unit",) if child in wrapped else ())):
            child.__dict__.pop(mark, None)
    return _inner(model, wrapped)


def _is_wrapper(module: nn.Module) -> bool:
    unit = unit_of(module)
    return unit is not None and not unit.shows_dtensors


def _restore_class(module: nn.Module) -> None:
    """Undo what ``fully_shard`` has changed of a module besides its parameters."""
    unit = unit_of(module)
    if unit is not None and unit.shows_dtensors:
        for each in unit.with_inner:
            assert each.options.rows is not None
            for hook in each.options.rows.hooks:
                hook.remove()
        for name in ("_unit", *unit.forward_methods):
            module.__dict__.pop(name, None)
        # The class of a sharded module is derived from two: that of fully_shard, and its own.
        module.__class__ = type(module).__bases__[1]


def _restore_full(unit: Unit) -> None:
    unit.reshard()
    unit.adopt_changes()
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


def hide_compiled_name(module: nn.Module) -> None:
    """Make a module returned by ``torch.compile`` save and load under original names; ignore other modules."""
    if COMPILED_MODULE in module._modules:
        module.register_state_dict_post_hook(_without_word)
        module.register_load_state_dict_pre_hook(_with_word)


def show_compiled_name(module: nn.Module) -> None:
    """Undo :func:`hide_compiled_name`."""
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in (_without_word, _with_word)]:
            del hooks[key]


def _without_word(_module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix + _WORD)]:
        state_dict[prefix + key[len(prefix + _WORD) :]] = state_dict.pop(key)


def _with_word(_module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(prefix + _WORD)]:
        state_dict[prefix + _WORD + key[len(prefix) :]] = state_dict.pop(key)
