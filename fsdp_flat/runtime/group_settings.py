"""Compares the settings of an optimizer's parameter groups between ranks: learning rates, for instance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import OptionTypeError, some_of
from fsdp_flat.layout import clean_fqn


def group_settings(model: nn.Module, optim: Any) -> dict[str, str]:
    """Return each setting of each parameter as a text, by a text that names both; of objects the type alone.

    Groups may be divided among ranks in other ways, so their positions do not count.
    """
    if not isinstance(getattr(optim, "param_groups", None), (list, tuple)):
        raise OptionTypeError(f"optim must be an optimizer, which has param_groups; got {type(optim).__name__}.")
    names = {param: clean_fqn(name) for name, param in model.named_parameters()}
    found = {}
    for group in optim.param_groups:
        texts = {key: _text(value) for key, value in group.items() if key not in ("params", "param_names")}
        fqns = [names[param] for param in group["params"] if param in names]
        found.update({f"{key!r} of {fqn!r}": text for fqn in fqns for key, text in texts.items()})
    return found


def _text(value: Any) -> str:
    def of_object(each: Any) -> Any:
        return each.tolist() if isinstance(each, torch.Tensor) else type(each).__name__

    return json.dumps(value, skipkeys=True, default=of_object)


def differing_settings(each: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """Tell which settings of :func:`group_settings` differ, with the values of the ranks that have them, or ``""``."""
    told: dict[str, list[str]] = {}
    for name in sorted(set().union(*each)):
        found = [(rank, settings[name]) for rank, settings in zip(ranks, each, strict=True) if name in settings]
        if len({text for _, text in found}) > 1:
            setting, _, fqn = name.partition(" of ")
            values = some_of([f"{text} on rank {rank}" for rank, text in found], 8)
            told.setdefault(f"{setting} is {values}", []).append(fqn)
    return some_of([f"{what} (of {some_of(fqns, 2)})" for what, fqns in told.items()], 3, "; ")
