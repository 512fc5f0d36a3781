"""Saved state of fully_shard-ed models, of wrappers, and of mixtures: each loads into the others."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_flat import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedEMA,
    StateDictType,
    compare_with,
    describe,
    installed,
    iter_full_state_dict,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
    unwrap,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.composable import fully_shard
from fsdp_flat.layout import clean_fqn
from tests.support import on_ranks
from tests.support.kit import BLOCKS, mesh, normal, square_loss, train_on, wrapped
from tests.support.models import Stack

# "flat" and "orig": wrapper units; "rows": fully_shard; "inner": fully_shard-ed blocks in a wrapper; "outer": the
# reverse; "groups": a unit of several modules; "columns": Shard(1) where it can be.
FRONTS = ["flat", "orig", "rows", "inner", "outer", "groups", "columns"]


def stack(seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    model = Stack()
    model.register_buffer("mean", torch.randn(3))
    return model


def made(front: str, model: Stack) -> nn.Module:
    # With a mesh the wrapper's chunks are DTensors; torch cannot load ShardedTensors on ranks without elements.
    on = init_device_mesh("cpu", (dist.get_world_size(),))
    if front in ("flat", "orig"):
        return wrapped(model, auto_wrap_policy=BLOCKS, use_orig_params=front == "orig", device_mesh=on)
    if front == "inner":
        for block in model.blocks:
            fully_shard(block)
        return wrapped(model, use_orig_params=True, device_mesh=on)
    if front == "outer":
        for index in range(len(model.blocks)):
            model.blocks[index] = wrapped(model.blocks[index], device_mesh=on)
        return fully_shard(model)
    if front == "groups":
        fully_shard(list(model.blocks))
        return fully_shard([model.first, model.head]) and fully_shard(model)
    size = dist.get_world_size()

    def column(param: nn.Parameter) -> Shard | None:
        return Shard(1) if front == "columns" and param.ndim > 1 and param.shape[1] % size == 0 else None

    for block in model.blocks:
        fully_shard(block, shard_placement_fn=column)
    return fully_shard(model, shard_placement_fn=column)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: list[int]) -> list[float]:
    """Train on the same batches on every rank, so that any number of ranks gives the same result."""
    return [loss.item() for loss in train_on(model, optimizer, [normal(seed, 3, 8) for seed in seeds])]


def plain_after(seeds: list[int]) -> tuple[Stack, torch.optim.Optimizer]:
    model = stack()
    optimizer = adam(model)
    steps(model, optimizer, seeds)
    return model, optimizer


def assert_full(values: Any, expected: nn.Module) -> None:
    wanted = expected.state_dict()
    assert set(values) == set(wanted)
    for name, value in values.items():
        assert not isinstance(value, DTensor), name
        torch.testing.assert_close(value, wanted[name], msg=lambda text, name=name: f"{name}: {text}")


def full_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(iter_full_state_dict(model, dst=None))


@on_ranks(2, 4)
@pytest.mark.parametrize("front", FRONTS)
def test_full_tensors_are_streamed_saved_and_loaded(front: str, tmp_path: Path, rank: int) -> None:
    plain, _ = plain_after([1, 2])
    model = made(front, stack())
    steps(model, adam(model), [1, 2])
    assert_full(full_of(model), plain)
    one = {name: value for name, value in iter_full_state_dict(model, dst=0) if value is not None}
    if rank == 0:
        assert_full(one, plain)
    elif front in ("rows", "columns", "groups"):
        assert set(one) == {"mean"}
    save_full(model, tmp_path)
    fresh = made(front, stack(5))
    load_full(fresh, tmp_path)
    assert_full(full_of(fresh), plain)
    # A full state dict, of any front and on every rank, loads by load_state_dict.
    fresh = made(front, stack(6))
    fresh.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()})
    assert_full(full_of(fresh), plain)
    x = torch.ones(2, 8)
    torch.testing.assert_close(fresh(x), plain(x))


@on_ranks(2)
@pytest.mark.parametrize("front", ["flat", "orig", "inner"])
@pytest.mark.parametrize("rank0_only", [False, True])
def test_a_wrappers_full_state_dict_has_no_dtensors(front: str, rank0_only: bool, rank: int) -> None:
    plain, _ = plain_after([1, 2])
    model = made(front, stack())
    steps(model, adam(model), [1, 2])
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=rank0_only)):
        state = model.state_dict()
    if rank0_only and rank:
        assert not state
    else:
        assert_full(state, plain)
        assert list(state) == list(plain.state_dict())


@on_ranks(2, 4)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_full_optimizer_states_equal_a_plain_optimizers(front: str, rank0_only: bool, rank: int) -> None:
    plain, optimizer = plain_after([1, 2])
    model = made(front, stack())
    own = adam(model)
    steps(model, own, [1, 2])
    names = [name for name, _ in plain.named_parameters()]
    fresh = made(front, stack(5))
    other = adam(fresh)
    for each in (model, fresh):
        options = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=rank0_only)
        FSDP.set_state_dict_type(each, StateDictType.FULL_STATE_DICT, *options)
    full = FSDP.optim_state_dict(model, own)
    if rank0_only and rank:
        assert not full
    else:
        assert set(full["state"]) == set(names)
        for position, name in enumerate(names):
            for key, value in optimizer.state_dict()["state"][position].items():
                assert not isinstance(full["state"][name][key], DTensor)
                torch.testing.assert_close(full["state"][name][key], value)
    # Load it into another model of the same front.
    fresh.load_state_dict(plain.state_dict())
    other.load_state_dict(FSDP.optim_state_dict_to_load(fresh, other, full))
    expected = steps(plain, optimizer, [3, 4])
    torch.testing.assert_close(torch.tensor(steps(fresh, other, [3, 4])), torch.tensor(expected))
    assert_full(full_of(fresh), plain)


def save_on_two(front: str, path: Path, kind: str) -> None:
    model = made(front, stack())
    optimizer = adam(model)
    steps(model, optimizer, [1, 2])
    if kind == "ours":
        save_checkpoint(path, model, optimizer, step=1, extra={"front": front})
    else:
        with installed(), FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model_state, optim_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=path)


def load_and_compare(front: str, path: Path, kind: str) -> None:
    plain, plain_optimizer = plain_after([1, 2])
    model = made(front, stack(5))
    optimizer = adam(model)
    if kind == "ours":
        found = load_checkpoint(path, model, optimizer)
        assert found is not None
    else:
        sharded = partial(FSDP.state_dict_type, model, StateDictType.SHARDED_STATE_DICT)
        with installed(), sharded():
            model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        dcp.load(state, checkpoint_id=path)
        with installed(), sharded():
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_full(full_of(model), plain)
    expected = steps(plain, plain_optimizer, [3, 4])
    torch.testing.assert_close(torch.tensor(steps(model, optimizer, [3, 4])), torch.tensor(expected))
    assert_full(full_of(model), plain)


PAIRS = [
    ("rows", "rows"),
    ("rows", "flat"),
    ("rows", "orig"),
    ("flat", "rows"),
    ("orig", "rows"),
    ("inner", "rows"),
    ("rows", "inner"),
    ("outer", "columns"),
    ("columns", "outer"),
    ("groups", "orig"),
    ("columns", "groups"),
]


@pytest.mark.parametrize("kind", ["ours", "dcp"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(pair))
def test_checkpoints_pass_between_fronts_and_numbers_of_ranks(
    pair: tuple[str, str], kind: str, tmp_path: Path, ranks: Any
) -> None:
    ranks(2).run(save_on_two, pair[0], tmp_path / "checkpoint", kind)
    ranks(4).run(load_and_compare, pair[1], tmp_path / "checkpoint", kind)


@on_ranks(4)
def test_checkpoints_on_hybrid_meshes(tmp_path: Path) -> None:
    plain, plain_optimizer = plain_after([1, 2])
    on = mesh(2, 2)
    model = stack()
    for block in model.blocks:
        fully_shard(block, mesh=on)
    fully_shard(model, mesh=on)
    optimizer = adam(model)
    steps(model, optimizer, [1, 2])
    save_checkpoint(tmp_path, model, optimizer, step=1)
    fresh = made("rows", stack(5))
    other = adam(fresh)
    load_checkpoint(tmp_path, fresh, other)
    assert_full(full_of(fresh), plain)
    expected = steps(plain, plain_optimizer, [3])
    assert steps(fresh, other, [3]) == pytest.approx(expected)


@on_ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_an_average_follows_and_swaps(front: str) -> None:
    model, plain = made(front, stack()), stack()
    average, expected = ShardedEMA(model, 0.5), ShardedEMA(plain, 0.5)
    optimizer, other = adam(model), adam(plain)
    for seed in (1, 2, 3):
        steps(model, optimizer, [seed])
        steps(plain, other, [seed])
        average.update()
        expected.update()
    again = ShardedEMA(made(front, stack(5)), 0.5)
    again.load_state_dict(average.state_dict())
    with average.swap(), expected.swap():
        assert_full(full_of(model), plain)
        torch.testing.assert_close(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))
    assert_full(full_of(model), plain)
    torch.testing.assert_close(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))


@on_ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_descriptions_count_every_parameter(front: str) -> None:
    plain = stack()
    found = describe(made(front, stack()))
    assert found.numel == sum(param.numel() for param in plain.parameters())
    assert sum(unit.num_params for unit in found.units) == len(list(plain.parameters()))
    assert str(found)


@on_ranks(2, 4)
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("writeback", [False, True])
def test_summoned_parameters_are_full_and_written_back(front: str, writeback: bool) -> None:
    plain, model = stack(), made(front, stack())
    square_loss(plain, torch.ones(3, 8)).backward()
    square_loss(model, torch.ones(3, 8)).backward()
    names = [name for name, _ in plain.named_parameters()]
    with FSDP.summon_full_params(model, writeback=writeback, with_grads=True):
        shown = {clean_fqn(name): param for name, param in model.named_parameters()}
        assert set(shown) == set(names)
        for name, param in plain.named_parameters():
            assert not isinstance(shown[name], DTensor)
            torch.testing.assert_close(shown[name], param)
            torch.testing.assert_close(shown[name].grad, param.grad)
            with torch.no_grad():
                shown[name].mul_(2)
                shown[name].grad.mul_(3)
    factor = 2 if writeback else 1
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(factor)
            param.grad.mul_(factor * 2 - 1)
    assert_full(full_of(model), plain)
    for param in (param for param in model.parameters() if isinstance(param, DTensor)):
        assert isinstance(param.grad, DTensor)
    for each in (plain, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_full(full_of(model), plain)
    torch.testing.assert_close(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))


@on_ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_a_model_compares_with_its_plain_replica(front: str) -> None:
    plain, model = stack(), made(front, stack())

    def run(module: nn.Module) -> None:
        square_loss(module, torch.ones(3, 8)).backward()

    assert compare_with(model, plain, run) is None
    with torch.no_grad():
        plain.blocks[1].down.weight[0, 0] += 1
    found = compare_with(model, plain, run)
    assert found is not None
    assert (found.kind, found.name) == ("parameter", "blocks.1.down.weight")


@on_ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_an_unwrapped_model_is_the_plain_one(front: str) -> None:
    plain, _ = plain_after([1, 2])
    model = made(front, stack())
    steps(model, adam(model), [1, 2])
    model = unwrap(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert_full(model.state_dict(), plain)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    copied = copy.deepcopy(model)
    steps(copied, adam(copied), [3])
    steps(plain, adam(plain), [3])
    assert_full(copied.state_dict(), plain)
    copied.load_state_dict(plain.state_dict())
