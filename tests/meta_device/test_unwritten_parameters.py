"""Parameters of fully_shard that left the meta device by ``to_empty`` and may not have got values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp_flat.composable import MixedPrecisionPolicy, fully_shard
from tests.support import on_ranks
from tests.support.beside import blocks_and_root
from tests.support.kit import seeded
from tests.support.models import Stack

X = torch.ones(2, 8)


def emptied(**kwargs: Any) -> Any:
    with torch.device("meta"):
        model = Stack()
    return blocks_and_root(model, **kwargs).to_empty(device="cpu")


def warned(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(X)
    return [str(each.message) for each in caught if "meta device" in str(each.message)]


@pytest.mark.of_guards
@on_ranks(2, 4)
@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_forward_names_parameters_without_values(dtype: torch.dtype) -> None:
    model = emptied(mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    with torch.no_grad():
        for block in model.blocks:
            for param in block.parameters():
                param.zero_()
        model.first.weight.zero_()
        model.head.reset_parameters()
    (text,) = warned(model)
    assert "'first.bias' of unit" in text
    assert "'first.weight'" not in text
    assert "blocks" not in text
    assert "init_weights" in text
    assert warned(model) == []
    # A state dict, or a conversion, in between is no value.
    model = emptied().to(dtype)
    model.state_dict()
    (text,) = warned(model.float())
    assert text.startswith(("13 parameters", "11 parameters"))  # a rank may have no rows of a bias


def by_reset(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def by_copy(model: Any) -> None:
    for param in model.parameters():
        with torch.no_grad():
            param.copy_(torch.ones_like(param))


def by_local_tensor(model: Any) -> None:
    for param in model.parameters():
        param._local_tensor.fill_(1)


def by_to_local(model: Any) -> None:
    for param in model.parameters():
        param.to_local().detach().fill_(1)


def by_data(model: Any) -> None:
    for param in model.parameters():
        param.data.fill_(1)


def by_numpy(model: Any) -> None:
    for param in model.parameters():
        param.to_local().detach().numpy()[...] = 1


def by_load(model: Any, *, assign: bool = False) -> None:
    state = {name: value.clone() for name, value in blocks_and_root(seeded()).state_dict().items()}
    model.load_state_dict(state, assign=assign)


def by_assigned_parameters(model: Any) -> None:
    by_load(model, assign=True)


def by_a_full_state_dict(model: Any) -> None:
    set_model_state_dict(model, seeded().state_dict(), options=StateDictOptions(full_state_dict=True))


def by_a_new_parameter(model: Any) -> None:
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                local = torch.ones_like(param.to_local())
                full = DTensor.from_local(
                    local,
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )
                setattr(module, name, nn.Parameter(full))


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
@pytest.mark.parametrize(
    "write",
    [
        by_reset,
        by_copy,
        by_local_tensor,
        by_to_local,
        by_data,
        by_numpy,
        by_load,
        by_assigned_parameters,
        by_a_full_state_dict,
        by_a_new_parameter,
    ],
)
def test_nothing_is_said_once_they_were_written(write: Callable[[Any], None]) -> None:
    model = emptied()
    write(model)
    assert warned(model) == []
    assert model(X).isfinite().all()


@on_ranks(4)
@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
def test_padding_and_ranks_without_elements_are_not_taken_for_parameters() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 5))
    for module in (*model, model):
        fully_shard(module)
    model.to_empty(device="cpu")
    by_reset(model)
    assert warned(model) == []
    shards = [handle.flat_param for module in model for handle in module._unit.param_groups]
    assert all(shard.isfinite().all() for shard in shards)
