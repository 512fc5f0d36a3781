"""Provides fully sharded data parallelism with FSDP1's and FSDP2's interfaces, on CPUs and accelerators.

A public name is imported when it is first used, because torch.distributed.tensor is slow to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fsdp_flat import torch_version  # first: with an old torch, any of the others may fail
from fsdp_flat.version import __version__ as __version__

# ruff: noqa: I001 (one statement for each module)
if TYPE_CHECKING:
    # Type checkers read these imports: `A as A` makes a name public. A test compares them with the table below.
    from fsdp_flat.api import (
        BackwardPrefetch as BackwardPrefetch,
        CPUOffload as CPUOffload,
        FullOptimStateDictConfig as FullOptimStateDictConfig,
        FullStateDictConfig as FullStateDictConfig,
        LocalOptimStateDictConfig as LocalOptimStateDictConfig,
        LocalStateDictConfig as LocalStateDictConfig,
        MixedPrecision as MixedPrecision,
        OptimStateDictConfig as OptimStateDictConfig,
        OptimStateHandler as OptimStateHandler,
        OptimStateKeyType as OptimStateKeyType,
        ShardedOptimStateDictConfig as ShardedOptimStateDictConfig,
        ShardedStateDictConfig as ShardedStateDictConfig,
        ShardingStrategy as ShardingStrategy,
        StateDictConfig as StateDictConfig,
        StateDictSettings as StateDictSettings,
        StateDictType as StateDictType,
        StatePart as StatePart,
    )
    from fsdp_flat.checkpoint import (
        iter_full_state_dict as iter_full_state_dict,
        list_checkpoints as list_checkpoints,
        load_checkpoint as load_checkpoint,
        load_full as load_full,
        save_checkpoint as save_checkpoint,
        save_full as save_full,
        verify_checkpoint as verify_checkpoint,
    )
    from fsdp_flat.compat import (
        install as install,
        installed as installed,
        uninstall as uninstall,
    )
    from fsdp_flat.composable import (
        CPUOffloadPolicy as CPUOffloadPolicy,
        DataParallelMeshDims as DataParallelMeshDims,
        FSDPModule as FSDPModule,
        GradientReductionHandle as GradientReductionHandle,
        MixedPrecisionPolicy as MixedPrecisionPolicy,
        OffloadPolicy as OffloadPolicy,
        UnshardHandle as UnshardHandle,
        fully_shard as fully_shard,
        register_fsdp_forward_method as register_fsdp_forward_method,
        share_comm_ctx as share_comm_ctx,
    )
    from fsdp_flat.core import FlatParameter as FlatParameter
    from fsdp_flat.errors import FsdpFlatError as FsdpFlatError
    from fsdp_flat.extras import (
        MatrixOptimizer as MatrixOptimizer,
        ShardedEMA as ShardedEMA,
        clean_named_modules as clean_named_modules,
        clean_named_parameters as clean_named_parameters,
        clean_tensor_name as clean_tensor_name,
        compare_with as compare_with,
        matrix_params as matrix_params,
        whole_shape as whole_shape,
    )
    from fsdp_flat.extras.debug import debug as debug
    from fsdp_flat.extras.describe import describe as describe
    from fsdp_flat.extras.metrics import step_metrics as step_metrics
    from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel as FullyShardedDataParallel
    from fsdp_flat.guards import check_replicas as check_replicas
    from fsdp_flat.runtime import (
        offload_activations as offload_activations,
        offload_optimizer as offload_optimizer,
        participate as participate,
        register_forward_method as register_forward_method,
        unshard_for as unshard_for,
        unwrap as unwrap,
    )
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
        "core": "FlatParameter",
        "guards": "check_replicas",
        "runtime": "offload_activations offload_optimizer participate register_forward_method unshard_for unwrap",
        "state": "register_optim_state_handler",
        "extras": (
            "MatrixOptimizer ShardedEMA clean_named_modules clean_named_parameters clean_tensor_name compare_with "
            "matrix_params whole_shape"
        ),
        "extras.debug": "debug",
        "extras.describe": "describe",
        "extras.metrics": "step_metrics",
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
