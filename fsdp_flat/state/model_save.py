"""Saves models in the state-dict type that is set on their units, through torch's own recursion and hooks."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy as copy_of
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.api import (
    OptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp_flat.comm import ErrorTexts, UntilRanksMeet, meet, reported_failure, true_on_any_rank
from fsdp_flat.core import ParamGroup, Unit, modules_of, own_unit, units_of
from fsdp_flat.core.quantized import quant_state_of
from fsdp_flat.errors import PhaseError, UnsupportedError, UsageError
from fsdp_flat.guards import ReplicatedTensors
from fsdp_flat.layout import Interval, clean_fqn, flat_param_name
from fsdp_flat.runtime import FullParams, full_params, unit_record
from fsdp_flat.state.apart import SplitParams
from fsdp_flat.state.codecs import FULL, BoxedTensor, FullCodec, codec_of, settings_for
from fsdp_flat.state.plain_states import is_wrapper, values_of
from fsdp_flat.state.shards import IndexedParam, ParamIndex, StateDictCodec, StateShard, params_of, rank_groups_of
from fsdp_flat.state.state_placeholders import StatePlaceholder
from fsdp_flat.state.state_settings import own_settings
from fsdp_flat.user_warnings import entered, warn_user


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
        The settings before, of the outermost wrapper if those below it have others.

    Raises:
        UsageError: a config does not belong to the type.
        UnsupportedError: this version does not have the type.
    """
    settings = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
    units = units_of(module)
    for config in (settings.state_dict_config, settings.optim_state_dict_config):
        if hasattr(config, "_use_dtensor"):
            config._use_dtensor = bool(units) and units[0].options.groups.mesh is not None
    previous = [own_settings(unit).state_dict for unit in units]
    for unit in units:
        own_settings(unit).state_dict = settings
    return previous[0] if previous else None  # type: ignore[return-value]


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the settings in force below ``module``.

    Args:
        module: a wrapper, or any module that holds wrappers.

    Returns:
        The settings; None if nothing there is wrapped.

    Raises:
        PhaseError: wrappers below ``module`` have different settings.
    """
    found = [own_settings(unit).state_dict for unit in units_of(module)]
    if any(settings is not found[0] and settings != found[0] for settings in found):
        raise PhaseError("Wrappers below this module have different state-dict settings; set them on the root.")
    return found[0] if found else None  # type: ignore[return-value]


@entered
@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Generator[None, None, None]:
    """Set the state-dict type inside the block; restore the previous settings, also after an exception.

    Arguments and errors are those of ``set_state_dict_type``.
    """
    previous = {unit: own_settings(unit).state_dict for unit in units_of(module)}
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for unit, settings in previous.items():
            own_settings(unit).state_dict = settings


# By unit, settings that replace its own while a model's state dict is made or loaded.
_forced: ContextVar[Mapping[Unit, StateDictSettings]] = ContextVar("fsdp_flat_forced", default=MappingProxyType({}))


def settings_of(unit: Unit) -> StateDictSettings:
    """Return the settings in force for a unit."""
    return _forced.get().get(unit, own_settings(unit).state_dict)


@contextmanager
def state_dict_settings(model: nn.Module, settings: StateDictSettings) -> Iterator[None]:
    """Save and load a model's state dict with ``settings`` inside the block, whichever are set on its wrappers.

    Nothing is set on the model or passed to its methods, which its modules may override.
    """
    token = _forced.set({**_forced.get(), **dict.fromkeys(units_of(model), settings)})
    try:
        yield
    finally:
        _forced.reset(token)


def is_own_save() -> bool:
    """Return whether a state dict is taken for a function of this library, or inside of a wrapper's."""
    return bool(_forced.get() or _saves.get())


# Settings of a state dict that is made for its names, shapes and dtypes: hooks that compute do so with zeros.
TEMPLATE = settings_for(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(boxes=True), None)


SAVING_STATE = ErrorTexts(
    "saving a state dict",
    "Ranks save different state dicts.",
    "Set the same state-dict type and options on every rank.",
)
_LIVE = settings_for(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(boxes=True), None)
_COPIED = settings_for(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(True, boxes=True), None)


def boxed_state_dict(model: nn.Module, apart: SplitParams | None = None, *, copy: bool = False) -> dict[str, Any]:
    """Return a model's state dict with the shards of this rank as boxes, or copies of all tensors on the CPU.

    Parameters that are made of several tensors are taken ``apart``, if the caller can join them.
    """
    with state_dict_settings(model, _COPIED if copy else _LIVE):
        found: dict[str, Any] = dict(model.state_dict())
    if any(map(is_wrapper, found.values())):
        found = found if apart is None else apart.take(found, copy=copy)
        found = {name: values_of(value) for name, value in found.items()}
    for name, value in found.items() if copy else ():
        # Boxes are copies already; buffers are the live ones.
        if isinstance(value, torch.Tensor) and not isinstance(value, BoxedTensor):
            found[name] = value.detach().to("cpu", copy=True)
    return found


@dataclass(slots=True)
class _Save:
    """Holds what the units of one save have in common.

    Attributes:
        gathered: the tensors gathered for it, by unit.
        sends_to_all: full tensors go to every rank, since one that is not the first keeps them (``rank0_only`` is an
            option of each rank).
    """

    gathered: dict[Unit, Any] = field(default_factory=dict)
    sends_to_all: bool = False


# For each unit of the saves in progress, the save that it belongs to.
_saves: ContextVar[Mapping[Unit, _Save]] = ContextVar("fsdp_flat_saves", default=MappingProxyType({}))


def save_model(wrapper: nn.Module, wrapped: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a wrapper's state dict in the type that is set, and run the wrapper's hooks.

    The outermost wrapper all-gathers for all units at once; those below it find their tensors there. Every rank must
    call this if the type all-gathers. ``args`` and ``kwargs`` are those of ``nn.Module.state_dict``.
    """
    if args:
        warn_user("Positional arguments to state_dict are deprecated by torch; use keywords.")
        kwargs = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
    unit = own_unit(wrapper)
    prefix = kwargs.get("prefix", "")
    saves, until_met = _saves.get(), UntilRanksMeet()
    outermost = unit not in saves
    with until_met:
        for pre_hook in wrapper._state_dict_pre_hooks.values():
            pre_hook(wrapper, prefix, kwargs.get("keep_vars", False))
    settings = settings_of(unit)
    config = settings.state_dict_config
    codec = codec_of(settings.state_dict_type, config)
    is_full = isinstance(codec, FullCodec)
    # Units of fully_shard save themselves, as torch's modules do.
    every_unit = units_of(wrapper) if outermost else []
    units = [each for each in every_unit if each.options.api.has_wrapper]
    # Units without parameters need no all-gather, nor do full tensors inside summon_full_params.
    sent = [each for each in units if each.param_groups and not (is_full and unit_record(each).full is not None)]
    rank_groups = list(dict.fromkeys(each.options.groups.shard for each in sent if codec.communicates))
    # Full tensors are gathered over the groups of tensor parallelism too.
    groups = list(dict.fromkeys([*rank_groups, *(rank_groups_of(sent, of_replicas=False) if is_full else ())]))
    own_save = _Save() if outermost else saves[unit]
    unmanaged: ReplicatedTensors | None = None
    token = _saves.set({**saves, **dict.fromkeys(units, own_save)})
    try:
        # A nested wrapper with different settings all-gathers by itself.
        alike = [each for each in sent if settings_of(each) == settings]
        is_hooked, shards, said = False, list[StateShard](), ""
        if rank_groups:
            with until_met:
                # Hooks of inner modules, perhaps of one rank alone, may change parameters, so they must run before the
                # all-gather.
                is_hooked = any(module._state_dict_pre_hooks for module in modules_of(wrapper) if module is not wrapper)
                unmanaged = ReplicatedTensors(wrapper)
                said = json.dumps([is_hooked, config.rank0_only, unmanaged.fingerprints])
                shards = [] if is_hooked else list(_shards_of(alike, codec, ""))
            lines = [str(settings_of(each).state_dict_type) for each in sent]
            met = meet("state_dict", groups, until_met.error, SAVING_STATE, lines=lines, said=said)
            assert unmanaged is not None
            # Ranks of several groups may have found different answers.
            are_equal = met[: len(rank_groups)] == [True]
            unmanaged.compare(rank_groups, are_equal=are_equal)
            if not are_equal:
                flags = [is_hooked, not config.rank0_only]
                is_hooked, own_save.sends_to_all = true_on_any_rank(flags, rank_groups)
        elif until_met.error is not None:
            raise until_met.error
        sent_config = config
        if config.rank0_only and own_save.sends_to_all:
            sent_config = copy_of(config)
            sent_config.rank0_only = False
        # A hook may raise on one rank alone, or its memory not suffice, while others wait in an all-gather.
        with reported_failure(rank_groups):
            # Device memory might not hold the values of several units at once.
            is_large = config.offload_to_cpu and any(each.step.streams.is_accelerator for each in alike)
            if rank_groups and not is_hooked and not is_large:
                values = iter(codec.gather(shards, sent_config))
                for each in alike:
                    num = sum(len(param_group.params) for param_group in each.param_groups)
                    own_save.gathered[each] = list(islice(values, num))
            del shards
            inner, gathered = partial(wrapped.state_dict, **kwargs), own_save.gathered.pop(unit, None)
            save = _UnitSave(unit, codec, config, sent_config, prefix, inner, gathered)
            state = save.full_tensors() if is_full else save.parts()
    finally:
        _saves.reset(token)
    if outermost:
        record_versions(wrapper, state, prefix)
        # Those that hooks have renamed; values of rank0_only that other ranks do not keep are among them.
        _replace_placeholders(state, list(state), keeps_all=settings is TEMPLATE)
        if len(units) < len(every_unit):
            _encode_dtensors(wrapper, state, prefix=prefix, codec=codec, config=config)
    for hook in wrapper._state_dict_hooks.values():
        result = hook(wrapper, state, prefix, {})
        state = state if result is None else result
    if unmanaged is not None:
        unmanaged.warn()
    return state


def _encode_dtensors(
    wrapper: nn.Module, state: dict[str, Any], *, prefix: str, codec: StateDictCodec, config: StateDictConfig
) -> None:
    """Encode the DTensors of nested units of ``fully_shard``. Every rank must call this."""
    for name, param in ParamIndex(wrapper).dtensors_by_name.items():
        if prefix + name in state:
            state[prefix + name] = codec.of_dtensor(state[prefix + name], config)
            if config.rank0_only and param.unit.options.groups.primary.rank:
                del state[prefix + name]


def record_versions(wrapper: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Record the modules' versions under the names of wrapped modules too, which a load by a plain parent reads."""
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        for name, _ in wrapper.named_modules():
            saved = versions.get((prefix + clean_fqn(name)).rstrip("."))
            if saved is not None:
                versions.setdefault((prefix + name).rstrip("."), saved)


def _shards_of(units: Sequence[Unit], codec: StateDictCodec, prefix: str) -> Iterator[StateShard]:
    """Yield this rank's part of every parameter of units, or of their flat parameters; views of the current shards.

    While a unit's full parameters are shown these are copies of what the modules have, changes included.
    """
    for unit in units:
        full = unit_record(unit).full
        if full is None:
            if isinstance(codec, FullCodec):
                unit.step.recover()
            else:
                unit.check_idle("state_dict")
            unit.adopt_assigned()
            if codec.is_flat:
                for param_group in unit.param_groups:
                    yield flat_shard(unit, param_group, prefix)
                continue
        for param in params_of(unit, prefix):
            local = param.local if full is None else _part_inside_summon(param, full)
            yield StateShard(param, local, param.shape)


def _part_inside_summon(param: IndexedParam, full: FullParams) -> torch.Tensor:
    """Return this rank's elements of a parameter inside ``summon_full_params``, in memory of their own."""
    local, param_group = param.local, param.param_group
    if full.are_shown:
        rank = param.rank_group.rank
        local = param_group.layout.local_part(param.index, rank, param_group.slots.full_local(param.index).detach()).to(
            local.device
        )
    return local.clone()


def flat_shard(unit: Unit, param_group: ParamGroup, prefix: str) -> StateShard:
    """Return this rank's part of a flat parameter."""
    layout, name = param_group.layout, prefix + flat_param_name(unit.param_groups.index(param_group))
    own = layout.shard(param_group.spec.rank).intersect(Interval(0, layout.unpadded_numel))
    local = param_group.flat_param.detach()[: own.numel]
    return StateShard(IndexedParam(unit, param_group, 0, (name,)), local, (layout.unpadded_numel,))


@dataclass(frozen=True, slots=True)
class _UnitSave:
    """Saves one unit. Every rank of the shard group must do so, in the same way.

    Attributes:
        sent: the options by which full tensors are sent.
        inner: runs the wrapped module's own ``state_dict``, in which nested units save themselves.
        gathered: the unit's values, if :func:`save_model` has them.
    """

    unit: Unit
    codec: StateDictCodec
    config: StateDictConfig
    sent: StateDictConfig
    prefix: str
    inner: Callable[[], dict[str, Any]]
    gathered: Sequence[Any] | None

    def parts(self) -> dict[str, Any]:
        """Save this rank's parts, in whose place wrapped modules and their hooks see placeholders."""
        unit, codec, config, settings = self.unit, self.codec, self.config, settings_of(self.unit)
        if codec.is_flat or unit_record(unit).full is None:
            unit.check_idle("state_dict")
        if codec.is_flat and unit.options.groups.mesh is not None:
            raise UnsupportedError("LOCAL_STATE_DICT does not go with a device_mesh; use SHARDED_STATE_DICT.")
        if unit.param_groups and unit.options.groups.shard.size == 1 and (codec.communicates or codec.is_flat):
            warn_user(
                f"Unit {unit.name!r} is not sharded, so its entries of the {settings.state_dict_type.name} are full "
                "tensors."
            )
            if codec.is_flat:
                return replace(self, codec=FULL, gathered=None).full_tensors()
        if unit_record(unit).full is not None:
            return self._summoned()
        shards = list(_shards_of([unit], codec, self.prefix))
        # A tensor under every original name gives the dict its keys in their order, and hooks the full parameters.
        params = params_of(unit, self.prefix)
        refuses = settings is not TEMPLATE
        placeholders = [placeholder_of(each, partial(_refusal, each, settings) if refuses else None) for each in params]
        with _names_shown(unit, placeholders) if not codec.is_flat or unit.options.use_orig_params else nullcontext():
            destination = self.inner()
        values = self._values(shards)
        if codec.is_flat:
            destination.update({shard.label: value for shard, value in zip(shards, values, strict=True)})
            # Under the original names the live slices, as in FSDP1.
            values = [param.local.to("cpu", copy=True) if config.offload_to_cpu else param.local for param in params]
        for each, value in zip(placeholders, values, strict=True):
            if each.value is not None and each.refusal is not None:
                raise each.refusal()  # a hook has copied something into it
            each.value = value
        names = [name for param in params for name in param.fqns]
        _replace_placeholders(destination, names, keeps_all=settings is TEMPLATE)
        unit.buffers.restore(destination, self.prefix)
        return destination

    def _values(self, shards: Iterable[StateShard]) -> Sequence[Any]:
        return self.codec.gather(shards, self.sent) if self.gathered is None else self.gathered

    def _summoned(self) -> dict[str, Any]:
        """Save the values of a unit inside ``summon_full_params``, where its modules and hooks see full parameters.

        Other tensors that hooks compute are saved as full tensors.
        """
        params = params_of(self.unit, self.prefix)
        with full_params(self.unit):
            destination = self.inner()
            values = self._values(_shards_of([self.unit], self.codec, self.prefix))
            for param, value, present in zip(params, values, _names_in(destination, params), strict=True):
                shown = param.param_group.slots.full_local(param.index)
                for name in present:
                    found = destination[name]
                    local = found.to_local() if isinstance(found, DTensor) else found
                    if isinstance(local, torch.Tensor) and _shares_memory(local, shown):
                        destination[name] = value
        self.unit.buffers.restore(destination, self.prefix)
        return destination

    def full_tensors(self) -> dict[str, Any]:
        """Save full tensors, which modules and their hooks see as their parameters."""
        unit, codec, config = self.unit, self.codec, self.config
        assert isinstance(codec, FullCodec)
        keep = not config.rank0_only or unit.options.groups.primary.rank == 0
        is_summoned = unit_record(unit).full is not None
        gathered = () if is_summoned else self._values(_shards_of([unit], codec, ""))
        params = params_of(unit, self.prefix)
        with ExitStack() as shown:
            if is_summoned:
                shown.enter_context(full_params(unit))
            elif keep:
                shown.enter_context(_registered(unit, gathered))
            else:
                # Hooks here find every name too.
                shown.enter_context(_names_shown(unit, [placeholder_of(param, None) for param in params]))
            destination = self.inner()
            for param, present in zip(params, _names_in(destination, params), strict=True):
                if not keep:
                    for name in present:
                        del destination[name]
                elif present:
                    stored = codec.stored(destination[present[0]].detach(), param.adapter, config)
                    # A value may be a view of the summoned parameter, unless a hook replaced it.
                    if is_summoned and _shares_memory(stored, param.param_group.slots.full_local(param.index)):
                        stored = stored.clone()
                    destination.update(dict.fromkeys(present, stored))
            if keep:
                unit.buffers.restore(destination, self.prefix)
            else:
                for path, _ in unit.module.named_buffers(remove_duplicate=False):
                    destination.pop(self.prefix + clean_fqn(path), None)
        return destination


def _replace_placeholders(destination: dict[str, Any], names: Iterable[str], *, keeps_all: bool = False) -> None:
    """Put the values of the placeholders under some names in their place; delete those without, or ``keeps_all``."""
    for name in names:
        found = destination.get(name)
        if isinstance(found, StatePlaceholder):
            if found.value is not None:
                destination[name] = found.value
            elif not keeps_all:
                del destination[name]


def placeholder_of(param: IndexedParam, refusal: Callable[[], Exception] | None) -> StatePlaceholder:
    """Return a tensor to show in the place of a parameter."""
    device, dtype = param.unit.options.device, param.param_group.orig_dtype
    made = StatePlaceholder.of(param.full_shape, dtype, device, refusal=refusal, trains=param.trains)
    constants = quant_state_of(param.param_group.params[param.index].param)
    if constants is not None:
        made.quant_state = constants  # type: ignore[attr-defined]  # modules save it beside the parameter
    return made


def _refusal(param: IndexedParam, settings: StateDictSettings) -> UsageError:
    return UsageError(
        f"A state-dict hook or method of a module computes with {param}, of which each rank has a part in a "
        f"{settings.state_dict_type.name}, as in save_checkpoint and save_full. It may rename, copy and delete the "
        "value. In model.state_dict() of FULL_STATE_DICT hooks find full parameters."
    )


@contextmanager
def _names_shown(unit: Unit, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    try:
        unit.show_names(tensors)
        yield
    finally:
        unit.hide_names()


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _names_in(destination: dict[str, Any], params: Sequence[IndexedParam]) -> list[list[str]]:
    """Return for each parameter the names of its entries, also those under which a hook has put the tensor itself."""
    found: list[list[str]] = []
    lacking: list[tuple[IndexedParam, list[str]]] = []
    for param in params:
        names = [name for name in param.fqns if name in destination]
        found.append(names)
        if len(names) < len(param.fqns):
            lacking.append((param, names))
    places: dict[Any, list[str]] = {}
    for name, value in destination.items() if lacking else ():
        places.setdefault(_place(value), []).append(name)
    for param, names in lacking:
        site = param.param_group.params[param.index].sites[0]
        place = _place(site.module._parameters.get(site.name))
        names += [name for name in places.get(place, ()) if place and name not in names]
    return found


def _place(value: Any) -> tuple[int, torch.Size] | None:
    """Return a value that is equal for tensors of one shape in the same memory; None without any memory."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return (local.data_ptr(), value.shape) if type(local) in (torch.Tensor, nn.Parameter) and local.numel() else None


@contextmanager
def _registered(unit: Unit, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Register full parameters made from ``tensors``."""
    remaining = iter(tensors)
    try:
        for param_group in unit.param_groups:
            param_group.slots.show_full_params(list(islice(remaining, len(param_group.params))))
        yield
    finally:
        for param_group in unit.param_groups:
            param_group.slots.hide_full_params()
            if unit.is_unsharded:
                param_group.slots.show_unsharded()
