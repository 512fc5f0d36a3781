"""Writes safetensors files tensor by tensor, and reads them by the safetensors package.

Source of the format, of which this is the only description here: the project's README. Eight bytes with the length of
the header, little endian; the header, JSON of ``{name: {"dtype", "shape", "data_offsets"}}`` and ``"__metadata__"`` of
strings; then the data, row-major, where the offsets count from the end of the header. The package, and with it the
HuggingFace storage of torch.distributed.checkpoint, writes a file only from tensors that are all in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from fsdp_flat.errors import LoadError, OptionError, UnsupportedError, UsageError

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
            shape, offsets = list(tensor.shape), [start, self.nbytes]
            if tensor.dtype is torch.float4_e2m1fn_x2 and shape:
                # An element of torch's dtype is two of the format's.
                shape[-1] *= 2
            header[name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": offsets}
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
    """Return the tensors of a file, which map it: elements are read when they are used; and the header's strings."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UsageError("To read .safetensors files, load_full needs safetensors: pip install safetensors.") from error
    found: dict[str, torch.Tensor] = {}
    name = None
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dict)
                # A view of the mapped file, as a slice would be, but one that hooks of modules can compute with.
                found[name] = file.get_tensor(name)
            return found, file.metadata() or {}
    except (SafetensorError, RuntimeError) as error:
        what = str(path) if name is None else f"{name!r} of {path}"
        raise LoadError(
            f"{what} cannot be read by safetensors ({error}). The file is no safetensors file, is truncated or was "
            f"altered, or has a dtype that torch {torch.__version__} or this safetensors lacks."
        ) from error
