"""The search for tensors in the outputs of a unit: containers and registered classes, in order, and nothing else."""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from typing import Any

import torch
from torch.utils import _pytree

from fsdp_flat.core.containers import differentiable_tensors


class Result:
    """An output class of a caller's own."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    @property
    def broken(self) -> None:
        raise AssertionError("read")


class Registered(Result):
    """An output class that is registered with torch."""


_pytree.register_pytree_node(Registered, lambda result: ([result.loss], None), lambda given, _: Registered(*given))


@dataclasses.dataclass
class Losses:
    first: Any
    second: Any = None


def loss_of(value: float) -> torch.Tensor:
    return torch.full((1,), value, requires_grad=True) * 2


def test_tensors_are_found_in_every_documented_container() -> None:
    loss = loss_of(1.0)
    for value in (
        {"a": loss},
        UserDict(a=loss),
        [loss],
        ((loss,),),
        {loss},
        deque([loss]),
        Losses(None, {"x": loss}),
        Registered(loss),
        [Registered({"y": loss})],
    ):
        assert differentiable_tensors(value) == [loss], type(value)


def test_objects_functions_and_iterators_are_opaque_and_not_advanced() -> None:
    loss = loss_of(1.0)
    iterator = iter([loss])
    assert differentiable_tensors([Result(loss), lambda: loss, iterator, torch, Losses]) == []
    assert next(iterator) is loss


def test_tensors_are_found_in_order_among_many_numbers() -> None:
    first, second = loss_of(1.0), loss_of(2.0)
    found = differentiable_tensors([1, first, *range(1000), {"x": second, "n": 1.0}, "text"])
    assert [id(tensor) for tensor in found] == [id(first), id(second)]


def test_a_container_inside_of_itself_is_searched_once() -> None:
    loss = loss_of(1.0)
    value: list[Any] = [loss]
    value.append(value)
    assert differentiable_tensors(value) == [loss]
