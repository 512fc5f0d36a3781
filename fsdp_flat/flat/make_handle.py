"""Chooses the kind of a handle: what modules and optimizers see of its parameters."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_flat.flat.dtensor_handle import DTensorHandle
from fsdp_flat.flat.flat_handles import FlatHandle, OriginalsHandle
from fsdp_flat.flat.handle import FlatParamHandle
from fsdp_flat.flat.handle_spec import HandleSpec
from fsdp_flat.flat.optimizers import watch_steps_on
from fsdp_flat.flat.params import ManagedParam


def make_handle(params: Sequence[ManagedParam], spec: HandleSpec) -> FlatParamHandle:
    """Create the handle of ``params`` (at least one, all of one dtype); the modules then hold this rank's shards."""
    kind = OriginalsHandle if spec.use_orig_params else FlatHandle
    handle: FlatParamHandle = (kind if spec.rows is None else DTensorHandle)(params, spec)
    watch_steps_on(handle)
    return handle
