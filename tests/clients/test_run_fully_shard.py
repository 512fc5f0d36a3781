"""A script written for torch's fully_shard runs through ``fsdp_flat.run``, under torchrun."""

from __future__ import annotations

from pathlib import Path

from tests.support.scripts import SCRIPTS, assert_equal_losses, printed_losses, torchrun

SCRIPT = SCRIPTS / "train_fully_shard.py"


def test_the_script_runs_through_fsdp_flat_run(tmp_path: Path) -> None:
    outputs = {}
    for name, words in (("torch", []), ("fsdp_flat", ["-m", "fsdp_flat.run", "--fully-shard"])):
        outputs[name] = torchrun(2, *words, SCRIPT, "--folder", tmp_path / name)
        assert f"model of {name}" in outputs[name]
    assert_equal_losses(printed_losses(outputs["fsdp_flat"]), printed_losses(outputs["torch"]))
