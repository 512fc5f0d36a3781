"""Finds tensors that modules store in forward, through which a backward may reach their unit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_flat.core.containers import differentiable_tensors, tensors_in


class StoredTensors:
    """Finds differentiable tensors among the attributes of a unit's modules: an auxiliary loss, a cache.

    A loss may use such tensors, and a backward then reaches the unit through them before it reaches an output.
    All attributes are searched after the first forward, and after one in which modules got further attributes. After
    other forwards only those are that held a tensor then, or nothing: None, zero, or an empty container.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._attributes = [module.__dict__ for module in modules]
        self._num_attributes = 0
        # Attributes that may hold such a tensor, as those of a module and a name.
        self._places: list[tuple[dict[str, Any], str]] = []

    def find(self) -> list[torch.Tensor]:
        """Return the tensors with autograd history that are stored now."""
        num_attributes = sum(map(len, self._attributes))
        if num_attributes != self._num_attributes:
            self._num_attributes = num_attributes
            self._places = [
                (attributes, name)
                for attributes in self._attributes
                for name, value in attributes.items()
                if name not in _MODULE_STATE and _may_hold_tensors(value)
            ]
        if not self._places:
            return []
        values = [held.get(name) for held, name in self._places]
        return [tensor for tensor in differentiable_tensors(values) if not tensor.is_leaf]


def _may_hold_tensors(value: Any) -> bool:
    is_empty = isinstance(value, (int, float, Mapping, list, set, deque)) and not value and value is not False
    # Parameters of a unit with use_orig_params=False are attributes too.
    return value is None or is_empty or any(not isinstance(tensor, nn.Parameter) for tensor in tensors_in(value))


_MODULE_STATE = frozenset(nn.Module().__dict__)
