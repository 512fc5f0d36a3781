"""Completes an optimizer's parameter groups with the names of all parameters that any rank's optimizer holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_flat.comm import digest_of, exchange_bytes, exchange_ints
from fsdp_flat.errors import OptionError
from fsdp_flat.state.common import rank_groups_of
from fsdp_flat.state.optim_params import ParamNames

__all__ = ["check_groups", "complete_groups", "merged_params"]

Groups = list[dict[str, Any]]


def complete_groups(names: ParamNames, groups: Groups | None, *, alone: bool) -> None:
    """Add to ``groups`` the parameters of every rank's optimizer, and set names without wrapper prefixes.

    An optimizer may be built from only the parameters that its rank has elements of. These depend on the wrapping and
    the number of ranks, so a saved group must name the parameters of all ranks.

    Every rank must call this, except with ``alone``; normally one integer is exchanged per process group.

    Args:
        names: the model's names.
        groups: this rank's groups, with names in ``params``, changed in place; None if there are none.
        alone: exchange nothing, so groups keep only this rank's parameters.
    """
    units = names.units
    held = [group["params"] for group in groups or ()]
    for rank_group in [] if alone or not any(unit.options.use_orig_params for unit in units) else rank_groups_of(units):
        assert rank_group.group is not None
        text, device = json.dumps(held).encode(), units[0].options.device
        if len({digest for (digest,) in exchange_ints([digest_of(text)], rank_group.group, device)}) == 1:
            continue
        held = merged_params(names, held, [json.loads(each) for each in exchange_bytes(text, rank_group.group, device)])
    for group, params in zip(groups or (), held, strict=True):
        group["params"] = params
        if "param_names" in group:
            # The optimizer was built from named parameters, whose names contain wrapper prefixes.
            group["param_names"] = list(params)


def merged_params(names: ParamNames, held: list[list[str]], everyone: Sequence[list[list[str]]]) -> list[list[str]]:
    """Return by parameter group the names that any rank holds; ``held`` if ranks have other numbers of groups."""
    if any(len(of_rank) != len(held) for of_rank in everyone):
        return held
    return [_merged(names, [of_rank[index] for of_rank in everyone]) for index in range(len(held))]


def _merged(names: ParamNames, held: list[list[str]]) -> list[str]:
    """Merge the names of all ranks: those of rank 0 in its order, then the others in the order of the model."""
    places = {fqn: place for place, fqn in enumerate(fqn for _, _, fqns in names.handles for fqn in fqns)}
    lacking = {fqn for of_rank in held for fqn in of_rank}.difference(held[0])
    return [*held[0], *sorted(lacking, key=lambda fqn: (places.get(fqn, len(places)), fqn))]


def check_groups(names: ParamNames, own: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    """Check that every parameter of an optimizer is in the group of a state dict that belongs to its own group.

    ``Optimizer.load_state_dict`` pairs parameters by position and compares the sizes of groups alone, so states of
    parameters that have changed groups would go to other parameters.

    Args:
        names: the model's names.
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
            fqns = names.fqns_of(param)
            saved = [(fqn, places[fqn]) for fqn in fqns if fqn in places]
            if not saved:
                lacking.append(f"{fqns[0]!r} (group {at})")
            moved += [f"{fqn!r} (group {at}, there {there})" for fqn, there in saved if there != at]
    if lacking or moved or len(own) != len(given):
        found = [f"{len(given)} parameter group(s) for {len(own)}"] if len(own) != len(given) else []
        found += [f"no group with {_some(lacking)}"] if lacking else []
        found += [f"other groups for {_some(moved)}"] if moved else []
        raise OptionError(
            f"The optimizer state dict was saved of other parameter groups than this optimizer has: it has "
            f"{'; '.join(found)}. Load into an optimizer with the groups that it was saved with, and grow that one "
            "by add_param_group afterwards. To load the states alone, by name, leave 'param_groups' out of the state "
            "dict and pass {**optim.state_dict(), 'state': loaded['state']} to optim.load_state_dict."
        )


def _some(found: list[str]) -> str:
    return ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
