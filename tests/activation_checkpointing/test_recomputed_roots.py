"""Re-entrant checkpoints inside the root's own layers, layers frozen after wrapping, and second backwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.kit import square_loss
from tests.support.models import Block, Stack

# What the checkpoint covers, and what comes before and after it.
SHAPES: dict[str, Callable[[], dict[str, nn.Module]]] = {
    "one unit": lambda: {"middle": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))},
    "a block beside it": lambda: {"middle": nn.Linear(WIDTH, WIDTH), "block": Block()},
    "a block inside": lambda: {"middle": nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH))},
}


# What gives the checkpoint an input that requires a gradient.
STARTS: dict[str, Callable[[], nn.Module]] = {
    "a layer of the root": lambda: nn.Linear(WIDTH, WIDTH),
    "a block": Block,
    "nothing": nn.Identity,
}


class Recomputing(nn.Module):
    """A first module, a checkpointed middle, perhaps a block, and a tail; the root owns all but blocks."""

    def __init__(self, shape: str, start: str = "a layer of the root") -> None:
        super().__init__()
        self.first = STARTS[start]()
        for name, module in SHAPES[shape]().items():
            setattr(self, name, module)
        self.tail = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not x.requires_grad
        x = torch.tanh(self.first(x))
        if not x.requires_grad:
            x.requires_grad_()
        x = checkpoint(self.middle, x, use_reentrant=True)
        if hasattr(self, "block"):
            x = self.block(x)
        return self.tail(x)


@WRAPPER_FRONTS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("start", list(STARTS))
@pytest.mark.parametrize("shape", list(SHAPES))
@on_ranks(2)
def test_a_root_that_recomputes_a_part_of_its_own_equals_the_replica(
    shape: str, start: str, layout: str, front: str
) -> None:
    units = () if shape == "one unit" and start != "a block" else (Block,)
    Beside(Recomputing(shape, start), front, units=units, **placed(layout)).train(num_steps=3)


class TwoParts(nn.Module):
    """Two checkpointed parts of the root's own, one after the other, and a layer between that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.tail = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.between(checkpoint(self.one, x, use_reentrant=True))
        return self.tail(checkpoint(self.two, x, use_reentrant=True))


@WRAPPER_FRONTS
@pytest.mark.parametrize("accumulates", [False, True], ids=["each step", "no_sync first"])
@on_ranks(2)
def test_a_root_with_two_recomputed_parts_equals_the_replica(accumulates: bool, front: str) -> None:
    beside = Beside(TwoParts(), front, units=())
    for _ in range(3):
        if accumulates:
            with beside.no_sync():
                beside.backward()
        beside.train()


# -- frozen after wrapping -----------------------------------------------------------------------------------------


FROZEN: dict[str, list[str]] = {
    "a weight": ["blocks.1.up.weight"],
    "a block": ["blocks.1.up.weight", "blocks.1.up.bias", "blocks.1.down.weight"],
    "the first layer": ["first.weight", "first.bias"],
    "the first layer of a block": ["blocks.1.up.weight", "blocks.1.up.bias"],
    "the first layer of every block": [
        f"blocks.{index}.up.{kind}" for index in range(3) for kind in ("weight", "bias")
    ],
    "the last layer of every block": [f"blocks.{index}.down.weight" for index in range(3)],
    "first layer and first block": [
        "first.weight",
        "first.bias",
        "blocks.0.up.weight",
        "blocks.0.up.bias",
        "blocks.0.down.weight",
    ],
}


def freeze(beside: Beside, names: list[str], wanted: bool = False) -> None:
    for model in beside.models:
        for name, param in model.named_parameters():
            if name.replace("_fsdp_wrapped_module.", "") in names:
                param.requires_grad_(wanted)


def several(how: str, model: nn.Module, rank: int) -> None:
    losses = [square_loss(model, batch(rank, step)) for step in (20, 21)]
    if how == "together":
        torch.stack(losses).sum().backward()
    else:
        for loss in reversed(losses) if how == "in reverse" else losses:
            loss.backward()


@pytest.mark.parametrize("steps_before", [0, 2], ids=["at first", "after two steps"])
@pytest.mark.parametrize("frozen", list(FROZEN))
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_two_forwards_over_parameters_frozen_after_wrapping_equal_the_replica(
    layout: str, frozen: str, steps_before: int, rank: int
) -> None:
    beside = Beside(Stack(), "originals", **placed(layout))
    beside.train(num_steps=steps_before)
    freeze(beside, FROZEN[frozen])
    for how in ("in order", "in reverse", "together"):
        beside.backward(lambda model, _x, how=how: several(how, model, rank))
        beside.check_gradients(f"gradients of two backwards {how}")
        beside.step()
    freeze(beside, FROZEN[frozen], True)
    beside.train()


# -- second backwards ----------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Checkpoints inside checkpoints, none of them re-entrant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Recomputed() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.inside, self.first(x), use_reentrant=False))

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Recomputed(Block):
    """A block of which a part is recomputed too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(checkpoint(self.hidden, x, use_reentrant=False))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


def frozen_stack(*names: str) -> Stack:
    model = Stack()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nothing frozen": frozen_stack,
    "first layer frozen": lambda: frozen_stack("first"),
    "middle block frozen": lambda: frozen_stack("blocks.1"),
    "first layer and block frozen": lambda: frozen_stack("first", "blocks.0"),
    "a part of each block frozen": lambda: frozen_stack(*[f"blocks.{index}.up" for index in range(3)]),
    "last block and head frozen": lambda: frozen_stack("blocks.2", "head"),
    "nested checkpoints": Nested,
}


@WRAPPER_FRONTS
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_second_backward_through_one_graph_adds_the_gradients_again(
    layout: str, kind: str, front: str, rank: int
) -> None:
    if front == "flat" and kind in ("a part of each block frozen", "first layer frozen"):
        pytest.skip("a flat parameter is frozen as a whole")

    module = MODELS[kind]()
    if front == "flat":
        # A flat parameter is frozen as a whole: blocks may be, the root's own layers are not here.
        module.first.requires_grad_(True)
        module.head.requires_grad_(True)
    options = placed(layout)
    beside = Beside(module, front, units=(Recomputed if kind == "nested checkpoints" else Block,), **options)
    for step in range(2):
        loss = square_loss(beside.ours, batch(rank, step))
        loss.backward(retain_graph=True)
        beside.follow(step=step)
        beside.check_gradients("gradients of the first backward")
        loss.backward(retain_graph=True)
        loss.backward()
        for _ in range(2):
            beside.follow(step=step)
        beside.check_gradients("gradients of three backwards")
        beside.step()
    beside.train()
