"""Models are wrapped and called inside of torch.inference_mode(), and trained after it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import assert_close, on_ranks
from tests.support.beside import APPLY, FRONTS
from tests.support.kit import full_grads
from tests.support.models import Block, Stack

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


@FRONTS
@on_ranks(2)
def test_a_model_that_is_wrapped_inside_inference_mode_trains_after_it(front: str) -> None:
    torch.manual_seed(0)
    plain, x = Stack(), torch.randn(3, 8)
    model = copy.deepcopy(plain)
    with torch.inference_mode():
        model = APPLY[front](model)
        assert_close(model(x), plain(x), **CLOSE)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert_close(full_grads(model), {name: param.grad for name, param in plain.named_parameters()}, **CLOSE)


@pytest.mark.parametrize("front", ["originals", "fully_shard"])
@on_ranks(2)
def test_a_parameter_that_was_created_inside_inference_mode_is_named(front: str) -> None:
    with torch.inference_mode():
        model: nn.Module = Block()
        with pytest.raises(ValueError, match=r"Parameter '.*weight' of unit .* inside torch\.inference_mode\(\)"):
            APPLY[front](model)
