"""Saves a full model as safetensors files one parameter at a time, and loads each rank's slices of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_flat.checkpoint.consensus import LOADING, SAVING, consensus_of
from fsdp_flat.checkpoint.progress import progress_bar
from fsdp_flat.checkpoint.safetensors_files import FileReader, FileWriter, TensorInfo
from fsdp_flat.checkpoint.streaming import StateEntry, entries_of, full_tensor_on, shard_group
from fsdp_flat.errors import LoadError, OptionError
from fsdp_flat.layout import Box
from fsdp_flat.runtime import check_idle, units_of
from fsdp_flat.state import boxes_of

__all__ = ["load_full", "save_full"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class _File:
    """Describes one file of a full save: its entries and the rank of the shard group that writes it."""

    name: str
    writer: int
    entries: tuple[StateEntry, ...]


def _info(entry: StateEntry, dtype: torch.dtype | None) -> TensorInfo:
    cast = dtype is not None and entry.dtype.is_floating_point
    return TensorInfo(dtype if cast and dtype is not None else entry.dtype, entry.shape)


def save_full(
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    keep: Callable[[str], bool] | None = None,
    trainable_only: bool = False,
    max_file_bytes: int = 5_000_000_000,
    spread: bool = False,
    progress: bool = False,
) -> Path:
    """Write the full model as safetensors files in the layout of model hubs, one parameter in memory at a time.

    The files are ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with
    ``model.safetensors.index.json``. A tied parameter is written under its first name; its other names are in the
    header's metadata, as in the safetensors package. Files of an earlier save in the directory are replaced once all
    new ones are complete.

    Every rank must call this.

    Args:
        model: a wrapped model, or a module that holds wrappers.
        directory: created if needed; the same for every rank that writes.
        dtype: floating-point tensors are converted to it.
        keep: returns whether to save the entry of a name; the same on every rank.
        trainable_only: save only parameters with ``requires_grad``, as of an adapter.
        max_file_bytes: maximum size of a file's tensors in bytes, exceeded only by a single larger tensor.
        spread: the ranks of the shard group write files in parallel, in turn, instead of rank 0 alone; all of them
            must share one file system.
        progress: show a progress bar on rank 0 (needs tqdm).

    Returns:
        The directory.

    Raises:
        OptionError: nothing to write, or ``max_file_bytes`` is not positive.
        UnsupportedError: units sharded over different groups, an entry that is no tensor, or a dtype that safetensors
            does not have.
        PeerFailureError: another rank failed, because its disk is full for instance.
    """
    together = consensus_of(model, SAVING)
    together.barrier("save_full")
    with together.propagate_errors():
        if max_file_bytes <= 0:
            raise OptionError(f"max_file_bytes must be positive; got {max_file_bytes!r}.")
        entries = entries_of(model, keep=keep, trainable_only=trainable_only)
        if not entries:
            raise OptionError("Nothing to save: no entry of the state dict is wanted (keep, trainable_only).")
        rank_group = shard_group(entries)
        files = _planned(entries, dtype, max_file_bytes, rank_group.size if spread else 1)
    directory = Path(directory)
    # Replicas and ranks that do not write only take part in the transfers.
    is_replica = _is_replica(model)
    num_writers = rank_group.size if spread else 1
    bar = progress_bar(
        "Saving the model", _total(entries, dtype), asked=progress, here=rank_group.rank == 0 and not is_replica
    )
    written: list[FileWriter] = []
    error: Exception | None = None
    with bar:
        for start in range(0, len(files), num_writers):
            batch = files[start : start + num_writers]
            own = next((file for file in batch if file.writer == rank_group.rank and not is_replica), None)
            error = _write_batch(batch, own, directory, dtype, bar.update, written, error)
    together.fail(error)
    is_first = rank_group.rank == 0 and not is_replica
    with together.propagate_errors():
        if is_first:
            # Until all files are renamed, a reader finds no index rather than a mixture of two saves.
            (directory / INDEX_NAME).unlink(missing_ok=True)
    with together.propagate_errors():
        for writer in written:
            writer.set_sharded_grad()
    with together.propagate_errors():
        if is_first:
            _finish(directory, files, dtype)
    return directory


def _is_replica(model: nn.Module) -> bool:
    """Return whether this rank is a replica of a rank that writes."""
    groups = [unit.options.groups for unit in units_of(model)]
    sharded = [each for each in groups if each.shard.size > 1]
    adapters = [entry.adapter for unit in units_of(model) for handle in unit.handles for entry in handle.views.params]
    return (sharded or groups)[0].replicate.rank != 0 or not all(adapter.is_first_of_mesh for adapter in adapters)


def _finish(directory: Path, files: list[_File], dtype: torch.dtype | None) -> None:
    """Remove the files of an earlier save that were not replaced, and write the index."""
    names = {file.name for file in files}
    for path in (directory / SINGLE_NAME, *directory.glob("model-*-of-*.safetensors")):
        if path.name not in names:
            path.unlink(missing_ok=True)
    if len(files) > 1:
        _write_index(directory, files, dtype)


def _total(entries: list[StateEntry], dtype: torch.dtype | None) -> int:
    return sum(_info(entry, dtype).nbytes for entry in entries if entry.same_as is None)


def _planned(
    entries: list[StateEntry], dtype: torch.dtype | None, max_file_bytes: int, num_writers: int
) -> list[_File]:
    groups: list[list[StateEntry]] = [[]]
    size = 0
    for entry in entries:
        if entry.same_as is not None:
            continue
        nbytes = _info(entry, dtype).nbytes
        if groups[-1] and size + nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += nbytes
    total = len(groups)
    names = [SINGLE_NAME] if total == 1 else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    aliases = [entry for entry in entries if entry.same_as is not None]
    files = []
    for index, (name, group) in enumerate(zip(names, groups, strict=True)):
        here = {entry.name for entry in group}
        also = [entry for entry in aliases if entry.same_as in here]
        files.append(_File(name, index % num_writers, (*group, *also)))
    return files


def _write_batch(
    batch: list[_File],
    own: _File | None,
    directory: Path,
    dtype: torch.dtype | None,
    update: Callable[[int], object],
    written: list[FileWriter],
    error: Exception | None,
) -> Exception | None:
    """Send the full tensors of a batch of files to their writers, and write this rank's file.

    A rank that fails still takes part in the remaining transfers.
    """
    writer: FileWriter | None = None
    if own is not None and error is None:
        try:
            writer = _opened(own, directory, dtype)
        except Exception as raised:
            error = raised
    stored = [[entry for entry in file.entries if entry.same_as is None] for file in batch]
    for position in range(max(map(len, stored))):
        # One tensor of each file in turn, so that the writers work in parallel.
        for file, mine in zip(batch, stored, strict=True):
            if position >= len(mine):
                continue
            whole = full_tensor_on(mine[position], file.writer)
            update(_info(mine[position], dtype).nbytes)
            if writer is None or file is not own or whole is None:
                continue
            try:
                writer.write(mine[position].name, whole.to(_info(mine[position], dtype).dtype))
            except Exception as raised:
                writer.discard()
                writer, error = None, raised
    if writer is not None:
        written.append(writer)
        error = error or _caught(writer.close)
    return error


def _opened(file: _File, directory: Path, dtype: torch.dtype | None) -> FileWriter:
    directory.mkdir(parents=True, exist_ok=True)
    infos = {entry.name: _info(entry, dtype) for entry in file.entries if entry.same_as is None}
    aliases = {entry.name: entry.same_as for entry in file.entries if entry.same_as is not None}
    return FileWriter(directory / file.name, infos, {"format": "pt", **aliases})


def _caught(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _write_index(directory: Path, files: list[_File], dtype: torch.dtype | None) -> None:
    stored = [(entry, file.name) for file in files for entry in file.entries if entry.same_as is None]
    index = {
        "metadata": {"total_size": sum(_info(entry, dtype).nbytes for entry, _ in stored)},
        "weight_map": {entry.name: name for entry, name in stored},
    }
    partial = directory / (INDEX_NAME + ".partial")
    partial.write_text(json.dumps(index, indent=2) + "\n")
    partial.replace(directory / INDEX_NAME)


def load_full(
    model: nn.Module, path: str | Path, *, strict: bool = True, keep: Callable[[str], bool] | None = None
) -> tuple[list[str], list[str]]:
    """Load a full model from files; each rank reads only its own slices of each parameter.

    Every rank must call this, and must have access to the files. The model is unchanged unless everything fits.

    Args:
        model: a wrapped model, or a module that holds wrappers.
        path: a ``.safetensors`` file, a directory with ``model.safetensors`` or with an index as on model hubs, or a
            file of ``torch.save`` with a state dict (read by ``torch.load`` with ``mmap`` and ``weights_only``).
        strict: missing and unexpected names in the files are an error.
        keep: returns whether to load the entry of a name.

    Returns:
        Missing names and unexpected names; both empty with ``strict``.

    Raises:
        LoadError: (a RuntimeError) files that cannot be read, names or shapes that do not fit; on every rank.
        PhaseError: called in the middle of a step.
    """
    for unit in units_of(model):
        check_idle(unit, "load_full")
    together = consensus_of(model, LOADING)
    together.barrier("load_full")
    error: Exception | None = None
    missing: list[str] = []
    unexpected: list[str] = []
    planned: list[tuple[StateEntry, torch.Tensor]] = []
    read: set[str] = set()
    with ExitStack() as stack:
        for unit in units_of(model):
            # Load into the buffers in their registered dtype, not into copies in the compute dtype.
            stack.enter_context(unit.buffers.exact())
        try:
            source = stack.enter_context(_source(Path(path)))
            entries = entries_of(model, keep=keep)
            missing, unexpected = _compare(entries, source, strict=strict, path=path)
            for entry in entries:
                name = source.name_for(entry.name)
                primary = entry.same_as or entry.name
                # A tied parameter is read once, under any of its names in the file.
                if name is not None and primary not in read:
                    read.add(primary)
                    planned.append((entry, source.local_shard(name, entry)))
        except Exception as raised:
            error = raised
        together.fail(error)
        with torch.no_grad():
            for unit in units_of(model):
                unit.reshard()
                for handle in unit.handles:
                    handle.adopt_changes()
                    handle.views.bump_version()
            for entry, local_shard in planned:
                target = entry.held()
                target.copy_(local_shard.view(target.shape))
    return missing, unexpected


def _compare(
    entries: list[StateEntry], source: _Source, *, strict: bool, path: str | Path
) -> tuple[list[str], list[str]]:
    known = {source.name_for(entry.name) for entry in entries}
    missing = [
        entry.name
        for entry in entries
        if source.name_for(entry.name) is None and (entry.same_as is None or source.name_for(entry.same_as) is None)
    ]
    unexpected = [name for name in source.shapes if name not in known]
    problems = [
        f"{entry.name!r} has shape {source.shapes[name]} in the file, {entry.shape} in the model"
        for entry in entries
        if (name := source.name_for(entry.name)) is not None and source.shapes[name] != entry.shape
    ]
    if strict and missing:
        problems.append(f"missing: {_some(missing)}")
    if strict and unexpected:
        problems.append(f"not in the model: {_some(unexpected)}")
    if problems:
        raise LoadError(f"{path} does not fit the model: {'; '.join(problems)}. Nothing was loaded.")
    return missing, unexpected


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


class _Source:
    """Reads tensors from files: their names, shapes, and ranges of elements."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        aliases: Mapping[str, str],
        read: Callable[[str, int, int], torch.Tensor],
    ) -> None:
        self.shapes = dict(shapes)
        self._aliases = aliases
        self._read = read

    def name_for(self, name: str) -> str | None:
        """Return the name under which the tensor ``name`` is stored, or None."""
        if name in self.shapes:
            return name
        other = self._aliases.get(name)
        return other if other in self.shapes else None

    def local_shard(self, name: str, entry: StateEntry) -> torch.Tensor:
        """Read from ``name`` the elements of this rank's local shard of ``entry``, 1-D."""
        if entry.handle is None:
            return self._read(name, 0, torch.Size(entry.shape).numel())
        run, local = (
            entry.handle.views.local_shards[entry.index].in_param,
            entry.handle.layout.param_infos[entry.index].shape,
        )
        if local == entry.shape:
            return self._read(name, run.start, run.stop)
        # A tensor-parallel part: read the full rows of each box, then slice the box.
        _, found = boxes_of(entry.handle, entry.index)
        return torch.cat([self._read(name, 0, 0), *(self._box(name, entry.shape, box) for box in found)])

    def _box(self, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        width = math.prod(shape[1:])
        first, num_rows = box.offsets[0], box.sizes[0]
        part = self._read(name, first * width, (first + num_rows) * width).view(num_rows, *shape[1:])
        for dim in range(1, len(shape)):
            part = part.narrow(dim, box.offsets[dim], box.sizes[dim])
        return part.reshape(-1)


class _Opened:
    """Holds a source and the files that it reads, as a context manager."""

    def __init__(self, source: _Source, readers: list[FileReader]) -> None:
        self._source = source
        self._readers = readers

    def __enter__(self) -> _Source:
        return self._source

    def __exit__(self, *error: Any) -> None:
        for reader in self._readers:
            reader.__exit__(None, None, None)


def _source(path: Path) -> _Opened:
    if path.is_dir():
        if (path / INDEX_NAME).exists():
            names = _names_in(path / INDEX_NAME)
            return _from_safetensors([path / name for name in names])
        if (path / SINGLE_NAME).exists():
            return _from_safetensors([path / SINGLE_NAME])
        raise LoadError(f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}.")
    if not path.exists():
        raise LoadError(f"{path} does not exist.")
    return _from_safetensors([path]) if path.suffix == ".safetensors" else _from_torch_file(path)


def _names_in(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} is no index of a model's files: {error!r}.") from error


def _from_safetensors(paths: list[Path]) -> _Opened:
    absent = [path for path in paths if not path.exists()]
    if absent:
        raise LoadError(f"{absent[0]} does not exist, although the index names it.")
    readers = [FileReader(path) for path in paths]
    holder = {name: reader for reader in readers for name in reader.tensors}
    shapes = {name: reader.tensors[name].shape for name, reader in holder.items()}
    aliases = {name: same for reader in readers for name, same in reader.metadata.items() if name != "format"}
    return _Opened(_Source(shapes, aliases, lambda name, start, stop: holder[name].read(name, start, stop)), readers)


def _from_torch_file(path: Path) -> _Opened:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise LoadError(
            f"{path} cannot be read by torch.load(weights_only=True): {error}. Expected a state dict of plain tensors, "
            "or a .safetensors file."
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise LoadError(f"{path} holds no state dict of tensors; save model.state_dict() by itself.")
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    return _Opened(_Source(shapes, {}, lambda name, start, stop: state[name].reshape(-1)[start:stop]), [])
