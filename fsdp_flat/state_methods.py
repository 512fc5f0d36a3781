"""The wrapper's state dicts: which form is set, and the hooks through which torch saves and loads."""

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
from fsdp_flat.loading import all_or_nothing, report_of
from fsdp_flat.runtime import Unit, units_of
from fsdp_flat.semi_private import SemiPrivateNames
from fsdp_flat.state_dict import CODECS, settings_for

__all__ = ["StateDictMethods"]


class StateDictMethods(SemiPrivateNames):
    """The wrapper's methods for model state dicts; the wrapper class inherits them."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the form of state dicts for every wrapper at and below ``module``.

        Args:
            module: a wrapper, or any module that holds wrappers.
            state_dict_type: the form.
            state_dict_config: of the class that belongs to the form; None is its default.
            optim_state_dict_config: likewise for optimizer state dicts.

        Returns:
            The settings before.

        Raises:
            UsageError: a config that does not belong to the type.
            UnsupportedError: a type that this version does not have.
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
        """The settings in force below ``module``.

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
        """:meth:`set_state_dict_type` inside the block; the previous settings come back also after an exception.

        Args:
            module: a wrapper, or any module that holds wrappers.
            state_dict_type: the form.
            state_dict_config: of the class that belongs to the form; None is its default.
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
        """The state dict in the form that is set, under the names of the unwrapped model.

        Every rank must call this, except where nothing has to be gathered: with the LOCAL form, NO_SHARD, or inside
        ``summon_full_params``.

        Args:
            args: ``destination``, ``prefix`` and ``keep_vars`` by position, which torch deprecates.
            kwargs: the same by keyword, as in :meth:`nn.Module.state_dict`.

        Returns:
            Names and tensors; with ``rank0_only`` of the FULL form, on other ranks what is not managed.

        Raises:
            PhaseError: (an AssertionError) called inside a step or with parameters summoned for another form.
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
        form = CODECS[self._settings.state_dict_type]
        config = self._settings.state_dict_config
        with self._saving() as (gathered, outermost):
            if outermost and form.gather is not None and not getattr(config, "boxes", False):
                # Nothing is gathered of units without parameters, nor of those that are summoned.
                gathering = [unit for unit in units_of(self) if unit.handles and unit.whole is None]
                for rank_group in dict.fromkeys(unit.options.groups.shard for unit in gathering):
                    barrier("state_dict", rank_group)
                # What a hook further in does to parameters has to come before they are gathered.
                if not any(module._state_dict_pre_hooks for module in modules_of(self) if module is not self):
                    # A nested wrapper that was given a form of its own gathers for itself.
                    alike = [wrapper._unit for wrapper in _wrappers(self) if wrapper._settings == self._settings]
                    gathered.update(form.gather(alike, config))
            destination = form.save(
                self._unit, config, prefix, lambda: wrapped.state_dict(**kwargs), gathered.pop(self._unit, None)
            )
        if outermost:
            self._record_versions(destination, prefix)
        for hook in self._state_dict_hooks.values():
            result = hook(self, destination, prefix, {})
            destination = destination if result is None else result
        return destination

    @contextmanager
    def _saving(self) -> Generator[tuple[dict[Unit, Any], bool], None, None]:
        """What was gathered for the units of the save that this is a part of, and whether this is its outermost."""
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
        """Note the modules' versions under the names of wrapped modules too, where a load by a plain parent looks."""
        versions = getattr(destination, "_metadata", None)
        if versions is not None:
            for name, _ in self.named_modules():
                saved = versions.get((prefix + clean_fqn(name)).rstrip("."))
                if saved is not None:
                    versions.setdefault((prefix + name).rstrip("."), saved)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As :meth:`nn.Module.load_state_dict`, with the names of the unwrapped model.

        Everything is looked at before anything is written: after an error the model is as it was before. Modules are
        told the version that they were saved with, whether by a wrapped model or a plain one.

        FULL and LOCAL state dicts take no communication, nor do SHARDED ones whose values are all whole tensors: a rank
        may load those by itself, and a value that does not fit is its own error. With chunks every rank must call this.

        Args:
            state_dict: in the form that is set; SHARDED takes whole tensors as well.
            strict: names that are missing or unexpected are an error.
            assign: as in torch, for what is not sharded.

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
        with all_or_nothing(self, assign=assign):
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
        report = report_of(self, missing_keys, error_msgs)
        CODECS[self._settings.state_dict_type].load(self._unit, state_dict, prefix, report)
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
