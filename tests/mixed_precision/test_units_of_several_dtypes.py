"""Pains 5 and 6: units of several dtypes, integers and scalars; frozen parameters that cost no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_flat.errors import OptionError
from tests.support import assert_close, assert_equal, kit, on_ranks
from tests.support.beside import CLOSE, WIDTH, WRAPPER_FRONTS, Beside, batch_of
from tests.support.kit import square_loss, wrapped
from tests.support.models import Stack
from tests.support.steps import acquaint, recorded


class Mixed(nn.Module):
    """fp32 and bf16 weights, packed bytes, a counter and a scalar, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.short = nn.Linear(WIDTH, 3, bias=False, dtype=torch.bfloat16)
        packed = torch.arange(WIDTH, dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.counter = nn.Parameter(torch.tensor(7), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scale * self.wide(x) + self.packed / self.counter
        return self.short(x.bfloat16()).float()


@pytest.mark.of_guards
@on_ranks(2, 4)
def test_a_unit_of_several_dtypes_with_integers_and_a_scalar_trains_as_the_reference() -> None:
    torch.manual_seed(5)
    # bf16 sums over ranks round in another order than the replica's.
    tolerance = {"atol": 2e-2, "rtol": 2e-2}
    beside = Beside(Mixed(), "originals", units=(), dtype=None, batch=kit.batch, tolerance=tolerance)
    assert len(beside.ours._unit.param_groups) == 4
    with pytest.warns(UserWarning, match="'short.weight' of unit 'Mixed' is sharded in torch.bfloat16"):
        beside.train()
    beside.train(num_steps=2)


@on_ranks(2)
def test_a_state_dict_of_mixed_dtypes_keeps_dtypes_and_shapes_to_the_bit() -> None:
    module = Mixed()
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    model = wrapped(module, use_orig_params=True)
    state = model.state_dict()
    assert_equal(dict(state), expected)
    assert state["scale"].shape == torch.Size([])
    model.load_state_dict(state)
    assert_equal(dict(model.state_dict()), expected)


@on_ranks(2)
def test_a_unit_of_several_dtypes_without_original_parameters_is_refused_with_names_and_dtypes() -> None:
    with pytest.raises(OptionError) as caught:
        wrapped(Mixed())
    text = str(caught.value)
    for part in ("'Mixed'", "torch.bfloat16", "'short.weight'", "torch.uint8", "'packed'", "use_orig_params=True"):
        assert part in text


class Adapted(nn.Module):
    """A big frozen layer and a small trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(64, 64, bias=False)
        self.big.weight.requires_grad_(False)
        self.small = nn.Linear(64, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(torch.tanh(self.big(x.repeat(1, 64 // WIDTH))))


@on_ranks(2)
def test_a_frozen_group_has_no_gradient_buffer_and_reduces_no_bytes() -> None:
    beside = Beside(Adapted(), "originals", units=())
    beside.train()
    frozen, trainable = beside.ours._unit.param_groups
    assert [param_info.fqn for param_info in frozen.layout.param_infos] == ["big.weight"]
    sizes: list[tuple[int, ...]] = []
    collect = trainable.grads.collect

    def spy() -> bool:
        held = [param.grad for group in (trainable, frozen) for param in group.output.params]
        sizes.append(tuple(0 if grad is None else grad.nbytes for grad in held))
        assert frozen.grads.waiting is None
        return collect()

    trainable.grads.collect = spy
    with recorded() as record:
        beside.train()
    assert sizes == [(64 * 2 * 8, 0), (0, 0)], "at the end of the unit's backward and of the whole"
    reduced = [call.nbytes for call in record.calls if call.name == "reduction"]
    assert reduced == [64 * 2 * 8 // 2], "half of it goes to the other rank"
    assert not frozen.slots.num_trainable


@on_ranks(2)
@WRAPPER_FRONTS
def test_a_wholly_frozen_model_gives_input_gradients_and_reduces_nothing(front: str) -> None:
    beside = Beside(Stack().requires_grad_(False), front)
    x = batch_of(0).requires_grad_()
    acquaint(beside.ours)
    with recorded() as record:
        square_loss(beside.ours, x).backward()
    ours, x.grad = x.grad, None
    square_loss(beside.plain, x).backward()
    assert_close(ours, x.grad, **CLOSE)
    assert set(record.counts()) == {"gather"}
    assert all(param.grad is None for param in beside.ours.parameters())
