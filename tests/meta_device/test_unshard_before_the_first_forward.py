"""Units that left the meta device and are unsharded by hand before the first forward, as by explicit prefetching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.runtime import summon_full_params
from tests.support import assert_close, on_ranks
from tests.support.beside import FRONTS, blocks_and_root
from tests.support.kit import BLOCKS, full_params, seeded, square_loss, wrapped
from tests.support.models import Stack

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not")
X = torch.linspace(-1, 1, 16).reshape(2, 8)
FULL = StateDictOptions(full_state_dict=True)


def fill(module: nn.Module) -> None:
    """Give the parameters of a module values that depend on their shapes alone, and so are equal on every rank."""
    for param in module.parameters(recurse=False):
        with torch.no_grad():
            value = torch.linspace(-0.5, 0.5, param.numel()).reshape(param.shape)
            param.copy_(distribute_tensor(value, param.device_mesh, param.placements) if is_sharded(param) else value)


def is_sharded(param: torch.Tensor) -> bool:
    return hasattr(param, "placements")


def materialize(module: nn.Module) -> None:
    """Fill a module that has left the meta device, as a ``param_init_fn``."""
    module.to_empty(device="cpu", recurse=False)
    fill(module)


def filled() -> Any:
    model = seeded(Stack)
    for module in model.modules():
        fill(module)
    return model


def from_meta(front: str) -> Any:
    """A sharded model whose parameters have left the meta device and have values."""
    with torch.device("meta"):
        model: Any = Stack()
    if front != "fully_shard":
        return wrapped(model, use_orig_params=front == "originals", auto_wrap_policy=BLOCKS, param_init_fn=materialize)
    blocks_and_root(model).to_empty(device="cpu")
    for module in model.modules():
        fill(module)
    return model


def prefetched(model: Any) -> None:
    blocks = [block for block in model.modules() if block is not model and hasattr(block, "unshard")]
    model.set_modules_to_forward_prefetch(blocks)
    model.set_modules_to_backward_prefetch(blocks[::-1])
    model.unshard()


def first_block(model: Any) -> Any:
    return next(each for each in model.modules() if each is not model and hasattr(each, "unshard"))


def then_reshard(model: Any) -> None:
    model.unshard()
    model.reshard()


def full(model: Any) -> None:
    model.unshard()
    with summon_full_params(model):
        pass


def for_a_block(model: Any) -> None:
    first_block(model).unshard()
    with torch.no_grad(), fsdp_flat.unshard_for(model):
        pass


def saved(model: Any) -> None:
    model.unshard()
    model.state_dict()


def described(model: Any) -> None:
    first_block(model).unshard()
    fsdp_flat.describe(model)
    fsdp_flat.check_replicas(model)


CALLS: dict[str, Callable[[Any], object]] = {
    "unshard": lambda model: model.unshard(),
    "async_op": lambda model: model.unshard(async_op=True),
    "async_op_and_wait": lambda model: model.unshard(async_op=True).wait(),
    "one_inner_unit": lambda model: first_block(model).unshard(),
    "one_inner_unit_async": lambda model: first_block(model).unshard(async_op=True),
    "reshard": lambda model: model.reshard(),
    "prefetched": prefetched,
    "then_reshard": then_reshard,
    "summoned": full,
    "for_a_block": for_a_block,
    "saved": saved,
    "described": described,
}


def assert_trains(model: Any, call: Callable[[Any], object]) -> None:
    """Training with ``call`` before each forward is that of a plain model with the values that were written."""
    plain = filled()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(2):
        call(model)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            square_loss(each, X).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_params(model), dict(plain.named_parameters()), rtol=1e-5, atol=1e-6, what="weights")


@FRONTS
@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_units_are_unsharded_by_hand_before_the_first_forward(call: str, front: str) -> None:
    """The first forward looks whether parameters that left the meta device were written."""
    assert_trains(from_meta(front), CALLS[call])


def by_set_model_state_dict(model: Any) -> None:
    set_model_state_dict(model.to_empty(device="cpu"), filled().state_dict(), options=FULL)


def by_assignment(model: Any) -> None:
    whole, shown = filled().state_dict(), model.state_dict()
    values = {name: distribute_tensor(whole[name], at.device_mesh, at.placements) for name, at in shown.items()}
    model.load_state_dict(values, assign=True)


@pytest.mark.parametrize("call", ["unshard", "async_op", "one_inner_unit", "then_reshard"])
@pytest.mark.parametrize("load", [by_set_model_state_dict, by_assignment])
@on_ranks(2)
def test_units_are_unsharded_by_hand_after_a_load_onto_the_meta_device(load: Callable[[Any], None], call: str) -> None:
    with torch.device("meta"):
        model = blocks_and_root(Stack())
    load(model)
    assert_trains(model, CALLS[call])


@pytest.mark.of_guards
@FRONTS
@on_ranks(2)
def test_parameters_without_values_are_found_although_they_were_unsharded_by_hand(front: str) -> None:
    if front == "fully_shard":
        with torch.device("meta"):
            model: Any = blocks_and_root(Stack())
        model.to_empty(device="cpu").unshard()
        with pytest.warns(UserWarning, match="left the meta device by to_empty, never written"):
            model(X)
        return
    with torch.device("meta"):
        plain = Stack()
    model = wrapped(
        plain,
        use_orig_params=front == "originals",
        param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
    )
    assert isinstance(model, FSDP)
    model.unshard()
    with pytest.raises(fsdp_flat.errors.UsageError, match="left the meta device and were never written"):
        model(X)
