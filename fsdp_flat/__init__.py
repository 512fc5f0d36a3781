"""Provides fully sharded data parallelism with FSDP1's and FSDP2's interfaces, on CPUs and accelerators.

A public name is imported when it is first used, because torch.distributed.tensor is slow to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fsdp_flat import torch_version  # first: with an old torch, any of the others may fail
from fsdp_flat.version import __version__ as __version__

if TYPE_CHECKING:
    from fsdp_flat.api import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        OptimStateDictConfig,
        OptimStateHandler,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
        StatePart,
    )
    from fsdp_flat.checkpoint import (
        iter_full_state_dict,
        list_checkpoints,
        load_checkpoint,
        load_full,
        save_checkpoint,
        save_full,
        verify_checkpoint,
    )
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
    from fsdp_flat.core import FlatParameter
    from fsdp_flat.errors import FsdpFlatError

    # mypy takes the package's names `debug` and `describe` for the submodules.
    from fsdp_flat.extras import (
        MatrixOptimizer,
        ShardedEMA,
        clean_named_modules,
        clean_named_parameters,
        clean_tensor_name,
        compare_with,
        matrix_params,
        whole_shape,
    )
    from fsdp_flat.extras.debug import debug
    from fsdp_flat.extras.describe import describe
    from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel
    from fsdp_flat.guards import check_replicas
    from fsdp_flat.runtime import participate, register_forward_method, unshard_for, unwrap
    from fsdp_flat.state import register_optim_state_handler
    from fsdp_flat.tools.planning import plan
    from fsdp_flat.tools.recording import record

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
    "check_replicas",
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
    "list_checkpoints",
    "load_checkpoint",
    "load_full",
    "matrix_params",
    "participate",
    "plan",
    "record",
    "register_forward_method",
    "register_fsdp_forward_method",
    "register_optim_state_handler",
    "save_checkpoint",
    "save_full",
    "share_comm_ctx",
    "uninstall",
    "unshard_for",
    "unwrap",
    "verify_checkpoint",
    "whole_shape",
]

# Where the public names are found, in the order of the search: the quickest to import first.
_HOMES = (
    "errors",
    "api",
    "fully_sharded_data_parallel",
    "composable",
    "core",
    "guards",
    "runtime",
    "state",
    "extras",
    "compat",
    "checkpoint",
    "tools.planning",
    "tools.recording",
)

if not TYPE_CHECKING:  # a type checker would take every other name for one of the package, too

    def __getattr__(name: str) -> object:
        """Import a public name, or a submodule, when it is first used."""
        if name in __all__:
            modules = (import_module(f"{__name__}.{home}") for home in _HOMES)
            value = next(vars(module)[name] for module in modules if name in vars(module))
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
