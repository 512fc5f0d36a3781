"""The wrapper's state dicts: which form is set, and the hooks through which torch saves and loads."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_flat.api import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from fsdp_flat.errors import PhaseError
from fsdp_flat.layout import FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_fqn
from fsdp_flat.runtime import units_of
from fsdp_flat.semi_private import SemiPrivateNames
from fsdp_flat.state_dict import FORMS, LoadReport, settings_for

__all__ = ["StateDictMethods", "clean_key_report"]


class StateDictMethods(SemiPrivateNames):
    """The wrapper's methods for model state dicts; the wrapper class inherits them."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the form of state dicts for every wrapper at and below ``module``; returns the previous settings.

        Raises:
            UsageError: a config that does not belong to the type.
            UnsupportedError: a type that this version does not have.
        """
        settings = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
        for config in (settings.state_dict_config, settings.optim_state_dict_config):
            if hasattr(config, "_use_dtensor"):
                units = units_of(module)
                config._use_dtensor = bool(units) and units[0].options.groups.mesh is not None
        previous = StateDictMethods.get_state_dict_type(module)
        for wrapper in _wrappers(module):
            wrapper._settings = settings
        return previous

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings in force below ``module``; None if nothing there is wrapped.

        Raises:
            PhaseError: wrappers below ``module`` have different settings.
        """
        found = [wrapper._settings for wrapper in _wrappers(module)]
        if any(settings != found[0] for settings in found):
            raise PhaseError("Wrappers below this module have different state-dict settings; set them on the root.")
        return found[0] if found else None  # type: ignore[return-value]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Generator[None, None, None]:
        """:meth:`set_state_dict_type` inside the block; the previous settings come back also after an exception."""
        previous = StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in _wrappers(module):
                wrapper._settings = previous

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state dict in the form that is set, under the names of the unwrapped model.

        Every rank must call this.
        """
        if args:
            warnings.warn("Positional arguments to state_dict are deprecated by torch; use keywords.", stacklevel=2)
            kwargs = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
        prefix = kwargs.get("prefix", "")
        keep_vars = kwargs.get("keep_vars", False)
        wrapped = self._modules[FSDP_WRAPPED_MODULE]
        assert wrapped is not None
        for hook in self._state_dict_pre_hooks.values():
            hook(self, prefix, keep_vars)
        form = FORMS[self._settings.state_dict_type]
        destination = form.save(
            self._unit, self._settings.state_dict_config, prefix, lambda: wrapped.state_dict(**kwargs)
        )
        for hook in self._state_dict_hooks.values():
            result = hook(self, destination, prefix, {})
            destination = destination if result is None else result
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As :meth:`nn.Module.load_state_dict`, with the names of the unwrapped model.

        Modules are told the version that they were saved with, whether by a wrapped model or a plain one.
        """
        versions = getattr(state_dict, "_metadata", None)
        if versions is not None:
            here = {name: clean_fqn(name) for name, _ in self.named_modules()}
            state_dict = OrderedDict(state_dict)
            known = {name: versions[clean] for name, clean in here.items() if clean in versions}
            state_dict._metadata = {**versions, **known}  # type: ignore[attr-defined]
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._load_errors = error_msgs
        report = LoadReport(strict, missing_keys, error_msgs)
        FORMS[self._settings.state_dict_type].load(self._unit, state_dict, prefix, report)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _wrappers(module: nn.Module) -> list[StateDictMethods]:
    return [child for child in module.modules() if isinstance(child, StateDictMethods)]


def clean_key_report(module: nn.Module, keys: Any) -> None:
    """A load hook: keys that are missing, unexpected or do not fit are reported without wrapper words."""
    keys.missing_keys[:] = map(clean_fqn, keys.missing_keys)
    keys.unexpected_keys[:] = map(clean_fqn, keys.unexpected_keys)
    # By now the wrapped modules have added theirs to the list that the wrapper was given.
    errors = module.__dict__.pop("_load_errors", [])
    errors[:] = [text.replace(FSDP_PREFIX, "") for text in errors]
