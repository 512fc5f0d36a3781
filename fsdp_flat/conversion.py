"""Converts and copies a wrapped model between its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from fsdp_flat.errors import OptionTypeError
from fsdp_flat.runtime import Phase, Schedule, check_idle, copy_unit, register_forward_method
from fsdp_flat.semi_private import describe_flat_params, forget_tensors
from fsdp_flat.semi_private_methods import SemiPrivateMethods

__all__ = ["ConversionMethods"]


class ConversionMethods(SemiPrivateMethods):
    """Provides the wrapper's methods for conversions and copies; the wrapper class inherits them."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ConversionMethods:
        """Convert the shards instead of the visible parameters (``.to``, ``.float``, ``.cuda``, ``share_memory``)."""
        unit = self._unit
        if isinstance(unit.context, Schedule):
            unit.context.recover()  # a backward that raised is over
        if unit.phase is not Phase.IDLE:
            if any(handle.is_changed_by(fn) for handle in unit.handles):
                check_idle(unit, "A conversion (.to, .float, .cuda, ...)")
            return self
        unit.reshard()
        for handle in unit.handles:
            handle.views.remove()
        try:
            super()._apply(fn, recurse)
        finally:
            for handle in unit.handles:
                handle.views.use_sharded_views()
        for handle in unit.handles:
            handle.convert(fn)
        forget_tensors(unit)
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> ConversionMethods:
        """Return an independent wrapped model on copies of the shards (``copy.deepcopy(model)``).

        Nothing is communicated, but every rank must copy if the copy is to run. Process groups are shared; gradients,
        and hooks on parameters, are not copied, as for a plain model. Copy a model and its optimizer in one call,
        ``copy.deepcopy((model, optimizer))``, to get an optimizer of the copy.

        Raises:
            PhaseError: inside forward, backward or ``summon_full_params``.
            UsageError: this wrapper's modules share a parameter with an outer one.
        """
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        unit = self._unit
        copied = copy_unit(unit, memo)
        remade = {"_unit", "_handle_names", *unit.forward_methods}
        for name, value in self.__dict__.items():
            if name not in remade:
                twin.__dict__[name] = copy.deepcopy(value, memo)
        twin.__dict__["_unit"] = copied
        describe_flat_params(copied)
        for method in unit.forward_methods:
            register_forward_method(twin, method)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled (``torch.save(model)``, ``copy.copy``): this process holds one rank's shard only.

        Raises:
            OptionTypeError: (a TypeError) always.
        """
        raise OptionTypeError(
            "A wrapped model cannot be pickled, since each rank holds a part of it. Save model.state_dict(), take a "
            "copy with copy.deepcopy(model), or get the plain module back with fsdp_flat.unwrap(model)."
        )
