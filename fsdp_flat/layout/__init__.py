"""Layer 0: maps parameter elements to flat-buffer offsets and to ranks.

Layouts are values of integers and strings, which find their elements in tensors; nothing here communicates.
Sizes are in elements unless a name gives another unit."""

from fsdp_flat.layout.fqn import (
    CHECKPOINT_WRAPPED_MODULE,
    COMPILED_MODULE,
    FLAT_PARAM,
    FSDP_PREFIX,
    FSDP_WRAPPED_MODULE,
    clean_fqn,
    clean_text,
    flat_param_name,
    is_flat_param_name,
    join_fqn,
    owners_of_constants,
)
from fsdp_flat.layout.intervals import (
    Box,
    EvenPartition,
    Interval,
    IrregularPartition,
    Partition,
    ReplicatedPartition,
    TransferPlan,
    boxes,
    chunk_partition,
    chunk_rows,
    chunk_shape,
    plan_transfer,
)
from fsdp_flat.layout.name_matches import EMPTY, advice_on, misfits, names_unlike, renamed
