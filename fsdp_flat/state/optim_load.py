"""Implements ``optim_state_dict_to_load``: converts states under parameter names to this rank's optimizer state dict.

Everything is checked before anything is written. Each rank loads full tensors without communication. Before chunks or
rank 0's tensors are sent, ranks agree that everything fits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.comm import UntilRanksMeet, agree, barrier
from fsdp_flat.core import local_of, units_of
from fsdp_flat.errors import LoadError, OptionError, some_of
from fsdp_flat.state.codecs import FULL, decoder_of, holds_tensors
from fsdp_flat.state.model_load import LOADING_STATE
from fsdp_flat.state.pending_states import FromFiles, PendingTensor, ReadStates, shared_from_rank_zero
from fsdp_flat.state.plain_states import quantized_like
from fsdp_flat.state.shards import (
    IndexedParam,
    OptimContents,
    ParamIndex,
    PendingWrites,
    StateShard,
    check_rows,
    check_states,
    copied_state,
    dtype_of,
    is_scalar,
    rank_groups_of,
    refuse_split,
    shape_of,
)
from fsdp_flat.state.state_settings import own_settings
from fsdp_flat.state.torch_state import dtensor_from, empty_dtensor, placed_like
from fsdp_flat.user_warnings import warn_user

# By class of torch's optimizers, the states of a parameter that it keeps with any settings; SGD only with momentum.
_STATES = {
    name: set(states.split())
    for name, states in {
        "Adadelta": "step square_avg acc_delta",
        "Adagrad": "step sum",
        "Adam": "step exp_avg exp_avg_sq",
        "AdamW": "step exp_avg exp_avg_sq",
        "Adamax": "step exp_avg exp_inf",
        "ASGD": "step eta mu ax",
        "Muon": "momentum_buffer",
        "NAdam": "step exp_avg exp_avg_sq mu_product",
        "RAdam": "step exp_avg exp_avg_sq",
        "RMSprop": "step square_avg",
        "Rprop": "step prev step_size",
        "SGD": "momentum_buffer",
        "SparseAdam": "step exp_avg exp_avg_sq",
    }.items()
}


def load_optim_state(
    model: nn.Module,
    contents: OptimContents,
    state_dict: Mapping[str, Any] | None,
    *,
    named: bool = False,
    from_rank_zero: bool = False,
    expects_chunks: bool = False,
    is_final: bool = False,
    error: Exception | None = None,
) -> dict[str, Any]:
    """Convert ``state_dict``, which is keyed by names, to the state dict that an optimizer loads.

    Values may be of any codec's kind. With ``from_rank_zero``, or if decoding any value takes an exchange (DTensors
    and ShardedTensors do), every rank must call this; then an error of any rank stops all.

    Args:
        model: the model that the optimizer was built from.
        contents: the optimizer's parameters; no parameter may be in another group of ``state_dict`` than in its own.
        state_dict: ``{"state": {name: {...}}, "param_groups": [...]}``; without ``param_groups`` the result has none.
        named: keys of the result are the names of ``model.named_parameters()``, as in torch's named optimizer.
        from_rank_zero: only the first rank of the model's groups has ``state_dict``, as full tensors.
        expects_chunks: if ``state_dict`` holds no tensors, other ranks were given chunks.
        is_final: the result is loaded as it is; else a caller may add parameters that its groups lack.
        error: why this rank cannot load; every rank must call this with one too.
    """
    units = [unit for unit in units_of(model) if unit.param_groups]
    if from_rank_zero and units:
        # The groups of some units may be smaller: those of experts.
        widest = max(units_of(model), key=lambda unit: unit.options.groups.num_ranks)
        state_dict = shared_from_rank_zero(widest, state_dict)
    until_met, writes = UntilRanksMeet(error), PendingWrites()
    result: dict[str, Any] = {}
    with until_met:
        result = _OptimLoad(ParamIndex(model), contents, writes).planned(state_dict, named=named, is_final=is_final)
    if units and (from_rank_zero or _takes_exchange(state_dict, otherwise=expects_chunks)):
        rank_groups = rank_groups_of(units)
        for rank_group in rank_groups:
            barrier("optim_state_dict_to_load", rank_group, error=until_met.error)
        agree(writes.lines_of, until_met.error, rank_groups, LOADING_STATE)
    elif until_met.error is not None:
        raise until_met.error
    writes.commit()
    return result


def _takes_exchange(state_dict: Any, *, otherwise: bool) -> bool:
    """Return whether decoding any value takes an exchange; ``otherwise`` if no value reveals it."""
    states = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    param_states = [row for row in states.values() if isinstance(row, Mapping)] if isinstance(states, Mapping) else []
    codecs = [decoder_of(value) for row in param_states for value in row.values() if not is_scalar(value)]
    return any(codec.exchanges for codec in codecs) if codecs else otherwise


class _OptimLoad:
    """Plans the load of one optimizer state dict; ``writes`` fill the tensors of the result."""

    def __init__(self, index: ParamIndex, contents: OptimContents, writes: PendingWrites) -> None:
        self.writes = writes
        self._index = index
        self._contents = contents
        self._elementwise: set[str] = set()

    def planned(self, state_dict: Mapping[str, Any] | None, *, named: bool, is_final: bool) -> dict[str, Any]:
        """Return the state dict that the optimizer loads.

        If it is ``named`` every parameter needs a state; others have none for an empty shard.
        """
        index, params = self._index, self._contents.params
        state_dict = _keyed_by_names(state_dict, index.aliases)
        by_name: dict[str, dict[str, Any]] = state_dict["state"]
        self._elementwise = {key for row in by_name.values() for key, value in row.items() if not is_scalar(value)}
        positions = {fqn: at for at, param in enumerate(params) if index.has(param) for fqn in index.fqns_of(param)}
        if named or not positions:
            # Parameters outside of the model are the caller's, beside others; alone they are another model's.
            for param in params:
                index.fqns_of(param)
        _check_class(self._contents, index, by_name)
        keys = [index.shown_names[param] if named else position for position, param in enumerate(params)]
        # An optimizer may be built from only the parameters that its rank has elements of; all ranks exchange them.
        held = {param.param_group for param in index.params if param.fqn in positions}
        state: dict[Any, dict[str, Any]] = {}
        for visible, entries in index.managed.items():
            first, rows = entries[0], {entry.fqn: by_name[entry.fqn] for entry in entries if entry.fqn in by_name}
            if first.param_group not in held or not rows:
                continue
            owner = self._contents.owners.get(visible)
            row = self._managed_row(visible, entries, rows, owner)
            self._keep_class(row, visible)
            is_here = first.has_states(owner) or (named and owner is None)
            if is_here and first.fqn in positions:
                state[keys[positions[first.fqn]]] = row
        for param, name in index.others.items():
            if name in by_name and name in positions:
                row = {key: self._unmanaged_state(key, value, param) for key, value in by_name[name].items()}
                self._keep_class(row, param)
                state[keys[positions[name]]] = row
        _warn_left_out(index, positions, by_name)
        groups = state_dict.get("param_groups")
        if groups is None:
            return {"state": state}
        if groups and self._contents.groups and not named:
            _check_groups(self._contents.groups, index, groups, is_final=is_final)
        return {"state": state, "param_groups": _groups(positions, keys, groups)}

    def _keep_class(self, row: dict[str, Any], param: nn.Parameter) -> None:
        """Plan to quantize states that the optimizer has quantized."""
        self.writes.call(partial(quantized_like, row, self._contents.state.get(param, {})), last=True)

    def _managed_row(
        self,
        visible: nn.Parameter,
        params: Sequence[IndexedParam],
        rows: Mapping[str, Mapping[str, Any]],
        owner: int | None,
    ) -> dict[str, Any]:
        """Return the states of a parameter of the optimizer, put together from those of the parameters in it.

        The states of a parameter that one rank of the shard group owns have any shape; other ranks' are empty.
        """
        first, found = next(param for param in params if param.fqn in rows), dict[str, Any]()
        if not first.is_original:
            self._check_uniform(params, rows)
        device, layout = first.param_group.spec.shard_device, first.param_group.layout

        def empty(value: Any, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype_of(value), device=device)

        # Sorted, because every rank must exchange in the same order.
        for key in sorted(rows[first.fqn]):
            value = rows[first.fqn][key]
            if owner is None and key in own_settings(first.unit).optim_handlers:
                self._split(first, key, value, found)
            elif self._is_plain(first, key, value, is_owned=owner is not None):
                if holds_tensors(value) and first.is_split and owner is None:
                    raise LoadError(
                        f"State {key!r} of {first} is a {type(value).__name__} of tensors, saved of a whole parameter; "
                        "this rank's optimizer has a part of it, or a flat parameter."
                    )
                found[key] = copied_state(value)
            elif owner is not None:
                shape = shape_of(value)
                found[key] = empty(value, shape if owner == first.rank_group.rank else (0,))
                self._fill(StateShard(first, found[key].view(-1), shape, key, owner), value)
            else:
                shard = empty(value, (first.numel if first.is_original else layout.shard_numel,))
                found[key] = shard if visible.dim() == 1 else shard.view(visible.shape)
                if not first.is_original:
                    # The padding is zero; everything else will be written.
                    layout.clear_padding(shard, first.rank_group.rank)
                for param in params:
                    if param.fqn in rows:
                        self._fill(StateShard(param, param.part_of(shard), param.shape, key), rows[param.fqn][key])
                    else:
                        param.part_of(shard).zero_()
        return found

    def _check_uniform(self, params: Sequence[IndexedParam], rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise if the states of the parameters in a flat parameter differ in names, counts or dtypes: they become one.

        A parameter without states is given zeros, unless the others have a count, which would not be its own.
        """
        lacking = [param.fqn for param in params if param.fqn not in rows]
        for key in sorted({key for row in rows.values() for key in row}):
            found: dict[Any, str] = {}
            for fqn, row in rows.items():
                value = row.get(key, "nothing")
                if self._is_plain(self._index.by_name[fqn], key, value):
                    found.setdefault(str(value.item() if isinstance(value, torch.Tensor) else value), fqn)
                else:
                    found.setdefault(dtype_of(value), fqn)
            if lacking and any(isinstance(value, str) for value in found):
                found["nothing"] = lacking[0]
            if len(found) > 1:
                told = ", ".join(f"{value} for {fqn!r}" for value, fqn in found.items())
                raise OptionError(
                    f"With use_orig_params=False the parameters of unit {params[0].unit.name!r} share one state, so "
                    f"{key!r} needs the same value, or dtype, for each; got {told}. Pass use_orig_params=True."
                )

    def _is_plain(self, param: IndexedParam, key: str, value: Any, *, is_owned: bool = False) -> bool:
        """Return whether a state is one value of the whole parameter, and not one for each element."""
        if not is_scalar(value):
            return False
        if (
            is_owned
            or param.shape != ()
            or not isinstance(value, (torch.Tensor, PendingTensor, *decoder_of(value).kinds))
        ):
            return True
        # The number of dims says nothing of a parameter of shape (): the states of the other parameters decide, or else
        # the name "step", torch's name of the step count.
        return key not in self._elementwise if self._elementwise else key == "step"

    def _fill(self, target: StateShard, value: Any) -> None:
        """Plan the copy or transfer that fills this rank's part of a state."""
        if shape_of(value) != target.full_shape:
            raise LoadError(
                f"{target.label} has shape {shape_of(value)}; expected {target.full_shape}, that of the parameter, on "
                f"rank {target.param.rank_group.rank} of the shard group. Is it the state dict of another model?"
            )
        if isinstance(value, PendingTensor):
            value.plan_shard(target, self.writes)
        else:
            decoder_of(value).decode(value, target, self.writes)

    def _split(self, param: IndexedParam, key: str, value: Any, result: dict[str, Any]) -> None:
        """Split this rank's part of a state off with its handler, now or as one of the writes."""
        refuse_split(param, key)
        interval, device = param.local_shard.in_param, param.param_group.spec.shard_device
        handler = own_settings(param.unit).optim_handlers[key]

        def put(full: torch.Tensor) -> None:
            result[key] = handler.split(
                full.detach().to(device), torch.Size(param.shape), interval.start, interval.stop
            )

        if not isinstance(value, (torch.Tensor, PendingTensor)) or decoder_of(value) is not FULL:
            raise LoadError(
                f"State {key!r} of {param.fqn!r} has a handler, which takes the full tensor that was saved; got a "
                f"{type(value).__name__}."
            )
        self._with_full(value, device, put)

    def _with_full(self, value: Any, device: torch.device, then: Callable[[torch.Tensor], object]) -> None:
        """Call ``then`` with a full tensor, now or as one of the writes."""
        if isinstance(value, PendingTensor):
            value.plan_full(device, self.writes, then)
        else:
            then(value)

    def _unmanaged_state(self, key: str, value: Any, param: nn.Parameter) -> Any:
        """Return a state of a parameter that no unit manages."""
        indexed = None if is_scalar(value) else self._index.dtensors.get(param)
        if indexed is not None and shape_of(value) != tuple(param.shape):
            return self._of_other_shape(key, value, indexed)
        if not isinstance(value, PendingTensor):
            if indexed is None:
                return copied_state(value)
            return dtensor_from(indexed, value, f"State {key!r} of {indexed.fqn!r}")
        made: torch.Tensor = (
            torch.empty(value.shape, dtype=value.dtype, device=param.device)
            if indexed is None
            else empty_dtensor(indexed, value.dtype, indexed.param_group.spec.shard_device)
        )
        value.plan_unmanaged(made, indexed, self.writes)
        return made

    def _of_other_shape(self, key: str, value: Any, param: IndexedParam) -> Any:
        """Return a state of a parameter of ``fully_shard`` that has another shape, a value for each row perhaps."""
        like, shape = self._contents.state.get(param.sharded_param, {}).get(key), shape_of(value)
        sizes = iter(param.sharded_param.shape)
        # Without a state of the optimizer that shows the shape, some of the parameter's sizes may be missing or 1.
        fits = all(size == 1 or size in sizes for size in shape) if like is None else shape == shape_of(like)
        if not fits:
            raise LoadError(
                f"State {key!r} of {param.fqn!r} has shape {shape}; expected "
                f"{tuple(param.sharded_param.shape)}, that of the parameter, which fully_shard has sharded. "
                "Is it the state dict of another model? If the optimizer keeps states of such a shape, let it take a "
                "step before it loads them."
            )
        if isinstance(value, DTensor):
            if value.device_mesh != param.sharded_param.device_mesh:  # type: ignore[attr-defined]
                raise LoadError(
                    f"State {key!r} of {param.fqn!r} is a DTensor on {value.device_mesh}, another mesh than the "
                    "parameter's. Load full tensors."
                )
            return copied_state(value)
        if not isinstance(value, (torch.Tensor, PendingTensor)):
            raise LoadError(f"State {key!r} of {param.fqn!r} is a {type(value).__name__}; expected a tensor.")
        # The optimizer is given a tensor that may be filled once all of the load is known to fit.
        made = placed_like(param, torch.empty(value.shape, dtype=value.dtype), like)
        local = local_of(made)
        self._with_full(
            value, param.unit.options.device, lambda full: local.copy_(local_of(placed_like(param, full, like)))
        )
        return made


def _keyed_by_names(state_dict: Any, aliases: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a state dict under the names that this library saves; raise if it has positions."""
    state_dict = check_states(state_dict)
    check_rows(state_dict["state"])
    positions = [key for key in state_dict["state"] if not isinstance(key, str)]
    if positions:
        raise OptionError(
            f"The optimizer state dict is keyed by positions, {positions[0]!r} the first; expected names. Turn it by "
            "FSDP.rekey_optim_state_dict(state_dict, OptimStateKeyType.PARAM_NAME, model)."
        )
    if not aliases:
        return state_dict
    rows, groups = state_dict["state"], state_dict.get("param_groups")
    # A name that the parameter has beside the saved one is of another save.
    renamed: dict[str, Any] = {"state": {name: row for name, row in rows.items() if aliases.get(name) not in rows}}
    renamed["state"] = {aliases.get(name, name): row for name, row in renamed["state"].items()}
    if groups is not None:
        renamed["param_groups"] = [
            {**group, "params": [aliases.get(name, name) for name in group.get("params", ())]} for group in groups
        ]
    return {**state_dict, **renamed}


def _warn_left_out(index: ParamIndex, positions: Mapping[str, int], by_name: Mapping[str, Any]) -> None:
    """Warn of states that are not loaded: of parameters that the optimizer, or the model, does not have."""
    # Only of parameters that this rank has elements of: its optimizer may be built from these alone.
    found = [param.fqn for param in index.params if param.fqn in by_name and param.fqn not in positions and param.numel]
    known = {*(param.fqn for param in index.params), *index.others.values()}
    unknown = [name for name in by_name if name not in known]
    for names, told in (
        (found, f"states of {len(found)} parameter(s) that this optimizer does not hold"),
        (unknown, f"{len(unknown)} name(s) that this model does not have"),
    ):
        if names:
            text = f"The optimizer state dict has {told}, {names[0]!r} the first; they are left out."
            warn_user(text)


def _groups(
    positions: Mapping[str, int], keys: Sequence[Any], saved_groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    groups = []
    for group in saved_groups:
        # The optimizer keeps the names that it was built with; the file's names cover the parameters of all ranks.
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        known = {positions[fqn] for fqn in group.get("params", []) if fqn in positions}
        groups.append({**settings, "params": [keys[position] for position in sorted(known)]})
    return groups


def _check_class(contents: OptimContents, index: ParamIndex, by_name: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise if states are of another class of torch's optimizers than this one, which would fail or begin anew."""
    name = "" if contents.kind is None else contents.kind.__name__
    kept = _STATES.get(name)
    if kept is None or contents.kind is not getattr(torch.optim, name, None):
        return
    for group in contents.groups or ():
        if name == "SGD" and not group["momentum"]:
            continue
        for fqn in (fqn for param in group["params"] if index.has(param) for fqn in index.fqns_of(param)):
            row = by_name.get(fqn, {})
            others = [other for other, states in _STATES.items() if states <= row.keys()]
            if not kept <= row.keys() and others:
                raise OptionError(
                    f"The optimizer state dict has states of another class of optimizer: those of {fqn!r} are "
                    f"{sorted(row)}, which {' or '.join(others)} keeps, and this optimizer is {name}, which needs "
                    f"{sorted(kept)}. Load them into an optimizer of the class that they were saved of, or load the "
                    "model alone and let this one begin anew."
                )


def _check_groups(
    present_groups: Sequence[Mapping[str, Any]],
    index: ParamIndex,
    saved_groups: Sequence[Mapping[str, Any]],
    *,
    is_final: bool,
) -> None:
    """Raise if a parameter is in another group of a state dict than in its own, and tell of those that are in none.

    ``Optimizer.load_state_dict`` pairs parameters by position and compares the sizes of groups alone, so states of
    parameters that have changed groups would go to other parameters. It refuses groups that lack parameters; a caller
    may add these before, and is expected to add those that no unit manages.
    """
    places: dict[str, int] = {}
    for at, group in enumerate(saved_groups):
        places.update(dict.fromkeys(group.get("params", ()), at))
    unmanaged = index.others.keys() - index.dtensors.keys()
    lacking, moved = [], []
    for at, group in enumerate(present_groups):
        for param in group["params"]:
            if not index.has(param):
                lacking += [f"a parameter outside of the model (group {at})"] * is_final
                continue
            fqns = index.fqns_of(param)
            saved = [(fqn, places[fqn]) for fqn in fqns if fqn in places]
            if not saved and (is_final or param not in unmanaged):
                lacking.append(f"{fqns[0]!r} (group {at})")
            moved += [f"{fqn!r} (group {at}, there {there})" for fqn, there in saved if there != at]
    if not (lacking or moved or len(present_groups) != len(saved_groups)):
        return
    differences = []
    if len(present_groups) != len(saved_groups):
        differences.append(f"{len(saved_groups)} parameter group(s) for {len(present_groups)}")
    differences += [f"no group with {some_of(lacking, 6)}"] if lacking else []
    differences += [f"other groups for {some_of(moved, 6)}"] if moved else []
    text = (
        f"The optimizer state dict was saved of other parameter groups than this optimizer has: it has "
        f"{'; '.join(differences)}. Load into an optimizer with the groups that it was saved with, and grow that one "
        "by add_param_group afterwards. To load the states alone, by name, leave 'param_groups' out of the "
        "state dict and pass {**optim.state_dict(), 'state': loaded['state']} to optim.load_state_dict."
    )
    if moved or is_final:
        raise OptionError(text)
    warn_user(text + " As it is, optim.load_state_dict will raise a ValueError.")


def states_in_files(
    model: nn.Module,
    stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: ReadStates,
    *,
    owners: Mapping[nn.Parameter, int],
) -> dict[str, dict[str, FromFiles]]:
    """Describe the tensors of optimizer states that files have, by the names of parameters; raise if one does not fit.

    ``stored`` has shapes and dtypes by the names of parameter and state, joined by a dot, and ``owners`` is that of the
    optimizer's contents.
    """
    index = ParamIndex(model)
    others = {name: tuple(param.shape) for param, name in index.others.items()}
    others |= {alias: others[name] for alias, name in index.aliases.items() if name in others}
    found: dict[str, dict[str, FromFiles]] = {}
    planned: dict[str, dict[str, torch.Tensor]] = {}
    for key, (shape, dtype) in stored.items():
        fqn, _, name = key.rpartition(".")
        param = index.by_name.get(fqn)
        if param is None and fqn not in others:
            raise LoadError(
                f"The optimizer state of {fqn!r} belongs to no parameter of this model. Nothing was loaded."
            )
        expected = others[fqn] if param is None else param.full_shape
        # The handler, the owner, or the optimizer of fully_shard's parameters defines the shape.
        is_free = (
            fqn in index.dtensors_by_name
            if param is None
            else param.sharded_param in owners or name in own_settings(param.unit).optim_handlers
        )
        if shape != expected and not is_free:
            raise LoadError(
                f"State {name!r} of {fqn!r} has shape {shape}; expected {expected}, that of the parameter. If a "
                f"handler made it, register that first: fsdp_flat.register_optim_state_handler(model, {name!r}, "
                "merge=..., split=...). Nothing was loaded."
            )
        found.setdefault(fqn, {})[name] = FromFiles(torch.Size(shape), dtype, (fqn, name), read, planned)
    return found
