"""Writes files of ``torch.save`` tensor by tensor.

Source of the format: torch's notes on serialization. A file is a zip archive without compression: ``data.pkl`` is the
object, in which a tensor refers to a storage by its key, and ``data/KEY`` has the bytes of that storage.
``torch.save`` writes only tensors that are all in memory.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_flat.tools.stored_checkpoint import TensorInFiles


@dataclass(frozen=True, slots=True)
class _Storage:
    number: int
    nbytes: int


class _Pickler(pickle.Pickler):
    """Pickles descriptions of tensors as ``torch.save`` pickles tensors.

    Attributes:
        storages: by what tensors with the same elements share, the number of their storage and one of them.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[Any, tuple[int, TensorInFiles]] = {}

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.UntypedStorage, str(obj.number), "cpu", obj.nbytes) if type(obj) is _Storage else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorInFiles):
            return NotImplemented
        number, _ = self.storages.setdefault(obj.identity, (len(self.storages), obj))
        stride = torch.empty(obj.shape, device="meta").stride()
        hooks: OrderedDict[int, Any] = OrderedDict()
        storage = _Storage(number, obj.nbytes)
        return torch._utils._rebuild_tensor_v3, (storage, 0, obj.shape, stride, False, hooks, obj.dtype)


def write_archive(obj: Any, path: Path, update: Callable[[int], object]) -> None:
    """Write a file that ``torch.load`` reads, with one tensor in memory at a time.

    Args:
        obj: nested containers of tensors in files, and of other values.
        path: the file.
        update: called with the number of bytes of each tensor as it is written.
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
                record.write(_bytes_of(tensor.full()))
                update(tensor.nbytes)
        archive.writestr("archive/version", "3\n")


def _padding(at: int) -> bytes:
    """Return an extra field of a zip record, as torch writes, that ends at a multiple of 64 bytes."""
    num = -(at + 4) % 64
    return b"FB" + num.to_bytes(2, "little") + b"Z" * num


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
