"""Compares the names of two state dicts, for the text of an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from fsdp_flat.errors import some_of


def misfits(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """Tell which names of a model are missing and which are not in it: each name once, the nearest matches first."""
    near: dict[str, str] = {}
    rest = list(unexpected)
    # Every pair is compared, so names beyond these numbers are listed as they are.
    for name in missing[:20]:
        for other in get_close_matches(name, rest[:500], 1):
            near[name] = other
            rest.remove(other)
    nearest = sorted(near.items(), key=lambda pair: -SequenceMatcher(None, *pair).ratio())
    told = [f"{name!r} (there is {other!r})" for name, other in nearest]
    told += [repr(name) for name in missing if name not in near]
    found = [f"missing: {some_of(told, 5)}"] if told else []
    return [*found, f"not in the model: {some_of(list(map(repr, rest)), 5)}"] if rest else found


def advice_on(state: Mapping[Any, Any], names: Collection[str]) -> str:
    """Return what to load instead of a state dict that is another one than a model's; empty if it is none known.

    Args:
        state: what was given as the state dict of a model.
        names: names of the model's parameters; none if any names will do.
    """
    if "param_groups" in state and "state" in state:
        return (
            "This is an optimizer's state dict. Load it by optim.load_state_dict; one that FSDP.optim_state_dict has "
            "made is converted for that by FSDP.optim_state_dict_to_load(model, optim, state_dict)."
        )
    for key, value in state.items():
        if not isinstance(value, Mapping) or "param_groups" in value:
            continue
        if value and (not names or 2 * len(set(names) & set(value)) >= len(names)):
            return f"The model's state dict is its entry {key!r}. Load state_dict[{key!r}]."
    given = [name for name in state if isinstance(name, str)]
    unexpected, missing = [name for name in given if name not in names], sorted(set(names) - set(given))
    if prefix := added_prefix(unexpected, missing):
        by = " (by DistributedDataParallel)" if prefix == "module." else ""
        return (
            f"Its names begin with {prefix!r}{by}, the model's do not. Load "
            f"{{name.removeprefix({prefix!r}): value for name, value in state_dict.items()}}."
        )
    if prefix := added_prefix(missing, unexpected):
        return (
            f"The model's names begin with {prefix!r}, its names do not. Load "
            f"{{{prefix!r} + name: value for name, value in state_dict.items()}}."
        )
    return ""


def added_prefix(names: Sequence[str], others: Collection[str]) -> str:
    """Return what most of ``names`` have in front of one of the ``others``, with a dot at its end, or an empty text."""
    heads = Counter(
        name[:at] for name in names for at in range(1, len(name)) if name[at - 1] == "." and name[at:] in others
    )
    return next((head for head, count in heads.most_common(1) if 2 * count >= len(others)), "")
