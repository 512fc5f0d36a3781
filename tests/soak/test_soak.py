"""A short soak passes, and one whose fault no rank names fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.__main__ import Soak, SoakFailure, main
from tests.soak.faults import FAULTS, Fault
from tests.support.pool import start_server


def test_runs_that_are_killed_and_started_again_end_with_the_weights_of_an_undisturbed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--faults", "2"]) == 0
    told = capsys.readouterr().out
    assert "2 faults in" in told
    assert "equal to the bit at 4 ranks" in told


def test_a_fault_that_no_rank_names_fails_the_soak(tmp_path: Path) -> None:
    start_server()
    kill = FAULTS[0]
    fault = Fault(kill.name, kill.strike, "the cat did it")
    with pytest.raises(SoakFailure, match="did not say so"):
        Soak(tmp_path, seed=0).run("unnamed", tmp_path / "checkpoints", [2], [fault])
