"""Floor 1: the tensors of one process. Walking a module, flat buffers, views, gradients, the handle."""

from fsdp_flat.flat._torch import in_backward
from fsdp_flat.flat.flat_param import FlatParameter
from fsdp_flat.flat.handle import FlatParamHandle, HandleSpec, ShardState
from fsdp_flat.flat.walk import FlattenedBy, ManagedParam, Site, collect_params, named_sites

__all__ = [
    "FlatParamHandle",
    "FlatParameter",
    "FlattenedBy",
    "HandleSpec",
    "ManagedParam",
    "ShardState",
    "Site",
    "collect_params",
    "in_backward",
    "named_sites",
]
