"""Places the output of an all-gather in unsharded buffers, where the all-gather cannot write to them in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fsdp_flat.comm import is_accelerator


class GatherTarget:
    """Places the output of an all-gather where it belongs; a row of the output (2-D) is the input of one rank.

    Attributes:
        dtype: dtype of rows, to which the copy of this rank's input converts; None if the input has it.
    """

    dtype: torch.dtype | None = None

    def place(self, first: int, rows: torch.Tensor) -> None:
        """Copy ``rows`` (2-D), of rank ``first`` and the ranks after it, to their places."""
        raise NotImplementedError

    def stage(self, own: torch.Tensor, rank: int, num_ranks: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Allocate memory for the rows of all ranks, and copy ``own`` (1-D), the row of ``rank``, to it.

        Returns:
            The memory (1-D, in rank order); and a function to be called once, when all rows are there: it places
            them, and may free the memory.
        """
        full = own.new_empty(num_ranks * own.numel(), dtype=self.dtype)
        rows = full.view(num_ranks, -1)
        rows[rank].copy_(own)
        return full, partial(self.place, 0, rows)


class _Staging(NamedTuple):
    """Holds memory for the rows of all ranks, which is freed between all-gathers, and views of the memory."""

    full: torch.Tensor
    storage: torch.UntypedStorage
    nbytes: int
    own: torch.Tensor
    sources: list[torch.Tensor]


class PerParamTarget(GatherTarget):
    """Places rows that are the parts of several tensors, one part of each: where these tensors are, by rank.

    Views are made once: each costs as much host time as a copy of a small parameter. On accelerators one operation
    copies all parts, if all are contiguous; ``_foreach_copy_`` launches a slow kernel for each there, since the rows of
    a parameter are strided.

    Args:
        chunks: each tensor that is filled, as a view ``(num_ranks, *shape of a part)``.
        dims: for each of them the dim of the tensor along which the parts follow each other.

    Attributes:
        is_fused: one operation copies all parts.
        sizes: numbers of elements of the parts.
    """

    def __init__(
        self, chunks: Sequence[torch.Tensor], dims: Sequence[int], *, on_accelerator: bool | None = None
    ) -> None:
        self.sizes = [each[0].numel() for each in chunks]
        # Parts along dim 0 are contiguous, so they are copied as rows.
        self._shapes = {index: chunks[index].shape[1:] for index, dim in enumerate(dims) if dim != 0}
        self._ranked = [each if index in self._shapes else each.flatten(1) for index, each in enumerate(chunks)]
        on_accelerator = is_accelerator(chunks[0].device) if on_accelerator is None else on_accelerator
        self._is_on_accelerator, self.is_fused = on_accelerator, on_accelerator and not self._shapes
        # On accelerators one kernel converts and copies; the CPU copies while other ranks read what is converted.
        self.dtype = chunks[0].dtype if on_accelerator else None
        self._targets: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._staging: _Staging | None = None
        self.row_numel = sum(self.sizes)

    def place(self, first: int, rows: torch.Tensor) -> None:
        key = first, first + rows.size(0)
        places = self._targets.get(key) or self.places(*key)
        if self.is_fused:
            torch.split_with_sizes_copy(rows, self.sizes, 1, out=places)
        else:
            torch._foreach_copy_(places, self._split(rows))

    def places(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return where the parts of ranks from ``start`` to ``stop`` are placed, a view of each tensor."""
        places = self._targets.setdefault((start, stop), [])
        if not places:
            places += [each[start:stop] for each in self._ranked]
        return places

    def rows_of(self, ranks: range) -> torch.Tensor:
        """Return a copy (1-D) of the rows of consecutive ranks, with the padding that is in the tensors."""
        rows = self._ranked[0].new_empty(len(ranks), self.row_numel)
        torch._foreach_copy_(self._split(rows), [each[ranks.start : ranks.stop] for each in self._ranked])
        return rows.view(-1)

    def _split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        sources = list(torch.split_with_sizes(rows, self.sizes, 1))
        if not self._shapes:
            return sources
        return [
            source.view(len(rows), *self._shapes[index]) if index in self._shapes else source
            for index, source in enumerate(sources)
        ]

    def stage(self, own: torch.Tensor, rank: int, num_ranks: int) -> tuple[torch.Tensor, Callable[[], None]]:
        if self._is_on_accelerator:
            return super().stage(own, rank, num_ranks)  # the caller holds the memory beyond the copies
        staging = self._staging
        # If memory was not freed, its all-gather failed and may still write to it.
        if staging is None or staging.storage.nbytes():
            full = own.new_empty(num_ranks * own.numel())
            rows, storage = full.view(num_ranks, -1), full.untyped_storage()
            staging = self._staging = _Staging(full, storage, storage.nbytes(), rows[rank], self._split(rows))
        else:
            staging.storage.resize_(staging.nbytes)
        staging.own.copy_(own)
        return staging.full, self._place_staged

    def drop_staging(self) -> None:
        """Drop the memory of an all-gather that failed."""
        self._staging = None

    def _place_staged(self) -> None:
        assert self._staging is not None
        torch._foreach_copy_(self._ranked, self._staging.sources)
        self._staging.storage.resize_(0)


class GroupedTarget(GatherTarget):
    """Places rows of ``num_ranks`` shards each, of consecutive ranks, by the ``target`` of single shards."""

    def __init__(self, target: GatherTarget, num_ranks: int) -> None:
        self._target, self._num_ranks = target, num_ranks

    def place(self, first: int, rows: torch.Tensor) -> None:
        self._target.place(first * self._num_ranks, rows.reshape(len(rows) * self._num_ranks, -1))


class _JoinedTarget(GatherTarget):
    """Splits the output of a joined all-gather into the parts of several targets, which place them."""

    def __init__(self, inputs: Sequence[tuple[torch.Tensor, GatherTarget]]) -> None:
        self._targets = [target for _, target in inputs]
        self._sizes = [tensor.numel() for tensor, _ in inputs]

    def place(self, first: int, rows: torch.Tensor) -> None:
        fused = [target for target in self._targets if isinstance(target, PerParamTarget) and target.is_fused]
        if len(fused) == len(self._targets):
            places = [place for target in fused for place in target.places(first, first + len(rows))]
            torch.split_with_sizes_copy(rows, [size for target in fused for size in target.sizes], 1, out=places)
            return
        for target, part in zip(self._targets, rows.split(self._sizes, 1), strict=True):
            target.place(first, part)


def join_inputs(
    inputs: Sequence[tuple[torch.Tensor, GatherTarget | None]],
) -> list[tuple[torch.Tensor, GatherTarget | None]]:
    """Join inputs of all-gathers, with the targets of their outputs, into one input for each dtype.

    An input without a target, which is all-gathered in place, stays by itself.
    """
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, GatherTarget]]] = {}
    results: list[tuple[torch.Tensor, GatherTarget | None]] = []
    for tensor, target in inputs:
        if target is None:
            results.append((tensor, None))
        else:
            by_dtype.setdefault(target.dtype or tensor.dtype, []).append((tensor, target))
    for dtype, some in by_dtype.items():
        results.append(some[0] if len(some) == 1 else (_joined([each for each, _ in some], dtype), _JoinedTarget(some)))
    return results


def _joined(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if all(tensor.dtype == dtype for tensor in tensors):
        return torch.cat(tensors)
    row = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    torch._foreach_copy_(row.split([tensor.numel() for tensor in tensors]), tensors)
    return row
