"""Exchanges small values between ranks, so that they agree before they move large tensors, or fail together.

Ranks compare a digest of their payload; only if some differ they exchange the payloads themselves. A result found over
one group is part of the payload for the next one, so that ranks that are only in that group get it too.

Each exchange is a collective: every rank of the group must call it at the same point.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm.failures import WatchedWork, begin_all_reduce
from fsdp_flat.comm.rank_groups import (
    RankGroup,
    ShardingGroups,
    connected,
    control_device,
    is_fake,
    moves_by_gloo,
)
from fsdp_flat.errors import PeerFailureError, RankMismatchError

# Words of 8 bytes in a row of which a fingerprint sums the columns.
_COLUMNS = 512
# Bytes up to which tensors are copied to the host together and hashed there.
_SMALL_NBYTES = 16384
# A program that only evaluates never compares its log of collectives, so a long log is folded into a digest.
_MOST_ENTRIES = 1 << 16
_CODES = {"all-gather": 1, "reduction": 2}

# -- digests ---------------------------------------------------------------------------------------------------------


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def digest_of(data: bytes) -> int:
    """Return a hash of ``data`` as a signed 64-bit integer, to be exchanged in its place."""
    return int.from_bytes(_digest(data), "big", signed=True)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a 64-bit hash of every element's bits and place: column and row sums, hashed on the host.

    Sums are of 64-bit words, 512 to a row, on the tensor's device. Column sums alone would not see the order of rows.
    """
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    data = data.clone() if data.storage_offset() % 8 else data
    # Sum 64-bit words: torch widens shorter ones before it adds, which takes many times as long.
    row = 8 * _COLUMNS
    whole = data.numel() // row * row
    rows = data[:whole].view(torch.int64).view(-1, _COLUMNS)
    parts = (rows.sum(0), rows.sum(1), data[whole:])
    bits = [part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
    return digest_of(b"".join(bits))


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a 64-bit hash of every element's bits for each tensor, with one copy to the host for all small ones."""
    found = [0] * len(tensors)
    small: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.nbytes <= _SMALL_NBYTES:
            data = tensor.reshape(-1).contiguous().view(torch.uint8)
            small.setdefault(tensor.device, []).append((index, data))
        else:
            found[index] = fingerprint(tensor)
    for entries in small.values():
        host = torch.cat([data for _, data in entries]).cpu().numpy().tobytes()
        stop = 0
        for index, part in entries:
            start, stop = stop, stop + part.numel()
            found[index] = digest_of(host[start:stop])
    return found


class LoggedUnit(Protocol):
    """Describes the unit attributes that the log reads."""

    unit_id: int
    name: str


class CollectiveLog:
    """Records the collectives issued since the last comparison between ranks, by sharding groups.

    An all-gather of one unit that is paired with another unit's all-gather of the same size succeeds and mixes their
    weights. Only the shared-memory transport detects that itself, so ranks compare their logs before an optimizer
    steps.
    """

    def __init__(self) -> None:
        self._issued: dict[ShardingGroups, list[tuple[str, LoggedUnit]]] = {}
        self._folded: dict[ShardingGroups, tuple[int, bytes]] = {}

    def of(self, groups: ShardingGroups) -> list[tuple[str, LoggedUnit]]:
        """Return the list to which callers append ``(operation, unit)`` for each collective over ``groups``."""
        return self._issued.setdefault(groups, [])

    def digest(self, groups: ShardingGroups) -> bytes:
        """Return an 8-byte digest of the log of ``groups``, equal on ranks that issued the same collectives."""
        issued = self.of(groups)
        count, folded = self._folded.get(groups, (0, b""))
        entries = array("q", [part for operation, unit in issued for part in (_CODES[operation], unit.unit_id)])
        return _digest(folded + (count + len(issued)).to_bytes(8, "big") + entries.tobytes())

    def lines(self, groups: ShardingGroups) -> list[str]:
        """Return one readable line for each collective issued over ``groups``."""
        count, _ = self._folded.get(groups, (0, b""))
        earlier = [f"{count} earlier collectives"] if count else []
        return earlier + [f"the {operation} of unit {unit.name!r}" for operation, unit in self.of(groups)]

    def trim(self) -> None:
        """Fold long logs into digests."""
        for groups, issued in self._issued.items():
            if len(issued) > _MOST_ENTRIES:
                count, _ = self._folded.get(groups, (0, b""))
                self._folded[groups] = (count + len(issued), self.digest(groups))
                issued.clear()

    def clear(self) -> None:
        """Clear all logs, after a comparison between ranks or an aborted step."""
        self._folded.clear()
        for issued in self._issued.values():
            issued.clear()


# -- exchanges -------------------------------------------------------------------------------------------------------


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype whose ``str(dtype)`` is ``name``, the form in which ranks exchange dtypes."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def exchange_ints(values: list[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """All-gather a list of 64-bit integers, of equal length on every rank, in rank order."""
    size = dist.get_world_size(group)
    if size == 1 or is_fake(group):
        return [values] * size
    own = torch.tensor(values, dtype=torch.int64, device=control_device(group, device))
    return [row.tolist() for row in _gathered(own, group)]


def exchange_bytes(
    payload: bytes, group: dist.ProcessGroup, device: torch.device, *, only_on_rank0: bool = False
) -> list[bytes]:
    """All-gather byte strings of any length, in rank order; with ``only_on_rank0`` the result is empty elsewhere."""
    lengths = [length for (length,) in exchange_ints([len(payload)], group, device)]
    if len(lengths) == 1 or is_fake(group):
        return [payload] * len(lengths)
    own = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    if payload:
        own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = _gathered(own.to(control_device(group, device)), group, only_on_rank0=only_on_rank0)
    return [row[:length].cpu().numpy().tobytes() for row, length in zip(rows, lengths)]


def _gathered(own: torch.Tensor, group: dist.ProcessGroup, *, only_on_rank0: bool = False) -> list[torch.Tensor]:
    """Exchange tensors of one shape; over gloo, log a long wait, and raise the cause if it fails.

    A failure that another rank has reported does not end the wait: its caller may have caught it and come here late.
    """
    rank_group = RankGroup.of(group)
    has_result = rank_group.rank == 0 or not only_on_rank0
    rows = [torch.empty_like(own) for _ in range(rank_group.size)] if has_result else []
    work: Any
    if only_on_rank0:
        work = dist.gather(own, rows or None, dst=dist.get_global_rank(group, 0), group=group, async_op=True)
    else:
        work = dist.all_gather(rows, own, group=group, async_op=True)
    if moves_by_gloo(group, own.device):
        name = "an exchange between ranks"
        work = WatchedWork(work, rank_group, lambda: name, rank_group.others, raises_early=False)
    work.wait()
    return rows


def exchange_if_different(payload: bytes, rank_group: RankGroup, device: torch.device) -> list[bytes] | None:
    """Return the payloads of all ranks, in rank order, or None if they are equal.

    Every rank of the group must call this. If payloads are equal, one integer is exchanged.
    """
    if not connected([rank_group]):
        return None
    assert rank_group.group is not None
    rows = exchange_ints([digest_of(payload)], rank_group.group, device)
    return exchange_bytes(payload, rank_group.group, device) if len({digest for (digest,) in rows}) > 1 else None


def true_on_any_rank(
    flags: Sequence[bool],
    rank_groups: Sequence[RankGroup],
    device: torch.device,
    *,
    collective: str = "an exchange of flags",
) -> list[bool]:
    """Return for each flag whether it is true on any rank of the groups.

    Every rank of the groups must call this, with as many flags. Errors name ``collective``.
    """
    found = list(flags)
    for rank_group in connected(rank_groups) if found else ():
        assert rank_group.group is not None
        tensor = torch.tensor(found, dtype=torch.uint8, device=control_device(rank_group.group, device))
        begin_all_reduce(tensor, rank_group, largest=True, collective=collective).wait()
        found = [bool(flag) for flag in tensor.tolist()]
    return found


# -- consensus -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorTexts:
    """Holds the phrases that errors of :func:`agree` contain.

    Attributes:
        doing: the operation in which a rank failed, a participle.
        differ: the statement that ranks differ, a sentence.
        advice: the recommended action, a sentence.
    """

    doing: str
    differ: str = ""
    advice: str = ""


def agree(
    lines: Sequence[str],
    error: Exception | None,
    rank_groups: Sequence[RankGroup],
    device: torch.device,
    words: ErrorTexts,
) -> None:
    """Raise on every rank if any rank failed or is about to do something different.

    Every rank of the groups must call this, with a description of the next operation, one fact a line, that is the same
    on every rank. A rank that failed passes its exception, which it raises itself.

    Raises:
        PeerFailureError: another rank failed.
        RankMismatchError: lines differ; the text shows the first difference.
    """
    found = find_disagreement(lines, error, rank_groups, device, words)
    if found is not None:
        raise found


_SAME, _FAILURE, _HEARD, _DIFFERENCE = "same", "failure", "heard", "difference"


def find_disagreement(
    lines: Sequence[str],
    error: Exception | None,
    rank_groups: Sequence[RankGroup],
    device: torch.device,
    words: ErrorTexts,
) -> Exception | None:
    """Return the exception that :func:`agree` would raise, or None.

    A caller that compares other lines over each of several groups passes the result as the next ``error``.
    """
    found = error
    for rank_group in connected(rank_groups):
        if found is None:
            said = "\n".join([_SAME, *lines])
        elif found is error:
            said = f"{_FAILURE}\n{type(found).__name__}: {found}"
        else:
            said = f"{_DIFFERENCE if isinstance(found, RankMismatchError) else _HEARD}\n{found}"
        everyone = exchange_if_different(said.encode(), rank_group, device)
        if everyone is not None and found is None:
            found = _finding([payload.decode() for payload in everyone], words)
    return found


def _finding(everyone: list[str], words: ErrorTexts) -> Exception:
    """Return the error for the first rank that has one, else for the first rank whose lines differ from rank 0's."""
    for rank, said in enumerate(everyone):
        kind, _, text = said.partition("\n")
        if kind == _DIFFERENCE:
            return RankMismatchError(text)
        if kind == _HEARD:
            return PeerFailureError(text)
        if kind == _FAILURE:
            return PeerFailureError(
                f"Rank {rank} of the group failed while {words.doing}, so this rank stops too: {text}"
            )
    first = everyone[0]
    rank, other = next((rank, said) for rank, said in enumerate(everyone) if said != first)
    pairs = zip_longest(first.split("\n"), other.split("\n"), fillvalue="nothing more")
    ours, theirs = next((ours, theirs) for ours, theirs in pairs if ours != theirs)
    return RankMismatchError(
        f"{words.differ} First difference: rank 0 of the group has {ours}, rank {rank} has {theirs}. {words.advice}"
    )
