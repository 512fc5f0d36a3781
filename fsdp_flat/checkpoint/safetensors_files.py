"""Reads and writes safetensors files, of which this is the only description here.

Source of the format: the project's README. Eight bytes with the length of the header, little endian; the header, JSON
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
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from fsdp_flat.errors import LoadError, OptionError, UnsupportedError

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
        due = self._left.pop(0)
        assert name == due
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

    def check_here(self) -> None:
        """Raise unless this rank finds the complete file, which another rank may have written."""
        expected = len(self._header) + self.nbytes
        found = self._partial_path.stat().st_size if self._partial_path.exists() else "no file"
        if found != expected:
            raise OptionError(
                f"Rank 0 finds {found} at {self._partial_path}, of which {expected} bytes were written. With "
                "spread=True the directory must be one and the same for all ranks, on a file system that they share."
            )

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
