"""Optimizer states of parameters of ``fully_shard`` that have another shape than the parameter are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat import FullOptimStateDictConfig, StateDictType, fully_shard, load_checkpoint, save_checkpoint
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import LoadError
from tests.support import assert_equal, on_ranks


class RowScaled(torch.optim.Optimizer):
    """Keeps one second moment for each row, and one number for a parameter, as Adam-mini."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            row = self.state[param]
            if self.kind == "plain":
                row["scale"] = row.get("scale", torch.ones(1)) * 0.5
                param.add_(param.grad, alpha=-row["scale"].item())
            else:
                new = param.grad.pow(2).sum(-1, keepdim=self.kind == "rows")
                row["scale"] = row["scale"] * 0.5 + new if row else new
                scale = row["scale"] if self.kind == "rows" else row["scale"].unsqueeze(-1)
                param.add_(param.grad / (scale.sqrt() + 1), alpha=-0.1)


KINDS = pytest.mark.parametrize("kind", ["rows", "vector", "plain"])
Pair = tuple[nn.Module, RowScaled]


def trained(kind: str, seed: int, steps: int = 1) -> Pair:
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(6, 5, bias=False)))
    optimizer = RowScaled(model.parameters(), kind)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: RowScaled) -> None:
    model(torch.arange(12.0).view(2, 6)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_goes_on_alike(first: Pair, other: Pair) -> None:
    for row, expected in zip(other[1].state.values(), first[1].state.values(), strict=True):
        assert type(row["scale"]) is type(expected["scale"])
    for each in (first, other):
        step(*each)
    (value,), (expected,) = ([row["scale"] for row in each[1].state.values()] for each in (other, first))
    assert_equal(*(each.full_tensor() if isinstance(each, DTensor) else each for each in (value, expected)))
    weights = [each[0].get_parameter("0.weight").full_tensor() for each in (other, first)]  # type: ignore[operator]
    assert_equal(*weights)


@KINDS
@pytest.mark.parametrize("steps", [0, 1], ids=["a new optimizer", "one with states"])
@on_ranks(2, 4)
def test_states_of_other_shapes_go_into_checkpoints_and_out_of_them(kind: str, steps: int, tmp_path: Path) -> None:
    first, other = trained(kind, 0), trained(kind, 1, steps)
    save_checkpoint(tmp_path, *first)
    assert load_checkpoint(tmp_path, *other) is not None
    assert_goes_on_alike(first, other)


@KINDS
@pytest.mark.parametrize("form", ["full", "rank 0", "sharded"])
@pytest.mark.parametrize("steps", [0, 1], ids=["a new optimizer", "one with states"])
@on_ranks(2)
def test_states_of_other_shapes_go_into_state_dicts_and_out_of_them(kind: str, form: str, steps: int) -> None:
    first, other = trained(kind, 0), trained(kind, 1, steps)
    type_ = StateDictType.SHARDED_STATE_DICT if form == "sharded" else StateDictType.FULL_STATE_DICT
    config = FullOptimStateDictConfig(rank0_only=True) if form == "rank 0" else None
    for model, _ in (first, other):
        FSDP.set_state_dict_type(model, type_, None, config)
    states = FSDP.optim_state_dict(*first)
    other[0].load_state_dict(first[0].state_dict())
    other[1].load_state_dict(FSDP.optim_state_dict_to_load(*other, states))
    assert_goes_on_alike(first, other)


@on_ranks(2)
def test_a_state_of_a_shape_that_fits_neither_parameter_nor_optimizer_is_refused() -> None:
    model, optimizer = trained("rows", 0)
    saved = FSDP.optim_state_dict(model, optimizer)
    # (6, 5) is no part of (5, 6).
    saved["state"]["0.weight"]["scale"] = torch.ones(6, 5)
    with pytest.raises(LoadError, match=r"'scale' of '0\.weight' has shape \(6, 5\); expected \(5, 6\)"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved)
