"""Lightning's Trainer and Fabric with FSDP: accumulation, clipping, validation, checkpoints, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.sides import OURS, SCRIPTS, THEIRS, assert_goes_on, numbers, run
from tests.support import assert_close
from tests.support.scripts import command


@pytest.mark.parametrize("script", ["lightning_train.py", "fabric_train.py"])
@pytest.mark.parametrize(
    "words",
    [
        ("--state-dict-type", "full", "--precision", "32-true"),
        ("--state-dict-type", "sharded", "--precision", "bf16-mixed", "--mesh"),
    ],
    ids=["full", "sharded-bf16-mesh"],
)
def test_a_script_trains_as_on_torch_and_resumes_in_mid_run(
    words: tuple[object, ...], script: str, tmp_path: Path
) -> None:
    ours = run(OURS, script, *words, "--folder", tmp_path / "ours")
    assert_goes_on(run(OURS, script, *words, "--folder", tmp_path / "ours", "--resume"), ours)
    theirs = run(THEIRS, script, *words, "--folder", tmp_path / "theirs")
    tolerance = 2e-2 if "bf16-mixed" in words else 1e-5
    assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_lightning_itself_starts_the_other_ranks_with_strategy_fsdp(tmp_path: Path) -> None:
    # Its own launcher starts the script once more for each other rank; here by words alone: strategy="fsdp".
    for script in ("lightning_train.py", "fabric_train.py"):
        words = ("--strategy", "fsdp", "--folder", tmp_path / script)
        output = command(*OURS, SCRIPTS / script, *words)
        assert "units 1 of fsdp_flat" in output
        assert len(numbers(output)) > 20
