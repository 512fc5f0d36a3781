"""``process_group=`` an object with ``rank()`` and ``size()`` wraps a module tree, as tests of policies need it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import UsageError
from fsdp_flat.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    wrap,
)
from tests.support.kit import no_shard_allowed


class Simulated:
    """What torch's tests of wrapping pass."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


POLICIES: dict[str, Any] = {
    "none": None,
    "classes": ModuleWrapPolicy({nn.Linear}),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=30),
    "always": always_wrap_policy,
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
    "custom": CustomPolicy(lambda module: isinstance(module, nn.Linear)),
}


def wrapped_names(model: nn.Module) -> list[str]:
    return [name.replace("_fsdp_wrapped_module.", "") for name, each in model.named_modules() if isinstance(each, FSDP)]


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_wrap_without_an_initialised_group(policy: str, size: int, use_orig_params: bool) -> None:
    assert not dist.is_initialized()
    with no_shard_allowed():
        model = FSDP(
            made(), Simulated(size - 1, size), auto_wrap_policy=POLICIES[policy], use_orig_params=use_orig_params
        )
    expected = {"none": [""], "always": ["", "0", "1", "1.0", "1.1"]}.get(policy, ["", "0", "1.0", "1.1"])
    assert wrapped_names(model) == expected
    assert (model.rank, model.world_size) == (size - 1, size)
    held = sum(param.numel() for param in model.parameters())
    assert held == 90 if size == 1 else held < 90


@pytest.mark.parametrize("strategy", [each for each in ShardingStrategy if "HYBRID" not in each.name])
def test_other_arguments_are_taken_too(strategy: ShardingStrategy) -> None:
    with (
        no_shard_allowed(),
        enable_wrap(
            wrapper_cls=FSDP,
            process_group=Simulated(0, 2),
            sharding_strategy=strategy,
            cpu_offload=CPUOffload(offload_params=True),
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,
            mixed_precision=MixedPrecision(torch.bfloat16),
        ),
    ):
        model = wrap(nn.Sequential(wrap(nn.Linear(5, 5)), nn.Linear(5, 5)))
    assert wrapped_names(model) == ["", "0"]


def test_hybrid_strategies_take_two_of_them() -> None:
    groups = Simulated(1, 2), Simulated(0, 4)
    model = FSDP(made(), groups, ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=POLICIES["classes"])
    assert wrapped_names(model) == ["", "0", "1.0", "1.1"]
    assert (model.rank, model.world_size) == (1, 2)


def test_a_step_says_that_the_group_cannot_communicate() -> None:
    model = FSDP(made(), Simulated(0, 2))
    with pytest.raises(UsageError, match=r"is a Simulated, which .* cannot communicate"):
        model(torch.ones(2, 5))
