"""The cases of torch's suite of ``clip_grad_norm_``.

Covered: norms 1, 2, 2.5 and inf against a replicated model, with every strategy, with strategies side by side in one
tree, with parameters that no unit manages and after ``no_sync``; low-precision gradients; no gradients at all; a
wrapper that is not the root.

Not covered: gradients offloaded to the CPU, which torch's class cannot do on a CPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import assert_close
from tests.support.both_sides import PLAIN, TOLERANCE, Layout, batch_of, build
from tests.support.torch_and_ours import BLOCKS, SHARDED, STRATEGIES, Side, beside_replica, on_both_sides, sgd, state_of

CASE = BLOCKS


def batch(rank: int, step: int) -> Any:
    return batch_of(CASE, rank, step)


def clipped(norms: list[torch.Tensor], max_norm: float, norm_type: float) -> Any:
    """A function that clips the wrapped model and its replica alike, and keeps the norms."""

    def clip(model: Any) -> None:
        if hasattr(model, "clip_grad_norm_"):
            norms.append(model.clip_grad_norm_(max_norm, norm_type))
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type))

    return clip


@on_both_sides(layouts=STRATEGIES)
@pytest.mark.parametrize("norm_type", [1, 2.0, 2.5, math.inf], ids=str)
def test_clipping_gives_the_norm_and_the_steps_of_a_replicated_model(
    side: Side, layout: Layout, use_orig_params: bool, norm_type: float
) -> Any:
    norms: list[torch.Tensor] = []
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    clip = clipped(norms, 0.1, norm_type)
    state = beside_replica(model, build(CASE), CASE.loss_of, batch, optimizer=sgd, num_steps=2, before_step=clip)
    assert_close(norms[0::2], norms[1::2], **TOLERANCE)
    assert all(float(norm) > 0.1 for norm in norms)
    return [norms, state]


@on_both_sides(kinds=(True, False))
@pytest.mark.parametrize("inner", ["NO_SHARD", "SHARD_GRAD_OP"])
def test_clipping_goes_with_strategies_side_by_side(side: Side, use_orig_params: bool, inner: str) -> Any:
    norms: list[torch.Tensor] = []
    model = build(CASE)
    model.blocks[0] = side.wrap(model.blocks[0], Layout(inner), use_orig_params=use_orig_params)
    model.blocks[1] = side.wrap(model.blocks[1], Layout("FULL_SHARD"), use_orig_params=use_orig_params)
    model = side.wrap(model, Layout("FULL_SHARD"), use_orig_params=use_orig_params)
    clip = clipped(norms, 0.1, 2.0)
    state = beside_replica(model, build(CASE), CASE.loss_of, batch, optimizer=sgd, num_steps=2, before_step=clip)
    assert_close(norms[0::2], norms[1::2], **TOLERANCE)
    return [norms, state]


@on_both_sides(layouts=SHARDED)
def test_clipping_counts_ignored_parameters_of_equal_gradients_once(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    model = build(CASE)
    wrapped = side.wrap(model, layout, units=CASE.units, ignored_modules=[model.head], use_orig_params=use_orig_params)
    plain = build(CASE)
    same = batch(0, 0)  # every rank's, so that the ignored head has one gradient
    CASE.loss_of(wrapped, same).backward()
    CASE.loss_of(plain, same).backward()
    norm = wrapped.clip_grad_norm_(0.1)
    assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), **TOLERANCE)
    sgd(wrapped).step()
    sgd(plain).step()
    state = state_of(wrapped)
    assert_close(state, {name: value.detach() for name, value in plain.state_dict().items()}, **TOLERANCE)
    return [norm, state]


@on_both_sides(layouts=PLAIN)
def test_clipping_after_no_sync_sees_the_whole_accumulated_gradient(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    with model.no_sync():
        CASE.loss_of(model, batch(dist.get_rank(), 0)).backward()
    CASE.loss_of(model, batch(dist.get_rank(), 1)).backward()
    norms = [model.clip_grad_norm_(0.1), model.clip_grad_norm_(1e4)]
    assert_close(float(norms[1]), 0.1, rtol=1e-4, atol=0.0)
    return norms


@on_both_sides(layouts=PLAIN, tolerance={"rtol": 1e-2, "atol": 1e-3})
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_gradients_and_their_norm_keep_their_dtype(
    side: Side, layout: Layout, use_orig_params: bool, dtype: torch.dtype
) -> Any:
    precision = side.api.MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, keep_low_precision_grads=True)
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params, mixed_precision=precision)
    x = batch(dist.get_rank(), 0)["x"]
    model(x).float().square().mean().backward()
    before = {param.grad.dtype for param in model.parameters() if param.grad is not None and param.numel() > 0}
    norm = model.clip_grad_norm_(0.05)
    after = {param.grad.dtype for param in model.parameters() if param.grad is not None and param.numel() > 0}
    assert before == after
    again = model.clip_grad_norm_(1e4)
    assert_close(float(again), 0.05, rtol=2e-2, atol=0.0)
    return {"norm": norm, "again": again, "dtypes": sorted(map(str, after))}


@on_both_sides(layouts=PLAIN)
def test_without_gradients_the_norm_is_zero_with_a_warning(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    if layout.strategy == "NO_SHARD":
        return model.clip_grad_norm_(0.1)
    with pytest.warns(UserWarning, match="gradients"):
        norm = model.clip_grad_norm_(0.1)
    assert float(norm) == 0.0
    return norm


@on_both_sides(layouts=PLAIN)
def test_a_wrapper_inside_another_cannot_clip(side: Side, layout: Layout, use_orig_params: bool) -> None:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    CASE.loss_of(model, batch(dist.get_rank(), 0)).backward()
    with pytest.raises(RuntimeError):
        side.units(model)[1].clip_grad_norm_(0.1)
