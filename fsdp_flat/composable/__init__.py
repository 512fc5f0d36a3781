"""Provides FSDP2's interface, ``fully_shard``, on the engine of the wrapper class (layer 6)."""

from fsdp_flat.composable.fsdp_module import FSDPModule
from fsdp_flat.composable.fully_sharding import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from fsdp_flat.composable.tracing import trace
from fsdp_flat.runtime import GradientReductionHandle, UnshardHandle, share_comm_ctx
from fsdp_flat.runtime import register_forward_method as register_fsdp_forward_method

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "trace",
]
