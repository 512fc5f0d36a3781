"""Saves and loads models in the state-dict type that is set on their units, through torch's hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from torch import nn

from fsdp_flat.api import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from fsdp_flat.comm import barrier
from fsdp_flat.errors import PhaseError
from fsdp_flat.flat import modules_of
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime import Unit, unit_of, units_of
from fsdp_flat.state.codecs import codec_of, settings_for
from fsdp_flat.state.dtensors import without_dtensors
from fsdp_flat.state.full import FullCodec
from fsdp_flat.state.model_state import gather_units, save_unit
from fsdp_flat.state.param_index import ParamIndex
from fsdp_flat.user_warnings import warn_user


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the state-dict type of every wrapper at and below ``module``.

    Args:
        module: a wrapper, or any module that holds wrappers.
        state_dict_type: the type.
        state_dict_config: a config of the class that belongs to the type; None is its default.
        optim_state_dict_config: likewise for optimizer state dicts.

    Returns:
        The settings before.

    Raises:
        UsageError: a config does not belong to the type.
        UnsupportedError: this version does not have the type.
    """
    settings = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
    units = units_of(module)
    for config in (settings.state_dict_config, settings.optim_state_dict_config):
        if hasattr(config, "_use_dtensor"):
            config._use_dtensor = bool(units) and units[0].options.groups.mesh is not None
    previous = get_state_dict_type(module)
    for unit in units:
        unit.state_dict_settings = settings
    return previous


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the settings in force below ``module``.

    Args:
        module: a wrapper, or any module that holds wrappers.

    Returns:
        The settings; None if nothing there is wrapped.

    Raises:
        PhaseError: wrappers below ``module`` have different settings.
    """
    found = [unit.state_dict_settings for unit in units_of(module)]
    if any(settings is not found[0] and settings != found[0] for settings in found):
        raise PhaseError("Wrappers below this module have different state-dict settings; set them on the root.")
    return found[0] if found else None  # type: ignore[return-value]


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Generator[None, None, None]:
    """Set the state-dict type inside the block; restore the previous settings, also after an exception.

    Args:
        module: a wrapper, or any module that holds wrappers.
        state_dict_type: the type.
        state_dict_config: a config of the class that belongs to the type; None is its default.
        optim_state_dict_config: likewise for optimizer state dicts.
    """
    previous = set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for unit in units_of(module):
            unit.state_dict_settings = previous


# By unit, settings that replace its own while a model's state dict is made.
_forced: ContextVar[Mapping[Unit, StateDictSettings]] = ContextVar("fsdp_flat_forced", default=MappingProxyType({}))


def _settings_of(unit: Unit) -> StateDictSettings:
    """Return the settings by which a unit is saved now."""
    return _forced.get().get(unit, unit.state_dict_settings)


def state_dict_in(model: nn.Module, settings: StateDictSettings) -> dict[str, Any]:
    """Return a model's state dict in the type of ``settings``, whichever is set on its wrappers.

    Nothing is set on the model or passed to ``state_dict``, which its modules may override.

    Args:
        model: a wrapper, or a module that holds wrappers.
        settings: the type and its options.
    """
    token = _forced.set({**_forced.get(), **dict.fromkeys(units_of(model), settings)})
    try:
        return model.state_dict()
    finally:
        _forced.reset(token)


# For each unit of the saves in progress, the tensors gathered for the save that it belongs to.
_saves: ContextVar[Mapping[Unit, dict[Unit, Any]]] = ContextVar("fsdp_flat_saves", default=MappingProxyType({}))


def save_model(wrapper: nn.Module, wrapped: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a wrapper's state dict in the type that is set, and run the wrapper's hooks.

    The outermost wrapper all-gathers for all units at once; those below it find their tensors there.

    Every rank must call this if the type all-gathers.

    Args:
        wrapper: the wrapper.
        wrapped: the module inside of it.
        args: ``destination``, ``prefix`` and ``keep_vars`` by position, which torch deprecates.
        kwargs: the same by keyword.
    """
    if args:
        warn_user("Positional arguments to state_dict are deprecated by torch; use keywords.", stacklevel=3)
        kwargs = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
    unit = unit_of(wrapper)
    assert unit is not None
    prefix = kwargs.get("prefix", "")
    for pre_hook in wrapper._state_dict_pre_hooks.values():
        pre_hook(wrapper, prefix, kwargs.get("keep_vars", False))
    saves, settings = _saves.get(), _settings_of(unit)
    config = settings.state_dict_config
    codec = codec_of(settings.state_dict_type, config)
    outermost = unit not in saves
    # Units of fully_shard save themselves, as torch's modules do.
    units = [each for each in units_of(wrapper) if not each.shows_dtensors] if outermost else []
    gathered: dict[Unit, Any] = {} if outermost else saves[unit]
    token = _saves.set({**saves, **dict.fromkeys(units, gathered)})
    try:
        if outermost and codec.communicates:
            # Units without parameters and units inside summon_full_params need no all-gather.
            gathering = [each for each in units if each.handles and each.whole is None]
            for rank_group in dict.fromkeys(each.options.groups.shard for each in gathering):
                barrier("state_dict", rank_group)
            # Hooks of inner modules may change parameters, so they must run before the all-gather.
            if not any(module._state_dict_pre_hooks for module in modules_of(wrapper) if module is not wrapper):
                # A nested wrapper with different settings all-gathers by itself.
                alike = [each for each in units if _settings_of(each) == settings]
                gathered.update(gather_units(alike, codec, config))
        inner, own = (lambda: wrapped.state_dict(**kwargs)), gathered.pop(unit, None)
        state = save_unit(unit, settings, prefix, inner, gathered=own)
    finally:
        _saves.reset(token)
    if outermost:
        _record_versions(wrapper, state, prefix)
        if isinstance(codec, FullCodec):
            _complete_dtensors(wrapper, state, prefix, config)
    for hook in wrapper._state_dict_hooks.values():
        result = hook(wrapper, state, prefix, {})
        state = state if result is None else result
    return state


def _complete_dtensors(wrapper: nn.Module, state: dict[str, Any], prefix: str, config: StateDictConfig) -> None:
    """Replace the DTensors of nested units of ``fully_shard`` by full tensors. Every rank must call this."""
    if not any(unit.shows_dtensors for unit in units_of(wrapper)):
        return
    for name, param in ParamIndex(wrapper).dtensors_by_name.items():
        if prefix + name in state:
            full = without_dtensors(state[prefix + name], to_cpu=config.offload_to_cpu)
            if getattr(config, "rank0_only", False) and param.unit.options.groups.primary.rank:
                del state[prefix + name]
            else:
                state[prefix + name] = full


def _record_versions(wrapper: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Record the modules' versions under the names of wrapped modules too, which a load by a plain parent reads."""
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        for name, _ in wrapper.named_modules():
            saved = versions.get((prefix + clean_fqn(name)).rstrip("."))
            if saved is not None:
                versions.setdefault((prefix + name).rstrip("."), saved)


def with_wrapper_versions(wrapper: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``state`` with the versions of its modules also under the names that they have inside wrappers."""
    versions = getattr(state, "_metadata", None)
    if versions is None:
        return state
    names = {name: clean_fqn(name) for name, _ in wrapper.named_modules()}
    copied = OrderedDict(state)
    added = {name: versions[clean] for name, clean in names.items() if clean in versions}
    copied._metadata = {**versions, **added}  # type: ignore[attr-defined]
    return copied
