"""States of an optimizer that are on the host between its steps give the same weights, and are saved and loaded.

On the CPU states are on the host anyway. These tests let the host's memory stand for the accelerator's too, with copies
that are made at once; tests/rehearsal/test_offload.py shows their order on an accelerator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat import CPUOffload, offload_optimizer
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.composable import fully_shard
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionTypeError, UsageError
from fsdp_flat.runtime.offload_optimizer import OffloadedStates
from tests.support import assert_equal, on_ranks
from tests.support.beside import blocks_and_root
from tests.support.host_swap import HostSwapOnCpu
from tests.support.kit import BLOCKS, Stack, batch, full_params, seeded, square_loss, train_on, wrapped

FRONTS = pytest.mark.parametrize("front", ["flat", "original", "fully_shard"])
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def sharded(front: str, **kwargs: Any) -> Any:
    if front == "fully_shard":
        return blocks_and_root(seeded(), fully_shard)
    return wrapped(seeded(), auto_wrap_policy=BLOCKS, use_orig_params=front == "original", **kwargs)


def offloading(model: nn.Module, optimizer: torch.optim.Optimizer) -> HostSwapOnCpu:
    """Offload as on an accelerator."""
    swap = HostSwapOnCpu()
    optimizer.offloaded = OffloadedStates(optimizer, units_of(model)[0], swap)  # type: ignore[attr-defined, arg-type]
    return swap


def batches(rank: int, num_steps: int, first: int = 0) -> list[torch.Tensor]:
    return [batch(rank, step) for step in range(first, first + num_steps)]


def locals_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [value for of_param in optimizer.state.values() for value in of_param.values() if value is not None]
    return [value.to_local() if isinstance(value, DTensor) else value for value in found]


@on_ranks(2, 4)
@FRONTS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_are_those_without_to_the_bit(front: str, name: str, rank: int) -> None:
    found = []
    for offloads in (False, True):
        model = sharded(front)
        optimizer = OPTIMIZERS[name](model.parameters())
        swap = offloading(model, optimizer) if offloads else HostSwapOnCpu()
        losses = train_on(model, optimizer, batches(rank, 4))
        assert (swap.num_to_host > 0) is offloads
        # Not those of the first step, which made them.
        assert swap.num_to_device == swap.num_to_host // 4 * 3
        found.append([losses, full_params(model), locals_of(optimizer)])
    assert_equal(found[1], found[0])


@on_ranks(2)
@FRONTS
def test_states_are_on_the_host_from_the_next_forward_to_the_next_step(front: str, rank: int) -> None:
    model = sharded(front)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    swap = offloading(model, optimizer)
    places: list[set[int]] = []
    for step in range(3):
        loss = square_loss(model, batch(rank, step))
        if step:
            places.append({each.data_ptr() for each in locals_of(optimizer) if each.numel() > 1})
        loss.backward()
        optimizer.step()
        swap.note(*locals_of(optimizer))
        optimizer.zero_grad()
        assert all(swap.noted_alive())
        with torch.no_grad():
            model(batch(rank))
        assert not any(alive for alive, each in zip(swap.noted_alive(), locals_of(optimizer)) if each.numel() > 1)
        swap.noted.clear()
    assert places[0] == places[1], "the memory on the host is allocated once"


@on_ranks(2)
@FRONTS
def test_a_step_without_a_forward_before_it_uses_the_states_that_are_there(front: str, rank: int) -> None:
    found = []
    for offloads in (False, True):
        model = sharded(front)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        if offloads:
            offloading(model, optimizer)
        for step in range(2):
            square_loss(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        found.append(full_params(model))
    assert_equal(found[1], found[0])


@on_ranks(2)
@FRONTS
def test_states_are_saved_and_loaded_between_steps_and_during_one(front: str, rank: int) -> None:
    models = [sharded(front) for _ in range(2)]
    optimizers = [OPTIMIZERS["AdamW"](model.parameters()) for model in models]
    offloading(models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train_on(model, optimizer, batches(rank, 2))
    for during in (False, True):
        losses = [square_loss(model, batch(rank, 9)) for model in models] if during else []
        plain, offloaded = [
            FSDP.optim_state_dict(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)
        ]
        assert_equal(offloaded["state"], plain["state"])
        own = copy.deepcopy(optimizers[1].state_dict())
        for loss in losses:
            loss.backward()
        models[0].zero_grad()
        models[1].zero_grad()
        # One goes on; the other is loaded into a new optimizer, which is offloaded too.
        again = OPTIMIZERS["AdamW"](models[1].parameters())
        offloading(models[1], again)
        again.load_state_dict(own)
        optimizers[1] = again
        for model, optimizer in zip(models, optimizers, strict=True):
            train_on(model, optimizer, batches(rank, 2, 3))
        assert_equal(full_params(models[1]), full_params(models[0]))


@on_ranks(2)
@FRONTS
def test_on_a_cpu_the_option_and_the_function_change_nothing(front: str, rank: int) -> None:
    found = []
    for offloads in (False, True):
        kwargs = {"cpu_offload": CPUOffload(offload_optimizer=offloads)} if front != "fully_shard" else {}
        model = sharded(front, **kwargs)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        if offloads:
            offload_optimizer(optimizer)
            offload_optimizer(optimizer)
        train_on(model, optimizer, batches(rank, 3))
        assert not optimizer._optimizer_state_dict_pre_hooks
        found.append(full_params(model))
    assert_equal(found[1], found[0])


@on_ranks(2)
def test_an_optimizer_of_other_parameters_is_refused(rank: int) -> None:
    wrapped(Stack(), auto_wrap_policy=BLOCKS)
    with pytest.raises(UsageError, match="holds no parameters of a unit"):
        offload_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(OptionTypeError, match="got a list"):
        offload_optimizer([])  # type: ignore[arg-type]
