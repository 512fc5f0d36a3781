"""A policy by size, a function or a policy object that chooses no module: a warning that lists the largest modules."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as peer
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, plan, wrap
from tests.support import on_ranks
from tests.support.models import Block, Stack

LOW = MixedPrecision(param_dtype=torch.bfloat16)
BLOCK, STACK = 289, 984


def never(module: nn.Module) -> bool:
    return False


def below(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A function of the user's that descends everywhere and chooses nothing."""
    return recurse


def policies(lib: types.ModuleType) -> dict[str, Any]:
    by_lambda = functools.partial(lib.lambda_auto_wrap_policy, lambda_fn=never)
    convolutions = lib.ModuleWrapPolicy({nn.Conv2d})
    return {
        # The list of blocks is large enough, and the policy leaves lists out.
        "size": functools.partial(lib.size_based_auto_wrap_policy, min_num_params=BLOCK + 1),
        "lambda": by_lambda,
        "custom": lib.CustomPolicy(never),
        "function": below,
        "or": functools.partial(lib._or_policy, policies=[convolutions, by_lambda]),
    }


@pytest.mark.parametrize("precision", [None, LOW])
@pytest.mark.parametrize("kind", policies(wrap))
def test_a_policy_that_chooses_nothing_is_a_warning_with_the_largest_modules(kind: str, precision: Any) -> None:
    for lib in (wrap, peer):
        with pytest.warns(UserWarning, match="auto_wrap_policy chooses no module below Stack") as caught:
            plan(Stack(), 2, auto_wrap_policy=policies(lib)[kind], mixed_precision=precision)
        (warning,) = caught
        text = str(warning.message)
        assert f"one unit of {STACK} elements" in text
        assert f"modules: 'blocks' (ModuleList) of {3 * BLOCK} elements, 'blocks.0' (Block) of {BLOCK} elements" in text
        assert warning.filename == __file__


@pytest.mark.parametrize("precision", [None, LOW])
@pytest.mark.parametrize(
    "policy",
    [
        # A model below the size that deserves a unit.
        functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=STACK + 1),
        functools.partial(peer.size_based_auto_wrap_policy),
        functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
        # The outermost unit is what the policy asks for.
        wrap.CustomPolicy(lambda module: isinstance(module, Stack)),
        lambda module, recurse, nonwrapped_numel: False,
    ],
)
def test_a_policy_that_chooses_a_module_or_the_whole_model_does_not_warn(policy: Any, precision: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(Stack(), 2, auto_wrap_policy=policy, mixed_precision=precision)


def test_a_model_of_one_layer_cannot_be_split_and_does_not_warn() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(model, 2, auto_wrap_policy=functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=never))


@on_ranks(2)
def test_the_constructor_warns_and_wraps_as_fsdp1_does() -> None:
    with pytest.warns(UserWarning, match="chooses no module below Stack"):
        model = FSDP(Stack(), auto_wrap_policy=wrap.CustomPolicy(never))
    assert FSDP.fsdp_modules(model) == [model]
