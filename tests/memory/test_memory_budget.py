"""A memory budget: the last units of a forward stay unsharded for backward, as far as the bytes go."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy, describe
from fsdp_flat.composable import fully_shard, trace
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionError
from fsdp_flat.sizes import nbytes_of, size_text
from tests.inspection.test_profiler_and_logs import Lines
from tests.support import assert_equal, on_ranks
from tests.support.beside import assert_idle, blocks_and_root, sgd
from tests.support.kit import BLOCKS, Block, Stack, Trouble, batch, full_params, mesh, seeded, square_loss, wrapped
from tests.support.steps import acquaint, recorded

NUM_BLOCKS = 5
# Of a Block: 8 x 17 + 17 + 17 x 8 elements of 4 bytes, and padding.
BLOCK_NBYTES = 1156
FRONTS = pytest.mark.parametrize("front", ["flat", "original", "fully_shard"])
MESHES = pytest.mark.parametrize("is_hybrid", [False, True], ids=["full", "hybrid"])


def deep() -> Stack:
    return Stack(NUM_BLOCKS)


def sharded(
    front: str, budget: str | None, *, is_hybrid: bool = False, build: Callable[[], nn.Module] = deep, **kwargs: Any
) -> Any:
    """Shard a model with a memory budget, or as FULL_SHARD does."""
    module, over = seeded(build), mesh(2, dist.get_world_size() // 2) if is_hybrid else None
    if front == "fully_shard":
        return blocks_and_root(module, fully_shard, mesh=over, reshard_after_forward=budget, **kwargs)
    name = "HYBRID_SHARD" if is_hybrid else "FULL_SHARD"
    strategy = ShardingStrategy[name] if budget is None else f"{name}:{budget}"
    kwargs = {"auto_wrap_policy": BLOCKS, **kwargs}
    original = front == "original"
    return wrapped(module, sharding_strategy=strategy, device_mesh=over, use_orig_params=original, **kwargs)


def budget_for(num_blocks: float, *, itemsize: int = 4) -> str:
    """Return a budget for some blocks, which have at most 128 bytes of padding each."""
    return f"{int(num_blocks * (BLOCK_NBYTES + 128)) * itemsize // 4}B"


def train(model: nn.Module, rank: int, num_steps: int, *, first: int = 0, loss_of: Any = square_loss) -> None:
    optimizer = sgd(model)
    for step in range(first, first + num_steps):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def held_nbytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of unsharded parameters that exist now, by unit, without those of the outermost."""
    return {
        unit.name: nbytes
        for unit in units_of(model)[1:]
        if (nbytes := sum(group.output.nbytes for group in unit.param_groups if group.output.owns_memory))
    }


def held_after_forward(model: nn.Module, rank: int, loss_of: Any = square_loss) -> dict[str, int]:
    loss = loss_of(model, batch(rank))
    held = held_nbytes(model)
    loss.backward()
    assert_idle(model)
    return held


def num_gathers(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    with trace(model) as events:
        run()
    found = Counter(name for event, name in events if event == "unshard")
    return {unit.name: found[unit.name] for unit in units_of(model)[1:]}


def blocks(*indices: int) -> list[str]:
    return [f"blocks.{index}" for index in indices]


@on_ranks(2, 4)
@MESHES
@FRONTS
def test_training_with_a_budget_gives_the_bits_of_full_sharding(front: str, is_hybrid: bool, rank: int) -> None:
    weights = []
    for budget in (None, budget_for(2.5), "1GB"):
        model = sharded(front, budget, is_hybrid=is_hybrid)
        train(model, rank, 4)
        weights.append(full_params(model))
        assert_idle(model)
    assert_equal(weights[1], weights[0])
    assert_equal(weights[2], weights[0])


@on_ranks(2, 4)
@FRONTS
def test_the_units_within_the_budget_are_gathered_once_a_step_and_fewer_bytes_are_sent(front: str, rank: int) -> None:
    models = {budget: sharded(front, budget) for budget in (None, budget_for(2.5), "1GB")}
    found, sent = [], []
    for model in models.values():
        acquaint(model)
        train(model, rank, 2)
        with recorded() as record:
            found.append(num_gathers(model, lambda: square_loss(model, batch(rank)).backward()))  # noqa: B023
        assert {call.name for call in record.calls} == {"gather", "reduction", "all_reduce"}
        sent.append(record.sent("gather"))
    # The last unit stays with every strategy, as the first of the backward.
    assert list(found[0].values()) == [2, 2, 2, 2, 1]
    assert list(found[1].values()) == [2, 2, 2, 1, 1]
    assert list(found[2].values()) == [1, 1, 1, 1, 1]
    of_block = sum(group.layout.shard_numel for group in units_of(model)[1].param_groups) * 4
    others = dist.get_world_size() - 1
    assert sent[0] - sent[1] == of_block * others
    assert sent[0] - sent[2] == 4 * of_block * others


@on_ranks(2, 4)
@MESHES
@FRONTS
def test_a_step_holds_no_more_than_the_budget_after_forward(front: str, is_hybrid: bool, rank: int) -> None:
    for num_blocks, expected in ((1.5, blocks(4)), (2.5, blocks(3, 4)), (3.0, blocks(2, 3, 4))):
        budget = budget_for(num_blocks)
        model = sharded(front, budget, is_hybrid=is_hybrid)
        train(model, rank, 1)
        held = held_after_forward(model, rank)
        if units_of(model)[1].needs_all_gather:
            assert list(held) == expected
        assert sum(held.values()) <= int(budget[:-1])


@on_ranks(2)
@FRONTS
def test_a_budget_below_every_unit_is_full_sharding_and_warns_once(front: str, rank: int) -> None:
    models = [sharded(front, budget) for budget in (None, "1B")]
    train(models[0], rank, 3)
    with pytest.warns(
        UserWarning, match=r"budget of 1 B keeps no unit.*'blocks\.4', the smallest, takes \d\.\d+ kB"
    ) as said:
        train(models[1], rank, 3)
    assert len(said) == 1
    gathers = [num_gathers(model, lambda: held_after_forward(model, rank)) for model in models]  # noqa: B023
    assert gathers[0] == gathers[1]


@on_ranks(2)
@FRONTS
def test_the_first_forward_keeps_nothing_since_its_order_is_not_known(front: str, rank: int) -> None:
    model = sharded(front, "1GB")
    assert list(held_after_forward(model, rank)) == blocks(4)
    assert list(held_after_forward(model, rank)) == blocks(0, 1, 2, 3, 4)


@on_ranks(2)
@FRONTS
def test_the_units_that_run_last_stay_whatever_the_order_of_registration_is(front: str, rank: int) -> None:
    def reversed_order() -> Stack:
        model = deep()
        model.order.reverse()
        return model

    model = sharded(front, budget_for(2.5), build=reversed_order)
    train(model, rank, 1)
    assert list(held_after_forward(model, rank)) == blocks(0, 1)


@on_ranks(2)
@FRONTS
def test_a_unit_that_runs_twice_counts_once_and_trains_as_with_full_sharding(front: str, rank: int) -> None:
    def reusing() -> Stack:
        model = deep()
        model.order = [0, 4, 1, 2, 3, 4]
        return model

    weights = []
    for budget in (None, budget_for(2.5)):
        model = sharded(front, budget, build=reusing)
        train(model, rank, 3)
        weights.append(full_params(model))
    assert_equal(weights[1], weights[0])
    assert list(held_after_forward(model, rank)) == blocks(3, 4)
    gathers = num_gathers(model, lambda: held_after_forward(model, rank))
    assert gathers["blocks.4"] == gathers["blocks.3"] == 1


@on_ranks(2)
@FRONTS
def test_several_forwards_before_a_backward_share_the_budget(front: str, rank: int) -> None:
    def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return square_loss(model, x) + square_loss(model, 2 * x)

    weights = []
    for budget in (None, budget_for(2.5)):
        model = sharded(front, budget)
        train(model, rank, 3, loss_of=twice)
        weights.append(full_params(model))
    assert_equal(weights[1], weights[0])
    assert list(held_after_forward(model, rank, twice)) == blocks(3, 4)
    gathers = num_gathers(model, lambda: held_after_forward(model, rank, twice))
    assert gathers["blocks.3"] == gathers["blocks.4"] == 1


@on_ranks(2)
@FRONTS
def test_evaluation_keeps_nothing_and_may_come_first_or_in_between(front: str, rank: int) -> None:
    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(batch(rank, 50))
        assert held_nbytes(model) == {}
        assert_idle(model)

    weights = []
    for budget in (None, budget_for(2.5)):
        model = sharded(front, budget)
        evaluate(model)
        for step in range(3):
            train(model, rank, 1, first=step)
            evaluate(model)
        weights.append(full_params(model))
    assert_equal(weights[1], weights[0])
    assert list(held_after_forward(model, rank)) == blocks(3, 4)


@on_ranks(2)
@FRONTS
def test_parameters_are_freed_after_a_backward_that_reduces_nothing(front: str, rank: int) -> None:
    def accumulate(model: Any, x: torch.Tensor) -> torch.Tensor:
        if front == "fully_shard":
            model.set_requires_gradient_sync(False)
            square_loss(model, 2 * x).backward()
            model.set_requires_gradient_sync(True)
        else:
            with model.no_sync():
                square_loss(model, 2 * x).backward()
        assert held_nbytes(model) == {}
        return square_loss(model, x)

    weights = []
    for budget in (None, budget_for(2.5)):
        model = sharded(front, budget)
        train(model, rank, 3, loss_of=accumulate)
        weights.append(full_params(model))
    assert_equal(weights[1], weights[0])


@on_ranks(2)
@FRONTS
def test_ranks_keep_the_same_units_after_a_forward_that_failed_on_one_of_them(front: str, rank: int) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            if self.fails:
                raise Trouble
            return x

    model = sharded(front, budget_for(2.5), build=Failing)
    inner = model if front == "fully_shard" else model.module
    inner.fails = rank == 0
    with torch.no_grad():
        if rank == 0:
            with pytest.raises(Trouble):
                model(batch(rank))
        else:
            model(batch(rank))
    inner.fails = False
    dist.barrier()
    for step in range(3):
        square_loss(model, batch(rank, step)).backward()
    assert list(held_after_forward(model, rank)) == blocks(3, 4)


@on_ranks(2)
def test_ranks_that_were_given_different_budgets_keep_what_all_can_or_fail_together(rank: int) -> None:
    model = sharded("fully_shard", budget_for(3.5 if rank else 1.5))
    train(model, rank, 2)
    assert list(held_after_forward(model, rank)) == blocks(4)
    with pytest.raises(ValueError, match=r"Ranks were given different models.*FULL_SHARD:"):
        sharded("flat", budget_for(3.5 if rank else 1.5))


@on_ranks(2)
def test_the_budget_counts_bytes_in_the_dtype_of_compute(rank: int) -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16)
    model = sharded("original", budget_for(2.5, itemsize=2), mixed_precision=low)
    train(model, rank, 1)
    assert list(held_after_forward(model, rank)) == blocks(3, 4)


@on_ranks(2)
def test_the_budget_of_the_outermost_module_is_that_of_modules_without_a_choice_of_their_own(rank: int) -> None:
    model = seeded(deep)
    for index, block in enumerate(model.blocks):
        fully_shard(block, reshard_after_forward=True if index == 3 else None)
    fully_shard(model, reshard_after_forward=budget_for(2.5))
    train(model, rank, 1)
    assert list(held_after_forward(model, rank)) == blocks(2, 4)
    model.blocks[2].set_reshard_after_forward(True)
    assert list(held_after_forward(model, rank)) == blocks(4)


@on_ranks(2)
def test_units_of_one_tree_have_one_budget(rank: int) -> None:
    model = seeded(deep)
    for block, budget in zip(model.blocks, ("1GB", "1000MB", "1GB", "2GB", "1GB"), strict=True):
        fully_shard(block, reshard_after_forward=budget)
    fully_shard(model)
    with pytest.raises(OptionError, match=r"share one memory budget; got 1GB in unit 'blocks\.0'; 2GB in .*3'"):
        model(batch(rank))


@on_ranks(2)
@pytest.mark.parametrize(
    "budget, message",
    [
        *(
            (f"FULL_SHARD:{size}", f"sharding_strategy.*unit.*got {size!r}")
            for size in ("40", "40Gb", "40 giga", "1.5k")
        ),
        *(
            (f"FULL_SHARD:{size}", f"sharding_strategy.*got {size!r}")
            for size in ("50%", "-1GB", "1,5GB", "", "1.2.3GB")
        ),
        ("SHARD_GRAD_OP:40GB", "SHARD_GRAD_OP frees no parameters between forward and backward"),
        ("FULL:40GB", r"sharding_strategy must be one of ShardingStrategy\.FULL_SHARD.*\"FULL_SHARD:40GB\""),
        ("FULL_SHARD 40GB", r"sharding_strategy must be one of ShardingStrategy\.FULL_SHARD.*\"FULL_SHARD:40GB\""),
        ("", r"sharding_strategy must be one of ShardingStrategy\.FULL_SHARD"),
    ],
)
def test_a_text_that_names_no_strategy_or_no_size_is_refused(budget: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FSDP(Block(), sharding_strategy=budget)


@on_ranks(2)
@pytest.mark.parametrize("text", ["FULL_SHARD", "shard_grad_op", "Full_Shard:40GB", " full_shard : 40 gb "])
def test_a_strategy_is_named_in_any_case_with_a_budget_and_without(text: str) -> None:
    model = FSDP(Block(), sharding_strategy=text)
    assert model.sharding_strategy is ShardingStrategy[text.partition(":")[0].strip().upper()]
    budget = units_of(model)[0].options.strategy.budget_nbytes
    assert budget == (40 * 10**9 if ":" in text else None)


@on_ranks(2)
@pytest.mark.parametrize("size", ["many GB", "40", "40Gb", "50%", "-1GB", "1,5GB"])
def test_a_size_that_is_none_is_refused_by_fully_shard(size: str) -> None:
    with pytest.raises(OptionError, match=f"reshard_after_forward.*got {size!r}"):
        fully_shard(Block(), reshard_after_forward=size)


@on_ranks(2)
@FRONTS
def test_the_units_that_stay_are_logged_once_and_in_the_description(front: str, rank: int) -> None:
    model = sharded(front, budget_for(2.5))
    assert describe(model).kept_for_backward == ()
    assert "none so far" in str(describe(model))
    with Lines(logging.INFO) as lines:
        train(model, rank, 4)
    assert [line for line in lines if "budget" in line] == [
        f"memory budget of {size_text(nbytes_of(budget_for(2.5)))}: 2 units stay unsharded from forward to "
        "backward: 'blocks.3', 'blocks.4'"
    ]
    assert describe(model).kept_for_backward == ("blocks.3", "blocks.4")
    assert "by the memory budget: 'blocks.3', 'blocks.4'" in str(describe(model))
    assert "memory budget" not in str(describe(sharded(front, None)))


@on_ranks(2)
@FRONTS
def test_descriptions_name_the_budget_and_count_it(front: str) -> None:
    model, plain = sharded(front, "2.5kB"), sharded(front, None)
    found, without = describe(model), describe(plain)
    assert {unit.strategy for unit in found.units} == {"FULL_SHARD:2.5kB"}
    assert found.most_gathered_nbytes == without.most_gathered_nbytes + 2500
    assert "FULL_SHARD:2.5kB over 2 ranks" in repr(model)
    if front != "fully_shard":
        assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    most = describe(sharded(front, "1TB")).most_gathered_nbytes
    assert most == sum(unit.gathered_nbytes for unit in without.units)


@on_ranks(4)
@FRONTS
def test_no_replica_waits_for_another_one_in_an_evaluation_after_the_first_step(front: str, rank: int) -> None:
    model = sharded(front, budget_for(2), is_hybrid=True)
    train(model, rank, 1)
    if rank < 2:
        with torch.no_grad():
            model(batch(rank))
    dist.barrier()
