"""Wrapping a model as a case says."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import BackwardPrefetch, CPUOffload, ShardingStrategy
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from .case import Options, Wrapping
from .models import CLASSES


def arguments_from(options: Options, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Make the wrapper's keyword arguments; makes the mesh, so every rank must call this.

    Args:
        options: of the case.
        group: shard over this group instead, without a mesh.
    """
    arguments: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[options.strategy],
        "use_orig_params": options.use_orig_params,
        "backward_prefetch": BackwardPrefetch[options.backward_prefetch] if options.backward_prefetch else None,
        "forward_prefetch": options.forward_prefetch,
        "limit_all_gathers": options.limit_all_gathers,
        "cpu_offload": CPUOffload(offload_params=True) if options.cpu_offload else None,
        "sync_module_states": options.sync_module_states,
    }
    if group is not None:
        arguments["process_group"] = group
    elif options.mesh:
        names = ("replicate", "shard")[-len(options.mesh) :]
        arguments["device_mesh"] = init_device_mesh("cpu", options.mesh, mesh_dim_names=names)
    return arguments


def wrap(module: nn.Module, wrapping: Wrapping, arguments: dict[str, Any]) -> FSDP:
    """Wrap ``module``. Every rank must call this."""
    strategies = {id: ShardingStrategy[name] for id, name in wrapping.strategies}
    ids = set(wrapping.ids)

    def chosen(child: nn.Module) -> bool:
        return getattr(child, "node_id", None) in ids

    def chosen_with_strategy(child: nn.Module) -> bool | dict[str, Any]:
        strategy = strategies.get(getattr(child, "node_id", -1))
        return {"sharding_strategy": strategy} if chosen(child) and strategy is not None else chosen(child)

    if wrapping.policy == "hand":
        made: dict[nn.Module, FSDP] = {}
        _wrap_below(module, ids, strategies, arguments, made)
        return FSDP(module, **arguments)
    classes = {CLASSES[kind] for kind in wrapping.kinds}
    policy: Any = {
        "none": None,
        "module": ModuleWrapPolicy(classes),
        "transformer": partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
        "lambda": partial(lambda_auto_wrap_policy, lambda_fn=chosen),
        "custom": CustomPolicy(chosen_with_strategy),
        "size": partial(size_based_auto_wrap_policy, min_num_params=wrapping.min_size),
        "always": always_wrap_policy,
    }[wrapping.policy]
    return FSDP(module, auto_wrap_policy=policy, **arguments)


def _wrap_below(
    module: nn.Module,
    ids: set[int],
    strategies: dict[int, ShardingStrategy],
    arguments: dict[str, Any],
    made: dict[nn.Module, FSDP],
) -> None:
    """Wrap bottom-up; a module at two places becomes one unit at both."""
    for name, child in list(module._modules.items()):
        assert child is not None
        if child in made:
            module._modules[name] = made[child]
            continue
        if isinstance(child, FSDP):
            continue
        _wrap_below(child, ids, strategies, arguments, made)
        if getattr(child, "node_id", None) in ids:
            own = dict(arguments)
            if child.node_id in strategies:
                own["sharding_strategy"] = strategies[child.node_id]
            made[child] = module._modules[name] = FSDP(child, **own)
