"""Finds the ranks that hold a model, and makes them act together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.comm import (
    ErrorTexts,
    RankGroup,
    UntilRanksMeet,
    agree,
    barrier,
    decoded,
    digest_of,
    encoded,
    enter,
    exchange_bytes,
    exchange_ints,
    find_disagreement,
    global_ranks,
)
from fsdp_flat.core import Unit, no_units, units_of
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.state import rank_groups_of

_ADVICE = "Call it with the same model and arguments on every rank."
SAVING = ErrorTexts("saving", "Ranks save different things.", _ADVICE)
LOADING = ErrorTexts("loading", "Ranks load different things.", _ADVICE)


def _group_of(model: nn.Module) -> dist.ProcessGroup:
    """Return the process group of all ranks that hold a shard or a replica of the model."""
    units = units_of(model)
    if not units:
        raise no_units(model)
    groups = [rank_group.group for rank_group in rank_groups_of(units)]
    meshes: list[Any] = []
    for unit in units:
        if unit.options.strategy.is_hybrid:
            meshes.append(unit.options.groups.mesh)
        for param_group in unit.param_groups:
            for entry in param_group.params:
                groups += entry.adapter.mesh_groups
                if isinstance(entry.param, DTensor):
                    meshes.append(entry.param.device_mesh)
    # There may be several groups of the same ranks; every rank must choose the same one.
    by_ranks: dict[frozenset[int], dist.ProcessGroup] = {}
    for group in groups:
        if group is not None and dist.get_world_size(group) > 1:
            by_ranks.setdefault(frozenset(global_ranks(group)), group)
    joined = set(by_ranks)
    for mesh in meshes:
        if mesh is not None and mesh.size() > 1:
            joined.add(frozenset(mesh.mesh.flatten().tolist()))
    # Meshes of other parameters, experts among them, divide the same ranks in other ways.
    largest = list(joined)
    if len(joined) > 1:
        largest = [ranks for ranks in joined if not any(ranks < others for others in joined)]
    joint = by_ranks.get(largest[0]) if len(largest) == 1 else None
    if not largest:
        joint = units[0].options.groups.process_group
    elif joint is None:
        # The sets are mesh dims: they intersect in this rank only, and the mesh size is the product of their sizes.
        joint, num_ranks = dist.group.WORLD, math.prod(map(len, largest))
        overlaps = any(len(a & b) > 1 for a, b in combinations(largest, 2))
        if overlaps or num_ranks != dist.get_world_size():
            where = f"{num_ranks} of {dist.get_world_size()} ranks, along {len(by_ranks)} groups"
            if overlaps:
                where = f"groups that overlap, of the ranks {' and '.join(map(str, sorted(map(sorted, largest))))}"
            raise UnsupportedError(
                f"The model is on {where} (sharded, replicated, tensor parallel), and no process group joins just "
                "these. Save it by state_dict() and torch.distributed.checkpoint."
            )
    assert joint is not None
    return joint


def compare_names(given: Sequence[tuple[Unit, str, str]], units: Sequence[Unit]) -> None:
    """Raise on all ranks if some load a parameter from another name in their files. Every rank must call this.

    Ranks of other groups may do so: those with other experts. ``given`` has for each parameter its unit, its name, and
    the name in the files.
    """
    groups_of = {unit: set(rank_groups_of([unit])) for unit in units}

    def lines_of(rank_group: RankGroup) -> list[str]:
        return [f"{name!r} from {stored!r}" for unit, name, stored in given if rank_group in groups_of[unit]]

    agree(lines_of, None, rank_groups_of(units), LOADING)


class Consensus:
    """Exchanges errors and small values between the ranks of a group: an exception on one rank is raised on all.

    ``ranks`` are the global ranks.
    """

    def __init__(self, group: dist.ProcessGroup, words: ErrorTexts) -> None:
        self.ranks = global_ranks(group)
        self.group = group
        self._words = words
        self.rank_group = RankGroup.of(group)
        self.rank, self.size = self.rank_group.rank, self.rank_group.size

    @classmethod
    def of(cls, model: nn.Module, words: ErrorTexts) -> Consensus:
        """Return the consensus of all ranks that hold a shard or a replica of the model, which :meth:`meet` next."""
        found = cls(_group_of(model), words)
        enter(found.rank_group)
        return found

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Raise on every rank if the block raises on one. Every rank must enter the block."""
        block = UntilRanksMeet()
        with block:
            yield
        self.fail(block.error)

    def meet(
        self, what: str, values: Sequence[int], error: Exception | None, same: Sequence[str] = ()
    ) -> list[list[int]]:
        """Wait for the other ranks, and return the :meth:`integers` of all; nothing is sent if all have the same.

        Raises within seconds if a rank does not call this. Errors name ``what``, the caller's operation. A rank with an
        ``error`` may pass other ``values`` than it would have without.
        """
        are_alike = barrier(what, self.rank_group, json.dumps([values, same]), is_entered=True, error=error)
        if are_alike is None:
            self.integers([], error, same)
        return [list(values)] * self.size if are_alike else self.integers(values, None, same)

    def fail(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an error. Every rank must call this."""
        self.integers([], error)

    def integers(self, values: Sequence[int], error: Exception | None, same: Sequence[str] = ()) -> list[list[int]]:
        """All-gather 64-bit integers, as many on every rank, in one collective. Every rank must call this.

        Raises on every rank if one has an error, or if the lines ``same`` differ.
        """
        if error is not None and self.size == 1:
            raise error
        own = [int(error is None), len(same), digest_of(encoded("\n".join(same))), *values]
        rows = exchange_ints(own, self.rank_group, self._words.doing)
        flags, numbers, digests, *_ = zip(*rows, strict=True)
        if not all(flags):
            # A difference may be the cause of an error; a rank may have failed before it knew all of its lines.
            known, groups = same[: min(numbers)], [self.rank_group]
            if (difference := find_disagreement(known, None, groups, self._words)) is not None:
                raise difference from error
        if len({*digests}) > 1 or not all(flags):
            agree(same, error, [self.rank_group], self._words)
        return [row[3:] for row in rows]

    def texts(self, text: str, *, only_on_rank0: bool = False) -> list[str]:
        """All-gather every rank's text, by rank, or gather them on rank 0. Every rank must call this."""
        doing, sent = self._words.doing, encoded(text)
        payloads = exchange_bytes(sent, self.rank_group, doing, only_on_rank0=only_on_rank0)
        return list(map(decoded, payloads))
