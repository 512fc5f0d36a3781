"""Floor 1: the tensors of one process. Walking a module, flat buffers, views, gradients, the handle."""

from fsdp_flat.flat._torch import in_backward, look_at_operations, node_will_run
from fsdp_flat.flat.flat_param import FlatParameter, copy_flat_parameter
from fsdp_flat.flat.guards import ShardedStandIn, unguarded
from fsdp_flat.flat.guise import PLAIN, DTensorGuise, Guise, check_guise, guise_if_dtensor, guise_of
from fsdp_flat.flat.handle import FlatParamHandle, HandleSpec, ShardState
from fsdp_flat.flat.storage import AliasBuffer, MemoryPool
from fsdp_flat.flat.untraced import active_compiler, untraced, untraced_here
from fsdp_flat.flat.walk import (
    FlattenedBy,
    ManagedParam,
    Site,
    collect_params,
    held_locally,
    inside_wrappers,
    modules_of,
    named_sites,
    unsharded_shape,
)

__all__ = [
    "PLAIN",
    "AliasBuffer",
    "DTensorGuise",
    "FlatParamHandle",
    "FlatParameter",
    "FlattenedBy",
    "Guise",
    "HandleSpec",
    "ManagedParam",
    "MemoryPool",
    "ShardState",
    "ShardedStandIn",
    "Site",
    "active_compiler",
    "check_guise",
    "collect_params",
    "copy_flat_parameter",
    "guise_if_dtensor",
    "guise_of",
    "held_locally",
    "in_backward",
    "inside_wrappers",
    "look_at_operations",
    "modules_of",
    "named_sites",
    "node_will_run",
    "unguarded",
    "unsharded_shape",
    "untraced",
    "untraced_here",
]
