"""Ways of wrapping: by hand, by ``wrap``, nested, a plain parent of several roots, strategies side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.wrap import enable_wrap, wrap
from tests.support import Ranks, assert_close, on_ranks
from tests.support.beside import WRAPPER_FRONTS, adamw, average_gradients
from tests.support.both_sides import LAYOUTS, TOLERANCE, Layout, batch_of, beside_case, build, wrapped
from tests.support.kit import no_shard_allowed
from tests.support.models import Layer
from tests.support.zoo import CASES

RanksOf = Callable[..., Ranks]
Wrap = Callable[[nn.Module], nn.Module]


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


def train_wrapped_as(style: str, layout: Layout, *fronts: str) -> None:
    def shard(model: nn.Module, apply: Wrap, **options: Any) -> nn.Module:
        with no_shard_allowed():
            return STYLES[style](model, partial(apply, **options))

    beside = beside_case("nested units", fronts, layout, shard=shard)
    beside.train(num_steps=3)
    beside.check_state_dict()


@WRAPPER_FRONTS
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "num_ranks, layout",
    [
        pytest.param(num, layout, id=f"{num}ranks-{layout}")
        for num, layout in [(2, LAYOUTS[2][0]), (2, LAYOUTS[2][2]), (4, LAYOUTS[4][1]), (4, LAYOUTS[4][3])]
    ],
)
def test_every_way_of_wrapping_trains_as_a_replicated_model(
    ranks: RanksOf, num_ranks: int, layout: Layout, style: str, front: str
) -> None:
    ranks(num_ranks).run(train_wrapped_as, style, layout, front)


@on_ranks(4)
@WRAPPER_FRONTS
def test_a_process_group_of_a_part_of_the_ranks_trains_on_its_own_batches(rank: int, front: str) -> None:
    case = CASES["uneven sizes"]
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = wrapped(build(case), (Layer,), process_group=halves[rank // 2], use_orig_params=front == "originals")
    replica = build(case)
    optimizers = adamw(model), adamw(replica)
    for index in range(3):
        for each in (model, replica):
            case.loss_of(each, batch_of(case, rank, index)).backward()
        average_gradients(replica, halves[rank // 2])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: value.detach() for name, value in replica.state_dict().items()}
    assert_close(dict(model.state_dict()), expected, **TOLERANCE, what="state_dict")
