"""Provides fully sharded data parallelism with FSDP1's and FSDP2's interfaces, on CPUs and accelerators."""

from fsdp_flat import torch_version  # first: with an old torch, any of the others may fail
from fsdp_flat.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
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
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FsdpFlatError",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MatrixOptimizer",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateHandler",
    "OptimStateKeyType",
    "ShardedEMA",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StatePart",
    "UnshardHandle",
    "clean_named_modules",
    "clean_named_parameters",
    "clean_tensor_name",
    "compare_with",
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
