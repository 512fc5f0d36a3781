"""Reads files of ``torch.save`` without running code that they name.

``torch.load(weights_only=True)`` reads plain files, and maps them into memory: elements are read when they are used.
What it refuses, the objects of other classes, an unpickler of this file describes: FSDP1's ShardedTensor needs a
process group to be made.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

from fsdp_flat.checkpoint.files import local_file
from fsdp_flat.checkpoint.format import check_file
from fsdp_flat.errors import LoadError
from fsdp_flat.tools.torch_tools import DEVICE_MESH_LOGGER, silent


class Described:
    """Describes an object of a class that was not imported; its attributes are those in the file.

    Attributes:
        kind: the full name of the class.
        state: what the file has of the object's attributes.
    """

    kind = ""
    state: Any = None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Described:
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        for state in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(state, Mapping) and name in state:
                return state[name]
        raise AttributeError(f"the file has no {name!r} of {self.kind}")

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Leave out an entry of a dict."""

    def append(self, _value: Any) -> None:
        """Leave out an entry of a list."""

    def extend(self, _values: Any) -> None:
        """Leave out entries of a list."""

    def __repr__(self) -> str:
        return f"<{self.kind}, not unpickled>"


class DescribedTensor(Described):
    """Describes a tensor of a class that consists of other tensors: a ShardedTensor, or a DTensor among such.

    Attributes:
        shape: that of all ranks together.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def _described(kind: str, base: type[Described] = Described, **attributes: Any) -> type[Described]:
    return type(kind.rpartition(".")[2], (base,), {"kind": kind, **attributes})


def _is_described(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Described)


def _attribute(of: Any, name: str) -> Any:
    """Return an attribute of a class that is described; of anything else attributes lead to code to run."""
    if _is_described(of):
        return _described(f"{of.kind}.{name}")
    raise LoadError(f"it asks for the attribute {name!r} of {of!r}, which no state dict does")


def _described_tensor(kind: type[Described], dtype: torch.dtype, shape: Any, *_: Any) -> Described:
    made: Any = _described(kind.kind, DescribedTensor)()
    made.shape, made.dtype = tuple(shape), dtype
    return made


def _of_type(function: Any, _kind: Any, args: Any, state: Any) -> Any:
    made = function(*args)
    if isinstance(made, DescribedTensor):
        made.state = state
    return made


# What a file may call. It could set attributes of what it names, so no class or function of torch that is written in
# Python is among them.
_MADE: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("builtins", "bytearray"): bytearray,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): lambda text, encoding="latin1": text.encode("latin1"),
    ("torch._utils", "_rebuild_tensor"): lambda *args: torch._utils._rebuild_tensor(*args),
    ("torch._utils", "_rebuild_tensor_v2"): lambda *args: torch._utils._rebuild_tensor_v2(*args),
    ("torch._utils", "_rebuild_tensor_v3"): lambda *args: torch._utils._rebuild_tensor_v3(*args),
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
}
# What it may call with a class that is described. With ``allow_pickle`` a class may also be one that was imported.
_DESCRIBED: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "getattr"): _attribute,
    ("torch._utils", "_rebuild_wrapper_subclass"): _described_tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
}


def _by_class(describe: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
    """Return what describes if one of its arguments is a class that is described, and else makes."""
    return lambda *args: (describe if any(map(_is_described, args)) else make)(*args)


class _Unpickler(pickle.Unpickler):
    """Makes plain values and tensors, and describes other objects; ``torch.load`` adds what storages are."""

    makes_all = False

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("__builtin__", "builtins")
        if (module, name) in _MADE:
            return _MADE[module, name]
        if (module, name) in _DESCRIBED:
            describe = _DESCRIBED[module, name]
            return _by_class(describe, super().find_class(module, name)) if self.makes_all else describe
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        # torch makes those of torch.distributed of process groups, which a file has none of.
        if self.makes_all and not module.startswith("torch.distributed"):
            return super().find_class(module, name)
        if name == "UntypedStorage" and module in ("torch", "torch.storage"):
            # torch asks the class of a storage for the dtype in which its size counts.
            return _described("torch.UntypedStorage", dtype=torch.uint8)
        return _described(f"{module}.{name}")


class _UnpicklerOfAll(_Unpickler):
    makes_all = True


class _Slice(io.RawIOBase):
    """Shows a part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, into: Any) -> int:
        self._file.seek(self._start + self._at)
        num: int = self._file.readinto(memoryview(into)[: max(0, self._length - self._at)])  # type: ignore[attr-defined]
        self._at += num
        return num


def read_archive(path: Path, start: int = 0, length: int | None = None, *, allow_pickle: bool = False) -> Any:
    """Return the object of a file of ``torch.save``, whose tensors map the file, or of a part of a file.

    Objects of classes that torch's plain state dicts do not have are a :class:`Described` each, or with
    ``allow_pickle`` the objects themselves, for which code that the file names runs.

    Raises:
        LoadError: no such file, or one that is not of ``torch.save``.
    """
    unpickler = SimpleNamespace(__name__="", Unpickler=_UnpicklerOfAll if allow_pickle else _Unpickler)
    check_file(path)
    with local_file(path) if length is None else nullcontext(path) as place, place.open("rb") as whole:
        if not zipfile.is_zipfile(whole if length is None else _Slice(whole, start, length)):
            raise LoadError(
                f"{path} is no file of torch.save in the format that torch has had since 1.6, or it is cut off."
            )

        def load(**options: Any) -> Any:
            file: Any = place if length is None else _Slice(whole, start, length)
            with silent(DEVICE_MESH_LOGGER):
                return torch.load(file, map_location="cpu", mmap=length is None, **options)

        try:
            return load(weights_only=True)
        except pickle.UnpicklingError:
            pass
        except Exception as error:
            raise _unreadable(path, error) from error
        try:
            return load(weights_only=False, pickle_module=unpickler)
        except Exception as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> LoadError:
    return LoadError(f"{path} cannot be read: {error if isinstance(error, LoadError) else repr(error)}.")


def damaged_record(path: Path, start: int = 0, length: int | None = None) -> str | None:
    """Return the name of the first record of a file whose bytes do not have the checksum that it names, or None."""
    try:
        with (
            path.open("rb") as whole,
            zipfile.ZipFile(whole if length is None else _Slice(whole, start, length)) as archive,
        ):
            return archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        return f"the archive ({error})"
