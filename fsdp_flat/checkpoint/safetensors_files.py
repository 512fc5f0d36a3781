"""Reads and writes safetensors files tensor by tensor and by ranges of elements.

The format (source: the safetensors project's README): eight bytes with the length of the header, little endian; the
header, JSON of ``{name: {"dtype", "shape", "data_offsets"}}`` and ``"__metadata__"`` of strings; then the data,
row-major, where the offsets count from the end of the header. The safetensors package, and with it the HuggingFace
storage of torch.distributed.checkpoint, is not used: it writes a file only from tensors that are all in memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import BinaryIO

import torch

from fsdp_flat.errors import LoadError, UnsupportedError

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


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Describes dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def fits(self, start: int, stop: int) -> bool:
        """Return whether the bytes from ``start`` to ``stop`` can be the tensor's data."""
        return start >= 0 and stop - start == self.nbytes and all(size >= 0 for size in self.shape)


class FileWriter:
    """Writes one file, tensor by tensor, under a temporary name until it is complete.

    Args:
        path: final path of the file.
        tensors: every tensor that will be written, in order.
        metadata: strings for the header.

    Raises:
        UnsupportedError: a dtype that the format does not have.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> None:
        self._path = path
        self._expected = list(tensors)
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        at = 0
        for name, info in tensors.items():
            if info.dtype not in _CODES:
                raise UnsupportedError(f"{name!r} is of {info.dtype}, which safetensors files cannot hold.")
            header[name] = {
                "dtype": _CODES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [at, at + info.nbytes],
            }
            at += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file: BinaryIO = open(self._partial_path, "wb")  # noqa: SIM115 (closed by close and discard)
        self._file.write(len(text).to_bytes(8, "little") + text)

    @property
    def _partial_path(self) -> Path:
        return self._path.with_name(self._path.name + ".partial")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor, on any device."""
        assert self._expected.pop(0) == name
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        if flat.numel():
            self._file.write(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Flush the complete file to disk, still under its temporary name."""
        assert not self._expected
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def commit(self) -> None:
        """Rename the closed file to its final path."""
        os.replace(self._partial_path, self._path)

    def discard(self) -> None:
        """Remove the temporary file."""
        self._file.close()
        self._partial_path.unlink(missing_ok=True)


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Map a file into memory: the elements of a tensor are read when they are used.

    Returns:
        The tensors by name, and the header's strings.

    Raises:
        LoadError: not a safetensors file, a truncated one, or one whose header contradicts itself.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise LoadError(f"{path} is no safetensors file, or a truncated one ({size} bytes).")
        try:
            header = json.loads(file.read(length))
            metadata: dict[str, str] = header.pop("__metadata__", {})
            infos = {
                name: TensorInfo(_DTYPES[entry["dtype"]], tuple(map(index, entry["shape"])))
                for name, entry in header.items()
            }
            ranges = {name: [index(at) for at in entry["data_offsets"]] for name, entry in header.items()}
            end = 8 + length + max((stop for _, stop in ranges.values()), default=0)
            wrong = [name for name, info in infos.items() if not info.fits(*ranges[name])]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise LoadError(f"The header of {path} cannot be read ({error!r}); is it a safetensors file?") from error
        if end != size:
            raise LoadError(f"{path} has {size} bytes; expected {end}. It is truncated or was altered.")
        if wrong:
            info = infos[wrong[0]]
            raise LoadError(
                f"The header of {path} contradicts itself: {wrong[0]!r} of shape {info.shape} and {info.dtype} has "
                f"{info.nbytes} bytes, but its data_offsets are {ranges[wrong[0]]}."
            )
        # torch wants memory that may be written; a private copy of a page is made only if it is.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = {}
    for name, info in infos.items():
        numel = torch.Size(info.shape).numel()
        if numel:
            flat = torch.frombuffer(mapped, dtype=info.dtype, count=numel, offset=8 + length + ranges[name][0])
        else:
            flat = torch.empty(0, dtype=info.dtype)
        found[name] = flat.view(info.shape)
    return found, metadata
