"""Checks that a checkpoint is complete and undamaged: the command ``verify``."""

from __future__ import annotations

from pathlib import Path

from fsdp_flat.checkpoint.format import COMMIT_NAME
from fsdp_flat.checkpoint.safetensors_files import INDEX_NAME
from fsdp_flat.errors import FsdpFlatError, OptionError, counted, some_of
from fsdp_flat.tools.checkpoint_readers import CHECKSUMS_NAMES, open_checkpoint, problems_of
from fsdp_flat.tools.command_output import show
from fsdp_flat.tools.stored_checkpoint import StoredCheckpoint

# Files that say what is in others, and are compared with them.
_RECORDS = (COMMIT_NAME, INDEX_NAME, *CHECKSUMS_NAMES)


def show_problems(path: Path, *, allow_pickle: bool, as_json: bool) -> int:
    """Show what is wrong with a checkpoint, or what of its folder was not checked; return 1 if something is wrong."""
    num, unchecked, good = 0, list[str](), ""
    try:
        checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
        num, problems, unchecked = len(checkpoint.tensors), list(problems_of(checkpoint)), _unchecked(checkpoint)
        state = "complete and undamaged" if checkpoint.has_checksums else "complete; the files have no checksums"
        good = f"{path}: {counted(num, 'tensors')} {state}"
        if not num:
            good = f"{path}: no tensors; {counted(len(checkpoint.values), 'values')} undamaged"
    except OptionError:
        raise
    except FsdpFlatError as error:
        problems = [str(error)]
    data = {"path": str(path), "num_tensors": num, "problems": problems, "unchecked": unchecked}
    rest = [f"not checked: {some_of(unchecked, 8)}"] if unchecked else []
    show(data, *(problems or [good]), *rest, as_json=as_json)
    return int(bool(problems))


def _unchecked(checkpoint: StoredCheckpoint) -> list[str]:
    """Return the names of what is beside the files of a checkpoint in its folder, and was not read."""
    if not checkpoint.path.is_dir():
        return []
    read = {each for file in checkpoint.files for each in (file, *file.parents)}
    inside = (
        each for folder in {checkpoint.path, *(file.parent for file in checkpoint.files)} for each in folder.iterdir()
    )
    beside = (each for each in inside if each not in read and each.name not in _RECORDS and each.name[0] != ".")
    return sorted(str(each.relative_to(checkpoint.path)) for each in beside)
