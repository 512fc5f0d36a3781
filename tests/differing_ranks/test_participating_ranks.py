"""Units that only some ranks run: the others take part in their collectives by ``participate``, or all are told."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import participate
from fsdp_flat.errors import PeerFailureError, RankMismatchError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.compile.test_compile import fresh_compiler
from tests.support import on_ranks
from tests.support.kit import Block, wrapped
from tests.support.pairs import KINDS, WIDTH, Pair, batch, placed


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
    return lambda model, x, rank: model(x, route[rank]).pow(2).mean()


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


@KINDS
@LAYOUTS
@on_ranks(2, timeout=20)
def test_ranks_that_take_part_in_units_which_others_run_train_as_the_replica(
    layout: str, shared_memory: bool, use_orig_params: bool
) -> None:
    pair = Pair.of(Experts(), use_orig_params=use_orig_params, **placed(layout, shared_memory=shared_memory))
    for step, route in enumerate(ROUTES + ROUTES):
        pair.backward(routed(route), step)
        pair.check_gradients(f"gradients with {route}")
        pair.step(lr=0.02)
    pair.check_parameters()


@KINDS
@pytest.mark.parametrize("trains_before", [True, False])
@on_ranks(2, timeout=20)
def test_frozen_units_take_part_in_backward_where_their_inputs_need_gradients(
    trains_before: bool, use_orig_params: bool
) -> None:
    module = GivingInputs()
    module.first.requires_grad_(trains_before)
    module.experts[0].requires_grad_(False)
    module.experts[1].requires_grad_(False)
    pair = Pair.of(module, wrap=by_layer, use_orig_params=use_orig_params)
    for step, route in enumerate(ROUTES + ROUTES):
        pair.backward(routed(route), step)
        pair.check_gradients(f"gradients with {route}")
        pair.step(lr=0.02)


def by_layer(module: nn.Module, **kwargs: Any) -> Any:
    return wrapped(module, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}), **kwargs)


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


@KINDS
@on_ranks(2, timeout=20)
def test_nested_units_and_units_below_a_plain_module_take_part_too(use_orig_params: bool) -> None:
    policy = ModuleWrapPolicy({Deep, Block})
    pair = Pair.of(
        DeepExperts(),
        wrap=lambda module, **kwargs: wrapped(module, auto_wrap_policy=policy, **kwargs),
        use_orig_params=use_orig_params,
    )
    for step, route in enumerate(ROUTES):
        pair.backward(routed(route), step)
        pair.check_gradients(f"gradients with {route}")
        pair.step(lr=0.02)
    with torch.no_grad():
        pair.model(batch(0), ROUTES[0][dist.get_rank()])
    pair.check_parameters()


@KINDS
@on_ranks(2, timeout=20)
def test_a_rank_that_runs_a_unit_which_the_other_skips_stops_both_within_seconds(
    use_orig_params: bool, rank: int
) -> None:
    pair = Pair.of(Experts(takes_part=False), use_orig_params=use_orig_params, **placed("FULL_SHARD"))
    pair.backward(routed({0: (0, 2), 1: (0, 2)}))
    pair.zero_grad()
    begun = time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        routed({0: (0, 2), 1: (0, 1, 2)})(pair.model, batch(rank), rank).backward()
    assert time.monotonic() - begun < 5
    named = set(re.findall(r"'(experts\.\d)'", str(caught.value)))
    assert "experts.1" in named, caught.value
    assert len(named) > 1, caught.value


@on_ranks(2, timeout=50)
def test_over_gloo_a_rank_that_runs_a_unit_which_the_other_skips_stops_both_when_the_group_times_out(rank: int) -> None:
    os.environ["FSDP_FLAT_SHARED_MEMORY"] = "0"
    group = dist.new_group(timeout=timedelta(seconds=2))
    pair = Pair.of(Experts(takes_part=False), process_group=group, use_orig_params=True)
    pair.backward(routed({0: (0, 2), 1: (0, 2)}))
    with pytest.raises(PeerFailureError) as caught:
        routed({0: (0, 2), 1: (0, 1, 2)})(pair.model, batch(rank), rank).backward()
    text = str(caught.value)
    assert f"Rank {rank} of the group was in the" in text, text
    assert f"Of the others: rank {1 - rank} was in the" in text, text
    assert {"experts.1", "experts.2"} <= set(re.findall(r"'(experts\.\d)'", text)), text
    dist.barrier()


@on_ranks(2, timeout=60)
def test_ranks_take_part_inside_compiled_models_too(rank: int) -> None:
    pair = Pair.of(Experts(), use_orig_params=True, **placed("FULL_SHARD"))
    with fresh_compiler():
        model = torch.compile(pair.model, backend="eager")
        for step, route in enumerate(ROUTES[:2]):
            routed(route)(model, batch(rank, step), rank).backward()
            pair.follow(routed(route), step)
            pair.check_gradients(f"gradients with {route}")
            pair.step(lr=0.02)
