"""Reads and writes files of ``torch.save`` tensor by tensor, and runs no code that a file names.

Source of the format: torch's notes on serialization. A file is a zip archive without compression: ``data.pkl`` is the
object, in which a tensor refers to a storage by its key, and ``data/KEY`` has the bytes of that storage.
``torch.load`` needs memory for all of it, and a process group for sharded tensors.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fsdp_flat.errors import LoadError

BUFFER_NBYTES = 1 << 20
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
# Classes whose objects are described, never made: torch makes them of process groups, which a file has none of.
_DESCRIBED = ("torch.distributed.",)
_PLAIN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("builtins", "bytearray"): bytearray,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): lambda text, encoding="latin1": text.encode("latin1"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describes a tensor in a file; its elements are read on demand.

    Attributes:
        file: the file.
        start: position of the first element in it, in bytes.
        shape: the tensor's.
        stride: elements between neighbours, by dim.
        key: equal for tensors that share their elements.
    """

    file: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    key: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    def read_rows(self, start: int, into: torch.Tensor) -> None:
        """Read as many rows as ``into`` has, from ``start`` on; a tensor without dims is one row.

        ``into`` is a CPU tensor of this dtype, of shape ``(rows, *shape[1:])``. If it is contiguous and the tensor in
        the file is too, elements are read straight to their place; else by way of a buffer of some MB.

        Raises:
            LoadError: the file ends before.
        """
        shape, stride = (self.shape, self.stride) if self.shape else ((1,), (1,))
        row = prod(shape[1:])
        if not into.numel():
            return
        with open(self.file, "rb") as file:
            is_contiguous = stride[1:] == contiguous_stride(shape[1:]) and stride[0] == row
            if is_contiguous and into.is_contiguous():
                _read(file, self.start + start * row * self.dtype.itemsize, into.reshape(-1))
                return
            step = max(1, BUFFER_NBYTES // (row * self.dtype.itemsize)) if is_contiguous else len(into)
            for first in range(0, len(into), step):
                size = (min(step, len(into) - first), *shape[1:])
                flat = torch.empty(_span(size, stride), dtype=self.dtype)
                _read(file, self.start + (start + first) * stride[0] * self.dtype.itemsize, flat)
                into[first : first + size[0]] = torch.as_strided(flat, size, stride)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor of this shape."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the elements from a tensor's first to its last in memory."""
    return prod(shape) and 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _read(file: BinaryIO, start: int, into: torch.Tensor) -> None:
    """Read bytes from ``start`` on into a contiguous tensor."""
    file.seek(start)
    num = file.readinto(into.view(torch.uint8).numpy())  # type: ignore[attr-defined]
    if num != into.nbytes:
        raise LoadError(f"{file.name} ends at byte {start + num}, inside a tensor of {into.nbytes:,} bytes.")


class Described:
    """Describes an object of a class that was not imported: its class's name, arguments, state and entries."""

    kind = ""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Described:
        made = object.__new__(cls)
        made.args, made.state, made.entries = args, None, []
        return made

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any
        self.entries: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries.append((key, value))

    def append(self, value: Any) -> None:
        """Add an entry of a list."""
        self.entries.append(value)

    def extend(self, values: Any) -> None:
        """Add entries of a list."""
        self.entries.extend(values)

    def __repr__(self) -> str:
        return f"<{self.kind}, not unpickled>"


def _described(kind: str) -> type[Described]:
    return type(kind.rpartition(".")[2], (Described,), {"kind": kind})


@dataclass(frozen=True, slots=True)
class StoredSubclass:
    """Describes a tensor of a class that consists of other tensors: a DTensor or a ShardedTensor.

    Attributes:
        kind: the name of the class.
        shape: that of all ranks together.
        state: what the object consists of.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    state: Any


class _Slice(io.RawIOBase):
    """Shows a part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, num: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        num = left if num is None or num < 0 else min(num, left)
        self._file.seek(self._start + self._at)
        data = self._file.read(num)
        self._at += len(data)
        return data


class _Unpickler(pickle.Unpickler):
    """Makes plain values and descriptions of tensors; other objects only with ``allow_pickle``."""

    def __init__(self, file: Any, storage: Callable[[str], tuple[Path, int, int]], *, allow_pickle: bool) -> None:
        super().__init__(file)
        self._storage = storage
        self._allow_pickle = allow_pickle

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name in _STORAGES and module in ("torch", "torch.storage"):
            return _STORAGES[name]
        if module in ("torch._utils", "torch._tensor") and name in _REBUILT:
            return _REBUILT[name]
        kind = f"{module}.{name}"
        if (module, name) == ("builtins", "getattr"):
            return _attribute
        if self._allow_pickle and not kind.startswith(_DESCRIBED):
            return super().find_class(module, name)
        return _described(kind)

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, *_ = pid
        return dtype, *self._storage(key)


def _attribute(of: Any, name: str) -> Any:
    """Return an attribute of a class that is described; of anything else attributes lead to code to run."""
    if isinstance(of, type) and issubclass(of, Described):
        return _described(f"{of.kind}.{name}")
    raise LoadError(f"it asks for the attribute {name!r} of {of!r}, which no state dict does")


def _tensor(storage: Any, offset: int, shape: Any, stride: Any, *_rest: Any) -> StoredTensor:
    dtype, path, start, nbytes = storage
    shape, stride, place = tuple(shape), tuple(stride), offset * dtype.itemsize
    if offset < 0 or min((*shape, *stride), default=0) < 0 or place + _span(shape, stride) * dtype.itemsize > nbytes:
        raise LoadError(f"a tensor of shape {shape} at element {offset} leaves its storage of {nbytes:,} bytes")
    return StoredTensor(path, start + place, dtype, shape, stride, (path, start, offset, stride))


def _tensor_of_dtype(
    storage: Any, offset: int, shape: Any, stride: Any, _grad: bool, _hooks: Any, dtype: torch.dtype, *_rest: Any
) -> StoredTensor:
    return _tensor((dtype, *storage[1:]), offset, shape, stride)


def _of_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if function is not _subclass:
        return function(*args)
    _, dtype, shape, *_ = args
    return StoredSubclass(kind.kind.rpartition(".")[2], tuple(shape), dtype, state)


def _subclass(*args: Any) -> Described:
    return Described(*args)


_REBUILT: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_tensor_v3": _tensor_of_dtype,
    "_rebuild_parameter": lambda data, *_: data,
    "_rebuild_parameter_with_state": lambda data, *_: data,
    "_rebuild_from_type_v2": _of_type,
    "_rebuild_wrapper_subclass": _subclass,
}


def read_archive(path: Path, start: int = 0, length: int | None = None, *, allow_pickle: bool = False) -> Any:
    """Return the object of a file of ``torch.save``, or of a part of a file, with a :class:`StoredTensor` a tensor.

    Objects of classes that torch's plain state dicts do not have are a :class:`Described` each, or with
    ``allow_pickle`` the objects themselves, for which code that the file names runs.

    Raises:
        LoadError: no such file, or one that is not of ``torch.save``.
    """
    with open(path, "rb") as whole:
        file = whole if length is None else _Slice(whole, start, length)
        try:
            with zipfile.ZipFile(file) as archive:
                top = next(name for name in archive.namelist() if name.endswith("data.pkl")).removesuffix("data.pkl")
                order = archive.read(top + "byteorder") if top + "byteorder" in archive.namelist() else b"little"
                if order.decode() != sys.byteorder:
                    raise LoadError(f"its numbers are {order.decode()}-endian; this machine is {sys.byteorder}.")

                def storage(key: str) -> tuple[Path, int, int]:
                    # After the record's local header: 30 bytes, then its name and an extra field of these lengths.
                    record = archive.getinfo(f"{top}data/{key}")
                    at = start + record.header_offset
                    whole.seek(at + 26)
                    lengths = whole.read(4)
                    at += 30 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
                    return path, at, record.file_size

                data = io.BytesIO(archive.read(top + "data.pkl"))
                return _Unpickler(data, storage, allow_pickle=allow_pickle).load()
        except LoadError as error:
            raise LoadError(f"{path} cannot be read: {error}") from None
        except (zipfile.BadZipFile, StopIteration) as error:
            raise LoadError(
                f"{path} is no file of torch.save in the format that torch has had since 1.6, or it is cut off."
            ) from error
        except Exception as error:
            raise LoadError(f"{path} cannot be read: {error!r}.") from error


def damaged_record(path: Path, start: int = 0, length: int | None = None) -> str | None:
    """Return the name of the first record of a file whose bytes do not have the checksum that it names, or None."""
    with open(path, "rb") as whole:
        try:
            with zipfile.ZipFile(whole if length is None else _Slice(whole, start, length)) as archive:
                return archive.testzip()
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            return f"the archive ({error})"


@dataclass(frozen=True, slots=True)
class TensorToSave:
    """Stands for a tensor in an object that :func:`write_archive` writes.

    Attributes:
        key: equal for tensors of one storage, which is written once.
        blocks: yields the elements in order, as tensors of any size.
    """

    key: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterator[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Storage:
    number: int
    nbytes: int


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[Any, tuple[int, TensorToSave]] = {}

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.UntypedStorage, str(obj.number), "cpu", obj.nbytes) if type(obj) is _Storage else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorToSave):
            return NotImplemented
        number, _ = self.storages.setdefault(obj.key, (len(self.storages), obj))
        stride, hooks = contiguous_stride(obj.shape), OrderedDict()  # type: ignore[var-annotated]
        storage = _Storage(number, obj.nbytes)
        return torch._utils._rebuild_tensor_v3, (storage, 0, obj.shape, stride, False, hooks, obj.dtype)


def write_archive(obj: Any, path: Path, update: Callable[[int], object]) -> None:
    """Write a file that ``torch.load`` reads: ``obj`` with a :class:`TensorToSave` in place of each tensor.

    Args:
        obj: nested containers of such, and of other values.
        path: the file.
        update: called with the number of bytes of each block as it is written.
    """
    data = io.BytesIO()
    pickler = _Pickler(data)
    pickler.dump(obj)
    with open(path, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data.getvalue())
        archive.writestr("archive/byteorder", sys.byteorder)
        for number, tensor in pickler.storages.values():
            info = zipfile.ZipInfo(f"archive/data/{number}")
            # torch reads a storage without a copy where it starts at a multiple of 64 bytes.
            info.extra = _padding(file.tell() + 30 + len(info.filename) + 20)
            with archive.open(info, "w", force_zip64=True) as record:
                for block in tensor.blocks():
                    record.write(bytes_of(block))
                    update(block.nbytes)
        archive.writestr("archive/version", "3\n")


def _padding(at: int) -> bytes:
    """Return an extra field of a zip record, as torch writes, that ends at a multiple of 64 bytes."""
    num = -(at + 4) % 64
    return b"FB" + num.to_bytes(2, "little") + b"Z" * num


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor's elements, in order."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
