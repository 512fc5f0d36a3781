"""Checks that a checkpoint is complete and undamaged: the command ``verify``."""

from __future__ import annotations

from pathlib import Path

from fsdp_flat.errors import FsdpFlatError, OptionError, counted
from fsdp_flat.tools.checkpoint_readers import open_checkpoint, problems_of
from fsdp_flat.tools.command_output import show


def show_problems(path: Path, *, allow_pickle: bool, as_json: bool) -> int:
    """Show what is wrong with a checkpoint; return 1 if something is."""
    try:
        checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
        num, problems = len(checkpoint.tensors), list(problems_of(checkpoint))
    except OptionError:
        raise
    except FsdpFlatError as error:
        num, problems = 0, [str(error)]
    data = {"path": str(path), "num_tensors": num, "problems": problems}
    good = f"{path}: {counted(num, 'tensors')} complete and undamaged"
    show(data, *(problems or [good]), as_json=as_json)
    return int(bool(problems))
