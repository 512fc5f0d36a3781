"""Defines what is on disk of a checkpoint: names, records of files, and ``commit.json``.

``step-00000100/`` is a checkpoint. While it is written its name ends in ``.writing``. ``commit.json`` completes it: it
holds the size and the CRC-32 of every other file, the numbers of the save, and the CRC-32 of all this (a record without
that one is read too). All other files are those of torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fsdp_flat.checkpoint.files import flush, is_remote, lexists
from fsdp_flat.checkpoint.progress import ProgressBar
from fsdp_flat.errors import LoadError, OptionError, OptionTypeError, some_of

COMMIT_NAME = "commit.json"
# A pattern of the names that torch.distributed.checkpoint gives to a rank's files.
FILES_OF_RANK = "__{}_*.distcp"
_FORMAT = 2
WRITING = ".writing"
REPLACED = ".replaced"
REMOVING = ".removing"
# A checkpoint's number has 18 digits at most, so that it fits in 64 bits.
_NAME = re.compile(r"step-([0-9]{8,18})$")
_MOST = 10**18 - 1
_CHUNK = 1 << 22

# The "size" of a file in bytes and its "crc32"; and these by name, as in commit.json.
Record = dict[str, int]
Records = dict[str, Record]


@dataclass(frozen=True, slots=True)
class Commit:
    """Holds what ``commit.json`` says of a checkpoint.

    Attributes:
        step: its number.
        order: sequence number of the save in the directory; the newest checkpoint has the highest.
        files: the records of all files but this one.
    """

    step: int
    order: int
    files: Records

    @property
    def nbytes(self) -> int:
        """Size of the files in bytes."""
        return sum(record["size"] for record in self.files.values())


def check_file(path: Path) -> None:
    """Raise unless there is a regular file: opening a FIFO or a device may wait for ever."""
    if not path.is_file():
        raise LoadError(f"{path} {'is no regular file' if lexists(path) else 'does not exist'}.")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in an OSError of the block that names no file, that of a full disk for instance."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def check_number(value: Any, name: str, least: int, *, is_optional: bool = False) -> None:
    """Raise unless an argument is an int of at least ``least``, or None if it ``is_optional``."""
    if value is None and is_optional:
        return
    wanted = f"{name} must be an int of at least {least}{', or None' if is_optional else ''}; got {value!r}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionTypeError(wanted)
    if value < least:
        raise OptionError(wanted)


def check_step(value: Any) -> None:
    """Raise unless an argument is the number of a checkpoint, or None."""
    check_number(value, "step", 0, is_optional=True)
    if value is not None and value > _MOST:
        raise OptionError(f"step must be an int of at most 18 digits; got {value!r}.")


def path_of(directory: Path, step: int) -> Path:
    """Return the directory of checkpoint ``step`` once it is complete."""
    return directory / f"step-{step:08d}"


def writing_path(directory: Path, step: int) -> Path:
    """Return the directory of checkpoint ``step`` while it is written."""
    final = path_of(directory, step)
    return final if is_remote(directory) else final.with_suffix(WRITING)


def _is_left(path: Path) -> bool:
    """Return whether a directory is a checkpoint that was never finished, where it is written under its own name."""
    return is_remote(path) and step_number_of(path.name) is not None and not (path / COMMIT_NAME).exists()


def step_number_of(name: str) -> int | None:
    """Return the number of a checkpoint by the name of its directory; None for another name."""
    match = _NAME.match(name)
    return None if match is None else int(match[1])


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory; none if there is no directory."""
    return [each.name for each in directory.iterdir()] if directory.is_dir() else []


def numbers(directory: Path) -> list[int]:
    """Return the numbers of the checkpoints in a directory, sorted."""
    names = [name for name in names_in(directory) if not _is_left(directory / name)]
    return sorted(step for step in map(step_number_of, names) if step is not None)


def orders_in(directory: Path) -> dict[int, int]:
    """Return by number of each checkpoint its place in the sequence of saves, 0 without a valid record.

    Those without a valid record are first, then the newest.
    """
    found: list[tuple[float, int, int]] = []
    for step in numbers(directory):
        try:
            order = read_commit(path_of(directory, step)).order
        except (LoadError, OSError):
            order = 0
        found.append((order or math.inf, step, order))
    return {step: order for _, step, order in sorted(found, reverse=True)}


def next_step(directory: Path) -> int:
    """Return one more than the highest number; the last of all numbers, which a folder may have, does not count."""
    return 1 + max(filter(_MOST.__gt__, numbers(directory)), default=-1)


def unfinished(directory: Path) -> list[str]:
    """Return the names of directories that interrupted or running saves and removals have left."""
    ends, names = (WRITING, REMOVING), names_in(directory)
    left = [name for name in names if _is_left(directory / name)]
    return sorted([*left, *(name for name in names if name.endswith(ends) and _NAME.match(Path(name).stem))])


def records_of(path: Path, pattern: str) -> Records:
    """Return the records of the files in a directory whose names match a pattern."""
    return {each.name: record_of(each) for each in sorted(path.glob(pattern))}


def record_of(path: Path, update: Callable[[int], object] = int) -> Record:
    """Return the record of a file; ``update`` is called with the number of bytes as they are read."""
    crc = 0
    check_file(path)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            update(len(chunk))
        return {"size": file.tell(), "crc32": crc}


def check_size(path: Path, record: Record) -> None:
    """Raise unless a file is there, with the size in its record."""
    check_file(path)
    size = path.stat().st_size
    if size != record["size"]:
        raise LoadError(f"{path} has {size} bytes, {record['size']} were written")


def check_sums(path: Path, records: Records, show: ProgressBar) -> None:
    """Raise unless files of the directory ``path`` have the checksums in their records."""
    with show(sum(record["size"] for record in records.values())) as update:
        for name, record in records.items():
            if record_of(path / name, update) != record:
                raise LoadError(f"{path / name} was altered: its checksum is not that of what was written.")


def _crc_of(body: Mapping[str, Any]) -> int:
    """Return the checksum of what a record says."""
    return zlib.crc32(json.dumps([body["step"], body["order"], body["files"]], sort_keys=True).encode())


def write_commit(writing: Path, step: int, order: int, records: Records) -> None:
    """Write the record that completes the checkpoint in ``writing``, and flush it to disk."""
    body = {"format": _FORMAT, "step": step, "order": order, "files": dict(sorted(records.items()))}
    body["crc32"] = _crc_of(body)
    with naming(writing / COMMIT_NAME), (writing / COMMIT_NAME).open("w") as file:
        json.dump(body, file, indent=2)
        flush(file)


def read_commit(path: Path) -> Commit:
    """Return the record of a checkpoint; raise a LoadError if it cannot be read, or was altered."""
    file = path / COMMIT_NAME
    if not lexists(file):
        if path.exists():
            if inside := numbers(path):
                raise LoadError(f"{path} is a folder of checkpoints; pass one of them, as {path_of(path, inside[-1])}")
            raise LoadError(f"{path} has no {COMMIT_NAME}: it was never finished")
        if path.is_symlink():
            raise LoadError(f"{path} is a link to {os.readlink(path)}, which does not exist")
        steps = ", ".join(map(str, numbers(path.parent))) or "none"
        raise LoadError(f"{path} does not exist; checkpoints there: {steps}")
    check_file(file)
    records: Records = {}
    try:
        body: dict[str, Any] = json.loads(file.read_text())
        if body["format"] != _FORMAT:
            raise LoadError(f"{path} has format {body['format']}; this version reads format {_FORMAT}")
        for name, entry in body["files"].items():
            records[name] = {"size": entry["size"], "crc32": entry["crc32"]}
        for count in chain([body["step"], body["order"]], *map(Record.values, records.values())):
            if type(count) is not int or count < 0:
                raise ValueError("a number is no int, or is negative")
        if body.get("crc32", _crc_of(body)) != _crc_of(body):
            raise LoadError(f"{file} was altered: its checksum is not that of what was written")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{file} cannot be read: {error!r}") from error
    if not records:
        raise LoadError(f"{file} names no files")
    if outside := [name for name in records if Path(name).name != name]:
        raise LoadError(f"{file} names {some_of(outside, 3)}, outside of its directory")
    return Commit(body["step"], body["order"], records)


def sized_commit(path: Path) -> Commit:
    """Return the record of a checkpoint; raise unless its files are there, with the sizes in it."""
    found = read_commit(path)
    for name, record in found.files.items():
        check_size(path / name, record)
    return found


def verified(path: Path, share: int, num_shares: int, show: ProgressBar) -> tuple[Commit | None, str]:
    """Return the record of a checkpoint, None if there is a problem with its files, and the first problem or ``""``.

    Sizes are compared for all files, checksums for those at positions ``share``, ``share + num_shares`` and so on.
    """
    try:
        found = sized_commit(path)
        check_sums(path, dict(list(found.files.items())[share::num_shares]), show)
        return found, ""
    except (LoadError, OSError) as error:
        return None, str(error)
