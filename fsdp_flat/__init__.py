"""fsdp_flat: fully sharded data parallelism in the FSDP1 style, on CPUs and accelerators."""

from fsdp_flat.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp_flat.errors import FsdpFlatError
from fsdp_flat.flat import FlatParameter
from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_flat.runtime import register_forward_method, unshard_for

__version__ = "0.1.0"

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FlatParameter",
    "FsdpFlatError",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "register_forward_method",
    "unshard_for",
]
