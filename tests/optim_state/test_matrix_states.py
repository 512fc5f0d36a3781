"""States of optimizers of whole matrices: saved under names and whole shapes, and loaded at any number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_flat import (
    FullOptimStateDictConfig,
    MatrixOptimizer,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    load_checkpoint,
    save_checkpoint,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import UnsupportedError
from tests.state_dict.kit import FULL, SHARDED, group_of, groups_of, load, peer_quiet, save, single_rank_allowed
from tests.support import assert_equal, on_ranks
from tests.support.kit import full_grads, square_loss
from tests.support.wrapper_models import batch, seeded, shard, whole_state

# The matrices are trained alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*are in no optimizer that has stepped")
Muon = getattr(torch.optim, "Muon", None)


class Mixed(torch.optim.Optimizer):
    """Keeps a state of every kind: like the parameter, a row, a square matrix, a count; cheaper than Muon."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad
                if not state:
                    state["momentum"] = torch.zeros_like(grad)
                    state["rows"] = grad.new_zeros(grad.shape[0])
                    state["square"] = grad.new_zeros(grad.shape[0], grad.shape[0])
                    state["count"], state["step"] = 0, torch.tensor(0.0)
                state["count"] += 1
                state["step"] += 1
                state["momentum"].lerp_(grad, 0.2)
                state["rows"].add_(grad.square().sum(1))
                state["square"].add_(grad @ grad.T)
                update = torch.linalg.solve(state["square"] + torch.eye(grad.shape[0]), state["momentum"])
                param.sub_(group["lr"] * update / state["rows"].sqrt().unsqueeze(1) / state["step"])


class Listing(torch.optim.SGD):
    """Keeps a list of tensors."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param]["factors"] = [torch.eye(2)]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() >= 2]


def plain_pair(make: Any = Mixed, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = seeded(seed=seed)
    return plain, make(matrices(plain))


def pair(make: Any = Mixed, seed: int = 0, how: str = "FULL_SHARD", **kwargs: Any) -> tuple[Any, MatrixOptimizer]:
    options = {**groups_of(how), **kwargs}
    model = shard(seeded(seed=seed), how.removesuffix(" mesh"), use_orig_params=True, **options)
    return model, MatrixOptimizer(model, make)


def train(model: Any, optimizer: Any, steps: range, plain: Any = None, plain_optimizer: Any = None) -> None:
    """Steps, and the same ones of the plain model on the same gradients."""
    for step in steps:
        square_loss(model, batch(0, step)).backward()
        if plain is not None:
            grads = full_grads(model)
            for name, param in plain.named_parameters():
                param.grad = grads[name]
            plain_optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def named_state(plain: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The unwrapped optimizer's state dict under names."""
    return FSDP.rekey_optim_state_dict(
        copy.deepcopy(optimizer.state_dict()), OptimStateKeyType.PARAM_NAME, plain, optim=optimizer
    )


@pytest.mark.parametrize("make", [Mixed, torch.optim.Adafactor], ids=["mixed", "adafactor"])
@on_ranks(2, 3)
def test_the_full_state_dict_is_that_of_the_unwrapped_optimizer_and_either_loads_the_other(make: Any) -> None:
    (model, ours), (plain, theirs) = pair(make), plain_pair(make)
    train(model, ours, range(2), plain, theirs)
    saved, expected = save(model, ours, FULL), named_state(plain, theirs)
    assert_equal(saved[1]["state"], expected["state"])
    options = [{key: value for key, value in group.items() if key != "params"} for group in expected["param_groups"]]
    assert [{k: v for k, v in group.items() if k != "params"} for group in saved[1]["param_groups"]] == options
    assert sorted(saved[1]["param_groups"][0]["params"]) == sorted(expected["param_groups"][0]["params"])
    # Both go on from what the other has saved.
    other, other_optimizer = pair(make, seed=1)
    load(other, other_optimizer, FULL, (plain.state_dict(), expected))
    fresh, fresh_optimizer = plain_pair(make, seed=1)
    fresh.load_state_dict(saved[0])
    by_position = FSDP.rekey_optim_state_dict(saved[1], OptimStateKeyType.PARAM_ID, fresh, optim=fresh_optimizer)
    fresh_optimizer.load_state_dict(by_position)
    train(other, other_optimizer, range(2, 4), fresh, fresh_optimizer)
    train(model, ours, range(2, 4))
    assert_equal(whole_state(other), whole_state(model))
    assert_equal(dict(fresh.state_dict()), whole_state(model))


@on_ranks(2)
def test_the_unwrapped_optimizers_own_state_dict_loads_as_it_is(rank: int) -> None:
    (model, ours), (plain, theirs) = pair(), plain_pair()
    train(model, ours, range(2), plain, theirs)
    other, other_optimizer = pair(seed=1)
    other.load_state_dict(plain.state_dict())
    other_optimizer.load_state_dict(theirs.state_dict())
    train(other, other_optimizer, range(2, 3))
    train(model, ours, range(2, 3))
    assert_equal(whole_state(other), whole_state(model))
    own = {param for param, owner in other_optimizer.state_owners.items() if owner == rank}
    assert own
    assert {param for param, state in other_optimizer.state.items() if state} == own


@pytest.mark.parametrize("how", ["FULL_SHARD", "mesh", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD mesh"])
@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
@on_ranks(4)
def test_every_form_and_strategy_resumes(kind: Any, how: str) -> None:
    model, optimizer = pair(how="FULL_SHARD" if how == "mesh" else how, **(groups_of(how) if how == "mesh" else {}))
    train(model, optimizer, range(2))
    saved = save(model, optimizer, kind)
    other, other_optimizer = pair(seed=1, how="FULL_SHARD" if how == "mesh" else how, **groups_of(how))
    load(other, other_optimizer, kind, saved)
    for one, its in ((model, optimizer), (other, other_optimizer)):
        train(one, its, range(2, 3))
    assert_equal(whole_state(other), whole_state(model))
    assert_equal(save(other, other_optimizer, FULL)[1], save(model, optimizer, FULL)[1])


@on_ranks(4)
def test_rank_zero_alone_saves_and_loads_with_rank0_only(rank: int) -> None:
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True)
    for how in ("FULL_SHARD", "HYBRID_SHARD"):
        groups = groups_of(how)
        (model, optimizer), (other, other_optimizer) = (pair(how=how, seed=seed, **groups) for seed in range(2))
        train(model, optimizer, range(1))
        expected = save(model, optimizer, FULL)[1]
        with FSDP.state_dict_type(model, FULL, None, config), FSDP.state_dict_type(other, FULL, None, config):
            saved = FSDP.optim_state_dict(model, optimizer)
            assert bool(saved) == (rank == 0)
            other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, saved or None))
        if rank == 0:
            assert_equal(saved, expected)
        assert_equal(save(other, other_optimizer, FULL)[1], expected)


@on_ranks(3)
def test_a_state_dict_of_whole_tensors_loads_rank_by_rank(rank: int, num_ranks: int) -> None:
    model, optimizer = pair()
    train(model, optimizer, range(1))
    saved = save(model, optimizer, FULL)[1]
    other, other_optimizer = pair(seed=1)
    with FSDP.state_dict_type(other, FULL):
        for turn in range(num_ranks):
            if turn == rank:
                other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, saved))
            dist.barrier()
    assert_equal(save(other, other_optimizer, FULL)[1], saved)


@on_ranks(3)
def test_a_checkpoint_resumes_at_another_number_of_ranks_and_in_another_wrapping(rank: int, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, range(2))
    save_checkpoint(tmp_path, model, optimizer)
    expected = save(model, optimizer, FULL)
    for size in (1, 2):
        group = group_of(size)
        if group is not None:
            with single_rank_allowed():
                other, other_optimizer = pair(seed=1, by_blocks=False, process_group=group)
            load_checkpoint(tmp_path, other, other_optimizer)
            assert_equal(save(other, other_optimizer, FULL)[1]["state"], expected[1]["state"])
    other, other_optimizer = pair(seed=1, by_blocks=False)
    load_checkpoint(tmp_path, other, other_optimizer)
    train(other, other_optimizer, range(2, 3))
    train(model, optimizer, range(2, 3))
    assert_equal(whole_state(other), whole_state(model))


@on_ranks(2)
def test_slices_and_whole_states_load_from_each_others_checkpoints(tmp_path: Path) -> None:
    def momentum(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    model, optimizer = pair(momentum)
    sliced = momentum([param for param, _ in optimizer.state_owners.items()])
    train(model, optimizer, range(2))
    expected = save(model, optimizer, FULL)[1]
    save_checkpoint(tmp_path / "whole", model, optimizer)
    load_checkpoint(tmp_path / "whole", model, sliced)
    assert_equal(save(model, sliced, FULL)[1], expected)
    save_checkpoint(tmp_path / "sliced", model, sliced)
    other, other_optimizer = pair(momentum, seed=1)
    load_checkpoint(tmp_path / "sliced", other, other_optimizer)
    assert_equal(save(other, other_optimizer, FULL)[1], expected)


@pytest.mark.parametrize("boxes", [False, True])
@on_ranks(2)
def test_torchs_checkpoints_take_the_sharded_state_dict(boxes: bool, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, range(2))
    expected = save(model, optimizer, FULL)[1]["state"]
    other, other_optimizer = pair(seed=1)
    train(other, other_optimizer, range(1))
    config = ShardedOptimStateDictConfig(boxes=boxes)
    with peer_quiet():
        with FSDP.state_dict_type(model, SHARDED, None, config):
            dcp.save({"optim": FSDP.optim_state_dict(model, optimizer)["state"]}, checkpoint_id=tmp_path)
        with FSDP.state_dict_type(other, SHARDED, None, config):
            state = FSDP.optim_state_dict(other, other_optimizer)
            dcp.load({"optim": state["state"]}, checkpoint_id=tmp_path)
            other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, state))
    found = save(other, other_optimizer, FULL)[1]["state"]
    for fqn, row in expected.items():
        assert_equal(
            {k: v for k, v in found[fqn].items() if k != "count"}, {k: v for k, v in row.items() if k != "count"}
        )


@on_ranks(2)
def test_a_state_that_is_a_list_of_tensors_is_refused_by_name_when_it_is_saved() -> None:
    model, optimizer = pair(lambda params: Listing(params, lr=0.1))
    train(model, optimizer, range(1))
    with pytest.raises(Exception, match=r"State 'factors' of '.*' \(unit .*\) is a list of tensors") as caught:
        save(model, optimizer, FULL)
    assert isinstance(caught.value, (UnsupportedError, RuntimeError))
