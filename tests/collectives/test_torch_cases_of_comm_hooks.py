"""The cases of torch's suite of communication hooks.

Covered: hooks that do the same as the default, hooks that change the gradient, the state that a hook gets, hooks with
``no_sync``, which strategy calls a hook with which arguments and sizes, hooks on a tree of units, low-precision
hooks, and all registrations that are refused.

Not covered: names of internal attributes; the hybrid strategies, for which torch refuses a hook and ours allows it
(docs/differences.md).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks

from tests.support import assert_close
from tests.support.beside import adamw
from tests.support.both_sides import TOLERANCE, Layout, batch_of
from tests.support.torch_and_ours import BLOCKS, ORIG, SHARDED, Side, on_both_sides, sgd, state_of, train

CASE = BLOCKS


class Calls:
    """The state of a hook, which notes the arguments of its calls."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.sizes: list[Any] = []


def mean(state: Calls, grad: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """The mean over ranks, times the state's factor."""
    state.sizes.append([grad.numel(), None if shard is None else shard.numel()])
    grad.mul_(state.factor / dist.get_world_size())
    if shard is None:
        dist.all_reduce(grad)
    else:
        dist.reduce_scatter_tensor(shard, grad)


@on_both_sides()
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_hook_takes_the_place_of_the_reduction(
    side: Side, layout: Layout, use_orig_params: bool, factor: float
) -> Any:
    model, default = (side.wrap_case(CASE, layout, use_orig_params=use_orig_params) for _ in range(2))
    calls = Calls(factor)
    model.register_comm_hook(calls, mean)
    losses = train(model, CASE, sgd(model), range(2))
    if factor == 1.0:
        expected = train(default, CASE, sgd(default), range(2))
        assert_close([losses, state_of(model)], [expected, state_of(default)], **TOLERANCE)
    return [losses, state_of(model), len(calls.sizes)]


@on_both_sides()
def test_a_hook_gets_gradients_of_the_units_sizes(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    calls = Calls()
    model.register_comm_hook(calls, mean)
    train(model, CASE, sgd(model), range(1))
    assert len(calls.sizes) == len([unit for unit in side.units(model) if unit._has_params])
    for whole, shard in calls.sizes:
        assert (shard is None) is (layout.strategy == "NO_SHARD")
        assert shard is None or shard * dist.get_world_size() == whole
    return sorted(calls.sizes)


@on_both_sides()
def test_a_hook_runs_once_for_what_no_sync_gathered(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model, default = (side.wrap_case(CASE, layout, use_orig_params=use_orig_params) for _ in range(2))
    calls = Calls()
    model.register_comm_hook(calls, mean)
    for each in (model, default):
        with each.no_sync():
            CASE.loss_of(each, batch_of(CASE, dist.get_rank(), 0)).backward()
        assert calls.sizes == []
        if each is model:
            CASE.loss_of(each, batch_of(CASE, dist.get_rank(), 1)).backward()
            num_calls = len(calls.sizes)
            calls.sizes.clear()
        else:
            CASE.loss_of(each, batch_of(CASE, dist.get_rank(), 1)).backward()
        adamw(each).step()
    assert_close(state_of(model), state_of(default), **TOLERANCE)
    return [num_calls, state_of(model)]


@on_both_sides()
def test_without_a_hook_each_unit_has_none(side: Side, layout: Layout, use_orig_params: bool) -> None:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    assert [unit._comm_hook for unit in side.units(model)] == [None] * len(side.units(model))
    calls = Calls()
    model.register_comm_hook(calls, mean)
    for unit in side.units(model):
        assert unit._comm_hook is mean
        assert unit._comm_hook_state is calls


@on_both_sides(layouts=SHARDED, kinds=ORIG)
def test_registrations_that_cannot_be_are_refused(side: Side, layout: Layout, use_orig_params: bool) -> None:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    assert model.check_is_root()
    with pytest.raises(ValueError):
        model.register_comm_hook(Calls(), 5)
    with pytest.raises(AssertionError):
        side.units(model)[1].register_comm_hook(Calls(), mean)
    model.register_comm_hook(Calls(), mean)
    with pytest.raises(AssertionError):
        model.register_comm_hook(Calls(), mean)


@on_both_sides(
    torch_cannot="its low-precision hooks fail on gloo: unknown parameter type", tolerance={"rtol": 1e-2, "atol": 1e-2}
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_low_precision_hooks_train_close_to_full_precision(
    side: Side, layout: Layout, use_orig_params: bool, dtype: str
) -> None:
    hook = getattr(default_hooks, f"{dtype}_compress_hook")
    model, default = (side.wrap_case(CASE, layout, use_orig_params=use_orig_params) for _ in range(2))
    state = default_hooks.LowPrecisionState(process_group=dist.group.WORLD, parameter_type=torch.float32)
    model.register_comm_hook(state, hook)
    for each in (model, default):
        train(each, CASE, sgd(each), range(2))
        assert {p.grad.dtype for p in each.parameters() if p.grad is not None} == {torch.float32}
    assert_close(state_of(model), state_of(default), rtol=2e-2, atol=1e-2)
