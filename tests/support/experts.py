"""Defines a mixture of experts of which each rank has some, whose mesh is another one than that of the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

WIDTH, HIDDEN, NUM_EXPERTS, NUM_TOKENS = 8, 12, 4, 12

needs_mesh_infos = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason=f"torch {torch.__version__} has no ShardPlacementResult"
)


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
