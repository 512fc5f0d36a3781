"""Marks sharded gradients, so that the norm of one rank's shard is not mistaken for that of the full gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp_flat.errors import UsageError

__all__ = ["LocalNorm", "ShardedGrad"]

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
