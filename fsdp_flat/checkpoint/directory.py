"""Manages a directory of checkpoints on disk: the one place that knows names, records and the order of renames.

``step-00000100/`` is a checkpoint. While it is written its name ends in ``.writing``. ``commit.json`` completes it:
it is written last and holds the size and the CRC-32 of every other file; then the directory is renamed. Each of these
steps is flushed to disk before the next.

Format 2 keeps all values in files of torch.distributed.checkpoint. Format 1 kept those that are no tensors in a file of
each rank beside them, ``rank-00000.pt``.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from fsdp_flat.errors import LoadError

COMMIT_NAME = "commit.json"
_FORMAT = 2
_READABLE = (1, 2)
_WRITING = ".writing"
_REPLACED = ".replaced"
_REMOVING = ".removing"
_NAME = re.compile(r"step-(\d+)$")
_CHUNK = 1 << 22

# By name of a file, its "size" in bytes and its "crc32", as in commit.json.
Records = dict[str, dict[str, int]]


def path_of(directory: Path, step: int) -> Path:
    """Return the directory of checkpoint ``step`` once it is complete."""
    return directory / f"step-{step:08d}"


def writing_path(directory: Path, step: int) -> Path:
    """Return the directory of checkpoint ``step`` while it is written."""
    return path_of(directory, step).with_suffix(_WRITING)


def remove_attempt(directory: Path, step: int) -> None:
    """Remove files of an earlier attempt to write checkpoint ``step``. The ranks that write create its directory."""
    recover(directory)
    writing = writing_path(directory, step)
    shutil.rmtree(writing, ignore_errors=True)
    if writing.exists():
        raise FileExistsError(f"{writing} is in the way of the checkpoint's directory and cannot be removed.")


def recover(directory: Path) -> None:
    """Restore a checkpoint that was being replaced by another of its number when the process was killed."""
    for away in directory.glob(f"step-*{_REPLACED}"):
        final = away.with_suffix("")
        if final.exists():
            shutil.rmtree(away, ignore_errors=True)
        else:
            os.replace(away, final)


def records_of(path: Path, pattern: str) -> Records:
    """Return the records of the files in a directory whose names match a pattern."""
    return {each.name: _record(each) for each in sorted(path.glob(pattern))}


def _record(path: Path) -> dict[str, int]:
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
        return {"size": file.tell(), "crc32": crc}


def commit(directory: Path, step: int, records: Records) -> None:
    """Complete the checkpoint that was written for ``step``, replacing an earlier one of this number."""
    final, writing = path_of(directory, step), writing_path(directory, step)
    # The newest checkpoint has the highest sequence number, whatever its step.
    order = 1 + max((_order(directory, other) for other in list_steps(directory)), default=0)
    body = {"format": _FORMAT, "step": step, "order": order, "files": dict(sorted(records.items()))}
    with open(writing / COMMIT_NAME, "w") as file:
        json.dump(body, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _flush_directory(writing)
    # The old checkpoint is missing only between these two renames; recover() restores it after a kill there.
    away = final.with_suffix(_REPLACED)
    if final.exists():
        os.replace(final, away)
    os.replace(writing, final)
    _flush_directory(directory)
    shutil.rmtree(away, ignore_errors=True)


def _flush_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_steps(directory: Path) -> list[int]:
    """Return the numbers of all checkpoints with their final names: those without a valid record, then newest first."""
    found = [int(match[1]) for name in _names_in(directory) if (match := _NAME.match(name))]
    return sorted(found, key=lambda step: (_order(directory, step) or math.inf, step), reverse=True)


def unfinished(directory: Path) -> list[str]:
    """Return the names of directories that interrupted or running saves and removals have left."""
    return sorted(name for name in _names_in(directory) if name.endswith((_WRITING, _REMOVING)))


def _names_in(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


def _order(directory: Path, step: int) -> int:
    try:
        return _read_commit(path_of(directory, step))[0]
    except (LoadError, OSError):
        return 0


def _read_commit(path: Path) -> tuple[int, Records]:
    """Return the sequence number of the save of a checkpoint, and the records of its files."""
    try:
        body: dict[str, Any] = json.loads((path / COMMIT_NAME).read_text())
        if body["format"] not in _READABLE:
            raise LoadError(f"{path} has format {body['format']}; this version reads formats {_READABLE}.")
        records = {name: {key: entry[key] for key in ("size", "crc32")} for name, entry in body["files"].items()}
        order = int(body["order"])
    except FileNotFoundError as error:
        raise LoadError(f"{path} has no {COMMIT_NAME}: it was never finished.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path / COMMIT_NAME} cannot be read: {error!r}.") from error
    if not records:
        raise LoadError(f"{path / COMMIT_NAME} names no files.")
    return order, records


def find_problem(path: Path, share: int, num_shares: int) -> str:
    """Verify the files of a checkpoint; return the first problem, or an empty string.

    Sizes are compared for all files, checksums for those at positions ``share``, ``share + num_shares`` and so on.
    """
    try:
        _, records = _read_commit(path)
        for name, record in records.items():
            if not (path / name).exists():
                return f"{path / name} is missing"
            size = (path / name).stat().st_size
            if size != record["size"]:
                return f"{path / name} has {size} bytes, {record['size']} were written"
        for name in list(records)[share::num_shares]:
            if _record(path / name) != records[name]:
                return f"{path / name} was altered: its checksum is not that of what was written"
    except (LoadError, OSError) as error:
        return str(error)
    return ""


def files_of_ranks(path: Path) -> list[Path]:
    """Return by rank the files with values that are no tensors; empty unless the checkpoint is of format 1."""
    return sorted(path.glob("rank-*.pt"))


def prune(directory: Path, keep_last: int) -> None:
    """Remove all but the last ``keep_last`` checkpoints, and the files of interrupted saves.

    No other save may be running in this directory.
    """
    for step in list_steps(directory)[keep_last:]:
        # Rename first: an interrupted removal must not leave a partial checkpoint under its name.
        path = path_of(directory, step)
        shutil.rmtree(path.with_suffix(_REMOVING), ignore_errors=True)
        os.replace(path, path.with_suffix(_REMOVING))
    for name in unfinished(directory):
        shutil.rmtree(directory / name, ignore_errors=True)
