"""Gradients that a program clears between two backwards are gone, however it clears them.

Each pair of two kinds of backwards, each way of clearing, after either of them; a reducing backward ends each sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import on_ranks
from tests.support.beside import FRONTS, OUR_WRAPPERS, WIDTH, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.kit import square_loss
from tests.support.models import Stack
from tests.support.selection import some

Optimizer = torch.optim.Optimizer


@contextmanager
def _not_last(model: Any) -> Iterator[None]:
    model.set_is_last_backward(False)
    yield
    model.set_is_last_backward(True)


@contextmanager
def _unsynchronized(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


@contextmanager
def _reducing(model: Any) -> Iterator[None]:
    yield


BACKWARDS: dict[str, Callable[[Any], Any]] = {
    "reducing": _reducing,
    "no_sync": lambda model: model.no_sync(),
    "sharded": lambda model: model.no_sync(mode="sharded"),
    "requires_gradient_sync": _unsynchronized,
    "not last": _not_last,
}


def _foreach(params: list[Any]) -> None:
    torch._foreach_zero_([param.grad for param in params if param.grad is not None])


def _by_hand(change: Callable[[Any], None]) -> Callable[[nn.Module, Optimizer], None]:
    def clear(_model: nn.Module, optimizer: Optimizer) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                change(param)

    return clear


BY_CALL: dict[str, Callable[[nn.Module, Optimizer], None]] = {
    f"{name}({set_to_none})": lambda model, optimizer, name=name, flag=set_to_none: (
        model if name == "model" else optimizer
    ).zero_grad(set_to_none=flag)
    for name, set_to_none in itertools.product(("model", "optimizer"), (True, False))
}
BY_HAND: dict[str, Callable[[nn.Module, Optimizer], None]] = {
    "None": _by_hand(lambda param: setattr(param, "grad", None)),
    "zero_": _by_hand(lambda param: param.grad.zero_()),
    "data.zero_": _by_hand(lambda param: param.grad.data.zero_()),
    "foreach": lambda _model, optimizer: _foreach(optimizer.param_groups[0]["params"]),
    "zeros like the gradient": _by_hand(lambda param: setattr(param.grad, "data", torch.zeros_like(param.grad))),
    "zeros like the parameter": _by_hand(lambda param: setattr(param, "grad", torch.zeros_like(param))),
}
HIDDEN = ("not last",)
OF_FULLY_SHARD = ("reducing", "requires_gradient_sync", "not last")


def _run(model: Any, optimizer: Optimizer, kinds: tuple[str, str], clear: Any, position: int) -> None:
    """Two backwards and a reducing one; ``clear`` runs after the backward at ``position``, inside its context."""
    rank = dist.get_rank()
    for step, kind in enumerate((*kinds, "reducing")):
        with BACKWARDS[kind](model):
            square_loss(model, batch(rank, step)).backward()
            if step == position:
                clear(model, optimizer)


def _check(beside: Beside, kinds: tuple[str, ...], ways: dict[str, Any]) -> None:
    """Run every sequence; the error names those that are wrong."""
    wrong = []
    for position in (0, 1):
        beside.zero_grad()
        for step in range(position + 1, 3):
            beside.follow(step=step)
        for pair, (name, clear) in some(itertools.product(itertools.product(kinds, repeat=2), ways.items()), 7):
            beside.ours.zero_grad()
            try:
                _run(beside.ours, beside.optimizer, pair, clear, position)
                beside.check_gradients()
            except (AssertionError, RuntimeError) as error:
                wrong.append(f"{pair}, {name} after the backward at {position}: {error}")
    assert not wrong, f"{len(wrong)} sequences are wrong:\n" + "\n".join(wrong[:6])


@FRONTS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_gradients_cleared_by_a_call_are_gone(layout: str, front: str) -> None:
    """On FSDP2 an optimizer's ``zero_grad`` leaves gradients that are not reduced yet."""
    kinds = OF_FULLY_SHARD if front == "fully_shard" else tuple(BACKWARDS)
    _check(Beside(Stack(), front, **placed(layout, front)), kinds, BY_CALL)


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_gradients_cleared_by_hand_are_gone(layout: str, front: str) -> None:
    """Gradients that ``.grad`` does not show (``set_is_last_backward(False)``) stay, so they are not here."""
    kinds = tuple(kind for kind in BACKWARDS if kind not in HIDDEN)
    _check(Beside(Stack(), front, **placed(layout)), kinds, BY_HAND)


@on_ranks(3)
def test_gradients_of_uneven_shards_are_gone() -> None:
    """Three ranks, of which one may hold no element of a parameter."""
    for front in OUR_WRAPPERS:
        _check(Beside(Stack(), front), ("reducing", "no_sync"), {**BY_CALL, **BY_HAND})


@on_ranks(2)
def test_an_optimizer_of_some_parameters_clears_these_alone() -> None:
    """Two optimizers, of which one clears between two backwards."""
    beside = Beside(Stack(), "originals")
    of_both = [[p for n, p in each.named_parameters() if n.endswith("bias")] for each in beside.models]
    for kinds, set_to_none in itertools.product(itertools.product(BACKWARDS, repeat=2), (True, False)):
        beside.zero_grad()
        for step, kind in enumerate((*kinds, "reducing")):
            with BACKWARDS[kind](beside.ours):
                beside.backward(step=step)
                if step == 1:
                    for params in of_both:
                        torch.optim.SGD(params, lr=0.1).zero_grad(set_to_none=set_to_none)
        beside.check_gradients(f"gradients after {kinds}")


class Branches(nn.Module):
    """Adds the outputs of the branches that the caller names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return sum((self.branches[index](self.stem(x)) for index in chosen), torch.zeros_like(x))


@on_ranks(2, 4)
@pytest.mark.parametrize(
    "front, by",
    [("fully_shard", "model"), ("originals", "model"), ("originals", "optimizer")],
    ids=["fully_shard", "model", "optimizer"],
)
def test_parameters_without_a_later_gradient_are_stepped_with_zeros_on_every_rank(
    front: str, by: str, rank: int
) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    beside = Beside(Branches(), front, units=(), optimizer=optimizer_of)
    with beside.no_sync():
        beside.backward(lambda model, x: model(x, [0, 1] if rank == 0 else [1, 2]).pow(2).mean())
    (beside.ours if by == "model" else beside.optimizer).zero_grad(set_to_none=False)
    for param in beside.plain.parameters():  # on some rank, each of them had a gradient
        param.grad = torch.zeros_like(param)
    for step in range(2):
        beside.backward(lambda model, x: model(x, [1]).pow(2).mean())
        for optimizer in beside.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        beside.check_parameters()
