"""Gradients of which a rank holds a part: their norms are not to be taken for the norm of the whole gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_flat.errors import UsageError

__all__ = ["LocalNorm", "ShardedGrad"]

# ``torch.nn.utils.get_total_norm`` takes the norm of each gradient by one of these.
_NORMS = frozenset({"linalg_vector_norm", "_foreach_norm"})
_unguarded = torch._C.DisableTorchFunctionSubclass


class ShardedGrad(torch.Tensor):
    """The ``.grad`` of a sharded parameter as it is read outside of an optimizer's step: this rank's part, an alias.

    Every operation works as on any tensor and gives plain ones. The one exception are norms as
    ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` take them: see :class:`LocalNorm`. The gradient that
    is stored stays a plain tensor, so a step costs the same and compiles.

    Attributes:
        stored: the gradient itself.
    """

    _part: Callable[[], str]
    stored: torch.Tensor

    @classmethod
    def of(cls, grad: torch.Tensor | None, describe: Callable[[], str]) -> torch.Tensor | None:
        """``grad``, the same memory; ``describe`` returns a sentence with parameter, unit and rank for the error."""
        # Other classes say themselves how they are wrapped: fake tensors, gradients that are not reduced yet.
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
                func(args[0].stored, *args[1:])  # ``.data =``: an alias would not follow
            return LocalNorm.mark(func, args, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with _unguarded():
            return self.stored.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _unguarded():
            return self.stored.__reduce_ex__(protocol)


class LocalNorm(torch.Tensor):
    """The norm of one rank's part of a gradient, or several of them stacked.

    It is an ordinary number to its readers. The norm of stacked ones raises: that is the last step of
    ``torch.nn.utils.get_total_norm``, whose result would be another one on every rank.
    """

    _part: Callable[[], str]

    @staticmethod
    def mark(func: Any, args: Any, result: Any) -> Any:
        """``result`` of ``func(*args)``, as norms of one rank where it is such. To be called without torch functions.

        ``args[0]`` is a gradient, or a list of gradients; those that are not whole have ``_part``, which says so.
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
        """Raises for a norm over gradients of which this rank holds a part."""
        raise UsageError(
            f"The norm over several gradients was taken on one rank, as torch.nn.utils.clip_grad_norm_ and "
            f"get_total_norm do. {self._part()}, so the result would be another one on every rank. Call "
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
