"""What the ranks of a model do in step around files: an exception on one becomes one on all."""

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
from fsdp_flat.state_dict import rank_groups_of

__all__ = ["LOADING", "SAVING", "Consensus", "consensus_of"]

SAVING = ErrorTexts(
    "saving", "Ranks save different things.", "Call it with the same model and arguments on every rank."
)
LOADING = ErrorTexts(
    "loading", "Ranks load different things.", "Call it with the same model and arguments on every rank."
)


def group_of(model: nn.Module) -> dist.ProcessGroup:
    """The group of all ranks that hold a part or a replica of the model.

    Raises:
        OptionError: it holds no wrapper.
        UnsupportedError: several groups (hybrid strategies, tensor parallelism) over some of the ranks.
        UsageError: the group was destroyed.
    """
    units = units_of(model)
    if not units:
        raise OptionError(f"{type(model).__name__} holds no FullyShardedDataParallel.")
    adapters = [entry.adapter for unit in units for handle in unit.handles for entry in handle.views.params]
    groups = [rank_group.group for rank_group in rank_groups_of(units) if rank_group.group is not None]
    groups += [group for adapter in adapters for group in adapter.mesh_groups if dist.get_world_size(group) > 1]
    # There may be several groups of the same ranks; every rank has to take the same one.
    rank_groups: dict[frozenset[int], dist.ProcessGroup] = {}
    for group in groups:
        rank_groups.setdefault(frozenset(global_ranks(group)), group)
    joint = next(iter(rank_groups.values()), units[0].options.groups.process_group)
    everybody = frozenset().union(*rank_groups)
    if everybody in rank_groups:
        joint = rank_groups[everybody]
    elif len(rank_groups) > 1:
        # Axes of a grid cross in this rank alone, and it has a rank for every combination.
        joint, num_ranks = dist.group.WORLD, math.prod(map(len, rank_groups))
        if num_ranks != dist.get_world_size():
            raise UnsupportedError(
                f"The model is on {num_ranks} of {dist.get_world_size()} ranks, along {len(rank_groups)} groups (sharded, "
                "replicated, tensor parallel), and no process group joins just these. Save it by state_dict() and "
                "torch.distributed.checkpoint."
            )
    assert joint is not None
    return joint


class Consensus:
    """The ranks of a group.

    Args:
        group: the group.
        words: how errors call what the ranks do.
        device: the device of compute, for groups that know no other.

    Attributes:
        rank: this rank in the group.
        size: the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, words: ErrorTexts, device: torch.device) -> None:
        self.group = group
        self._words = words
        self._device = device
        self._axis = RankGroup.of(group)
        self.rank, self.size = self._axis.rank, self._axis.size

    def barrier(self, what: str) -> None:
        """Wait for the other ranks; a call on one rank only is found here, within seconds."""
        barrier(what, self._axis)

    @contextmanager
    def raising_together(self, same: Sequence[str] = ()) -> Iterator[None]:
        """Every rank must enter the block; if it raises on one, or ``same`` is not the same, it raises on all."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.fail(error, same)

    def fail(self, error: Exception | None, same: Sequence[str] = ()) -> None:
        """Raise on every rank if any rank has an error or other lines. Every rank must call this."""
        if error is not None and self.size == 1:
            raise error
        agree(same, error, [self._axis], self._device, self._words)

    def texts(self, text: str) -> list[str]:
        """Every rank's text, by rank. Every rank must call this."""
        return [payload.decode() for payload in exchange_bytes(text.encode(), self.group, self._device)]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text on rank 0, nothing on the others. Every rank must call this."""
        return [payload.decode() for payload in gather_bytes(text.encode(), self.group, self._device)]

    def scatter_texts(self, texts: list[str]) -> str:
        """This rank's text, of those that rank 0 has for all. Every rank must call this."""
        return scatter_bytes([text.encode() for text in texts], self.group, self._device).decode()


def consensus_of(model: nn.Module, words: ErrorTexts) -> Consensus:
    """The ranks of a model; see :func:`group_of`."""
    return Consensus(group_of(model), words, units_of(model)[0].options.device)
