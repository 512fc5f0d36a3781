"""Has the files of fsspec's file systems (``s3://``, ``gs://``, ``memory://``) answer as ``pathlib.Path`` does.

What can be renamed differs: a local folder is written under another name until it is complete. In an object store a
folder is no more than the begin of names, so checkpoints there are written where they stay, and are complete by their
last file (``commit``); single files are copied to their names on the server.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError, phrase


class RemotePath:
    """Names a file or folder in a file system of fsspec; it has those methods of ``Path`` that this library calls."""

    def __init__(self, fs: Any, path: str | PurePosixPath) -> None:
        self.fs, self._path = fs, PurePosixPath(path)
        self.name, self.stem, self.suffix = self._path.name, self._path.stem, self._path.suffix

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(str(self._path)))

    __fspath__ = __str__

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __lt__(self, other: RemotePath) -> bool:
        return self._path < other._path

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str | PurePosixPath) -> RemotePath:
        return RemotePath(self.fs, self._path / name)

    @property
    def parent(self) -> RemotePath:
        return self if len(self._path.parts) < 2 else RemotePath(self.fs, self._path.parent)

    @property
    def parents(self) -> list[RemotePath]:
        return [RemotePath(self.fs, each) for each in self._path.parents]

    def with_name(self, name: str) -> RemotePath:
        return RemotePath(self.fs, self._path.with_name(name))

    def with_suffix(self, suffix: str) -> RemotePath:
        return RemotePath(self.fs, self._path.with_suffix(suffix))

    def relative_to(self, other: RemotePath) -> PurePosixPath:
        return self._path.relative_to(other._path)

    def resolve(self) -> RemotePath:
        return self

    def is_symlink(self) -> bool:
        return False

    def _info(self) -> dict[str, Any]:
        """Return what the store says of this path now; nothing if it does not exist."""
        self.fs.invalidate_cache()  # other ranks may have written since
        try:
            return dict(self.fs.info(str(self._path)))
        except FileNotFoundError:
            return {}

    def exists(self) -> bool:
        return bool(self._info())

    def is_dir(self) -> bool:
        return self._info().get("type") == "directory"

    def is_file(self) -> bool:
        return self._info().get("type") == "file"

    def stat(self) -> Any:
        if not (info := self._info()):
            raise FileNotFoundError(2, "No such file", str(self))
        return SimpleNamespace(st_size=info["size"])

    def infos(self) -> dict[str, dict[str, Any]]:
        """Return by name what the store says of what is in this folder."""
        self.fs.invalidate_cache()
        own = str(self._path).strip("/")
        found = {info["name"].rstrip("/"): info for info in self.fs.ls(str(self._path), detail=True)}
        # Some stores list a folder in itself.
        return {PurePosixPath(name).name: info for name, info in found.items() if name.strip("/") != own}

    def iterdir(self) -> Iterator[RemotePath]:
        return (self / name for name in self.infos())

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        return (each for each in (self.iterdir() if self.is_dir() else ()) if fnmatch(each.name, pattern))

    def open(self, mode: str = "r") -> Any:
        return self.fs.open(str(self._path), mode)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            return bytes(file.read())

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def mkdir(self, **_: Any) -> None:
        self.fs.makedirs(str(self._path), exist_ok=True)

    def unlink(self, *, missing_ok: bool = False) -> None:
        try:
            self.fs.rm_file(str(self._path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def replace(self, target: RemotePath) -> None:
        self.fs.mv(str(self._path), str(target._path))

    def remove(self) -> None:
        """Remove a folder with all that is in it."""
        self.fs.rm(str(self._path), recursive=True)


def is_remote(path: Path) -> bool:
    """Return whether a path is in a file system of fsspec."""
    return isinstance(path, RemotePath)


def is_url(path: Path) -> bool:
    """Return whether a path is a URL, perhaps made a ``Path``, of which a folder named ``s3:`` would be made."""
    return is_remote(path) or re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def path_of_user(value: Any, name: str) -> Path:
    """Return a path argument as an absolute path, so that a later change of directory does not matter.

    A URL becomes a :class:`RemotePath`, which stands for a ``Path`` in the types of this library.
    """
    if isinstance(value, RemotePath):
        return cast(Path, value)
    if isinstance(value, str) and "://" in value:
        return cast(Path, _remote(value, name))
    try:
        path = Path(value)
    except TypeError as error:
        raise OptionTypeError(f"{name} must be a path, as a str or a Path; got {value!r}.") from error
    if value == "":
        raise OptionError(f"{name} is an empty text; expected a path. Pass '.' for the working directory.")
    if is_url(path):
        raise OptionError(f"{name} must be a path, or a URL as a str; got {path!r}, in which the URL has lost a slash.")
    return path.absolute()


def folder_of_user(value: Any) -> Path:
    """Return the ``directory`` in which to write; raise an OptionError for the name of a file of tensors."""
    path = path_of_user(value, "directory")
    if path.name.endswith((".bin", ".pt", ".pth", ".safetensors")) and not path.is_dir():
        raise OptionError(
            f"directory must be a folder, in which files are written; got {str(path)!r}, the name of a file. Pass "
            "another name, without the ending."
        )
    return path


def _remote(url: str, name: str) -> RemotePath:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UnsupportedError(
            f"{name}={url!r} is a URL, for which fsspec is needed: pip install 'fsdp-flat[remote]', and what fsspec "
            "needs for the store (s3fs, gcsfs)."
        ) from error
    try:
        return RemotePath(*url_to_fs(url))
    except (ImportError, ValueError) as error:
        raise OptionError(f"{name}={url!r} cannot be opened by fsspec: {phrase(error)}.") from error


def lexists(path: Path) -> bool:
    """Return whether there is anything at a path, a link to nothing too."""
    return path.is_symlink() or path.exists()


def sizes_in(directory: Path) -> dict[str, int]:
    """Return the sizes of the files in a directory, in bytes, by name.

    To list a directory makes a network file system ask its server; a lookup may be answered from a cache.
    """
    if isinstance(directory, RemotePath):
        return {name: info["size"] for name, info in directory.infos().items() if info["type"] == "file"}
    return {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}


def flush(file: Any) -> None:
    """Flush a file to disk; one of an object store is there when it is closed."""
    file.flush()
    with suppress(AttributeError, io.UnsupportedOperation):
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a directory, or a link to one, as far as possible."""
    if isinstance(path, RemotePath):
        with suppress(OSError):
            path.remove()
    elif path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def local_file(path: Path) -> Iterator[Path]:
    """Give a local file with what is at a path: itself, or a temporary copy, which may be mapped for longer."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="fsdp_flat") as folder:
        copy = Path(folder, path.name)
        path.fs.get_file(str(path._path), str(copy))
        yield copy
