"""What MixedPrecision has beyond FSDP1: fp32 masters, modules in full precision, inputs that are not cast."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as peer_library
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision
from fsdp_flat.composable import trace
from fsdp_flat.core.casts import keep_full_precision
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close, on_ranks
from tests.support.beside import ORIG_PARAMS, average_gradients
from tests.support.kit import full_params, seeded
from tests.support.peer import peer_fsdp
from tests.support.rank_tests import OWN_PARAMETERS
from tests.support.surface_models import (
    ALL_STRATEGIES,
    assert_near,
    batches,
    count_events,
    grads_or_zeros,
    sharded,
    small_model,
)

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")


# ------------------------------------------------------------------------------------------------------ fp32 masters


def ones_in_bf16() -> nn.Linear:
    model = nn.Linear(8, 3).to(BF16)
    nn.init.ones_(model.weight)
    return model


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_small_steps_move_bf16_weights_that_have_fp32_masters(strategy: str, use_orig_params: bool, rank: int) -> None:
    precision = MixedPrecision(master_dtype=FP32)
    model = sharded(ones_in_bf16(), strategy, classes=(), use_orig_params=use_orig_params, mixed_precision=precision)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(200):
        output = model(torch.ones(2, 8, dtype=BF16))
        output.float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert output.dtype == BF16
    assert {param.dtype for param in model.parameters()} == {FP32}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {FP32}
    moved = (1 - full_params(model)["weight"]).abs()
    assert moved.min() > 0.015
    assert moved.max() < 0.025
    # What is gathered for compute is the master, rounded: it has moved as well.
    assert output.float().mean().item() < 8 * 0.99 + 0.4


@pytest.mark.of_guards
@on_ranks(2)
def test_small_steps_are_lost_in_pure_bf16_and_a_warning_says_so_exactly_once(rank: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(ones_in_bf16(), nn.Linear(3, 8).to(BF16), ones_in_bf16())
    model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(80):  # which are two of the least differences of bf16 below 1
            model(torch.ones(2, 8, dtype=BF16)).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    texts = [str(warning.message) for warning in caught if "master_dtype" in str(warning.message)]
    assert len(texts) == 1
    assert "torch.bfloat16" in texts[0]
    assert "'" in texts[0].split(" of unit ")[0], "the parameter is named"
    assert caught[[str(w.message) for w in caught].index(texts[0])].category is UserWarning
    assert torch.equal(full_params(model)["0.weight"], torch.ones(3, 8, dtype=BF16))


@pytest.mark.parametrize("frozen", [True, False])
@on_ranks(2)
def test_no_warning_where_nothing_trainable_is_short(frozen: bool, rank: int) -> None:
    layers = nn.Sequential(nn.Linear(4, 4).to(BF16 if frozen else FP32).requires_grad_(not frozen), nn.Linear(4, 2))
    layers[1].to(layers[0].weight.dtype)
    precision = MixedPrecision(master_dtype=FP32 if frozen else None, param_dtype=None if frozen else BF16)
    model = FSDP(layers, use_orig_params=True, mixed_precision=precision)
    model(torch.ones(2, 4, dtype=BF16)).float().sum().backward()  # every warning is an error here
    dtypes = {name.rsplit("_module.")[-1]: param.dtype for name, param in model.named_parameters()}
    # What is frozen takes no steps, so it gets no masters and stays as short as it was.
    assert dtypes["0.weight"] == (BF16 if frozen else FP32)
    assert dtypes["1.weight"] == FP32


@ORIG_PARAMS
@on_ranks(2)
def test_masters_compute_as_the_bf16_model_does(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    model = sharded(
        small_model().to(BF16),
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(master_dtype=FP32, reduce_dtype=FP32),
    )
    plain = small_model().to(BF16)
    x = batches(num_ranks).to(BF16)
    output = model(x[rank])
    assert_near(output.detach(), plain(x[rank]).detach(), 1e-6, "output")
    output.float().pow(2).mean().backward()
    plain(x[rank]).float().pow(2).mean().backward()
    average_gradients(plain)
    expected = {name: param.grad.float() for name, param in plain.named_parameters() if param.grad is not None}
    assert_near(grads_or_zeros(model), expected, 1e-2, "gradients")


@ORIG_PARAMS
@pytest.mark.parametrize("in_full", [False, True], ids=["bf16 of fp32 masters", "fp32 of an evaluation"])
@on_ranks(2)
def test_compute_stays_in_its_dtype_when_the_shards_move(in_full: bool, use_orig_params: bool, rank: int) -> None:
    given, precision = (
        (FP32, MixedPrecision(param_dtype=BF16)) if in_full else (BF16, MixedPrecision(master_dtype=FP32))
    )
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = str(int(in_full))
    model = sharded(
        small_model().to(given), classes=(), use_orig_params=use_orig_params, mixed_precision=precision
    ).train(not in_full)
    del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    x = batches(2)[rank].to(given)
    before, state = model(x), model.state_dict()
    model.to_empty(device="cpu").load_state_dict(state)
    after = model(x)
    assert before.dtype == after.dtype == given
    assert torch.equal(before, after)
    assert model.double()(x.double()).dtype == torch.float64, "a conversion sets it for both"


@ORIG_PARAMS
@on_ranks(2)
def test_masters_are_saved_and_loaded_without_losing_bits(use_orig_params: bool, rank: int) -> None:
    model = FSDP(ones_in_bf16(), use_orig_params=use_orig_params, mixed_precision=MixedPrecision(master_dtype=FP32))
    weight = 1 + torch.arange(24, dtype=FP32).reshape(3, 8) * 2**-14  # below bf16's resolution at 1
    model.load_state_dict({"weight": weight, "bias": torch.zeros(3)})
    assert torch.equal(model.state_dict()["weight"], weight)


# ---------------------------------------------------------------------------------------- modules in full precision


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
@on_ranks(2)
def test_norms_stay_in_fp32_and_are_gathered_with_their_unit(strategy: str, rank: int, num_ranks: int) -> None:
    plain = small_model()
    seen: dict[str, set[torch.dtype]] = {}
    for name in ("norm", "up"):
        layer = getattr(plain[1], name)

        def note(module: Any, _args: Any, output: torch.Tensor, name: str = name) -> None:
            seen.setdefault(f"{name} weight", set()).add(module.weight.dtype)
            seen.setdefault(f"{name} output", set()).add(output.dtype)

        layer.register_forward_hook(note)
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, full_precision_modules=(nn.LayerNorm,))
    model = sharded(plain, strategy, use_orig_params=True, mixed_precision=precision)
    model[1].norm.register_forward_pre_hook(lambda _m, args: seen.setdefault("norm input", set()).add(args[0].dtype))
    x = batches(num_ranks)[rank]
    with trace(model) as events:
        output = model(x)
        needs_all_gather = count_events(events, "unshard")
    output.float().pow(2).mean().backward()
    assert seen["norm weight"] == seen["norm output"] == {FP32}  # the hook ran before the outputs were cast back
    assert seen["norm input"] == {FP32}
    assert seen["up weight"] == seen["up output"] == {BF16}
    assert set(needs_all_gather.values()) == {1}

    reference = small_model().to(BF16)
    for block, original in zip(reference[1:3], small_model()[1:3]):
        block.norm = AroundNorm(original.norm)
        block.shift = original.shift
    assert_near(output.detach(), reference(x.to(BF16)).detach(), 1e-2, "output")
    reference(x.to(BF16)).float().pow(2).mean().backward()
    average_gradients(reference)
    expected = {
        name.replace(".inner", ""): param.grad.float()
        for name, param in reference.named_parameters()
        if param.grad is not None
    }
    got = grads_or_zeros(model)
    assert_near({name: got[name] for name in expected}, expected, 2e-2, "gradients")
    assert set(got) == set(expected)


class AroundNorm(nn.Module):
    """The casts that a full-precision module has, written out."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.float()).to(x.dtype)


@on_ranks(2)
def test_norms_compute_in_the_masters_dtype_where_the_model_was_loaded_in_bf16(rank: int) -> None:
    precision = MixedPrecision(param_dtype=BF16, master_dtype=FP32, full_precision_modules=nn.LayerNorm)
    model = sharded(small_model().to(BF16), use_orig_params=True, mixed_precision=precision)
    seen: dict[str, torch.dtype] = {}
    model[1].norm.register_forward_pre_hook(lambda module, args: seen.update(x=args[0].dtype, w=module.weight.dtype))
    output = model(batches(2)[rank])
    output.float().pow(2).mean().backward()
    assert seen == {"x": FP32, "w": FP32}
    assert output.dtype == BF16
    assert {param.dtype for param in model.parameters()} == {FP32}
    # Each rank holds one of the two.
    assert [param.grad.dtype for param in model[1].norm.parameters() if param.numel() > 0] == [FP32]


@on_ranks(2)
def test_full_precision_modules_keep_the_dtype_that_they_were_loaded_in(rank: int) -> None:
    precision = MixedPrecision(param_dtype=FP32, full_precision_modules=(nn.LayerNorm,))
    model = sharded(small_model().double(), use_orig_params=True, mixed_precision=precision)
    model(batches(2)[rank]).pow(2).mean().backward()
    assert [param.grad.dtype for param in model[1].norm.parameters() if param.numel() > 0] == [torch.float64]


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"full_precision_modules": (3,)}, "full_precision_modules must hold module classes; got 3"),
        ({"uncast_inputs": (3,)}, "uncast_inputs must hold names of arguments; got 3"),
    ],
)
@on_ranks(2)
def test_what_stays_in_full_precision_is_named_by_classes_and_arguments(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        sharded(small_model(), use_orig_params=True, mixed_precision=MixedPrecision(param_dtype=BF16, **wrong))


class OwnPrecision(MixedPrecision):
    """A caller's own kind of options."""


@on_ranks(2)
def test_a_subclass_of_the_options_is_taken_as_they_are(rank: int) -> None:
    model = sharded(small_model(), use_orig_params=True, mixed_precision=OwnPrecision(param_dtype=BF16))
    assert model(batches(2)[rank]).dtype == BF16


@on_ranks(2)
def test_full_precision_modules_in_a_flat_unit_are_refused_with_names_and_a_way_out(rank: int) -> None:
    precision = MixedPrecision(param_dtype=BF16, full_precision_modules=(nn.LayerNorm,))
    with pytest.raises(ValueError, match=r"(?s)norm\.weight.*use_orig_params=True"):
        sharded(small_model(), use_orig_params=False, mixed_precision=precision)


# ------------------------------------------------------------------------------------------------ inputs left alone


class Rotary(nn.Module):
    """Takes a table of angles beside its input, and a step by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, table: Any, *more: torch.Tensor, step: Any = None, **rest: Any) -> torch.Tensor:
        self.seen = {"x": x.dtype, "table": table["angles"].dtype}
        if more:
            self.seen["more"] = more[0].dtype
        if step is not None:
            self.seen["step"] = step.dtype
        self.seen.update({name: value.dtype for name, value in rest.items()})
        return self.layer(x) * table["angles"].to(x.dtype)


class TwoRotaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Rotary(), Rotary()

    def forward(self, x: torch.Tensor, table: Any, **rest: Any) -> torch.Tensor:
        return self.second(self.first(x, table, **rest), table=table, **rest)


@on_ranks(2)
def test_inputs_that_are_named_stay_in_fp32_by_position_and_by_keyword(rank: int) -> None:
    precision = MixedPrecision(param_dtype=BF16, cast_forward_inputs=True, uncast_inputs=("table", "step", "scale"))
    model = FSDP(TwoRotaries(), auto_wrap_policy=ModuleWrapPolicy({Rotary}), mixed_precision=precision)
    x, table = torch.ones(2, 4), {"angles": torch.ones(2, 4)}
    model(x, table, step=torch.ones(()), scale=torch.ones(()), other=torch.ones(())).float().sum().backward()
    expected = {"x": BF16, "table": FP32, "step": FP32, "scale": FP32, "other": BF16}
    assert model.first.seen == model.second.seen == expected
    assert table["angles"].dtype == FP32, "the caller's own dict is left alone"

    alone = FSDP(Rotary(), mixed_precision=precision)
    alone(x, table, torch.ones(2))
    assert alone.seen == {"x": BF16, "table": FP32, "more": BF16}
    alone(x, table=table)
    assert alone.seen["table"] == FP32

    cast = FSDP(Rotary(), mixed_precision=MixedPrecision(param_dtype=BF16))
    cast(x, table)
    assert cast.seen["table"] == BF16, "without the option everything is cast, as by FSDP1"


@pytest.mark.of_guards
@on_ranks(2)
def test_a_named_input_that_no_forward_takes_is_warned_of_once(rank: int) -> None:
    precision = MixedPrecision(param_dtype=BF16, uncast_inputs=("input", "positions"))
    model = FSDP(nn.Linear(2, 2), mixed_precision=precision)
    with pytest.warns(UserWarning, match="uncast_inputs names 'positions', and no forward of a unit has"):
        model(torch.ones(1, 2, dtype=BF16))
    model(torch.ones(1, 2, dtype=BF16))


@on_ranks(2)
def test_integers_and_bools_are_never_cast(rank: int) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            assert tokens.dtype == torch.int64
            assert mask.dtype == torch.bool
            return self.embedding(tokens) * mask.unsqueeze(-1)

    model = FSDP(Lookup(), mixed_precision=MixedPrecision(param_dtype=BF16, cast_forward_inputs=True))
    output = model(torch.tensor([0, 4]), torch.tensor([True, False]))
    assert output.dtype == BF16


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return self(y, depth - 1) if depth else y


@on_ranks(2)
def test_a_module_in_full_precision_that_calls_itself_returns_the_dtype_that_it_was_given() -> None:
    module = Recursive()
    keep_full_precision(module)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    assert module(x).dtype is torch.bfloat16
    assert module(x.float()).dtype is torch.float32


LOW = torch.bfloat16


def linears() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def cut_by_a_cast() -> Any:
    return nn.Sequential(nn.Linear(4, 4), Cast(), nn.Linear(4, 4))


class Cast(nn.Linear):
    """A layer that takes any dtype and returns that of its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).to(LOW)


def normed() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def converted() -> Any:
    model = linears()
    model[1].to(LOW)
    return model


@ORIG_PARAMS
@OWN_PARAMETERS
@pytest.mark.parametrize("make", [cut_by_a_cast, normed, converted, linears])
@on_ranks(2)
def test_an_ignored_module_that_runs_on_fsdp1_runs(make: Callable[[], Any], use_orig_params: bool) -> None:
    results = []
    for kind, precision in ((FSDP, MixedPrecision), (peer_fsdp, peer_library.MixedPrecision)):
        model = seeded(make)
        low: Any = precision(param_dtype=LOW)
        model = kind(model, ignored_modules=[model[1]], mixed_precision=low, use_orig_params=use_orig_params)
        with torch.autocast("cpu", LOW, enabled=make is linears):
            output = model(torch.ones(3, 4))
        output.float().sum().backward()
        results.append([output, *(param.grad for param in model.parameters() if param.grad is not None)])
    assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
