"""Layer 1: provides process groups, streams and collectives on 1-D tensors."""

from fsdp_flat.comm.agreement import ErrorTexts, agree, exchange_if_different, find_disagreement, true_on_any_rank
from fsdp_flat.comm.collective_log import CollectiveLog
from fsdp_flat.comm.custom import (
    AllGather,
    Allocate,
    CollectiveChoice,
    QuantizedAllGather,
    QuantizedReduceScatter,
    ReduceScatter,
    backend_all_gather,
    backend_reduce_scatter,
    chosen_collectives,
    memory_of_group,
)
from fsdp_flat.comm.failures import report_failure, unit_names
from fsdp_flat.comm.flat_collectives import Collectives, Pending, begin_all_reduce, collectives_for
from fsdp_flat.comm.rank_groups import (
    ALONE,
    RankGroup,
    ShardingGroups,
    connected,
    global_ranks,
    host_group,
    resolve_groups,
    second_group,
    subgroup_of,
)
from fsdp_flat.comm.small_messages import (
    control_device,
    digest_of,
    dtype_from_name,
    exchange_bytes,
    exchange_ints,
    fingerprint,
    fingerprints,
    gather_bytes,
)
from fsdp_flat.comm.store_barrier import barrier
from fsdp_flat.comm.strategies import STRATEGIES, Strategy, strategy_from
from fsdp_flat.comm.streams import Streams, profiled, streams_for, unrecorded
from fsdp_flat.comm.transfers import P2PChannels
