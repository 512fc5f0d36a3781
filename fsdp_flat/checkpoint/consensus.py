"""Synchronizes the ranks of a model around file operations: an exception on one rank is raised on all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.comm import RankGroup, barrier, exchange_bytes, gather_bytes, global_ranks, scatter_bytes
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.runtime import ErrorTexts, agree, units_of
from fsdp_flat.state import rank_groups_of

__all__ = ["LOADING", "SAVING", "Consensus", "consensus_of"]

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
    """Exchanges errors and texts between the ranks of a group.

    Args:
        group: the group.
        words: texts for errors about the current operation.
        device: the compute device, used for groups without a CPU backend.

    Attributes:
        rank: this rank in the group.
        size: the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, words: ErrorTexts, device: torch.device) -> None:
        self.group = group
        self._words = words
        self._device = device
        self._rank_group = RankGroup.of(group)
        self.rank, self.size = self._rank_group.rank, self._rank_group.size

    def barrier(self, what: str) -> None:
        """Wait for the other ranks; raises within seconds if a rank does not call this."""
        barrier(what, self._rank_group)

    @contextmanager
    def propagate_errors(self, same: Sequence[str] = ()) -> Iterator[None]:
        """Raise on every rank if the block raises on one, or if ``same`` differs. Every rank must enter the block."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.fail(error, same)

    def fail(self, error: Exception | None, same: Sequence[str] = ()) -> None:
        """Raise on every rank if any rank has an error or different lines. Every rank must call this."""
        if error is not None and self.size == 1:
            raise error
        agree(same, error, [self._rank_group], self._device, self._words)

    def texts(self, text: str) -> list[str]:
        """All-gather every rank's text, by rank. Every rank must call this."""
        return [payload.decode() for payload in exchange_bytes(text.encode(), self.group, self._device)]

    def gather_texts(self, text: str) -> list[str]:
        """Gather every rank's text on rank 0; the others get an empty list. Every rank must call this."""
        return [payload.decode() for payload in gather_bytes(text.encode(), self.group, self._device)]

    def scatter_texts(self, texts: list[str]) -> str:
        """Scatter rank 0's texts, one per rank; return this rank's. Every rank must call this."""
        return scatter_bytes([text.encode() for text in texts], self.group, self._device).decode()


def consensus_of(model: nn.Module, words: ErrorTexts) -> Consensus:
    """Return the consensus of a model's ranks; see :func:`group_of`."""
    return Consensus(group_of(model), words, units_of(model)[0].options.device)
