"""Loads models through torch's own recursion: everything below a wrapper is checked, then written, or nothing is.

If ``load_state_dict`` is called on a wrapper, nothing is written for missing or unexpected names either. If it is
called on a plain module around wrappers, each outermost wrapper checks its own values, and torch goes on to the next
module; it raises in the end for names and for other modules, and what fitted until then stays written, as in torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_flat.comm import ErrorTexts, barrier, find_disagreement, meet
from fsdp_flat.core import Site, Unit, copy_of, local_of, modules_of, own_unit, plain_tensors_in, unit_of, units_of
from fsdp_flat.core.quantized import constants_of
from fsdp_flat.errors import LoadError, counted
from fsdp_flat.layout import EMPTY, FLAT_PARAM, FSDP_PREFIX, advice_on, clean_fqn, clean_text, is_flat_param_name
from fsdp_flat.state.codecs import BOXES, FULL, BoxedTensor, FullCodec, codec_of, decoder_of
from fsdp_flat.state.model_save import flat_shard, placeholder_of, record_versions, settings_of
from fsdp_flat.state.shards import (
    IndexedParam,
    ParamIndex,
    PendingWrites,
    StateDictCodec,
    StateShard,
    dtype_of,
    params_of,
    rank_groups_of,
    shape_of,
)
from fsdp_flat.state.state_placeholders import StatePlaceholder
from fsdp_flat.user_warnings import warn_user

LOADING_STATE = ErrorTexts(
    "loading a state dict",
    "Ranks were given state dicts with different entries, so nothing was loaded.",
    "Load the same checkpoint on every rank.",
)


class ModelLoad:
    """Loads a wrapper and those nested in it, each of which refers to this object meanwhile.

    It keeps copies of the tensors that torch may overwrite besides flat shards: buffers, and parameters that no wrapper
    manages.

    ``missing`` and ``errors`` are the lists from which torch builds its error, once it has begun. The ``writes`` are
    made if everything fits. Ranks of ``units`` may have to exchange values; ``has_chunks`` if some take an exchange,
    and ``has_own`` if some can be loaded without another rank. They have met for that once it ``has_met``.
    """

    def __init__(self, wrapper: nn.Module, *, strict: bool, assign: bool) -> None:
        self.wrapper = wrapper
        self.missing: list[str] = []
        self.errors: list[str] = []
        self._is_begun = self._has_flats = False
        self._sharded: list[str] = []
        self.writes = PendingWrites()
        self.units: list[Unit] = []
        self._from_full: list[Unit] = []
        self.has_chunks = self.has_own = self.has_met = False
        # The codec is None where the kind of the value decides.
        self._placeholders: list[tuple[StateShard, StatePlaceholder, StateDictCodec | None]] = []
        self._strict = strict
        self._is_put_off = False
        managed: set[nn.Parameter] = set()
        self._held: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor | None]] = []
        for unit in units_of(wrapper):
            has_wrapper = unit.options.api.has_wrapper
            if has_wrapper:
                unit.hide_names()  # an exception may have ended a load below a plain module
            else:
                unit.check_idle("load_state_dict")
                unit.reshard()
            for param_group in unit.param_groups:
                managed.update(param_group.slots.visible_params if has_wrapper else ())
                for entry in param_group.params:
                    for constant in constants_of(entry.param).values():
                        self._held.append(({}, "", constant, constant.clone()))
        self._wrappers: list[nn.Module] = []
        for module in modules_of(wrapper):
            own = unit_of(module)
            # Modules of fully_shard load as torch's do.
            if own is not None and own.options.api.has_wrapper:
                self._wrappers.append(module)
            for tensors in (module._buffers, module._parameters):
                for name, tensor in tensors.items():
                    is_kept = tensor in managed or name in module._non_persistent_buffers_set
                    if tensor is not None and not is_kept and not is_lazy(tensor):
                        # A DTensor of fully_shard that takes the place of another one takes its memory too.
                        copied = None if assign and not isinstance(tensor, DTensor) else copy_of(tensor)
                        self._held.append((tensors, name, tensor, copied))
        for module in self._wrappers:
            module._load = self  # type: ignore[assignment]

    def begin(self, missing: list[str], errors: list[str]) -> None:
        """Use the lists of torch's call, unless an earlier one has begun."""
        if not self._is_begun:
            self.missing, self.errors, self._is_begun = missing, errors, True

    def release(self) -> None:
        """End the load of the wrappers."""
        for child in self._wrappers:
            if child._load is self:
                del child._load

    def undo(self) -> None:
        """Restore the tensors that have changed, unless the values were written."""
        self._hide_placeholders()
        with torch.no_grad():
            for tensors, name, tensor, copied in self._held:
                tensors[name] = tensor
                if copied is not None and not _is_equal(tensor, copied):
                    tensor.copy_(copied)

    @property
    def exchanging_units(self) -> list[Unit]:
        """Units whose ranks exchange chunks; none if all values are full tensors, which need no communication."""
        if self.has_chunks:
            return self.units
        # This rank was given no value; other ranks may have been given chunks, and then all of them communicate.
        is_sharded = any(unit.options.groups.shard.size > 1 for unit in self.units)
        return self.units if is_sharded and not self.has_own else []

    def end(self, keys: Any) -> None:
        """Write all values unless one does not fit; with missing or unexpected names put this off until torch raises.

        Hooks that run later may take such names off the list. Where ranks exchange chunks, they agree now.
        """
        self._is_put_off = self._strict and bool(keys.missing_keys or keys.unexpected_keys)
        if not self._is_put_off:
            self.release()
        self._plan_placeholders()
        if not self._is_put_off or self.exchanging_units:
            self._commit()

    def show_placeholders(self, unit: Unit, codec: StateDictCodec, prefix: str) -> dict[str, StatePlaceholder]:
        """Show a unit's modules a placeholder for each parameter, until the end of the load.

        They copy to it whatever they and their hooks make of the state dict. Returns the placeholders by name.
        """
        decoder = codec if isinstance(codec, FullCodec) else None
        if decoder is None and unit.param_groups:
            self.units.append(unit)
        elif unit.options.groups.shard.size == unit.options.groups.num_ranks > 1:
            self._from_full.append(unit)  # on FSDP1 a collective
        found: dict[str, StatePlaceholder] = {}
        own = []
        for param in params_of(unit, clean_fqn(prefix)):
            placeholder = placeholder_of(param, partial(_refusal, param))
            self._placeholders.append((StateShard(param, param.local, param.shape), placeholder, decoder))
            own.append(placeholder)
            for fqn in param.fqns:
                found[fqn] = placeholder
        unit.show_names(own)
        return found

    def _plan_placeholders(self) -> None:
        """Show the sharded parameters again, and plan the load of what was copied to the placeholders."""
        values = []
        for target, placeholder, _ in self._placeholders:
            entry = target.param.param_group.params[target.param.index]
            # With ``assign``, and by methods of their own, modules set another tensor in its place, or swap them.
            there = [site.module._parameters.get(site.name) for site in entry.sites]
            others = [each for each in there if each is not entry.param and not isinstance(each, StatePlaceholder)]
            own = next((each for each in others if each is not None), None)
            values.append(placeholder.value if own is None else own)
        self._hide_placeholders()
        for (target, _, codec), value in zip(self._placeholders, values, strict=True):
            if value is not None:
                decoder = codec or decoder_of(value)
                self.has_chunks = self.has_chunks or decoder.exchanges
                self.has_own = self.has_own or not decoder.exchanges
                if not decoder.exchanges:
                    self.writes.describe(target, f"{shape_of(value)} without chunks")
                self.decode(decoder, value, target)
        self._placeholders.clear()
        if self._sharded:
            num, first = len(self._sharded), self._sharded[0]
            self.errors.append(
                f"This load expects full tensors, but {counted(num, 'entries')} of the state dict "
                f"{'is a sharded tensor' if num == 1 else 'are sharded tensors'}, {first!r} the first: it is a "
                "SHARDED_STATE_DICT. Load it inside FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)."
            )
            self._sharded.clear()

    def decode(self, codec: StateDictCodec, value: Any, target: StateShard) -> None:
        """Plan the load of a value, or list its error."""
        if isinstance(codec, FullCodec) and isinstance(value, ShardedTensor):
            self._sharded.append(target.label)
            return
        if not codec.fits(value, target):
            self.errors.append(
                f"size mismatch for {target.label}: copying a param with shape {torch.Size(shape_of(value))} from "
                f"checkpoint, the shape in current model is {torch.Size(target.full_shape)}."
            )
            return
        try:
            codec.decode(value, target, self.writes)
        except LoadError as error:
            self.errors.append(str(error))
        except Exception as error:
            self.errors.append(f"{target.label}: a value of type {type(value).__name__} cannot be loaded: {error}")

    def add_flat_error(self, text: str) -> None:
        """List the error of a flat parameter, once for all units."""
        if not self._has_flats:
            self.errors.append(text)
        self._has_flats = True

    def _hide_placeholders(self) -> None:
        for unit in dict.fromkeys(target.param.unit for target, _, _ in self._placeholders):
            unit.hide_names()

    def write_late(self) -> None:
        """Write the values that were put off, since torch has not raised."""
        if not self._is_put_off:
            return
        self._is_put_off = False
        if self.exchanging_units:
            # Ranks had to agree earlier that nothing is written.
            raise LoadError(
                "; ".join(self.errors)
                or "Names were missing or unexpected, so nothing was loaded, but a load hook has taken them off the "
                "list. Load sharded state dicts with strict=False instead."
            )
        self._commit()

    def _commit(self) -> None:
        """Run all writes, or none on any error. Where chunks are exchanged, an error on one rank stops every rank."""
        error: Exception | None = LoadError("; ".join(self.errors[:3])) if self.errors else None
        if self._is_put_off and error is None:
            error = LoadError("keys are missing or unexpected")
        self.has_met = bool(self.exchanging_units)
        if units := self.exchanging_units:
            rank_groups = rank_groups_of(units)
            for rank_group in rank_groups:
                barrier("load_state_dict", rank_group)
            found = find_disagreement(self.writes.lines_of, error, rank_groups, LOADING_STATE)
            if found is not error:
                self.errors.append(clean_text(str(found)))
                error = found
        if error is None:
            self.writes.commit()
            for unit in self._from_full:
                unit.num_loads += 1
        else:
            self.undo()
        # If an exception follows a commit, new buffers belong to the new shards.
        self._held.clear()


@contextmanager
def all_or_nothing(wrapper: nn.Module, state_dict: Mapping[str, Any], *, strict: bool, assign: bool) -> Iterator[None]:
    """Load ``wrapper`` by torch's ``load_state_dict`` inside the block; after an exception nothing has changed.

    Ranks that exchange the chunks of ``state_dict`` raise too.
    """
    outer: ModelLoad | None = wrapper._load  # type: ignore[assignment]
    if outer is not None:
        # A hook of that load calls this: its values come first, as in torch.
        outer.write_late()
    load: ModelLoad | None = None
    try:
        load = ModelLoad(wrapper, strict=strict, assign=assign)
        yield
        load.write_late()
    except BaseException as error:
        if load is not None:
            load.undo()
        if isinstance(error, Exception) and (load is None or not load.has_met):
            _meet_with(error, wrapper, state_dict)
        raise
    finally:
        if load is not None:
            load.release()


def _meet_with(error: Exception, wrapper: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Raise the error of this rank where other ranks wait for it, before they exchange chunks of ``state_dict``."""
    units, decoders = dict[Unit, None](), list[StateDictCodec]()
    for name, param in ParamIndex(wrapper).by_name.items():
        settings = settings_of(param.unit)
        if not isinstance(codec_of(settings.state_dict_type, settings.state_dict_config), FullCodec):
            units[param.unit] = None
            decoders += [decoder_of(state_dict[name])] if name in state_dict else []
    if units and (any(decoder.exchanges for decoder in decoders) or not decoders):
        meet("load_state_dict", rank_groups_of([*units]), error, LOADING_STATE)


@contextmanager
def with_advice(model: nn.Module, state_dict: Mapping[str, Any]) -> Iterator[None]:
    """Add to an error of ``load_state_dict`` inside the block what to load instead, if the state dict shows it."""
    try:
        yield
        if not state_dict:
            warn_user(f"load_state_dict has loaded nothing. {EMPTY}")
    except RuntimeError as error:
        if type(error) is RuntimeError:  # torch's own
            index = ParamIndex(model)
            names = {fqn for param in index.params for fqn in param.fqns} | set(index.dtensors_by_name)
            if advice := advice_on(state_dict, names):
                error.args = (f"{error}\n\t{advice}", *error.args[1:])
        raise


def end_load(module: nn.Module, keys: Any) -> None:
    """Clean the names in errors, as a load hook; at the outermost wrapper end the load."""
    keys.missing_keys[:] = map(clean_fqn, keys.missing_keys)
    keys.unexpected_keys[:] = map(clean_fqn, keys.unexpected_keys)
    load: ModelLoad | None = module._load  # type: ignore[assignment]
    if load is None or load.missing is not keys.missing_keys:
        raise LoadError(
            f"A load hook inside of {type(module).__name__} called load_state_dict on it, or on a module around it, "
            "before its own load was over. Load it after the outer load."
        )
    if load.wrapper is module:
        # The wrapped modules have added their errors by now.
        load.errors[:] = map(clean_text, load.errors)
        load.end(keys)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare the values that this rank has of two tensors."""
    own, others = [list(plain_tensors_in(local_of(each))) for each in (one, other)]
    return len(own) == len(others) and all(map(torch.equal, own, others))


def with_wrapper_versions(wrapper: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``state`` with the versions of its modules also under the names that they have inside wrappers."""
    versions = getattr(state, "_metadata", None)
    if versions is None:
        return state
    copied: OrderedDict[str, Any] = OrderedDict(state)
    copied._metadata = dict(versions)  # type: ignore[attr-defined]
    record_versions(wrapper, copied, "")
    return copied


def load_unit(
    wrapper: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    missing: list[str],
    errors: list[str],
) -> None:
    """Give the entries of ``state_dict`` the names of the wrapped module, and make one unit's modules ready to load.

    The arguments are those of torch's method. If any value takes an exchange, every rank of the shard group must call
    this, with the same names. Flat parameters are planned here; other values when the modules have taken theirs.
    """
    load: ModelLoad | None = wrapper._load  # type: ignore[assignment]
    if load is not None and load.wrapper is wrapper:
        load.begin(missing, errors)
    if load is None or load.errors is not errors:
        # Called on a plain module, whose ``strict`` torch does not pass on.
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        load = ModelLoad(wrapper, strict=False, assign=assign)
        load.begin(missing, errors)
    unit = own_unit(wrapper)
    unit.check_idle("load_state_dict")
    settings = settings_of(unit)
    # Boxes are loaded as such, whichever type is set.
    has_boxes = any(isinstance(value, BoxedTensor) for value in state_dict.values())
    codec = BOXES if has_boxes else codec_of(settings.state_dict_type, settings.state_dict_config)
    has_flats = _rename(unit, state_dict, prefix=prefix, load=load, loads_flats=codec.is_flat)
    inner = prefix + FSDP_PREFIX
    if codec.is_flat or has_flats:
        values = _pop_params(unit, state_dict, prefix)
        if codec.is_flat:
            _load_flats(unit, state_dict, values, codec=codec, prefix=prefix, load=load)
        # Each visible parameter itself, so that the modules' own load finds every name.
        found = [(site.fqn, site.module._parameters.get(site.name)) for sites in _sites_of(unit) for site in sites]
        found += [
            (FLAT_PARAM, param_group.spec.module._parameters.get(FLAT_PARAM)) for param_group in unit.param_groups
        ]
        state_dict.update((inner + name, param) for name, param in found if param is not None)
        return
    own = {param for param_group in unit.param_groups for param in param_group.slots.visible_params}
    shown = load.show_placeholders(unit, codec, prefix)
    for key, value in state_dict.items():
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
        if not is_tensor and decoder_of(value) is not FULL:
            # Modules copy tensors only, and reading the attributes of a ShardedTensor warns.
            state_dict[key] = StatePlaceholder.of(shape_of(value), dtype_of(value), unit.options.device, value=value)
        elif isinstance(value, nn.Parameter) and value in own:
            # For a missing name torch.distributed.checkpoint inserts the model's own parameter: nothing to load.
            state_dict[key] = shown.get(clean_fqn(key), value)


def _refusal(param: IndexedParam) -> LoadError:
    return LoadError(
        f"A load hook or method of a module used {param}, for which the state dict has no value; while a model is "
        "loaded, parameters have the values that were loaded before. Use it after load_state_dict, inside "
        "summon_full_params."
    )


def _load_flats(
    unit: Unit,
    state_dict: dict[str, Any],
    values: list[tuple[StateShard, Any]],
    *,
    codec: StateDictCodec,
    prefix: str,
    load: ModelLoad,
) -> None:
    """Load flat parameters; an unsharded unit takes full parameters, its ``values``, too."""
    flats = []
    for param_group in unit.param_groups:
        target = flat_shard(unit, param_group, prefix)
        inner = prefix + FSDP_PREFIX + target.label.removeprefix(prefix)
        flats.append((target, state_dict.pop(target.label, state_dict.pop(inner, None))))
    for target, flat in flats:
        named = [(each, value) for each, value in values if each.param.param_group is target.param.param_group]
        if flat is not None:
            load.decode(codec, flat, target)
        elif unit.options.groups.shard.size == 1 and all(value is not None for _, value in named):
            for each, value in named:
                load.decode(FULL, value, each)
        # Slices under original names are entries of a LOCAL_STATE_DICT.
        elif any(value is not None and shape_of(value) != tuple(each.local.shape) for each, value in named):
            load.errors.append(
                f"{target.label}: this load is of a LOCAL_STATE_DICT, and the state dict has entries by parameter "
                f"names for unit {unit.name!r}: it is a FULL_STATE_DICT or a SHARDED_STATE_DICT. Load it inside "
                "FSDP.state_dict_type(model, ...) with the type that it was saved with."
            )
        else:
            load.missing.append(target.label)


def _rename(unit: Unit, state_dict: dict[str, Any], *, prefix: str, load: ModelLoad, loads_flats: bool) -> bool:
    """Rename the entries of ``state_dict`` for the wrapped module; flat parameters are an error of other types.

    Returns whether there is such an error.
    """
    unit.reshard()
    # Adopt assignments made before the load now, so that they do not overwrite the loaded values later.
    unit.adopt_assigned()
    for param_group in unit.param_groups:
        load.writes.call(param_group.raise_weights_epoch)
    inner = prefix + FSDP_PREFIX
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(inner):
            name = key[len(prefix) :]
            # Names here are without wrapper prefixes; FSDP1 leaves torch.compile's "_orig_mod." in its state dicts.
            state_dict[inner + (clean_fqn(name) if "_orig_mod." in name else name)] = state_dict.pop(key)
    flats = [key for key in state_dict if key.startswith(inner) and is_flat_param_name(key[len(inner) :])]
    params = params_of(unit, prefix) if flats and not loads_flats else []
    if params:
        for key in flats:
            del state_dict[key]
        load.add_flat_error(
            f"{prefix + flats[0].removeprefix(inner)}: an entry of a LOCAL_STATE_DICT, which is loaded as it was "
            "saved: inside FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT), with the wrapping and number "
            f"of ranks that wrote it. This load of unit {unit.name!r} expects entries by parameter names, "
            f"{params[0].fqn!r} the first."
        )
    return bool(params)


def _sites_of(unit: Unit) -> list[list[Site]]:
    """Return the sites of each parameter of a unit, in the order of :func:`params_of`, in modules that it still has.

    A module that has taken the place of another one has entries of its own.
    """
    modules, entries = (
        set(unit.module.modules()),
        [entry for param_group in unit.param_groups for entry in param_group.params],
    )
    return [[site for site in entry.sites if site.module in modules] for entry in entries]


def _pop_params(unit: Unit, state_dict: dict[str, Any], prefix: str) -> list[tuple[StateShard, Any]]:
    """Remove the entries of a unit's parameters; return each with the value found under any of its names, or None."""
    own = {id(param) for param_group in unit.param_groups for param in param_group.slots.visible_params}
    found = []
    for param, sites in zip(params_of(unit, prefix), _sites_of(unit), strict=True):
        given = [state_dict.pop(prefix + FSDP_PREFIX + site.fqn, None) for site in sites]
        value = next((value for value in given if value is not None and id(value) not in own), None)
        found.append((StateShard(param, param.local, param.shape), value))
    return found
