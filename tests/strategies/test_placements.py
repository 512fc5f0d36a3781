"""Where fully_shard puts the parts of parameters: dims, hybrid meshes, and tensor parallelism inside."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType, iter_full_state_dict
from fsdp_flat.composable import fully_shard
from fsdp_flat.core import units_of
from fsdp_flat.state import full_tensor
from tests.support import on_ranks
from tests.support.beside import children_and_root as sharded
from tests.support.kit import mesh, normal, square_loss, train_on
from tests.support.peer import peer_fully_shard


class Mlp(nn.Module):
    """Two layers of one size each way, residual."""

    def __init__(self, dim: int, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, hidden, bias=bias)
        self.outer = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


def mlps(dim: int, hidden: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Mlp(dim, hidden) for _ in range(2)])


def trained(model: nn.Module, dim: int, rank: int, seeds: list[int], *, average: bool = False) -> torch.Tensor:
    """Train with plain SGD, and return losses; ``rank`` chooses the batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def mean() -> None:
        for param in model.parameters() if average else ():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

    inputs = [normal(100 * seed + rank, 3, dim) for seed in seeds]
    return torch.stack(train_on(model, optimizer, inputs, before_step=mean))


def assert_full(model: nn.Module, plain: nn.Module) -> None:
    for (name, value), (_, expected) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        torch.testing.assert_close(full_tensor(value), expected, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_placements(model: nn.Module, other: nn.Module) -> None:
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert isinstance(two, DTensor)
        assert one.placements == two.placements, name
        assert one.device_mesh == two.device_mesh, name
        assert one.shape == two.shape, name
        assert one.stride() == two.stride(), name
        torch.testing.assert_close(one.to_local(), two.to_local(), msg=name)
        assert one.to_local().stride() == two.to_local().stride(), name


def saved_and_loaded(model: nn.Module, fresh: nn.Module, path: Path) -> None:
    dcp.save(model.state_dict(), checkpoint_id=path)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=path)
    fresh.load_state_dict(state)


@on_ranks(2, 4)
@pytest.mark.parametrize("placement", [Shard(1), Shard(-1), "largest"])
def test_parameters_are_sharded_on_the_dim_asked_for(placement: Any, num_ranks: int, tmp_path: Path) -> None:
    def chosen(param: nn.Parameter) -> Shard | None:
        if placement == "largest":
            return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))
        return placement if param.ndim > 1 else None

    plain = mlps(4, 8)
    model = sharded(copy.deepcopy(plain), shard_placement_fn=chosen)
    reference = sharded(copy.deepcopy(plain), peer_fully_shard, shard_placement_fn=chosen)
    assert_same_placements(model, reference)
    assert_full(model, plain)
    rank = dist.get_rank()
    expected = trained(plain, 4, rank, [1, 2], average=True)
    for each in (model, reference):
        torch.testing.assert_close(trained(each, 4, rank, [1, 2]), expected)
    assert_full(model, plain)
    assert_same_placements(model, reference)
    fresh = sharded(mlps(4, 8, seed=3), shard_placement_fn=chosen)
    saved_and_loaded(model, fresh, tmp_path)
    assert_full(fresh, plain)


@on_ranks(4)
def test_parameters_of_several_meshes_in_one_call_are_handles_of_one_unit() -> None:
    data = init_device_mesh("cpu", (4,))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]

    def on(mesh: DeviceMesh) -> Any:
        # Like torch's ShardPlacementResult, which torch 2.8 does not have.
        return SimpleNamespace(placement=Shard(1), mesh_info=SimpleNamespace(mesh=mesh))

    model = sharded(mlps(4, 8), mesh=data, shard_placement_fn=lambda param: on(data) if param.ndim > 1 else None)
    assert model[0].inner.weight.placements == (Shard(1),)
    assert [len(unit.by_mesh()) for unit in units_of(model[0])] == [1]
    plain = mlps(4, 8)
    model = copy.deepcopy(plain)
    sharded(model, mesh=data, shard_placement_fn=lambda param: on(experts) if param.ndim > 1 else None)
    assert [len(unit.by_mesh()) for unit in units_of(model[0])] == [2]
    assert model[0].inner.weight.device_mesh == experts
    assert model[0].inner.bias.device_mesh == data
    assert_full(model, plain)
    model = copy.deepcopy(plain)
    fully_shard(model[0], mesh=experts)
    fully_shard(model, mesh=data)
    assert_full(model, plain)
    with pytest.raises(ValueError, match="must choose an FSDPMeshInfo"):
        sharded(mlps(4, 8), shard_placement_fn=lambda param: on("experts"))


@on_ranks(4)
@pytest.mark.parametrize("dim", [2, 3, 5])
def test_a_hybrid_mesh_replicates_over_its_first_dim(dim: int, rank: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = mlps(dim, dim + 1)
    model = sharded(copy.deepcopy(plain), mesh=mesh)
    reference = sharded(copy.deepcopy(plain), peer_fully_shard, mesh=mesh)
    assert_same_placements(model, reference)
    assert all(param.placements == (Replicate(), Shard(0)) for param in model.parameters())
    expected = trained(plain, dim, rank, [1, 2], average=True)
    for each in (model, reference):
        torch.testing.assert_close(trained(each, dim, rank, [1, 2]), expected)
    assert_full(model, plain)
    assert_same_placements(model, reference)
    fresh = sharded(mlps(dim, dim + 1, seed=3), mesh=mesh)
    saved_and_loaded(model, fresh, tmp_path)
    assert_full(fresh, plain)


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
    for mlp in model:
        parallelize_module(mlp, mesh, plan)
    return model


@on_ranks(2, 4)
@pytest.mark.parametrize("sizes", [(4, 8), (3, 6), (5, 2), (2, 10)])
def test_tensor_parallelism_inside_composes_placements_as_torch(
    sizes: tuple[int, int], num_ranks: int, tmp_path: Path
) -> None:
    num_tensor = 2
    mesh = init_device_mesh("cpu", (num_ranks // num_tensor, num_tensor), mesh_dim_names=("dp", "tp"))
    dp_rank = mesh["dp"].get_local_rank()
    plain = mlps(*sizes)
    model = tensor_parallel(copy.deepcopy(plain), mesh["tp"])
    held, seen = list(model.parameters()), set()
    sharded(model, mesh=mesh["dp"], shard_placement_fn=lambda param: seen.add(param))
    assert seen == set(held)
    reference = sharded(tensor_parallel(copy.deepcopy(plain), mesh["tp"]), peer_fully_shard, mesh=mesh["dp"])
    assert_same_placements(model, reference)
    assert_full(model, plain)
    # Ranks of one tensor-parallel group have one batch.
    expected = trained(plain, sizes[0], dp_rank, [1, 2], average=True)
    for each in (model, reference):
        torch.testing.assert_close(trained(each, sizes[0], dp_rank, [1, 2]), expected)
    assert_full(model, plain)
    assert_same_placements(model, reference)
    fresh = sharded(tensor_parallel(mlps(*sizes, seed=3), mesh["tp"]), mesh=mesh["dp"])
    saved_and_loaded(model, fresh, tmp_path)
    assert_full(fresh, plain)
    square_loss(fresh, torch.ones(2, sizes[0])).backward()


@on_ranks(4)
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6, 7])
def test_full_states_of_rows_split_by_both_are_those_of_the_plain_model(rows: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = mlps(3, rows)
    model = sharded(tensor_parallel(copy.deepcopy(plain), mesh["tp"]), mesh=mesh["dp"])
    torch.testing.assert_close(dict(iter_full_state_dict(model, dst=None)), dict(plain.state_dict()))
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        optimizer.state[param] = {"exp_avg": param.detach().clone(), "step": torch.tensor(1.0)}
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        states = FSDP.optim_state_dict(model, optimizer)["state"]
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(states[name]["exp_avg"], expected)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("sizes", [(4, 8), (3, 6), (2, 2)])
def test_hybrid_meshes_and_tensor_parallelism_compose(
    sizes: tuple[int, int], shape: tuple[int, int, int], tmp_path: Path
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    data, tensor = mesh["replicate", "shard"], mesh["tp"]
    dp_rank = mesh["replicate"].get_local_rank() * shape[1] + mesh["shard"].get_local_rank()
    plain = mlps(*sizes)
    model = sharded(tensor_parallel(copy.deepcopy(plain), tensor), mesh=data)
    reference = sharded(tensor_parallel(copy.deepcopy(plain), tensor), peer_fully_shard, mesh=data)
    assert_same_placements(model, reference)
    assert_full(model, plain)
    expected = trained(plain, sizes[0], dp_rank, [1, 2], average=True)
    for each in (model, reference):
        torch.testing.assert_close(trained(each, sizes[0], dp_rank, [1, 2]), expected)
    assert_full(model, plain)
    assert_same_placements(model, reference)
    fresh = sharded(tensor_parallel(mlps(*sizes, seed=3), tensor), mesh=data)
    saved_and_loaded(model, fresh, tmp_path)
    assert_full(fresh, plain)


@on_ranks(4)
@pytest.mark.parametrize("num_dims", [1, 2])
def test_a_mesh_made_again_uses_its_own_groups_while_tensors_of_the_old_one_exist(num_dims: int) -> None:
    def built() -> tuple[DTensor, DeviceMesh]:
        made = mesh(2, 2)
        model = fully_shard(Mlp(8, 16), mesh=made if num_dims == 2 else made["replicate"])
        param = next(model.parameters())
        assert isinstance(param, DTensor)
        return param, made

    kept, old = built()
    for group in old.get_all_groups():
        dist.destroy_process_group(group)
    param, _ = built()
    assert kept.device_mesh == param.device_mesh
    assert kept.device_mesh is not param.device_mesh
    assert param.full_tensor().shape == (16, 8)
