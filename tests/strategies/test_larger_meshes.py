"""fully_shard of parameters that are DTensors over a mesh with the data-parallel dims too (``dp_mesh_dims``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_flat import DataParallelMeshDims
from fsdp_flat.composable import fully_shard
from tests.strategies.test_placements import Mlp, assert_same_placements
from tests.support import on_ranks
from tests.support.peer import peer_fully_shard

# By name: the sizes of the mesh on 4 ranks by the names of its dims, and those that shard and replicate.
MESHES: dict[str, tuple[dict[str, int], Any, Any]] = {
    "dp": ({"dp": 4}, "dp", None),
    "dp_tp": ({"dp": 2, "tp": 2}, "dp", None),
    "hybrid": ({"replicate": 2, "shard": 2}, "shard", "replicate"),
    "two_shard_dims": ({"dp": 2, "cp": 2}, ("dp", "cp"), None),
    "hybrid_tp": ({"replicate": 1, "shard": 2, "tp": 2}, "shard", "replicate"),
    "replicate": ({"dp": 4}, None, "dp"),
    "replicate_tp": ({"dp": 2, "tp": 2}, None, "dp"),
    "two_replicate_dims": ({"dp": 2, "cp": 2}, None, ("dp", "cp")),
    "two_shard_dims_tp": ({"dp": 1, "cp": 2, "tp": 2}, ("dp", "cp"), None),
}
DIM = 4


def distributed(mesh: DeviceMesh, seed: int = 0) -> nn.Sequential:
    """Two MLPs of which ``tp`` shards the layers, and every other dim replicates them."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[Mlp(DIM, 6) for _ in range(2)])
    for name, param in list(model.named_parameters()):
        placements: list[Any] = [Replicate()] * mesh.ndim
        if "tp" in (mesh.mesh_dim_names or ()) and name.endswith(("inner.weight", "inner.bias")):
            placements[-1] = Shard(0)
        elif "tp" in (mesh.mesh_dim_names or ()) and name.endswith("outer.weight"):
            placements[-1] = Shard(1)
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(distribute_tensor(param.data, mesh, placements)))
    return model


def sharded(model: nn.Sequential, shard: Any, **kwargs: Any) -> nn.Sequential:
    for module in (*model, model):
        shard(module, **kwargs)
    return model


def trained(model: nn.Module, mesh: DeviceMesh, *, num_steps: int = 3) -> list[float]:
    names = mesh.mesh_dim_names or ()
    placements = [Replicate() if name == "tp" else Shard(0) for name in names]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    losses = []
    for step in range(num_steps):
        torch.manual_seed(step)
        whole = torch.randn(8, DIM)
        output: Any = model(distribute_tensor(whole, mesh, placements))
        loss = output.redistribute(mesh, placements).to_local().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2, 4)
@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="torch 2.13 or newer")
@pytest.mark.parametrize("kind", list(MESHES))
def test_placements_and_training_equal_torchs(kind: str) -> None:
    sizes, shard, replicate = MESHES[kind]
    counts = list(sizes.values())
    if dist.get_world_size() == 2:
        counts = [2, *[1] * (len(counts) - 1)] if "replicate" not in sizes else [1, 2, *[1] * (len(counts) - 2)]
    mesh = init_device_mesh("cpu", tuple(counts), mesh_dim_names=tuple(sizes))
    options: Any = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard, replicate)}
    model = sharded(distributed(mesh), fully_shard, **options)
    theirs = torch.distributed.fsdp.DataParallelMeshDims(shard, replicate)
    reference = sharded(distributed(mesh), peer_fully_shard, mesh=mesh, dp_mesh_dims=theirs)
    assert_same_placements(model, reference)
    losses = trained(model, mesh)
    torch.testing.assert_close(losses, trained(reference, mesh))
    assert_same_placements(model, reference)
    for (name, one), (_, two) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), two.full_tensor(), msg=name)
    fresh = sharded(distributed(mesh, seed=1), fully_shard, **options)
    fresh.load_state_dict(model.state_dict())
    assert_same_placements(fresh, reference)
    full: dict[str, Any] = {name: value.full_tensor() for name, value in model.state_dict().items()}
    fresh = sharded(distributed(mesh, seed=2), fully_shard, **options)
    fresh.load_state_dict(full)
    assert_same_placements(fresh, reference)


@on_ranks(2)
def test_what_does_not_fit_raises() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"'inner.weight' is a plain tensor; with dp_mesh_dims"):
        fully_shard(Mlp(4, 6), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))
    with pytest.raises(ValueError, match=r"names \['fsdp'\]"):
        fully_shard(Mlp(4, 6), mesh=mesh, dp_mesh_dims=DataParallelMeshDims("fsdp"))
    with pytest.raises(ValueError, match="got neither"):
        DataParallelMeshDims()
    module = Mlp(4, 6)
    module.inner.weight = nn.Parameter(distribute_tensor(module.inner.weight.data, mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"not Replicate\(\) on the data-parallel dim 'dp'"):
        fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))
