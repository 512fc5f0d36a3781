"""Sharding a model by ``fully_shard`` as a case says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.composable import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from .case import Case, Node, Options, Rows, nodes_of
from .models import Part


def mesh_from(options: Options) -> DeviceMesh:
    """Make the mesh of a case. Every rank must call this."""
    sizes = options.mesh or (dist.get_world_size(),)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def sharded_dim(param: nn.Parameter, rows: Rows, num_shards: int) -> int:
    """Return the dim along which a parameter of the plain model is sharded."""
    is_even = param.dim() > 1 and param.shape[-1] % num_shards == 0
    return param.dim() - 1 if rows.last_dim and is_even else 0


def shard_by_rows(model: Part, rows: Rows, options: Options) -> Any:
    """Shard a new model in place; returns the root. Every rank must call this."""
    mesh = mesh_from(options)
    num_shards = mesh.size(mesh.ndim - 1)
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
    }
    if rows.last_dim:
        arguments["shard_placement_fn"] = lambda param: Shard(sharded_dim(param, rows, num_shards))
    wrapper_arguments = {
        "device_mesh": mesh,
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD,
        "use_orig_params": True,
    }
    sharder = _Sharder(rows, arguments, wrapper_arguments, {}, set())
    sharder.below(model)
    if rows.wrapper_root:
        return FSDP(model, **wrapper_arguments)
    return sharder.shard([model], model.node_id)


@dataclass
class _Sharder:
    """Visits modules bottom-up; a module at two places becomes one unit at both."""

    rows: Rows
    arguments: dict[str, Any]
    wrapper_arguments: dict[str, Any]
    wrappers: dict[nn.Module, FSDP]
    done: set[nn.Module]

    def below(self, module: nn.Module) -> None:
        if module in self.done:
            return
        self.done.add(module)
        for child in module.children():
            self.below(child)
        by_id = {getattr(child, "node_id", -1): child for child in module.children()}
        for unit in self.rows.units:
            members = [by_id[id] for id in unit if id in by_id and not isinstance(by_id[id], FSDPModule)]
            if members and len(members) == len(unit):
                self.shard(members, unit[0])
        for name, child in list(module._modules.items()):
            assert child is not None
            if child not in self.wrappers and getattr(child, "node_id", -1) in self.rows.wrapped:
                self.wrappers[child] = FSDP(child, **self.wrapper_arguments)
            if child in self.wrappers:
                module._modules[name] = self.wrappers[child]

    def shard(self, members: list[nn.Module], id: int) -> nn.Module:
        reshard = False if id in self.rows.keeps else True if id in self.rows.frees else None
        fully_shard(members if len(members) > 1 else members[0], reshard_after_forward=reshard, **self.arguments)
        return members[0]


# -- what can be a unit ----------------------------------------------------------------------------------------------


def fitted(case: Case) -> Rows:
    """Drop units of nodes that are gone, and units that one parameter or module would be in and outside of."""
    rows = case.rows
    assert rows is not None
    nodes = {node.id: node for node in nodes_of(case.model)}
    kinds = {id: node.kind for id, node in nodes.items()}
    referred = {node.refers for node in nodes.values() if node.kind == "alias"}
    siblings = {child.id: parent.id for parent in nodes.values() for child in parent.children}
    units: list[tuple[int, ...]] = []
    for unit in rows.units:
        unit = tuple(id for id in unit if kinds.get(id, "alias") not in ("alias", "root"))
        is_group = len({siblings[id] for id in unit}) == 1 and not any(
            node.id in referred or node.kind == "alias" for id in unit for node in nodes_of(nodes[id])
        )
        units += [unit] if len(unit) == 1 or is_group else [(id,) for id in unit]
    taken = {id for unit in units for id in unit}
    wrapped = [id for id in rows.wrapped if kinds.get(id, "alias") not in ("alias", "root") and id not in taken]
    while True:
        rows = replace(rows, units=tuple(units), wrapped=tuple(wrapped))
        conflict = next(_conflicts(case.model, rows), None)
        if conflict is None:
            return rows
        units = [unit for unit in units if conflict not in unit]
        wrapped = [id for id in wrapped if id != conflict]


def _conflicts(model: Node, rows: Rows) -> Iterator[int]:
    """Iterate over units that hold a part of a tied parameter or of a module whose other part is elsewhere."""
    first = {id: unit[0] for unit in rows.units for id in unit} | {id: id for id in rows.wrapped}
    owners: dict[int, tuple[int, int]] = {}  # of each node: how deep its unit is, and the unit

    def visit(node: Node, owner: tuple[int, int], depth: int) -> None:
        owner = (depth, first[node.id]) if node.id in first else owner
        owners[node.id] = owner
        for child in node.children:
            visit(child, owner, depth + 1)

    visit(model, (0, model.id), 0)
    nodes = {node.id: node for node in nodes_of(model)}
    for node in nodes.values():
        if node.refers < 0:
            continue
        here = owners[node.id]
        if node.kind == "tied":
            there = {owners[node.refers]}
        else:
            below = {owners[inner.id] for inner in nodes_of(nodes[node.refers])}
            # Units inside of the module run wherever it runs.
            there = below & {owners[node.refers]} if node.refers not in first else set()
        for other in there - {here}:
            yield max(here, other)[1]
