"""Checks and builds the settings of a state-dict type: its codec and its options."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import fields
from typing import Any

from fsdp_flat.api import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from fsdp_flat.errors import UsageError
from fsdp_flat.state.codecs import CODECS

__all__ = ["DEFAULT_SETTINGS", "TypedStateDict", "settings_for"]


class TypedStateDict(OrderedDict[str, Any]):
    """Collects a state dict of one type, whichever type is set on the wrappers: pass it as ``destination``.

    torch passes ``destination`` to every module below, so nothing is set on the model.

    Attributes:
        settings: the type and its options.
    """

    def __init__(self, settings: StateDictSettings) -> None:
        super().__init__()
        self.settings = settings


def settings_for(
    state_dict_type: object,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Build the settings from the arguments of ``set_state_dict_type``.

    Raises:
        UsageError: a config does not belong to the type, or there is no such type.
    """
    kind = _member(state_dict_type)
    form = CODECS[kind]
    for given, expected in ((state_dict_config, form.model_config), (optim_state_dict_config, form.optim_config)):
        if given is not None and type(given).__name__ != expected.__name__:
            raise UsageError(f"{kind} takes a {expected.__name__}; got a {type(given).__name__}.")
    return StateDictSettings(
        kind, _ours(state_dict_config, form.model_config), _ours(optim_state_dict_config, form.optim_config)
    )


def _ours(given: Any, expected: type[Any]) -> Any:
    """Return ``given``, converted to this library's config class if it is another library's class of that name."""
    if given is None or isinstance(given, expected):
        return expected() if given is None else given
    return expected(
        **{field.name: getattr(given, field.name) for field in fields(expected) if hasattr(given, field.name)}
    )


def _member(value: object) -> StateDictType:
    if isinstance(value, StateDictType):
        return value
    name = str(getattr(value, "name", None))
    if type(value).__name__ == "StateDictType" and name in StateDictType.__members__:
        return StateDictType[name]
    choices = ", ".join(f"StateDictType.{member.name}" for member in StateDictType)
    raise UsageError(f"state_dict_type must be one of {choices}; got {value!r}.")


DEFAULT_SETTINGS = settings_for(StateDictType.FULL_STATE_DICT, None, None)
