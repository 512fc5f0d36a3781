"""Pains 5 and 6: units of several dtypes, integers and scalars; frozen parameters that cost no gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.errors import OptionError
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import Block, Stack, square_loss, wrapped
from tests.support.steps import WIDTH, Twin, acquaint, recorded


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


@on_ranks(2, 4)
def test_a_unit_of_several_dtypes_with_integers_and_a_scalar_trains_as_the_reference() -> None:
    torch.manual_seed(5)
    twin = Twin.of(Mixed(), auto_wrap_policy=None, use_orig_params=True)
    assert len(twin.model._unit.param_groups) == 4
    with pytest.warns(UserWarning, match="'short.weight' of unit 'Mixed' is sharded in torch.bfloat16"):
        twin.step(atol=2e-2, rtol=2e-2)
    for _ in range(2):
        # bf16 sums over ranks round in another order than the reference's.
        twin.step(atol=2e-2, rtol=2e-2)


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
    twin = Twin.of(Adapted(), auto_wrap_policy=None, use_orig_params=True)
    twin.step()
    frozen, trainable = twin.model._unit.param_groups
    assert [param_info.fqn for param_info in frozen.layout.param_infos] == ["big.weight"]
    sizes: list[tuple[int, int]] = []
    on_grad_ready = trainable.grads.on_ready

    def spy() -> None:
        window = trainable.grads._buffer
        assert window is not None
        sizes.append((window.nbytes, 0 if frozen.grads._buffer is None else frozen.grads._buffer.nbytes))
        on_grad_ready()

    trainable.grads.on_ready = spy
    with recorded() as record:
        twin.step()
    assert sizes == [(64 * 2 * 4, 0)]
    reduced = [call.nbytes for call in record.calls if call.name == "reduction"]
    assert reduced == [64 * 2 * 4 // 2], "half of it goes to the other rank"
    assert not frozen.shown.num_trainable


@on_ranks(2)
def test_unfreezing_in_the_middle_of_a_run_equals_the_reference() -> None:
    twin = Twin.of(Adapted(), auto_wrap_policy=None, use_orig_params=True)
    twin.step()
    twin.step()
    twin.model.big.weight.requires_grad_(True)
    twin.plain.big.weight.requires_grad_(True)
    before = twin.plain.big.weight.detach().clone()
    for _ in range(3):
        twin.step()
    assert not torch.equal(before, twin.plain.big.weight), "the layer trains from here on"


@on_ranks(2)
def test_freezing_in_the_middle_of_a_run_equals_the_reference() -> None:
    twin = Twin.of(Stack(), use_orig_params=True)
    twin.step()
    for model in (twin.model, twin.plain):
        for name, param in model.named_parameters():
            if "blocks.1" in name.replace("_fsdp_wrapped_module.", ""):
                param.requires_grad_(False)
    for _ in range(2):
        twin.step()


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("frozen", [[0], [1], [0, 1, 2], [2]])
def test_wholly_frozen_units_anywhere_train_as_the_reference(use_orig_params: bool, frozen: list[int]) -> None:
    module = Stack()
    for index in frozen:
        module.blocks[index].requires_grad_(False)
    twin = Twin.of(module, use_orig_params=use_orig_params)
    for _ in range(2):
        twin.step()


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_wholly_frozen_model_gives_input_gradients_and_reduces_nothing(use_orig_params: bool) -> None:
    plain = Stack().requires_grad_(False)
    model = Twin.of(plain, use_orig_params=use_orig_params)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True)
    acquaint(model.model)
    with recorded() as record:
        square_loss(model.model, x).backward()
    ours, x.grad = x.grad, None
    square_loss(model.plain, x).backward()
    assert_close(ours, x.grad, rtol=1e-5, atol=1e-6)
    assert set(record.counts()) == {"gather"}
    assert all(param.grad is None for param in model.model.parameters())


@on_ranks(2)
def test_a_mixed_frozen_block_is_refused_without_original_parameters_by_name() -> None:
    module = Stack()
    module.blocks[1].up.requires_grad_(False)
    with pytest.raises(OptionError, match=r"blocks\.1") as caught:
        wrapped(module, auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block))
    assert "use_orig_params=True" in str(caught.value)
