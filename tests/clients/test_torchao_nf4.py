"""Frozen weights in torchao's NF4 train beside adapters on fully_shard (QLoRA, as torchtune has it)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torchao.quantization import Int8WeightOnlyConfig, NF4Tensor, quantize_

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import (
    StateDictType,
    fully_shard,
    iter_full_state_dict,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
)
from fsdp_flat.errors import LoadError, RankMismatchError, UnsupportedError
from fsdp_flat.layout import clean_fqn
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.extended_tensors import assert_alike
from tests.support.peer import peer_fully_shard

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, of what it does not find on a CPU
BOTH = (fully_shard, peer_fully_shard)
WIDTH = 64
# Blocks must not cross the parts of ranks.
BLOCKS = {"block_size": 32, "scaler_block_size": 4}
BASE = ("quantized_scalers", "quantization_factor", "quantized_data")


class Base(nn.Linear):
    """A linear whose weight is in 4 bits: a unit of its own on the wrapper."""


class Adapted(nn.Module):
    """A frozen linear in 4 bits, and an adapter that is trained."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        weight = nn.Linear(WIDTH, WIDTH, bias=False).weight.detach()
        self.base = Base(WIDTH, WIDTH, bias=False)
        self.base.weight = nn.Parameter(NF4Tensor.from_tensor(weight, **BLOCKS), requires_grad=False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[Adapted() for _ in range(3)])


def sharded(model: nn.Module, shard: Callable[..., Any] = fully_shard, **kwargs: Any) -> nn.Module:
    for child in model:  # type: ignore[attr-defined]
        shard(child, **kwargs)
    shard(model, **kwargs)
    return model


def wrapped(model: nn.Module, mesh: DeviceMesh | None = None, **kwargs: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Base, Adapted})
    return FSDP(model, auto_wrap_policy=policy, device_mesh=mesh, **{"use_orig_params": True, **kwargs})


def in_place(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    return sharded(model, mesh=mesh)


FRONTS = pytest.mark.parametrize("front", [in_place, wrapped])
CHANGES = pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1)])


def mesh_of(num_ranks: int) -> DeviceMesh:
    """Return a mesh of this rank and others, as many as given, of the four ranks."""
    return init_device_mesh("cpu", (4 // num_ranks, num_ranks), mesh_dim_names=("others", "own"))["own"]


def state_of(model: nn.Module, kind: StateDictType) -> dict[str, Any]:
    if isinstance(model, FSDP):
        with FSDP.state_dict_type(model, kind):
            return model.state_dict()
    full = StateDictOptions(full_state_dict=kind is StateDictType.FULL_STATE_DICT)
    return get_model_state_dict(model, options=full)


def load_state(model: nn.Module, state: dict[str, Any], kind: StateDictType) -> None:
    if isinstance(model, FSDP):
        with FSDP.state_dict_type(model, kind):
            model.load_state_dict(state)
    else:
        model.load_state_dict(state)


def inner_of(value: torch.Tensor) -> list[torch.Tensor]:
    local = value._local_tensor if isinstance(value, DTensor) else value
    inner = [getattr(local, name) for name in BASE] if isinstance(local, NF4Tensor) else [local.detach()]
    # torch leaves those of a full tensor as results of collectives that are still to be waited for.
    return [each.wait() if isinstance(each, AsyncCollectiveTensor) else each for each in inner]


def values_of(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    return {clean_fqn(name): inner_of(param) for name, param in model.named_parameters()}


def whole_bases(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each whole NF4 weight; those of parts lie one after another in the whole's."""
    found = {}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and isinstance(param._local_tensor, NF4Tensor):
            inner, group = inner_of(param.detach()), param.device_mesh.get_group(param.device_mesh.ndim - 1)
            every = [[torch.empty_like(each) for _ in range(dist.get_world_size(group))] for each in inner]
            for own, into in zip(inner, every, strict=True):
                dist.all_gather(into, own, group=group)
            found[clean_fqn(name)] = [*map(torch.cat, every), param._local_tensor.scaler_mean, param._local_tensor.nf4]
    return found


def full_precision(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of an unsharded model with the values of NF4 weights."""
    return {
        name: value.get_original_weight() if isinstance(value, NF4Tensor) else value
        for name, value in model.state_dict().items()
    }


def plain_bases(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    params = {name: param for name, param in model.named_parameters() if "base" in name}
    return {name: [*inner_of(each), each.scaler_mean, each.nf4] for name, each in params.items()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def trained(
    model: nn.Module,
    num_steps: int = 4,
    *,
    averages: bool = False,
    first: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    same: bool = False,
) -> list[float]:
    """Train on this rank's batches, or with ``same`` on those of rank 0, and return the losses."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for step in range(first, first + num_steps):
        torch.manual_seed(100 * step + (0 if same else dist.get_rank()))
        loss = model(torch.randn(4, WIDTH)).float().pow(2).mean()
        loss.backward()
        for param in params if averages else ():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2, 4)
def test_adapters_beside_nf4_weights_train_as_on_torch_and_without_sharding(reshard_after_forward: bool) -> None:
    ours, theirs = [sharded(model_of(), shard, reshard_after_forward=reshard_after_forward) for shard in BOTH]
    losses = trained(ours)
    assert_alike((losses, values_of(ours)), (trained(theirs), values_of(theirs)))
    plain = trained(model_of(), averages=True)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), atol=1e-6, rtol=1e-5)
    assert losses[0] == plain[0]
    for module in ours.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            assert isinstance(module.weight, DTensor)
            assert type(module.weight._local_tensor) is NF4Tensor


@on_ranks(2, 4)
def test_full_state_dicts_of_adapters_and_base_equal_torchs_and_are_loaded() -> None:
    full = StateDictOptions(full_state_dict=True)
    ours, theirs = [sharded(model_of(), shard) for shard in BOTH]
    for model in (ours, theirs):
        trained(model, 2)
    states = [get_model_state_dict(model, options=full) for model in (ours, theirs)]
    assert list(states[0]) == list(states[1])
    plain = model_of().state_dict()
    for name, value in states[0].items():
        assert not isinstance(value, DTensor)
        assert type(value) is type(states[1][name])
        assert_alike(inner_of(value), inner_of(states[1][name]))
        if "base" in name:
            assert type(value) is NF4Tensor
            # The base is what was quantized before sharding.
            assert_equal(inner_of(value), inner_of(plain[name]))
    # Another model, whose base is another one, becomes the same.
    again = sharded(model_of(seed=1))
    adapters = {name: value for name, value in states[0].items() if "base" not in name}
    set_model_state_dict(again, adapters, options=StateDictOptions(full_state_dict=True, strict=False))
    again.load_state_dict({name: value for name, value in states[0].items() if "base" in name}, strict=False)
    assert_equal(values_of(again), values_of(ours))
    assert trained(again, 1, first=9) == trained(ours, 1, first=9)


@on_ranks(2)
def test_adapters_alone_are_saved_beside_nf4_weights(tmp_path: Path) -> None:
    model, again = sharded(model_of()), sharded(model_of())
    trained(model, 2)
    save_full(model, tmp_path / "adapters", trainable_only=True)
    load_full(again, tmp_path / "adapters", strict=False)
    assert trained(again, 1, first=9) == trained(model, 1, first=9)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2, 4)
def test_the_wrapper_trains_adapters_beside_nf4_weights_as_without_sharding(use_orig_params: bool) -> None:
    model = wrapped(model_of(), use_orig_params=use_orig_params)
    losses, plain = trained(model), trained(model_of(), averages=True)
    assert losses[0] == plain[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), atol=1e-6, rtol=1e-5)
    assert_equal(whole_bases(model), plain_bases(model_of()))


@FRONTS
@CHANGES
@on_ranks(4)
def test_training_goes_on_from_a_checkpoint_at_another_number_of_ranks(
    front: Callable[..., nn.Module], before: int, after: int, tmp_path: Path
) -> None:
    model = front(model_of(), mesh_of(before))
    optimizer = optimizer_of(model)
    trained(model, 2, optimizer=optimizer, same=True)
    save_checkpoint(tmp_path / f"saved{dist.get_rank() // before}", model, optimizer)
    going_on = trained(model, 2, first=2, optimizer=optimizer, same=True)
    dist.barrier()
    # The base of the other model is another one, so it is the checkpoint's afterwards.
    again = front(model_of(seed=1), mesh_of(after))
    loaded = optimizer_of(again)
    load_checkpoint(tmp_path / "saved0", again, loaded)
    assert_equal(whole_bases(again), plain_bases(model_of()))
    assert_close(trained(again, 2, first=2, optimizer=loaded, same=True), going_on, rtol=1e-5, atol=1e-6)


@FRONTS
@CHANGES
@on_ranks(4)
def test_full_state_dicts_are_loaded_at_another_number_of_ranks(
    front: Callable[..., nn.Module], before: int, after: int
) -> None:
    model, again = front(model_of(), mesh_of(before)), front(model_of(seed=1), mesh_of(after))
    trained(model, 2, same=True)
    state = state_of(model, StateDictType.FULL_STATE_DICT)
    assert type(state["0.base.weight"]) is NF4Tensor
    load_state(again, state, StateDictType.FULL_STATE_DICT)
    assert_equal(whole_bases(again), plain_bases(model_of()))
    losses = [trained(each, 2, first=2, same=True) for each in (again, model)]
    assert_close(*losses, rtol=1e-5, atol=1e-6)


@FRONTS
@on_ranks(4)
def test_sharded_state_dicts_are_saved_by_torch_for_the_same_number_of_ranks(
    front: Callable[..., nn.Module], tmp_path: Path
) -> None:
    model, again, kind = front(model_of()), front(model_of(seed=1)), StateDictType.SHARDED_STATE_DICT
    trained(model, 2)
    dcp.save(state_of(model, kind), checkpoint_id=tmp_path)
    state = state_of(again, kind)
    dcp.load(state, checkpoint_id=tmp_path)
    load_state(again, state, kind)
    assert_equal(whole_bases(again), plain_bases(model_of()))
    assert trained(again, 2, first=2) == trained(model, 2, first=2)
    # An NF4Tensor has no slices, which other numbers of ranks take; save_checkpoint does not need them.
    fewer = front(model_of(), mesh_of(2))
    with pytest.raises(CheckpointException, match=r"aten.slice\(NF4Tensor\)"):
        dcp.load(state_of(fewer, kind), checkpoint_id=tmp_path)


def set_full(model: nn.Module, state: dict[str, Any], _kind: Any) -> None:
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize(("front", "load"), [(in_place, load_state), (wrapped, load_state), (in_place, set_full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 4)
def test_a_full_plain_weight_is_quantized_as_without_sharding(
    front: Callable[..., nn.Module], load: Callable[..., None], dtype: torch.dtype
) -> None:
    plain, model = model_of(), front(model_of())
    state = {
        name: torch.randn_like(value, dtype=dtype) if "base" in name else value
        for name, value in full_precision(model_of(seed=1)).items()
    }
    plain.load_state_dict(state)
    load(model, state, StateDictType.FULL_STATE_DICT)
    assert_equal(whole_bases(model), plain_bases(plain))
    assert trained(model, 1)[0] == trained(plain, 1)[0]


@pytest.mark.parametrize(("rows", "blocks"), [(66, (32, 4)), (3, (32, 2)), (64, (64, 64))])
@FRONTS
@on_ranks(2)
def test_blocks_that_cross_the_parts_of_ranks_are_refused_on_all_ranks(
    front: Callable[..., nn.Module], rows: int, blocks: tuple[int, int]
) -> None:
    model = Adapted()
    weight = NF4Tensor.from_tensor(torch.randn(rows, 64), *blocks)
    model.base.weight = nn.Parameter(weight, requires_grad=False)
    expected = rf"weight' of unit.*NF4Tensor of shape \({rows}, 64\).* 2 ranks.*rank {dist.get_rank()}.*smaller blocks"
    with pytest.raises(UnsupportedError, match=expected):
        front(nn.Sequential(model))


@on_ranks(2)
def test_parts_that_were_quantized_alone_are_not_saved(tmp_path: Path) -> None:
    model = in_place(model_of())
    weight = model[1].base.weight  # type: ignore[index, union-attr]
    with torch.no_grad():
        weight._local_tensor.scaler_mean.add_(dist.get_rank())
    with pytest.raises(
        RankMismatchError, match=r"'1.base.weight.scaler_mean'.*rank 0 and rank 1.*'1.base.weight' of unit"
    ):
        save_checkpoint(tmp_path, model)
    assert load_checkpoint(tmp_path, model) is None


@on_ranks(2)
def test_a_base_in_blocks_of_another_size_is_not_loaded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, in_place(model_of()))
    again = model_of(seed=1)
    for layers in again:  # type: ignore[attr-defined]
        weight = NF4Tensor.from_tensor(torch.randn(WIDTH, WIDTH), 64, 4)
        layers.base.weight = nn.Parameter(weight, requires_grad=False)
    before, again = plain_bases(again), in_place(again)
    with pytest.raises(LoadError, match=r"'0.base.weight.quantized_scalers' has shape \(128,\) there and \(64,\)"):
        load_checkpoint(tmp_path, again)
    assert_equal(whole_bases(again), before)


@FRONTS
@on_ranks(2, 4)
def test_full_files_hold_the_values_of_nf4_weights(front: Callable[..., nn.Module], tmp_path: Path) -> None:
    model, again, plain = front(model_of()), front(model_of(seed=1)), model_of(seed=2)
    save_full(model, tmp_path / "full", dtype=torch.bfloat16)
    expected = {name: value.bfloat16() for name, value in full_precision(model_of()).items()}
    assert_equal(load_file(tmp_path / "full" / "model.safetensors"), expected)
    streamed = dict(iter_full_state_dict(model, dst=None))
    assert_equal(streamed, full_precision(model_of()))
    # Values are quantized once more: as of an unsharded model that loads them.
    load_full(again, tmp_path / "full")
    plain.load_state_dict(expected)
    assert_equal(whole_bases(again), plain_bases(plain))


@on_ranks(2, 4)
def test_a_model_on_the_meta_device_is_assigned_full_weights_which_are_quantized() -> None:
    with torch.device("meta"):
        model = in_place(model_of())
    plain, state = model_of(), full_precision(model_of(seed=1))
    plain.load_state_dict(state)
    model.load_state_dict(state, assign=True)
    assert_equal(whole_bases(model), plain_bases(plain))
    assert trained(model, 1)[0] == trained(plain, 1)[0]


@pytest.mark.parametrize("background", [True, False])
@on_ranks(4)
def test_replicas_of_nf4_weights_are_saved_for_all_ranks(background: bool, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    save_checkpoint(tmp_path, in_place(model_of(seed=1), mesh), background=background).wait()
    for again in (in_place(model_of(), mesh), in_place(model_of())):
        load_checkpoint(tmp_path, again)
        assert_equal(whole_bases(again), plain_bases(model_of(seed=1)))


@on_ranks(2)
def test_8_bit_weights_that_no_unit_manages_are_named_before_full_files_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    quantize_(model[0], Int8WeightOnlyConfig())
    model = FSDP(model, ignored_modules=[model[0]], use_orig_params=True)
    save_full(model, tmp_path / "full")
    with pytest.raises(LoadError, match=r"'0.weight' \(a Int8Tensor, .*qdata.*keep="):
        load_full(model, tmp_path / "full")
