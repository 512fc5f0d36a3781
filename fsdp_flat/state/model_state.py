"""Saves and loads the model state dict of one unit, with the codec of its state-dict type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import is_tensor_like

from fsdp_flat.api import StateDictConfig, StateDictSettings
from fsdp_flat.comm import ErrorTexts, barrier, find_disagreement
from fsdp_flat.errors import LoadError, UnsupportedError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import FLAT_PARAM, FSDP_PREFIX, Interval, clean_fqn, flat_param_name, is_flat_param_name
from fsdp_flat.runtime import Unit, check_idle, full_params
from fsdp_flat.state._torch import shape_of
from fsdp_flat.state.boxed import BoxedTensor
from fsdp_flat.state.codecs import BOXES, FULL, codec_of, decoder_of
from fsdp_flat.state.full import FullCodec
from fsdp_flat.state.param_index import IndexedParam, params_of, rank_groups_of
from fsdp_flat.state.shards import LoadPlan, StateDictCodec, StateShard
from fsdp_flat.user_warnings import warn_user

LOADING = ErrorTexts(
    "loading a state dict",
    "Ranks were given state dicts with different entries, so nothing was loaded.",
    "Load the same checkpoint on every rank.",
)


def gather_units(units: Sequence[Unit], codec: StateDictCodec, config: StateDictConfig) -> dict[Unit, Sequence[Any]]:
    """Exchange the values of several units at once; return an empty dict if device memory might not hold them.

    Every rank of the shard groups must call this.
    """
    if config.offload_to_cpu and any(unit.context.streams.is_accelerator for unit in units):
        return {}
    if isinstance(codec, FullCodec):
        # Inside summon_full_params the modules have full parameters already.
        units = [unit for unit in units if unit.whole is None]
    values = iter(_gathered((shard for unit in units for shard in _shards_of(unit, codec, "")), codec, config))
    return {unit: [next(values) for handle in unit.handles for _ in handle.layout.param_infos] for unit in units}


def _gathered(shards: Iterable[StateShard], codec: StateDictCodec, config: StateDictConfig) -> Sequence[Any]:
    with torch.no_grad():
        return codec.gather(shards, config) if isinstance(codec, FullCodec) else codec.encode(list(shards), config)


def _shards_of(unit: Unit, codec: StateDictCodec, prefix: str) -> list[StateShard]:
    """Return this rank's part of every parameter of a unit, or of its flat parameters; views of the current shard."""
    if not isinstance(codec, FullCodec):
        check_idle(unit, "state_dict")
    if unit.is_sharded:
        # While the unit is unsharded the modules hold unsharded parameters, so the user cannot assign sharded ones.
        for handle in unit.handles:
            handle.adopt_changes()
    if codec.is_flat:
        return [_flat_shard(unit, handle, prefix) for handle in unit.handles]
    return [_shard_of(param) for param in params_of(unit, prefix)]


def _shard_of(param: IndexedParam) -> StateShard:
    return StateShard(param, param.local, param.fqn, param.shape)


def _flat_shard(unit: Unit, handle: FlatParamHandle, prefix: str) -> StateShard:
    """Return this rank's part of a flat parameter."""
    layout, name = handle.layout, prefix + flat_param_name(unit.handles.index(handle))
    own = layout.shard(handle.spec.rank).intersect(Interval(0, layout.unpadded_numel))
    local = handle.flat_param.detach()[: own.numel]
    return StateShard(IndexedParam(unit, handle, 0, (name,)), local, name, (layout.unpadded_numel,))


def save_unit(
    unit: Unit,
    settings: StateDictSettings,
    prefix: str,
    inner: Callable[[], dict[str, Any]],
    *,
    gathered: Sequence[Any] | None,
) -> dict[str, Any]:
    """Add the entries of one unit's subtree to a state dict.

    Every rank of the shard group must call this, if the codec communicates.

    Args:
        unit: the unit.
        settings: the state-dict type and its options.
        prefix: prefix of the names.
        inner: runs the wrapped module's own ``state_dict`` into the destination and returns it. Nested units
            save themselves in it.
        gathered: the result of :func:`gather_units` for the unit, or None.
    """
    config = settings.state_dict_config
    codec = codec_of(settings.state_dict_type, config)
    if isinstance(codec, FullCodec):
        return _save_full(unit, codec, config, prefix, inner, gathered)
    check_idle(unit, "state_dict")
    if codec.is_flat and unit.options.groups.mesh is not None:
        raise UnsupportedError("LOCAL_STATE_DICT does not go with a device_mesh; use SHARDED_STATE_DICT.")
    if unit.handles and unit.options.groups.shard.size == 1 and (codec.communicates or codec.is_flat):
        warn_user(
            f"Unit {unit.name!r} is not sharded, so its entries of the {settings.state_dict_type.name} are full "
            "tensors.",
            stacklevel=4,
        )
        if codec.is_flat:
            return _save_full(unit, FULL, config, prefix, inner, None)
    with _names_shown(() if codec.is_flat else unit.handles):
        destination = inner()
    shards = _shards_of(unit, codec, prefix)
    if codec.is_flat:
        for name in [name for param in params_of(unit, prefix) for name in param.fqns]:
            destination.pop(name, None)
        destination.update(dict.fromkeys(shard.label for shard in shards))
    values = _gathered(shards, codec, config) if gathered is None else gathered
    for shard, value in zip(shards, values, strict=True):
        for name in shard.param.fqns:
            if value is None:
                destination.pop(name, None)
            elif name in destination:
                destination[name] = value
    unit.buffers.restore(destination, prefix)
    return destination


@contextmanager
def _names_shown(handles: Sequence[FlatParamHandle]) -> Iterator[None]:
    """Register a placeholder under every original name, so that the dict gets its keys in their order."""
    try:
        for handle in handles:
            handle.views.show_names()
        yield
    finally:
        for handle in handles:
            handle.views.unregister_full_params()


def _save_full(
    unit: Unit,
    codec: FullCodec,
    config: StateDictConfig,
    prefix: str,
    inner: Callable[[], dict[str, Any]],
    gathered: Sequence[Any] | None,
) -> dict[str, Any]:
    """Save full tensors, which the wrapped modules and their hooks see as their parameters."""
    keep = not config.rank0_only or unit.options.groups.primary.rank == 0
    with _full_params_registered(unit, codec, gathered, config, keep=keep) as is_fresh:
        destination = inner()
        for param in params_of(unit, prefix):
            present = [name for name in param.fqns if name in destination]
            if not keep:
                for name in present:
                    del destination[name]
            elif present:
                stored = codec.stored(destination[present[0]].detach(), param.adapter, config)
                # Inside summon_full_params a value is a view of the summoned parameter, unless a hook replaced it.
                if not is_fresh and _shares_memory(stored, param.handle.views.shown(param.index)):
                    stored = stored.clone()
                destination.update(dict.fromkeys(present, stored))
        if keep:
            unit.buffers.restore(destination, prefix)
        else:
            for path, _ in unit.module.named_buffers(remove_duplicate=False):
                destination.pop(prefix + clean_fqn(path), None)
    return destination


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@contextmanager
def _full_params_registered(
    unit: Unit, codec: FullCodec, gathered: Sequence[Any] | None, config: StateDictConfig, *, keep: bool
) -> Iterator[bool]:
    """Register full parameters in the modules if ``keep``; yield whether they are freshly allocated."""
    if unit.whole is not None:
        with full_params(unit):
            yield False
        return
    was_unsharded = not unit.is_sharded
    tensors = iter(_gathered(_shards_of(unit, codec, ""), codec, config) if gathered is None else gathered)
    try:
        for handle in unit.handles:
            if keep:
                handle.views.use_full_tensors([next(tensors) for _ in handle.layout.param_infos])
            else:
                handle.views.show_names()
        yield True
    finally:
        for handle in unit.handles:
            handle.views.unregister_full_params()
        if was_unsharded:
            unit.use_unsharded_views()


@dataclass(slots=True)
class LoadReport:
    """Collects the errors of one load and the writes to run if there are none.

    Attributes:
        missing: missing names; ``nn.Module.load_state_dict`` builds its error from this list.
        errors: one line per value that does not fit; used likewise.
        plan: the writes to run if everything fits.
        units: units whose ranks may have to exchange values.
        has_chunks: some value for ``units`` takes an exchange.
        has_own: some value for ``units`` can be loaded without another rank.
    """

    missing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    plan: LoadPlan = field(default_factory=LoadPlan)
    units: list[Unit] = field(default_factory=list)
    has_chunks: bool = False
    has_own: bool = False

    @property
    def exchanging_units(self) -> list[Unit]:
        """Units whose ranks exchange chunks; none if all values are full tensors, which need no communication."""
        if self.has_chunks:
            return self.units
        # This rank was given no value; other ranks may have been given chunks, and then all of them communicate.
        is_sharded = any(unit.options.groups.shard.size > 1 for unit in self.units)
        return self.units if is_sharded and not self.has_own else []

    def commit(self, *, refused: bool) -> None:
        """Run all writes, or none on any error. Where chunks are exchanged, an error on one rank stops every rank.

        Args:
            refused: the caller has found an error, which it reports itself.
        """
        error: Exception | None = LoadError("; ".join(self.errors[:3])) if self.errors else None
        if refused and error is None:
            error = LoadError("keys are missing or unexpected")
        if units := self.exchanging_units:
            rank_groups = rank_groups_of(units)
            for rank_group in rank_groups:
                barrier("load_state_dict", rank_group)
            found = find_disagreement(self.plan.lines, error, rank_groups, units[0].options.device, LOADING)
            if found is not error:
                self.errors.append(str(found))
                error = found
        if error is None:
            self.plan.commit()


def load_unit(unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport) -> None:
    """Remove one unit's entries from ``state_dict``, and add their loads to ``report``.

    If any value takes an exchange, every rank of the shard group must call this, with the same names.

    Args:
        unit: the unit. Except for FULL and LOCAL, its state-dict type allows values of any type's kind.
        state_dict: the state dict to load; its other names become those of the wrapped module.
        prefix: prefix of the unit's names in it.
        report: receives loads, missing names and errors.
    """
    check_idle(unit, "load_state_dict")
    settings = unit.state_dict_settings
    # Boxes are loaded as such, whichever type is set.
    has_boxes = any(isinstance(value, BoxedTensor) for value in state_dict.values())
    codec = BOXES if has_boxes else codec_of(settings.state_dict_type, settings.state_dict_config)
    if codec.is_flat:
        _load_flats(unit, codec, state_dict, prefix, report)
    else:
        if unit.handles and not isinstance(codec, FullCodec):
            report.units.append(unit)
        for target, value in _prepare_load(unit, state_dict, prefix, report):
            if value is None:
                continue
            decoder = codec if isinstance(codec, FullCodec) else decoder_of(value)
            report.has_chunks = report.has_chunks or decoder.exchanges
            report.has_own = report.has_own or not decoder.exchanges
            _decode(decoder, value, target, report)
    _finish_load(unit, state_dict, prefix + FSDP_PREFIX)


def _decode(codec: StateDictCodec, value: Any, target: StateShard, report: LoadReport) -> None:
    shape, expected, is_full = shape_of(value), target.full_shape, isinstance(codec, FullCodec)
    is_one_element = is_full and math.prod(shape) == 1 and math.prod(expected) == 1
    if shape != expected and not is_one_element and (not is_full or is_tensor_like(value)):
        report.errors.append(
            f"size mismatch for {target.label}: copying a param with shape {torch.Size(shape)} from checkpoint, "
            f"the shape in current model is {torch.Size(expected)}."
        )
        return
    try:
        codec.decode(value, target, report.plan)
    except LoadError as error:
        report.errors.append(str(error))


def _load_flats(unit: Unit, codec: StateDictCodec, state_dict: dict[str, Any], prefix: str, report: LoadReport) -> None:
    """Load flat parameters; an unsharded unit takes full parameters too."""
    flats = []
    for handle in unit.handles:
        target = _flat_shard(unit, handle, prefix)
        inner = prefix + FSDP_PREFIX + target.label.removeprefix(prefix)
        flats.append((target, state_dict.pop(target.label, state_dict.pop(inner, None))))
    # Parameter names are not expected here, so that they are missing is no error.
    values = _prepare_load(unit, state_dict, prefix, LoadReport(plan=report.plan), loads_flats=True)
    for target, flat in flats:
        named = [(each, value) for each, value in values if each.param.handle is target.param.handle]
        if flat is not None:
            try:
                codec.decode(flat, target, report.plan)
            except LoadError as error:
                report.errors.append(str(error))
        elif unit.options.groups.shard.size == 1 and all(value is not None for _, value in named):
            for each, value in named:
                _decode(FULL, value, each, report)
        elif any(value is not None for _, value in named):
            report.errors.append(
                f"{target.label}: this load is of a LOCAL_STATE_DICT, and the state dict has entries by parameter "
                f"names for unit {unit.name!r}: it is a FULL_STATE_DICT or a SHARDED_STATE_DICT. Load it inside "
                "FSDP.state_dict_type(model, ...) with the type that it was saved with."
            )
        else:
            report.missing.append(target.label)


def _prepare_load(
    unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport, *, loads_flats: bool = False
) -> list[tuple[StateShard, Any]]:
    """Remove this unit's entries from ``state_dict`` and rename the rest for the wrapped module.

    Args:
        unit: the unit.
        state_dict: the state dict to load; changed in place.
        prefix: prefix of the unit's names in it.
        report: receives missing names and errors.
        loads_flats: the caller loads flat parameters; otherwise they are an error.

    Returns:
        Each parameter with the value found under any of its names, or None.
    """
    unit.reshard()
    for handle in unit.handles:
        # Adopt assignments made before the load now, so that they do not overwrite the loaded values later.
        handle.adopt_changes()
        report.plan.call(handle.views.bump_version)
    unit.use_sharded_views()
    inner = prefix + FSDP_PREFIX
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(inner):
            name = key[len(prefix) :]
            # Names here are without wrapper prefixes; FSDP1 leaves torch.compile's "_orig_mod." in its state dicts.
            state_dict[inner + (clean_fqn(name) if "_orig_mod." in name else name)] = state_dict.pop(key)
    flats = [key for key in state_dict if key.startswith(inner) and is_flat_param_name(key[len(inner) :])]
    params = params_of(unit, prefix)
    if flats and params and not loads_flats:
        for key in flats:
            del state_dict[key]
        report.errors.append(
            f"{prefix + flats[0].removeprefix(inner)}: an entry of a LOCAL_STATE_DICT, which is loaded as it was "
            "saved: inside FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT), with the wrapping and number "
            f"of ranks that wrote it. This load of unit {unit.name!r} expects entries by parameter names, "
            f"{params[0].fqn!r} the first."
        )
    for remember in unit.buffers.remember(state_dict, inner):
        report.plan.call(remember)
    # For a missing name torch.distributed.checkpoint inserts the model's own parameter: nothing to load.
    own = {id(param) for handle in unit.handles for param in handle.views.visible_params()}
    found = []
    for param in params:
        given = [(fqn, state_dict.pop(inner + fqn.removeprefix(prefix), None)) for fqn in param.fqns]
        if not flats:
            report.missing.extend(fqn for fqn, value in given if value is None)
        value = next((value for _, value in given if value is not None and id(value) not in own), None)
        found.append((_shard_of(param), value))
    return found


def _finish_load(unit: Unit, state_dict: dict[str, Any], inner: str) -> None:
    """Insert each visible parameter itself into ``state_dict``, so that the modules' own load finds every name."""
    for handle in unit.handles:
        for entry in handle.views.params:
            for site in entry.sites:
                param = site.module._parameters.get(site.name)
                if param is not None:
                    state_dict[inner + site.fqn] = param
        flat = handle.spec.module._parameters.get(FLAT_PARAM)
        if flat is not None:
            state_dict[inner + FLAT_PARAM] = flat
