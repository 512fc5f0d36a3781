"""Reads the parameters, states and groups of optimizers, and converts them between names and positions."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import OptimStateKeyType, member_of
from fsdp_flat.comm import exchange_if_different
from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError, some_of
from fsdp_flat.layout import clean_fqn
from fsdp_flat.state.param_index import ParamIndex


@dataclass(frozen=True, slots=True)
class OptimContents:
    """Holds the parameters, states and parameter groups of an optimizer.

    Attributes:
        params: its parameters, in the order in which its state dict numbers them.
        state: by parameter, its states.
        groups: its groups, with parameters; None for a state dict without ``param_groups``.
        owners: by parameter whose states one rank of the shard group has in full, that rank.
    """

    params: tuple[nn.Parameter, ...]
    state: Mapping[nn.Parameter, Mapping[str, Any]]
    groups: tuple[dict[str, Any], ...] | None
    owners: Mapping[nn.Parameter, int] = field(default_factory=dict)


def contents_of(
    optim: Any, state_dict: Mapping[str, Any] | None = None, index: ParamIndex | None = None
) -> OptimContents:
    """Return the contents of an optimizer, or of any object with ``param_groups`` and ``state``.

    Args:
        optim: the optimizer.
        state_dict: replaces the optimizer's own state and settings; keyed by position, or by the names of
            ``model.named_parameters()``, as in torch's named optimizer.
        index: the parameters of the model that these names belong to.

    Raises:
        OptionError: a key is neither a position nor such a name.
    """
    params = tuple(param for group in optim.param_groups for param in group["params"])
    owners = getattr(optim, "state_owners", {})
    if state_dict is None:
        return OptimContents(params, optim.state, tuple(optim.param_groups), owners)
    shown_names = {} if index is None else index.shown_names
    by_name = {clean_fqn(name): param for param, name in shown_names.items()}

    def of(key: Any) -> nn.Parameter:
        found = params[key] if isinstance(key, int) else by_name.get(clean_fqn(str(key)))
        if found is None:
            raise OptionError(f"An optimizer state dict has the key {key!r}, which is no parameter of this model.")
        return found

    state = {of(key): value for key, value in state_dict["state"].items()}
    given = state_dict.get("param_groups")
    groups = None if given is None else tuple({**g, "params": [of(key) for key in g["params"]]} for g in given)
    return OptimContents(params, state, groups, owners)


def copied_state(value: Any, device: torch.device | str | None = None) -> Any:
    """Return a copy of an optimizer's state, so that neither the optimizer nor a state dict changes the other's.

    Args:
        value: a tensor, detached in the copy, or any other value.
        device: device of a tensor's copy; None keeps its own.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    return value.clone() if device is None else value.to(device, copy=True)


def ordered_params(model: nn.Module, optim: Any, optim_input: Any) -> tuple[nn.Parameter, ...]:
    """Return the parameters of ``optim``; without it those of ``optim_input``, the arguments it was built from.

    Raises:
        OptionTypeError: ``optim_input`` is neither parameters nor groups.
        OptionError: ``optim_input`` is empty.
    """
    if optim is not None:
        return contents_of(optim).params
    if optim_input is None:
        return tuple(model.parameters())
    if isinstance(optim_input, (torch.Tensor, dict, str)):
        raise OptionTypeError(f"optim_input must be parameters or parameter groups; got {type(optim_input).__name__}.")
    entries = list(optim_input)
    if not entries:
        raise OptionError("optim_input is empty; pass what the optimizer was built from, or the optimizer.")
    if all(isinstance(entry, dict) for entry in entries):
        return tuple(param for group in entries for param in group["params"])
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return tuple(entries)
    raise OptionTypeError("optim_input must hold parameters only, or parameter groups only.")


def named_groups(index: ParamIndex, contents: OptimContents) -> list[dict[str, Any]] | None:
    """Return copies of an optimizer's groups, with the names of their parameters; None if it has none.

    Raises:
        OptionError: a parameter is not the model's.
    """
    if contents.groups is None:
        return None
    return [
        {
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
            "params": [fqn for param in group["params"] for fqn in index.fqns_of(param)],
        }
        for group in contents.groups
    ]


def complete_groups(
    index: ParamIndex, contents: OptimContents, groups: list[dict[str, Any]] | None, *, alone: bool
) -> list[str]:
    """Add to ``groups`` the parameters of every rank's optimizer, and set names without wrapper prefixes.

    An optimizer may be built from only the parameters that its rank has elements of. These depend on the wrapping and
    the number of ranks, so a saved group must name the parameters of all ranks.

    Every rank must call this, except with ``alone``; normally one integer is exchanged per process group.

    Args:
        index: the model's parameters.
        contents: the optimizer's contents.
        groups: this rank's groups, with names in ``params``, changed in place; None if there are none.
        alone: exchange nothing, so groups keep only this rank's parameters.

    Returns:
        Names in the order of rank 0's optimizer, in which FSDP1 saves flat parameters; empty if there are none, since
        original parameters are sorted.
    """
    are_original = [unit.options.use_orig_params for unit in index.units]
    held = [group["params"] for group in groups or ()]
    order = [] if all(are_original) else [fqn for param in contents.params for fqn in index.fqns_of(param)]
    for rank_group in () if alone else index.rank_groups:
        payloads = exchange_if_different(json.dumps([order, held]).encode(), rank_group, index.device)
        if payloads is None:
            continue
        everyone = [json.loads(payload) for payload in payloads]
        order = everyone[0][0]
        if any(are_original):
            held = merged_params(index, held, [theirs for _, theirs in everyone])
    for group, params in zip(groups or (), held, strict=True):
        group["params"] = params
        if "param_names" in group:
            # The optimizer was built from named parameters, whose names contain wrapper prefixes.
            group["param_names"] = list(params)
    return order


def merged_params(index: ParamIndex, held: list[list[str]], everyone: Sequence[list[list[str]]]) -> list[list[str]]:
    """Return by parameter group the names that any rank holds; ``held`` if ranks have other numbers of groups."""
    if any(len(theirs) != len(held) for theirs in everyone):
        return held
    return [_merged(index, [theirs[at] for theirs in everyone]) for at in range(len(held))]


def _merged(index: ParamIndex, held: list[list[str]]) -> list[str]:
    """Merge the names of all ranks: those of rank 0 in its order, then the others in the order of the model."""
    places = {param.fqn: place for place, param in enumerate(index.params)}
    lacking = {fqn for of_rank in held for fqn in of_rank}.difference(held[0])
    return [*held[0], *sorted(lacking, key=lambda fqn: (places.get(fqn, len(places)), fqn))]


def check_groups(index: ParamIndex, own: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    """Check that every parameter of an optimizer is in the group of a state dict that belongs to its own group.

    ``Optimizer.load_state_dict`` pairs parameters by position and compares the sizes of groups alone, so states of
    parameters that have changed groups would go to other parameters.

    Args:
        index: the model's parameters.
        own: the optimizer's groups, with parameters.
        given: the state dict's groups, with names.

    Raises:
        OptionError: a parameter of the optimizer is in no group or in another group of the state dict, or the numbers
            of groups differ.
    """
    places: dict[str, int] = {}
    for at, group in enumerate(given):
        places.update(dict.fromkeys(group.get("params", ()), at))
    lacking, moved = [], []
    for at, group in enumerate(own):
        for param in group["params"]:
            fqns = index.fqns_of(param)
            saved = [(fqn, places[fqn]) for fqn in fqns if fqn in places]
            if not saved:
                lacking.append(f"{fqns[0]!r} (group {at})")
            moved += [f"{fqn!r} (group {at}, there {there})" for fqn, there in saved if there != at]
    if lacking or moved or len(own) != len(given):
        found = [f"{len(given)} parameter group(s) for {len(own)}"] if len(own) != len(given) else []
        found += [f"no group with {some_of(lacking, 6)}"] if lacking else []
        found += [f"other groups for {some_of(moved, 6)}"] if moved else []
        raise OptionError(
            f"The optimizer state dict was saved of other parameter groups than this optimizer has: it has "
            f"{'; '.join(found)}. Load into an optimizer with the groups that it was saved with, and grow that one "
            "by add_param_group afterwards. To load the states alone, by name, leave 'param_groups' out of the state "
            "dict and pass {**optim.state_dict(), 'state': loaded['state']} to optim.load_state_dict."
        )


def rekey(
    given: dict[str, Any],
    key_type: Any,
    model: nn.Module,
    params: Sequence[nn.Parameter],
    *,
    any_shape: Collection[nn.Parameter] = (),
) -> dict[str, Any]:
    """Return ``given`` with its keys converted to names or positions.

    Args:
        given: an optimizer state dict.
        key_type: the type of keys to return.
        model: the model that has the names.
        params: the optimizer's parameters in order.
        any_shape: parameters of ``params`` whose states may have any shape.

    Raises:
        OptionError: keys of both types, a key that belongs to no parameter of the model, or a state that does not fit
            the parameter at its position.
        PhaseError: ``key_type`` is not an ``OptimStateKeyType``.
    """
    wanted = member_of(OptimStateKeyType, key_type, "optim_state_key_type", error=PhaseError)
    kinds = {type(key) for key in given["state"]}
    if len(kinds) > 1:
        raise OptionError(
            f"An optimizer state dict must be keyed by names or by positions, not both; got {list(given['state'])}."
        )
    index = ParamIndex(model)
    order = [index.fqns_of(param)[0] for param in params]
    to_names = wanted is OptimStateKeyType.PARAM_NAME
    free = {position for position, param in enumerate(params) if param in any_shape}
    _check_shapes({key: row for key, row in given["state"].items() if key not in free}, index, params, order)
    if kinds and (str in kinds) == to_names:
        return given
    table: dict[Any, Any] = dict(enumerate(order)) if to_names else {name: i for i, name in enumerate(order)}
    try:
        state = {table[key]: value for key, value in given["state"].items()}
        groups = [{**group, "params": sorted(table[key] for key in group["params"])} for group in given["param_groups"]]
    except KeyError as error:
        raise OptionError(f"Key {error} of the optimizer state dict belongs to no parameter of this model.") from None
    return {"state": state, "param_groups": groups}


def _check_shapes(
    state: dict[Any, Any], index: ParamIndex, params: Sequence[nn.Parameter], order: Sequence[str]
) -> None:
    """Raise if a state and the parameter at its position differ in shape, so that it belongs to another parameter."""
    shapes = {_shape_at(index, param) for param in params}
    # States of other shapes (Adafactor's factors) do not reveal the order.
    unlike = {
        name
        for row in state.values()
        for name, value in row.items()
        if (shape := tuple(getattr(value, "shape", ()))) and shape not in shapes
    }
    for key, row in state.items():
        if not isinstance(key, int) or key >= len(params):
            continue
        managed = index.managed.get(params[key], ())
        expected = _shape_at(index, params[key])
        for name, value in row.items():
            shape = tuple(getattr(value, "shape", ()))
            if shape and shape != expected and name not in unlike and len(managed) <= 1:
                raise OptionError(
                    f"State {name!r} at position {key} has shape {shape}, but the parameter there, {order[key]!r}, has "
                    f"{expected}. The optimizer state was saved with another order of parameters."
                )


def _shape_at(index: ParamIndex, param: nn.Parameter) -> tuple[int, ...]:
    return index.managed[param][0].shape if param in index.managed else tuple(param.shape)
