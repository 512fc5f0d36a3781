"""Writes and reads the files of torch.distributed.checkpoint, each rank by itself.

torch's planners, storage writer, storage reader and ``dcp.load`` do the work. Two things are done here instead.

Coordination: ``dcp.save`` gathers a pickled plan from each rank, scatters the merged plans, gathers the results and
broadcasts the metadata. Here each rank writes its files at once, and rank 0 merges one JSON text from each, which is
less to receive and to send and takes rank 0 less time. docs/performance.md has the figures of both
(``python -m benchmarks.plans``).

Unpickling: ``FileSystemReader.read_metadata`` unpickles any object, and ``DefaultLoadPlanner.load_bytes`` loads with
``weights_only=False``, so both run code that a file names. Here both read tensors and plain values only.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_flat.comm import dtype_from_name
from fsdp_flat.errors import LoadError


class _SavePlanner(dcp.DefaultSavePlanner):
    """Extends torch's planner to report progress, and to write ``bytes`` as they are: the output of ``torch.save``."""

    def __init__(self, update: Callable[[int], object]) -> None:
        super().__init__()
        self._update = update

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        self._update(data.nbytes if isinstance(data, torch.Tensor) else 0)
        return data

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return io.BytesIO(object) if isinstance(object, bytes) else super().transform_object(write_item, object)


def write_files(state: dict[str, Any], path: Path, rank: int, update: Callable[[int], object]) -> str:
    """Write this rank's files of a checkpoint, without communication.

    Args:
        state: nested dicts of tensors, and of ``bytes`` made by ``torch.save``; of a tensor that several ranks have in
            full, at least one passes it.
        path: the directory.
        rank: the rank, which names the files.
        update: called with the size of each tensor in bytes as it is written.

    Returns:
        A text for :func:`write_metadata`.
    """
    with _torch_warnings_ignored():
        # Files are on disk (sync_files) before their record is.
        planner, writer = _SavePlanner(update), dcp.FileSystemWriter(path, sync_files=True)
        planner.set_up_planner(state, writer.storage_meta())
        writer.set_up_storage_writer(False)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        # The writer names files by the position of a plan in the list of all ranks' plans.
        plan = writer.prepare_global_plan([plan] * (rank + 1))[rank]
        written = {result.index: result for result in writer.write_data(planner.finish_plan(plan), planner).wait()}
    rows = []
    for item in plan.items:
        result, tensor = written[item.index], item.tensor_data
        where = result.storage_data
        kind: list[Any] = []
        if tensor is not None:
            chunk = tensor.chunk
            kind = [item.type.name, chunk.offsets, chunk.sizes, str(tensor.properties.dtype), tensor.size]
        # The planner's data: the nested keys of a flattened name.
        keys = plan.planner_data[item.index.fqn]
        rows.append([keys, kind, result.size_in_bytes, where.relative_path, where.offset, where.length])
    return json.dumps(rows)


def write_metadata(texts: Sequence[str], path: Path) -> None:
    """Write the metadata of a checkpoint, on one rank.

    Args:
        texts: results of :func:`write_files`, by rank. Of a part that several ranks have written, the first counts.
        path: the directory.

    Raises:
        ValueError: the parts do not make up the tensors.
    """
    plans, results = [], []
    for text in texts:
        items, keys_of, written = [], {}, []
        for keys, kind, nbytes, *where in json.loads(text):
            item = _item(".".join(keys), kind)
            items.append(item)
            keys_of[item.index.fqn] = tuple(keys)
            written.append(WriteResult(item.index, nbytes, _StorageInfo(*where)))
        plans.append(SavePlan(items, planner_data=keys_of))
        results.append(written)
    with _torch_warnings_ignored():
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        writer = dcp.FileSystemWriter(path, sync_files=True)
        writer.set_up_storage_writer(True)
        _, metadata = planner.create_global_plan(plans)
        # The writer keeps the last result of each part.
        writer.finish(metadata, results[::-1])


def _item(fqn: str, kind: list[Any]) -> WriteItem:
    if not kind:
        return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)
    name, offsets, sizes, dtype, size = kind
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype_from_name(dtype)), torch.Size(size))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType[name], tensor_data=data)


# The types in metadata of tensors and bytes (torch 2.8 to 2.15); everything else in such a file is refused.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch": "Size device",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "pathlib": "PosixPath WindowsPath",
}


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # A dotted name would resolve through an allowed module to another one, os.system for instance.
        is_dtype = module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _ALLOWED.get(module, "").split() or is_dtype:
            return super().find_class(module, name)
        raise LoadError(f"The checkpoint's .metadata refers to {module}.{name}, which no metadata of tensors does.")


class SafeReader(dcp.FileSystemReader):
    """Extends ``FileSystemReader`` to unpickle only the types of tensor metadata, and only once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint.

        Raises:
            LoadError: it refers to any other type.
        """
        metadata = self._metadata
        if metadata is None:
            with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
                metadata = self._metadata = _SafeUnpickler(file).load()
        assert metadata is not None
        meta = metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        return metadata


class _SafeLoadPlanner(dcp.DefaultLoadPlanner):
    """Extends torch's planner to load values other than tensors with ``weights_only``."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        self.state_dict[read_item.dest_index.fqn] = loaded


def read_into(state: dict[str, Any], reader: SafeReader) -> None:
    """Read this rank's part of a checkpoint into the tensors of ``state``, without communication.

    Args:
        state: nested dicts of tensors.
        reader: reader of the checkpoint's directory.

    Raises:
        LoadError: the files cannot be read.
    """
    _load(state, reader, _SafeLoadPlanner())


def read_value(fqn: str, reader: SafeReader) -> Any:
    """Read a value other than a tensor, under its flattened name.

    Raises:
        LoadError: the files cannot be read.
    """
    state = {fqn: None}
    _load(state, reader, _SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    return state[fqn]


def _load(state: dict[str, Any], reader: SafeReader, planner: _SafeLoadPlanner) -> None:
    try:
        with _torch_warnings_ignored():
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        # torch's is no Exception, and wraps whatever was raised, a KeyboardInterrupt too.
        cause = next((raised for raised, _ in error.failures.values()), error)
        if isinstance(cause, LoadError) or not isinstance(cause, (Exception, CheckpointException)):
            raise cause from None
        raise LoadError(f"{reader.path} cannot be read: {cause!r}. Nothing was loaded.") from cause


@contextmanager
def _torch_warnings_ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        # Reading without communication is intended, and torch itself uses names that it has deprecated.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", module="torch")
        yield
