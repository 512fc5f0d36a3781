"""The functions that a save or a load enters are counted."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from benchmarks import functions
from tests.support import on_ranks

OURS = 6


@on_ranks(2)
def test_the_functions_of_each_save_and_load_are_counted_apart(tmp_path: Path) -> None:
    found = dict(islice(functions.entered_in_states(str(tmp_path)), OURS))
    named = {title: {code.co_name for code in entered.calls} for title, entered in found.items()}
    for kind, expected in {
        "a FULL state dict": "save_model",
        "an optimizer's state dict": "save_optim_state",
        "a load of a FULL state dict": "load_unit",
        "a load of an optimizer's state dict": "load_optim_state",
        "a checkpoint": "save_checkpoint",
        "a load of a checkpoint": "load_checkpoint",
    }.items():
        title = f"{kind}, use_orig_params=False"
        assert expected in named[title]
        assert functions.summary(found[title], 1).split()[1] == "functions"
    assert "save_checkpoint" not in named["a load of a checkpoint, use_orig_params=False"]
