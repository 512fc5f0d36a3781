"""``fsdp-flat plan`` and ``describe``: models by import path and by file, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_flat import ShardingStrategy, plan
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support.kit import Block, Stack
from tests.tools.conftest import Run, RunJson

STACK = "tests.support.kit:Stack"


def test_a_plan_is_that_of_the_function(run_json: RunJson, run: Run) -> None:
    arguments = (STACK, "--ranks", 4, "--batch", "16x8", "--wrap", "Block", "--strategy", "SHARD_GRAD_OP")
    status, found = run_json("plan", *arguments)
    expected = plan(
        Stack(),
        4,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        batch=torch.empty(16, 8),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
    assert (status, found["peak_nbytes"], found["sent_nbytes"]) == (0, expected.peak_nbytes, expected.sent_nbytes)
    assert run("plan", *arguments)[:2] == (0, f"{expected}\n")


def test_a_plan_that_fits_nothing_has_status_one(run_json: RunJson, tmp_path: Path) -> None:
    status, found = run_json("plan", STACK, "--ranks", 2, "--batch", "16x8", "--fit", "1kB")
    assert (status, found["fits"]) == (1, False)
    assert len(found["choices"]) > 1
    status, found = run_json(
        "plan", STACK, "--ranks", 2, "--batch", "16x8", "--fit", "1MB", "--picture", tmp_path / "plan.png"
    )
    assert (status, found["fits"]) == (0, True)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_describe_lists_the_units_that_wrapping_makes(run_json: RunJson) -> None:
    status, found = run_json("describe", STACK, "--ranks", 2, "--wrap", "Block")
    assert (status, [unit["name"] for unit in found["units"]]) == (
        0,
        ["Stack", "blocks.0", "blocks.1", "blocks.2"],
    )


def test_a_saved_model_is_unpickled_only_if_that_is_allowed(tmp_path: Path, run: Run, run_json: RunJson) -> None:
    with torch.device("meta"):
        torch.save(nn.Linear(4, 3), tmp_path / "model.pt")
    status, text, errors = run("describe", tmp_path / "model.pt", "--ranks", 2)
    assert (status, text) == (2, "")
    assert "--allow-pickle" in errors
    status, found = run_json("describe", tmp_path / "model.pt", "--ranks", 2, "--allow-pickle")
    assert (status, found["units"][0]["numel"]) == (0, 15)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("nothing", "nothing is no file; name a model by module:function, as in train:build."),
        ("nothing:build", "nothing:build cannot be imported: No module named 'nothing'."),
        ("torch:nothing", "torch:nothing cannot be imported: "),
        ("builtins:dict", "builtins:dict gives a dict; expected a torch.nn.Module."),
        ("nothing.json", "nothing.json is no config.json of a hub model: FileNotFoundError"),
    ],
)
def test_a_name_without_a_model_is_one_line(model: str, told: str, run: Run) -> None:
    status, text, errors = run("plan", model, "--ranks", 2)
    assert (status, text, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"fsdp-flat plan: {told}")


def test_unknown_classes_strategies_and_shapes_are_named(run: Run) -> None:
    assert "The model has no Blok; it has Block, " in run("plan", STACK, "--ranks", 2, "--wrap", "Blok")[2]
    assert "--strategy is one of FULL_SHARD, " in run("plan", STACK, "--ranks", 2, "--strategy", "FULL")[2]
    assert "--batch is a shape like 4x2048; got 4,8." in run("plan", STACK, "--ranks", 2, "--batch", "4,8")[2]
