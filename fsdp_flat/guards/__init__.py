"""Finds mistakes that a step itself does not (layer 4): one file a promise.

A guard is told of events (:class:`fsdp_flat.core.Guard`), looks, and may raise or warn; it owns no state of the step. A
right program does the same without any: ``with guards_off(): ...``. Those of ``DEFAULT`` are on from the import of the
package.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_flat.core import use_guards
from fsdp_flat.guards.assigned_parameters import AssignedParameters
from fsdp_flat.guards.changed_parameters import ChangedParameters
from fsdp_flat.guards.changed_weights import ChangedWeights
from fsdp_flat.guards.compiled_modules import CompiledModules
from fsdp_flat.guards.low_precision_weights import LowPrecisionWeights, UncastInputs
from fsdp_flat.guards.meta_tensors import MetaTensors
from fsdp_flat.guards.optimizers import Optimizers
from fsdp_flat.guards.out_of_memory import OutOfMemory
from fsdp_flat.guards.replaced_modules import ReplacedModules
from fsdp_flat.guards.trained_parameters import TrainedParameters, TrainedReplicas
from fsdp_flat.guards.unmanaged_tensors import ReplicatedTensors, UnmanagedTensors, check_replicas

DEFAULT = (
    AssignedParameters(),
    ChangedParameters(),
    ChangedWeights(),
    MetaTensors(),
    CompiledModules(),
    ReplacedModules(),
    TrainedParameters(),
    TrainedReplicas(),
    UnmanagedTensors(),
    LowPrecisionWeights(),
    UncastInputs(),
    Optimizers(),
    OutOfMemory(),
)


use_guards(DEFAULT)


@contextmanager
def guards_off() -> Iterator[None]:
    """Run steps without guards inside the block, to measure what they cost. Every rank must enter it."""
    before = use_guards(())
    try:
        yield
    finally:
        use_guards(before)
