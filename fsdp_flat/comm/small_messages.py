"""Exchanges small values between ranks, so that they detect a disagreement before they move large tensors.

Each exchange is a collective: every rank of the group must call it at the same point.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_flat.comm.failures import WatchedWork
from fsdp_flat.comm.rank_groups import RankGroup, is_fake, moves_by_gloo

# Words of 8 bytes in a row of which a fingerprint sums the columns.
_COLUMNS = 512
# Bytes up to which tensors are copied to the host together and hashed there.
_SMALL_NBYTES = 16384


def control_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device for small tensors of a group: the CPU if it has a CPU backend, else the compute device."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return device
    return torch.device("cpu")


def digest_of(data: bytes) -> int:
    """Return a hash of ``data`` as a signed 64-bit integer, to be exchanged in its place."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


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
    where = control_device(group, device)
    own = torch.tensor(values, dtype=torch.int64, device=where)
    everyone = [torch.empty_like(own) for _ in range(size)]
    _wait(dist.all_gather(everyone, own, group=group, async_op=True), group, where)
    return [tensor.tolist() for tensor in everyone]


def exchange_bytes(payload: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """All-gather byte strings of any length, in rank order."""
    lengths = [row[0] for row in exchange_ints([len(payload)], group, device)]
    size = dist.get_world_size(group)
    if size == 1 or is_fake(group):
        return [payload] * size
    own = _padded(payload, max(1, *lengths), control_device(group, device))
    everyone = [torch.empty_like(own) for _ in range(size)]
    _wait(dist.all_gather(everyone, own, group=group, async_op=True), group, own.device)
    return [_content(row, length) for row, length in zip(everyone, lengths, strict=True)]


def gather_bytes(payload: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Gather byte strings of any length on rank 0 of the group, in rank order; empty on other ranks."""
    lengths = [row[0] for row in exchange_ints([len(payload)], group, device)]
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1 or is_fake(group):
        return [payload] * size
    own = _padded(payload, max(1, *lengths), control_device(group, device))
    rows = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
    _wait(dist.gather(own, rows, dst=dist.get_global_rank(group, 0), group=group, async_op=True), group, own.device)
    return [_content(row, length) for row, length in zip(rows or [], lengths, strict=rank == 0)]


def _wait(work: Any, group: dist.ProcessGroup, where: torch.device) -> None:
    """Wait for an exchange; over gloo, log a long wait, and raise the cause if it fails.

    A failure that another rank has reported does not end the wait: its caller may have caught it and come here late.
    """
    if moves_by_gloo(group, where):
        rank_group = RankGroup.of(group)
        others = [rank for rank in range(rank_group.size) if rank != rank_group.rank]
        work = WatchedWork(work, rank_group, lambda: "an exchange between ranks", others, raises_early=False)
    work.wait()


def _padded(payload: bytes, length: int, where: torch.device) -> torch.Tensor:
    own = torch.zeros(length, dtype=torch.uint8)
    if payload:
        own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return own.to(where)


def _content(row: torch.Tensor, length: int) -> bytes:
    return row[:length].cpu().numpy().tobytes()
