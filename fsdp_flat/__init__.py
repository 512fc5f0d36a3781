"""Provides fully sharded data parallelism with FSDP1's and FSDP2's interfaces, on CPUs and accelerators.

A public name is imported when it is first used, because torch.distributed.tensor is slow to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fsdp_flat import torch_version  # first: with an old torch, any of the others may fail
from fsdp_flat.version import __version__ as __version__

if TYPE_CHECKING:
    # Type checkers read these imports: `A as A` makes a name public. A test compares them with the table below.
    from fsdp_flat.api import BackwardPrefetch as BackwardPrefetch
    from fsdp_flat.api import CPUOffload as CPUOffload
    from fsdp_flat.api import FullOptimStateDictConfig as FullOptimStateDictConfig
    from fsdp_flat.api import FullStateDictConfig as FullStateDictConfig
    from fsdp_flat.api import LocalOptimStateDictConfig as LocalOptimStateDictConfig
    from fsdp_flat.api import LocalStateDictConfig as LocalStateDictConfig
    from fsdp_flat.api import MixedPrecision as MixedPrecision
    from fsdp_flat.api import OptimStateDictConfig as OptimStateDictConfig
    from fsdp_flat.api import OptimStateHandler as OptimStateHandler
    from fsdp_flat.api import OptimStateKeyType as OptimStateKeyType
    from fsdp_flat.api import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
    from fsdp_flat.api import ShardedStateDictConfig as ShardedStateDictConfig
    from fsdp_flat.api import ShardingStrategy as ShardingStrategy
    from fsdp_flat.api import StateDictConfig as StateDictConfig
    from fsdp_flat.api import StateDictSettings as StateDictSettings
    from fsdp_flat.api import StateDictType as StateDictType
    from fsdp_flat.api import StatePart as StatePart
    from fsdp_flat.checkpoint import iter_full_state_dict as iter_full_state_dict
    from fsdp_flat.checkpoint import list_checkpoints as list_checkpoints
    from fsdp_flat.checkpoint import load_checkpoint as load_checkpoint
    from fsdp_flat.checkpoint import load_full as load_full
    from fsdp_flat.checkpoint import save_checkpoint as save_checkpoint
    from fsdp_flat.checkpoint import save_full as save_full
    from fsdp_flat.checkpoint import verify_checkpoint as verify_checkpoint
    from fsdp_flat.compat import install as install
    from fsdp_flat.compat import installed as installed
    from fsdp_flat.compat import uninstall as uninstall
    from fsdp_flat.composable import CPUOffloadPolicy as CPUOffloadPolicy
    from fsdp_flat.composable import DataParallelMeshDims as DataParallelMeshDims
    from fsdp_flat.composable import FSDPModule as FSDPModule
    from fsdp_flat.composable import GradientReductionHandle as GradientReductionHandle
    from fsdp_flat.composable import MixedPrecisionPolicy as MixedPrecisionPolicy
    from fsdp_flat.composable import OffloadPolicy as OffloadPolicy
    from fsdp_flat.composable import UnshardHandle as UnshardHandle
    from fsdp_flat.composable import fully_shard as fully_shard
    from fsdp_flat.composable import register_fsdp_forward_method as register_fsdp_forward_method
    from fsdp_flat.composable import share_comm_ctx as share_comm_ctx
    from fsdp_flat.core import FlatParameter as FlatParameter
    from fsdp_flat.core import offload_optimizer as offload_optimizer
    from fsdp_flat.errors import FsdpFlatError as FsdpFlatError
    from fsdp_flat.extras import MatrixOptimizer as MatrixOptimizer
    from fsdp_flat.extras import ShardedEMA as ShardedEMA
    from fsdp_flat.extras import clean_named_modules as clean_named_modules
    from fsdp_flat.extras import clean_named_parameters as clean_named_parameters
    from fsdp_flat.extras import clean_tensor_name as clean_tensor_name
    from fsdp_flat.extras import compare_with as compare_with
    from fsdp_flat.extras import matrix_params as matrix_params
    from fsdp_flat.extras import whole_shape as whole_shape
    from fsdp_flat.extras.debug import debug as debug
    from fsdp_flat.extras.describe import describe as describe
    from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel as FullyShardedDataParallel
    from fsdp_flat.guards import check_replicas as check_replicas
    from fsdp_flat.runtime import offload_activations as offload_activations
    from fsdp_flat.runtime import participate as participate
    from fsdp_flat.runtime import register_forward_method as register_forward_method
    from fsdp_flat.runtime import unshard_for as unshard_for
    from fsdp_flat.runtime import unwrap as unwrap
    from fsdp_flat.state import register_optim_state_handler as register_optim_state_handler
    from fsdp_flat.tools.planning import plan as plan
    from fsdp_flat.tools.recording import record as record
else:
    # The public names by the module that each is imported from.
    _NAMES = {
        "errors": "FsdpFlatError",
        "api": (
            "BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig LocalOptimStateDictConfig "
            "LocalStateDictConfig MixedPrecision OptimStateDictConfig OptimStateHandler OptimStateKeyType "
            "ShardedOptimStateDictConfig ShardedStateDictConfig ShardingStrategy StateDictConfig StateDictSettings "
            "StateDictType StatePart"
        ),
        "fully_sharded_data_parallel": "FullyShardedDataParallel",
        "composable": (
            "CPUOffloadPolicy DataParallelMeshDims FSDPModule GradientReductionHandle MixedPrecisionPolicy "
            "OffloadPolicy UnshardHandle fully_shard register_fsdp_forward_method share_comm_ctx"
        ),
        "core": "FlatParameter offload_optimizer",
        "guards": "check_replicas",
        "runtime": "offload_activations participate register_forward_method unshard_for unwrap",
        "state": "register_optim_state_handler",
        "extras": (
            "MatrixOptimizer ShardedEMA clean_named_modules clean_named_parameters clean_tensor_name compare_with "
            "matrix_params whole_shape"
        ),
        "extras.debug": "debug",
        "extras.describe": "describe",
        "compat": "install installed uninstall",
        "checkpoint": (
            "iter_full_state_dict list_checkpoints load_checkpoint load_full save_checkpoint save_full "
            "verify_checkpoint"
        ),
        "tools.planning": "plan",
        "tools.recording": "record",
    }
    _HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> object:
        """Import a public name, or a submodule, when it is first used."""
        if name in _HOMES:
            value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        else:
            path = f"{__name__}.{name}"
            try:
                # Names with an underscore are those that inspect, copy and others look for.
                value = None if name.startswith("_") else import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
                value = None
            if value is None:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """List the public names too, imported or not."""
        return sorted({*globals(), *__all__})
