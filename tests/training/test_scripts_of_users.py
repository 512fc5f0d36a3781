"""Rows of docs/pains.md that no other test shows in full: scripts as users write them, on two ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import (
    MixedPrecision,
    clean_named_parameters,
    unwrap,
)
from fsdp_flat.errors import UsageError
from tests.support import Ranks, assert_close, assert_equal, on_ranks
from tests.support.beside import OUR_WRAPPERS, WIDTH, WRAPPER_FRONTS, Beside
from tests.support.kit import BLOCKS, batch, full_params, seeded, square_loss, wrapped
from tests.support.models import Stack
from tests.support.selection import some
from tests.support.steps import STRATEGIES as ALL_STRATEGIES
from tests.support.steps import mesh_for

RanksOf = Callable[..., Ranks]
LOOSE = {"rtol": 1e-5, "atol": 1e-4}


def named(model: nn.Module, **options: bool) -> Any:
    return clean_named_parameters(model, **options) if isinstance(model, FSDP) else model.named_parameters()


def no_decay_on_biases(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases do not; groups by name, as training scripts make them."""
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, param in named(model):
        groups[name.endswith("weight")].append((name, param))
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.5}, {"params": groups[False], "weight_decay": 0.0}], lr=0.01
    )


@on_ranks(2)
def test_groups_by_name_decay_weights_and_leave_biases() -> None:
    for strategy in ALL_STRATEGIES:
        options = {"sharding_strategy": strategy, **mesh_for(strategy)}
        beside = Beside(Stack(), "originals", optimizer=no_decay_on_biases, **options)
        beside.train(num_steps=3)
        names = [group["param_names"] for group in beside.optimizer.param_groups]
        assert [len(group) for group in names] == [8, 5], "both groups hold what they should"
        assert all(name.endswith("bias") for name in names[1])


class Rotary(nn.Module):
    """Buffers whose precision positions depend on: real, complex, and one that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(WIDTH) / WIDTH), persistent=False)
        self.register_buffer("phases", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH) / 7.0))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {"layer": self.layer.weight.dtype, "inv_freq": self.inv_freq.dtype, "phases": self.phases.dtype}
        return self.layer(x) * (self.inv_freq + self.phases.real).to(x.dtype)


@WRAPPER_FRONTS
@on_ranks(2)
def test_buffers_keep_their_dtype_and_bits_where_parameters_compute_in_bf16(front: str, rank: int) -> None:
    before = Rotary()
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(Rotary(), use_orig_params=front == "originals", mixed_precision=precision)
    square_loss(model, batch(rank)).float().backward()
    assert model.module.seen == {"layer": torch.bfloat16, "inv_freq": torch.float32, "phases": torch.complex64}
    assert_equal(dict(model.module.named_buffers()), dict(before.named_buffers()))
    assert_equal(model.state_dict()["phases"], before.phases)


class RefusesEmpty(torch.optim.AdamW):
    """As fused kernels do, it cannot take tensors without elements."""

    def step(self, closure: Any = None) -> None:
        assert all(param.numel() > 0 for group in self.param_groups for param in group["params"])
        super().step()


@on_ranks(2)
def test_an_optimizer_that_takes_no_empty_tensors_trains_and_its_state_has_every_name(rank: int) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        kind = RefusesEmpty if isinstance(model, FSDP) else torch.optim.AdamW
        return kind(named(model, remove_empty=True), lr=0.01)

    beside = Beside(Stack(), "originals", optimizer=optimizer_of)
    model, plain, optimizer = beside.ours, beside.plain, beside.optimizer
    empty = [name for name, param in clean_named_parameters(model) if param.numel() == 0]
    given = [name for name, _ in clean_named_parameters(model, remove_empty=True)]
    assert empty, "this rank owns nothing of some parameter"
    assert sorted(empty + given) == sorted(name for name, _ in plain.named_parameters())
    beside.train(num_steps=2)
    saved = FSDP.optim_state_dict(model, optimizer)
    assert sorted(saved["state"]) == sorted(name for name, _ in plain.named_parameters())
    for index, (name, param) in enumerate(plain.named_parameters()):
        expected = beside.optimizers["plain"].state_dict()["state"][index]["exp_avg"]
        assert saved["state"][name]["exp_avg"].shape == param.shape
        assert_close(saved["state"][name]["exp_avg"], expected, rtol=1e-9, atol=1e-11)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))
    beside.train()


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_model_taken_apart_changed_and_wrapped_again_goes_on_with_its_optimizer_state(front: str, rank: int) -> None:
    """An embedding grows, and a layer is replaced: what stayed keeps weights and optimizer state."""

    def change(module: nn.Sequential) -> nn.Sequential:
        torch.manual_seed(7)
        grown = nn.Embedding(13, WIDTH)
        with torch.no_grad():
            grown.weight[:11] = module[0].weight
        module[0], module[2] = grown, nn.Linear(WIDTH, 3)
        return module

    def tokens_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model((x.abs() * 4).long() % 11).pow(2).mean()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(11, WIDTH), Stack(), nn.Linear(5, 3))
    module[1].head = nn.Linear(WIDTH, WIDTH)
    module[2] = nn.Linear(WIDTH, 2)
    beside = Beside(module, front, optimizer=adam, dtype=torch.float32, tolerance={"rtol": 1e-5, "atol": 1e-5})
    beside.train(tokens_loss, num_steps=2)
    states = FSDP.optim_state_dict(beside.ours, beside.optimizer)

    changed, plain = change(unwrap(beside.ours)), change(beside.plain)
    assert_close(dict(changed.state_dict()), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    model = wrapped(changed, auto_wrap_policy=BLOCKS, use_orig_params=front == "originals")
    out = model(torch.tensor([12, 1])).detach()
    assert_close(out, plain(torch.tensor([12, 1])).detach(), rtol=1e-4, atol=1e-5)
    again = Beside(plain, front, shard=lambda *_: model, optimizer=adam, dtype=torch.float32, tolerance=LOOSE)
    by_name = dict(again.plain.named_parameters())
    for name, row in states["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            kept, row[key] = row[key], torch.zeros_like(by_name[name])
            if not name.startswith("2."):
                row[key][: len(kept)] = kept
    again.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, again.optimizer, states))
    for name, row in states["state"].items():
        again.optimizers["plain"].state[by_name[name]] = {key: value.clone() for key, value in row.items()}
    again.train(tokens_loss, num_steps=2)


@pytest.mark.of_guards
@on_ranks(2)
def test_an_optimizer_built_before_wrapping_trains_original_parameters_and_is_an_error_for_flat_ones(rank: int) -> None:
    built: list[torch.optim.Optimizer] = []

    def build_then_wrap(module: nn.Module, apply: Callable[..., Any]) -> Any:
        built.append(torch.optim.Adam(module.parameters(), lr=0.01))
        return apply(module, auto_wrap_policy=BLOCKS)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return built[0] if isinstance(model, FSDP) else torch.optim.Adam(model.parameters(), lr=0.01)

    Beside(Stack(), "originals", shard=build_then_wrap, optimizer=optimizer_of).train(num_steps=2)

    module = Stack()
    stale = torch.optim.Adam(module.parameters(), lr=0.01)
    flat = wrapped(module, auto_wrap_policy=BLOCKS)
    square_loss(flat, batch(rank)).backward()
    with pytest.raises(UsageError, match=r"Adam holds '.*weight' .* of unit .*Build the optimizer after wrapping"):
        stale.step()
    assert stale.state == {}


def digest_of_run(strategy: Any, front: str) -> list[Any]:
    """Losses, norms and weights of a few steps."""
    torch.manual_seed(0)
    model = wrapped(
        Stack(),
        auto_wrap_policy=BLOCKS,
        sharding_strategy=strategy,
        use_orig_params=front == "originals",
        **mesh_for(strategy),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: list[Any] = []
    for step in range(4):
        loss = square_loss(model, batch(dist.get_rank(), step))
        loss.backward()
        seen += [loss.detach(), model.clip_grad_norm_(0.5)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, full_params(model)]


@on_ranks(4)
def test_two_runs_are_equal_to_the_bit(rank: int) -> None:
    for strategy, front in some(itertools.product(ALL_STRATEGIES, OUR_WRAPPERS), 1):
        first = digest_of_run(strategy, front)
        assert_equal(digest_of_run(strategy, front), first, what=f"{strategy}, {front}")
        assert len({float(value) for value in first[:-1]}) == 8


def run_on_batches(num_batches: int, front: str) -> dict[str, torch.Tensor]:
    """Steps on ``num_batches`` batches: one on each rank, or one after another where there is one rank."""
    model = wrapped(seeded(), auto_wrap_policy=BLOCKS, use_orig_params=front == "originals")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mine = range(dist.get_rank(), num_batches, dist.get_world_size())
    for step in range(3):
        for number in mine:
            with model.no_sync() if number != mine[-1] else contextlib.nullcontext():
                (square_loss(model, batch(number, step)) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_params(model)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_give_the_bits_of_one_rank_that_takes_their_batches_one_after_another(
    ranks: RanksOf, num_ranks: int
) -> None:
    for front in OUR_WRAPPERS:
        expected = ranks(1).run(run_on_batches, num_ranks, front)[0]
        for found in ranks(num_ranks).run(run_on_batches, num_ranks, front):
            assert_equal(found, expected)
