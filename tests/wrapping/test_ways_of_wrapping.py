"""Ways of wrapping: by hand, by ``wrap``, nested, a plain parent of several roots, strategies side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.wrap import enable_wrap, wrap
from tests.support import Ranks, assert_close, on_ranks
from tests.support.both_sides import (
    LAYOUTS,
    NUM_STEPS,
    TOLERANCE,
    Layout,
    adamw,
    batch_of,
    build,
    options_for,
    reference_for,
    train_beside_reference,
    wrapped,
)
from tests.support.kit import no_shard_allowed, train_on
from tests.support.peer import peer_fsdp, peer_warnings_silenced
from tests.support.zoo import CASES, Layer

RanksOf = Callable[..., Ranks]
Wrap = Callable[[nn.Module], nn.Module]

both_kinds = pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])


def by_hand(model: nn.Module, fsdp: Wrap) -> nn.Module:
    """Inner units first, as a user does."""
    for block in model.blocks:
        block.first = fsdp(block.first)
        block.second = fsdp(block.second)
    model.blocks[1] = fsdp(model.blocks[1])
    return fsdp(model)


def by_enable_wrap(model: nn.Module, fsdp: Wrap) -> nn.Module:
    options = fsdp.keywords  # type: ignore[attr-defined]
    with enable_wrap(wrapper_cls=FSDP, **options):
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(block)
        return wrap(model)


def one_unit(model: nn.Module, fsdp: Wrap) -> nn.Module:
    return fsdp(model)


def several_roots(model: nn.Module, fsdp: Wrap) -> nn.Module:
    """The model itself stays plain; what it calls are trees of their own."""
    model.blocks[0].first = fsdp(model.blocks[0].first)
    model.blocks[0] = fsdp(model.blocks[0])
    model.blocks[1] = fsdp(model.blocks[1])
    model.head = fsdp(model.head)
    return model


STYLES = {style.__name__: style for style in (by_hand, by_enable_wrap, one_unit, several_roots)}


def wrapper_for(layout: Layout, use_orig_params: bool) -> partial[FSDP]:
    return partial(FSDP, use_orig_params=use_orig_params, **options_for(layout))


def train_wrapped_as(style: str, layout: Layout, use_orig_params: bool) -> None:
    case = CASES["nested units"]
    with no_shard_allowed():
        model = STYLES[style](build(case), wrapper_for(layout, use_orig_params))
    train_beside_reference(model, reference_for(case, use_orig_params))


@both_kinds
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "num_ranks, layout",
    [
        pytest.param(num, layout, id=f"{num}ranks-{layout}")
        for num, layout in [(2, LAYOUTS[2][0]), (2, LAYOUTS[2][2]), (4, LAYOUTS[4][1]), (4, LAYOUTS[4][3])]
    ],
)
def test_every_way_of_wrapping_trains_as_a_replicated_model(
    ranks: RanksOf, num_ranks: int, layout: Layout, style: str, use_orig_params: bool
) -> None:
    ranks(num_ranks).run(train_wrapped_as, style, layout, use_orig_params)


@on_ranks(2)
@both_kinds
@pytest.mark.parametrize("style", ["by_hand", "one_unit", "several_roots"])
def test_every_way_of_wrapping_trains_as_in_torch_fsdp1(rank: int, style: str, use_orig_params: bool) -> None:
    case = CASES["nested units"]
    ours = STYLES[style](build(case), lambda module: FSDP(module, use_orig_params=use_orig_params))
    with peer_warnings_silenced():
        theirs = STYLES[style](build(case), lambda module: peer_fsdp(module, use_orig_params=use_orig_params))
        optimizers = adamw(ours), adamw(theirs)
        for index in range(NUM_STEPS):
            losses = []
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                losses += train_on(model, optimizer, [batch_of(case, rank, index)], case.loss_of)
            assert_close(losses[0], losses[1], **TOLERANCE, what=f"loss {index}")
        expected = dict(theirs.state_dict())
    assert_close(dict(ours.state_dict()), expected, **TOLERANCE, what="state_dict")


@on_ranks(2, 4)
@both_kinds
def test_units_of_one_tree_may_have_different_strategies(use_orig_params: bool) -> None:
    case = CASES["nested units"]

    def unit(module: nn.Module, strategy: ShardingStrategy) -> nn.Module:
        with no_shard_allowed():
            return FSDP(module, sharding_strategy=strategy, use_orig_params=use_orig_params)

    model: Any = build(case)
    model.blocks[0].first = unit(model.blocks[0].first, ShardingStrategy.SHARD_GRAD_OP)
    model.blocks[0] = unit(model.blocks[0], ShardingStrategy.FULL_SHARD)
    model.blocks[1] = unit(model.blocks[1], ShardingStrategy.NO_SHARD)
    model = unit(model, ShardingStrategy.FULL_SHARD)

    reference = reference_for(case, use_orig_params)

    def clip_both() -> None:
        expected = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05)
        assert_close(float(model.clip_grad_norm_(0.05)), float(expected), **TOLERANCE, what="norm")

    train_beside_reference(model, reference, before_step=clip_both)


@on_ranks(4)
@both_kinds
def test_a_process_group_of_a_part_of_the_ranks_trains_on_its_own_batches(rank: int, use_orig_params: bool) -> None:
    case = CASES["uneven sizes"]
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = [0, 1] if rank < 2 else [2, 3]
    model = wrapped(build(case), (Layer,), process_group=halves[rank // 2], use_orig_params=use_orig_params)
    replica = build(case)
    optimizers = adamw(model), adamw(replica)
    for index in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for source in mine:
            (case.loss_of(replica, batch_of(case, source, index)) / 2).backward()
        case.loss_of(model, batch_of(case, rank, index)).backward()
        for optimizer in optimizers:
            optimizer.step()
    expected = {name: value.detach() for name, value in replica.state_dict().items()}
    assert_close(dict(model.state_dict()), expected, **TOLERANCE, what="state_dict")
