"""A module that is sharded after a module around it: the text names the order, and nothing is said of ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, fully_shard
from fsdp_flat.errors import OptionError, TiedParameterError
from tests.support import assert_close, on_ranks
from tests.support.kit import seeded, square_loss
from tests.support.peer import PeerFSDP, peer_fsdp
from tests.support.wrapper_models import batch

FRONTS: dict[str, Callable[..., Any]] = {
    "flat": FSDP,
    "originals": lambda module: FSDP(module, use_orig_params=True),
    "fully_shard": fully_shard,
}
FRONT = pytest.mark.parametrize("inner", FRONTS)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


@FRONT
@pytest.mark.parametrize("outer", ["originals", "fully_shard"])
@on_ranks(2)
def test_an_inner_module_after_an_outer_one_is_told_of_the_order(outer: str, inner: str) -> None:
    model = seeded(small)
    FRONTS[outer](model)
    with pytest.raises(OptionError, match=r"part of unit 'Sequential' already.*its '0'. Shard inner") as caught:
        FRONTS[inner](model[1])
    assert not isinstance(caught.value, TiedParameterError)
    assert "unwrap" in str(caught.value)


@FRONT
@on_ranks(2)
def test_an_inner_module_after_one_with_a_flat_parameter_is_warned_of_and_trains_as_on_fsdp1(
    inner: str, rank: int
) -> None:
    mine, theirs = (kind(seeded(small)) for kind in (FSDP, peer_fsdp))
    with pytest.warns(UserWarning, match=r"part of unit 'Sequential' already.*has none of them"):
        mine.module[1] = FRONTS[inner](mine.module[1])
    theirs.module[1] = peer_fsdp(theirs.module[1])
    for model in (mine, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            square_loss(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    with PeerFSDP.summon_full_params(theirs):
        expected = theirs.module[0].weight.clone(), theirs.module[1].module[1].weight.clone()
    with FSDP.summon_full_params(mine):
        assert_close((mine.module[0].weight, list(mine.module[1].parameters())[2]), expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_modules_without_parameters_of_their_own_may_follow_the_outer_one() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(fully_shard(nn.Linear(4, 4))))
    fully_shard(model)
    fully_shard(model[1])
    fully_shard(model[2])
    square_loss(model, torch.ones(2, 3)).backward()


class SharedModule(nn.Module):
    """Two containers hold one layer, of which the first is wrapped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3))
        self.last = nn.Sequential(self.first[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


@on_ranks(2)
def test_a_layer_that_a_wrapped_part_shares_with_the_rest_trains_as_on_fsdp1(rank: int) -> None:
    grads = []
    for kind, strategy in ((FSDP, ShardingStrategy.SHARD_GRAD_OP), (peer_fsdp, peer_strategy())):
        model = seeded(SharedModule)
        options: dict[str, Any] = {"use_orig_params": True, "sharding_strategy": strategy}
        model.first = kind(model.first, **options)
        model = kind(model, **options)
        square_loss(model, batch(rank)).backward()
        with (FSDP if kind is FSDP else PeerFSDP).summon_full_params(model, with_grads=True):
            grads.append([param.grad.clone() for param in model.parameters()])
    assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def peer_strategy() -> Any:
    from torch.distributed.fsdp import ShardingStrategy as PeerStrategy

    return PeerStrategy.SHARD_GRAD_OP
