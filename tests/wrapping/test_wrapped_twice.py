"""A wrapper that is wrapped again: the outer one has no parameters of its own, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, StateDictType, register_fsdp_forward_method, unwrap
from fsdp_flat.wrap import ModuleWrapPolicy, enable_wrap, wrap
from tests.support import assert_equal, on_ranks
from tests.support.kit import square_loss
from tests.support.models import BufferedBlock, Model
from tests.support.wrapper_models import batch, seeded, whole_state

POLICY = ModuleWrapPolicy({BufferedBlock})


def wrapped(times: int, kind: Any = FSDP, **kwargs: Any) -> Any:
    model = kind(seeded(), auto_wrap_policy=POLICY if kind is FSDP else None, **kwargs)
    for _ in range(times - 1):
        model = kind(model, **kwargs)
    return model


def train(model: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        loss = square_loss(model, batch(dist.get_rank(), step))
        loss.backward()
        seen += [loss.item(), model.clip_grad_norm_(0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    model.optimizer = optimizer
    return seen


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
@on_ranks(2)
def test_it_trains_and_saves_as_if_wrapped_once(orig: bool, times: int) -> None:
    once, again = wrapped(1, use_orig_params=orig), wrapped(times, use_orig_params=orig)
    assert train(again) == train(once)
    for kind in StateDictType:
        with FSDP.state_dict_type(once, kind), FSDP.state_dict_type(again, kind):
            assert list(again.state_dict()) == list(once.state_dict())
            again.load_state_dict(again.state_dict())
    assert_equal(whole_state(again), whole_state(once))
    saved = [FSDP.optim_state_dict(model, model.optimizer) for model in (once, again)]
    assert_equal(saved[1], saved[0])
    again.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(again, again.optimizer, saved[0]))
    expected = whole_state(again)
    plain = unwrap(again)
    assert type(plain) is Model
    assert_equal(plain.state_dict(), expected)
    assert not any("_fsdp" in name or name == "_unit" for module in plain.modules() for name in module.__dict__)


@on_ranks(2)
def test_wrap_may_wrap_a_child_twice() -> None:
    plain = seeded()
    expected = plain.state_dict()
    with enable_wrap(wrapper_cls=FSDP, use_orig_params=True):
        plain.first = wrap(wrap(plain.first))
        model = FSDP(plain, use_orig_params=True)
    assert len(FSDP.fsdp_modules(model)) == 3
    assert_equal(whole_state(model), expected)
    train(model)


class Scaled(nn.Module):
    """Has an argument that must not be cast, and a second method that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, positions.dtype]
        return self.linear(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@on_ranks(2)
def test_uncast_inputs_and_registered_methods_are_those_of_the_module() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, uncast_inputs=("positions",))
    model = FSDP(FSDP(Scaled(), mixed_precision=precision), mixed_precision=precision)
    model(torch.ones(2, 3), torch.ones(2))
    assert model.seen == [torch.bfloat16, torch.float32]
    register_fsdp_forward_method(model, "generate")
    model.generate(torch.ones(2, 3)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
