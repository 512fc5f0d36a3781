"""Exchanges values between ranks, which every rank of the group must call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm.calls import calls_of
from fsdp_flat.comm.failures import NamedWork, WatchedWork, named_errors
from fsdp_flat.comm.given_up import Pending
from fsdp_flat.comm.rank_groups import RankGroup, connected, host_group, is_fake, moves_by_gloo
from fsdp_flat.comm.torch_comm import backend_of, unseen_by_modes
from fsdp_flat.errors import RankMismatchError

# Backends that average floats, each in its own kernel.
_AVERAGING = ("nccl", "xccl")
# No text is as long: a rank in another collective has sent values that are read as a length.
_MOST_NBYTES = 1 << 40


def averages_exactly(rank_group: RankGroup, tensor: torch.Tensor) -> bool:
    """Return whether the average of a group's backend is, to the bit, the sum divided by the number of ranks.

    NCCL multiplies by the inverse before it sums: exact for a power of two, unless a product leaves the range of fp16.
    """
    group, size = rank_group.group, rank_group.size
    if group is None or size & (size - 1) or tensor.dtype not in (torch.float32, torch.bfloat16):
        return False
    return is_fake(group) or getattr(backend_of(group, tensor.device), "name", str)() in _AVERAGING


def begin_all_reduce(
    tensor: torch.Tensor,
    rank_group: RankGroup,
    *,
    largest: bool = False,
    averages: bool = False,
    collective: str = "an all-reduce",
    is_flags: bool = False,
) -> Pending:
    """Begin to all-reduce ``tensor`` in place; errors name ``collective``.

    It is summed, or (``largest``) the maximum is taken, or (``averages``) the backend takes the average.

    Tools that count the collectives of a step do not see those of flags (``is_flags``), which torch does not exchange.
    """
    if rank_group.size == 1:
        return Pending((), tensor)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    work: Any
    if rank_group.group is not None:
        calls_of(rank_group.group).add(collective)
    is_watched = tensor.device.type == "cpu"
    named = nullcontext() if is_watched else named_errors(collective, rank_group)
    with unseen_by_modes() if is_flags else nullcontext(), named:
        work = dist.all_reduce(tensor, op=op, group=rank_group.group, async_op=True)
    if is_watched:
        work = WatchedWork(work, rank_group, collective, rank_group.others)
    else:
        work = NamedWork(work, rank_group, lambda: collective)
    return Pending([work], tensor)


def true_on_any_rank(
    flags: Sequence[bool],
    rank_groups: Sequence[RankGroup],
    *,
    collective: str = "an exchange of flags",
) -> list[bool]:
    """Return for each flag whether it is true on any rank of the groups.

    Every rank of the groups must call this, with as many flags.
    """
    found = list(flags)
    for rank_group in connected(rank_groups) if found else ():
        tensor = torch.tensor(found, dtype=torch.uint8)
        begin_all_reduce(tensor, host_group(rank_group), largest=True, collective=collective, is_flags=True).wait()
        found = [bool(flag) for flag in tensor.tolist()]
    return found


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype whose ``str(dtype)`` is ``name``, the form in which ranks exchange dtypes."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def exchange_ints(values: list[int], rank_group: RankGroup, doing: str = "") -> list[list[int]]:
    """All-gather a list of 64-bit integers, as many on every rank, by rank; errors say what they were ``doing``."""
    if not connected([rank_group]):
        return [values] * rank_group.size
    own = torch.tensor(values, dtype=torch.int64)
    return [row.tolist() for row in _gathered(own, rank_group, doing)]


def encoded(text: str) -> bytes:
    """Return a text as bytes for an exchange; that of a path which is not UTF-8 has surrogates."""
    return text.encode(errors="surrogatepass")


def decoded(payload: bytes) -> str:
    """Return the text of :func:`encoded` bytes."""
    return payload.decode(errors="surrogatepass")


def exchange_bytes(
    payload: bytes,
    rank_group: RankGroup,
    doing: str = "",
    *,
    only_on_rank0: bool = False,
) -> list[bytes]:
    """All-gather byte strings of any length, in rank order; with ``only_on_rank0`` the result is empty elsewhere.

    Errors say what ranks are ``doing``.
    """
    lengths = [length for (length,) in exchange_ints([len(payload)], rank_group, doing)]
    if not connected([rank_group]):
        return [payload] * rank_group.size
    if wrong := [rank for rank, length in enumerate(lengths) if not 0 <= length < _MOST_NBYTES]:
        raise RankMismatchError(
            f"Rank {wrong[0]} of the group was not in the exchange of texts between ranks{doing and f' while {doing}'} "
            f"in which rank {rank_group.rank} is, so it sent no length. Every rank must make the same calls in the "
            'same order: do not make one on some ranks only, as in "if rank == 0".'
        )
    own = torch.frombuffer(bytearray(payload.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8)
    rows = _gathered(own, rank_group, doing, only_on_rank0=only_on_rank0)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths)]


def _gathered(
    own: torch.Tensor, rank_group: RankGroup, doing: str, *, only_on_rank0: bool = False
) -> list[torch.Tensor]:
    """Exchange CPU tensors of one shape; over gloo, log a long wait, and raise the cause if it fails.

    NCCL moves none, so its groups have a host group for them: a rank that waits there can find out why.

    A failure that another rank has reported does not end the wait: its caller may have caught it and come here late.
    """
    rank_group = host_group(rank_group)
    group = rank_group.process_group
    rows = [torch.empty_like(own) for _ in range(0 if only_on_rank0 and rank_group.rank else rank_group.size)]
    work: Any
    collective = f"an exchange between ranks{doing and f' while {doing}'}"
    calls = calls_of(group)
    calls.add(collective)
    calls.thread = threading.get_ident()
    with unseen_by_modes():
        if only_on_rank0:
            work = dist.gather(own, rows or None, group_dst=0, group=group, async_op=True)
        else:
            work = dist.all_gather(rows, own, group=group, async_op=True)
    if moves_by_gloo(group, own.device):
        work = WatchedWork(work, rank_group, collective, rank_group.others, raises_early=False)
    Pending([work], own).wait()
    return rows
