"""The wrapper class has FSDP2's controls of gradients and communication too, under the same names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_flat import ShardingStrategy
from fsdp_flat.errors import UsageError
from tests.support import on_ranks
from tests.support.kit import BLOCKS, Stack, batch, full_grads, mesh, seeded, square_loss, wrapped
from tests.support.reference import replicated_gradients


def wrapper_and_plain(**kwargs: Any) -> tuple[Any, Stack]:
    plain = seeded()
    return wrapped(copy.deepcopy(plain), auto_wrap_policy=BLOCKS, **kwargs), plain


def backward(model: Any, plain: Stack, number: int) -> None:
    square_loss(model, batch(dist.get_rank(), number)).backward()
    replicated_gradients(plain, [batch(rank, number) for rank in range(dist.get_world_size())], square_loss)


def check_grads(model: Any, plain: Stack) -> None:
    torch.testing.assert_close(full_grads(model), {name: param.grad for name, param in plain.named_parameters()})


@on_ranks(2, 4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.NO_SHARD]
)
def test_a_wrapper_keeps_partial_shards_without_all_reduce(use_orig_params: bool, strategy: ShardingStrategy) -> None:
    hybrid = {} if strategy is ShardingStrategy.NO_SHARD else {"device_mesh": mesh(2, dist.get_world_size() // 2)}
    model, plain = wrapper_and_plain(sharding_strategy=strategy, use_orig_params=use_orig_params, **hybrid)
    for _ in range(2):
        for number, is_last in enumerate((False, True)):
            model.set_requires_all_reduce(is_last)
            backward(model, plain, number)
        check_grads(model, plain)
    model.set_requires_all_reduce(False)
    square_loss(model, batch(0, 5)).backward()
    # The wrapper's zero_grad clears gradients of any kind.
    model.zero_grad()
    plain.zero_grad()
    model.set_requires_all_reduce(True)
    backward(model, plain, 6)
    check_grads(model, plain)


@on_ranks(4)
@pytest.mark.parametrize(
    "switch", ["set_requires_all_reduce", "set_is_last_backward", "set_manual_backward_finalization"]
)
def test_gradients_that_are_not_set_yet_cannot_be_clipped(switch: str) -> None:
    model, plain = wrapper_and_plain(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh(2, 2))
    by_hand = switch == "set_manual_backward_finalization"
    getattr(model, switch)(by_hand)
    backward(model, plain, 0)
    with pytest.raises(UsageError, match=r"clip_grad_norm_ was called on unit .* are not set yet"):
        model.clip_grad_norm_(1.0)
    if by_hand:
        model.finalize_backward()
    else:
        getattr(model, switch)(True)
        backward(model, plain, 1)
    norm = model.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    check_grads(model, plain)


@on_ranks(2, 4)
def test_a_wrapper_accumulates_the_gradients_of_some_units() -> None:
    model, plain = wrapper_and_plain(use_orig_params=True)
    block = model.module.blocks[0]
    block.set_requires_gradient_sync(False)
    backward(model, plain, 0)
    block.set_requires_gradient_sync(True)
    backward(model, plain, 1)
    check_grads(model, plain)


@on_ranks(2, 4)
def test_a_wrapper_calls_hooks_with_reduced_shards() -> None:
    model, plain = wrapper_and_plain(use_orig_params=True)
    model.set_all_reduce_hook(lambda shard: shard.mul_(2))
    model.set_post_optim_event(torch.Event())
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    backward(model, plain, 0)
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad * (1 if name.startswith("blocks") else 2))


@on_ranks(2)
def test_a_divide_factor_of_a_wrapper_counts_for_the_units_below_too(rank: int) -> None:
    model, plain = wrapper_and_plain()
    for factor in (2.0, torch.tensor(4.0), None, 0.1):
        model.set_gradient_divide_factor(factor)
        backward(model, plain, 0)
        wanted = {name: param.grad * (2 / (factor or 2)) for name, param in plain.named_parameters()}
        torch.testing.assert_close(full_grads(model), wanted)
        model.zero_grad()
        plain.zero_grad()


@on_ranks(2)
def test_a_factor_that_changes_in_a_backward_is_read_at_its_end(rank: int) -> None:
    found = []
    for changes in (False, True):
        model, _ = wrapper_and_plain(use_orig_params=True)
        for before, after in ((None, 3.0), (5.0, 3.0), (torch.tensor(7.0), 3.0), (2.0, None), (2.0, torch.tensor(3.0))):
            loss = square_loss(model, batch(rank, 0))
            model.set_gradient_divide_factor(before if changes else after)
            if changes:
                # The first layer's gradient comes last, when most units are reduced.
                handle = model.module.first.weight.register_hook(
                    lambda grad, model=model, after=after: model.set_gradient_divide_factor(after)
                )
            loss.backward()
            if changes:
                handle.remove()
            found.append(full_grads(model))
            model.zero_grad()
    half = len(found) // 2
    for fixed, changed in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(changed, fixed)


@on_ranks(2)
@pytest.mark.parametrize("by_hand", [False, True])
def test_one_factor_divides_all_backwards_whose_gradients_are_set_together(by_hand: bool, rank: int) -> None:
    model, plain = wrapper_and_plain(use_orig_params=True)
    for number in (0, 1):
        replicated_gradients(plain, [batch(each, number) for each in range(2)], square_loss)
    for before, after in ((None, 4.0), (3.0, None), (3.0, torch.tensor(4.0)), (torch.tensor(2.0), 4.0), (3.0, 8.0)):
        model.set_manual_backward_finalization(by_hand)
        for number, factor in enumerate((before, after)):
            model.set_gradient_divide_factor(factor)
            if not by_hand:
                model.set_is_last_backward(number == 1)
            square_loss(model, batch(rank, number)).backward()
        if by_hand:
            model.finalize_backward()
        wanted = {name: param.grad * (2 / (after or 2)) for name, param in plain.named_parameters()}
        torch.testing.assert_close(full_grads(model), wanted)
        model.zero_grad()
