"""``compare_with``: the first parameter, output or gradient in which a wrapped model leaves its replica."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_flat import compare_with
from fsdp_flat.errors import OptionError
from fsdp_flat.extras.compare import Difference
from tests.support import on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import BLOCKS, batch, square_loss, wrapped
from tests.support.models import Stack
from tests.support.steps import STRATEGIES, mesh_for


class Noisy(Stack):
    """Dropout, a block that runs twice, one that is recomputed, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.drop(self.first(x)))
        x = checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)
        return self.head(self.blocks[2](x))


def pair(use_orig_params: bool, strategy: Any = None) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    module = Noisy()
    groups = {} if strategy is None else {"sharding_strategy": strategy, **mesh_for(strategy)}
    model = wrapped(copy.deepcopy(module), auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params, **groups)
    return model, module


def run(model: nn.Module) -> None:
    square_loss(model, batch(dist.get_rank())).backward()


@ORIG_PARAMS
@on_ranks(2)
def test_equal_models_do_not_differ_and_keep_the_gradients_of_the_run(use_orig_params: bool) -> None:
    for strategy in STRATEGIES:
        model, plain = pair(use_orig_params, strategy)
        for _ in range(2):
            assert compare_with(model, plain, run) is None
        assert any(param.grad is not None for param in model.parameters())
        assert not any(child._forward_hooks for child in (*model.modules(), *plain.modules()))


def other_weights(model: Any) -> None:
    model.load_state_dict({name: value + 0.5 * ("1.down" in name) for name, value in model.state_dict().items()})


def other_output(model: Any) -> None:
    def add_on_second_call(module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        module.calls = getattr(module, "calls", 0) + 1
        return output + 1 if module.calls == 2 else output

    model.blocks[0].up.register_forward_hook(add_on_second_call)


def other_gradient(model: Any) -> None:
    def triple(_module: Any, _args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: 3 * grad)

    model.blocks[1].up.register_forward_hook(triple)


PLANTED: list[tuple[Callable[[Any], None], Difference]] = [
    (other_weights, Difference("parameter", "blocks.1.down.weight", 0, 0.5)),
    (other_output, Difference("output", "blocks.0.up", 1, 1.0)),
]


@ORIG_PARAMS
@on_ranks(2)
def test_the_first_tensor_that_differs_is_named(use_orig_params: bool) -> None:
    for plant, expected in PLANTED:
        model, plain = pair(use_orig_params)
        plant(model)
        found = compare_with(model, plain, run)
        assert found is not None
        assert (found.kind, found.name, found.call) == (expected.kind, expected.name, expected.call)
        assert found.largest == pytest.approx(expected.largest, rel=1e-4)
        text = str(found)
        assert f"{expected.kind}{' of call 1' if expected.call else ''} of {expected.name!r}" in text


@ORIG_PARAMS
@on_ranks(2)
def test_a_gradient_that_differs_is_named_by_the_module_that_comes_first_in_backward(use_orig_params: bool) -> None:
    model, plain = pair(use_orig_params)
    other_gradient(model)
    found = compare_with(model, plain, run)
    assert found is not None
    assert found.kind == "gradient"
    assert found.name in ("blocks.1.up.weight", "blocks.1.up.bias")

    model, plain = pair(use_orig_params)
    plain.blocks[2].register_forward_hook(lambda _module, args, _output: args[0].clone())
    found = compare_with(model, plain, run)
    assert found is not None
    assert (found.kind, found.name) == ("output", "blocks.2")


@on_ranks(2)
def test_two_plain_or_two_wrapped_models_are_refused() -> None:
    model, plain = pair(False)
    for first, second in ((plain, plain), (model, model)):
        with pytest.raises(OptionError, match="takes a wrapped model and a plain one"):
            compare_with(first, second, run)
