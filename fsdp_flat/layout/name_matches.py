"""Compares the names of two state dicts, for the text of an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher, get_close_matches

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


def added_prefix(names: Sequence[str], others: Collection[str]) -> str:
    """Return what most of ``names`` have in front of one of the ``others``, with a dot at its end, or an empty text."""
    heads = Counter(
        name[:at] for name in names for at in range(1, len(name)) if name[at - 1] == "." and name[at:] in others
    )
    return next((head for head, count in heads.most_common(1) if 2 * count >= len(others)), "")
