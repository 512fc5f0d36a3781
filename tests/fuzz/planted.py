"""Defects to plant on the ranks, which the fuzzer has to find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function inside the block by ``make(function)``."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _scaled_gradient() -> AbstractContextManager[None]:
    """A gradient that rank 0 reduces is a thousandth too large."""

    def make(original: Any) -> Any:
        def forward(self: FSDP, x: torch.Tensor) -> Any:
            out = original(self, x)
            if isinstance(out, torch.Tensor) and out.requires_grad and dist.get_rank() == 0:
                out.register_hook(lambda grad: grad * 1.001)
            return out

        return forward

    return _replaced(FSDP, "forward", make)


@contextmanager
def _lost_reductions() -> Iterator[None]:
    """Every backward runs inside ``no_sync``, so none reduces anything."""
    roots: list[FSDP] = []

    def forward_of(original: Any) -> Any:
        def forward(self: FSDP, x: torch.Tensor) -> Any:
            if not roots:
                roots.append(self)
            return original(self, x)

        return forward

    def backward_of(original: Any) -> Any:
        def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            with roots[0].no_sync():
                original(self, *args, **kwargs)

        return backward

    # The replica has run its backward, on every rank's batch, outside of any unit; that changes nothing for it.
    with _replaced(FSDP, "forward", forward_of), _replaced(torch.Tensor, "backward", backward_of):
        yield


@contextmanager
def _lost_step() -> Iterator[None]:
    """The first optimizer that steps, which is that of the wrapped model, does nothing."""
    first: list[Any] = []

    def make(original: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not first:
                first.append(self)
            return None if self is first[0] else original(self, *args, **kwargs)

        return step

    with _replaced(torch.optim.SGD, "step", make), _replaced(torch.optim.AdamW, "step", make):
        yield


def _lost_optimizer_state() -> AbstractContextManager[None]:
    """The optimizer state dict has zeros."""

    def make(original: Any) -> Any:
        def optim_state_dict(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            for state in found["state"].values():
                for value in state.values():
                    value.zero_()
            return found

        return staticmethod(optim_state_dict)

    return _replaced(FSDP, "optim_state_dict", make)


def _error_on_one_rank() -> AbstractContextManager[None]:
    """Rank 1 raises in forward."""

    def make(original: Any) -> Any:
        def forward(self: FSDP, x: torch.Tensor) -> Any:
            if dist.get_rank() == 1:
                raise RuntimeError("planted")
            return original(self, x)

        return forward

    return _replaced(FSDP, "forward", make)


def _hang() -> AbstractContextManager[None]:
    """Rank 0 sleeps in its first forward."""

    def make(original: Any) -> Any:
        def forward(self: FSDP, x: torch.Tensor) -> Any:
            if dist.get_rank() == 0:
                time.sleep(3600)
            return original(self, x)

        return forward

    return _replaced(FSDP, "forward", make)


DEFECTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "scaled gradient": _scaled_gradient,
    "lost reductions": _lost_reductions,
    "lost step": _lost_step,
    "lost optimizer state": _lost_optimizer_state,
    "error on one rank": _error_on_one_rank,
    "hang": _hang,
}


def planted(name: str) -> AbstractContextManager[None]:
    """Plant a defect inside the block."""
    return DEFECTS[name]()
