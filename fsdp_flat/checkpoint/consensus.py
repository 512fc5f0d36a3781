"""Finds the ranks that hold a model and makes them fail together, for everything that is saved and loaded."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.api import ShardedStateDictConfig, StateDictType
from fsdp_flat.comm import (
    ALONE,
    ErrorTexts,
    RankGroup,
    agree,
    barrier,
    digest_of,
    exchange_bytes,
    exchange_ints,
    global_ranks,
)
from fsdp_flat.errors import OptionError, UnsupportedError, UsageError
from fsdp_flat.runtime import units_of
from fsdp_flat.state import BoxedTensor, IndexedParam, rank_groups_of, settings_for, state_dict_in

_ADVICE = "Call it with the same model and arguments on every rank."
SAVING = ErrorTexts("saving", "Ranks save different things.", _ADVICE)
LOADING = ErrorTexts("loading", "Ranks load different things.", _ADVICE)

ProgressBar = Callable[[int], AbstractContextManager[Callable[[int], object]]]


def progress_bar(label: str, *, asked: bool, here: bool) -> ProgressBar:
    """Return a function that shows a bar for a number of bytes: ``with show(num_bytes) as update: update(1024)``."""
    if asked:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise UsageError('progress=True needs tqdm: pip install "fsdp-flat[progress]".') from error

    @contextmanager
    def show(num_bytes: int) -> Iterator[Callable[[int], object]]:
        if asked and here:
            with tqdm(desc=label, total=num_bytes, unit="B", unit_scale=True) as bar:
                yield bar.update
        else:
            yield lambda nbytes: None

    return show


def boxed_state_dict(model: nn.Module, *, copy: bool = False) -> dict[str, Any]:
    """Return a model's state dict with the shards of this rank as boxes, or copies of all tensors on the CPU."""
    config = ShardedStateDictConfig(boxes=True, offload_to_cpu=copy)
    found = state_dict_in(model, settings_for(StateDictType.SHARDED_STATE_DICT, config, None))
    for name, value in found.items() if copy else ():
        # Boxes are copies already; buffers are the live ones.
        if isinstance(value, torch.Tensor) and not isinstance(value, BoxedTensor):
            found[name] = value.detach().to("cpu", copy=True)
    return found


def serialized(value: Any) -> bytes:
    """Serialize ``value`` by ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value that :func:`serialized` has serialized."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _group_of(model: nn.Module) -> dist.ProcessGroup:
    """Return the process group of all ranks that hold a shard or a replica of the model."""
    units = units_of(model)
    if not units:
        raise OptionError(f"{type(model).__name__} holds no FullyShardedDataParallel.")
    params = [entry for unit in units for handle in unit.handles for entry in handle.views.params]
    groups = [rank_group.group for rank_group in rank_groups_of(units) if rank_group.group is not None]
    groups += [group for entry in params for group in entry.adapter.mesh_groups if dist.get_world_size(group) > 1]
    # There may be several groups of the same ranks; every rank must choose the same one.
    by_ranks: dict[frozenset[int], dist.ProcessGroup] = {}
    for group in groups:
        by_ranks.setdefault(frozenset(global_ranks(group)), group)
    meshes = [unit.options.groups.mesh for unit in units if unit.options.strategy.is_hybrid]
    meshes += [entry.param.device_mesh for entry in params if isinstance(entry.param, DTensor)]
    joined = {frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes if mesh is not None and mesh.size() > 1}
    joined.update(by_ranks)
    # Meshes of other parameters, experts among them, divide the same ranks in other ways.
    largest = [ranks for ranks in joined if not any(ranks < others for others in joined)]
    joint = next(iter(by_ranks.values()), units[0].options.groups.process_group)
    if len(largest) == 1 and largest[0] in by_ranks:
        joint = by_ranks[largest[0]]
    elif largest:
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


def shard_group_of(params: Iterable[IndexedParam]) -> RankGroup:
    """Return the one shard group of parameters; a group of one rank if none is sharded."""
    sharded = [rank_group for rank_group in {param.rank_group for param in params} if rank_group.size > 1]
    if len(sharded) > 1:
        raise UnsupportedError(
            "The units of this model are sharded over different process groups, so no rank could receive all of it. "
            "Stream the parts one by one, or use SHARDED_STATE_DICT."
        )
    return sharded[0] if sharded else ALONE


def is_replica(model: nn.Module) -> bool:
    """Return whether this rank is a replica of a rank that writes."""
    groups = [unit.options.groups for unit in units_of(model)]
    sharded = [each for each in groups if each.shard.size > 1]
    adapters = [entry.adapter for unit in units_of(model) for handle in unit.handles for entry in handle.views.params]
    return (sharded or groups)[0].replicate.rank != 0 or not all(adapter.is_first_of_mesh for adapter in adapters)


class Consensus:
    """Exchanges errors and small values between the ranks of a group: an exception on one rank is raised on all.

    ``device`` is used for groups without a CPU backend; ``ranks`` are the global ranks.
    """

    def __init__(self, group: dist.ProcessGroup, words: ErrorTexts, device: torch.device) -> None:
        self.ranks = global_ranks(group)
        self._group = group
        self._words = words
        self._device = device
        self._rank_group = RankGroup.of(group)
        self.rank, self.size = self._rank_group.rank, self._rank_group.size

    @classmethod
    def of(cls, model: nn.Module, words: ErrorTexts) -> Consensus:
        """Return the consensus of all ranks that hold a shard or a replica of the model."""
        return cls(_group_of(model), words, units_of(model)[0].options.device)

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

        Raises on every rank if one has an error, or if the lines ``same`` differ.
        """
        if error is not None and self.size == 1:
            raise error
        own = [int(error is None), digest_of("\n".join(same).encode()), *values]
        rows = exchange_ints(own, self._group, self._device)
        differ = len({digest for _, digest, *_ in rows}) > 1
        if differ or not all(ok for ok, *_ in rows):
            # A difference may be the cause of an error.
            agree(same, None if differ else error, [self._rank_group], self._device, self._words)
        return [row[2:] for row in rows]

    def texts(self, text: str, *, only_on_rank0: bool = False) -> list[str]:
        """All-gather every rank's text, by rank, or gather them on rank 0. Every rank must call this."""
        payloads = exchange_bytes(text.encode(), self._group, self._device, only_on_rank0=only_on_rank0)
        return [payload.decode() for payload in payloads]
