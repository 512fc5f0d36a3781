"""Provides fully sharded data parallelism with FSDP1's and FSDP2's interfaces, on CPUs and accelerators."""

from fsdp_flat import torch_version  # first: with an old torch, any of the others may fail

# isort: split
from fsdp_flat import api
from fsdp_flat.api import *  # noqa: F403
from fsdp_flat.checkpoint import iter_full_state_dict, load_checkpoint, load_full, save_checkpoint, save_full
from fsdp_flat.compat import install, installed, uninstall
from fsdp_flat.composable import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp_flat.errors import FsdpFlatError
from fsdp_flat.extras import (
    MatrixOptimizer,
    ShardedEMA,
    clean_named_modules,
    clean_named_parameters,
    clean_tensor_name,
    compare_with,
    debug,
    describe,
    matrix_params,
    plan,
    whole_shape,
)
from fsdp_flat.flat import FlatParameter
from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_flat.runtime import participate, register_forward_method, unshard_for, unwrap
from fsdp_flat.state import OptimStateHandler, StatePart, register_optim_state_handler

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FsdpFlatError",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "MatrixOptimizer",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateHandler",
    "ShardedEMA",
    "StatePart",
    "UnshardHandle",
    "clean_named_modules",
    "clean_named_parameters",
    "clean_tensor_name",
    "compare_with",
    "debug",
    "describe",
    "fully_shard",
    "install",
    "installed",
    "iter_full_state_dict",
    "load_checkpoint",
    "load_full",
    "matrix_params",
    "participate",
    "plan",
    "register_forward_method",
    "register_fsdp_forward_method",
    "register_optim_state_handler",
    "save_checkpoint",
    "save_full",
    "share_comm_ctx",
    "uninstall",
    "unshard_for",
    "unwrap",
    "whole_shape",
]
__all__ += api.__all__
__all__.sort()
