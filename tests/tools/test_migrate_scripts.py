"""Three FSDP1 scripts, rewritten or run as they are on fsdp_flat: the losses are those on torch's FSDP1."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp_flat
from fsdp_flat.migrate import main as migrate
from fsdp_flat.tools.migrate_source import migrate_source
from tests.support import on_ranks
from tests.support.peer import mend_peer

SCRIPTS = Path(__file__).parent / "scripts"


def rewritten(name: str, folder: Path) -> Path:
    """A copy of a script that ``migrate`` rewrote, each rank's own."""
    result = migrate_source((SCRIPTS / f"{name}.py").read_bytes())
    assert b"torch.distributed.fsdp" not in result.data
    assert not [found for found in result.findings if found.kind in ("check", "error")]
    path = folder / f"rank{dist.get_rank()}.py"
    path.write_bytes(result.data)
    return path


def run(script: Path, function: str, *arguments: Any) -> Any:
    """Call a function of a script on this rank, in the pool's process group."""
    namespace = runpy.run_path(str(script), run_name="script")
    with warnings.catch_warnings():
        # torch's FSDP1 is deprecated, and torch's checkpoints use what is.
        warnings.filterwarnings("ignore", module="" if script.parent == SCRIPTS else r"torch\.")
        return namespace[function](*arguments)


def assert_equal_losses(found: list[float], expected: list[float]) -> None:
    assert len(found) >= 3
    assert len(set(expected)) == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_the_tutorial_gives_the_losses_and_the_checkpoint_of_the_original(tmp_path: Path) -> None:
    mend_peer()
    original, ours = SCRIPTS / "train_tutorial.py", rewritten("train_tutorial", tmp_path)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    parse = runpy.run_path(str(original))["parse"]

    def train(script: Path, kind: str) -> list[float]:
        return run(script, "train", rank, num_ranks, parse(["--save", str(tmp_path / f"{kind}.pt")]))

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
    expected = run(original, "train")
    with fsdp_flat.installed():
        assert_equal_losses(run(original, "train"), expected)
    assert_equal_losses(run(rewritten("train_manual_wrap", tmp_path), "train"), expected)


@on_ranks(2)
def test_sharded_checkpoints_give_the_losses_of_the_original_and_load_on_either_side(tmp_path: Path) -> None:
    original, ours = SCRIPTS / "train_sharded_checkpoint.py", rewritten("train_sharded_checkpoint", tmp_path)
    expected = run(original, "train", str(tmp_path / "original"))
    assert_equal_losses(run(ours, "train", str(tmp_path / "ours")), expected)
    with fsdp_flat.installed():
        assert_equal_losses(run(original, "train", str(tmp_path / "installed")), expected)
    cpu = torch.device("cpu")
    assert_equal_losses(run(ours, "resumed", str(tmp_path / "original"), cpu), expected[3:])
    assert_equal_losses(run(original, "resumed", str(tmp_path / "ours"), cpu), expected[3:])


def test_a_folder_that_was_migrated_in_place_trains_under_torchrun(ranks: Any, tmp_path: Path) -> None:
    script = Path(shutil.copy(SCRIPTS / "train_manual_wrap.py", tmp_path))
    assert migrate(["--write", str(tmp_path)]) == 0
    output = command(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)
    )
    assert "model of fsdp_flat" in output
    found = [float(text) for text in re.findall(r"loss (\d+\.\d+)", output)]
    assert_equal_losses(found, ranks(2).run(run, SCRIPTS / "train_manual_wrap.py", "train")[0])


def command(*words: str) -> str:
    """What a command prints; it has to end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
