"""Implements collectives on flat 1-D tensors. Every call begins asynchronous work and returns a :class:`Pending`.

Every rank of the group must make the same calls in the same order. ``collectives_for`` (``routes``) selects one of:

* CPU tensors of ranks on one host, in a gloo group: shared memory, from which each rank reads the slices it needs.
* CPU tensors of ranks on several hosts: shared memory within each, and one exchange by gloo between them (``shm``).
* gloo on other CPU tensors: an all-gather is one broadcast per rank, each directly into its slice; a reduce-scatter is
  an all-to-all of slices followed by a local sum. gloo's all_gather allocates and copies a second full buffer, and its
  reduce_scatter clones its input and all-reduces it, so it moves twice the bytes.
* gloo on accelerator tensors, for tests: broadcasts, and an all-reduce of which a slice is kept.
* everything else (NCCL, fake groups): the backend's all_gather and reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm import torch_comm
from fsdp_flat.comm.calls import calls_of, unit_names
from fsdp_flat.comm.custom import AllGather, Allocate, ReduceScatter
from fsdp_flat.comm.failures import NamedWork, WatchedWork, named
from fsdp_flat.comm.given_up import Pending
from fsdp_flat.comm.rank_groups import RankGroup, global_ranks
from fsdp_flat.comm.streams import unrecorded

Finish = Callable[[], object]


class PlacesRows(Protocol):
    """Describes a receiver of the rows of an all-gather, each the input of one rank: ``GatherTarget`` of ``core``."""

    # Of the rows, to which the input is converted; None if it has it.
    dtype: torch.dtype | None

    def place(self, first: int, rows: torch.Tensor) -> object: ...

    # The function is called once, when all rows are there, and may free the memory.
    def stage(self, own: torch.Tensor, rank: int, num_ranks: int) -> tuple[torch.Tensor, Finish]: ...


class ReusesMemory(Protocol):
    """Describes a source of temporary memory: ``MemoryPool`` of ``core``."""

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def empty(self, storage: torch.UntypedStorage) -> None: ...


class Collectives:
    """Runs the collectives of one shard group of more than one rank on flat tensors: here, those of its backend.

    Errors name the unit by its id ``unit`` and ``name``. The host waits for no collective of an accelerator's backend,
    such as NCCL. It waits for the end of a backward, and by the calls that ranks have noted finds out there if they
    wait in different ones.

    Attributes:
        can_average: :meth:`begin_average` runs the same collective as :meth:`begin_reduce_scatter`.
    """

    can_average = True

    def __init__(self, rank_group: RankGroup, unit: int = 0, name: str = "") -> None:
        self._unit, self._name = unit, name
        self.rank_group, self.group = rank_group, rank_group.process_group
        self.rank, self.size = rank_group.rank, rank_group.size
        self._calls = calls_of(self.group)

    def begin_all_gather(self, tensor: torch.Tensor, target: PlacesRows | None = None) -> Pending:
        """Begin to all-gather ``tensor`` (1-D), the result: a row of ``target``, or else the whole.

        The whole, of which numel is a multiple of the group size, contains this rank's slice. A row is copied, so ranks
        get its values whatever a caller writes to it meanwhile; the result then is the memory that was copied from.
        """
        whole, place_all = self._stage(tensor, target)

        def finish() -> torch.Tensor:
            with unrecorded():
                place_all()
            return tensor if target is None else whole

        return Pending(self._gather_into(whole), tensor, finish)

    def begin_reduce_scatter(self, full: torch.Tensor, pool: ReusesMemory | None = None) -> Pending:
        """Begin to sum ``full`` (1-D, numel a multiple of the group size) over the group.

        The result is this rank's slice, in separate memory. ``full``, which may be overwritten, must be kept until it
        is there; temporary memory comes from the ``pool``.
        """
        return self._reduce_scatter(full, dist.ReduceOp.SUM)

    def begin_average(self, full: torch.Tensor) -> Pending:
        """Begin a reduce-scatter whose result the backend divides by the number of ranks."""
        return self._reduce_scatter(full, dist.ReduceOp.AVG)

    def _reduce_scatter(self, full: torch.Tensor, op: Any) -> Pending:
        out = full.new_empty(full.numel() // self.size)
        self._calls.add("the reduce-scatter", self._unit)
        return Pending(
            [self._begun("reduce-scatter", partial(torch_comm.reduce_scatter_single, op=op), out, full)], out
        )

    def _stage(self, tensor: torch.Tensor, target: PlacesRows | None) -> tuple[torch.Tensor, Finish]:
        """Return memory for the slices of all ranks, with this rank's, and a function that places them from there."""
        if target is None:
            return tensor, lambda: None
        return target.stage(tensor, self.rank, self.size)

    def _gather_into(self, whole: torch.Tensor) -> Sequence[Any]:
        """Begin to all-gather ``whole``, which contains this rank's slice, and return the works."""
        self._calls.add("the all-gather", self._unit)
        return [self._begun("all-gather", torch_comm.all_gather_single, whole, self._own_slice(whole))]

    def _begun(self, operation: str, begin: Callable[..., Any], *tensors: torch.Tensor) -> NamedWork:
        # Not in the constructor: over shared memory, an error calls a unit that this rank has never run another unit.
        unit_names(self.group).setdefault(self._unit, self._name)
        try:
            work = begin(*tensors, group=self.group, async_op=True)
        except dist.DistError as error:
            raise named(error, self._describe(operation), self.rank_group) from error
        return NamedWork(work, self.rank_group, partial(self._describe, operation))

    def _describe(self, operation: str) -> str:
        return f"the {operation} of unit {unit_names(self.group).get(self._unit, self._name)!r}"

    def _own_slice(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of ``whole``, without views of the slices of thousands of other ranks."""
        numel = whole.numel() // self.size
        return whole[self.rank * numel : (self.rank + 1) * numel]


class GlooCollectives(Collectives):
    """Uses gloo for CPU tensors."""

    def __init__(self, rank_group: RankGroup, unit: int = 0, name: str = "") -> None:
        super().__init__(rank_group, unit, name)
        self._others = rank_group.others

    def _gather_into(self, whole: torch.Tensor) -> Sequence[Any]:
        works = []
        for rank, (source, part) in enumerate(zip(global_ranks(self.group), whole.chunk(self.size), strict=True)):
            work = dist.broadcast(part, src=source, group=self.group, async_op=True)
            works.append(self._watched(work, "all-gather", self._others if rank == self.rank else [rank]))
        return works

    def begin_reduce_scatter(self, full: torch.Tensor, pool: ReusesMemory | None = None) -> Pending:
        slices = full.chunk(self.size)
        own = slices[self.rank]
        if self.size == 2:
            # Each rank sends one half and adds its other half to the one that it receives.
            half = torch.empty_like(own)
            splits = [0, own.numel()] if self.rank == 0 else [own.numel(), 0]
            sent = slices[1 - self.rank]
            work = dist.all_to_all_single(half, sent, splits, splits, group=self.group, async_op=True)
            return Pending([self._watched(work, "reduce-scatter", self._others)], full, lambda: half.add_(own))
        received = torch.empty_like(full) if pool is None else pool.empty_like(full)
        work = dist.all_to_all_single(received, full, group=self.group, async_op=True)

        def finish() -> torch.Tensor:
            total = sum_in_order(received.chunk(self.size))
            if pool is not None:
                pool.empty(received.untyped_storage())
            return total

        return Pending([self._watched(work, "reduce-scatter", self._others)], full, finish)

    def _watched(self, work: Any, operation: str, sources: Sequence[int]) -> Any:
        return WatchedWork(work, self.rank_group, self._describe(operation), sources)


class GlooAcceleratorCollectives(GlooCollectives):
    """Uses gloo on accelerator tensors, for tests of several ranks on one device."""

    def begin_reduce_scatter(self, full: torch.Tensor, pool: ReusesMemory | None = None) -> Pending:
        work = dist.all_reduce(full, group=self.group, async_op=True)
        return Pending([work], full, lambda: self._own_slice(full).clone())

    def _watched(self, work: Any, operation: str, sources: Sequence[int]) -> Any:
        return work


@dataclass(frozen=True, slots=True)
class CollectiveOverrides:
    """Holds the parts of a unit's collectives that a caller has replaced.

    Attributes:
        gather_memory: allocates the outputs of all-gathers; None is ordinary memory.
        reduce_memory: allocates the inputs and outputs of reduce-scatters; None is ordinary memory.
        reduce_group: group of the shard group's ranks for reduce-scatters; None uses the shard group.
        backend: the library's are the backend's all_gather and reduce_scatter, also where others are cheaper.
        gathered_between_hosts, reduced_between_hosts: dtype, a key of ``PACKINGS``, of the rows that all-gathers and
            reduce-scatters send from one host to another; None sends them as they are.
    """

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    gather_memory: Allocate | None = None
    reduce_memory: Allocate | None = None
    reduce_group: RankGroup | None = None
    backend: bool = False
    gathered_between_hosts: torch.dtype | None = None
    reduced_between_hosts: torch.dtype | None = None

    @property
    def gather_buffers(self) -> Allocate | None:
        """Allocator of unsharded buffers, if the backend's all-gather fills them in place; a caller's copies."""
        return self.gather_memory if self.all_gather is None and torch_comm.MOVES_MEMORY else None

    @property
    def reduce_buffers(self) -> Allocate | None:
        """Allocator of flat gradients, if the backend's reduce-scatter reads them in place; a caller's copies them."""
        return self.reduce_memory if self.reduce_scatter is None and torch_comm.MOVES_MEMORY else None

    @property
    def of_library(self) -> CollectiveOverrides:
        """The parts that the library's own collectives follow."""
        return CollectiveOverrides(
            backend=self.backend,
            gathered_between_hosts=self.gathered_between_hosts,
            reduced_between_hosts=self.reduced_between_hosts,
        )


class CustomCollectives(Collectives):
    """Replaces parts of the library's collectives, of which reduce-scatters may have another group, by a caller's.

    With memory and no collective, the backend's is called in that memory: the unit's buffers, if these can take it.
    """

    def __init__(self, own: Collectives, own_reductions: Collectives, choice: CollectiveOverrides) -> None:
        super().__init__(own.rank_group)
        self._own = own
        self._own_reductions = own_reductions
        self._choice = choice
        self.can_average = choice.reduce_scatter is None and choice.reduce_memory is None

    def begin_average(self, full: torch.Tensor) -> Pending:
        return self._own_reductions.begin_average(full)

    def begin_all_gather(self, tensor: torch.Tensor, target: PlacesRows | None = None) -> Pending:
        in_place = target is None and self._choice.gather_buffers is not None
        is_replaced = self._choice.all_gather is not None or (self._choice.gather_memory is not None and not in_place)
        # Quantized all-gathers are for floats; integer parameters use the library's all-gather.
        if is_replaced and tensor.is_floating_point():
            self._calls.add("a custom all-gather")
            return super().begin_all_gather(tensor, target)
        return self._own.begin_all_gather(tensor, target)

    def _stage(self, tensor: torch.Tensor, target: PlacesRows | None) -> tuple[torch.Tensor, Finish]:
        memory = self._choice.gather_memory
        if memory is None:
            return super()._stage(tensor, target)
        own = self._own_slice(tensor) if target is None else tensor
        dtype = own.dtype if target is None else target.dtype or own.dtype
        whole = memory((self.size * own.numel(),), dtype=dtype, device=own.device)
        self._own_slice(whole).copy_(own)
        if target is None:
            return whole, partial(tensor.copy_, whole)
        return whole, partial(target.place, 0, whole.view(self.size, -1))

    def _gather_into(self, whole: torch.Tensor) -> Sequence[Any]:
        all_gather = self._choice.all_gather or torch_comm.all_gather_single
        return [
            _named_work(all_gather(whole, self._own_slice(whole), self.group, async_op=True), self._own, "all-gather")
        ]

    def begin_reduce_scatter(self, full: torch.Tensor, pool: ReusesMemory | None = None) -> Pending:
        reduce_scatter, memory = self._choice.reduce_scatter, self._choice.reduce_memory
        if reduce_scatter is None and memory is None:
            return self._own_reductions.begin_reduce_scatter(full, pool)
        group = self._own_reductions.group
        calls_of(group).add("a custom reduce-scatter")
        if memory is not None and self._choice.reduce_buffers is None:
            full = memory((full.numel(),), dtype=full.dtype, device=full.device).copy_(full)
        out = (memory or torch.empty)((full.numel() // self.size,), dtype=full.dtype, device=full.device)
        if reduce_scatter is None:
            work = torch_comm.reduce_scatter_single(out, full, group=group, async_op=True)
        else:
            work = reduce_scatter(out, full, group, dist.ReduceOp.SUM, async_op=True)
        work = _named_work(work, self._own_reductions, "reduce-scatter")
        # The result becomes a gradient, which outlives memory of the caller.
        return Pending([work], full, lambda: out if memory is None else out.clone())


def _named_work(work: Any, collectives: Collectives, operation: str) -> Any:
    """Return the work of a caller's collective, whose errors name the unit of the library's own ``collectives``."""
    if work is None:
        return None
    describe, is_gloo = partial(collectives._describe, operation), isinstance(collectives, GlooCollectives)
    return NamedWork(work, collectives.rank_group, describe, blocks_host=is_gloo)


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum one or more tensors in the order of ranks, and 16-bit floats in fp32.

    So the result does not depend on timing, and does not lose precision with more ranks.
    """
    if len(parts) == 2:
        return torch.add(*parts)
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(dtype)
