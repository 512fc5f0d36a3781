"""Pain 14: ranks compare what they are about to shard, and fail or mend it together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.core import units_of
from fsdp_flat.errors import PeerFailureError, RankMismatchError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.kit import BLOCKS, full_params, mesh, seeded
from tests.support.models import Stack
from tests.support.steps import recorded


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Stack()
        change(module)
        return module

    return make


def renamed(module: Any) -> None:
    module.blocks[1].upward = module.blocks[1].up
    del module.blocks[1].up


other_shape = changed(lambda module: setattr(module.blocks[1], "up", nn.Linear(8, 16)))

# What the last rank has that the others have not: its model, its arguments, and words of the error.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "shape": (other_shape, {}, "'blocks.1.up.weight' of shape (16, 8)"),
    "name": (changed(renamed), {}, "blocks.1."),
    "dtype": (
        changed(lambda module: module.blocks[2].double()),
        {},
        "'blocks.2.up.weight' of shape (17, 8), torch.float64",
    ),
    "requires_grad": (
        changed(lambda module: module.blocks[0].requires_grad_(False)),
        {},
        "'blocks.0.up.weight' of shape (17, 8), torch.float32, requires_grad=False",
    ),
    "number": (lambda: Stack(num_blocks=4), {}, "unit 'blocks.3'"),
    "policy": (Stack, {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, "unit 'first'"),
    "views": (Stack, {"use_orig_params": True}, "use_orig_params=True"),
    "strategy": (Stack, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "SHARD_GRAD_OP"),
    "precision": (Stack, {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}, "torch.bfloat16"),
    "sync": (Stack, {"sync_module_states": True}, "sync_module_states"),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises_before_anything_is_sharded_if_one_rank_was_given_something_else(case: str) -> None:
    last = dist.get_world_size() - 1
    make, kwargs, text = CASES[case] if dist.get_rank() == last else (Stack, {}, CASES[case][2])
    module = make()
    before = dict(module.named_parameters())
    with pytest.raises(RankMismatchError) as caught:
        FSDP(module, **{"auto_wrap_policy": BLOCKS, **kwargs})
    assert text in str(caught.value)
    assert "First difference: rank 0 of the group has" in str(caught.value)
    assert f"rank {last} has" in str(caught.value)
    assert units_of(module) == []
    assert all(param is before[name] for name, param in module.named_parameters())


@on_ranks(4)
@pytest.mark.parametrize("odd_rank", [0, 1, 2, 3])
def test_every_rank_of_a_two_by_two_mesh_raises_if_one_rank_was_given_something_else(odd_rank: int) -> None:
    module = other_shape() if dist.get_rank() == odd_rank else Stack()
    two_by_two = mesh(2, 2)
    with pytest.raises(RankMismatchError, match=r"blocks\.1\.up\.weight"):
        FSDP(module, auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=two_by_two)


def failing_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    raise RuntimeError("no such block here")


@on_ranks(2, 4)
def test_a_policy_that_raises_on_one_rank_makes_every_rank_raise(rank: int) -> None:
    policy = failing_policy if rank == 1 else BLOCKS
    with pytest.raises(RuntimeError, match="no such block here") as caught:
        FSDP(Stack(), auto_wrap_policy=policy)
    if rank == 1:
        assert type(caught.value) is RuntimeError
    else:
        assert type(caught.value) is PeerFailureError
        assert "Rank 1 of the group failed" in str(caught.value)


def differing(rank: int) -> Stack:
    module = seeded()
    if rank == dist.get_world_size() - 1:
        with torch.no_grad():
            module.blocks[1].up.bias.add_(1.0)
            module.head.bias.add_(1.0)
    return module


@on_ranks(2, 4)
def test_differing_weights_give_one_warning_on_rank_zero_that_names_the_first_parameter(rank: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(differing(rank), auto_wrap_policy=BLOCKS)
    texts = [str(entry.message) for entry in caught]
    if rank == 0:
        assert len(caught) == 1, texts
        assert caught[0].category is UserWarning
        assert "'blocks.1.up.bias'" in texts[0]
        assert f"rank {dist.get_world_size() - 1} has another 'blocks.1.up.bias'" in texts[0]
        assert 'sync_module_states="auto"' in texts[0]
    else:
        assert texts == []


@on_ranks(2)
@pytest.mark.parametrize("where", [0, 4095, 4096, 8191, 8192, 9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_differing_element_anywhere_is_seen(where: int, dtype: torch.dtype, rank: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(100, 100, bias=False, dtype=dtype)
    if rank == 1:
        module.weight.data.view(-1)[where] += 1
    with pytest.raises(RankMismatchError, match="rank 1 has another 'weight'"):
        FSDP(module, sync_module_states="raise")


@on_ranks(2, 4)
@pytest.mark.parametrize("sync", ["auto", True])
def test_syncing_starts_every_rank_from_the_weights_of_rank_zero(sync: Any, rank: int) -> None:
    model = FSDP(differing(rank), auto_wrap_policy=BLOCKS, sync_module_states=sync)
    expected = {name: param.detach() for name, param in differing(-1).named_parameters()}
    assert_equal(full_params(model), expected)


@on_ranks(2)
def test_auto_moves_nothing_if_the_weights_are_equal() -> None:
    with recorded() as record:
        FSDP(Stack(), auto_wrap_policy=BLOCKS, sync_module_states="auto")
    assert record.count("broadcast") == 0
    assert all(call.nbytes <= 64 for call in record.calls)
    with recorded() as record:
        FSDP(Stack(), auto_wrap_policy=BLOCKS, sync_module_states=True)
    assert record.count("broadcast") == len(list(Stack().parameters()))


@on_ranks(4)
@pytest.mark.parametrize("odd_rank", [0, 1, 2, 3])
@pytest.mark.parametrize("sync", ["auto", True])
def test_syncing_on_a_two_by_two_mesh_starts_every_rank_from_the_weights_of_rank_zero(
    sync: Any, odd_rank: int, rank: int
) -> None:
    module = seeded()
    if rank == odd_rank:
        with torch.no_grad():
            module.head.weight.mul_(2.0)
    model = FSDP(
        module,
        auto_wrap_policy=BLOCKS,
        sync_module_states=sync,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh(2, 2),
    )
    plain = seeded()
    if odd_rank == 0:
        with torch.no_grad():
            plain.head.weight.mul_(2.0)
    assert_equal(full_params(model), {name: param.detach() for name, param in plain.named_parameters()})


@on_ranks(2, 4)
def test_raise_raises_on_every_rank_before_anything_is_sharded(rank: int) -> None:
    module = differing(rank)
    with pytest.raises(RankMismatchError, match=r"'blocks\.1\.up\.bias'"):
        FSDP(module, auto_wrap_policy=BLOCKS, sync_module_states="raise")
    assert units_of(module) == []
    assert all(param.dim() > 0 and not hasattr(param, "_fsdp_flattened") for param in module.parameters())
