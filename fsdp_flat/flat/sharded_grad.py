"""Marks gradients that are sharded or not reduced, so that one rank's part is not mistaken for the full gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_flat.errors import UsageError

# ``torch.nn.utils.get_total_norm`` computes the norm of each gradient with one of these.
_NORMS = frozenset({"linalg_vector_norm", "_foreach_norm"})
_unguarded = torch._C.DisableTorchFunctionSubclass


class ShardedGrad(torch.Tensor):
    """Aliases this rank's shard of a gradient where ``.grad`` is read outside of an optimizer's step.

    Every operation works as on any tensor and returns plain tensors, except the norms that
    ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` compute: see :class:`LocalNorm`. The stored gradient
    stays a plain tensor, so a step costs the same and can be compiled.

    Attributes:
        stored: the gradient itself.
    """

    _part: Callable[[], str]
    stored: torch.Tensor

    @classmethod
    def of(cls, grad: torch.Tensor | None, describe: Callable[[], str]) -> torch.Tensor | None:
        """Return an alias of ``grad``; ``describe`` returns a sentence about it for error texts."""
        # Other classes do their own wrapping: fake tensors, unreduced gradients.
        if type(grad) is not torch.Tensor or torch.compiler.is_compiling():
            return grad
        alias = grad.as_subclass(cls)
        alias._part, alias.stored = describe, grad
        return alias

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = tuple(kind for kind in types if kind is not ShardedGrad)
        if others:
            return others[0].__torch_function__(func, others, args, kwargs or {})
        with _unguarded():
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "__set__":
                func(args[0].stored, *args[1:])  # ``.data =`` on the alias does not change the stored gradient
            return LocalNorm.mark(func, args, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with _unguarded():
            return self.stored.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _unguarded():
            return self.stored.__reduce_ex__(protocol)


class LocalNorm(torch.Tensor):
    """Holds the norm of one rank's shard of a gradient, or several such norms stacked.

    It can be read like any tensor. The norm of stacked norms raises: it is the last step of
    ``torch.nn.utils.get_total_norm``, whose result would differ between ranks.
    """

    _part: Callable[[], str]

    @staticmethod
    def mark(func: Any, args: Any, result: Any) -> Any:
        """Return ``result`` of ``func(*args)``, with norms of sharded gradients as :class:`LocalNorm`.

        Call it with torch functions disabled. ``args[0]`` is a gradient or a list of gradients; sharded ones have
        ``_part``, which describes them.
        """
        if getattr(func, "__name__", "") not in _NORMS or not args:
            return result
        given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        norms = result if isinstance(result, (list, tuple)) else [result]
        marked = [_marked(norm, getattr(grad, "_part", None)) for norm, grad in zip(norms, given, strict=False)]
        return marked if isinstance(result, (list, tuple)) else marked[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = tuple(kind for kind in types if kind not in (LocalNorm, ShardedGrad))
        if others:
            return others[0].__torch_function__(func, others, args, kwargs or {})
        name = getattr(func, "__name__", "")
        with _unguarded():
            if name in _NORMS and isinstance(args[0], LocalNorm) and args[0].dim() == 1:
                args[0].refuse()
            result = func(*args, **(kwargs or {}))
            if name not in ("to", "stack"):
                return result
            stacked = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            return _marked(result, next((norm._part for norm in stacked if isinstance(norm, LocalNorm)), None))

    def refuse(self) -> None:
        """Raise for a norm over sharded gradients."""
        raise UsageError(
            f"The norm over several gradients was taken on one rank, as torch.nn.utils.clip_grad_norm_ and "
            f"get_total_norm do. {self._part()}, so the result would differ between ranks. Call "
            "model.clip_grad_norm_(max_norm) of the outermost FullyShardedDataParallel on every rank; it returns the "
            "norm over all ranks, and with max_norm=inf it changes nothing. For sums of your own, take norms of "
            "grad.detach() and all-reduce them."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _unguarded():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _marked(norm: torch.Tensor, describe: Callable[[], str] | None) -> torch.Tensor:
    if describe is None or type(norm) is not torch.Tensor:
        return norm
    marked = norm.as_subclass(LocalNorm)
    marked._part = describe
    return marked


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
        describe = first_of(cls, args, kwargs)._describe
        if name.endswith("_") and not name.startswith("__"):
            target = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            if not isinstance(target, cls):
                first_of(cls, args, kwargs).refuse(name)
        with _unguarded():
            result = LocalNorm.mark(func, args, func(*args, **(kwargs or {})))
        if isinstance(result, torch.Tensor):
            return _marked_unreduced(result, describe)
        return (
            [_marked_unreduced(item, describe) for item in result] if name.startswith("_foreach") and result else result
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with _unguarded():
            return self.clone().as_subclass(torch.Tensor)


@functools.cache
def _forbid_steps() -> None:
    """Make every optimizer's step raise before it writes anything if a gradient is not reduced.

    torch's hook for this covers all optimizers of the process; it is registered with the first such gradient.
    """
    register_optimizer_step_pre_hook(_refuse_unreduced)


def _refuse_unreduced(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with _unguarded():
        for group in optimizer.param_groups:
            for param in group["params"]:
                if isinstance(param.grad, UnreducedGrad):
                    param.grad.refuse(type(optimizer).__name__ + ".step")


def _marked_unreduced(result: torch.Tensor, describe: Callable[[], str]) -> torch.Tensor:
    """Mark a result computed from an unreduced gradient; scalars, such as norms, stay as they are."""
    is_plain = result.dim() == 0 or isinstance(result, UnreducedGrad)
    return result if is_plain else UnreducedGrad.of(result, describe)


def first_of(kind: type[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """Return the first argument of a class among the arguments of an operation, and in lists; None if there is none."""
    if args and isinstance(args[0], kind):
        return args[0]
    given = [*args, *(kwargs or {}).values()]
    flat = [item for arg in given for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return next((item for item in flat if isinstance(item, kind)), None)


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``param.grad``, which may have a different dtype than ``param`` (``keep_low_precision_grads``)."""
    if grad is None or grad.dtype == param.dtype:
        param.grad = grad
        return
    # torch rejects a gradient of another dtype unless it is assigned through ``.data``.
    shown = torch.empty_like(param).as_subclass(type(grad))
    shown.__dict__.update(grad.__dict__)
    param.grad = shown
    with _unguarded():
        shown.data = grad


class UnreducedLocalGrad:
    """Sets the ``.grad`` of a parameter between two backwards inside ``no_sync``, and restores it afterwards.

    Args:
        param: the parameter that the optimizer holds.
        local_shard: this rank's shard of the waiting gradient, in the parameter's shape.
        describe: returns the parameter's name for error texts.
        indices: the layout's parameters that ``param`` holds elements of.
    """

    __slots__ = ("_before", "_grad", "_param", "_version", "indices")

    def __init__(
        self, param: nn.Parameter, local_shard: torch.Tensor, describe: Callable[[], str], indices: range
    ) -> None:
        self.indices = indices
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


@dataclass(slots=True)
class ReduceScatteredGrad:
    """Holds this rank's shard of a gradient that is summed over the shard group, and not over the replicate group yet.

    Attributes:
        shard: the sum, 1-D, in the reduce dtype; None if there is none, or once another gradient contains it.
        used: for each parameter, whether any rank has used it; empty if that is not known.
    """

    shard: torch.Tensor | None = None
    used: Sequence[int] = ()

    def add(self, shard: torch.Tensor) -> None:
        """Add another sum."""
        self.shard = shard if self.shard is None else self.shard.add_(shard)

    def add_used(self, used: Sequence[int]) -> None:
        """Add the parameters that another backward has used."""
        self.used = bytes(map(max, used, self.used)) if self.used else used

    def take(self) -> torch.Tensor | None:
        """Return the sum and remove it."""
        shard, self.shard = self.shard, None
        return shard


def apply_hooks(hooks: Mapping[int, Callable[..., Any]], grad: torch.Tensor) -> torch.Tensor:
    """Pass a gradient through gradient hooks of a parameter that is not in the autograd graph."""
    for hook in hooks.values():
        result = hook(grad)
        grad = grad if result is None else result
    return grad


def accumulate_grad(param: nn.Parameter, grad: torch.Tensor) -> bool:
    """Add a reduced gradient to ``param.grad``; return whether :func:`run_grad_hooks` must follow."""
    if param.grad is not None:
        param.grad.add_(grad)
    else:
        set_grad(param, grad)
    return bool(param._post_accumulate_grad_hooks) or hasattr(param, "_in_backward_optimizers")


def run_grad_hooks(param: nn.Parameter) -> None:
    """Run the user's gradient hooks and in-backward optimizers, which torch skips: ``param`` is not in the graph."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)
    for optimizer in getattr(param, "_in_backward_optimizers", ()):
        optimizer.step()
        optimizer.zero_grad()
