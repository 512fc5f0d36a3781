"""Divide factors, optimizers in backward, hooks on parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.errors import OptionError, UsageError
from tests.support import assert_close, on_ranks
from tests.support.beside import (
    APPLY,
    CLOSE,
    OUR_WRAPPERS,
    WRAPPER_FRONTS,
    Beside,
    batch_of,
    by_policy,
    of_stack,
    placed,
)
from tests.support.kit import seeded, square_loss
from tests.support.models import Stack

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")
STRATEGIES = pytest.mark.parametrize("strategy", [each.name for each in ShardingStrategy])


# --------------------------------------------------------------------------------------------------- divide factors


@WRAPPER_FRONTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@on_ranks(2, 4)
def test_a_token_count_known_after_backward_gives_the_single_process_gradient(
    dtype: torch.dtype, front: str, rank: int, num_ranks: int
) -> None:
    precision = None if dtype is torch.float32 else MixedPrecision(reduce_dtype=dtype)
    beside = of_stack(front, model=Stack(4), mixed_precision=precision, note_outputs=False)
    tokens = torch.zeros(())
    beside.ours.set_gradient_divide_factor(tokens)
    # Rank r has r + 1 rows.
    inputs = batch_of(0, num_rows=rank + 1).requires_grad_()

    def count_last(_grad: torch.Tensor) -> None:
        # The gradient of the inputs comes last, when most units are reduced already.
        tokens.add_(count_tokens(len(inputs)))

    handle = inputs.register_hook(count_last)
    beside.ours(inputs).pow(2).mean(dim=1).sum().backward()
    assert tokens.item() == num_ranks * (num_ranks + 1) / 2
    handle.remove()
    beside.follow(lambda model, _x: model(inputs).pow(2).mean(dim=1).sum() * num_ranks / tokens)
    beside.check_gradients(**CLOSE if precision is None else {"rtol": 1e-2, "atol": 1e-2})


def count_tokens(own: int) -> float:
    total = torch.tensor(float(own))
    dist.all_reduce(total)
    return total.item()


@on_ranks(2)
def test_a_divide_factor_that_cannot_be_used_is_refused_when_it_is_set() -> None:
    model = of_stack("flat").ours
    with pytest.raises(OptionError, match="factor must not be zero"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(TypeError, match="factor must be a number"):
        model.set_gradient_divide_factor("2")
    model.register_comm_hook(None, lambda _state, full, out: None)
    with pytest.raises(UsageError, match="communication hook divides gradients by itself"):
        model.set_gradient_divide_factor(2.0)


# --------------------------------------------------------------------------------------------- optimizers in backward


def step_in_backward(optimizer: Any, params: Any, arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # The package's import uses torch.jit, which torch itself deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optimizer, params, arguments)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2, 4)
def test_an_optimizer_in_backward_equals_a_normal_step(strategy: str, rank: int) -> None:
    # Whose second moments do not vanish, so that the step depends on the size of a gradient.
    options = {"lr": 1e-2, "eps": 0.1}
    beside = of_stack("originals", strategy, optimizer=lambda model: torch.optim.Adam(model.parameters(), **options))
    step_in_backward(torch.optim.Adam, beside.ours.parameters(), options)
    for _ in range(3):
        beside.backward()
        assert all(param.grad is None for param in beside.ours.parameters()), "freed as soon as they were used"
        beside.step()
    beside.check_parameters()


@on_ranks(2)
def test_an_optimizer_in_backward_of_a_flat_parameter_is_refused_at_first_use(rank: int) -> None:
    beside = Beside(Stack(2), ("flat", "fsdp1_flat"))
    for wrapped in beside.sharded.values():
        step_in_backward(torch.optim.SGD, wrapped.parameters(), {"lr": 0.1})
        with pytest.raises(RuntimeError, match="use_orig_params"):
            wrapped(beside.batch())


# ------------------------------------------------------------------------------------------------ hooks on parameters


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
@on_ranks(2)
def test_a_hook_on_an_original_parameter_sees_its_whole_local_gradient(
    when: str, strategy: str, rank: int, num_ranks: int
) -> None:
    local, seen = Stack(2).double(), {}
    plain = copy.deepcopy(local)
    if when == "before wrapping":
        hook_all(plain, seen)
    model = by_policy(plain, APPLY["originals"], **placed(strategy))
    if when == "after wrapping":
        hook_all(model, seen)
    for each in (model, local):
        square_loss(each, batch_of(0)).backward()
    expected = {name: param.grad for name, param in local.named_parameters()}
    assert_close(dict(sorted(seen.items())), dict(sorted(expected.items())), **CLOSE)


def hook_all(model: nn.Module, seen: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        clean = name.replace("_fsdp_wrapped_module.", "")
        param.register_hook(lambda grad, clean=clean: seen.__setitem__(clean, grad.clone()))


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_hook_can_change_the_gradient_before_it_is_reduced(front: str) -> None:
    def hook_then_wrap(model: Stack, apply: Any) -> Any:
        # Flat parameters: only those set before wrapping exist.
        hook_some(model)
        return by_policy(model, apply)

    beside = Beside(Stack(2), front, shard=hook_then_wrap)
    hook_some(beside.plain)
    beside.train()


def hook_some(model: Stack) -> None:
    model.blocks[0].up.weight.register_hook(lambda grad: 3 * grad)
    model.head.bias.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    model.blocks[0].up.weight.register_hook(lambda grad: None)


@on_ranks(2)
def test_a_hook_that_is_registered_in_a_backward_changes_the_gradients_that_follow(rank: int) -> None:
    beside = of_stack("originals")
    for block in (beside.ours.blocks[0].module, beside.plain.blocks[0]):

        def triple(*_: Any, block: Any = block) -> None:
            block.up.weight.register_hook(lambda grad: 3 * grad)

        block.down.register_full_backward_hook(triple)
    beside.train()


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_hook_that_changes_the_shape_of_a_gradient_raises(front: str, rank: int) -> None:
    plain = Stack(2)
    rows, columns = plain.blocks[0].up.weight.shape
    plain.blocks[0].up.weight.register_hook(lambda grad: grad.sum(1, keepdim=True))
    model = by_policy(plain, APPLY[front])
    with pytest.raises(UsageError, match=rf"'up.weight'.*\({rows}, 1\) on rank {rank}.*\({rows}, {columns}\)"):
        square_loss(model, batch_of(0).float()).backward()


@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_a_post_accumulate_hook_fires_once_per_backward_with_the_reduced_gradient(
    strategy: str, front: str, rank: int, num_ranks: int
) -> None:
    model = of_stack(front, strategy).ours
    params = list(model.parameters())
    calls = [0] * len(params)
    norms: list[float] = []

    def note(index: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            assert param is params[index]
            assert param.grad is not None
            assert param.grad.shape == param.shape
            calls[index] += 1
            norms.append(param.grad.norm().item())

        return hook

    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(note(index))
    for backward in range(1, 4):
        norms.clear()
        square_loss(model, batch_of(0)).backward()
        assert calls == [backward if param.numel() else 0 for param in params]
        now = torch.stack([param.grad.norm() for param in params if param.grad is not None])
        assert sorted(norms) == sorted(now.tolist())


@on_ranks(2)
def test_a_removed_hook_does_not_fire(rank: int) -> None:
    model, calls = of_stack("originals").ours, []
    handles = [param.register_hook(lambda grad: calls.append(1)) for param in model.parameters()]
    square_loss(model, batch_of(0)).backward()
    assert len(calls) == len(handles)
    for handle in handles:
        handle.remove()
    square_loss(model, batch_of(0)).backward()
    assert len(calls) == len(handles)


@on_ranks(2)
def test_a_hook_on_a_flat_parameter_sees_and_changes_the_reduced_shard(rank: int) -> None:
    model, other = (by_policy(seeded().double(), APPLY["flat"]) for _ in range(2))
    seen: list[torch.Tensor] = []
    model.blocks[0]._flat_param.register_hook(lambda grad: seen.append(grad.clone()))
    model.blocks[0]._flat_param.register_hook(lambda grad: 2 * grad)
    for _ in range(2):
        square_loss(model, batch_of(0)).backward()
    square_loss(other, batch_of(0)).backward()
    reduced = other.blocks[0]._flat_param.grad
    assert_close([*seen, model.blocks[0]._flat_param.grad], [reduced, reduced, 4 * reduced], **CLOSE)


@on_ranks(2)
def test_a_post_accumulate_hook_set_before_wrapping_fires_or_is_warned_about(rank: int) -> None:
    calls: list[tuple[int, ...]] = []
    for front in OUR_WRAPPERS:
        calls.clear()
        plain = Stack(2).double()
        plain.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda param: calls.append(tuple(param.shape)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = by_policy(plain, APPLY[front])
            square_loss(model, batch_of(0)).backward()
        texts = [str(warning.message) for warning in caught]
        if front == "originals":
            # This rank's slice, where it has one.
            assert calls == [shape for shape in [tuple(model.blocks[0].up.weight.shape)] if shape != (0,)]
            assert texts == []
        else:
            assert calls == []
            assert len(texts) == 1
            assert "'up.weight'" in texts[0]
            assert "use_orig_params=True" in texts[0]
