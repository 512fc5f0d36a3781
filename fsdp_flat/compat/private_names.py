"""Implements for our wrapper the functions that clients import from private modules of FSDP1.

Names, arguments and results are those of ``torch.distributed.fsdp``'s ``_common_utils``, ``_traversal_utils``,
``_runtime_utils`` and ``_unshard_param_utils``. :mod:`fsdp_flat.compat.fsdp1_names` calls torch's function for a
module that contains none of our wrappers. Our wrapper is both the FSDP state and the module.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fsdp_flat.fully_sharded_data_parallel import FlatParamHandle, FullyShardedDataParallel

__all__ = [
    "_get_fsdp_handles",
    "_get_fsdp_root_states",
    "_get_fsdp_states",
    "_get_fsdp_states_with_modules",
    "_get_module_fsdp_state",
    "_get_module_fsdp_state_if_fully_sharded_module",
    "_has_fsdp_params",
    "_is_fsdp_root",
    "_lazy_init",
    "_module_handle",
    "_reshard",
    "_unshard_params",
    "_unshard_params_for_summon",
]


def _get_module_fsdp_state(module: nn.Module) -> FullyShardedDataParallel | None:
    return module if isinstance(module, FullyShardedDataParallel) else None


def _get_module_fsdp_state_if_fully_sharded_module(module: nn.Module) -> FullyShardedDataParallel | None:
    return _get_module_fsdp_state(module)


def _get_fsdp_states(module: nn.Module) -> list[FullyShardedDataParallel]:
    return FullyShardedDataParallel.fsdp_modules(module)


def _get_fsdp_states_with_modules(
    module: nn.Module,
) -> tuple[list[FullyShardedDataParallel], list[FullyShardedDataParallel]]:
    return _get_fsdp_states(module), _get_fsdp_states(module)


def _get_fsdp_root_states(module: nn.Module) -> list[FullyShardedDataParallel]:
    return FullyShardedDataParallel.fsdp_modules(module, root_only=True)


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    return [handle for wrapper in _get_fsdp_states(module) for handle in wrapper._named_handles()]


def _is_fsdp_root(state: FullyShardedDataParallel, module: nn.Module) -> bool:
    return state.check_is_root()


def _lazy_init(state: FullyShardedDataParallel, root_module: nn.Module) -> FullyShardedDataParallel:
    state.check_is_root()
    return state


def _module_handle(state: FullyShardedDataParallel, module: nn.Module) -> FlatParamHandle | None:
    return state._handle


def _has_fsdp_params(state: FullyShardedDataParallel, module: nn.Module) -> bool:
    return state._has_params


def _reshard(state: FullyShardedDataParallel, handle: FlatParamHandle, free_unsharded_flat_param: bool) -> None:
    handle.reshard(free_unsharded_flat_param)


def _unshard_params_for_summon(
    module: nn.Module,
    state: FullyShardedDataParallel,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> AbstractContextManager[Any]:
    return _unshard_params(module, False, writeback, rank0_only, offload_to_cpu, with_grads)


def _unshard_params(
    module: nn.Module, recurse: bool, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> AbstractContextManager[Any]:
    return FullyShardedDataParallel.summon_full_params(
        module, recurse, writeback, rank0_only, offload_to_cpu, with_grads
    )
