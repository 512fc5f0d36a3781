"""Code as clients write it, to be imported before and after ``fsdp_flat.install()``: sources of modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

CLIENT = """
import functools

import torch.distributed.fsdp
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._common_utils import _get_module_fsdp_state, clean_tensor_name
from torch.distributed.fsdp._runtime_utils import _lazy_init, _post_backward_final_callback
from torch.distributed.fsdp._traversal_utils import _get_fsdp_handles
from torch.distributed.fsdp._unshard_param_utils import _unshard_params_for_summon
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel, FlatParamHandle
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, transformer_auto_wrap_policy

DEFAULT = ShardingStrategy.SHARD_GRAD_OP
STRATEGIES = {"full": ShardingStrategy.FULL_SHARD, "hybrid": ShardingStrategy.HYBRID_SHARD}


def is_wrapped(module):
    return isinstance(module, torch.distributed.fsdp.FullyShardedDataParallel) and isinstance(module, FSDP)


def make(module, wrapper=FSDP, **kwargs):
    return wrapper(module, **kwargs)
"""

# What CLIENT binds that is FSDP1's, by the name of our counterpart's module.
OURS = {
    "fsdp_flat.api": [
        *("BackwardPrefetch", "CPUOffload", "MixedPrecision", "ShardingStrategy", "StateDictType"),
        *("FullOptimStateDictConfig", "FullStateDictConfig"),
    ],
    "fsdp_flat.fully_sharded_data_parallel": ["FullyShardedDataParallel", "FlatParamHandle"],
    "fsdp_flat.sharded_grad_scaler": ["ShardedGradScaler"],
    "fsdp_flat.wrap": ["CustomPolicy", "ModuleWrapPolicy", "transformer_auto_wrap_policy"],
    "fsdp_flat.extras.names": ["clean_tensor_name"],
}
FSDP2 = ["FSDPModule", "MixedPrecisionPolicy", "fully_shard"]


@contextmanager
def imported(name: str, source: str = CLIENT) -> Iterator[ModuleType]:
    """A module of that name and source, as if imported from a file; gone after the block."""
    module = ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(source, f"<{name}>", "exec"), vars(module))
        yield module
    finally:
        del sys.modules[name]
