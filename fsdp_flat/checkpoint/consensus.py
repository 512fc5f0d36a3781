"""Synchronizes the ranks of a model around file operations: an exception on one rank is raised on all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.comm import (
    ErrorTexts,
    RankGroup,
    agree,
    barrier,
    digest_of,
    exchange_bytes,
    exchange_ints,
    global_ranks,
)
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.runtime import units_of
from fsdp_flat.state import rank_groups_of

SAVING = ErrorTexts(
    "saving", "Ranks save different things.", "Call it with the same model and arguments on every rank."
)
LOADING = ErrorTexts(
    "loading", "Ranks load different things.", "Call it with the same model and arguments on every rank."
)


def group_of(model: nn.Module) -> dist.ProcessGroup:
    """Return the process group of all ranks that hold a shard or a replica of the model.

    Raises:
        OptionError: the model holds no wrapper.
        UnsupportedError: the model has several groups (hybrid strategies, tensor parallelism), and together they are
            neither one group nor the world.
        UsageError: the group was destroyed.
    """
    units = units_of(model)
    if not units:
        raise OptionError(f"{type(model).__name__} holds no FullyShardedDataParallel.")
    adapters = [entry.adapter for unit in units for handle in unit.handles for entry in handle.views.params]
    groups = [rank_group.group for rank_group in rank_groups_of(units) if rank_group.group is not None]
    groups += [group for adapter in adapters for group in adapter.mesh_groups if dist.get_world_size(group) > 1]
    # There may be several groups of the same ranks; every rank must choose the same one.
    rank_groups: dict[frozenset[int], dist.ProcessGroup] = {}
    for group in groups:
        rank_groups.setdefault(frozenset(global_ranks(group)), group)
    joint = next(iter(rank_groups.values()), units[0].options.groups.process_group)
    everybody = frozenset().union(*rank_groups)
    if everybody in rank_groups:
        joint = rank_groups[everybody]
    elif len(rank_groups) > 1:
        # The groups are mesh dims: they intersect in this rank only, and the mesh size is the product of their sizes.
        joint, num_ranks = dist.group.WORLD, math.prod(map(len, rank_groups))
        if num_ranks != dist.get_world_size():
            raise UnsupportedError(
                f"The model is on {num_ranks} of {dist.get_world_size()} ranks, along {len(rank_groups)} groups "
                "(sharded, replicated, tensor parallel), and no process group joins just these. Save it by "
                "state_dict() and torch.distributed.checkpoint."
            )
    assert joint is not None
    return joint


class Consensus:
    """Exchanges errors and small values between the ranks of a group.

    Args:
        group: the group.
        words: texts for errors about the current operation.
        device: the compute device, used for groups without a CPU backend.

    Attributes:
        rank: this rank in the group.
        size: the number of ranks.
        ranks: the global rank of each rank of the group.
    """

    def __init__(self, group: dist.ProcessGroup, words: ErrorTexts, device: torch.device) -> None:
        self.group = group
        self.ranks = global_ranks(group)
        self._words = words
        self._device = device
        self._rank_group = RankGroup.of(group)
        self.rank, self.size = self._rank_group.rank, self._rank_group.size

    def barrier(self, what: str) -> None:
        """Wait for the other ranks; raises within seconds if a rank does not call this."""
        barrier(what, self._rank_group)

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Raise on every rank if the block raises on one. Every rank must enter the block."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.fail(error)

    def fail(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an error. Every rank must call this."""
        self.integers([], error)

    def integers(self, values: list[int], error: Exception | None, same: Sequence[str] = ()) -> list[list[int]]:
        """All-gather 64-bit integers, as many on every rank, in one collective. Every rank must call this.

        Args:
            values: this rank's integers.
            error: the exception that stopped this rank, or None.
            same: lines that must not differ between ranks.

        Returns:
            Every rank's integers, by rank of the group.

        Raises:
            PeerFailureError: another rank has an error; ``error`` itself on a rank that has one.
            RankMismatchError: the lines differ.
        """
        if error is not None and self.size == 1:
            raise error
        own = [int(error is None), digest_of("\n".join(same).encode()), *values]
        rows = exchange_ints(own, self.group, self._device)
        differ = len({digest for _, digest, *_ in rows}) > 1
        if differ or not all(ok for ok, *_ in rows):
            # A difference may be the cause of an error.
            agree(same, None if differ else error, [self._rank_group], self._device, self._words)
        return [row[2:] for row in rows]

    def texts(self, text: str) -> list[str]:
        """All-gather every rank's text, by rank; one collective if all are empty. Every rank must call this."""
        if not any(length for (length,) in self.integers([len(text)], None)):
            return [""] * self.size
        return [payload.decode() for payload in exchange_bytes(text.encode(), self.group, self._device)]

    def gather_texts(self, text: str) -> list[str]:
        """Gather every rank's text on rank 0; the others get an empty list. Every rank must call this."""
        return [
            payload.decode() for payload in exchange_bytes(text.encode(), self.group, self._device, only_on_rank0=True)
        ]


def consensus_of(model: nn.Module, words: ErrorTexts) -> Consensus:
    """Return the consensus of a model's ranks; see :func:`group_of`."""
    return Consensus(group_of(model), words, units_of(model)[0].options.device)
