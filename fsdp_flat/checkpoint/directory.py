"""A directory of checkpoints on disk: what is whole, what is not, and what may go. No process group is needed here.

``step-00000100/`` is a checkpoint. While it is written its name ends in ``.writing``; what makes it whole is
``commit.json``, which is written last and holds the size and the CRC-32 of every other file, after which the
directory gets its name. Each of these steps is flushed to disk before the next.
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

__all__ = [
    "Commit",
    "FileRecord",
    "begin",
    "commit",
    "flush",
    "list_steps",
    "prune",
    "recover",
    "unfinished",
    "verify_files",
]

COMMIT_NAME = "commit.json"
_FORMAT = 1
_WRITING = ".writing"
_REPLACED = ".replaced"
_REMOVING = ".removing"
_NAME = re.compile(r"step-(\d+)$")
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file has to be."""

    name: str
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The record of a whole checkpoint.

    Attributes:
        path: its directory.
        step: its number.
        order: counts the saves into this directory; the newest checkpoint is that of the last save.
        files: every file but the record itself.
    """

    path: Path
    step: int
    order: int
    files: tuple[FileRecord, ...]


def path_of(directory: Path, step: int) -> Path:
    """Where checkpoint ``step`` is once it is whole."""
    return directory / f"step-{step:08d}"


def writing_path(directory: Path, step: int) -> Path:
    """Where checkpoint ``step`` is while it is written."""
    return path_of(directory, step).with_suffix(_WRITING)


def begin(directory: Path, step: int) -> None:
    """Make an empty directory to write checkpoint ``step`` into; what an earlier attempt left there is removed."""
    recover(directory)
    writing = writing_path(directory, step)
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)


def recover(directory: Path) -> None:
    """Put back a checkpoint that was about to be replaced by another of its number when the process was killed."""
    for away in directory.glob(f"step-*{_REPLACED}"):
        final = away.with_suffix("")
        if final.exists():
            shutil.rmtree(away, ignore_errors=True)
        else:
            os.replace(away, final)


def flush(path: Path) -> FileRecord:
    """Have a file on disk, and say what it is."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return record_of(path)


def record_of(path: Path) -> FileRecord:
    """Size and CRC-32 of a file."""
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return FileRecord(path.name, size, crc)


def commit(directory: Path, step: int, files: Iterable[FileRecord]) -> None:
    """Declare what was written for ``step`` a whole checkpoint, in place of an earlier one of this number."""
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
    # The old one is out of the way only between two renames, and recover() puts it back after a kill there.
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
    # First out of sight as a whole: a removal that is cut off must not leave half a checkpoint under its name.
    away = path.with_suffix(_REMOVING)
    shutil.rmtree(away, ignore_errors=True)
    os.replace(path, away)
    shutil.rmtree(away, ignore_errors=True)


def list_steps(directory: Path) -> list[int]:
    """Numbers of the checkpoints that have their final names, the last save first, and before it what has no record."""
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
    """Names of what saves that were cut off have left, or that are going on."""
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in directory.iterdir() if entry.suffix in (_WRITING, _REMOVING))


def read_commit(directory: Path, step: int) -> Commit:
    """The record of a checkpoint.

    Raises:
        LoadError: there is none, or it cannot be read.
    """
    path = path_of(directory, step)
    try:
        body: dict[str, Any] = json.loads((path / COMMIT_NAME).read_text())
        if body["format"] != _FORMAT:
            raise LoadError(f"{path} has format {body['format']}; this version reads format {_FORMAT}.")
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
    """What is wrong with the files of a checkpoint; empty if nothing is.

    Args:
        found: its record.
        share: of the files, which every rank sees, those at positions ``share``, ``share + num_shares`` and so on are
            read; sizes are compared for all.
        num_shares: how many ranks share the reading.
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
    """Remove all but those of the last ``keep_last`` saves, and what saves that were cut off have left.

    No other save may be going on in this directory.
    """
    for step in list_steps(directory)[keep_last:]:
        _remove(path_of(directory, step))
    for name in unfinished(directory):
        shutil.rmtree(directory / name, ignore_errors=True)
