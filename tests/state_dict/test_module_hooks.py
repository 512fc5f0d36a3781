"""State-dict hooks, and methods that save, of modules inside units see full tensors in a FULL_STATE_DICT, as in plain
models; in state dicts and files of parts they may rename, copy and delete values, and are told so if they compute."""

from __future__ import annotations

import copy
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
    iter_full_state_dict,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import LoadError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.state_dict.kit import FULL, LOCAL, SHARDED
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS


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


class CastingByName(Scaling):
    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "lin.weight"] = state[prefix + "lin.weight"].to("cpu", dtype=torch.float64)


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


class Unscaling(Scaling):
    """Also loads what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.on_load)

    @staticmethod
    def on_load(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "lin.weight"] = state[prefix + "lin.weight"] / 8


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


class Halving(Scaling):
    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        halves = state.pop(prefix + "lin.weight").split([1, 2])
        state.update({f"{prefix}{index}": half for index, half in enumerate(halves)})


COMPUTING = [Halving, Concatenating, Scaling, ScalingInPlace, Casting, CastingByName, Merging]
MOVING = [Renaming, Dropping]
SAVING = [*COMPUTING, *MOVING]


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


@ORIG_PARAMS
@pytest.mark.parametrize("kind", MOVING)
@on_ranks(2)
def test_every_way_to_save_has_what_the_modules_put_into_their_state_dict(
    kind: type[nn.Module], use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    torch.manual_seed(0)
    expected = dict(nn.Sequential(kind(), nn.Linear(3, 2)).state_dict())
    model = model_of(kind, use_orig_params)
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


@ORIG_PARAMS
@pytest.mark.parametrize("kind", COMPUTING)
@on_ranks(2)
def test_a_hook_that_computes_saves_its_result_in_a_full_state_dict_and_is_refused_elsewhere(
    kind: type[nn.Module], use_orig_params: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(kind(), nn.Linear(3, 2))
    expected = dict(plain.state_dict())
    model = model_of(kind, use_orig_params)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for save in (
        lambda: state_in(model, SHARDED),
        lambda: dict(iter_full_state_dict(model)),
        lambda: save_full(model, tmp_path / "full"),
        lambda: save_checkpoint(tmp_path / "run", model),
    ):
        with pytest.raises(RuntimeError, match=r"computes with '0\.\w+(\.\w+)?' of unit '0'.*FULL_STATE_DICT"):
            save()
        assert_equal({name: param.detach() for name, param in model.named_parameters()}, before)
    assert_equal(state_in(model, FULL), expected)
    assert not (tmp_path / "full" / "model.safetensors").exists()
    x = torch.ones(2, 5)
    assert_close(model(x), plain(x), rtol=1e-6, atol=1e-6)


def read(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    dist.barrier()
    return load_file(directory / "model.safetensors")


def write(state: dict[str, torch.Tensor], directory: Path) -> None:
    from safetensors.torch import save_file

    if dist.get_rank() == 0:
        save_file(state, directory / "model.safetensors")
    dist.barrier()


@ORIG_PARAMS
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


@ORIG_PARAMS
@on_ranks(2)
def test_load_full_runs_load_hooks_that_compute(use_orig_params: bool, tmp_path: Path) -> None:
    model, other = model_of(Unscaling, use_orig_params), model_of(Unscaling, use_orig_params, seed=1)
    write(state_in(model, FULL), tmp_path)
    load_full(other, tmp_path)
    assert_equal(state_in(other, FULL), state_in(model, FULL))


@ORIG_PARAMS
@on_ranks(2)
def test_load_full_refuses_names_that_no_module_takes(use_orig_params: bool, tmp_path: Path) -> None:
    model, other = model_of(Concatenating, use_orig_params), model_of(Concatenating, use_orig_params, seed=1)
    write(state_in(model, FULL), tmp_path)
    before = state_in(other, FULL)
    for keep in (None, lambda _: True):
        with pytest.raises(LoadError, match=r"No module has taken '?0\.both"):
            load_full(other, tmp_path, keep=keep)
        assert_equal(state_in(other, FULL), before)
    assert load_full(other, tmp_path, strict=False) == ([], ["0.both"])


class Particular(nn.Sequential):
    """Has a ``load_state_dict`` with other arguments, which returns nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state)


@on_ranks(2)
def test_load_full_changes_nothing_of_a_plain_module_around_wrappers_if_a_module_raises_on_one_rank(
    tmp_path: Path, rank: int
) -> None:
    model = Particular(model_of(Plain, True))
    save_full(model, tmp_path)
    dist.barrier()
    other = Particular(model_of(Plain, True, seed=1))
    before = state_in(other, FULL)

    def refuse(*_: Any) -> None:
        raise ValueError("not today")

    hook = other[0].module[0].register_load_state_dict_pre_hook(refuse) if rank == 1 else None
    with pytest.raises(RuntimeError if rank == 0 else ValueError, match="not today"):
        load_full(other, tmp_path)
    assert_equal(state_in(other, FULL), before)
    if hook is not None:
        hook.remove()
    load_full(other, tmp_path)
    assert_equal(state_in(other, FULL), state_in(model, FULL))


@ORIG_PARAMS
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


@ORIG_PARAMS
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


class Cloning(Scaling):
    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        weight = state[prefix + "lin.weight"]
        state[prefix + "lin.weight"] = weight.clone().requires_grad_(requires_grad=False)
        state[prefix + "twice"] = weight.detach().cpu().to("cpu").to(torch.float32).float().contiguous().view(3, 5)
        state[prefix + "again"] = copy.deepcopy(weight).view_as(weight).to(device="cpu", dtype=torch.float32)
        assert f"{weight} {weight!r}".count("StatePlaceholder(shape=(3, 5)") == 2


@ORIG_PARAMS
@on_ranks(2)
def test_copies_of_a_sharded_value_are_sharded(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    expected = dict(nn.Sequential(Plain(), nn.Linear(3, 2)).state_dict())
    model = model_of(Cloning, use_orig_params)
    with FSDP.state_dict_type(model, SHARDED):
        state = model.state_dict()
    for name in ("0.lin.weight", "0.twice", "0.again"):
        assert isinstance(state[name], ShardedTensor)
        assert_equal(full(state[name]), expected["0.lin.weight"])


class Overwriting(Scaling):
    @staticmethod
    def on_save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "lin.weight"].copy_(torch.ones(3, 5))


@ORIG_PARAMS
@on_ranks(2)
def test_a_hook_that_overwrites_a_sharded_value_is_refused(use_orig_params: bool) -> None:
    model = model_of(Overwriting, use_orig_params)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"computes with '0\.lin\.weight' of unit '0'"):
        state_in(model, SHARDED)
    assert_equal({name: param.detach() for name, param in model.named_parameters()}, before)
