"""One replica runs forwards alone, in evaluation or in training mode, and all train on, as FSDP1 lets them."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.errors import PeerFailureError, RankMismatchError, UsageError
from tests.support import on_ranks
from tests.support.beside import FRONTS, MEMORY, ORIG_PARAMS, OURS, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.kit import BLOCKS, square_loss, wrapped
from tests.support.models import Block, Stack
from tests.support.patience import SECONDS, impatient

HYBRIDS = pytest.mark.parametrize("layout", ["HYBRID_SHARD 2x2", "_HYBRID_SHARD_ZERO2 2x2"])


def evaluate(model: Any, steps: int = 2) -> None:
    with torch.no_grad():
        for step in range(steps):
            model(batch(dist.get_rank(), step))


@FRONTS
@MEMORY
@HYBRIDS
@on_ranks(4)
def test_first_replica_evaluates_between_steps(layout: str, front: str, shared_memory: bool) -> None:
    pair = Beside(Stack(), front, **placed(layout, front, shared_memory=shared_memory))
    for _ in range(2):
        pair.train(num_steps=2)
        if dist.get_rank() < 2:
            evaluate(pair.ours)
        dist.barrier()
    pair.train(num_steps=2)


def run_alone(model: Any, *, trains: bool, num_forwards: int = 1) -> list[torch.Tensor]:
    """Return the outputs of forwards with gradients enabled, on the first half of the ranks; without any on others."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    model.train(trains)
    outputs = [model(batch(rank, 50 + step)) for step in range(num_forwards if rank < half else 0)]
    model.train()
    return outputs


@FRONTS
@MEMORY
@pytest.mark.parametrize("layout", ["HYBRID_SHARD 2x2", "_HYBRID_SHARD_ZERO2 2x2", "NO_SHARD"])
@pytest.mark.parametrize("trains", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("keeps_outputs", [False, True], ids=["dropped", "kept"])
@on_ranks(4)
def test_a_replica_may_run_forwards_with_gradients_that_no_backward_reaches(
    keeps_outputs: bool, trains: bool, layout: str, front: str, shared_memory: bool
) -> None:
    pair = Beside(Stack(), front, **placed(layout, front, shared_memory=shared_memory))
    kept: list[torch.Tensor] = []
    for num_forwards in (2, 1, 0, 3):
        outputs = run_alone(pair.ours, trains=trains, num_forwards=num_forwards)
        kept += outputs if keeps_outputs else []
        del outputs
        pair.train()
    # Forwards of this mode that all ranks run, and a backward through them.
    for model in pair.models:
        model.train(trains)
    pair.train(num_steps=2)


def clip(pair: Beside, max_norm: float) -> None:
    for optimizer in pair.optimizers.values():
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)


@FRONTS
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"])
@pytest.mark.parametrize("with_gradients", [False, True])
@on_ranks(2, 4)
def test_a_unit_trains_by_itself_after_one_replica_has_run_the_model(
    with_gradients: bool, strategy: str, front: str, num_ranks: int
) -> None:
    layout = strategy if strategy == "NO_SHARD" else f"{strategy} 2x{num_ranks // 2}"
    pair = Beside(Stack(), front, **placed(layout, front))
    outputs: list[torch.Tensor] = []
    for num_forwards in (1, 0, 2):
        with torch.set_grad_enabled(with_gradients):
            outputs += run_alone(pair.ours, trains=True, num_forwards=num_forwards)
        clip(pair, 0.1)  # without gradients, which have been cleared
        pair.backward(lambda model, x: square_loss(model.blocks[1], x))
        pair.check_gradients()
        clip(pair, 0.2)
        pair.step()
    pair.train(num_steps=2)
    outputs += run_alone(pair.ours, trains=True)
    pair.train(lambda model, x: square_loss(model.blocks[1], x))


@FRONTS
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(4)
def test_a_replica_may_run_checkpointed_forwards_that_no_backward_reaches(reentrant: bool, front: str) -> None:
    class Recomputed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    pair = Beside(Stack(block=Recomputed), front, units=(Recomputed,), **placed("HYBRID_SHARD 2x2", front))
    for keeps in (True, False):
        outputs = run_alone(pair.ours, trains=True, num_forwards=2)
        if not keeps:
            del outputs
        pair.train()


@FRONTS
@pytest.mark.parametrize("accumulates", [False, True])
@on_ranks(4)
def test_a_replica_may_run_a_forward_with_gradients_between_a_forward_and_its_backward(
    accumulates: bool, front: str
) -> None:
    pair = Beside(Stack(), front, **placed("HYBRID_SHARD 2x2", front))

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        output = model(x)
        if model is pair.ours:
            pair_outputs.extend(run_alone(model, trains=True))
        return output.square().mean()

    pair_outputs: list[torch.Tensor] = []
    for _ in range(2):
        with pair.no_sync() if accumulates else nullcontext():
            for model in pair.sharded.values():
                loss_of(model, pair.batch()).backward()
        pair.follow(lambda model, x: model(x).square().mean(), pair.num_steps)
        pair.train(lambda model, x: model(x).square().mean())


@FRONTS
@on_ranks(4)
def test_replicas_may_run_different_numbers_of_forwards_before_one_backward(front: str) -> None:
    pair = Beside(Stack(), front, note_outputs=False, **placed("HYBRID_SHARD 2x2", front))
    num_forwards = 3 if dist.get_rank() < 2 else 1

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(x + at).square().mean() for at in range(num_forwards)]).mean()

    pair.train(loss_of, num_steps=3)


@pytest.mark.parametrize("front", ["originals", "fully_shard"])
@on_ranks(4)
def test_a_replica_may_run_a_forward_with_gradients_before_a_memory_budget_is_spent(front: str) -> None:
    options = placed("HYBRID_SHARD 2x2", front)
    budget = {"reshard_after_forward": "1MB"} if front == "fully_shard" else {"sharding_strategy": "HYBRID_SHARD:1MB"}
    pair = Beside(Stack(), front, **{**options, **budget})
    run_alone(pair.ours, trains=True)
    pair.train(num_steps=3)


@FRONTS
@on_ranks(4)
def test_second_replica_evaluates_before_the_first_step(front: str) -> None:
    pair = Beside(Stack(), front, **placed("HYBRID_SHARD 2x2", front))
    if dist.get_rank() >= 2:
        evaluate(pair.ours)
    pair.train(num_steps=2)


@WRAPPER_FRONTS
@on_ranks(4)
def test_replicas_evaluate_inside_an_accumulation(front: str) -> None:
    pair = Beside(Stack(), front, **placed("HYBRID_SHARD 2x2", front))
    pair.train()
    with pair.no_sync():
        pair.backward()
    if dist.get_rank() < 2:
        evaluate(pair.ours, 3)
    pair.train()


def blocks_with_order(front: str, **options: Any) -> tuple[Any, list[Any]]:
    """Return a sharded model of three units of one size, after two steps, and its units."""
    model = Beside(nn.Sequential(Block(), Block(), Block()), front, **options).ours
    for step in range(2):
        model(batch(dist.get_rank(), step)).square().mean().backward()
    return model, list(model if front == "fully_shard" else model.module)


@pytest.mark.parametrize("front, layout", [*[(front, "HYBRID_SHARD 2x2") for front in OURS], ("flat", "NO_SHARD")])
@on_ranks(4, timeout=30)
def test_replicas_that_reduce_units_in_other_orders_raise_with_both_units(layout: str, front: str) -> None:
    model, units = blocks_with_order(front, **placed(layout, front))
    x = batch(dist.get_rank()).requires_grad_()
    # The gradient of a unit is whole once the first of its forwards is passed, so here it is reduced after the others.
    more = units[1](x).square().mean() if dist.get_rank() < 2 else 0
    (model(x).square().mean() + more).backward()
    with pytest.raises(RankMismatchError, match=r"has the reduction of unit '\d', .* has the reduction of unit '\d'"):
        model(x)


@WRAPPER_FRONTS
@on_ranks(4, timeout=50)
def test_replicas_that_reduce_different_units_raise_with_the_unit(front: str) -> None:
    os.environ["FSDP_FLAT_SHARED_MEMORY"] = "0"
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    pair = groups[rank // 2], groups[2 + rank % 2]
    model, units = blocks_with_order(front, process_group=pair, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    x, begun = batch(rank).requires_grad_(), time.monotonic()
    losses = [units[index](x).square().mean() for index in (0, 2)]
    loss = losses[0] + losses[1] if rank < 2 else losses[1]
    with impatient(), pytest.raises((RankMismatchError, PeerFailureError), match=r"the all-reduce of unit '0'"):
        run_backward_and_forward(model, loss, x)
    assert time.monotonic() - begun < SECONDS


def run_backward_and_forward(model: Any, loss: torch.Tensor, x: torch.Tensor) -> None:
    loss.backward()
    model(x)


def meta_stack(layout: str, use_orig_params: bool, *, ranks_that_write: range) -> FSDP:
    """Wrap a model on the meta device, whose weights some ranks write."""
    with torch.device("meta"):
        model = Stack(2)

    def init(module: Any) -> None:
        module.to_empty(device="cpu", recurse=False)
        if dist.get_rank() in ranks_that_write and hasattr(module, "reset_parameters"):
            torch.manual_seed(0)
            module.reset_parameters()

    options = placed(layout, shared_memory=False)
    return wrapped(model, auto_wrap_policy=BLOCKS, param_init_fn=init, use_orig_params=use_orig_params, **options)


@ORIG_PARAMS
@on_ranks(4, timeout=30)
def test_a_replica_of_a_model_from_the_meta_device_may_run_before_the_others(use_orig_params: bool) -> None:
    model = meta_stack("HYBRID_SHARD 2x2", use_orig_params, ranks_that_write=range(4))
    if dist.get_rank() >= 2:
        dist.barrier()
    model(batch(dist.get_rank()).float())
    if dist.get_rank() < 2:
        dist.barrier()
    model(batch(dist.get_rank()).float()).sum().backward()


@pytest.mark.of_guards
@ORIG_PARAMS
@on_ranks(4, timeout=50)
def test_ranks_of_a_replica_raise_together_if_one_has_no_values(use_orig_params: bool, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Ranks start from different weights")
        model = meta_stack("HYBRID_SHARD 2x2", use_orig_params, ranks_that_write=range(3))
    if rank >= 2:
        with pytest.raises(UsageError if rank == 3 else PeerFailureError, match="left the meta device and were never"):
            model(batch(rank).float())
    else:
        model(batch(rank).float())
