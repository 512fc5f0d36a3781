"""Three FSDP1 scripts, rewritten or run as they are on fsdp_flat: the losses are those on torch's FSDP1."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("libcst", reason="the migration tool needs it")

import fsdp_flat
from fsdp_flat.tools.migrate_source import migrate_source
from tests.support import on_ranks
from tests.support.peer import mend_peer
from tests.support.scripts import SCRIPTS, assert_equal_losses, run_script


def rewritten(name: str, folder: Path) -> Path:
    """A copy of a script that ``migrate`` rewrote, each rank's own."""
    result = migrate_source((SCRIPTS / f"{name}.py").read_bytes())
    assert b"torch.distributed.fsdp" not in result.data
    assert not [found for found in result.findings if found.kind in ("check", "error")]
    path = folder / f"rank{dist.get_rank()}.py"
    path.write_bytes(result.data)
    return path


@on_ranks(2)
def test_the_tutorial_gives_the_losses_and_the_checkpoint_of_the_original(tmp_path: Path) -> None:
    mend_peer()
    original, ours = SCRIPTS / "train_tutorial.py", rewritten("train_tutorial", tmp_path)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    parse = runpy.run_path(str(original))["parse"]

    def train(script: Path, kind: str) -> list[float]:
        return run_script(script, "train", rank, num_ranks, parse(["--save", str(tmp_path / f"{kind}.pt")]))

    expected = train(original, "original")
    assert_equal_losses(train(ours, "rewritten"), expected)
    with fsdp_flat.installed():
        assert_equal_losses(train(original, "installed"), expected)
    if rank == 0:
        saved = {kind: torch.load(tmp_path / f"{kind}.pt") for kind in ("original", "rewritten", "installed")}
        for kind in ("rewritten", "installed"):
            torch.testing.assert_close(saved[kind], saved["original"], rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_manual_wrapping_gives_the_losses_of_the_original(tmp_path: Path) -> None:
    original = SCRIPTS / "train_manual_wrap.py"
    expected = run_script(original, "train")
    with fsdp_flat.installed():
        assert_equal_losses(run_script(original, "train"), expected)
    assert_equal_losses(run_script(rewritten("train_manual_wrap", tmp_path), "train"), expected)


@on_ranks(2)
def test_sharded_checkpoints_give_the_losses_of_the_original_and_load_on_either_side(tmp_path: Path) -> None:
    original, ours = SCRIPTS / "train_sharded_checkpoint.py", rewritten("train_sharded_checkpoint", tmp_path)
    expected = run_script(original, "train", str(tmp_path / "original"))
    assert_equal_losses(run_script(ours, "train", str(tmp_path / "ours")), expected)
    with fsdp_flat.installed():
        assert_equal_losses(run_script(original, "train", str(tmp_path / "installed")), expected)
    cpu = torch.device("cpu")
    assert_equal_losses(run_script(ours, "resumed", str(tmp_path / "original"), cpu), expected[3:])
    assert_equal_losses(run_script(original, "resumed", str(tmp_path / "ours"), cpu), expected[3:])
