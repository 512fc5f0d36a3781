"""Saves a full model as safetensors files one parameter at a time, and loads each rank's slices of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_flat.checkpoint.directory import LOADING, SAVING, Consensus, progress_bar
from fsdp_flat.checkpoint.safetensors_files import FileWriter, TensorInfo, read_safetensors
from fsdp_flat.checkpoint.streaming import StateEntry, entries_of, full_tensor_on, shard_group
from fsdp_flat.comm import P2PChannels
from fsdp_flat.errors import LoadError, OptionError, some_of
from fsdp_flat.runtime import check_idle, units_of
from fsdp_flat.state import local_from

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


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
    together = Consensus.of(model, SAVING)
    together.barrier("save_full")
    with together.propagate_errors():
        if max_file_bytes <= 0:
            raise OptionError(f"max_file_bytes must be positive; got {max_file_bytes!r}.")
        entries = entries_of(model, keep=keep, trainable_only=trainable_only)
        if not entries:
            raise OptionError("Nothing to save: no entry of the state dict is wanted (keep, trainable_only).")
        rank_group = shard_group(entries)
        # Replicas and ranks that do not write only take part in the transfers.
        rank = None if _is_replica(model) else rank_group.rank
        files = _planned(entries, dtype, max_file_bytes, rank_group.size if spread else 1)
        bar = progress_bar("Saving the model", asked=progress, here=rank == 0)
    directory = Path(directory)
    written = _Attempts()
    with bar(sum(file.nbytes for file in files)) as update:
        for start in range(0, len(files), files[0].num_writers):
            _write_batch(files[start : start + files[0].num_writers], rank, directory, written, update)
    try:
        together.fail(written.error)
    except Exception:
        for writer in written.writers:
            writer.discard()
        raise
    with together.propagate_errors():
        if rank == 0:
            # Until all files are renamed, a reader finds no index rather than a mixture of two saves.
            (directory / INDEX_NAME).unlink(missing_ok=True)
    with together.propagate_errors():
        for writer in written.writers:
            writer.commit()
    with together.propagate_errors():
        if rank == 0:
            _finish(directory, files)
    return directory


@dataclass(frozen=True, slots=True)
class _File:
    """Describes one file of a full save.

    Attributes:
        name: its name.
        writer: the rank of the shard group that writes it.
        num_writers: the number of ranks that write.
        infos: by entry, dtype and shape in the file.
        aliases: by another name of a tied parameter, the name in this file.
    """

    name: str
    writer: int
    num_writers: int
    infos: dict[StateEntry, TensorInfo]
    aliases: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Size of the file's tensors in bytes."""
        return sum(info.nbytes for info in self.infos.values())

    def open(self, directory: Path) -> FileWriter:
        """Open the file for writing."""
        directory.mkdir(parents=True, exist_ok=True)
        infos = {entry.name: info for entry, info in self.infos.items()}
        return FileWriter(directory / self.name, infos, {"format": "pt", **self.aliases})


def _planned(
    entries: list[StateEntry], dtype: torch.dtype | None, max_file_bytes: int, num_writers: int
) -> list[_File]:
    groups: list[dict[StateEntry, TensorInfo]] = [{}]
    size = 0
    for entry in entries:
        if entry.same_as is not None:
            continue
        info = TensorInfo(dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype, entry.shape)
        if groups[-1] and size + info.nbytes > max_file_bytes:
            groups.append({})
            size = 0
        groups[-1][entry] = info
        size += info.nbytes
    total = len(groups)
    names = [SINGLE_NAME] if total == 1 else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    files = []
    for index, (name, group) in enumerate(zip(names, groups, strict=True)):
        here = {entry.name for entry in group}
        aliases = {
            entry.name: entry.same_as for entry in entries if entry.same_as in here and entry.same_as is not None
        }
        files.append(_File(name, index % num_writers, num_writers, group, aliases))
    return files


def _is_replica(model: nn.Module) -> bool:
    """Return whether this rank is a replica of a rank that writes."""
    groups = [unit.options.groups for unit in units_of(model)]
    sharded = [each for each in groups if each.shard.size > 1]
    adapters = [entry.adapter for unit in units_of(model) for handle in unit.handles for entry in handle.views.params]
    return (sharded or groups)[0].replicate.rank != 0 or not all(adapter.is_first_of_mesh for adapter in adapters)


class _Attempts:
    """Runs calls until one raises: a rank that fails still takes part in the remaining transfers.

    Attributes:
        error: the exception, or None.
        writers: the files that were opened.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.writers: list[FileWriter] = []

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call ``call`` unless an earlier call has raised; return its result, or None."""
        try:
            return call(*args) if self.error is None else None
        except Exception as error:
            self.error = error
            return None


def _write_batch(
    batch: list[_File], rank: int | None, directory: Path, written: _Attempts, update: Callable[[int], object]
) -> None:
    """Send the full tensors of a batch of files to their writers, and write this rank's file."""
    own = next((file for file in batch if file.writer == rank), None)
    writer = None if own is None else written.run(own.open, directory)
    if writer is not None:
        written.writers.append(writer)
    channels = P2PChannels()
    # One tensor of each file in turn, so that the writers work in parallel.
    for row in zip_longest(*(file.infos.items() for file in batch)):
        for file, item in zip(batch, row, strict=True):
            if item is None:
                continue
            entry, info = item
            full = full_tensor_on(entry, file.writer, channels)
            update(info.nbytes)
            if writer is not None and file is own and full is not None:
                written.run(writer.write, entry.name, full.to(info.dtype))
    if writer is not None:
        written.run(writer.close)


def _finish(directory: Path, files: list[_File]) -> None:
    """Remove the files of an earlier save that were not replaced, and write the index."""
    names = {file.name for file in files}
    for path in (directory / SINGLE_NAME, *directory.glob("model-*-of-*.safetensors")):
        if path.name not in names:
            path.unlink(missing_ok=True)
    if len(files) > 1:
        total = sum(file.nbytes for file in files)
        places = {entry.name: file.name for file in files for entry in file.infos}
        partial = directory / (INDEX_NAME + ".partial")
        partial.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")
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
    together = Consensus.of(model, LOADING)
    together.barrier("load_full")
    planned: dict[str, tuple[StateEntry, torch.Tensor]] = {}
    with ExitStack() as stack:
        for unit in units_of(model):
            # Load into the buffers in their registered dtype, not into copies in the compute dtype.
            stack.enter_context(unit.buffers.exact())
        with together.propagate_errors():
            source = _source(Path(path))
            entries = entries_of(model, keep=keep)
            missing, unexpected = _compare(entries, source, strict=strict, path=path)
            for entry in entries:
                # A tied parameter is read once, under any of its names in the file.
                if (name := source.name_for(entry.name)) is not None:
                    planned.setdefault(entry.same_as or entry.name, (entry, source.local_shard(name, entry)))
        with torch.no_grad():
            for unit in units_of(model):
                unit.reshard()
                for handle in unit.handles:
                    handle.adopt_changes()
                    handle.views.bump_version()
            for entry, local_shard in planned.values():
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
    unexpected = [name for name in source.tensors if name not in known]
    problems = [
        f"{entry.name!r} has shape {tuple(source.tensors[name].shape)} in the file, {entry.shape} in the model"
        for entry in entries
        if (name := source.name_for(entry.name)) is not None and source.tensors[name].shape != entry.shape
    ]
    if strict and missing:
        problems.append(f"missing: {some_of(list(map(repr, missing)), 5)}")
    if strict and unexpected:
        problems.append(f"not in the model: {some_of(list(map(repr, unexpected)), 5)}")
    if problems:
        raise LoadError(f"{path} does not fit the model: {'; '.join(problems)}. Nothing was loaded.")
    return missing, unexpected


@dataclass(frozen=True, slots=True)
class _Source:
    """Holds the tensors of files, whose elements are read when they are used.

    Attributes:
        tensors: the tensors by name.
        aliases: by another name of a tied parameter, the name that the file has.
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]

    def name_for(self, name: str) -> str | None:
        """Return the name under which the tensor ``name`` is stored, or None."""
        found = name if name in self.tensors else self.aliases.get(name)
        return found if found in self.tensors else None

    def local_shard(self, name: str, entry: StateEntry) -> torch.Tensor:
        """Return the elements of ``name`` of this rank's local shard of ``entry``, in its order, 1-D."""
        full = self.tensors[name]
        if entry.param is not None and entry.value is not None:
            full = local_from(entry.param, full)
        elif entry.param is not None:
            full = entry.param.adapter.local_slice(full).reshape(-1)[entry.param.local_shard.in_param.to_slice()]
        return full.reshape(-1)


def _source(path: Path) -> _Source:
    if path.is_dir():
        if (path / INDEX_NAME).exists():
            paths = [path / name for name in _names_in(path / INDEX_NAME)]
        elif (path / SINGLE_NAME).exists():
            paths = [path / SINGLE_NAME]
        else:
            raise LoadError(f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}.")
        absent = [each for each in paths if not each.exists()]
        if absent:
            raise LoadError(f"{absent[0]} does not exist, although the index names it.")
    elif not path.exists():
        raise LoadError(f"{path} does not exist.")
    elif path.suffix == ".safetensors":
        paths = [path]
    else:
        return _from_torch_file(path)
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for each in paths:
        found, metadata = read_safetensors(each)
        tensors |= found
        aliases |= {name: same for name, same in metadata.items() if name != "format"}
    return _Source(tensors, aliases)


def _names_in(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} is no index of a model's files: {error!r}.") from error


def _from_torch_file(path: Path) -> _Source:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise LoadError(
            f"{path} cannot be read by torch.load(weights_only=True): {error}. Expected a state dict of plain tensors, "
            "or a .safetensors file."
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise LoadError(f"{path} holds no state dict of tensors; save model.state_dict() by itself.")
    return _Source(state, {})
