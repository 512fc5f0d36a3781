"""Marks gradients that are sharded or not reduced, so that one rank's part is not mistaken for the full gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_flat.errors import UsageError
from fsdp_flat.flat._torch import unguarded

# ``torch.nn.utils.get_total_norm`` computes the norm of each gradient with one of these.
_NORMS = frozenset({"linalg_vector_norm", "_foreach_norm"})


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
        with unguarded():
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "__set__":
                func(args[0].stored, *args[1:])  # ``.data =`` on the alias does not change the stored gradient
            return LocalNorm.mark(func, args, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with unguarded():
            return self.stored.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unguarded():
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
        with unguarded():
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
        with unguarded():
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
        with unguarded():
            result = LocalNorm.mark(func, args, func(*args, **(kwargs or {})))
        if isinstance(result, torch.Tensor):
            return _marked_unreduced(result, describe)
        return (
            [_marked_unreduced(item, describe) for item in result] if name.startswith("_foreach") and result else result
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with unguarded():
            return self.clone().as_subclass(torch.Tensor)


@functools.cache
def _forbid_steps() -> None:
    """Make every optimizer's step raise before it writes anything if a gradient is not reduced.

    torch's hook for this covers all optimizers of the process; it is registered with the first such gradient.
    """
    register_optimizer_step_pre_hook(_refuse_unreduced)


def _refuse_unreduced(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with unguarded():
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
    with unguarded():
        shown.data = grad
