"""Errors of ``fully_shard`` are torch's classes for the same mistake, and ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_flat import fully_shard
from fsdp_flat.errors import OptionError, PhaseError, ShardingError, UnevenDimError
from tests.support import on_ranks
from tests.support.peer import peer_fully_shard

Front = Callable[..., Any]


def linear() -> Any:
    return nn.Linear(3, 4)


def sharded(front: Front) -> Any:
    return front(linear())


def scalar() -> Any:
    model = nn.Module()
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    return model


def on_dim(dim: int, module: Any, front: Front) -> object:
    return front(module, shard_placement_fn=lambda param: Shard(dim))


MISTAKES: dict[str, tuple[Callable[[Front], object], type[Exception], type[Exception]]] = {
    "twice": (lambda front: front(sharded(front)), AssertionError, ShardingError),
    "twice, in a list": (lambda front: front([linear(), sharded(front)]), AssertionError, ShardingError),
    "a copy": (lambda front: copy.deepcopy(sharded(front)), AssertionError, PhaseError),
    "a copy around": (lambda front: copy.deepcopy(nn.Sequential(sharded(front))), AssertionError, PhaseError),
    "no such dim": (lambda front: on_dim(2, linear(), front), AssertionError, ShardingError),
    "no such dim of one": (lambda front: on_dim(1, nn.LayerNorm(4), front), AssertionError, ShardingError),
    "an uneven dim": (
        lambda front: on_dim(1, nn.Linear(3, 4, bias=False), front),
        NotImplementedError,
        UnevenDimError,
    ),
    "an uneven dim from the end": (
        lambda front: on_dim(-1, nn.Linear(3, 4, bias=False), front),
        NotImplementedError,
        UnevenDimError,
    ),
    "a scalar": (lambda front: front(scalar()), ValueError, OptionError),
    "a list without forward": (lambda front: front(nn.ModuleList([linear()])), ValueError, OptionError),
    "three dims": (
        lambda front: front(linear(), mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))),
        ValueError,
        OptionError,
    ),
    "resharding to three ranks": (lambda front: front(linear(), reshard_after_forward=3), ValueError, OptionError),
    "resharding to a word": (
        lambda front: sharded(front).set_reshard_after_forward("yes"),
        ValueError,
        OptionError,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(2)
def test_a_mistake_raises_torchs_class_and_ours(mistake: str) -> None:
    make, of_torch, of_ours = MISTAKES[mistake]
    with pytest.raises(of_torch) as torchs:
        make(peer_fully_shard)
    with pytest.raises(of_ours) as ours:
        make(fully_shard)
    assert isinstance(ours.value, torchs.type), (torchs.type, ours.type)
    assert isinstance(ours.value, (OptionError, PhaseError))
