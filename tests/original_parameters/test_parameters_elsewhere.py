"""Parameters of which a rank holds no elements: no gradient there, no optimizer state, and nothing lost by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.api import FullOptimStateDictConfig
from fsdp_flat.sharded_grad_scaler import ShardedGradScaler
from tests.state_dict.kit import FULL, LOCAL, SHARDED, groups_of
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import Beside
from tests.support.kit import square_loss, train_on
from tests.support.models import BufferedBlock
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def of_originals(**options: Any) -> Beside:
    return Beside(seeded(), "originals", units=(BufferedBlock,), batch=batch, **options)


def hybrid_groups(strategy: str) -> dict[str, Any]:
    """Arguments for one shard group of all ranks, whatever the strategy. Every rank must call this."""
    if "HYBRID" not in strategy:
        return {}
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return {"process_group": (dist.group.WORLD, alone[dist.get_rank()])}


def elsewhere(model: nn.Module) -> list[str]:
    """Names of parameters without elements on this rank."""
    found = [name for name, param in model.named_parameters() if param.numel() == 0]
    assert len(found) > 2
    return found


def assert_grads_where_elements_are(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert (param.grad is None) == (param.numel() == 0), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_parameter_without_elements_here_has_no_gradient_once_it_is_reduced(strategy: str, rank: int) -> None:
    options = {"sharding_strategy": ShardingStrategy[strategy], **hybrid_groups(strategy)}
    beside = of_originals(**options)
    elsewhere(beside.ours)
    with beside.no_sync():
        for _ in range(2):
            beside.backward()
            # Unreduced gradients are unsharded, on every rank.
            assert all(param.grad is not None and param.grad.numel() > 0 for param in beside.ours.parameters())
    beside.backward()
    assert_grads_where_elements_are(beside.ours)
    beside.check_gradients()
    assert_grads_where_elements_are(beside.ours)


@on_ranks(2)
def test_the_peer_has_no_gradients_of_those_either(rank: int) -> None:
    ours, theirs = shard(seeded(), use_orig_params=True), shard_by_peer(seeded(), use_orig_params=True)
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        square_loss(model, batch(rank)).backward()
        assert_grads_where_elements_are(model)
        optimizer.step()
        for name, param in model.named_parameters():
            assert (param in optimizer.state) == (param.numel() > 0), name


@on_ranks(3)
def test_a_rank_that_holds_no_elements_at_all_takes_part_in_everything(rank: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(1, 1, bias=False)
    model = FSDP(nn.Sequential(nn.Linear(1, 1, bias=False)), use_orig_params=True)
    plain.load_state_dict({"weight": model.state_dict()["0.weight"]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    data = torch.ones(2, 1)
    with model.no_sync():
        model(data).square().sum().backward()
        optimizer.zero_grad()
    scaler.scale(model(data).square().sum()).backward()
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(0.5)
    plain(data).square().sum().backward()
    assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5), **CLOSE)
    scaler.step(optimizer)
    scaler.update()
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    assert_close(model.state_dict()["0.weight"], plain.weight.detach(), **CLOSE)
    assert sorted(FSDP.optim_state_dict(model, optimizer)["state"]["0.weight"]) == ["exp_avg", "exp_avg_sq", "step"]


class Keeping(torch.optim.AdamW):
    """Keeps states of every plain kind."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                kinds = {"pair": (1, 2.5), "rows": [3, None], "by": {"a": 1}, "none": None, "flag": True}
                self.state[param].update(kinds)


@pytest.mark.parametrize("kind", [FULL, LOCAL, SHARDED], ids=["full", "local", "sharded"])
@on_ranks(2)
def test_states_of_every_plain_kind_are_saved_and_loaded_though_a_rank_has_none(kind: Any, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = Keeping(model.parameters(), lr=0.1)
    train_on(model, optimizer, [batch(rank, step) for step in range(2)])
    with FSDP.state_dict_type(model, kind):
        states = FSDP.optim_state_dict(model, optimizer)
        assert len(states["state"]) == len(list(seeded().parameters()))
        for row in states["state"].values():
            assert (row["pair"], row["rows"], row["by"]) == ((1, 2.5), [3, None], {"a": 1})
            assert (row["none"], row["flag"], row["step"].item()) == (None, True, 2.0)
        other = shard(seeded(seed=1), use_orig_params=True)
        others = Keeping(other.parameters(), lr=0.1)
    with FSDP.state_dict_type(other, kind):
        loaded = FSDP.optim_state_dict_to_load(other, others, states, load_directly=True)
    for number, param in enumerate(others.param_groups[0]["params"]):
        assert (param in others.state) == (number in loaded["state"]) == (param.numel() > 0)
    whole = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, None, whole), FSDP.state_dict_type(other, FULL, None, whole):
        assert_equal(FSDP.optim_state_dict(other, others), FSDP.optim_state_dict(model, optimizer))


@on_ranks(2)
def test_a_stale_count_of_steps_where_no_elements_are_is_not_saved(rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_on(model, optimizer, [batch(rank)])
    for param in model.parameters():
        if param.numel() == 0:
            optimizer.state[param] = {key: torch.zeros(()) for key in ("step", "exp_avg", "exp_avg_sq")}
    states = FSDP.optim_state_dict(model, optimizer)["state"]
    assert {row["step"].item() for row in states.values()} == {1.0}


@on_ranks(4)
def test_hybrid_groups_on_a_mesh_have_none_either(rank: int) -> None:
    model = shard(seeded(), "HYBRID_SHARD", use_orig_params=True, **groups_of("HYBRID_SHARD mesh"))
    square_loss(model, batch(rank)).backward()
    elsewhere(model)
    assert_grads_where_elements_are(model)
