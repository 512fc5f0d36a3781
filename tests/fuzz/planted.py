"""Defects to plant on the ranks, which the fuzzer has to find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP

__all__ = ["DEFECTS", "planted"]


def _after_backward(change: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Change the first gradient of this rank's parameters whenever an optimizer or a summon is about to see it."""
    original = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        models = list(_models)
        before = {id(p): None if p.grad is None else p.grad.clone() for m in models for p in m.parameters()}
        original(self, *args, **kwargs)
        for model in models:
            for param in model.parameters():
                old = before.get(id(param))
                if param.grad is not None and (old is None or old.shape != param.grad.shape or (old != param.grad).any()):
                    change(param.grad)
                    break

    torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


_models: list[FSDP] = []


@contextmanager
def _noticed_models() -> Iterator[None]:
    original = FSDP.__init__

    def init(self: FSDP, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _models[:] = [self]

    FSDP.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDP.__init__ = original  # type: ignore[method-assign]
        _models.clear()


@contextmanager
def _scaled_gradient() -> Iterator[None]:
    """One gradient of rank 0 is a thousandth too large."""

    def change(grad: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            grad.mul_(1.001)

    with _noticed_models():
        yield from _after_backward(change)


@contextmanager
def _lost_clip() -> Iterator[None]:
    """Clipping returns the norm and scales nothing."""
    original = FSDP.clip_grad_norm_
    FSDP.clip_grad_norm_ = lambda self, max_norm, norm_type=2.0: original(self, 1e30, norm_type)  # type: ignore
    try:
        yield
    finally:
        FSDP.clip_grad_norm_ = original  # type: ignore[method-assign]


@contextmanager
def _lost_reductions() -> Iterator[None]:
    """``no_sync`` is always on, so that backward reduces nothing."""
    original = FSDP.forward

    def forward(self: FSDP, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    FSDP.forward = forward  # type: ignore[method-assign]
    backward = torch.Tensor.backward

    def silent(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        roots = [model for model in _models if model.check_is_root()]
        if roots and self.grad_fn is not None:
            with roots[0].no_sync():
                backward(self, *args, **kwargs)
        else:
            backward(self, *args, **kwargs)

    torch.Tensor.backward = silent  # type: ignore[method-assign, assignment]
    try:
        with _noticed_models():
            yield
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        FSDP.forward = original  # type: ignore[method-assign]


@contextmanager
def _hang() -> Iterator[None]:
    """Rank 0 sleeps in its first forward."""
    original = FSDP.forward

    def forward(self: FSDP, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            time.sleep(3600)
        return original(self, *args, **kwargs)

    FSDP.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDP.forward = original  # type: ignore[method-assign]


DEFECTS: dict[str, Any] = {
    "scaled gradient": _scaled_gradient,
    "lost clip": _lost_clip,
    "lost reductions": _lost_reductions,
    "hang": _hang,
}


def planted(name: str) -> Any:
    """Plant a defect inside the block."""
    return DEFECTS[name]()
