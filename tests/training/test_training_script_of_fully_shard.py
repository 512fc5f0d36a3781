"""A script written for torch's fully_shard, in the manner of torchtitan, unchanged with the names installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_flat
from tests.support import on_ranks
from tests.support.peer import mend_peer
from tests.support.scripts import SCRIPTS, run_script

SCRIPT = SCRIPTS / "train_fully_shard.py"
OPTIONS = {
    "full": {},
    "bf16": {"param_dtype": torch.bfloat16},
    "kept": {"reshard_after_forward": False},
    "offloaded": {"offload": True},
    "not_recomputed": {"checkpoint": False},
}


def of_both(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return what the script returns on torch's fully_shard and on ours."""
    mend_peer()
    theirs = run_script(SCRIPT, "train", folder / "theirs", **options)
    dist.barrier()
    with fsdp_flat.installed(fully_shard=True):
        return theirs, run_script(SCRIPT, "train", folder / "ours", **options)


@on_ranks(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_script_trains_saves_and_loads_as_on_torch(options: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = of_both(tmp_path, **options)
    tolerance = 2e-2 if "param_dtype" in options else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.from_size("cover", "trains twice on four ranks; tests/strategies compare hybrid meshes with torch's")
@on_ranks(4)
def test_the_script_trains_on_a_hybrid_mesh_as_on_torch(tmp_path: Path) -> None:
    theirs, ours = of_both(tmp_path, replicate=2)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
