"""Collectives on flat 1-D tensors. Every call begins work and returns a :class:`Pending`.

Every rank of the group must make the same calls in the same order. What a gather or a reduction is made of is chosen
in ``routes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_flat.comm.groups import Axis

__all__ = [
    "Collectives",
    "EmptyLike",
    "Pending",
    "begin_all_reduce",
    "is_simulated",
    "moves_by_gloo",
    "own_slice",
]


class Pending:
    """Work that was begun. ``wait`` may be called more than once; only the first call does something.

    Args:
        works: what is under way; None for work that is over.
        result: what the work gives.
        finish: makes the result of it, once the work is over.
        scratch: tensors that serve the work alone.
        alive: tensors to keep until the work is over.

    Attributes:
        result: what the work gives, valid after ``wait``.
        scratch: tensors that served the work alone and whose memory is free after ``wait``.
    """

    __slots__ = ("_alive", "_finish", "_works", "result", "scratch")

    def __init__(
        self,
        works: Iterable[Any],
        result: torch.Tensor,
        finish: Callable[[], torch.Tensor] | None = None,
        scratch: tuple[torch.Tensor, ...] = (),
        alive: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self._works: tuple[Any, ...] | None = tuple(works)
        self._finish = finish
        self._alive = alive
        self.result = result
        self.scratch = scratch

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._works is None or all(work is None or work.is_completed() for work in self._works)

    def wait(self) -> torch.Tensor:
        """Block until the result is there (on an accelerator: until the current stream may use it)."""
        if self._works is not None:
            works, self._works = self._works, None
            for work in works:
                if work is not None:
                    work.wait()
            if self._finish is not None:
                self.result = self._finish()
                self._finish = None
            self._alive = ()
        return self.result


EmptyLike = Callable[[torch.Tensor], torch.Tensor]


class Collectives(Protocol):
    """How one shard axis gathers and reduces flat tensors."""

    def name_units(self, names: dict[int, str]) -> None:
        """Takes the names of units by id, for errors."""
        ...

    def begin_all_gather(self, full: torch.Tensor) -> Pending:
        """Fill ``full`` (1-D, numel a multiple of the axis size) from every rank's slice; the own one is in place."""
        ...

    def begin_reduce_scatter(self, full: torch.Tensor, empty_like: EmptyLike = torch.empty_like) -> Pending:
        """Sum ``full`` over the axis; the result is this rank's slice, a tensor of its own. ``full`` is used up.

        Args:
            full: 1-D, its numel a multiple of the axis size.
            empty_like: gives memory for what the pending result names as scratch.
        """
        ...


def own_slice(full: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's slice of ``full``, without making those of thousands of others."""
    numel = full.numel() // axis.size
    return full.narrow(0, axis.rank * numel, numel)


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` only pretends to communicate (torch's "fake" backend), so that nothing can be compared."""
    return dist.get_backend(group) == "fake"


def moves_by_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo is what moves tensors of ``device`` in ``group``."""
    if is_simulated(group):
        return False
    try:
        return group._get_backend(device).name() == "gloo"
    except RuntimeError:
        return False


def begin_all_reduce(tensor: torch.Tensor, axis: Axis, *, largest: bool = False) -> Pending:
    """Sum ``tensor`` over ``axis`` in place, or with ``largest`` take the maximum."""
    if axis.size == 1:
        return Pending((), tensor)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    return Pending([dist.all_reduce(tensor, op=op, group=axis.group, async_op=True)], tensor)
