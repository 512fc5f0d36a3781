"""Compares the models of all ranks before any parameter is sharded.

Otherwise a model whose shapes differ between ranks would abort the process inside the first collective,
and one whose weights differ would train on a mixture of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_flat.comm import RankGroup, ShardingGroups, digest_of, exchange_bytes, exchange_ints, fingerprints
from fsdp_flat.errors import PeerFailureError, RankMismatchError
from fsdp_flat.flat import adapter_if_dtensor
from fsdp_flat.runtime.options import SyncStates

__all__ = ["ErrorTexts", "agree", "agree_on_structure", "agree_on_weights", "true_on_any_rank"]

_ADVICE = (
    'To mend it, pass sync_module_states="auto" (or True) to start from rank 0\'s weights, seed every rank alike, or '
    "load a checkpoint on every rank."
)


def agree_on_structure(
    lines: Sequence[str], error: Exception | None, groups: ShardingGroups, device: torch.device
) -> None:
    """Raise on every rank if any rank failed or is about to build a different model; see :func:`agree`."""
    words = ErrorTexts(
        "wrapping", "Ranks were given different models.", "Build the same model with the same policy on every rank."
    )
    agree(lines, error, groups.rank_groups, device, words)


@dataclass(frozen=True, slots=True)
class ErrorTexts:
    """Holds the phrases that errors of :func:`agree` contain.

    Attributes:
        doing: the operation in which a rank failed, a participle.
        differ: the statement that ranks differ, a sentence.
        advice: the recommended action, a sentence.
    """

    doing: str
    differ: str
    advice: str


def agree(
    lines: Sequence[str],
    error: Exception | None,
    rank_groups: Sequence[RankGroup],
    device: torch.device,
    words: ErrorTexts,
) -> None:
    """Raise on every rank if any rank failed or is about to do something different.

    Every rank of the groups must call this; a rank that failed passes its exception.

    Args:
        lines: description of the next operation, one fact a line, the same on every rank.
        error: the exception that stopped this rank, or None.
        rank_groups: groups over which to compare.
        device: the compute device.
        words: phrases for the errors.

    Raises:
        PeerFailureError: another rank failed.
        RankMismatchError: lines differ; the text shows the first difference.
    """
    text = "\n".join(lines)
    # A finding on one group is exchanged over the next before raising; otherwise ranks of other groups would wait
    # forever.
    found = error
    for rank_group in rank_groups:
        if rank_group.group is None or rank_group.size == 1:
            continue
        rows = exchange_ints(
            [int(found is None), digest_of(text.encode()) if found is None else 0], rank_group.group, device
        )
        if not all(ok for ok, _ in rows):
            heard = _first_finding(found, rank_group, device, words, own=found is error)
            found = found or heard
        elif len({digest for _, digest in rows}) > 1:
            found = _difference(text, rank_group, device, words)
    if found is not None:
        raise found


def true_on_any_rank(flags: Sequence[bool], groups: ShardingGroups, device: torch.device) -> list[bool]:
    """Return for each flag whether it is true on any rank of the groups.

    Every rank of the groups must call this, with as many flags.
    """
    found = list(flags)
    for rank_group in groups.rank_groups:
        if rank_group.group is not None and rank_group.size > 1 and found:
            rows = exchange_ints([int(flag) for flag in found], rank_group.group, device)
            found = [any(column) for column in zip(*rows, strict=True)]
    return found


def _first_finding(
    found: Exception | None, rank_group: RankGroup, device: torch.device, words: ErrorTexts, *, own: bool
) -> Exception:
    """Return the first failure or difference that any rank of the group has found.

    ``own`` says that ``found`` is this rank's failure, not another's.
    """
    assert rank_group.group is not None
    kind = "failure" if own else "difference" if isinstance(found, RankMismatchError) else "heard"
    told = "" if found is None else f"{kind}\n" + (f"{type(found).__name__}: {found}" if own else str(found))
    texts = [payload.decode() for payload in exchange_bytes(told.encode(), rank_group.group, device)]
    rank, first = next((rank, text) for rank, text in enumerate(texts) if text)
    kind, _, text = first.partition("\n")
    if kind == "difference":
        return RankMismatchError(text)
    if kind == "heard":
        return PeerFailureError(text)
    return PeerFailureError(f"Rank {rank} of the group failed while {words.doing}, so this rank stops too: {text}")


def _difference(text: str, rank_group: RankGroup, device: torch.device, words: ErrorTexts) -> RankMismatchError:
    assert rank_group.group is not None
    texts = [payload.decode().split("\n") for payload in exchange_bytes(text.encode(), rank_group.group, device)]
    first = texts[0]
    rank = next(rank for rank, lines in enumerate(texts) if lines != first)
    other = texts[rank]
    at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    end = "nothing more"
    return RankMismatchError(
        f"{words.differ} First difference: rank 0 of the group has {_line(first, at, end)}, "
        f"rank {rank} has {_line(other, at, end)}. {words.advice}"
    )


def _line(lines: list[str], index: int, end: str) -> str:
    return lines[index] if index < len(lines) else end


def agree_on_weights(
    named: Sequence[tuple[str, torch.Tensor]], sync: SyncStates, groups: ShardingGroups, device: torch.device
) -> bool:
    """Compare initial weights across ranks; return whether those of rank 0 must be broadcast.

    Every rank of the groups must call this with the same names.

    Raises:
        RankMismatchError: they differ and ``sync`` is ``"raise"``.
    """
    if sync == "broadcast":
        return True
    found = ""
    prints = fingerprints([adapter_if_dtensor(param).to_local(param.detach()) for _, param in named])
    total = digest_of(repr(prints).encode())
    for rank_group in groups.rank_groups:
        if rank_group.group is None or rank_group.size == 1 or not prints:
            continue
        # A difference found on one group is exchanged over the next, so that all ranks take the same action afterwards.
        summary = exchange_ints([total, int(bool(found))], rank_group.group, device)
        if any(already for _, already in summary):
            told = [payload.decode() for payload in exchange_bytes(found.encode(), rank_group.group, device)]
            found = found or next(text for text in told if text)
        elif len({row[0] for row in summary}) > 1:
            rows = exchange_ints(prints, rank_group.group, device)
            index = next(i for i in range(len(prints)) if len({row[i] for row in rows}) > 1)
            rank = next(rank for rank, row in enumerate(rows) if row[index] != rows[0][index])
            found = (
                f"Ranks start from different weights: {named[index][0]!r} of rank {rank} differs from that of rank 0 "
                "of the group"
            )
            if sync == "warn" and rank_group.rank == 0:
                warnings.warn(f"{found}; each rank's shard will hold its own. {_ADVICE}", stacklevel=6)
    if found and sync == "raise":
        raise RankMismatchError(f"{found}. {_ADVICE}")
    return bool(found) and sync == "auto"
