"""Reads the metadata of torch.distributed.checkpoint without executing arbitrary pickles."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from fsdp_flat.errors import LoadError

__all__ = ["SafeReader"]

# The types in metadata of tensors (torch 2.8 to 2.13); everything else in such a file is refused.
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *(
        (_METADATA, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A dotted name would resolve through an allowed module to another one, os.system for instance.
        is_dtype = module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _ALLOWED or is_dtype:
            return super().find_class(module, name)
        raise LoadError(f"The checkpoint's .metadata refers to {module}.{name}, which no metadata of tensors does.")


class SafeReader(FileSystemReader):
    """Extends ``FileSystemReader`` to unpickle only the types of tensor metadata, and only once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint.

        Raises:
            LoadError: it refers to any other type.
        """
        metadata = self._metadata
        if metadata is None:
            path = self.fs.concat_path(self.path, ".metadata")
            with self.fs.create_stream(path, "rb") as file:
                metadata = self._metadata = _SafeUnpickler(file).load()
        assert metadata is not None
        meta = metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        return metadata
