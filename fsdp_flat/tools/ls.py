"""Shows the checkpoints in a folder: the command ``ls``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_flat.errors import FsdpFlatError, OptionError
from fsdp_flat.sizes import size_text
from fsdp_flat.tools.checkpoint_readers import is_checkpoint, looks_like_checkpoint, open_checkpoint
from fsdp_flat.tools.command_output import TextTable, show


def show_folder(folder: Path, *, allow_pickle: bool, as_json: bool) -> int:
    """Show the checkpoints in a folder, and those that cannot be read; return 1 if there are such."""
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder; show one checkpoint by: fsdp-flat show {folder}")
    found: list[dict[str, Any]] = []
    inside = sorted(folder.iterdir())
    # A folder with a model's files may have folders of checkpoints beside them, as the Trainer's has.
    is_one = is_checkpoint(folder) and not any(path.is_dir() and looks_like_checkpoint(path) for path in inside)
    for path in [folder] if is_one else inside:
        if path.suffix in (".writing", ".removing", ".replaced"):
            found.append({"name": path.name, "problem": "unfinished"})
        elif looks_like_checkpoint(path):
            name = path.name or path.resolve().name
            try:
                found.append({"name": name, **open_checkpoint(path, allow_pickle=allow_pickle).summary()})
            except FsdpFlatError as error:
                found.append({"name": name, "problem": str(error)})
    rows, has_problems = [], any("problem" in checkpoint for checkpoint in found)
    for checkpoint in found:
        cells = ["", "", "", ""]
        if "problem" not in checkpoint:
            num_ranks = "" if checkpoint["num_ranks"] is None else str(checkpoint["num_ranks"])
            cells = [checkpoint["kind"], str(checkpoint["num_tensors"]), size_text(checkpoint["nbytes"]), num_ranks]
        rows.append([checkpoint["name"], *cells, *([checkpoint.get("problem", "")] if has_problems else [])])
    columns = ("name", "kind", "tensors>", "size>", "ranks>", *(["problem"] if has_problems else []))
    table = TextTable(columns, rows)
    show(found, table if rows else f"{folder} has no checkpoints.", as_json=as_json)
    return int(has_problems)
