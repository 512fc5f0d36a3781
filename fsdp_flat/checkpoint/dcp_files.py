"""Writes and reads the files of torch.distributed.checkpoint, each rank by itself.

torch's planners, storage reader and ``dcp.load`` do the work. Three things are done here instead.

Coordination: ``dcp.save`` gathers a pickled plan from each rank, scatters the merged plans, gathers the results and
broadcasts the metadata; with cached plans, the last two, for which rank 0 takes less time than here. Here each rank
writes its files at once, rank 0 merges JSON rows from each, and nothing is sent back. docs/performance.md has the
figures of whole saves (``python -m benchmarks.saves``).

Writing: torch's writer keeps a CPU copy of every tensor of a file until the file is complete, and computes no checksum.
Here one tensor at a time is copied, and the checksum is computed as bytes are written.

Unpickling: ``FileSystemReader.read_metadata`` unpickles any object, and ``DefaultLoadPlanner.load_bytes`` loads with
``weights_only=False``, so both run code that a file names. Here both read tensors and plain values only.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_flat.checkpoint.consensus import Consensus, compare_names
from fsdp_flat.checkpoint.files import flush, is_remote, sizes_in
from fsdp_flat.checkpoint.format import Records, check_file, naming, record_of
from fsdp_flat.comm import dtype_from_name
from fsdp_flat.core import units_of
from fsdp_flat.errors import LoadError, OptionError, some_of
from fsdp_flat.layout import clean_fqn, names_unlike, owners_of_constants
from fsdp_flat.state import (
    OptimContents,
    ParamIndex,
    SplitParams,
    boxed_state_dict,
    held_by,
    load_optim_state,
    states_in_files,
)
from fsdp_flat.state.plain_states import create_states
from fsdp_flat.state.shards import serialized, unpacked

_logger = logging.getLogger("fsdp_flat")


class _SavePlanner(dcp.DefaultSavePlanner):
    """Extends torch's planner to write ``bytes`` as they are: the output of ``torch.save``."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return io.BytesIO(object) if isinstance(object, bytes) else super().transform_object(write_item, object)


class _SummedFile(io.BufferedWriter):
    """Computes the CRC-32 of a file that is written from its begin to its end, as ``torch.save`` does.

    Attributes:
        crc32: that of the bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(cast(Any, path).open("wb") if is_remote(path) else io.FileIO(path, "wb"))
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)

    def seekable(self) -> bool:
        return False


def write_files(
    state: dict[str, Any], path: Path, rank: int, update: Callable[[int], object]
) -> tuple[list[Any], Records]:
    """Write this rank's files of a checkpoint.

    Returns a row for each part, which JSON can hold, and the records of the files.

    Args:
        state: nested dicts of tensors, and of ``bytes`` made by ``torch.save``.
        path: the directory.
        rank: the rank, which names the files.
        update: called with the size of each tensor in bytes as it is written.
    """
    planner = _SavePlanner()
    planner.set_up_planner(state)
    plan = planner.finish_plan(planner.create_local_plan())
    path.mkdir(parents=True, exist_ok=True)
    rows: list[Any] = []
    file = path / f"__{rank}_0.distcp"
    try:
        # Its record says what is on disk, so it is flushed first.
        with naming(file), _SummedFile(file) as written:
            for item in plan.items:
                start, data = written.tell(), planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    written.write(data.getbuffer())
                else:
                    update(data.nbytes)
                    torch.save(on_host(data), written)
                tensor, kind = item.tensor_data, list[Any]()
                if tensor is not None:
                    chunk = tensor.chunk
                    kind = [item.type.name, chunk.offsets, chunk.sizes, str(tensor.properties.dtype), tensor.size]
                # The planner's data: the nested keys of a flattened name.
                keys, length = plan.planner_data[item.index.fqn], written.tell() - start
                rows.append([keys, kind, length, file.name, start, length])
            flush(written)
            record = {"size": written.tell(), "crc32": written.crc32}
    except RuntimeError as error:
        # torch's text is about positions in a file; that of a full disk is the cause.
        if (cause := _system_error(error)) is None:
            raise
        with naming(path):
            raise cause from error
    return rows, {file.name: record}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU without the rest of its storage, which would be saved too."""
    tensor = tensor.detach().cpu()
    if type(tensor) is not torch.Tensor:
        # A subclass that views plain data, which torch.load(weights_only=True) would not read.
        tensor = tensor.as_subclass(torch.Tensor)
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that led to ``error``, if one did, without those that led to itself."""
    while error is not None:
        if isinstance(error, OSError):
            return type(error)(*error.args)
        error = error.__cause__ or error.__context__
    return None


class _MetadataWriter(dcp.FileSystemWriter):
    """Extends torch's writer to name the directory by text: only Python 3.13 and later reads a path that 3.13 wrote."""

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)


def write_metadata(each_rows: Sequence[list[Any]], path: Path) -> Records:
    """Write the metadata of a checkpoint, on one rank, from the rows of :func:`write_files` by rank; return its record.

    Of a part that several ranks have written, the first counts. Raises if the parts do not make up the tensors.
    """
    plans, results = [], []
    for rows in each_rows:
        items, keys_of, written = [], {}, []
        for keys, kind, nbytes, *where in rows:
            item = _item(".".join(map(str, keys)), kind)
            items.append(item)
            keys_of[item.index.fqn] = tuple(keys)
            written.append(WriteResult(item.index, nbytes, _StorageInfo(*where)))
        plans.append(SavePlan(items, planner_data=keys_of))
        results.append(written)
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer: dcp.FileSystemWriter = _MetadataWriter(path, sync_files=True)
    if is_remote(path):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(str(path), sync_files=False)
    writer.set_up_storage_writer(True)
    _, metadata = planner.create_global_plan(plans)
    # The writer keeps the last result of each part.
    writer.finish(metadata, results[::-1])
    return {".metadata": record_of(path / ".metadata")}


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
}
# Of the machine that wrote the checkpoint; Python 3.13 names another module.
_PATHS = {
    (module, f"{system}Path"): path
    for module in ("pathlib", "pathlib._local")
    for system, path in {"Posix": PurePosixPath, "Windows": PureWindowsPath}.items()
}


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return _PATHS[module, name]
        # A dotted name would resolve through an allowed module to another one, os.system for instance.
        is_dtype = module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _ALLOWED.get(module, "").split() or is_dtype:
            return super().find_class(module, name)
        raise LoadError(f"The checkpoint's .metadata refers to {module}.{name}, which no metadata of tensors does.")


class _SafeLoadPlanner(dcp.DefaultLoadPlanner):
    """Extends torch's planner to load values other than tensors with ``weights_only``."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        self.state_dict[read_item.dest_index.fqn] = loaded


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint, without communication; unpickles only the types of tensor metadata, and only once.

    Args:
        path: the checkpoint's directory.
        parts: the begins of the names that are read; other values may be damaged. By default all are read.
    """

    def __init__(self, path: Path, parts: tuple[str, ...] = ()) -> None:
        super().__init__(path)
        if is_remote(path):
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            self.fs, self.path = FsspecReader(str(path)).fs, str(path)
        self._place, self._parts = path, parts

    @cached_property
    def _metadata(self) -> Metadata:
        path = self._place / ".metadata"
        check_file(path)
        try:
            found: Metadata = _SafeUnpickler(io.BytesIO(path.read_bytes())).load()
            sizes = sizes_in(path.parent)
            parts = self._parts or ("",)
            problem = next(chain(_misplaced(found, parts, sizes), _incomplete(found, parts)), None)
        except LoadError:
            raise
        except Exception as error:
            raise LoadError(f"{path} cannot be read: {error!r}.") from error
        if problem is not None:
            raise LoadError(f"{path} is not of these files: {problem}.")
        return found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint; raise if it refers to any other type, or does not fit the files."""
        return self._metadata

    def tensors_in(self, prefix: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the full shape and the dtype of each tensor below ``prefix``, by the rest of its name."""
        found = self.read_metadata().state_dict_metadata
        return {
            name.removeprefix(prefix): (tuple(entry.size), entry.properties.dtype)
            for name, entry in found.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def read_into(self, state: dict[str, Any]) -> None:
        """Read this rank's part of a checkpoint into the tensors of ``state``, nested dicts."""
        self._load(state, _SafeLoadPlanner())

    def read_states(self, states: dict[str, dict[str, torch.Tensor]]) -> None:
        """Read this rank's part of states of the optimizer into tensors, by names of parameter and state."""
        self.read_into({"optim": {"state": states}})

    def read_value(self, fqn: str) -> Any:
        """Read a value other than a tensor, under its flattened name."""
        state = {fqn: None}
        self._load(state, _SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
        return state[fqn]

    def _load(self, state: dict[str, Any], planner: _SafeLoadPlanner) -> None:
        try:
            # In loads alone: filters are those of the process, and saves run in threads.
            with warnings.catch_warnings():
                # Reading without communication is intended, and torch itself uses names that it has deprecated.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                warnings.filterwarnings("ignore", module="torch")
                dcp.load(state, storage_reader=self, planner=planner, no_dist=True)
        except CheckpointException as error:
            # torch's is no Exception, and wraps whatever was raised, a KeyboardInterrupt too.
            cause = next((raised for raised, _ in error.failures.values()), error)
            if isinstance(cause, LoadError) or not isinstance(cause, (Exception, CheckpointException)):
                raise cause from None
            raise LoadError(f"{self.path} cannot be read: {cause!r}. Nothing was loaded.") from cause


def _misplaced(found: Metadata, parts: tuple[str, ...], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the values of ``parts`` that are not in a file of the checkpoint, of which ``sizes`` are given in bytes."""
    for index, place in (found.storage_data or {}).items():
        if not index.fqn.startswith(parts):
            continue
        size = sizes.get(place.relative_path)
        if size is None:
            yield f"{index.fqn!r} is in {place.relative_path!r}, which is no file of the checkpoint"
        elif not 0 <= place.offset <= place.offset + place.length <= size:
            where = f"bytes {place.offset} to {place.offset + place.length}"
            yield f"{index.fqn!r} is in {where} of {place.relative_path}, which has {size}"


def _incomplete(found: Metadata, parts: tuple[str, ...]) -> Iterator[str]:
    """Yield the values of ``parts`` that are incomplete or larger than their place: torch would leave out the rest."""
    for fqn, entry in found.state_dict_metadata.items():
        if not fqn.startswith(parts):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            if MetadataIndex(fqn) not in found.storage_data:
                yield f"{fqn!r} is missing"
            continue
        chunks = {chunk.offsets: chunk for chunk in entry.chunks if math.prod(chunk.sizes)}
        for chunk in chunks.values():
            place = found.storage_data.get(MetadataIndex(fqn, chunk.offsets))
            what = f"the part of {fqn!r} at {tuple(chunk.offsets)} with shape {tuple(chunk.sizes)}"
            if place is None:
                yield f"{what} is missing"
            elif math.prod(chunk.sizes) * entry.properties.dtype.itemsize > place.length:
                yield f"{what} does not fit in {place.length} bytes"
            bounds = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            if not all(0 <= start <= start + length <= size for start, length, size in bounds):
                yield f"{what} is outside of shape {tuple(entry.size)}"
        if sum(math.prod(chunk.sizes) for chunk in chunks.values()) != math.prod(entry.size) or _overlap(chunks):
            yield f"the parts of {fqn!r} are not all of shape {tuple(entry.size)}"


def _overlap(chunks: Mapping[torch.Size, ChunkStorageMetadata]) -> bool:
    """Return whether any two parts of one tensor have an element in common."""
    ordered = sorted(chunks.values(), key=lambda chunk: tuple(chunk.offsets))
    for at, chunk in enumerate(ordered if ordered and ordered[0].offsets else ()):
        for other in ordered[at + 1 :]:
            if other.offsets[0] >= chunk.offsets[0] + chunk.sizes[0]:
                break
            each = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            if all(start < begin + length and begin < start + size for start, size, begin, length in each):
                return True
    return False


# Returns by names of a model those in the files, of which names are given.
NamesOf = Callable[[Mapping[str, str]], Mapping[str, str]]


def load_files(
    reader: SafeReader,
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    *,
    together: Consensus,
    strict: bool,
    names_of: NamesOf | None,
) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """Load a checkpoint whose files have been verified. Every rank must call this.

    Returns what this rank saved as ``extra``, or rank 0's if another number of ranks has saved the checkpoint; names of
    the model that the checkpoint does not have; and names in the files that the model does not have.
    """
    # Everything is read and checked, on all ranks, before anything is changed.
    with together.propagate_errors():
        num_ranks = sum(name.startswith("extra.") for name in reader.read_metadata().state_dict_metadata)
        extra = reader.read_value(f"extra.{together.rank if num_ranks == together.size else 0}")
        plain: dict[str, Any] = reader.read_value("plain")
        apart = SplitParams(model)
        in_model: Mapping[str, str] = {name: name for name in (*reader.tensors_in("model."), *plain["model"])}
        names = in_model if names_of is None else names_of(in_model)
        into = _ModelTemplate(model, reader, apart, names, strict=strict)
        tensors = {names[name]: value for name, value in into.values.items()}
        if optim is None and "optim" in plain and together.rank == 0:
            _log_left_out(reader, plain["optim"]["state"])
        if optim is not None:
            if "optim" not in plain:
                raise LoadError(
                    f"{reader.path} was saved without an optimizer; load it with optim=None. Nothing was loaded."
                )
            contents = held_by(optim)
            state = plain["optim"]
            stored = reader.tensors_in("optim.state.")
            for fqn, row in states_in_files(model, stored, reader.read_states, owners=contents.owners).items():
                state["state"].setdefault(fqn, {}).update(row)
            if state.get("has_wrappers") and not any(map(contents.state.get, contents.params)):
                create_states(optim)
            loaded = load_optim_state(model, contents, state, is_final=True)
        reader.read_into({"model": tensors})
    if names_of is not None:
        index = ParamIndex(model)
        params = {**index.dtensors_by_name, **index.by_name}
        given = [(params[name].unit, name, names[name]) for name in into.values if name in params]
        compare_names(given, units_of(model))
    if optim is not None:
        # The optimizer loads first, because it checks its groups before it changes anything; the model is checked.
        with together.propagate_errors():
            optim.load_state_dict(loaded)
    values = {name: tensors[names[name]] for name in into.values}
    values |= {name: plain["model"][stored] for name, stored in names.items() if stored in plain["model"]}
    values = {into.own_names.get(name, name): value for name, value in values.items()}
    with together.propagate_errors():
        model.load_state_dict(apart.join({**into.kept, **values}), strict=strict and not into.is_partial)
    return extra, into.missing, into.unexpected


def _log_left_out(reader: SafeReader, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Log that a load without an optimizer leaves the saved states out, and how to load them."""
    states = [(fqn, name) for fqn, row in rows.items() for name in row]
    states += [tuple(key.rsplit(".", 1)) for key in reader.tensors_in("optim.state.")]  # type: ignore[misc]
    of_how_many, names = len({fqn for fqn, _ in states}), sorted({name for _, name in states})
    _logger.warning(
        "%s has an optimizer's states (%s, of %d parameters) and settings, which are left out: no optimizer was "
        "given. To load them, pass it: load_checkpoint(directory, model, optim).",
        reader.path,
        some_of(names, 6) or "none yet",
        of_how_many,
    )


class _ModelTemplate:
    """Creates tensors to read the model's files into, and checks the files' names and shapes against the model.

    Args:
        names: by name of the model, the one in the files.

    Attributes:
        values: the tensors, by the model's names.
        own_names: the names in the model's own state dict, by these.
        kept: parts of parameters that are left as they are, which :meth:`SplitParams.join` needs.
        missing: names of the model that the files do not have; a tied parameter needs one of its names.
        unexpected: names in the files that the model does not have.
        is_partial: whether names are left out.
    """

    def __init__(
        self, model: nn.Module, reader: SafeReader, apart: SplitParams, names: Mapping[str, str], *, strict: bool
    ) -> None:
        own = boxed_state_dict(model, apart, copy=True)
        self.own_names = {clean_fqn(name): name for name in own}
        template = {name: own[raw] for name, raw in self.own_names.items() if isinstance(own[raw], torch.Tensor)}
        stored = reader.tensors_in("model.")
        there = {name: stored[names[name]] for name in names if names[name] in stored}
        owners = owners_of_constants(template)
        for name in owners.keys() & there.keys():
            # Bytes that say how a parameter is quantized may be of another number; the load compares what they say.
            template[name] = torch.empty(there[name][0], dtype=there[name][1])
        self.values = {name: value for name, value in template.items() if name in there}
        tied = {name for names in _tied_names(model) if not names.isdisjoint(there) for name in names}
        absent = [name for name in template if name not in there]
        self.missing = tuple(name for name in absent if name not in tied)
        self.unexpected = tuple(names[name] for name in there if name not in template)
        self.kept = {self.own_names[name]: template[name] for name in absent if name in apart.names}
        self.is_partial = bool(absent or self.unexpected)
        # Codes of one checkpoint and constants of another would be other values.
        read = {apart.names[name] for name in self.values if name in apart.names}
        halves = [name for name in absent if owners.get(name) in there or apart.names.get(name) in read]
        problems = [f"{name!r} is missing, of a parameter of which there are other parts" for name in halves]
        problems = names_unlike("load_checkpoint", self.missing, self.unexpected) if strict else problems
        problems += [
            f"{name!r} has shape {there[name][0]} there and {tuple(value.shape)} in the model"
            for name, value in self.values.items()
            if there[name][0] != tuple(value.shape)
        ]
        problems += [
            f"{name!r} has codes in {there[name][1]} there and in {template[name].dtype} in the model"
            for name in sorted({*owners.values(), *apart.names} & self.values.keys())
            if there[name][1] != template[name].dtype
        ]
        if problems:
            raise LoadError(f"{reader.path} does not fit the model: {some_of(problems, 7, '; ')}. Nothing was loaded.")


def _tied_names(model: nn.Module) -> list[set[str]]:
    """Return the names of each parameter that has several."""
    found: dict[int, set[str]] = {}
    for name, param in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        found.setdefault(id(param), set()).add(clean_fqn(name))
    found_of_units = [set(param.fqns) for param in ParamIndex(model).params]
    return [names for names in (*found.values(), *found_of_units) if len(names) > 1]


# -- values that are no tensors ----------------------------------------------------------------------------------------


def packed(value: Any, source: str, path: str = "") -> bytes:
    """Serialize ``value``; raise an OptionError if it cannot be read back with ``weights_only``.

    Args:
        value: any value.
        source: its description, for the error.
        path: the expression with which the error's path to an entry begins.
    """
    try:
        data = serialized(value)
        unpacked(data)
    except Exception as error:
        where, kind = _refused(value, path)
        raise OptionError(
            f"{source} holds something that torch.load(weights_only=True) refuses to read back, for safety: "
            f"{where or 'the value'} is of type {kind.__module__}.{kind.__qualname__}. Save tensors, numbers, strings, "
            "None, or lists, tuples and dicts of them in its place: of a numpy array torch.from_numpy(array), of a "
            "numpy scalar value.item(), of another object its state_dict()."
        ) from error
    return data


def check_optim(contents: OptimContents, index: ParamIndex) -> None:
    """Raise if an optimizer's settings, or its states that are no tensors, cannot be read back; see :func:`packed`."""
    groups = []
    for group in contents.groups or ():
        groups.append({**group, "params": []})
    states: dict[Any, dict[str, Any]] = {}
    for position, (param, row) in enumerate(contents.state.items()):
        # An optimizer may keep states that are of no parameter of the model.
        name = index.fqns_of(param)[0] if index.has(param) else position
        states[name] = {}
        for key, value in row.items():
            if not isinstance(value, torch.Tensor):
                states[name][key] = value
    packed({"param_groups": groups, "state": states}, "The optimizer")


def _refused(value: Any, path: str) -> tuple[str, type]:
    """Return the path and the type of the innermost entry that cannot be read back, of a value that cannot."""
    entries: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        entries = [(f"{path}[{key!r}]", each) for key, each in value.items()]
        entries += [(f"a key of {path or 'the dict'}", key) for key in value]
    elif isinstance(value, (list, tuple)):
        entries = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    for inner, each in entries:
        try:
            unpacked(serialized(each))
        except Exception:
            return _refused(each, inner)
    return path, type(value)
