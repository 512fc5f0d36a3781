"""The checkpoint code of FSDP1 codebases, of two styles, runs on torch's class and on ours with the same numbers.

``checkpoint_in_turns.py``: whole tensors from rank 0, loaded slice by slice through the flat parameters' attributes,
and rank by rank for the optimizer; each rank's flat parameters as they are. ``checkpoint_sharded_or_whole.py``:
sharded through ``torch.distributed.checkpoint``; whole by ``full_optim_state_dict``, ``scatter_full_optim_state_dict``,
``shard_full_optim_state_dict`` and ``rekey_optim_state_dict``. Checkpoints of either class load into the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_flat
from tests.support import assert_close, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.both_sides import TOLERANCE
from tests.support.peer import mend_peer
from tests.support.scripts import SCRIPTS, run_script
from tests.support.selection import some
from tests.support.transport import rank_device

TURNS = SCRIPTS / "checkpoint_in_turns.py"
SHARDED = SCRIPTS / "checkpoint_sharded_or_whole.py"
DEVICE = rank_device()


def on_both(script: Path, function: str, folder: Path, *arguments: Any) -> tuple[Any, Any]:
    """Results of a script's function on ours and on torch's class, each in a folder of its own."""
    mend_peer()
    theirs = run_script(script, function, str(folder / "torch"), *arguments)
    with fsdp_flat.installed():
        ours = run_script(script, function, str(folder / "ours"), *arguments)
    return ours, theirs


def crosswise(script: Path, function: str, folder: Path, *arguments: Any) -> tuple[Any, Any]:
    """The same, each from the other's checkpoint."""
    theirs = run_script(script, function, str(folder / "ours"), *arguments)
    with fsdp_flat.installed():
        ours = run_script(script, function, str(folder / "torch"), *arguments)
    return ours, theirs


@on_ranks(2)
def test_weights_are_loaded_slice_by_slice_and_optimizer_states_by_one_rank_after_the_other(tmp_path: Path) -> None:
    ours, theirs = on_both(TURNS, "first_half", tmp_path, DEVICE)
    assert_close(ours, theirs, **TOLERANCE)
    for way in (on_both, crosswise):
        assert_close(way(TURNS, "from_weights", tmp_path, DEVICE), (theirs[1], theirs[1]), **TOLERANCE)
        ends = way(TURNS, "from_full", tmp_path, DEVICE)
        assert_close(ends[0], ends[1], **TOLERANCE)


@on_ranks(2)
def test_each_rank_s_flat_parameters_are_saved_and_loaded_as_they_are(tmp_path: Path) -> None:
    on_both(TURNS, "first_half", tmp_path, DEVICE)
    for way in (on_both, crosswise):
        ours, theirs = way(TURNS, "from_local", tmp_path, DEVICE)
        assert_close(ours, theirs, **TOLERANCE)


@on_ranks(2)
@ORIG_PARAMS
def test_sharded_and_whole_checkpoints_resume_alike(tmp_path: Path, use_orig_params: bool) -> None:
    ours, theirs = on_both(SHARDED, "first_half", tmp_path, DEVICE, use_orig_params)
    assert_close(ours, theirs, **TOLERANCE)
    ends = []
    for how in some(("sharded", "scatter", "shard", "rekey"), 1):
        for way in (on_both, crosswise):
            ends += way(SHARDED, "second_half", tmp_path, DEVICE, use_orig_params, how)
    for end in ends[1:]:
        assert_close(end, ends[0], **TOLERANCE)
    for maker in ("ours", "torch"):
        assert_close(run_script(SHARDED, "load_into_plain", str(tmp_path / maker / "sharded")), theirs[1], **TOLERANCE)
