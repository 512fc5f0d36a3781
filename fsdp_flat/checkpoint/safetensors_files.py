"""Writes safetensors files tensor by tensor, and maps them into memory to read them.

Source of the format, of which this is the only description here: the project's README. Eight bytes with the length of
the header, little endian; the header, JSON of ``{name: {"dtype", "shape", "data_offsets"}}`` and ``"__metadata__"`` of
strings; then the data, row-major, where the offsets count from the end of the header. Entries neither overlap nor leave
gaps. The safetensors package, and with it the HuggingFace storage of torch.distributed.checkpoint, writes a file only
from tensors that are all in memory.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fsdp_flat.checkpoint.directory import Record, check_file, naming
from fsdp_flat.errors import LoadError, OptionError, UnsupportedError

# Every dtype of the format that torch has.
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class PartialFile:
    """Writes a file under a temporary name until it is complete, and keeps its record.

    Attributes:
        path: its final path.
        record: size and CRC-32 of what has been written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: Record = {"size": 0, "crc32": 0}
        self._partial_path = path.with_name(path.name + ".partial")
        self._file: BinaryIO | None = None

    def append(self, data: bytes | memoryview) -> None:
        """Write the next bytes."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._partial_path, "wb")  # noqa: SIM115 (closed below and by discard)
        with naming(self._partial_path):
            self._file.write(data)
        self.record = {"size": self.record["size"] + len(data), "crc32": zlib.crc32(data, self.record["crc32"])}

    def finish(self) -> None:
        """Flush the complete file to disk."""
        assert self._file is not None
        with naming(self._partial_path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def commit(self) -> None:
        """Rename the complete file to its final path."""
        os.replace(self._partial_path, self.path)

    def discard(self) -> None:
        """Remove the temporary file, if there is one."""
        if self._file is not None:
            # On a full disk what is left to flush fails once more.
            with suppress(OSError):
                self._file.close()
            self._partial_path.unlink(missing_ok=True)


class FileWriter(PartialFile):
    """Writes one safetensors file, tensor by tensor.

    ``tensors`` have the names, shapes and dtypes that will be written, in order; they may be on the meta device.
    """

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        super().__init__(path)
        self.tensors = tensors
        self.nbytes = 0
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        for name, tensor in tensors.items():
            if tensor.dtype not in _CODES:
                raise UnsupportedError(f"{name!r} is of {tensor.dtype}, which safetensors files cannot hold.")
            start, self.nbytes = self.nbytes, self.nbytes + tensor.nbytes
            shape, offsets = list(tensor.shape), [start, self.nbytes]
            if tensor.dtype is torch.float4_e2m1fn_x2 and shape:
                # An element of torch's dtype is two of the format's.
                shape[-1] *= 2
            header[name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._left = list(tensors)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor, on any device; flush the file to disk after the last one."""
        due = self._left.pop(0)
        assert name == due
        if self._file is None:
            self.append(self._header)
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        if flat.numel():
            self.append(flat.view(torch.uint8).numpy().data)
        if not self._left:
            self.finish()

    def check_here(self) -> None:
        """Raise unless this rank finds the complete file, which another rank may have written."""
        expected = len(self._header) + self.nbytes
        found = self._partial_path.stat().st_size if self._partial_path.exists() else "no file"
        if found != expected:
            raise OptionError(
                f"Rank 0 finds {found} at {self._partial_path}, of which {expected} bytes were written. With "
                "spread=True the directory must be one and the same for all ranks, on a file system that they share."
            )


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a file, which map it: elements are read when they are used; and the header's strings.

    Raises a LoadError unless the header describes all of the file, and nothing else.
    """
    check_file(path)
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise ValueError(f"its header would be of {length} bytes, the file is of {size}")
            header: dict[str, Any] = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its __metadata__ are not all strings")
        data = torch.from_file(str(path), size=size, dtype=torch.uint8)[8 + length :]
        found, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: list(map(int, item[1]["data_offsets"]))):
            found[name] = _entry(name, entry, data, end)
            end = entry["data_offsets"][1]
        if end != len(data):
            raise ValueError(f"its entries are of {end} bytes, and {len(data)} follow the header")
        return found, metadata
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        told = error if isinstance(error, ValueError) else repr(error)
        raise LoadError(f"{path} is no safetensors file, is truncated or was altered: {told}.") from error


def _entry(name: str, entry: Mapping[str, Any], data: torch.Tensor, end: int) -> torch.Tensor:
    """Return one tensor; raise a ValueError unless it fits its place, which begins where the entry before it ends."""
    start, stop = entry["data_offsets"]
    shape, dtype = entry["shape"], _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name!r} is of {entry['dtype']!r}, which torch {torch.__version__} does not have")
    if any(type(number) is not int or number < 0 for number in (start, stop, *shape)):
        raise ValueError(f"{name!r} has shape {shape} and data_offsets {[start, stop]}")
    if start != end:
        raise ValueError(f"{name!r} begins at {start}, and the entry before it ends at {end}")
    # Two elements of F4 are one of torch's.
    num_halves = 2 if dtype is torch.float4_e2m1fn_x2 else 1
    if math.prod(shape) * dtype.itemsize != (stop - start) * num_halves or stop > len(data):
        raise ValueError(f"{name!r} of {entry['dtype']} and shape {shape} does not fit data_offsets {[start, stop]}")
    if shape:
        shape = [*shape[:-1], shape[-1] // num_halves]
    part = data[start:stop]
    # A view of another dtype needs a multiple of its size.
    part = part.clone() if part.storage_offset() % dtype.itemsize else part
    return part.view(dtype).view(shape)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found
