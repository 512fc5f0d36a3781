"""Batch norm under mixed precision: in full precision, or a warning or an error with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision
from fsdp_flat.errors import OptionError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import OWN_STATISTICS, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import seeded

BF16, FP32 = torch.bfloat16, torch.float32

pytestmark = OWN_STATISTICS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 1)
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.bn(self.conv(x)).relu().mean(-1))


def trained(model: Any, rank: int) -> dict[str, torch.Tensor]:
    """Parameters and running statistics after some steps, and the last output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        out = model(torch.randn(6, 2, 3, generator=generator))
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    bn = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    assert bn.running_mean.dtype == FP32
    return {**{k: v.detach().clone() for k, v in model.state_dict().items()}, "out": out.detach()}


def by_hand(net: Net, **kwargs: Any) -> FSDP:
    for name in ("conv", "bn", "head"):
        setattr(net, name, FSDP(getattr(net, name), **kwargs))
    return FSDP(net, **kwargs)


@on_ranks(2)
@pytest.mark.parametrize("wrap", [FSDP, by_hand])
def test_batch_norm_without_a_policy_trains_as_the_one_that_a_policy_keeps_in_full_precision(
    wrap: Any, rank: int
) -> None:
    kinds = (True,) if wrap is FSDP else (True, False)
    for buffer_dtype in (None, torch.float16):
        precision = MixedPrecision(param_dtype=BF16, buffer_dtype=buffer_dtype)
        policy = ModuleWrapPolicy({nn.Conv1d})
        with pytest.warns(UserWarning, match="BatchNorm1d"):
            reference = FSDP(seeded(Net), auto_wrap_policy=policy, mixed_precision=precision, use_orig_params=True)
        expected = trained(reference, rank)
        for use_orig_params in kinds:
            with pytest.warns(UserWarning, match=r"Batch norm '(bn)?' of unit .* stays in full precision"):
                model = wrap(seeded(Net), mixed_precision=precision, use_orig_params=use_orig_params)
            assert_equal(trained(model, rank), expected)


@on_ranks(2)
def test_batch_norm_cannot_be_part_of_a_flat_parameter_in_low_precision() -> None:
    precision = MixedPrecision(param_dtype=BF16)
    with (
        pytest.warns(UserWarning, match="Batch norm 'bn' of unit 'Net' stays in full precision"),
        pytest.raises(OptionError, match=r"full precision: 'bn.weight', 'bn.bias'.*use_orig_params=True"),
    ):
        FSDP(seeded(Net), mixed_precision=precision)
    # Without parameters, or asked for, nothing is said.
    net = seeded(Net)
    net.bn = nn.BatchNorm1d(4, affine=False)
    assert trained(FSDP(net, mixed_precision=precision), 0)["out"].dtype == BF16


@ORIG_PARAMS
@on_ranks(2)
def test_running_statistics_in_bf16_are_warned_of_and_may_be_asked_for(use_orig_params: bool, rank: int) -> None:
    low = {"param_dtype": BF16, "buffer_dtype": BF16}
    with pytest.warns(UserWarning, match=r"Batch norm 'bn' of unit 'Net' updates its running statistics in .*bfloat16"):
        model = FSDP(seeded(Net), mixed_precision=MixedPrecision(**low), use_orig_params=use_orig_params)
    x = torch.randn(6, 2, 3)
    model(x)
    asked = MixedPrecision(**low, _module_classes_to_ignore=())
    as_asked = FSDP(seeded(Net), mixed_precision=asked, use_orig_params=use_orig_params)
    as_asked(x)
    assert model.module.bn.running_mean.dtype == as_asked.module.bn.running_mean.dtype == BF16
    assert torch.equal(model.module.bn.running_mean, as_asked.module.bn.running_mean)


@on_ranks(2)
def test_modules_in_full_precision_keep_their_buffers_too(rank: int) -> None:
    precision = MixedPrecision(
        param_dtype=BF16, buffer_dtype=BF16, full_precision_modules=(nn.BatchNorm1d,), _module_classes_to_ignore=()
    )
    model = FSDP(seeded(Net), mixed_precision=precision, use_orig_params=True)
    found = trained(model, rank)
    assert found["out"].dtype == BF16
    assert model.module.bn.running_var.dtype == FP32
