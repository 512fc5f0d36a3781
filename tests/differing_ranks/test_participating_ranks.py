"""Units that only some ranks run: the others take part in their collectives by ``participate``, or all are told."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import participate
from fsdp_flat.errors import PeerFailureError, RankMismatchError
from tests.compile.test_compile import fresh_compiler
from tests.support import on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.models import Block
from tests.support.patience import SECONDS, give_up_soon


class Experts(nn.Module):
    """Each rank runs the experts that ``chosen`` names for it, and takes part in the others, or does not."""

    def __init__(self, *, takes_part: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)
        self.takes_part = takes_part

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for index, expert in enumerate(self.experts):
            if index in chosen:
                x = expert(x)
            elif self.takes_part:
                participate(expert)
        return self.head(x)


class GivingInputs(Experts):
    """Says what a skipped expert would have been given."""

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for index, expert in enumerate(self.experts):
            if index in chosen:
                x = expert(x)
            else:
                participate(expert, x)
        return self.head(x)


# For each rank the experts that it runs.
ROUTES: list[dict[int, tuple[int, ...]]] = [
    {0: (0, 2), 1: (1,)},
    {0: (), 1: (0, 1, 2)},
    {0: (0, 1, 2), 1: (2,)},
    {0: (1,), 1: ()},
]


def routed(route: dict[int, tuple[int, ...]]) -> Any:
    return lambda model, x: model(x, route[dist.get_rank()]).pow(2).mean()


LAYOUTS = pytest.mark.parametrize(
    "layout, shared_memory",
    [
        ("FULL_SHARD", True),
        ("FULL_SHARD", False),
        ("SHARD_GRAD_OP", True),
        ("NO_SHARD", True),
        ("HYBRID_SHARD 2x1", True),
    ],
)


@WRAPPER_FRONTS
@LAYOUTS
@on_ranks(2)
def test_ranks_that_take_part_in_units_which_others_run_train_as_the_replica(
    layout: str, shared_memory: bool, front: str
) -> None:
    beside = Beside(Experts(), front, **placed(layout, shared_memory=shared_memory))
    for route in ROUTES + ROUTES:
        beside.train(routed(route))


@WRAPPER_FRONTS
@pytest.mark.parametrize("trains_before", [True, False])
@on_ranks(2)
def test_frozen_units_take_part_in_backward_where_their_inputs_need_gradients(trains_before: bool, front: str) -> None:
    module = GivingInputs()
    module.first.requires_grad_(trains_before)
    module.experts[0].requires_grad_(False)
    module.experts[1].requires_grad_(False)
    beside = Beside(module, front, units=(Block, nn.Linear))
    for route in ROUTES + ROUTES:
        beside.train(routed(route))


class Deep(nn.Module):
    """A unit that holds two more, which run in the order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.last = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.own(self.inner(x)))


class DeepExperts(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Deep(), nn.ModuleDict({"a": Block(), "b": Block()}), Deep()])

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for index, expert in enumerate(self.experts):
            if index not in chosen:
                participate(expert)
            elif isinstance(expert, nn.ModuleDict):
                x = expert["b"](expert["a"](x))
            else:
                x = expert(x)
        return self.head(x)


@WRAPPER_FRONTS
@on_ranks(2)
def test_nested_units_and_units_below_a_plain_module_take_part_too(front: str) -> None:
    beside = Beside(DeepExperts(), front, units=(Deep, Block))
    for route in ROUTES:
        beside.train(routed(route))
    with torch.no_grad():
        beside.ours(batch(0), ROUTES[0][dist.get_rank()])
    beside.check_parameters()


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_rank_that_runs_a_unit_which_the_other_skips_stops_both_within_seconds(front: str, rank: int) -> None:
    beside = Beside(Experts(takes_part=False), front, **placed("FULL_SHARD"))
    beside.backward(routed({0: (0, 2), 1: (0, 2)}))
    beside.zero_grad()
    begun = time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        routed({0: (0, 2), 1: (0, 1, 2)})(beside.ours, batch(rank)).backward()
    assert time.monotonic() - begun < SECONDS
    named = set(re.findall(r"'(experts\.\d)'", str(caught.value)))
    assert "experts.1" in named, caught.value
    assert len(named) > 1, caught.value


@on_ranks(2, timeout=50)
def test_over_gloo_a_rank_that_runs_a_unit_which_the_other_skips_stops_both_when_the_group_times_out(rank: int) -> None:
    os.environ["FSDP_FLAT_SHARED_MEMORY"] = "0"
    group = dist.new_group()
    beside = Beside(Experts(takes_part=False), "originals", process_group=group)
    beside.backward(routed({0: (0, 2), 1: (0, 2)}))
    give_up_soon(group)
    with pytest.raises(PeerFailureError) as caught:
        routed({0: (0, 2), 1: (0, 1, 2)})(beside.ours, batch(rank)).backward()
    text = str(caught.value)
    assert f"Rank {rank} of the group was in the" in text, text
    assert f"Of the others: rank {1 - rank} was in the" in text, text
    assert {"experts.1", "experts.2"} <= set(re.findall(r"'(experts\.\d)'", text)), text
    dist.barrier()


@on_ranks(2, timeout=60)
def test_ranks_take_part_inside_compiled_models_too(rank: int) -> None:
    beside = Beside(Experts(), "originals", **placed("FULL_SHARD"))
    with fresh_compiler():
        model = torch.compile(beside.ours, backend="eager")
        for step, route in enumerate(ROUTES[:2]):
            routed(route)(model, batch(rank, step)).backward()
            beside.follow(routed(route), step)
            beside.check_gradients(f"gradients with {route}")
            beside.step()


class Branching(nn.Module):
    """Two layers that one rank skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.skips:
            participate(self.up, x)
            participate(self.down, x)
            return x
        return x + self.down(self.up(x))


@on_ranks(2)
@pytest.mark.parametrize("skips", [False, True])
def test_a_rank_may_skip_all_modules_of_a_list(skips: bool, rank: int) -> None:
    def shard(model: Any, apply: Any) -> Any:
        apply([model.up, model.down])
        return apply(model)

    beside = Beside(Branching(), "fully_shard", shard=shard)
    for model in beside.models:
        model.skips = skips and rank == 1
    beside.train(num_steps=2)
