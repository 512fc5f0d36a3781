"""Two ranks train on one device over gloo as a plain replica does; on the CPU a few of the same tests run."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.sharded_grad_scaler import ShardedGradScaler
from tests.gpu.accelerator import Recomputed, Trainer, compute_device, kind_id, low_loss, on_devices
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import full_params, square_loss
from tests.support.steps import STRATEGIES

FULL = ShardingStrategy.FULL_SHARD
GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
HYBRID = ShardingStrategy.HYBRID_SHARD
NUM_STEPS = 4
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffload(offload_params=True)
BOTH_KINDS = [False, True]


def meshes_of(strategy: ShardingStrategy) -> list[tuple[int, int] | None]:
    """Return shapes (replicas, shards) of two ranks; None for strategies without a mesh."""
    return [(2, 1), (1, 2)] if "HYBRID" in strategy.name else [None]


EVERY = [
    (strategy, shape, kind)
    for strategy, kind in itertools.product(STRATEGIES, BOTH_KINDS)
    for shape in meshes_of(strategy)
]


def mesh_on(where: str, shape: tuple[int, int] | None) -> dict[str, Any]:
    """Make ``device_mesh`` of a shape, of the kind of device that computes."""
    if shape is None:
        return {}
    device = compute_device(where)
    return {"device_mesh": init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))}


@on_devices("strategy, shape, use_orig_params", EVERY, [(FULL, None, True), (HYBRID, (2, 1), False)], kind_id)
@on_ranks(2)
def test_every_strategy_trains_as_a_replica_does(
    where: str, strategy: ShardingStrategy, shape: tuple[int, int] | None, use_orig_params: bool
) -> None:
    trainer = Trainer(where, sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_on(where, shape))
    trainer.train(num_steps=NUM_STEPS)


OPTIONS: dict[str, dict[str, Any]] = {
    "forward_prefetch": {"forward_prefetch": True},
    "backward_post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "unlimited": {"limit_all_gathers": False},
    "one_unit": {"units": ()},
}


@on_devices("name, use_orig_params", list(itertools.product(OPTIONS, BOTH_KINDS)), [], kind_id)
@on_ranks(2)
def test_other_schedules_train_as_a_replica_does(where: str, name: str, use_orig_params: bool) -> None:
    trainer = Trainer(where, use_orig_params=use_orig_params, **OPTIONS[name])
    trainer.train(num_steps=NUM_STEPS)


@on_devices("strategy, use_orig_params", list(itertools.product([FULL, GRAD_OP], BOTH_KINDS)), [(FULL, True)], kind_id)
@on_ranks(2)
def test_bf16_parameters_with_fp32_reductions_train_as_a_replica_does(
    where: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "mixed_precision": LOW, "note_outputs": False}
    tolerance = {"atol": 1e-4, "rtol": 1e-2}
    trainer = Trainer(where, use_orig_params=use_orig_params, tolerance=tolerance, **options)
    trainer.train(low_loss, num_steps=NUM_STEPS)
    assert {param.dtype for param in trainer.ours.parameters()} == {torch.float32}


@on_devices(
    "strategy, use_orig_params",
    list(itertools.product([FULL, GRAD_OP, ShardingStrategy.NO_SHARD], BOTH_KINDS)),
    [(FULL, False)],
    kind_id,
)
@on_ranks(2)
def test_offloaded_shards_are_pinned_and_train_as_a_replica_does(
    where: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    trainer = Trainer(where, sharding_strategy=strategy, use_orig_params=use_orig_params, cpu_offload=OFFLOAD)
    for _ in range(NUM_STEPS):
        trainer.backward()
        for param in trainer.ours.parameters():
            if param.numel() > 0:
                assert param.device.type == "cpu"
                assert param.data.is_pinned() == (where == "accelerator")
                assert param.grad is not None
                assert param.grad.device.type == "cpu"
        trainer.check_gradients()
        trainer.step()
    trainer.check_parameters()


@on_devices("strategy, use_orig_params", list(itertools.product([FULL, GRAD_OP], BOTH_KINDS)), [(FULL, True)], kind_id)
@on_ranks(2)
def test_the_scaler_skips_a_step_of_fp16_that_overflowed_on_one_rank(
    where: str, strategy: ShardingStrategy, use_orig_params: bool, rank: int
) -> None:
    precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    trainer = Trainer(where, sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=precision)
    scaler = ShardedGradScaler(trainer.device.type, init_scale=1024.0)
    model, optimizer = trainer.ours, torch.optim.SGD(trainer.ours.parameters(), lr=0.01)
    states = [full_params(model)]
    for step in range(3):
        # In fp32, or the scaled square of the output would not fit.
        loss = square_loss(model, trainer.batch(step)).float()
        factor = float("inf") if step == 1 and rank == 1 else 1.0
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append(full_params(model))
    assert scaler.get_scale() == 512.0
    assert_equal(states[2], states[1], what="parameters around the step that is left out")
    assert not torch.equal(states[1]["first.weight"], states[0]["first.weight"])
    assert not torch.equal(states[3]["first.weight"], states[2]["first.weight"])
    assert all(param.isfinite().all() for param in states[3].values())


@on_devices(
    "use_reentrant, strategy, use_orig_params",
    list(itertools.product([False, True], [FULL, GRAD_OP], BOTH_KINDS)),
    [(False, FULL, True), (True, FULL, False)],
    kind_id,
)
@on_ranks(2)
def test_recomputed_activations_train_as_a_replica_does(
    where: str, use_reentrant: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    build = functools.partial(Recomputed, use_reentrant=use_reentrant)
    trainer = Trainer(where, build, sharding_strategy=strategy, use_orig_params=use_orig_params)
    trainer.train(num_steps=NUM_STEPS)


@on_devices(
    "strategy, use_orig_params, offload",
    [(*case, False) for case in itertools.product(STRATEGIES[:3], BOTH_KINDS)] + [(FULL, False, True)],
    [(FULL, True, False)],
    kind_id,
)
@on_ranks(2)
def test_gradients_accumulate_inside_no_sync(
    where: str, strategy: ShardingStrategy, use_orig_params: bool, offload: bool, rank: int
) -> None:
    trainer = Trainer(
        where,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        cpu_offload=OFFLOAD if offload else None,
    )
    for _ in range(2):
        with trainer.no_sync():
            trainer.backward()
            trainer.backward()
        trainer.train()


@on_devices(
    "norm_type, use_orig_params, offload",
    [*((*case, False) for case in itertools.product([2.0, float("inf")], BOTH_KINDS)), (2.0, True, True)],
    [(2.0, False, False)],
    kind_id,
)
@on_ranks(2)
def test_gradients_are_clipped_by_the_norm_of_a_replica(
    where: str, norm_type: float, use_orig_params: bool, offload: bool, rank: int
) -> None:
    trainer = Trainer(where, use_orig_params=use_orig_params, cpu_offload=OFFLOAD if offload else None)
    trainer.backward()
    norm = trainer.ours.clip_grad_norm_(1e-3, norm_type)
    expected = nn.utils.clip_grad_norm_(trainer.plain.parameters(), 1e-3, norm_type)
    assert_close(norm.cpu(), expected.detach().cpu(), what="norm", **trainer.tolerance)
    trainer.check_gradients()


@on_devices("use_orig_params", BOTH_KINDS, [True], kind_id)
@on_ranks(2)
def test_changes_inside_summon_full_params_are_written_back(where: str, use_orig_params: bool) -> None:
    trainer = Trainer(where, use_orig_params=use_orig_params)
    trainer.train()
    with FSDP.summon_full_params(trainer.ours), torch.no_grad():
        for param in trainer.ours.parameters():
            assert param.device == trainer.device
            param.mul_(0.5)
    with torch.no_grad():
        for param in trainer.plain.parameters():
            param.mul_(0.5)
    trainer.check_parameters()
    trainer.train()
