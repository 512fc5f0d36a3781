"""Load hooks, and methods that load, of modules inside units see what those of plain models do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedStateDictConfig
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.state_dict.kit import FULL, SHARDED
from tests.state_dict.test_module_hooks import Plain, model_of
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.wrapper_models import whole_state


class Converting(nn.Module):
    """Loads a weight that was saved in reverse order, by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[prefix + "lin.weight"] = state[prefix + "lin.weight"].flip(0)
        super()._load_from_state_dict(state, prefix, *args)


class Splitting(nn.Module):
    """Loads two weights from a fused one, and a bias under an older name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 3, bias=False), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "fused" in state:
            state[prefix + "one.weight"], state[prefix + "two.weight"] = state.pop(prefix + "fused").chunk(2)
            state[prefix + "two.bias"] = state.pop(prefix + "old_bias")
        super()._load_from_state_dict(state, prefix, *args)


class Doubling(nn.Module):
    """Doubles its weight once it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)
        self.register_load_state_dict_post_hook(self.on_loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)

    @staticmethod
    def on_loaded(module: Any, _keys: Any) -> None:
        with torch.no_grad():
            module.lin.weight.mul_(2)


class Adapted(nn.Module):
    """Loads the names of a plain layer into the one inside; its own weight may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lora = nn.Linear(5, 3), nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.lora.T

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            if prefix + name in state:
                state[prefix + "inner." + name] = state.pop(prefix + name)
        super()._load_from_state_dict(state, prefix, *args)


def entries(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name.replace("__", "."): torch.randn(shape) for name, shape in shapes.items()}


LAST = {"1__weight": (2, 3), "1__bias": (2,)}
STATES = {
    Converting: entries(**{"0__lin__weight": (3, 5), "0__lin__bias": (3,)}, **LAST),
    Doubling: entries(**{"0__lin__weight": (3, 5), "0__lin__bias": (3,)}, **LAST),
    Splitting: entries(**{"0__fused": (6, 5), "0__old_bias": (3,)}, **LAST),
    Adapted: entries(**{"0__weight": (3, 5), "0__bias": (3,)}, **LAST),
}


@ORIG_PARAMS
@pytest.mark.parametrize("wraps", ["root", "module", "layers"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("root", ["wrapped", "plain"])
@pytest.mark.parametrize("kind", STATES)
@on_ranks(2)
def test_modules_load_what_their_hooks_and_methods_make_of_a_full_state_dict(
    kind: Any, root: str, assign: bool, wraps: str, use_orig_params: bool
) -> None:
    state = STATES[kind]
    if assign and kind is Doubling:
        state = {name: value.clone() for name, value in state.items()}
    torch.manual_seed(0)
    plain = nn.Sequential(kind(), nn.Linear(3, 2))
    expected_keys = plain.load_state_dict({name: value.clone() for name, value in state.items()}, strict=False)
    torch.manual_seed(0)
    policy = None if wraps == "root" else ModuleWrapPolicy({kind if wraps == "module" else nn.Linear})
    model: Any = nn.Sequential(kind(), nn.Linear(3, 2))
    if root == "wrapped":
        model = FSDP(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    else:
        policy = policy if wraps == "layers" else None
        model[0] = FSDP(model[0], auto_wrap_policy=policy, use_orig_params=use_orig_params)
    given = {name: value.clone() for name, value in state.items()}
    keys = model.load_state_dict(given, strict=False, assign=assign)
    assert keys.unexpected_keys == []
    assert keys.missing_keys == expected_keys.missing_keys
    assert_equal(dict(whole_state(model)), dict(plain.state_dict()))


@ORIG_PARAMS
@on_ranks(2)
def test_a_load_hook_that_computes_with_a_parameter_without_a_value_is_an_error(use_orig_params: bool) -> None:
    model = model_of(Doubling, use_orig_params)
    before = dict(whole_state(model))
    with pytest.raises(RuntimeError, match=r"used '0\.lin\.weight' of unit '0', for which the state dict has no value"):
        model.load_state_dict({"1.weight": torch.ones(2, 3)}, strict=False)
    assert_equal(dict(whole_state(model)), before)


@ORIG_PARAMS
@on_ranks(2)
def test_a_hook_that_computes_with_chunks_is_an_error_and_nothing_is_loaded(use_orig_params: bool) -> None:
    model, other = model_of(Converting, use_orig_params), model_of(Converting, use_orig_params, seed=1)
    before = dict(whole_state(model))
    with FSDP.state_dict_type(model, SHARDED), FSDP.state_dict_type(other, SHARDED):
        state = other.state_dict()
        with pytest.raises(RuntimeError, match=r"computes with a ShardedTensor of shape \(3, 5\)"):
            model.load_state_dict(state)
    assert_equal(dict(whole_state(model)), before)


@ORIG_PARAMS
@pytest.mark.parametrize("kind", ["meta", "quantized"])
@on_ranks(2)
def test_a_value_that_cannot_be_copied_is_named_and_nothing_is_loaded(kind: str, use_orig_params: bool) -> None:
    model = model_of(Plain, use_orig_params)
    before = dict(whole_state(model))
    state = {name: value + 1 for name, value in before.items()}
    state["1.bias"] = torch.empty(2, device="meta")
    if kind == "quantized":
        with warnings.catch_warnings(action="ignore"):
            state["1.bias"] = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(RuntimeError, match=r"1\.bias: "):
        model.load_state_dict(state)
    assert_equal(dict(whole_state(model)), before)


@ORIG_PARAMS
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2)
def test_modules_that_swap_parameters_when_they_load_get_the_values(kind: Any, use_orig_params: bool) -> None:
    model, other = model_of(Plain, use_orig_params), model_of(Plain, use_orig_params, seed=1)
    params = list(model.parameters())
    with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
        state = other.state_dict()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict(state)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    assert_equal(dict(whole_state(model)), dict(whole_state(other)))
    assert [id(param) for param in model.parameters()] == [id(param) for param in params]


@on_ranks(2)
def test_modules_that_swap_parameters_keep_a_value_that_a_file_lacks() -> None:
    model, other = model_of(Plain, True), model_of(Plain, True, seed=1)
    expected = dict(whole_state(other)) | {"1.bias": dict(whole_state(model))["1.bias"]}
    # torch.distributed.checkpoint leaves the model's own parameter where a file has no value.
    state = dict(whole_state(other)) | {"1.bias": model.module[1].bias}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_equal(dict(whole_state(model)), expected)


class TrainableOnly(nn.Linear):
    """Saves and loads its trainable parameters alone, as adapters do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state, prefix = super().state_dict(*args, **kwargs), kwargs.get("prefix", "")
        for name, param in self.named_parameters():
            if not param.requires_grad:
                del state[prefix + name]
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in self.named_parameters(recurse=False):
            if param.requires_grad:
                param.data.copy_(state_dict[prefix + name])


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2)
def test_modules_that_save_and_load_trainable_parameters_find_them(kind: Any) -> None:
    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        plain = nn.Sequential(TrainableOnly(5, 3), TrainableOnly(3, 2))
        for layer in plain:
            layer.bias.requires_grad_(False)
        return FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({TrainableOnly}), use_orig_params=True)

    model, other = made(0), made(1)
    names = ["0.weight", "1.weight"]
    with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
        state = other.state_dict()
        assert list(state) == names
        model.load_state_dict(state, strict=False)
    with FSDP.summon_full_params(model), FSDP.summon_full_params(other):
        for (name, param), expected in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(param, expected) == (name in names), name


def as_they_are(values: Any, like: nn.Module) -> Any:
    same = values.to(torch.float32).to(like.weight.device).float().cpu().contiguous().clone()
    return same.view(like.weight.shape).detach()


@ORIG_PARAMS
@pytest.mark.parametrize("boxes", [False, True])
@on_ranks(2)
def test_load_hooks_may_convert_sharded_values(boxes: bool, use_orig_params: bool) -> None:
    def convert(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = as_they_are(state[prefix + "weight"], module)

    model, other = model_of(Plain, use_orig_params), model_of(Plain, use_orig_params, seed=1)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_load_state_dict_pre_hook(convert)
    config = ShardedStateDictConfig(boxes=boxes)
    with FSDP.state_dict_type(model, SHARDED, config), FSDP.state_dict_type(other, SHARDED, config):
        model.load_state_dict(other.state_dict())
    assert_equal(dict(whole_state(model)), dict(whole_state(other)))


WAYS_TO_FILL: dict[str, Callable[[Any], torch.Tensor]] = {
    "zeros_like": torch.zeros_like,
    "full_like": lambda weight: torch.full_like(weight, 3),
    "new_ones": lambda weight: weight.new_ones(weight.shape),
    "to": lambda weight: torch.ones(weight.shape, dtype=torch.float64).to(weight),
    "itself": lambda weight: weight,
    "detached": lambda weight: weight.detach().clone(),
    "data": lambda weight: weight.data,
}


class Filling(nn.Module):
    """Fills a weight that a state dict lacks, by one of the ways that need its shape or its old values only."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.lin, self.added = nn.Linear(5, 3), nn.Parameter(torch.randn(3, 7))
        self.register_load_state_dict_pre_hook(self.on_load)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.added.sum(1)

    @staticmethod
    def on_load(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state.setdefault(prefix + "added", WAYS_TO_FILL[module.way](module.added))


@ORIG_PARAMS
@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("way", WAYS_TO_FILL)
@on_ranks(2)
def test_load_hooks_may_fill_missing_values(way: str, kind: Any, use_orig_params: bool) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(Filling(way), nn.Linear(3, 2))

    plain, other = made(0), made(1)
    plain.load_state_dict({name: value for name, value in other.state_dict().items() if name != "0.added"})
    model: Any = FSDP(made(0), use_orig_params=use_orig_params)
    sharded: Any = FSDP(made(1), use_orig_params=use_orig_params)
    with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(sharded, kind):
        state = sharded.state_dict()
        del state["0.added"]
        model.load_state_dict(state)
    assert_equal(dict(whole_state(model)), dict(plain.state_dict()))
