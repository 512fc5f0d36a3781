"""Provides the wrapper's model state dicts: the state-dict type, and the hooks through which torch saves and loads."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_flat.api import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from fsdp_flat.comm import barrier
from fsdp_flat.errors import OptionTypeError, PhaseError
from fsdp_flat.flat import modules_of
from fsdp_flat.layout import FSDP_WRAPPED_MODULE, clean_fqn
from fsdp_flat.loading import ModelLoad, all_or_nothing, report_of
from fsdp_flat.runtime import Unit, units_of
from fsdp_flat.semi_private import SemiPrivateNames
from fsdp_flat.state import BoxedTensor, TypedStateDict, codec_of, gather_units, load_unit, save_unit, settings_for

__all__ = ["StateDictMethods"]


class StateDictMethods(SemiPrivateNames):
    """Provides the wrapper's methods for model state dicts; the wrapper class inherits them."""

    # The load in which the wrapper takes part.
    _load: ModelLoad | None = None

    @staticmethod
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
        wrappers = _wrappers(module)
        for config in (settings.state_dict_config, settings.optim_state_dict_config):
            if hasattr(config, "_use_dtensor"):
                config._use_dtensor = bool(wrappers) and wrappers[0]._unit.options.groups.mesh is not None
        previous = _common_settings(wrappers)
        for wrapper in wrappers:
            wrapper._settings = settings
        return previous

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the settings in force below ``module``.

        Args:
            module: a wrapper, or any module that holds wrappers.

        Returns:
            The settings; None if nothing there is wrapped.

        Raises:
            PhaseError: wrappers below ``module`` have different settings.
        """
        return _common_settings(_wrappers(module))

    @staticmethod
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
        previous = StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in _wrappers(module):
                wrapper._settings = previous

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state dict in the type that is set, under the names of the unwrapped model.

        Every rank must call this, except if nothing is all-gathered: with the LOCAL type, NO_SHARD, or inside
        ``summon_full_params``.

        Args:
            args: ``destination``, ``prefix`` and ``keep_vars`` by position, which torch deprecates.
            kwargs: the same by keyword, as in :meth:`nn.Module.state_dict`.

        Returns:
            Names and tensors; with ``rank0_only`` of the FULL type, other ranks get unmanaged tensors only.

        Raises:
            PhaseError: (an AssertionError) called inside a step or with parameters summoned for another type.
            UsageError: (a RuntimeError) other ranks of the group did not call it.
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
        given = kwargs.get("destination")
        settings = given.settings if isinstance(given, TypedStateDict) else self._settings
        config = settings.state_dict_config
        codec = codec_of(settings.state_dict_type, config)
        with self._saving() as (gathered, outermost):
            if outermost and codec.communicates:
                # Units without parameters and units inside summon_full_params need no all-gather.
                gathering = [unit for unit in units_of(self) if unit.handles and unit.whole is None]
                for rank_group in dict.fromkeys(unit.options.groups.shard for unit in gathering):
                    barrier("state_dict", rank_group)
                # Hooks of inner modules may change parameters, so they must run before the all-gather.
                if not any(module._state_dict_pre_hooks for module in modules_of(self) if module is not self):
                    # A nested wrapper with different settings all-gathers by itself.
                    alike = [wrapper._unit for wrapper in _wrappers(self) if wrapper._settings == self._settings]
                    gathered.update(gather_units(alike, codec, config))
            destination = save_unit(
                self._unit,
                codec,
                config,
                prefix,
                lambda: wrapped.state_dict(**kwargs),
                gathered=gathered.pop(self._unit, None),
            )
        if outermost:
            self._record_versions(destination, prefix)
        for hook in self._state_dict_hooks.values():
            result = hook(self, destination, prefix, {})
            destination = destination if result is None else result
        return destination

    @contextmanager
    def _saving(self) -> Generator[tuple[dict[Unit, Any], bool], None, None]:
        """Yield the tensors gathered for the save in progress, and whether this call is its outermost."""
        of_outer: dict[Unit, Any] | None = self.__dict__.get("_gathered_in_save")
        if of_outer is not None:
            yield of_outer, False
            return
        gathered: dict[Unit, Any] = {}
        wrappers = _wrappers(self)
        try:
            for wrapper in wrappers:
                wrapper.__dict__["_gathered_in_save"] = gathered
            yield gathered, True
        finally:
            for wrapper in wrappers:
                del wrapper.__dict__["_gathered_in_save"]

    def _record_versions(self, destination: dict[str, Any], prefix: str) -> None:
        """Record the modules' versions under the names of wrapped modules too, which a load by a plain parent reads."""
        versions = getattr(destination, "_metadata", None)
        if versions is not None:
            for name, _ in self.named_modules():
                saved = versions.get((prefix + clean_fqn(name)).rstrip("."))
                if saved is not None:
                    versions.setdefault((prefix + name).rstrip("."), saved)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as :meth:`nn.Module.load_state_dict`, under the names of the unwrapped model.

        Everything is checked before anything is written: after an error the model is as it was before. Modules get the
        version that they were saved with, whether by a wrapped model or a plain one.

        FULL and LOCAL state dicts need no communication, nor do SHARDED ones whose values are all full tensors: a rank
        may load those by itself, and a value that does not fit is its own error. With chunks every rank must call this.

        Args:
            state_dict: in the type that is set; SHARDED accepts full tensors as well.
            strict: missing or unexpected names are an error.
            assign: as in torch, for tensors that are not sharded.

        Returns:
            The missing and the unexpected names, as torch's.

        Raises:
            RuntimeError: names or shapes that do not fit, on this rank, or with chunks on any rank.
        """
        if not isinstance(state_dict, Mapping):
            raise OptionTypeError(f"state_dict must be a mapping of names to tensors; got {type(state_dict).__name__}.")
        versions = getattr(state_dict, "_metadata", None)
        if versions is not None:
            here = {name: clean_fqn(name) for name, _ in self.named_modules()}
            state_dict = OrderedDict(state_dict)
            known = {name: versions[clean] for name, clean in here.items() if clean in versions}
            state_dict._metadata = {**versions, **known}  # type: ignore[attr-defined]
        with all_or_nothing(self, strict=strict, assign=assign):
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
        report = report_of(self, local_metadata, missing_keys, error_msgs)
        settings = self._settings
        # Boxes are loaded as such, whichever type is set.
        boxed = any(isinstance(value, BoxedTensor) for value in state_dict.values())
        kind = StateDictType.SHARDED_STATE_DICT if boxed else settings.state_dict_type
        load_unit(self._unit, codec_of(kind, settings.state_dict_config), state_dict, prefix, report)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _common_settings(wrappers: list[StateDictMethods]) -> StateDictSettings:
    found = [wrapper._settings for wrapper in wrappers]
    if any(settings is not found[0] and settings != found[0] for settings in found):
        raise PhaseError("Wrappers below this module have different state-dict settings; set them on the root.")
    return found[0] if found else None  # type: ignore[return-value]


def _wrappers(module: nn.Module) -> list[StateDictMethods]:
    return [child for child in modules_of(module) if isinstance(child, StateDictMethods)]
