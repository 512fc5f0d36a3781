"""Mistakes that would pass in silence: policies and groups that choose nothing, ties that are cut."""

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
from fsdp_flat import MixedPrecision, plan, whole_shape, wrap
from fsdp_flat.errors import OptionError, TiedParameterError
from fsdp_flat.wrap import always_wrap_policy
from tests.support import assert_close, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import full_grads, square_loss, train_on
from tests.support.models import Block, Stack
from tests.support.wrapper_models import batch, message, seeded, shard

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


class TiedInList(nn.Module):
    """Two layers of a list, and a list of parameters, that share a weight; lists have no forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.layers[1].weight = self.layers[0].weight
        self.scales = nn.ParameterList([torch.ones(3), torch.ones(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales):
            x = layer(x) * scale
        return x


@ORIG_PARAMS
@on_ranks(2)
def test_a_tie_between_an_ignored_module_and_one_wrapped_by_hand_is_refused(use_orig_params: bool, rank: int) -> None:
    def tied() -> nn.Module:
        model = seeded()
        model.last = nn.Linear(5, 3, bias=False)
        model.last.weight = nn.Parameter(model.first.weight.detach().T.clone())
        model.first = nn.Linear(5, 3, bias=False)
        model.first.weight = model.last.weight
        return model

    model = tied()
    model.last = FSDP(model.last, use_orig_params=use_orig_params)
    text = message(
        TiedParameterError,
        ValueError,
        lambda: FSDP(model, ignored_modules=[model.first], use_orig_params=use_orig_params),
    )
    assert "'first.weight' of an ignored module" in text
    assert "'weight' (3, 5) of unit 'Linear'" in text
    # Ignored in both calls, or in the only one, the tie is kept.
    model = tied()
    model.last = FSDP(model.last, ignored_states=[model.last.weight], use_orig_params=use_orig_params)
    FSDP(model, ignored_modules=[model.first], use_orig_params=use_orig_params)
    assert model.first.weight is model.last.module.weight


@ORIG_PARAMS
@on_ranks(2)
def test_parameters_of_lists_go_to_a_unit_that_runs(use_orig_params: bool, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no forward")
        model = FSDP(TiedInList(), auto_wrap_policy=always_wrap_policy, use_orig_params=use_orig_params)
    plain = TiedInList()
    square_loss(model, batch(0)).backward()
    square_loss(plain, batch(0)).backward()
    assert_close(full_grads(model), {name: p.grad for name, p in plain.named_parameters()}, rtol=1e-5, atol=1e-6)


@pytest.mark.of_guards
@ORIG_PARAMS
@on_ranks(2)
def test_groups_by_number_of_dims_that_find_nothing_are_named_at_the_first_step(
    use_orig_params: bool, rank: int
) -> None:
    def grouped(model: nn.Module, is_weight: Any) -> torch.optim.Optimizer:
        params = list(model.parameters())
        decayed = [param for param in params if is_weight(param)]
        others = [param for param in params if not is_weight(param)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups)

    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = grouped(model, lambda param: param.dim() >= 2)
    bystander = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    train_on(model, bystander, [batch(rank)])
    with pytest.warns(UserWarning, match=r"group of AdamW is empty.*whole_shape"):
        optimizer.step()
    optimizer.step()
    if not use_orig_params:
        assert "use_orig_params=True" in message(OptionError, ValueError, lambda: grouped(model, whole_shape))
        return
    model = shard(seeded(), use_orig_params=True)
    optimizer = grouped(model, lambda param: len(whole_shape(param)) >= 2)
    train_on(model, optimizer, [batch(rank)])
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 4]
    assert whole_shape(torch.ones(2, 3)) == (2, 3)
