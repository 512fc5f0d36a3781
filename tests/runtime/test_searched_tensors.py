"""The search for tensors in the outputs of a unit: it finds all, and does not wander through the program."""

from __future__ import annotations

import logging
from typing import Any

import torch

from fsdp_flat.runtime import tensors
from fsdp_flat.runtime.tensors import differentiable_tensors


class Result:
    """An output class of a caller's own."""


def test_imported_modules_and_loggers_in_an_output_are_not_searched(monkeypatch: Any) -> None:
    searched: list[Any] = []
    children = tensors._children

    def noted(value: Any) -> Any:
        searched.append(value)
        return children(value)

    monkeypatch.setattr(tensors, "_children", noted)
    result = Result()
    result.loss = torch.ones(1, requires_grad=True) * 2
    result.backend, result.log = torch, logging.getLogger("a")
    assert differentiable_tensors(result) == [result.loss]
    assert searched == [result]


def test_an_iterator_over_a_dict_that_has_changed_since_is_left_alone() -> None:
    loss = torch.ones(1, requires_grad=True) * 2
    outputs = {"a": loss}
    items = iter(outputs.items())
    outputs["b"] = loss
    assert differentiable_tensors([items, loss]) == [loss]


def test_tensors_are_found_in_order_among_many_numbers() -> None:
    first, second = torch.ones(1, requires_grad=True) * 2, torch.ones(1, requires_grad=True) * 3
    found = differentiable_tensors([1, first, *range(1000), {"x": second, "n": 1.0}, "text"])
    assert [id(tensor) for tensor in found] == [id(first), id(second)]
