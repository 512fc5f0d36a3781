"""Makes ranks agree, or fail together with the text of the first rank that failed or differs.

Ranks compare a digest of their payload; only if some differ they exchange the payloads themselves. A result found over
one group is part of the payload for the next one, so that ranks that are only in that group get it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_flat.comm.flat_collectives import begin_all_reduce
from fsdp_flat.comm.rank_groups import RankGroup, connected
from fsdp_flat.comm.small_messages import control_device, digest_of, exchange_bytes, exchange_ints
from fsdp_flat.errors import PeerFailureError, RankMismatchError


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

    def describe(self, first: str, rank: int, other: str) -> str:
        """Return the text of the error if rank 0 of a group has the line ``first`` and ``rank`` the line ``other``."""
        return (
            f"{self.differ} First difference: rank 0 of the group has {first}, rank {rank} has {other}. {self.advice}"
        )


def exchange_if_different(payload: bytes, rank_group: RankGroup, device: torch.device) -> list[bytes] | None:
    """Return the payloads of all ranks, in rank order, or None if they are equal.

    Every rank of the group must call this. If payloads are equal, one integer is exchanged.

    Args:
        payload: this rank's.
        rank_group: the ranks.
        device: the compute device.
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

    Every rank of the groups must call this, with as many flags.

    Args:
        flags: this rank's flags.
        rank_groups: the groups.
        device: the compute device.
        collective: the name of the exchange in errors.
    """
    found = list(flags)
    for rank_group in connected(rank_groups) if found else ():
        assert rank_group.group is not None
        tensor = torch.tensor(found, dtype=torch.uint8, device=control_device(rank_group.group, device))
        found = [
            bool(flag)
            for flag in begin_all_reduce(tensor, rank_group, largest=True, collective=collective).wait().tolist()
        ]
    return found


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
    rank = next(rank for rank, said in enumerate(everyone) if said != first)
    pair = [first.split("\n"), everyone[rank].split("\n")]
    longest = max(map(len, pair))
    ours, theirs = ([*lines, *["nothing more"] * (longest - len(lines))] for lines in pair)
    return RankMismatchError(next(words.describe(a, rank, b) for a, b in zip(ours, theirs, strict=True) if a != b))
