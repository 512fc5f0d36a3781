"""Shows the checkpoints in a folder: the command ``ls``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_flat.errors import FsdpFlatError, OptionError
from fsdp_flat.tools.checkpoint_readers import has_steps, is_checkpoint, looks_like_checkpoint, open_checkpoint
from fsdp_flat.tools.command_output import TextTable, show
from fsdp_flat.tools.text import size_text


def show_folder(folder: Path, *, allow_pickle: bool, as_json: bool) -> int:
    """Show the checkpoints in a folder, and those that cannot be read; return 1 if there are such."""
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder; show one checkpoint by: fsdp-flat show {folder}")
    found: list[dict[str, Any]] = []
    inside = sorted(folder.iterdir())
    # A folder with a model's files may have folders of checkpoints beside them, as the Trainer's has.
    is_one = is_checkpoint(folder) and not any(
        path.is_dir() and (looks_like_checkpoint(path) or has_steps(path)) for path in inside
    )
    for path in [folder] if is_one else inside:
        if path.suffix in (".writing", ".removing", ".replaced"):
            found.append({"name": path.name, "problem": "unfinished"})
        elif looks_like_checkpoint(path) or has_steps(path):
            found.append({"name": path.name or path.resolve().name, **_summary_or_problem(path, allow_pickle)})
    rows = [
        [
            each["name"],
            each.get("kind") or each["problem"],
            *(["", "", ""] if "problem" in each else _cells(each["num_tensors"], each["nbytes"], each["num_ranks"])),
        ]
        for each in found
    ]
    table = TextTable(("name", "kind", "tensors>", "size>", "ranks>"), rows)
    show(found, table if rows else f"{folder} has no checkpoints.", as_json=as_json)
    return int(any("problem" in each for each in found))


def _summary_or_problem(path: Path, allow_pickle: bool) -> dict[str, Any]:
    try:
        return open_checkpoint(path, allow_pickle=allow_pickle).summary()
    except FsdpFlatError as error:
        return {"problem": str(error)}


def _cells(num_tensors: int, nbytes: int, num_ranks: int | None) -> list[str]:
    return [str(num_tensors), size_text(nbytes), "" if num_ranks is None else str(num_ranks)]
