"""Stands in for the copies between an accelerator and its host where both are the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class HostSwapOnCpu:
    """Copies at once; the accelerator's memory is ordinary memory, as that of the host.

    Attributes:
        num_to_host, num_to_device: tensors copied so far.
        noted: references to tensors whose memory is watched.
    """

    def __init__(self) -> None:
        self.num_to_host = self.num_to_device = 0
        self.noted: list[StorageWeakRef] = []

    def place_for(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)

    def begin_to_host(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> Any:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        self.num_to_host += len(tensors)
        return object()

    def begin_to_device(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        self.num_to_device += len(tensors)
        return [tensor.clone() for tensor in tensors], object()

    def wait(self, event: Any) -> None:
        assert event is not None

    def block(self, event: Any) -> None:
        assert event is not None

    def note(self, *tensors: torch.Tensor) -> None:
        """Watch the memory of tensors."""
        self.noted += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def noted_alive(self) -> list[bool]:
        """Return for each noted tensor whether its memory exists."""
        return [not reference.expired() for reference in self.noted]
