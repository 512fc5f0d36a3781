"""Floor 1: process groups, streams and collectives on 1-D tensors."""

from fsdp_flat.comm.agreement import (
    digest_of,
    dtype_named,
    exchange_bytes,
    exchange_ints,
    gather_bytes,
    scatter_bytes,
)
from fsdp_flat.comm.causes import tell_failure
from fsdp_flat.comm.collective_log import CollectiveLog
from fsdp_flat.comm.collectives import Collectives, Pending, begin_all_reduce, collectives_for
from fsdp_flat.comm.custom import AllGather, CustomCollectives, ReduceScatter
from fsdp_flat.comm.groups import Axis, UnitGroups, host_group, is_simulated, resolve_groups
from fsdp_flat.comm.meeting import meet
from fsdp_flat.comm.quantized import QuantizedAllGather, QuantizedReduceScatter
from fsdp_flat.comm.strategies import STRATEGIES, Strategy, strategy_from
from fsdp_flat.comm.streams import Streams, profiled, streams_for, unrecorded
from fsdp_flat.comm.transfers import Lanes, Transfers

__all__ = [
    "STRATEGIES",
    "AllGather",
    "Axis",
    "CollectiveLog",
    "Collectives",
    "CustomCollectives",
    "Lanes",
    "Pending",
    "QuantizedAllGather",
    "QuantizedReduceScatter",
    "ReduceScatter",
    "Strategy",
    "Streams",
    "Transfers",
    "UnitGroups",
    "begin_all_reduce",
    "collectives_for",
    "digest_of",
    "dtype_named",
    "exchange_bytes",
    "exchange_ints",
    "gather_bytes",
    "host_group",
    "is_simulated",
    "meet",
    "profiled",
    "resolve_groups",
    "scatter_bytes",
    "strategy_from",
    "streams_for",
    "tell_failure",
    "unrecorded",
]
