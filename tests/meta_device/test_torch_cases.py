"""Cases of torch's suite of the meta device that are tested nowhere else: units nested by hand, mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.both_sides import Layout
from tests.support.torch_and_ours import SHARDED, Side, on_both_sides, sgd, state_of
from tests.support.transport import rank_device


class Filled(nn.Linear):
    """A linear whose initial weights depend on its shape alone."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, self.weight.numel()).reshape(self.weight.shape))
            self.bias.fill_(0.5)


class WithBuffer(nn.Module):
    """A layer, and a parameter and a buffer of its own."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.layer = Filled(5, 5, device=device)
        self.gain = nn.Parameter(torch.empty(5, device=device))
        self.register_buffer("table", torch.empty(5, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.fill_(2.0)
            self.table.copy_(torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.gain + self.table


def stack(device: str | None = None) -> nn.Sequential:
    return nn.Sequential(WithBuffer(device), Filled(5, 3, device=device), nn.ReLU(), Filled(3, 1, device=device))


def fill(module: nn.Module) -> None:
    """Materialise, then initialise, as torch's documentation has it for ``param_init_fn``."""
    if any(tensor.is_meta for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]):
        module.to_empty(device=rank_device(), recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


HOW = {"reset_parameters": None, "param_init_fn": fill}


def end_of(model: nn.Module) -> Any:
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    before = state_of(model)
    optimizer = sgd(model)
    loss = model(torch.ones(2, 5) + dist.get_rank()).square().mean()
    loss.backward()
    optimizer.step()
    return [before, loss.detach(), state_of(model)]


@on_both_sides()
@pytest.mark.parametrize("how", HOW)
def test_units_on_meta_can_be_nested_by_hand(side: Side, layout: Layout, use_orig_params: bool, how: str) -> Any:
    options: dict[str, Any] = {"param_init_fn": HOW[how], "use_orig_params": use_orig_params}
    model = stack("meta")
    model[0].layer = side.wrap(model[0].layer, layout, **options)
    model[0] = side.wrap(model[0], layout, **options)
    return end_of(side.wrap(model, layout, **options))


@on_both_sides(layouts=SHARDED, tolerance={"rtol": 1e-2, "atol": 1e-2})
@pytest.mark.parametrize("how", HOW)
def test_meta_goes_with_mixed_precision(side: Side, layout: Layout, use_orig_params: bool, how: str) -> Any:
    precision = side.api.MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    model = side.wrap(
        stack("meta"),
        layout,
        units=(WithBuffer,),
        param_init_fn=HOW[how],
        mixed_precision=precision,
        use_orig_params=use_orig_params,
    )
    before = state_of(model)
    loss = model(torch.ones(2, 5)).float().square().mean()
    loss.backward()
    sgd(model).step()
    return [before, loss.detach(), state_of(model)]
