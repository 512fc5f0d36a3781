"""Layer 1: manages the tensors of one process: module walk, flat buffers, views, gradients, the handle."""

from fsdp_flat.flat._torch import (
    active_compiler,
    concatenated_mesh,
    dynamo_disabled,
    dynamo_disabled_here,
    flattened_mesh,
    in_backward,
    node_will_run,
    pytree_children,
)
from fsdp_flat.flat.arrangement import Place, clear_padding, joined, local_part, shard_of, unsharded_of, views_of
from fsdp_flat.flat.dtensor_views import DTensorViews, RowSharding
from fsdp_flat.flat.guards import (
    FlatParameter,
    ShardedPlaceholder,
    copy_flat_parameter,
    enable_torch_function,
    unguarded,
)
from fsdp_flat.flat.handle import FlatParamHandle, HandleSpec, ShardState
from fsdp_flat.flat.sharded_grad import set_grad
from fsdp_flat.flat.shown_grads import (
    grads_by_adapter,
    have_grads,
    restore_sharded_grad,
    sharded_grad_of,
    show_full_grads,
)
from fsdp_flat.flat.storage import AliasBuffer, MemoryPool
from fsdp_flat.flat.tensor_adapter import (
    PLAIN,
    DataParallelDims,
    DTensorAdapter,
    TensorAdapter,
    adapter_if_dtensor,
    adapter_of,
    check_adapter,
)
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
    "DTensorViews",
    "DataParallelDims",
    "FlatParamHandle",
    "FlatParameter",
    "FlattenedBy",
    "HandleSpec",
    "ManagedParam",
    "MemoryPool",
    "Place",
    "RowSharding",
    "ShardState",
    "ShardedPlaceholder",
    "Site",
    "TensorAdapter",
    "active_compiler",
    "adapter_if_dtensor",
    "adapter_of",
    "check_adapter",
    "clear_padding",
    "collect_params",
    "concatenated_mesh",
    "copy_flat_parameter",
    "dynamo_disabled",
    "dynamo_disabled_here",
    "enable_torch_function",
    "flattened_mesh",
    "grads_by_adapter",
    "have_grads",
    "in_backward",
    "inside_wrappers",
    "joined",
    "local_part",
    "modules_of",
    "named_sites",
    "node_will_run",
    "pytree_children",
    "restore_sharded_grad",
    "set_grad",
    "shard_of",
    "sharded_grad_of",
    "show_full_grads",
    "to_local_param",
    "unguarded",
    "unsharded_of",
    "unsharded_shape",
    "views_of",
]
