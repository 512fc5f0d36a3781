"""Manages a directory of checkpoints on disk: commits, verifies, lists and removes them, without a process group.

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
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Records the name, size (bytes) and CRC-32 of a file."""

    name: str
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Records the contents of a complete checkpoint, as stored in ``commit.json``.

    Attributes:
        path: its directory.
        step: its number.
        order: sequence number of the save in this directory; the newest checkpoint has the highest.
        files: every file but the record itself.
    """

    path: Path
    step: int
    order: int
    files: tuple[FileRecord, ...]


def path_of(directory: Path, step: int) -> Path:
    """Return the directory of checkpoint ``step`` once it is complete."""
    return directory / f"step-{step:08d}"


def writing_path(directory: Path, step: int) -> Path:
    """Return the directory of checkpoint ``step`` while it is written."""
    return path_of(directory, step).with_suffix(_WRITING)


def remove_attempt(directory: Path, step: int) -> None:
    """Remove files of an earlier attempt to write checkpoint ``step``. The ranks that write create its directory.

    Raises:
        FileExistsError: there is a file in the place of the directory.
    """
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


def record_of(path: Path) -> FileRecord:
    """Compute the record of a file: its size and CRC-32."""
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return FileRecord(path.name, size, crc)


def commit(directory: Path, step: int, files: Iterable[FileRecord]) -> None:
    """Complete the checkpoint that was written for ``step``, replacing an earlier one of this number."""
    final, writing = path_of(directory, step), writing_path(directory, step)
    records = sorted(files, key=lambda record: record.name)
    order = 1 + max((_order(directory, other) for other in list_steps(directory)), default=0)
    named = {r.name: {"size": r.size, "crc32": r.crc} for r in records}
    body = {"format": _FORMAT, "step": step, "order": order, "files": named}
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


def _remove(path: Path) -> None:
    # Rename first: an interrupted removal must not leave a partial checkpoint under its name.
    away = path.with_suffix(_REMOVING)
    shutil.rmtree(away, ignore_errors=True)
    os.replace(path, away)
    shutil.rmtree(away, ignore_errors=True)


def list_steps(directory: Path) -> list[int]:
    """Return the numbers of all checkpoints with their final names: those without a valid record, then newest first."""
    if not directory.is_dir():
        return []
    found = [int(match[1]) for entry in directory.iterdir() if (match := _NAME.match(entry.name))]
    return sorted(found, key=lambda step: (_order(directory, step) or math.inf, step), reverse=True)


def _order(directory: Path, step: int) -> int:
    try:
        return read_commit(directory, step).order
    except (LoadError, OSError):
        return 0


def unfinished(directory: Path) -> list[str]:
    """Return the names of directories that interrupted or running saves and removals have left."""
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in directory.iterdir() if entry.suffix in (_WRITING, _REMOVING))


def read_commit(directory: Path, step: int) -> Commit:
    """Read the record of a checkpoint.

    Raises:
        LoadError: there is none, or it cannot be read.
    """
    path = path_of(directory, step)
    try:
        body: dict[str, Any] = json.loads((path / COMMIT_NAME).read_text())
        if body["format"] not in _READABLE:
            raise LoadError(f"{path} has format {body['format']}; this version reads formats {_READABLE}.")
        files = tuple(FileRecord(name, entry["size"], entry["crc32"]) for name, entry in body["files"].items())
        found = Commit(path, int(body["step"]), int(body["order"]), files)
    except FileNotFoundError as error:
        raise LoadError(f"{path} has no {COMMIT_NAME}: it was never finished.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{path / COMMIT_NAME} cannot be read: {error!r}.") from error
    if not files:
        raise LoadError(f"{path / COMMIT_NAME} names no files.")
    return found


def verify_files(found: Commit, share: int = 0, num_shares: int = 1) -> str:
    """Verify the files of a checkpoint; return the first error, or an empty string.

    Args:
        found: its record.
        share: index of the caller's share: checksums are compared for the files at positions ``share``,
            ``share + num_shares`` and so on, sizes for all files.
        num_shares: number of ranks that share the reading.
    """
    for record in found.files:
        path = found.path / record.name
        if not path.exists():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != record.size:
            return f"{path} has {size} bytes, {record.size} were written"
    for record in found.files[share::num_shares]:
        if record_of(found.path / record.name) != record:
            return f"{found.path / record.name} was altered: its checksum is not that of what was written"
    return ""


def prune(directory: Path, keep_last: int) -> None:
    """Remove all but the last ``keep_last`` checkpoints, and the files of interrupted saves.

    No other save may be running in this directory.
    """
    for step in list_steps(directory)[keep_last:]:
        _remove(path_of(directory, step))
    for name in unfinished(directory):
        shutil.rmtree(directory / name, ignore_errors=True)
