"""Manages the memory of flat buffers: unsharded parameters, waiting gradients, and the pool for both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_flat.errors import UsageError
from fsdp_flat.flat._torch import set_versions, swap_memory
from fsdp_flat.flat.sharded_grad import LocalNorm
from fsdp_flat.layout import FlatLayout

__all__ = [
    "EXPIRED",
    "AliasBuffer",
    "DtypeBuffer",
    "Expiry",
    "FlatBuffer",
    "FlatGradBuffer",
    "MemoryPool",
    "UnreducedGrad",
    "UnreducedLocalGrad",
    "set_grad",
]

_MOST_IDLE = 2


class MemoryPool:
    """Keeps a few freed blocks of CPU memory, so that the next buffer does not page-fault.

    The memory moves from one storage object to another: a view of a freed buffer, which autograd may hold, keeps an
    empty storage and never sees the data of another unit. Accelerators have caching allocators, so the pool keeps
    nothing for them, nor if torch cannot move memory between storages.
    """

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.UntypedStorage]] = {}

    @property
    def nbytes(self) -> int:
        """Number of bytes that the pool keeps."""
        return sum(nbytes * len(idle) for nbytes, idle in self._idle.items())

    def fill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate ``nbytes`` for an empty ``storage``; the content is undefined."""
        idle = self._idle.get(nbytes)
        if idle and storage.device.type == "cpu":
            swap_memory(storage, idle.pop())
        else:
            storage.resize_(nbytes)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of ``storage``."""
        nbytes = storage.nbytes()
        if nbytes == 0:
            return
        idle = self._idle.setdefault(nbytes, [])
        if swap_memory is None or storage.device.type != "cpu" or len(idle) >= _MOST_IDLE:
            storage.resize_(0)
            return
        kept = torch.UntypedStorage(0)
        swap_memory(kept, storage)
        idle.append(kept)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape, dtype and device of ``tensor`` and undefined content."""
        idle = self._idle.get(tensor.nbytes)
        if not idle or tensor.device.type != "cpu":
            return torch.empty_like(tensor)
        fresh = torch.empty(0, dtype=tensor.dtype)
        return fresh.set_(idle.pop(), 0, tensor.shape)  # type: ignore[call-overload]

    def clear(self) -> None:
        """Return all memory of the pool to the system."""
        self._idle.clear()


class FlatBuffer:
    """Holds a 1-D tensor whose memory can be freed and allocated again while views of it exist.

    Autograd saves views of unsharded parameters. The storage object therefore stays and is resized to zero; once the
    same values are all-gathered again, all saved views are valid. Views that are parameters have separate version
    counters, which a refill does not change.

    Args:
        numel: elements of the full buffer.
        dtype: compute dtype.
        device: compute device.
    """

    __slots__ = ("_nbytes", "tensor")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.tensor.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        """Number of bytes allocated."""
        return self.tensor.untyped_storage().nbytes()

    def alloc(self, pool: MemoryPool) -> None:
        """Allocate memory from ``pool`` unless it is allocated; the content is undefined."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() != self._nbytes:
            pool.fill(storage, self._nbytes)

    def free(self, pool: MemoryPool) -> None:
        """Return the memory to ``pool``."""
        pool.empty(self.tensor.untyped_storage())


class AliasBuffer(FlatBuffer):
    """Aliases the shard of a unit that is not sharded; never freed."""

    __slots__ = ()

    def __init__(self, shard: torch.Tensor) -> None:
        self.tensor = shard
        self._nbytes = shard.untyped_storage().nbytes()

    def alloc(self, pool: MemoryPool) -> None:
        pass

    def free(self, pool: MemoryPool) -> None:
        pass


EXPIRED = 10**9
"""Offset of the versions that autograd reports while a parameter is sharded; README's limits name the number."""


class Expiry:
    """Marks the unsharded parameters of one buffer as changed while the buffer does not hold their values.

    A backward unshards a unit when it reaches one of the outputs that were found. Autograd may reach a tensor that a
    module stored elsewhere earlier, and its graph uses the parameters too: it would read freed memory, or memory that
    an all-gather still writes to. Autograd compares versions whenever it unpacks a saved tensor and raises if they
    differ, so another version in between costs nothing where it is read.

    Args:
        unsharded_params: the parameters that modules see; each has a version counter of its own.
    """

    __slots__ = ("_params", "_versions")

    def __init__(self, unsharded_params: Sequence[torch.Tensor]) -> None:
        self._params = tuple(unsharded_params)
        self._versions: tuple[int, ...] | None = None

    def expire(self) -> None:
        """Have autograd refuse what it saved of the parameters from now on."""
        if self._versions is None and self._params:
            self._versions = tuple([unsharded_param._version for unsharded_param in self._params])
            set_versions(self._params, tuple([version + EXPIRED for version in self._versions]))

    def renew(self) -> None:
        """Have autograd accept it again: the parameters have their values."""
        if self._versions is not None:
            set_versions(self._params, self._versions)
            self._versions = None


@dataclass(frozen=True, slots=True)
class DtypeBuffer:
    """Groups an unsharded buffer of one compute dtype, this rank's slice and the parameters that view it."""

    buffer: FlatBuffer
    own_slice: torch.Tensor
    unsharded_params: tuple[nn.Parameter, ...]
    expiry: Expiry


class FlatGradBuffer:
    """Collects the gradients of parameters, and copies them into a flat buffer at once when closed.

    It is closed after the parameters were freed, so that the buffer can reuse their memory. Later gradients are added
    to the buffer.

    Args:
        layout: the handle's layout.
        dtype: dtype of the buffer.
        device: device of the gradients.

    Attributes:
        grads_ready: one byte per parameter: 1 where it has a gradient.
        num_grads_ready: number of parameters with a gradient.
        is_exposed: a caller has views of the buffer, so its memory must not be reused.
    """

    __slots__ = ("_buffer", "_paddings", "_places", "_waiting", "grads_ready", "is_exposed", "num_grads_ready")

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = FlatBuffer(layout.numel, dtype, device)
        flat = self._buffer.tensor
        self._places = [
            flat[param_info.interval.to_slice()].view(param_info.shape) for param_info in layout.param_infos
        ]
        self._paddings = [flat[interval.to_slice()] for interval in layout.paddings()]
        self._waiting: dict[int, torch.Tensor] = {}
        self.grads_ready = bytearray(len(layout.param_infos))
        self.num_grads_ready = 0
        self.is_exposed = False
        self._buffer.free(MemoryPool())

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the buffer has this dtype and device."""
        return self._buffer.tensor.dtype == dtype and self._buffer.tensor.device == device

    @property
    def nbytes(self) -> int:
        """Number of bytes of the waiting gradients and of the buffer."""
        return self._buffer.nbytes + sum(grad.nbytes for grad in self._waiting.values())

    def add_grad(self, index: int, grad: torch.Tensor) -> None:
        """Add the gradient of parameter ``index`` (the parameter's shape, any float dtype)."""
        if grad.is_sparse:
            grad = grad.to_dense()
        if not self.grads_ready[index]:
            self.grads_ready[index] = 1
            self.num_grads_ready += 1
            self._waiting[index] = grad
        elif index in self._waiting:
            self._waiting[index] = torch.add(self._waiting[index].to(self._buffer.tensor.dtype), grad)
        else:
            self._places[index].add_(grad)

    def forget(self, index: int) -> None:
        """Drop the gradient of parameter ``index``."""
        if self.grads_ready[index]:
            self.grads_ready[index] = 0
            self.num_grads_ready -= 1
            if self._waiting.pop(index, None) is None and self._buffer.nbytes:
                self._places[index].zero_()

    def close(self, pool: MemoryPool) -> torch.Tensor:
        """Return the complete flat gradient: zero in the padding and for parameters without a gradient."""
        if self._buffer.nbytes == 0:
            self._buffer.alloc(pool)
            for padding in self._paddings:
                padding.zero_()
            for place, there in zip(self._places, self.grads_ready, strict=True):
                if not there:
                    place.zero_()
        if self._waiting:
            torch._foreach_copy_([self._places[index] for index in self._waiting], list(self._waiting.values()))
            self._waiting.clear()
        return self._buffer.tensor

    def release(self, pool: MemoryPool) -> None:
        """Drop all gradients and return the memory to ``pool``; no views of the buffer may be in use."""
        self._buffer.free(pool)
        self.grads_ready = bytearray(len(self._places))
        self.num_grads_ready = 0


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``param.grad``, which may have a different dtype than ``param`` (``keep_low_precision_grads``)."""
    if grad is None or grad.dtype == param.dtype:
        param.grad = grad
        return
    # torch rejects a gradient of another dtype unless it is assigned through ``.data``.
    shown = torch.empty_like(param).as_subclass(type(grad))
    shown.__dict__.update(grad.__dict__)
    param.grad = shown
    with torch._C.DisableTorchFunctionSubclass():
        shown.data = grad


class UnreducedGrad(torch.Tensor):
    """Marks a ``.grad`` between two backwards inside ``no_sync``: local to this rank, not yet reduced.

    Reading it works as for any tensor. Writing it, or a tensor computed from it, into another tensor raises: an
    optimizer's (or gradient scaler's) step does this, and would use one rank's gradient.
    """

    _describe: Callable[[], str]

    @classmethod
    def of(cls, grad: torch.Tensor, describe: Callable[[], str]) -> UnreducedGrad:
        """Return an alias of ``grad``; ``describe`` returns the parameter's name for error texts."""
        _forbid_steps()
        unreduced = grad.as_subclass(cls)
        unreduced._describe = describe
        return unreduced

    def _part(self) -> str:
        return f"The gradient of {self._describe()} is this rank's own, not reduced yet (no_sync)"

    def refuse(self, operation: str) -> NoReturn:
        """Raise for an operation that would use this rank's unreduced gradient."""
        raise UsageError(
            f"{operation} was called on the gradient of {self._describe()}, which is not reduced: the backwards since "
            "the last step, or the last ones, were inside no_sync, so it is this rank's own. Run the last backward of "
            "an accumulation outside of no_sync, then step."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        describe = _first_unreduced(args, kwargs)._describe
        if name.endswith("_") and not name.startswith("__"):
            target = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            if not isinstance(target, cls):
                _first_unreduced(args, kwargs).refuse(name)
        with torch._C.DisableTorchFunctionSubclass():
            result = LocalNorm.mark(func, args, func(*args, **(kwargs or {})))
        if isinstance(result, torch.Tensor):
            return _marked(result, describe)
        return [_marked(item, describe) for item in result] if name.startswith("_foreach") and result else result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.clone().as_subclass(torch.Tensor)


@functools.cache
def _forbid_steps() -> None:
    """Make every optimizer's step raise before it writes anything if a gradient is not reduced.

    torch's hook for this covers all optimizers of the process; it is registered with the first such gradient.
    """
    register_optimizer_step_pre_hook(_refuse_unreduced)


def _refuse_unreduced(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for param in group["params"]:
                if isinstance(param.grad, UnreducedGrad):
                    param.grad.refuse(type(optimizer).__name__ + ".step")


def _marked(result: torch.Tensor, describe: Callable[[], str]) -> torch.Tensor:
    """Mark a result computed from an unreduced gradient; scalars, such as norms, stay as they are."""
    is_plain = result.dim() == 0 or isinstance(result, UnreducedGrad)
    return result if is_plain else UnreducedGrad.of(result, describe)


def _first_unreduced(args: Any, kwargs: Any) -> UnreducedGrad:
    given = [*args, *(kwargs or {}).values()]
    flat = [item for arg in given for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return next(item for item in flat if isinstance(item, UnreducedGrad))


class UnreducedLocalGrad:
    """Sets the ``.grad`` of a parameter between two backwards inside ``no_sync``, and restores it afterwards.

    Args:
        param: the parameter that the optimizer holds.
        local_shard: this rank's shard of the waiting gradient, in the parameter's shape.
        describe: returns the parameter's name for error texts.
        param_infos: indices of the layout's parameters that ``param`` holds elements of.
    """

    __slots__ = ("_before", "_grad", "_param", "_version", "param_infos")

    def __init__(
        self, param: nn.Parameter, local_shard: torch.Tensor, describe: Callable[[], str], param_infos: Sequence[int]
    ) -> None:
        self.param_infos = param_infos
        self._param = param
        self._before = param.grad
        # An existing gradient is reduced, but a step must wait until the local gradient that adds to it is reduced.
        shown = local_shard.to(param.dtype) if self._before is None else self._before
        set_grad(param, UnreducedGrad.of(shown, describe))
        assert param.grad is not None
        self._grad = param.grad
        self._version = self._grad._version

    @property
    def is_cleared(self) -> bool:
        """Return whether a caller has set the gradient to None or zero since it was shown."""
        grad = self._param.grad
        return grad is None or (self._changed_in_place and not bool(grad.count_nonzero()))

    @property
    def is_changed(self) -> bool:
        """Return whether a caller has written into the gradient since it was shown."""
        return self._before is None and self._changed_in_place

    @property
    def _changed_in_place(self) -> bool:
        return self._param.grad is self._grad and self._grad._version != self._version

    def take_back(self) -> None:
        """Restore the previous ``.grad``; a gradient that was filled with zeros stays zero, as in plain torch."""
        if self._param.grad is self._grad:
            zeroed = self._before is None and self._param.numel() > 0 and self.is_cleared
            set_grad(self._param, torch.zeros_like(self._param) if zeroed else self._before)
