"""Has autograd refuse what it saved of gathered parameters while their memory is freed, or is being gathered into."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_flat.flat._torch import set_versions

__all__ = ["EXPIRED", "Expiry"]

EXPIRED = 10**9
"""What a version that autograd reports is above while a parameter is sharded; README's limits name the number."""


class Expiry:
    """Marks the unsharded parameters of one buffer as changed while the buffer does not hold their values.

    A backward gathers a unit when it comes to one of the outputs that were found. Autograd may come earlier to a
    tensor that a module put elsewhere, whose graph uses the parameters too: it would read memory that is freed, or that
    an all-gather is still writing to. Autograd compares versions whenever it takes a saved tensor out and raises where
    they differ, so a version of its own for the time in between costs nothing where it is used.

    Args:
        leaves: the parameters that modules see; each has a version counter of its own.
    """

    __slots__ = ("_leaves", "_versions")

    def __init__(self, unsharded_params: Sequence[torch.Tensor]) -> None:
        self._leaves = tuple(unsharded_params)
        self._versions: tuple[int, ...] | None = None

    def expire(self) -> None:
        """What was saved of the leaves is of no use from now on."""
        if self._versions is None and self._leaves:
            self._versions = tuple([unsharded_param._version for unsharded_param in self._leaves])
            set_versions(self._leaves, tuple([version + EXPIRED for version in self._versions]))

    def renew(self) -> None:
        """The leaves have their values again."""
        if self._versions is not None:
            set_versions(self._leaves, self._versions)
            self._versions = None
