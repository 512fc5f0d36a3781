"""Writes safetensors files tensor by tensor, and reads them by the package safetensors, which maps them into memory.

Source of the format, of which this is the only description here: the project's README. Eight bytes with the length of
the header, little endian; the header, JSON of ``{name: {"dtype", "shape", "data_offsets"}}`` and ``"__metadata__"`` of
strings; then the data, row-major, where the offsets count from the end of the header. Entries neither overlap nor leave
gaps. The package, and with it the HuggingFace storage of torch.distributed.checkpoint, writes a file only from tensors
that are all in memory.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fsdp_flat.checkpoint.files import flush, local_file
from fsdp_flat.checkpoint.format import Record, check_file, naming
from fsdp_flat.errors import LoadError, OptionError, UnsupportedError, phrase, some_of

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
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
            self._file = self._partial_path.open("wb")  # closed below and by discard
        with naming(self._partial_path):
            self._file.write(data)
        self.record = {"size": self.record["size"] + len(data), "crc32": zlib.crc32(data, self.record["crc32"])}

    def finish(self) -> None:
        """Flush the complete file to disk."""
        assert self._file is not None
        with naming(self._partial_path):
            flush(self._file)
            self._file.close()

    def commit(self) -> None:
        """Rename the complete file to its final path."""
        self._partial_path.replace(self.path)

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


def divided(nbytes: Mapping[str, int], max_file_bytes: float) -> dict[str, list[str]]:
    """Divide tensors, whose sizes are given by name, among files of model hubs; return their names by file.

    The division is that of ``huggingface_hub.split_torch_state_dict_into_shards``.
    """
    groups: list[list[str]] = []
    last: list[str] = []
    size = 0
    for name, own in nbytes.items():
        if own > max_file_bytes:
            groups.append([name])
            continue
        if size + own > max_file_bytes:
            groups.append(last)
            last, size = [], 0
        last.append(name)
        size += own
    groups += [last] if last or not groups else []
    total = len(groups)
    files = [SINGLE_NAME] if total == 1 else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    return dict(zip(files, groups, strict=True))


def index_of(files: Mapping[str, Iterable[str]], nbytes: int) -> dict[str, Any]:
    """Return the index of several files, as model hubs have it, by the names of their tensors and the size of all."""
    places = {name: file for file, names in files.items() for name in names}
    return {"metadata": {"total_size": nbytes}, "weight_map": places}


def files_in_index(index: Path) -> list[Path]:
    """Return the files that an index of a model's files names, all beside it; raise a LoadError if one is not there."""
    check_file(index)
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{index} is no index of a model's files: {error!r}.") from error
    if outside:
        raise LoadError(f"{index} names {some_of(list(map(repr, outside)), 3)}, outside of its directory.")
    files = [index.parent / name for name in names]
    for file in files:
        if not file.exists():
            raise LoadError(f"{file} does not exist, although the index names it.")
    return files


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a file, which map it: elements are read when they are used; and the header's strings.

    Raises:
        LoadError: the header does not describe all of the file, and nothing else.
        UnsupportedError: the package safetensors is not installed.
    """
    check_file(path)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UnsupportedError(f"{path} is read by safetensors: pip install safetensors.") from error
    try:
        with local_file(path) as local, safe_open(local, framework="pt") as file:
            # Not get_slice, which does not know that two numbers of F4 are one element of torch.
            return {name: file.get_tensor(name) for name in file.offset_keys()}, file.metadata() or {}
    except (SafetensorError, RuntimeError) as error:
        raise LoadError(f"{path} is no safetensors file, is truncated or was altered: {phrase(error)}.") from error
