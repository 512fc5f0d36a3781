"""Reads an optimizer's parameter groups, and compares their settings between ranks: learning rates, for instance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import OptionTypeError, some_of
from fsdp_flat.layout import clean_fqn

# By name of a parameter, each setting of its group as a text; of objects the type alone.
Settings = dict[str, dict[str, str]]


def param_groups_of(optim: Any) -> Sequence[dict[str, Any]]:
    """Return the parameter groups of an optimizer; raise an OptionTypeError for what has none."""
    groups = getattr(optim, "param_groups", None)
    if not isinstance(groups, (list, tuple)):
        raise OptionTypeError(f"optim must be an optimizer, which has param_groups; got {type(optim).__name__}.")
    return groups


def group_settings(model: nn.Module, optim: Any) -> Settings:
    """Return the settings of each parameter: groups may be divided among ranks in other ways, so positions differ."""
    names = {param: clean_fqn(name) for name, param in model.named_parameters()}
    found: Settings = {}
    for group in param_groups_of(optim):
        texts = {key: _text(value) for key, value in group.items() if key not in ("params", "param_names")}
        found.update((names[param], texts) for param in group["params"] if param in names)
    return found


def _text(value: Any) -> str:
    def of_object(each: Any) -> Any:
        return each.tolist() if isinstance(each, torch.Tensor) else type(each).__name__

    return json.dumps(value, skipkeys=True, default=of_object)


def differing_settings(each: Sequence[Mapping[str, Mapping[str, str]]], ranks: Sequence[int]) -> str:
    """Tell which settings of :func:`group_settings` differ, with the values of the ranks that have them, or ``""``."""
    told: dict[str, list[str]] = {}
    for fqn in sorted(set().union(*each)):
        rows = [(rank, settings[fqn]) for rank, settings in zip(ranks, each, strict=True) if fqn in settings]
        for key in sorted(set().union(*(row for _, row in rows))):
            found = [(rank, row[key]) for rank, row in rows if key in row]
            if len({text for _, text in found}) > 1:
                values = some_of([f"{text} on rank {rank}" for rank, text in found], 8)
                told.setdefault(f"{key!r} is {values}", []).append(repr(fqn))
    return some_of([f"{what} (of {some_of(fqns, 2)})" for what, fqns in told.items()], 3, "; ")
