"""Ranks that run units of one size in another order: an error on every rank, with both units, before a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.comm import Place, Progress
from fsdp_flat.errors import RankMismatchError, UsageError
from tests.support import on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, batch, by_hand, by_policy, placed
from tests.support.kit import BLOCKS, square_loss, wrapped
from tests.support.models import Block
from tests.support.patience import impatient


class Ordered(nn.Module):
    """Two units of one size, which run as ``order`` says, and a third one before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({name: Block() for name in ("third", "alpha", "beta")})
        self.head = nn.Linear(WIDTH, 2)
        self.order = ["third", "alpha", "beta"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.order:
            x = self.layers[name](x)
        return self.head(x)


WHEN = {"in the first step": None, "after two steps": ["third", "alpha", "beta"], "when first used": ["third"]}
NOTHING_GATHERED, GATHERED_BY_ALL = ["NO_SHARD", "HYBRID_SHARD 2x1"], ["FULL_SHARD", "SHARD_GRAD_OP"]
WHENS = pytest.mark.parametrize("when", list(WHEN))
WRAPS = pytest.mark.parametrize("wrap", [by_policy, by_hand])


def check(layout: str, wrap: Callable[..., FSDP], when: str, front: str, shared_memory: bool, odd: list[int]) -> None:
    """The ranks of ``odd`` run the two units the other way round."""
    options = placed(layout, shared_memory=shared_memory)
    beside = Beside(Ordered(), front, shard=wrap, **options)
    before = WHEN[when]
    if before is not None:
        beside.ours.module.order = beside.plain.order = before
        beside.train(num_steps=2)
    rank = dist.get_rank()
    beside.ours.module.order = ["third", "beta", "alpha"] if rank in odd else ["third", "alpha", "beta"]
    # In later steps ranks do not wait for each other in backward, and find it before the next forward, except that
    # all-gathers of all ranks through shared memory show it.
    is_late = when == "after two steps" and not (shared_memory and layout in GATHERED_BY_ALL)

    def two_forwards() -> None:
        square_loss(beside.ours, batch(rank, 5)).backward()
        beside.ours(batch(rank, 6))

    with pytest.raises(RankMismatchError) as caught:
        two_forwards()
    text = str(caught.value)
    assert "'layers.alpha'" in text, text
    assert "'layers.beta'" in text, text
    if is_late:
        assert "if an optimizer has stepped since, weights are wrong" in text, text
    else:
        assert all(param.grad is None for param in beside.ours.parameters()), "nothing for an optimizer"


@WRAPPER_FRONTS
@WHENS
@WRAPS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_units_in_another_order_raise_on_every_rank_without_shared_memory(
    layout: str, wrap: Callable[..., FSDP], when: str, front: str
) -> None:
    check(layout, wrap, when, front, False, [1])


@WHENS
@WRAPS
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_units_in_another_order_raise_on_every_rank_with_shared_memory(
    layout: str, wrap: Callable[..., FSDP], when: str
) -> None:
    check(layout, wrap, when, "originals", True, [1])


@WRAPPER_FRONTS
@WHENS
@pytest.mark.parametrize("layout", NOTHING_GATHERED)
@on_ranks(2)
def test_units_in_another_order_raise_on_every_rank_where_nothing_is_gathered(
    layout: str, when: str, front: str
) -> None:
    check(layout, by_policy, when, front, True, [1])


@WRAPPER_FRONTS
@WHENS
@WRAPS
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
@on_ranks(4)
def test_a_replica_that_runs_units_in_another_order_makes_every_rank_raise(
    shared_memory: bool, wrap: Callable[..., FSDP], when: str, front: str
) -> None:
    check("HYBRID_SHARD 2x2", wrap, when, front, shared_memory, [2, 3])


@WRAPPER_FRONTS
@WHENS
@on_ranks(4)
def test_a_rank_of_one_replica_that_runs_units_in_another_order_makes_every_rank_raise(when: str, front: str) -> None:
    check("HYBRID_SHARD 2x2", by_policy, when, front, False, [1])


@on_ranks(4)
def test_one_of_four_ranks_that_runs_units_in_another_order_makes_every_rank_raise() -> None:
    check("FULL_SHARD", by_policy, "after two steps", "originals", False, [2])


def step(beside_model: FSDP, optimizer: torch.optim.Optimizer, *, times: int = 1, syncs: bool = True) -> None:
    for number in range(times):
        with nullcontext() if syncs and number == times - 1 else beside_model.no_sync():
            square_loss(beside_model, batch(dist.get_rank(), number)).backward()
    optimizer.step()
    optimizer.zero_grad()


# What rank 1 does otherwise, and where both ranks are then, in the words of docs/debugging.md.
OUT_OF_STEP: dict[str, tuple[Callable[..., object], str, str]] = {
    "a skipped backward": (
        lambda model, optimizer: model(batch(1)),
        "in a backward, after 2 optimizer steps and 1 forward since, outside no_sync",
        "in a forward, after 2 optimizer steps and 2 forwards since, outside no_sync",
    ),
    "no_sync": (
        lambda model, optimizer: step(model, optimizer, syncs=False),
        "in a backward, after 2 optimizer steps and 1 forward since, outside no_sync",
        "in a backward, after 2 optimizer steps and 1 forward since, inside no_sync",
    ),
    "more accumulations": (
        lambda model, optimizer: step(model, optimizer, times=2),
        "in a backward, after 2 optimizer steps and 1 forward since, outside no_sync",
        "in a backward, after 2 optimizer steps and 1 forward since, inside no_sync",
    ),
    "one batch more": (
        lambda model, optimizer: [step(model, optimizer) for _ in range(2)],
        "between forwards and backwards, after 3 optimizer steps and 0 forwards since, outside no_sync",
        "in a forward, after 3 optimizer steps and 1 forward since, outside no_sync",
    ),
}


@pytest.mark.parametrize("cause", OUT_OF_STEP)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "gloo"])
@on_ranks(2, timeout=50)
def test_ranks_out_of_step_are_told_where_each_is(cause: str, shared: bool, rank: int) -> None:
    otherwise, *places = OUT_OF_STEP[cause]
    model = wrapped(Ordered().double(), auto_wrap_policy=BLOCKS, **placed("FULL_SHARD", shared_memory=shared))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Other tests of this process have made steps too.
    Progress.place = Place()
    for _ in range(2):
        step(model, optimizer)

    def go_on() -> None:
        (otherwise if rank == 1 else step)(model, optimizer)
        if cause != "one batch more":
            step(model, optimizer)
        model.state_dict()

    with impatient(), pytest.raises((RankMismatchError, UsageError)) as caught:
        go_on()
    assert [place for place in places if place not in str(caught.value)] == []
