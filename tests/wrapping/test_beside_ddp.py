"""Sharded parameters inside DistributedDataParallel are an error with the way out; what FSDP1 trains rightly trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, fully_shard
from fsdp_flat.errors import UsageError
from tests.support import assert_close, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import batch, mesh, seeded, square_loss, train_on, wrapped


def small() -> Any:
    return nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2))


def part(model: Any, shard: Callable[[Any], Any]) -> Any:
    model[1] = shard(model[1])
    return model


def own_group() -> dist.ProcessGroup:
    """A group of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def losses(model: nn.Module, rank: int) -> list[float]:
    """Losses of the average batch, after each step on this rank's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        train_on(model, optimizer, [batch(rank, step)])
        found.append(square_loss(model, torch.ones(2, 8)).item())
    return found


def expected(num_ranks: int) -> list[float]:
    """The losses of a plain model on the batches of all ranks."""
    plain = seeded(small)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    found = []
    for step in range(3):
        x = torch.cat([batch(rank, step) for rank in range(num_ranks)])
        train_on(plain, optimizer, [x])
        found.append(square_loss(plain, torch.ones(2, 8)).item())
    return found


@ORIG_PARAMS
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
@on_ranks(2)
def test_a_wrapper_inside_ddp_is_an_error_on_every_rank(whole: bool, use_orig_params: bool) -> None:
    def shard(module: nn.Module) -> nn.Module:
        return FSDP(module, use_orig_params=use_orig_params)

    model = shard(seeded(small)) if whole else part(seeded(small), shard)
    name = "_flat_param" if not use_orig_params else "0.weight"
    with pytest.raises(UsageError, match=rf"over ranks \[0, 1\].*{name}.*(?s:.*)Leave DDP out.*HYBRID_SHARD"):
        DDP(model)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
@on_ranks(2)
def test_fully_shard_inside_ddp_is_an_error_on_every_rank(whole: bool) -> None:
    model = fully_shard(seeded(small)) if whole else part(seeded(small), fully_shard)
    with pytest.raises(UsageError, match="Leave DDP out"):
        DDP(model)


@on_ranks(2)
def test_ddp_around_a_module_inside_a_wrapper_is_an_error_on_every_rank() -> None:
    model = FSDP(seeded(small), use_orig_params=True)
    with pytest.raises(UsageError, match=r"'0.weight'.*put DDP around that part before"):
        model.module[1] = DDP(model.module[1])


@ORIG_PARAMS
@on_ranks(4)
def test_ddp_over_the_replicas_of_a_wrapper_is_an_error(use_orig_params: bool) -> None:
    shards = mesh(2, 2)
    model = FSDP(seeded(small), process_group=shards.get_group("shard"), use_orig_params=use_orig_params)
    with pytest.raises(UsageError, match="HYBRID_SHARD"):
        DDP(model, process_group=shards.get_group("replicate"))


@ORIG_PARAMS
@pytest.mark.parametrize("kind", ["inside", "around", "ignored", "no sync"])
@on_ranks(2)
def test_what_is_right_on_fsdp1_trains_as_one_process(kind: str, use_orig_params: bool, rank: int) -> None:
    model = seeded(small)
    if kind == "inside":
        model = FSDP(part(model, DDP), use_orig_params=use_orig_params)
    elif kind == "around":
        model = FSDP(DDP(model), use_orig_params=use_orig_params)
    elif kind == "ignored":
        model = part(model, lambda module: FSDP(module, use_orig_params=use_orig_params))
        names = [name for name, _ in model.named_parameters() if name.startswith("1.")]
        DDP._set_params_and_buffers_to_ignore_for_model(model, names)
        model = DDP(model)
    else:
        model = DDP(FSDP(model, use_orig_params=use_orig_params), init_sync=False)
    assert_close(losses(model, rank), expected(2), rtol=1e-4, atol=1e-5)


@ORIG_PARAMS
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "no_shard"])
@on_ranks(2)
def test_ddp_averages_gradients_of_units_that_shard_nothing(
    alone: bool, whole: bool, use_orig_params: bool, rank: int
) -> None:
    """With use_orig_params=False as on FSDP1; its original parameters DDP leaves apart, in silence."""
    group = own_group() if alone else None

    def shard(module: nn.Module) -> nn.Module:
        strategy = ShardingStrategy.NO_SHARD
        return wrapped(module, process_group=group, sharding_strategy=strategy, use_orig_params=use_orig_params)

    model = DDP(shard(seeded(small)) if whole else part(seeded(small), shard))
    assert_close(losses(model, rank), expected(2), rtol=1e-4, atol=1e-5)
    if alone:
        model = shard(seeded(small))
        with pytest.raises(UsageError, match="find_unused_parameters"):
            DDP(model, find_unused_parameters=True)
