"""State dicts of parameters without elements or dimensions, and of modules registered at two places of one unit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    load_checkpoint,
    save_checkpoint,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.state_dict.kit import unsharded_allowed
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import batch, full_params, mesh, train_on, wrapped
from tests.support.models import Block

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")


class Unusual(nn.Module):
    """Parameters of shapes (5, 3), (0, 3), (3, 0) and ()."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.no_rows = nn.Parameter(torch.randn(0, 3))
        self.no_columns = nn.Parameter(torch.randn(3, 0))
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = (x @ self.no_rows.T).sum() + (x @ self.no_columns).sum()
        return (x @ self.weight.T).sum() * self.scale + nothing


def round_trip(model: FSDP, form: StateDictType, state_of_another: FSDP) -> None:
    with FSDP.state_dict_type(model, form):
        state = model.state_dict()
    with FSDP.state_dict_type(state_of_another, form):
        state_of_another.load_state_dict(state)
    assert_equal(full_params(state_of_another), full_params(model))


@ORIG_PARAMS
@pytest.mark.parametrize(
    ("form", "on_mesh"),
    [*((form, False) for form in StateDictType), *((form, True) for form in StateDictType if "LOCAL" not in form.name)],
)
@on_ranks(2)
def test_parameters_without_elements_or_dimensions_are_saved_and_loaded(
    form: StateDictType, on_mesh: bool, use_orig_params: bool
) -> None:
    where = {"device_mesh": init_device_mesh("cpu", (2,))} if on_mesh else {}
    model, other = (wrapped(Unusual(), use_orig_params=use_orig_params, **where) for _ in range(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).backward()
    optimizer.step()
    round_trip(model, form, other)


class Aliased(nn.Module):
    """One block registered under two names, both of which run."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        self.decoder = self.encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


@ORIG_PARAMS
@pytest.mark.parametrize("form", list(StateDictType))
@on_ranks(2)
def test_a_module_at_two_places_of_a_unit_is_saved_under_both_names_and_loaded(
    form: StateDictType, use_orig_params: bool, rank: int
) -> None:
    model, other = (wrapped(Aliased(), use_orig_params=use_orig_params) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_on(model, optimizer, [batch(rank)])
    if form is not StateDictType.LOCAL_STATE_DICT:
        with FSDP.state_dict_type(model, form):
            assert {"encoder.up.weight", "decoder.up.weight"} <= set(model.state_dict())
    round_trip(model, form, other)


@ORIG_PARAMS
@on_ranks(2)
def test_a_module_at_two_places_of_a_unit_goes_through_a_checkpoint(
    use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    model, other = (wrapped(Aliased(), use_orig_params=use_orig_params) for _ in range(2))
    model(batch(rank)).sum().backward()
    save_checkpoint(tmp_path / "run", model).wait()
    load_checkpoint(tmp_path / "run", other)
    assert_equal(full_params(other), full_params(model))


@pytest.mark.parametrize("meshes", [(True, False), (False, True)], ids=["from a mesh", "to a mesh"])
@on_ranks(2)
def test_a_scalar_moves_between_models_with_and_without_a_mesh(meshes: tuple[bool, bool]) -> None:
    model, other = (
        wrapped(Unusual(), use_orig_params=True, **({"device_mesh": mesh(1, 2)} if on_mesh else {}))
        for on_mesh in meshes
    )
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, other)]
    model(torch.ones(2, 3)).backward()
    optimizers[0].step()
    round_trip(model, StateDictType.SHARDED_STATE_DICT, other)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizers[0])
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        optimizers[1].load_state_dict(FSDP.optim_state_dict_to_load(other, optimizers[1], state))
    full = [FSDP.optim_state_dict(each, optim)["state"] for each, optim in zip((model, other), optimizers, strict=True)]
    assert_equal(full[1]["scale"]["exp_avg"], full[0]["scale"]["exp_avg"])


class OddDtypes(nn.Module):
    """Frozen parameters and buffers of dtypes that gloo has no collectives for, one of them transposed."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 3), value))
        odd = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16, torch.bool, torch.complex64)
        for index, dtype in enumerate(odd):
            full = torch.full((4, 3), value).to(dtype)
            self.register_parameter(f"param{index}", nn.Parameter(full, requires_grad=False))
            self.register_buffer(f"buffer{index}", full.clone().t())
            self.register_buffer(f"scalar{index}", full[0, 0].clone())
            self.register_buffer(f"empty{index}", full[:0].clone())


@pytest.mark.parametrize("policy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
@on_ranks(4)
def test_tensors_of_every_dtype_are_synchronised_saved_and_loaded(policy: str, tmp_path: Path, rank: int) -> None:
    where = {"device_mesh": mesh(2, 2)} if policy == "HYBRID_SHARD" else {}
    options = {"use_orig_params": True, "sharding_strategy": ShardingStrategy[policy], **where}
    model = wrapped(OddDtypes(1.0 + rank), sync_module_states=True, **options)
    expected = dict(OddDtypes(1.0).state_dict())
    assert_equal(dict(model.state_dict()), expected)
    for form in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        other = wrapped(OddDtypes(2.0), **options)
        with unsharded_allowed(), FSDP.state_dict_type(model, form):
            state = model.state_dict()
        with FSDP.state_dict_type(other, form):
            other.load_state_dict(state)
        assert_equal(dict(other.state_dict()), expected)
    other = wrapped(OddDtypes(2.0), **options)
    save_checkpoint(tmp_path, model)
    load_checkpoint(tmp_path, other)
    assert_equal(dict(other.state_dict()), expected)


def stepped(use_orig_params: bool, seed: int, where: dict[str, object]) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrapped(Unusual(), use_orig_params=use_orig_params, **where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3)).square().backward()
        optimizer.step()
    return model, optimizer


BOXES = (ShardedStateDictConfig(boxes=True), ShardedOptimStateDictConfig(boxes=True))
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
# By name, the form and its two configurations; None is save_checkpoint.
OPTIM_FORMS = {
    "full": (FULL, None, None),
    "full on rank 0": (FULL, None, FullOptimStateDictConfig(rank0_only=True)),
    "sharded": (SHARDED, None, None),
    "boxes": (SHARDED, *BOXES),
    "checkpoint": None,
}


@ORIG_PARAMS
@pytest.mark.parametrize("form", OPTIM_FORMS)
@pytest.mark.parametrize("on_mesh", [False, True], ids=["group", "mesh"])
@on_ranks(2)
def test_optimizer_states_of_parameters_without_elements_or_dimensions_go_round(
    form: str, on_mesh: bool, use_orig_params: bool, tmp_path: Path
) -> None:
    where = {"device_mesh": init_device_mesh("cpu", (2,))} if on_mesh else {}
    (model, optimizer), (other, others) = (stepped(use_orig_params, seed, where) for seed in range(2))
    expected = FSDP.optim_state_dict(model, optimizer)
    assert set(expected["state"]) == {"weight", "no_rows", "no_columns", "scale"}
    assert [tuple(row["exp_avg"].shape) for _, row in sorted(expected["state"].items())] == [(3, 0), (0, 3), (), (5, 3)]
    how = OPTIM_FORMS[form]
    if how is None:
        save_checkpoint(tmp_path, model, optimizer)
        load_checkpoint(tmp_path, other, others)
    else:
        with FSDP.state_dict_type(model, *how):
            state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        with FSDP.state_dict_type(other, *how):
            other.load_state_dict(state)
            others.load_state_dict(FSDP.optim_state_dict_to_load(other, others, states))
    assert_equal(full_params(other), full_params(model))
    assert_equal(FSDP.optim_state_dict(other, others), expected)
