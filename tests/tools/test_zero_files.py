"""Checkpoints of DeepSpeed ZeRO-3, in the layout that its script zero_to_fp32 reads."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from fsdp_flat.tools.checkpoint_readers import open_checkpoint
from tests.tools.conftest import Run

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (2, 2, 2), "scale": (), "frozen": (3, 5)}


def rank_rows(tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's part of a parameter, padded at the end."""
    most = -(-tensor.numel() // num_ranks)
    padded = torch.cat([tensor.reshape(-1), torch.full((most * num_ranks - tensor.numel(),), -1.0)])
    return padded[rank * most : (rank + 1) * most]


def write_zero3(folder: Path, params: dict[str, torch.Tensor], num_ranks: int, *, stage: int = 3) -> None:
    step = folder / "global_step2"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step2")
    groups = [["a.weight", "a.bias"], ["b.weight", "scale"]]
    for rank in range(num_ranks):
        # Sub-groups divide the flat tensor anywhere, also inside a parameter.
        flat = torch.cat([rank_rows(params[name], rank, num_ranks) for group in groups for name in group])
        flat_groups = list(flat.split([4, len(flat) - 4]))
        moments = {index: {"step": 2, "exp_avg": part * 2} for index, part in enumerate(flat_groups)}
        optim = {
            "zero_stage": stage,
            "partition_count": num_ranks,
            "fp32_flat_groups": flat_groups,
            "optimizer_state_dict": {"state": moments, "param_groups": [{"lr": 0.1}]},
        }
        model = {
            "module": OrderedDict({"running": torch.ones(2), **{name: torch.zeros(0) for name in SHAPES}}),
            "buffer_names": ["running"],
            "param_shapes": [OrderedDict((name, params[name].shape) for name in group) for group in groups],
            "frozen_param_shapes": OrderedDict(frozen=params["frozen"].shape),
            "frozen_param_fragments": {"frozen": rank_rows(params["frozen"], rank, num_ranks)},
            "shared_params": {"tied": "a.weight"},
            "ds_version": "0.18.0",
            "global_steps": 2,
        }
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optim}, step / f"bf16_{prefix}_optim_states.pt")
        torch.save(model, step / f"{prefix}_model_states.pt")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 12])
def test_parameters_are_those_before_sharding(tmp_path: Path, num_ranks: int, run: Run) -> None:
    params = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    write_zero3(tmp_path / "zero", params, num_ranks)
    found = open_checkpoint(tmp_path / "zero")
    assert found.num_ranks == num_ranks
    for name, value in params.items():
        assert torch.equal(found.tensors["module", name].full(), value), name
        if name != "frozen":
            assert torch.equal(found.tensors["optimizer", "state", name, "exp_avg"].full(), value * 2), name
    assert torch.equal(found.tensors["module", "running"].full(), torch.ones(2))
    assert torch.equal(found.tensors["module", "tied"].full(), params["a.weight"])
    assert run("verify", tmp_path / "zero")[0] == 0
    torch.save({**params, "running": torch.ones(2), "tied": params["a.weight"]}, tmp_path / "plain.pt")
    for kind in ("safetensors", "dcp", "sharded", "torch"):
        assert run("convert", tmp_path / "zero", tmp_path / kind, "--to", kind, "--ranks", 2)[0] == 0
        assert run("diff", tmp_path / "plain.pt", tmp_path / kind)[:2] == (
            0,
            "7 tensors and 0 values are equal, bit by bit\n",
        )


def test_another_stage_and_missing_ranks_are_refused(tmp_path: Path, run: Run) -> None:
    params = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    write_zero3(tmp_path / "two", params, 2, stage=2)
    assert "is of ZeRO stage [2]" in run("show", tmp_path / "two")[2]
    write_zero3(tmp_path / "three", params, 2)
    next((tmp_path / "three").rglob("*rank_1*optim*")).unlink()
    assert "on 2 ranks, with files of 1" in run("show", tmp_path / "three")[2]
