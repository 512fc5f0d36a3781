"""Defines a mixture of experts of which each rank has some, whose mesh is another one than that of the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

WIDTH, HIDDEN, NUM_EXPERTS, NUM_TOKENS = 8, 12, 4, 12

needs_mesh_infos = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason=f"torch {torch.__version__} has no ShardPlacementResult"
)


class Experts(nn.Module):
    """Runs each expert on its tokens; after :meth:`split` on those of all ranks that share the experts."""

    def __init__(self, num_experts: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(num_experts, HIDDEN, WIDTH) / 3)
        self.mesh: DeviceMesh | None = None

    def split(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts: the parameters become DTensors over the mesh."""
        self.mesh = mesh
        for name, param in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute outputs of tokens, (expert, token, width)."""
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        num_ranks = 1 if self.mesh is None else self.mesh.size()
        if num_ranks == 1:
            return torch.bmm(torch.bmm(x, up).relu(), down)
        assert self.mesh is not None
        group, shape = self.mesh.get_group(), (-1, up.shape[0], x.shape[1], WIDTH)
        x = all_to_all_single_autograd(x.contiguous(), None, None, group).view(shape).transpose(0, 1)
        x = torch.bmm(torch.bmm(x.reshape(up.shape[0], -1, WIDTH), up).relu(), down)
        x = x.view(up.shape[0], num_ranks, -1, WIDTH).transpose(0, 1).reshape(self.num_experts, -1, WIDTH)
        return all_to_all_single_autograd(x, None, None, group)


class MoeBlock(nn.Module):
    """A residual block with parameters beside those of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.gate(self.norm(x)).view(NUM_EXPERTS, -1, WIDTH)
        return x + self.experts(tokens).reshape(x.shape)


class Moe(nn.Module):
    """Layers around two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([MoeBlock() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Meshes:
    """Holds the meshes of one arrangement of ranks.

    Attributes:
        dense: shards what is no expert.
        experts: shards experts, each over the ranks that have it.
        parallel: divides experts among ranks.
        placement: dim of experts that is sharded.
    """

    dense: DeviceMesh
    experts: DeviceMesh
    parallel: DeviceMesh
    placement: Shard

    @classmethod
    def of(cls, num_ranks: int, num_parallel: int, *, hybrid: bool = False, dim: int = 0) -> Meshes:
        """Create the meshes, of which ``hybrid`` ones replicate over two ranks. Every rank must call this."""
        replicas, names = ((2,), ("replicate",)) if hybrid else ((), ())
        num_shards = num_ranks // (2 if hybrid else 1)
        dense = init_device_mesh("cpu", (*replicas, num_shards), mesh_dim_names=(*names, "fsdp"))
        sizes = (*replicas, num_shards // num_parallel, num_parallel)
        sparse = init_device_mesh("cpu", sizes, mesh_dim_names=(*names, "efsdp", "ep"))
        return cls(dense, sparse[(*names, "efsdp")], sparse["ep"], Shard(dim))

    @functools.cached_property
    def info(self) -> Any:
        """Torch's description of the mesh of experts; all parameters of a call must have the same one."""
        if self.experts.ndim == 2:
            return _fsdp_common.HSDPMeshInfo(self.experts, shard_mesh_dim=1, replicate_mesh_dim=0)
        return _fsdp_common.FSDPMeshInfo(self.experts, shard_mesh_dim=0)

    def shard(self, model: Any, fully_shard: Callable[..., Any], **kwargs: Any) -> Any:
        """Split the experts of a model, then shard each block in one call, and the rest."""
        kwargs = {"mesh": self.dense, "shard_placement_fn": self.split(model), **kwargs}
        for block in model.blocks:
            fully_shard(block, **kwargs)
        return fully_shard(model, **kwargs)

    def split(self, model: Any) -> Callable[[nn.Parameter], Any]:
        """Split the experts of a model, and return the function that places its parameters."""
        for block in model.blocks:
            block.experts.split(self.parallel)
        own = {param for block in model.blocks for param in block.experts.parameters()}
        info = self.info
        return lambda param: _fsdp_common.ShardPlacementResult(self.placement, info) if param in own else None


def clip(params: Iterable[nn.Parameter], most: float) -> float:
    """Clip the norm of gradients on several meshes, as torchtitan does; torch's function takes those of one.

    Returns:
        The norm.
    """
    by_mesh: dict[DeviceMesh, list[Any]] = {}
    for param in params:
        assert isinstance(param.grad, DTensor)
        by_mesh.setdefault(param.grad.device_mesh, []).append(param)
    norms: list[Any] = [get_total_norm([each.grad for each in some]) for some in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack([norm.full_tensor() for norm in norms]))
    for some in by_mesh.values():
        clip_grads_with_norm_(some, most, total)
    return total.item()
