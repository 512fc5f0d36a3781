"""State-dict hooks, and methods, of modules inside units see full tensors, as those of plain models."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fsdp_flat import (
    FullStateDictConfig,
    ShardedStateDictConfig,
    iter_full_state_dict,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.state_dict.kit import FULL, LOCAL, SHARDED
from tests.support import assert_equal, on_ranks
from tests.wrapper.models import whole_state

KINDS = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


class Scaling(nn.Module):
    """Saves eight times its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3)
        self._register_state_dict_hook(self.on_save)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)

    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "lin.weight"] = state[prefix + "lin.weight"] * 8


class ScalingInPlace(Scaling):
    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "lin.weight"] = state[prefix + "lin.weight"].clone()
        state[prefix + "lin.weight"].view(-1)[:4].mul_(8)


class Casting(Scaling):
    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "lin.weight"] = state[prefix + "lin.weight"].half()


class Renaming(Scaling):
    """Has another name in state dicts; also loads what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.on_load)

    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "old"] = state.pop(prefix + "lin.weight")

    @staticmethod
    def on_load(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "old" in state:
            state[prefix + "lin.weight"] = state.pop(prefix + "old")


class Dropping(Scaling):
    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        del state[prefix + "lin.weight"]


class Merging(nn.Module):
    """Saves the sum of two weights, by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.delta = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.base + self.delta).T

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "merged"] = self.base.detach() + self.delta.detach()


class Concatenating(Scaling):
    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "both"] = torch.cat([state[prefix + "lin.weight"], state.pop(prefix + "lin.bias")[:, None]], 1)


class Plain(Scaling):
    @staticmethod
    def on_save(*_: Any) -> None:
        """Change nothing."""


SAVING = [Concatenating, Scaling, ScalingInPlace, Casting, Renaming, Dropping, Merging]


def model_of(kind: Any, use_orig_params: bool, *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    policy = ModuleWrapPolicy({kind})
    return FSDP(nn.Sequential(kind(), nn.Linear(3, 2)), auto_wrap_policy=policy, use_orig_params=use_orig_params)


def full(value: Any) -> torch.Tensor:
    if isinstance(value, ShardedTensor):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, [part.tensor for part in value.local_shards()])
        return torch.cat([tensor for part in parts for tensor in part])
    return value


def state_in(model: nn.Module, kind: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, kind):
        return {name: full(value) for name, value in model.state_dict().items()}


@KINDS
@pytest.mark.parametrize("kind", SAVING)
@on_ranks(2)
def test_every_way_to_save_has_what_the_modules_put_into_their_state_dict(
    kind: type[nn.Module], use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    torch.manual_seed(0)
    expected = dict(nn.Sequential(kind(), nn.Linear(3, 2)).state_dict())
    model = model_of(kind, use_orig_params)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert_equal(state_in(model, FULL), expected)
    assert_equal(state_in(model, SHARDED), expected)
    assert_equal(dict(iter_full_state_dict(model, dst=None)), expected)
    save_full(model, tmp_path / "full")
    assert_equal(dict(read(tmp_path / "full")), expected)
    save_checkpoint(tmp_path / "run", model)
    dist.barrier()
    stored = tmp_path / f"checkpoint of rank {rank}"
    dcp_to_torch_save(tmp_path / "run" / "step-00000000", stored)
    assert_equal(torch.load(stored)["model"], expected)
    assert_equal({name: param.detach() for name, param in model.named_parameters()}, before)


def read(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    dist.barrier()
    return load_file(directory / "model.safetensors")


@KINDS
@on_ranks(2)
def test_names_that_a_module_changes_come_back_from_every_kind_of_file(use_orig_params: bool, tmp_path: Path) -> None:
    model = model_of(Renaming, use_orig_params)
    expected = state_in(model, FULL)
    # Modules have no parameters of their own in LOCAL state dicts of flat parameters.
    for kind in (FULL, SHARDED, LOCAL) if use_orig_params else (FULL, SHARDED):
        other = model_of(Renaming, use_orig_params, seed=1)
        with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
            other.load_state_dict(model.state_dict())
        assert_equal(state_in(other, FULL), expected, what=kind.name)
    other = model_of(Renaming, use_orig_params, seed=1)
    save_full(model, tmp_path / "full")
    dist.barrier()
    load_full(other, tmp_path / "full")
    assert_equal(state_in(other, FULL), expected)
    other = model_of(Renaming, use_orig_params, seed=1)
    save_checkpoint(tmp_path / "run", model)
    load_checkpoint(tmp_path / "run", other)
    assert_equal(state_in(other, FULL), expected)


@KINDS
@on_ranks(2)
def test_load_full_refuses_names_under_which_a_hook_saves_what_it_computes(
    use_orig_params: bool, tmp_path: Path
) -> None:
    model = model_of(Scaling, use_orig_params)
    save_full(model, tmp_path)
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"'0\.lin\.weight' is computed .*load_file"):
        load_full(model, tmp_path)


@KINDS
@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL])
@on_ranks(2)
def test_a_layer_that_replaces_a_wrapped_one_is_saved_and_loaded(
    kind: Any, use_orig_params: bool, tmp_path: Path
) -> None:
    def replaced(seed: int) -> Any:
        model = model_of(Plain, use_orig_params, seed=seed)
        model.module[1] = nn.Linear(3, 4)
        return model

    model, other = replaced(0), replaced(1)
    expected = dict(model.module[1].state_dict())
    with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
        state = model.state_dict()
        assert_equal({name: state[f"1.{name}"] for name in expected}, expected)
        other.load_state_dict(state, strict=False)
    assert_equal(dict(other.module[1].state_dict()), expected)
    if kind is SHARDED:
        assert_equal({name: dict(iter_full_state_dict(model, dst=None))[f"1.{name}"] for name in expected}, expected)
        other = replaced(1)
        save_full(model, tmp_path / "full")
        dist.barrier()
        load_full(other, tmp_path / "full", keep=lambda name: name.startswith("1."), strict=False)
        assert_equal(dict(other.module[1].state_dict()), expected)


@on_ranks(2)
def test_hooks_on_ranks_that_keep_nothing_find_every_name(rank: int) -> None:
    for kind in SAVING:
        model = model_of(kind, True)
        with FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
            assert bool(model.state_dict()) == (rank == 0)


@KINDS
@on_ranks(2)
def test_a_renamed_tensor_of_a_full_save_inside_summon_is_memory_of_its_own(use_orig_params: bool) -> None:
    model = model_of(Renaming, use_orig_params)
    with FSDP.summon_full_params(model):
        value = model.state_dict()["0.old"]
        assert value.data_ptr() != model.module[0].module.lin.weight.data_ptr()


@on_ranks(2)
def test_a_sharded_tensor_inside_a_container_of_a_state_dict_is_refused_when_it_is_pickled(tmp_path: Path) -> None:
    class Nesting(Scaling):
        @staticmethod
        def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            state[prefix + "parts"] = [state.pop(prefix + "lin.weight")]

    model = model_of(Nesting, True)
    with FSDP.state_dict_type(model, SHARDED):
        state = model.state_dict()
    with pytest.raises(RuntimeError, match="inside another value of a sharded state dict"):
        torch.save(state["0.parts"], tmp_path / "state")


# ---------------------------------------------------------------------------------------------------- loads


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


@KINDS
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


@KINDS
@on_ranks(2)
def test_a_load_hook_that_computes_with_a_parameter_without_a_value_is_an_error(use_orig_params: bool) -> None:
    model = model_of(Doubling, use_orig_params)
    before = dict(whole_state(model))
    with pytest.raises(RuntimeError, match=r"used '0\.lin\.weight' of unit '0', for which the state dict has no value"):
        model.load_state_dict({"1.weight": torch.ones(2, 3)}, strict=False)
    assert_equal(dict(whole_state(model)), before)


@KINDS
@on_ranks(2)
def test_a_hook_that_computes_with_chunks_is_an_error_and_nothing_is_loaded(use_orig_params: bool) -> None:
    model, other = model_of(Converting, use_orig_params), model_of(Converting, use_orig_params, seed=1)
    before = dict(whole_state(model))
    with FSDP.state_dict_type(model, SHARDED), FSDP.state_dict_type(other, SHARDED):
        state = other.state_dict()
        with pytest.raises(RuntimeError, match=r"computes with a ShardedTensor of shape \(3, 5\)"):
            model.load_state_dict(state)
    assert_equal(dict(whole_state(model)), before)


@KINDS
@on_ranks(2)
def test_a_unit_works_after_an_exception_in_a_hook_of_a_load_below_a_plain_module(use_orig_params: bool) -> None:
    model = nn.Sequential(FSDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), use_orig_params=use_orig_params))
    before, names = dict(whole_state(model)), [name for name, _ in model.named_parameters()]

    def fail(*_: Any) -> None:
        raise ValueError("a hook")

    handle = model[0].module[1].register_load_state_dict_pre_hook(fail)
    with pytest.raises(ValueError, match="a hook"):
        model.load_state_dict({name: value + 1 for name, value in before.items()})
    handle.remove()
    assert model(torch.ones(1, 3)).shape == (1, 3)
    assert [name for name, _ in model.named_parameters()] == names
    assert_equal(dict(whole_state(model)), before)
    model.load_state_dict({name: value + 1 for name, value in before.items()})
    assert_equal(dict(whole_state(model)), {name: value + 1 for name, value in before.items()})


@KINDS
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


@KINDS
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


@KINDS
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
