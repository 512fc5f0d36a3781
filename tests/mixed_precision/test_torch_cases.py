"""The cases of torch's suite of mixed precision.

Covered: dtypes of parameters, inputs, outputs, buffers and gradients in forward and after backward for every
combination of ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``; ``keep_low_precision_grads``; nested units of
unlike precision with ``cast_forward_inputs`` and ``cast_root_forward_inputs``; batch norm that a policy leaves in
full precision; gradients of inputs; evaluation in full precision by the environment; ``summon_full_params`` and state
dicts; integer inputs; autocast; ignored modules; accumulation.

Not covered: gradients kept in low precision where ``param_dtype`` and ``reduce_dtype`` differ: torch leaves them in
the former, ours in the latter, as both document; the dtype on the wire, which torch's suite reads off a patched
collective (tests/comm has ours); the size of the low-precision shard; convolutional models on an accelerator.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import OWN_STATISTICS
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


PRECISIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "params": {"param_dtype": BF16},
    "params fp16": {"param_dtype": FP16},
    "reduce": {"reduce_dtype": BF16},
    "buffers": {"buffer_dtype": BF16},
    "params and wide reduce": {"param_dtype": BF16, "reduce_dtype": FP32},
    "params and buffers": {"param_dtype": BF16, "buffer_dtype": FP32},
    "all": {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16},
    "doubles": {"param_dtype": FP64, "reduce_dtype": FP64, "buffer_dtype": FP64},
}


@on_both_sides(tolerance=LOW)
@pytest.mark.parametrize("which", PRECISIONS)
def test_dtypes_in_forward_and_after_backward_are_those_asked_for(
    side: Side, layout: Layout, use_orig_params: bool, which: str
) -> Any:
    asked = PRECISIONS[which]
    model = model_of(side, layout, side.api.MixedPrecision(**asked), use_orig_params=use_orig_params)
    optimizer = sgd(model)
    outputs = []
    for index in range(2):
        optimizer.zero_grad()
        output = model(x_of(index))
        outputs.append(output.detach())
        output.float().square().mean().backward()
        assert grad_dtypes(model) == {FP32}
        optimizer.step()
    assert {param.dtype for param in model.parameters()} == {FP32}
    assert output.dtype == asked.get("param_dtype", FP32)
    state = state_of(model)
    assert {value.dtype for value in state.values()} == {FP32}
    return {"seen": notes(model), "outputs": outputs, "state": state}


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


class Normed(nn.Module):
    """A linear layer and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.linear(x)))


@OWN_STATISTICS
@on_both_sides(layouts=SHARDED, tolerance=LOW)
@pytest.mark.parametrize("ignored", ["batch norm", "layer", "both"])
def test_a_policy_leaves_named_classes_in_full_precision(
    side: Side, layout: Layout, use_orig_params: bool, ignored: str
) -> Any:
    classes = {
        "batch norm": (nn.modules.batchnorm._BatchNorm,),
        "layer": (nn.LayerNorm,),
        "both": (nn.modules.batchnorm._BatchNorm, nn.LayerNorm),
    }[ignored]
    precision = side.api.MixedPrecision(
        param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16, _module_classes_to_ignore=classes
    )
    torch.manual_seed(1)
    inner = nn.Sequential(Normed(), nn.LayerNorm(2))
    inner[0].norm = nn.BatchNorm1d(4) if ignored != "layer" else nn.Identity()
    with pytest.warns(UserWarning, match="(?s).*"):
        model = side.wrap(inner, layout, units=(Normed,), mixed_precision=precision, use_orig_params=use_orig_params)
    kinds = [[type(unit.module).__name__, str(unit.mixed_precision.param_dtype)] for unit in side.units(model)]
    output = model(x_of())
    output.float().sum().backward()
    return {"units": kinds, "output": output.detach(), "grads": sorted(map(str, grad_dtypes(model)))}


@on_both_sides(layouts=SHARDED, tolerance=LOW)
@pytest.mark.parametrize("full", [True, False], ids=["full in eval", "low in eval"])
def test_evaluation_may_be_in_full_precision(side: Side, layout: Layout, use_orig_params: bool, full: bool) -> Any:
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1" if full else "0"
    try:
        precision = side.api.MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
        model = model_of(side, layout, precision, use_orig_params=use_orig_params)
        outputs = []
        for mode in ("train", "eval", "train", "eval"):
            getattr(model, mode)()
            outputs.append(model(x_of()))
            if mode == "train":
                outputs[-1].float().sum().backward()
                model.zero_grad()
        assert [out.dtype for out in outputs] == [BF16, FP32 if full else BF16] * 2
        return {"seen": notes(model), "outputs": [out.detach() for out in outputs]}
    finally:
        del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]


@on_both_sides(layouts=PLAIN, tolerance=LOW)
def test_whole_parameters_and_state_dicts_are_in_full_precision(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    precision = side.api.MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
    model = model_of(side, layout, precision, use_orig_params=use_orig_params)
    model(x_of()).float().sum().backward()
    with side.FSDP.summon_full_params(model):
        params = [param.detach().clone() for param in model.parameters()]
        buffers = sorted({str(buffer.dtype) for buffer in model.buffers()})
    assert {param.dtype for param in params} == {FP32}
    state = state_of(model)
    assert {value.dtype for value in state.values()} == {FP32}
    model.load_state_dict(state)
    model(x_of())
    return {"params": params, "buffers": buffers, "state": state, "seen": notes(model)}


@on_both_sides(layouts=SHARDED, tolerance=LOW)
def test_integer_inputs_stay_integers(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Embedding(7, 4), Noting())
    precision = side.api.MixedPrecision(param_dtype=BF16)
    model = side.wrap(inner, layout, units=(Noting,), mixed_precision=precision, use_orig_params=use_orig_params)
    output = model(torch.tensor([[1, 2], [3, 6]]))
    output.float().sum().backward()
    sgd(model).step()
    return {"seen": notes(model), "output": output.detach(), "state": state_of(model)}


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


@on_both_sides(layouts=SHARDED, tolerance=LOW)
def test_ignored_modules_stay_in_full_precision(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    torch.manual_seed(1)
    inner = nn.Sequential(Noting(), Noting())
    precision = side.api.MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    model = side.wrap(
        inner, layout, ignored_modules=[inner[1]], mixed_precision=precision, use_orig_params=use_orig_params
    )
    output = model(x_of())
    output.float().sum().backward()
    return {"seen": notes(model), "output": output.detach(), "state": state_of(model)}


@on_both_sides(layouts=PLAIN, tolerance=LOW)
@pytest.mark.parametrize("keep", [True, False], ids=["kept low", "full"])
def test_accumulated_gradients_have_one_dtype(side: Side, layout: Layout, use_orig_params: bool, keep: bool) -> Any:
    precision = side.api.MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, keep_low_precision_grads=keep)
    model = model_of(side, layout, precision, use_orig_params=use_orig_params)
    for index in range(2):
        model(x_of(index)).float().square().mean().backward()
    dtypes = grad_dtypes(model)
    assert dtypes == {BF16 if keep else FP32}
    norm = model.clip_grad_norm_(1e4).float()
    return [norm, sorted(map(str, dtypes))]


@on_both_sides(tolerance=LOW)
@pytest.mark.parametrize("name", ["transformer", "uneven sizes", "frozen middle unit", "unit used three times"])
def test_models_of_every_kind_train_in_bf16(side: Side, layout: Layout, use_orig_params: bool, name: str) -> Any:
    case = CASES[name]
    precision = side.api.MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    model = side.wrap(build(case), layout, units=case.units, mixed_precision=precision, use_orig_params=use_orig_params)
    return [train(model, case, sgd(model), range(2)), state_of(model)]
