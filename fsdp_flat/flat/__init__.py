"""Layer 1: manages the tensors of one process: module walk, flat buffers, views, gradients, the handle."""

from fsdp_flat.flat._torch import (
    active_compiler,
    dynamo_disabled,
    dynamo_disabled_here,
    in_backward,
    node_will_run,
    pytree_children,
)
from fsdp_flat.flat.guards import (
    FlatParameter,
    ShardedPlaceholder,
    copy_flat_parameter,
    enable_torch_function,
    unguarded,
)
from fsdp_flat.flat.handle import FlatParamHandle, HandleSpec, ShardState
from fsdp_flat.flat.sharded_grad import set_grad
from fsdp_flat.flat.storage import AliasBuffer, MemoryPool
from fsdp_flat.flat.tensor_adapter import (
    PLAIN,
    DTensorAdapter,
    TensorAdapter,
    adapter_if_dtensor,
    adapter_of,
    check_adapter,
)
from fsdp_flat.flat.views import views_of
from fsdp_flat.flat.walk import (
    FlattenedBy,
    ManagedParam,
    Site,
    collect_params,
    inside_wrappers,
    modules_of,
    named_sites,
    to_local_param,
    unsharded_shape,
)

__all__ = [
    "PLAIN",
    "AliasBuffer",
    "DTensorAdapter",
    "FlatParamHandle",
    "FlatParameter",
    "FlattenedBy",
    "HandleSpec",
    "ManagedParam",
    "MemoryPool",
    "ShardState",
    "ShardedPlaceholder",
    "Site",
    "TensorAdapter",
    "active_compiler",
    "adapter_if_dtensor",
    "adapter_of",
    "check_adapter",
    "collect_params",
    "copy_flat_parameter",
    "dynamo_disabled",
    "dynamo_disabled_here",
    "enable_torch_function",
    "in_backward",
    "inside_wrappers",
    "modules_of",
    "named_sites",
    "node_will_run",
    "pytree_children",
    "set_grad",
    "to_local_param",
    "unguarded",
    "unsharded_shape",
    "views_of",
]
