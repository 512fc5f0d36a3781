"""Compares the names of two state dicts, for the text of an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from fsdp_flat.errors import LoadError, OptionError, OptionTypeError, counted, some_of


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


def names_unlike(call: str, missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """Tell how the names in files differ from a model's, and which arguments of ``call`` load them all the same."""
    lacking, given = set(missing), set(unexpected)
    pairs: dict[str, str] = {}
    found = []
    if prefix := added_prefix(unexpected, lacking):
        pairs, advice = {name: prefix + name for name in missing if prefix + name in given}, f"prefix={prefix!r}"
    elif prefix := added_prefix(missing, given):
        pairs = {prefix + name: name for name in unexpected if prefix + name in lacking}
        advice = f"rename=lambda name: {prefix!r} + name"
    if pairs:
        found.append(f"{call}(..., {advice}) would find {counted(len(pairs), 'names')} missing now")
    mapped = set(pairs.values())
    found += misfits([n for n in missing if n not in pairs], [n for n in unexpected if n not in mapped])
    if found and not pairs:
        found.append(f"{call}(..., strict=False) loads what fits, and rename= maps names")
    return found


def renamed(names: Mapping[str, str], prefix: str, rename: Callable[[str], str | None] | None) -> dict[str, str]:
    """Map names in files to names of a model, which begin after ``prefix``; None of ``rename`` leaves one out.

    Args:
        names: by name in the files, that under which a tensor is stored there.
        prefix: with which a name has to begin.
        rename: returns the model's name.

    Raises:
        OptionTypeError: an argument of the wrong type.
        OptionError: two tensors get one name, or the prefix lacks its dot.
        LoadError: no name begins with the prefix.
    """
    if not isinstance(prefix, str) or not (rename is None or callable(rename)):
        raise OptionTypeError(
            f"prefix must be a str, and rename a function of a name, or None; got {prefix!r} and {rename!r}."
        )
    found: dict[str, str] = {}
    begin = [name for name in names if name.startswith(prefix)]
    if names and not begin:
        raise LoadError(f"No name begins with prefix={prefix!r}: there are {some_of(list(map(repr, names)), 3)}.")
    for name in begin:
        new: str | None = name.removeprefix(prefix)
        if rename is None and prefix and new is not None and new.startswith("."):
            raise OptionError(f"prefix={prefix!r} leaves {new!r} of the name {name!r}; pass prefix={prefix + '.'!r}.")
        if rename is not None:
            new = rename(new or "")
        if new is not None and found.setdefault(new, names[name]) != names[name]:
            raise OptionError(f"rename gives the name {new!r} to {found[new]!r} and to {names[name]!r} of the file.")
    return found


EMPTY = (
    "The state dict is empty, as rank0_only=True leaves it on all ranks but the first. Give every rank the full one: "
    "save it with rank0_only=False, read it from a file, or use fsdp_flat.load_full, which reads each rank's part."
)


def advice_on(state: Mapping[Any, Any], names: Collection[str]) -> str:
    """Return what to load instead of a state dict that is another one than a model's; empty if it is none known.

    Args:
        state: what was given as the state dict of a model.
        names: names of the model's parameters; none if any names will do.
    """
    if not state:
        return EMPTY
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
