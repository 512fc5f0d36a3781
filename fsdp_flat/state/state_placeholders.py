"""Stands in for the parameters of modules, of which each rank has a part, while these and their hooks save or load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.overrides import is_tensor_like
from torch.utils._pytree import tree_map_only

from fsdp_flat.core import METADATA, Placeholder, creates, unguarded, without_data
from fsdp_flat.errors import UsageError


class StatePlaceholder(Placeholder):
    """Stands in for a parameter, or for a sharded value of a state dict, that no rank has whole.

    It has the shape, dtype and device of the full tensor and no data. Modules and hooks may rename, detach, copy and
    delete it, look at its attributes, and create other tensors like it. An operation that needs its values works with
    the full tensor that a load has copied into it; without one it raises that of ``refusal``.

    Attributes:
        value: in a load what was copied into it, in a save what takes its place in the state dict; else None.
        refusal: returns the error of an operation that needs its values. None on ranks that keep none: there operations
            work with zeros, and their results are placeholders too.
    """

    # Modules and hooks that look for parameters find it.
    _is_param = True

    value: Any
    refusal: Callable[[], Exception] | None
    _is_own: bool

    @staticmethod
    def of(
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        value: Any = None,
        refusal: Callable[[], Exception] | None = None,
        trains: Callable[[], bool] = lambda: False,
    ) -> StatePlaceholder:
        """Create one; see the attributes of the class. ``trains`` returns whether the parameter requires gradients."""
        made: StatePlaceholder = without_data(StatePlaceholder, shape, dtype=dtype, device=device)
        made.value, made.refusal, made._trains, made._is_own = value, refusal, trains, False
        return made

    def accept(self, source: Any) -> None:
        """Take ``source`` in place of the full tensor, without a copy."""
        if isinstance(source, StatePlaceholder) and source is not self:
            source = source._full() if source.value is None else source.value
        if source is not self:
            self.value, self._is_own = source, False

    def module_load(self, other: Any, assign: bool = False) -> Any:
        """Return the tensor that torch swaps with this one (``set_swap_module_params_on_conversion``)."""
        made = StatePlaceholder.of(self.shape, self.dtype, self.device, refusal=self.refusal, trains=self._trains)
        if other is not self:
            made.accept(other.detach())
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"A tensor of shape {tuple(self.shape)} is inside another value of a sharded state dict, where only "
            "entries by themselves are sharded. Take a FULL_STATE_DICT of a module that saves containers of tensors."
        )

    def _full(self) -> torch.Tensor:
        """Return the full tensor for an operation, of its own memory: the given one is the caller's."""
        if self._is_own:
            return self.value
        if _is_opaque(self.value):
            raise UsageError(
                f"A load hook computes with a {type(self.value).__name__} of shape {tuple(self.shape)}, of which each "
                "rank has a part. Load a FULL_STATE_DICT into a module that converts values when it loads."
            )
        if self.value is not None and self.value.shape != self.shape:
            raise UsageError(
                f"A load hook computes with a tensor of shape {tuple(self.value.shape)} in place of a parameter of "
                f"shape {tuple(self.shape)}. Give the state dict's value the parameter's shape."
            )
        if self.value is None and self.refusal is not None:
            raise self.refusal()
        full = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self.value is not None:
            self.value, self._is_own = full.copy_(self.value), True
        return full

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, name = args[0] if args else None, getattr(func, "__name__", "")
        if isinstance(own, StatePlaceholder):
            # Getters and setters of attributes are bound to the attribute, which has the name.
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "__get__" and attribute == "requires_grad":
                return own._trains()
            if name == "copy_" or (name == "__set__" and attribute == "data"):
                own.accept(args[1])
            # A save or a load does not change which parameters train.
            if name in _SAME or name == "__set__" or attribute == "data" or own._is_same(name, args, kwargs or {}):
                return own
            if name in METADATA:
                with unguarded():
                    found = func(*args, **(kwargs or {}))
                if not isinstance(found, torch.Tensor):
                    return found
        return _computed(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # For operations that do not come by __torch_function__.
        return _computed(func, args, kwargs or {})

    def _is_same(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether an operation returns the values of the parameter, of which this rank has a part.

        A load converts what it copies, so those of a sharded value may be given another dtype.
        """
        if not (_is_opaque(self.value) or (self.value is None and self.refusal is not None)):
            return False
        given = [*args[1:], *kwargs.values()]
        if name in ("view", "reshape", "view_as"):
            sizes = given[0] if isinstance(given[0], (tuple, list)) else given
            return (given[0].shape if name == "view_as" else torch.Size(sizes)) == self.shape
        dtypes = [each.dtype if isinstance(each, torch.Tensor) else each for each in given]
        dtypes = [_DTYPES[name]] if name in _DTYPES else [each for each in dtypes if isinstance(each, torch.dtype)]
        if self.value is None and (name == "type" or any(dtype is not self.dtype for dtype in dtypes)):
            return False
        return name in _COPIES or name in _CONVERSIONS


_SAME = frozenset({"detach", "requires_grad_", "copy_"})
# Operations that copy their tensor, and that return it in another dtype unless it has that, or on another device.
_COPIES = frozenset({"clone", "contiguous", "cpu", "cuda", "__deepcopy__"})
_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_CONVERSIONS = frozenset({"to", "type", "type_as", *_DTYPES})


def _is_opaque(value: Any) -> bool:
    return isinstance(value, ShardedTensor) or (value is not None and not is_tensor_like(value))


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on full tensors."""
    first, name, keeps_none = args[0] if args else None, getattr(func, "__name__", ""), False

    def operand(own: StatePlaceholder) -> torch.Tensor:
        nonlocal keeps_none
        keeps_none = keeps_none or (own.refusal is None and own.value is None)
        converts_other = name in ("to", "type_as") and own is not first
        return own._like() if creates(name) or converts_other else own._full()

    args, kwargs = tree_map_only(StatePlaceholder, operand, (args, kwargs))
    with torch.no_grad():
        result = func(*args, **kwargs)
    if isinstance(first, StatePlaceholder) and result is first.value:
        return first
    if not keeps_none:
        return result
    return tree_map_only(torch.Tensor, lambda each: StatePlaceholder.of(each.shape, each.dtype, each.device), result)
