"""Converts units (``.to``, ``.float``), and takes them apart again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_flat.core.casts import drop_full_precision
from fsdp_flat.core.options import Phase
from fsdp_flat.core.step import outermost_of, reset_step
from fsdp_flat.core.unit import Unit, unit_of, units_of
from fsdp_flat.errors import UsageError
from fsdp_flat.layout import COMPILED_MODULE, FSDP_WRAPPED_MODULE
from fsdp_flat.runtime.full_params import all_gather_full
from fsdp_flat.runtime.materialize import marking_empty, unwritten_params
from fsdp_flat.runtime.optimizer_steps import note_unwrapped
from fsdp_flat.runtime.unit_record import unit_record

# The name component that torch.compile adds.
_COMPILED_PREFIX = COMPILED_MODULE + "."


def convert_unit(unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor], convert_others: Callable[[], object]) -> bool:
    """Apply ``fn`` to the unit's shards instead of its visible parameters; return whether it did.

    In the middle of a step nothing is converted, and it is an error if ``fn`` would change a shard. ``convert_others``
    converts the tensors that no unit manages; it is called while modules hold no sharded parameters.
    """
    unit.step.recover()
    if unit.phase is not Phase.IDLE:
        if any(param_group.is_changed_by(fn) for param_group in unit.param_groups):
            unit.check_idle("A conversion (.to, .float, .cuda, ...)")
        return False
    unit.reshard()
    unit.adopt_assigned()
    for param_group in unit.param_groups:
        param_group.slots.remove()
    try:
        convert_others()
    finally:
        for param_group in unit.param_groups:
            param_group.slots.show_sharded()
    for param_group in unit.param_groups:
        was_meta = param_group.storage.empty().is_meta
        param_group.convert(marking_empty(fn) if was_meta else fn)
        shard = param_group.storage.empty()
        # Fake tensors, which have no values, stay on the meta device.
        if was_meta and not shard.is_meta and type(shard) is torch.Tensor:
            record = unit_record(unit)
            record.unwritten = [*(record.unwritten or ()), *unwritten_params(unit, param_group)]
        if shard.is_meta and not was_meta and not unit.options.api.stays_on_meta:
            unit.step.at_next_forward.append(partial(_check_has_values, unit))
    _follow_parameters(unit)
    return True


def _check_has_values(unit: Unit) -> None:
    if any(param_group.storage.empty().is_meta for param_group in unit.param_groups):
        unit.step.at_next_forward.append(partial(_check_has_values, unit))
        raise UsageError(
            f"The forward of unit {unit.step.root.name!r} was called on rank {unit.options.groups.shard.rank}, and "
            f"parameters of unit {unit.name!r} are on the meta device, without values, since model.to('meta'). "
            "Build and wrap the model anew, or call model.to_empty(device=...) and load a state dict before the "
            "forward."
        )


def _follow_parameters(unit: Unit) -> None:
    """Have a unit without a ``device_id`` compute where its parameters are now, or those of the units inside it."""
    nested = units_of(unit.module)
    found = [h.spec.device for h in unit.param_groups] or [each.options.device for each in nested if each is not unit]
    if unit.options.device_given or not found or found[0].type == "meta" or found[0] == unit.options.device:
        return
    unit.use_device(found[0])
    reset_step(unit.step.units)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain module inside a wrapped model, with full parameters on every rank and nothing of fsdp_flat left.

    Units are all-gathered one after another, so the peak is the plain model and one unit. With ``use_orig_params=True``
    the Parameter objects stay the same. Gradients are dropped, and an optimizer that was built for the wrapped model
    has state in the shapes of shards: build a new one. The next step of an old one that cannot work raises a
    UsageError; the old wrappers raise when they are used.

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
        root = outermost_of(unit)
        if root is not None and root not in units:
            raise UsageError(
                f"unwrap was called on {unit.name!r}, which is nested in {root.name!r}. Pass the outermost wrapper, or "
                "the module that holds it."
            )
    for unit in units:
        for param_group in unit.param_groups:
            param_group.flat_shard()  # raises before anything is changed
    for unit in units:
        unit.reshard()
        unit.adopt_assigned()
        wholes = all_gather_full(unit, lambda param_group: param_group.flat_shard())
        for param_group, whole in zip(unit.param_groups, wholes, strict=True):
            held = {param: param.shape for param in param_group.slots.visible_params}
            param_group.slots.unflatten(whole)
            left = {site.module._parameters.get(site.name) for entry in param_group.params for site in entry.sites}
            gone = f"parameters of unit {unit.name!r}, {param_group.params[0].fqn!r} the first"
            note_unwrapped({param: ("" if param in left else gone, shape) for param, shape in held.items()})
        unit.buffers.cast(full=True)
    modules = list(model.modules())
    wrappers = {child for child in modules if (own := unit_of(child)) is not None and own.options.api.has_wrapper}

    def inner(module: nn.Module) -> nn.Module:
        while module in wrappers:
            module = module.get_submodule(FSDP_WRAPPED_MODULE)
        return module

    for child in modules:
        for name, grandchild in child._modules.items():
            if grandchild is not None:
                child._modules[name] = inner(grandchild)
        _restore_module(child)
    return inner(model)


def _restore_module(module: nn.Module) -> None:
    """Undo what wrapping, or ``fully_shard``, has changed of a module besides its parameters."""
    unit = unit_of(module)
    if unit is not None:
        del module.__dict__["_unit"]
        undo = unit_record(unit).undo
        while undo:
            undo.pop().remove()
    for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_fsdp_has_managed_params"):
        module.__dict__.pop(mark, None)
    drop_full_precision(module)
    ours = (_remove_compiled_prefix, _add_compiled_prefix)
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in ours]:
            del hooks[key]


def hide_compiled_name(module: nn.Module) -> None:
    """Make a module returned by ``torch.compile`` save and load under original names; ignore other modules."""
    if COMPILED_MODULE in module._modules and _remove_compiled_prefix not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_remove_compiled_prefix)
        module.register_load_state_dict_pre_hook(_add_compiled_prefix)


def _remove_compiled_prefix(_module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix + _COMPILED_PREFIX)]:
        state_dict[prefix + key[len(prefix + _COMPILED_PREFIX) :]] = state_dict.pop(key)


def _add_compiled_prefix(_module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(prefix + _COMPILED_PREFIX)]:
        state_dict[prefix + _COMPILED_PREFIX + key[len(prefix) :]] = state_dict.pop(key)
