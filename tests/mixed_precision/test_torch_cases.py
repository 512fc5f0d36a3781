"""Cases of torch's suite of mixed precision that are tested nowhere else.

Not covered: gradients kept in low precision where ``param_dtype`` and ``reduce_dtype`` differ: torch leaves them in
the former, ours in the latter, as both document.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.both_sides import PLAIN, Layout, build
from tests.support.torch_and_ours import ORIG, SHARDED, Side, on_both_sides, sgd, state_of, train
from tests.support.transport import mesh_type
from tests.support.zoo import CASES

LOW = {"rtol": 2e-2, "atol": 2e-2}
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Noting(nn.Module):
    """A layer with a buffer that notes the dtypes it sees in forward."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.register_buffer("shift", torch.linspace(0, 1, width))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append([str(t.dtype) for t in (x, self.linear.weight, self.shift)])
        return self.linear(x.to(self.linear.weight.dtype)) + self.shift.to(self.linear.weight.dtype)


def model_of(side: Side, layout: Layout | None, precision: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    inner = nn.Sequential(Noting(), Noting())
    return side.wrap(inner, layout, units=(Noting,), mixed_precision=precision, **options)


def notes(model: nn.Module) -> list[Any]:
    return [module.seen for module in model.modules() if isinstance(module, Noting)]


def x_of(index: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))


def grad_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {param.grad.dtype for param in model.parameters() if param.grad is not None and param.numel() > 0}


@on_both_sides(layouts=PLAIN, tolerance=LOW)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gradients_may_stay_in_low_precision(
    side: Side, layout: Layout, use_orig_params: bool, dtype: torch.dtype
) -> Any:
    precision = side.api.MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, keep_low_precision_grads=True)
    model = model_of(side, layout, precision, use_orig_params=use_orig_params)
    model(x_of()).float().square().mean().backward()
    dtypes = grad_dtypes(model)
    assert dtypes == {dtype}
    norm = model.clip_grad_norm_(1e4)
    for param in model.parameters():
        param.grad = None
    return {"norm": norm, "state": state_of(model)}


@on_both_sides(layouts=SHARDED, tolerance=LOW)
@pytest.mark.parametrize("root_casts", [True, False], ids=["root casts", "root does not"])
@pytest.mark.parametrize("units_cast", [True, False], ids=["units cast", "units do not"])
def test_units_of_their_own_precision_cast_their_inputs_if_asked(
    side: Side, layout: Layout, use_orig_params: bool, root_casts: bool, units_cast: bool
) -> Any:
    torch.manual_seed(1)
    inner = nn.Sequential(Noting(), Noting(), nn.Linear(4, 2))
    low = side.api.MixedPrecision(param_dtype=BF16, cast_forward_inputs=units_cast)
    full = side.api.MixedPrecision(param_dtype=FP32, cast_forward_inputs=units_cast)
    inner[0] = side.wrap(inner[0], layout, mixed_precision=low, use_orig_params=use_orig_params)
    inner[1] = side.wrap(inner[1], layout, mixed_precision=full, use_orig_params=use_orig_params)
    root = side.api.MixedPrecision(param_dtype=FP32, cast_root_forward_inputs=root_casts)
    model = side.wrap(inner, layout, mixed_precision=root, use_orig_params=use_orig_params)
    try:
        model(x_of().double()).float().sum().backward()
    except RuntimeError:  # the last layer refuses a dtype that nobody cast
        return [notes(model), "dtypes do not fit"]
    return [notes(model), sorted(map(str, grad_dtypes(model)))]


@on_both_sides(layouts=SHARDED, kinds=ORIG)
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_inputs_get_gradients_of_their_own_dtype(
    side: Side, layout: Layout, use_orig_params: bool, dtype: torch.dtype
) -> Any:
    model = model_of(side, layout, side.api.MixedPrecision(param_dtype=dtype), use_orig_params=use_orig_params)
    x = x_of().requires_grad_()
    model(x).float().sum().backward()
    assert x.grad.dtype == FP32
    return {"seen": notes(model)}


@on_both_sides(layouts=SHARDED, tolerance=LOW)
@pytest.mark.parametrize("kind", ["autocast alone", "both"])
def test_autocast_goes_with_it(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    precision = side.api.MixedPrecision(param_dtype=BF16) if kind == "both" else None
    model = model_of(side, layout, precision, use_orig_params=use_orig_params)
    with torch.autocast(mesh_type(), dtype=BF16):
        output = model(x_of())
        loss = output.float().square().mean()
    loss.backward()
    assert grad_dtypes(model) == {FP32}
    sgd(model).step()
    return {"seen": notes(model), "loss": loss.detach(), "state": state_of(model)}


@on_both_sides(layouts=SHARDED, tolerance=LOW)
def test_steps_inside_one_autocast_region_compute_with_new_weights(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    model, losses = model_of(side, layout, None, use_orig_params=use_orig_params), []
    with torch.autocast(mesh_type(), dtype=BF16):
        for _ in range(3):
            loss = model(x_of()).float().square().mean()
            loss.backward()
            sgd(model).step()
            losses.append(loss.detach())
    assert losses[0] != losses[2]
    return {"losses": losses, "state": state_of(model)}


@on_both_sides(tolerance=LOW)
@pytest.mark.parametrize("name", ["transformer", "uneven sizes", "frozen middle unit", "unit used three times"])
def test_models_of_every_kind_train_in_bf16(side: Side, layout: Layout, use_orig_params: bool, name: str) -> Any:
    case = CASES[name]
    precision = side.api.MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    model = side.wrap(build(case), layout, units=case.units, mixed_precision=precision, use_orig_params=use_orig_params)
    return [train(model, case, sgd(model), range(2)), state_of(model)]
