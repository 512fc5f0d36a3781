"""Re-entrant checkpoints inside the root's own layers, layers frozen after wrapping, and second backwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.kit import Block, Stack, square_loss, wrapped
from tests.support.pairs import FOUR_RANKS, KINDS, WIDTH, Pair, batch, by_policy, placed

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


@KINDS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("start", list(STARTS))
@pytest.mark.parametrize("shape", list(SHAPES))
@on_ranks(2)
def test_a_root_that_recomputes_a_part_of_its_own_equals_the_replica(
    shape: str, start: str, layout: str, use_orig_params: bool
) -> None:
    wrap = wrapped if shape == "one unit" and start != "a block" else by_policy
    Pair.of(Recomputing(shape, start), wrap=wrap, use_orig_params=use_orig_params, **placed(layout)).train(num_steps=3)


@KINDS
@pytest.mark.parametrize("layout", FOUR_RANKS)
@on_ranks(4)
def test_a_root_that_recomputes_a_part_of_its_own_equals_the_replica_on_four_ranks(
    layout: str, use_orig_params: bool
) -> None:
    Pair.of(Recomputing("a block beside it"), use_orig_params=use_orig_params, **placed(layout)).train(num_steps=3)


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


@KINDS
@pytest.mark.parametrize("accumulates", [False, True], ids=["each step", "no_sync first"])
@on_ranks(2)
def test_a_root_with_two_recomputed_parts_equals_the_replica(accumulates: bool, use_orig_params: bool) -> None:
    pair = Pair.of(TwoParts(), wrap=wrapped, use_orig_params=use_orig_params)
    for step in range(3):
        if accumulates:
            with pair.model.no_sync():
                pair.backward(step=10 + step)
        pair.train(first=step)


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


def freeze(pair: Pair, names: list[str], wanted: bool = False) -> None:
    for model in (pair.model, pair.plain):
        for name, param in model.named_parameters():
            if name.replace("_fsdp_wrapped_module.", "") in names:
                param.requires_grad_(wanted)


def several(how: str, model: nn.Module, rank: int, scale: float = 1.0) -> None:
    losses = [scale * square_loss(model, batch(rank, step)) for step in (20, 21)]
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
    pair = Pair.of(Stack(), use_orig_params=True, **placed(layout))
    pair.train(num_steps=steps_before)
    freeze(pair, FROZEN[frozen])
    for how in ("in order", "in reverse", "together"):
        several(how, pair.model, rank)
        for other in range(dist.get_world_size()):
            several(how, pair.plain, other, 1 / dist.get_world_size())
        pair.check_gradients(f"gradients of two backwards {how}")
        pair.step()
    freeze(pair, FROZEN[frozen], True)
    pair.train()


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


@KINDS
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_second_backward_through_one_graph_adds_the_gradients_again(
    layout: str, kind: str, use_orig_params: bool, rank: int
) -> None:
    if not use_orig_params and kind in ("a part of each block frozen", "first layer frozen"):
        pytest.skip("a flat parameter is frozen as a whole")

    module = MODELS[kind]()
    if not use_orig_params:
        # A flat parameter is frozen as a whole: blocks may be, the root's own layers are not here.
        module.first.requires_grad_(True)
        module.head.requires_grad_(True)
    policy = ModuleWrapPolicy({Recomputed if kind == "nested checkpoints" else Block})
    options = placed(layout)
    pair = Pair.of(module, wrap=wrapped, auto_wrap_policy=policy, use_orig_params=use_orig_params, **options)
    for step in range(2):
        loss = square_loss(pair.model, batch(rank, step))
        loss.backward(retain_graph=True)
        pair.follow(step=step)
        pair.check_gradients("gradients of the first backward")
        loss.backward(retain_graph=True)
        loss.backward()
        for _ in range(2):
            pair.follow(step=step)
        pair.check_gradients("gradients of three backwards")
        pair.step()
    pair.train()
