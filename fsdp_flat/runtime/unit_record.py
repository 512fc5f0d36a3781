"""Holds what is known of a unit around its steps, by what builds, shows and unwraps it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_flat.core import ParamGroup, Unit


class FullParams(NamedTuple):
    """Holds the full parameters of a unit, in other memory than its buffers.

    Attributes:
        tensors: the unsharded flat tensor of each parameter group, 1-D, ``layout.numel`` elements in the original
            dtype.
        are_shown: the modules hold Parameters that are views of ``tensors``.
    """

    tensors: dict[ParamGroup, torch.Tensor]
    are_shown: bool


@dataclass(eq=False, slots=True)
class UnitRecord:
    """Holds what no step of a unit needs.

    Attributes:
        is_nested: the unit's module was in another unit's when that was built.
        undo: objects whose ``remove()`` undoes a change that wrapping made to modules, other than to parameters.
        unwritten: tensors that were moved from the meta device, without values; None if no rank had meta tensors.
        outer: the outermost model in which a walk over modules has found the unit's module; None until then.
        path_from_outer: the path of the module there.
        full: the full parameters, inside ``full_params`` and ``summon_full_params``; else None.
    """

    is_nested: bool = False
    undo: list[Any] = field(default_factory=list)
    unwritten: list[Any] | None = None
    outer: weakref.ref[nn.Module] | None = None
    path_from_outer: str = ""
    full: FullParams | None = None


def unit_record(unit: Unit) -> UnitRecord:
    """Return the record of a unit."""
    return unit.attached(UnitRecord)
