"""Seals the two file formats that are written here, and not by torch: the directory of checkpoints, and safetensors.

The directory: ``step-00000100/`` is a checkpoint. While it is written its name ends in ``.writing``. ``commit.json``
completes it: it is written last and holds the size and the CRC-32 of every other file; then the directory is renamed.
Each of these steps is flushed to disk before the next. Format 2 keeps all values in files of
torch.distributed.checkpoint. Format 1 kept those that are no tensors in a file of each rank beside them,
``rank-00000.pt``.

Safetensors (source: the project's README): eight bytes with the length of the header, little endian; the header, JSON
of ``{name: {"dtype", "shape", "data_offsets"}}`` and ``"__metadata__"`` of strings; then the data, row-major, where the
offsets count from the end of the header. The safetensors package, and with it the HuggingFace storage of
torch.distributed.checkpoint, is not used: it writes a file only from tensors that are all in memory.
"""

from __future__ import annotations

import json
import math
import mmap
import operator
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fsdp_flat.errors import LoadError, UnsupportedError

COMMIT_NAME = "commit.json"
_FORMAT = 2
_READABLE = (1, 2)
_WRITING = ".writing"
_REPLACED = ".replaced"
_REMOVING = ".removing"
_NAME = re.compile(r"step-(\d+)$")
_CHUNK = 1 << 22

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# The limit of the safetensors package; a longer header means a damaged file.
_LONGEST_HEADER = 100_000_000

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


# -- safetensors ------------------------------------------------------------------------------------------------------


class FileWriter:
    """Writes one file, tensor by tensor, under a temporary name until it is complete.

    ``tensors`` have the names, shapes and dtypes that will be written, in order; they may be on the meta device.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.tensors = tensors
        self.nbytes = 0
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        for name, tensor in tensors.items():
            if tensor.dtype not in _CODES:
                raise UnsupportedError(f"{name!r} is of {tensor.dtype}, which safetensors files cannot hold.")
            start, self.nbytes = self.nbytes, self.nbytes + tensor.nbytes
            offsets = [start, self.nbytes]
            header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._left = list(tensors)
        self._partial_path = path.with_name(path.name + ".partial")
        self._file: BinaryIO | None = None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor, on any device; flush the file to disk after the last one."""
        assert self._left.pop(0) == name
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._partial_path, "wb")  # noqa: SIM115 (closed below and by discard)
            self._file.write(self._header)
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        if flat.numel():
            self._file.write(flat.view(torch.uint8).numpy().data)
        if not self._left:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def commit(self) -> None:
        """Rename the complete file to its final path."""
        os.replace(self._partial_path, self.path)

    def discard(self) -> None:
        """Remove the temporary file, if there is one."""
        if self._file is not None:
            self._file.close()
            self._partial_path.unlink(missing_ok=True)


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Map a file into memory, so that elements are read when they are used; return tensors and the header's strings."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise LoadError(f"{path} is no safetensors file, or a truncated one ({size} bytes).")
        try:
            header = json.loads(file.read(length))
            metadata: dict[str, str] = header.pop("__metadata__", {})
            infos: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
            for name, entry in header.items():
                start, stop = map(operator.index, entry["data_offsets"])
                infos[name] = (_DTYPES[entry["dtype"]], tuple(map(operator.index, entry["shape"])), start, stop)
            end = 8 + length + max((stop for _, _, _, stop in infos.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise LoadError(f"The header of {path} cannot be read ({error!r}); is it a safetensors file?") from error
        if end != size:
            raise LoadError(f"{path} has {size} bytes; expected {end}. It is truncated or was altered.")
        for name, (dtype, shape, start, stop) in infos.items():
            nbytes = dtype.itemsize * math.prod(shape)
            if start < 0 or stop - start != nbytes or any(size < 0 for size in shape):
                raise LoadError(
                    f"The header of {path} contradicts itself: {name!r} of shape {shape} and {dtype} has {nbytes} "
                    f"bytes, but its data_offsets are {[start, stop]}."
                )
        # torch wants memory that may be written; a private copy of a page is made only if it is.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = {}
    for name, (dtype, shape, start, stop) in infos.items():
        flat = torch.empty(0, dtype=dtype)
        if stop > start:
            count = (stop - start) // dtype.itemsize
            flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=8 + length + start)
        found[name] = flat.view(shape)
    return found, metadata
