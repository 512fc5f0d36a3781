"""Shows full tensors to modules and their state-dict hooks before this rank has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.overrides import is_tensor_like

from fsdp_flat.errors import UsageError
from fsdp_flat.flat import first_of, unguarded, without_data


class DeferredTensor(torch.Tensor):
    """Takes the place of a parameter, or of a sharded value, while modules and their hooks save or load.

    It has the shape, dtype and device of the full tensor, but no data. Hooks may rename, copy and delete it as they do
    with any tensor, and create others like it. Any other operation calls ``read`` for the full tensor, the first time,
    and works with that. Without ``read``, on ranks whose state dict has no such values, it works with zeros, and the
    result is deferred too.

    Attributes:
        given: the tensor that was copied into it last, as it is: in a load, the value of the state dict.
        value: its value in the state dict that is made; None if it has none there. A copy has that of its origin.
    """

    # Modules and hooks that look for parameters find it.
    _is_param = True

    given: Any
    value: Any
    _copied: DeferredTensor | None
    _read: Callable[[], torch.Tensor] | None
    _trains: Callable[[], bool]
    _shape: torch.Size
    _is_meta: bool
    _full: torch.Tensor | None
    _version_read: int

    @staticmethod
    def of(
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        trains: Callable[[], bool] = lambda: False,
        read: Callable[[], torch.Tensor] | None = None,
        given: Any = None,
    ) -> DeferredTensor:
        """Create a tensor whose full one is ``given``, or ``read`` returns it; ``trains`` returns ``requires_grad``."""
        made: DeferredTensor = without_data(DeferredTensor, shape, dtype=dtype, device=device)
        made._shape, made._is_meta = torch.Size(shape), device.type == "meta"
        made._read, made._trains = read, trains
        made.given, made.value, made._copied, made._full = given, None, None, None
        return made

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape of the full tensor."""
        return self._shape

    @property  # type: ignore[override]
    def data(self) -> DeferredTensor:
        """This tensor; a tensor that is assigned takes its place."""
        return self

    @data.setter
    def data(self, source: Any) -> None:
        self._take(source)

    @property
    def requires_grad(self) -> bool:
        """Return whether the parameter requires gradients; ignore assignments."""
        return self._trains()

    @requires_grad.setter
    def requires_grad(self, _value: bool) -> None:
        pass

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Return whether the full tensor has no data."""
        return self._is_meta

    def detach(self) -> DeferredTensor:
        """Return this tensor, which autograd does not see."""
        return self

    def clone(self, **_memory_format: Any) -> torch.Tensor:
        """Return a deferred copy of the values that it has now."""
        if self._full is not None:
            return _computed(torch.clone, (self,), {})
        read, trains = self._read, self._trains
        copied = DeferredTensor.of(self.shape, self.dtype, self.device, trains=trains, read=read, given=self.given)
        copied._copied = self.origin
        return copied

    def requires_grad_(self, requires_grad: bool = True) -> DeferredTensor:
        """Return this tensor: a save or a load does not change which parameters train."""
        return self

    def copy_(self, source: Any, non_blocking: bool = False) -> DeferredTensor:
        """Take ``source`` in place of the full tensor, without a copy."""
        self._take(source)
        return self

    def module_load(self, other: Any, assign: bool = False) -> Any:
        """Return the tensor that torch swaps with this one (``set_swap_module_params_on_conversion``)."""
        if not isinstance(other, DeferredTensor):
            return other.detach()
        given, device = other.taken(), self.device
        return DeferredTensor.of(self.shape, self.dtype, device, trains=self._trains, read=self._read, given=given)

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @property
    def origin(self) -> DeferredTensor:
        """The tensor that it is a copy of; itself if it is none."""
        return self if self._copied is None else self._copied

    def taken(self) -> Any:
        """Return the tensor that was copied into it, or its full tensor if an operation has changed it; else None."""
        if self._full is not None and (self.given is not None or self._full._version != self._version_read):
            return self._full
        return self.given

    def _take(self, source: Any) -> None:
        if source is self:
            return
        if isinstance(source, DeferredTensor):
            taken = source.taken()
            if taken is None and source.origin is not self.origin:
                taken = source._operand()
            source = taken  # None: the values that it has had all along
        self.given, self._full = source, None

    def _operand(self) -> torch.Tensor:
        """Return the full tensor for an operation, of its own memory: the given one is the caller's."""
        if self._full is None:
            if _is_opaque(self.given):
                raise UsageError(
                    f"A load hook computes with a {type(self.given).__name__} of shape {tuple(self.shape)}, of which "
                    "each rank has a part. Load a FULL_STATE_DICT into a module that converts values when it loads."
                )
            if self._read is not None and self.given is None:
                self._full = self._read()
            else:
                self._full = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            if self.given is not None:
                if self.given.shape != self.shape:
                    raise UsageError(
                        f"A load hook computes with a tensor of shape {tuple(self.given.shape)} in place of a "
                        f"parameter of shape {tuple(self.shape)}. Give the state dict's value the parameter's shape."
                    )
                self._full.copy_(self.given)
            self._version_read = self._full._version
        return self._full

    def _like(self) -> torch.Tensor:
        """Return a tensor without meaningful values for an operation that needs the shape, dtype and device only."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, name, kwargs = args[0] if args else None, getattr(func, "__name__", ""), kwargs or {}
        # Getters and setters of attributes are bound to the attribute, which has the name.
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else name
        if isinstance(own, DeferredTensor):
            if _is_opaque(own.given) and _keeps_values(own, attribute, args):
                return own
            if attribute in _OWN:
                # ``torch.detach(tensor)``, as ``tensor.detach()``.
                return getattr(own, attribute)(*args[1:], **kwargs)
            if name == "__get__" or name in _OF_SHAPES:
                with unguarded():
                    found = func(*args, **kwargs)
                if not isinstance(found, torch.Tensor):
                    return found
        return _computed(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # For operations that do not come by __torch_function__.
        return _computed(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"A tensor of shape {tuple(self.shape)} is inside another value of a sharded state dict, where only "
            "entries by themselves are sharded. Take a FULL_STATE_DICT of a module that saves containers of tensors."
        )


_OWN = frozenset({"__format__", "__repr__", "clone", "detach", "copy_", "module_load", "requires_grad_"})
_OF_SHAPES = frozenset(
    {"size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex", "stride"}
    | {"__len__", "__hash__", "is_contiguous"}
)


# Operations that return the values of their tensor in another dtype, or on another device; a load converts both.
_CONVERSIONS = frozenset(
    {"contiguous", "clone", "cpu", "cuda", "to", "type", "float", "double", "half", "bfloat16", "type_as"}
)


def _keeps_values(own: DeferredTensor, name: str, args: Any) -> bool:
    """Return whether an operation returns the values of a sharded value, in the same shape."""
    if name in ("view", "reshape"):
        return torch.Size(args[1] if isinstance(args[1], (tuple, list)) else args[1:]) == own.shape
    return name in _CONVERSIONS or (name == "view_as" and args[1].shape == own.shape)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on full tensors."""
    own, name = args[0] if args else None, getattr(func, "__name__", "")
    creates = name.endswith("_like") or name.startswith("new_")
    converts_other = name in ("to", "type_as") and not isinstance(own, DeferredTensor)
    operand = DeferredTensor._like if creates or converts_other else DeferredTensor._operand
    with torch.no_grad():
        result = func(*_replaced(args, operand), **_replaced(kwargs, operand))
    if isinstance(own, DeferredTensor) and result is own._full:
        return own
    first = first_of(DeferredTensor, args, kwargs)
    return _without_values(result) if first is not None and first._read is None else result


def _without_values(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return DeferredTensor.of(tuple(result.shape), result.dtype, result.device)
    return type(result)([_without_values(each) for each in result]) if isinstance(result, (list, tuple)) else result


def _is_opaque(value: Any) -> bool:
    return isinstance(value, ShardedTensor) or (value is not None and not is_tensor_like(value))


def _replaced(args: Any, operand: Callable[[DeferredTensor], torch.Tensor]) -> Any:
    if isinstance(args, DeferredTensor):
        return operand(args)
    if type(args) in (list, tuple):
        return type(args)(_replaced(each, operand) for each in args)
    return {name: _replaced(each, operand) for name, each in args.items()} if type(args) is dict else args
