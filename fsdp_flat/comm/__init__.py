"""Layer 1: provides process groups, streams and collectives on 1-D tensors."""

from fsdp_flat.comm.agreement import (
    CollectiveLog,
    ErrorTexts,
    UntilRanksMeet,
    agree,
    barrier,
    digest_of,
    enter,
    exchange_if_different,
    find_disagreement,
    fingerprint,
    fingerprints,
    meet,
)
from fsdp_flat.comm.calls import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    RECOMPUTED,
    Place,
    Progress,
    barrier_begun,
    doing,
    unit_names,
)
from fsdp_flat.comm.custom import (
    PACKINGS,
    AllGather,
    Allocate,
    QuantizedAllGather,
    QuantizedReduceScatter,
    ReduceScatter,
    memory_of_group,
    symmetric_memory,
)
from fsdp_flat.comm.exchanges import (
    averages_exactly,
    begin_all_reduce,
    decoded,
    dtype_from_name,
    encoded,
    exchange_bytes,
    exchange_ints,
    true_on_any_rank,
)
from fsdp_flat.comm.failures import named_errors, report_error, report_left_out, reported_failure, while_ranks_live
from fsdp_flat.comm.flat_collectives import CollectiveOverrides, Collectives
from fsdp_flat.comm.given_up import Pending, keep, settled
from fsdp_flat.comm.rank_groups import (
    ALONE,
    STRATEGIES,
    RankGroup,
    ShardingGroups,
    Strategy,
    all_rank_groups,
    connected,
    global_ranks,
    has_accelerator_backend,
    host_group,
    is_simulated,
    moves_cpu_tensors,
    outliving_group,
    resolve_groups,
    second_group,
    strategy_from,
    subgroup_of,
)
from fsdp_flat.comm.routes import collectives_by, collectives_for, pairs_by_order
from fsdp_flat.comm.streams import (
    NOTHING,
    PLANNED,
    HostCopies,
    HostSwap,
    Streams,
    is_accelerator,
    profiled,
    unrecorded,
    untransformed,
)
from fsdp_flat.comm.torch_barriers import is_compared, wait_in_barrier
from fsdp_flat.comm.torch_comm import backend_of, profiler_is_on, transforms_are_active
from fsdp_flat.comm.transfers import P2PChannels
