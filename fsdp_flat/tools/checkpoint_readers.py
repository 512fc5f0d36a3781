"""Opens checkpoints of every format, without a process group and without reading tensors: :func:`open_checkpoint`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_flat.checkpoint import format as disk
from fsdp_flat.checkpoint import list_checkpoints
from fsdp_flat.checkpoint.dcp_files import SafeReader
from fsdp_flat.checkpoint.full_entries import ADAPTER_CHECKSUMS_NAME, CHECKSUMS_NAME
from fsdp_flat.checkpoint.full_load import check_recorded_sums
from fsdp_flat.checkpoint.progress import progress_bar
from fsdp_flat.checkpoint.safetensors_files import INDEX_NAME, files_in_index, read_safetensors
from fsdp_flat.errors import LoadError, OptionError, phrase, some_of
from fsdp_flat.layout import chunk_rows
from fsdp_flat.tools.stored_checkpoint import (
    Keys,
    Part,
    Position,
    StoredCheckpoint,
    TensorInFiles,
    flattened,
)
from fsdp_flat.tools.torch_archives import Described, damaged_record, read_archive
from fsdp_flat.user_warnings import warn_user

_RANK_OF_FILE = re.compile(r"__(\d+)_\d+\.distcp$")
CHECKSUMS_NAMES = (CHECKSUMS_NAME, ADAPTER_CHECKSUMS_NAME)
_HUB_FILE = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin$")
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def open_checkpoint(path: Path, *, allow_pickle: bool = False) -> StoredCheckpoint:
    """Open a checkpoint: read its names, shapes, dtypes and small values, no tensors.

    Args:
        path: a file, a directory, or a directory of this library's checkpoints, of which the newest counts.
        allow_pickle: make objects of any class that the files name, for which their code runs. By default plain values
            and tensors are made, and other objects are described.

    Raises:
        LoadError: a file is damaged, or of no known format.
        OptionError: there is no such path, or no checkpoint there.
    """
    if not path.exists():
        raise OptionError(f"{path} does not exist.")
    for finds, opened in _FORMATS:
        if finds(path):
            return opened(path, allow_pickle)
    if path.is_file():
        return _open_torch_files(path, allow_pickle)
    if any(path.glob("*.distcp")):
        raise LoadError(
            f"{path} is a checkpoint of torch.distributed.checkpoint without its file .metadata, written last: "
            "the save was cut off, or the file was not copied (its name is hidden). Copy it, or save again."
        )
    raise OptionError(
        f"{path} is no checkpoint: it holds {some_of(sorted(each.name for each in path.iterdir()), 8) or 'nothing'}. "
        "Expected .metadata, *.safetensors, checkpoints named step-00000100, or files of torch.save, one a rank."
        + (f" Pass one of those inside: {some_of(list(map(str, inside)), 4)}." if (inside := _inside(path)) else "")
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether a path looks like one checkpoint, or one file of it."""
    if path.is_dir():
        opener = next((opened for finds, opened in _FORMATS if finds(path)), None)
        # A folder of single files is listed file by file unless their names count ranks.
        return opener not in (None, _open_newest) and (
            opener is not _open_torch_files or _counts_ranks(_rank_files(path))
        )
    return path.suffix in (".safetensors", *TORCH_SUFFIXES)


def _inside(path: Path) -> list[Path]:
    """Return the checkpoints that are folders in a folder."""
    folders = sorted(each for each in path.iterdir() if each.is_dir())
    return list(filter(looks_like_checkpoint, folders))


def looks_like_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint, a folder of this library's, or one of torch's DCP without its metadata."""
    return is_checkpoint(path) or has_steps(path) or (path.is_dir() and any(path.glob("*.distcp")))


# -- this library's, and torch.distributed.checkpoint's ----------------------------------------------------------------


def has_steps(path: Path) -> bool:
    """Return whether a path is a folder of this library's checkpoints."""
    return bool(disk.orders_in(path))


def _open_newest(path: Path, allow_pickle: bool) -> StoredCheckpoint:
    checkpoints = list_checkpoints(path)
    for checkpoint in checkpoints:
        if checkpoint.problem:
            warn_user(f"{phrase(checkpoint.problem)}; passed over.")
    complete = [checkpoint.path for checkpoint in checkpoints if not checkpoint.problem]
    if not complete:
        raise LoadError(f"{path} has no complete checkpoint.")
    return _open_dcp(complete[0], allow_pickle)


def _metadata_of(path: Path, allow_pickle: bool) -> Metadata:
    reader = FileSystemReader(path) if allow_pickle else SafeReader(path)
    try:
        return reader.read_metadata()
    except LoadError as error:
        # SafeReader refuses classes, and metadata that do not fit the files.
        advice = f" If you trust {path}, pass --allow-pickle." if "refers to" in str(error) else ""
        raise LoadError(f"{error}{advice}") from error
    except Exception as error:
        raise LoadError(f"{path / '.metadata'} cannot be read: {error!r}.") from error


def _open_dcp(path: Path, allow_pickle: bool) -> StoredCheckpoint:
    metadata = _metadata_of(path, allow_pickle)
    is_ours = (path / disk.COMMIT_NAME).exists()
    places = metadata.storage_data or {}
    mappings = metadata.planner_data or {}
    parts: dict[str, list[Part]] = {}
    values: dict[Keys, Any] = {}
    ranks, tensors = set(), {}
    # Rows of a part are read one after the other, so the last part that was read is kept.
    archived = lru_cache(maxsize=1)(partial(read_archive, allow_pickle=allow_pickle))
    for index, place in places.items():
        match = _RANK_OF_FILE.search(place.relative_path)
        rank = int(match[1]) if match else None
        file = path / place.relative_path
        read = partial(archived, file, place.offset, place.length)
        entry = metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            offsets = tuple(index.offset or (0,) * len(entry.size))
            sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
            if rank is not None:
                ranks.add(rank)
            part = Part(offsets, sizes[offsets], read, file, rank)
            parts.setdefault(index.fqn, []).append(part)
        else:
            for inner, value in flattened(read(), _keys_of(index.fqn, mappings)):
                if is_ours and inner[0] == "plain":
                    # Below it this library saves what ranks need not share: settings, and states without dims.
                    inner = inner[1:]
                if _is_plain_tensor(value):
                    tensors[inner] = _whole(inner, value, file)
                elif value != {}:
                    values[inner] = value
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            keys = _keys_of(fqn, mappings)
            held = tuple(parts.get(fqn, ()))
            tensors[keys] = TensorInFiles(keys, tuple(entry.size), entry.properties.dtype, held)
    # As Lightning's meta.pt.
    others = _archives_in(path)
    files = {path / place.relative_path for place in places.values()} | {path / ".metadata", *others}
    return StoredCheckpoint(
        path=path,
        kind="fsdp_flat" if is_ours else "dcp",
        writer="fsdp_flat.save_checkpoint" if is_ours else f"torch.distributed.checkpoint {metadata.version or ''}",
        num_ranks=len(ranks) or None,
        tensors=tensors,
        values=values,
        files=tuple(sorted(files)),
        problems=lambda: chain(_problems_of_dcp(path, places.values(), is_ours), _problems_of_archives(others)),
        step=disk.step_number_of(path.name),
    )


def _keys_of(fqn: str, mappings: Mapping[str, Any]) -> Keys:
    """Return the nested keys of a flattened name, which the planner records."""
    keys = mappings.get(fqn) if isinstance(mappings, Mapping) else None
    return tuple(Position(key) if isinstance(key, int) else key for key in keys or (fqn,))


def _problems_of_dcp(path: Path, places: Iterable[Any], is_ours: bool) -> Iterator[str]:
    if is_ours:
        for name, record in disk.read_commit(path).files.items():
            try:
                disk.check_size(path / name, record)
                disk.check_sums(path, {name: record}, progress_bar("", asked=False, here=False))
            except LoadError as error:
                yield str(error)
        return
    for place in places:
        file = path / place.relative_path
        if (bad := damaged_record(file, place.offset, place.length)) is not None:
            yield f"{file.name}, bytes {place.offset} to {place.offset + place.length}: {bad} is damaged"


# -- safetensors -------------------------------------------------------------------------------------------------------


def _safetensors_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX_NAME
    if index.exists():
        return files_in_index(index)
    return sorted(path.glob("*.safetensors"))


def _has_safetensors(path: Path) -> bool:
    return path.suffix == ".safetensors" if path.is_file() else any(path.glob("*.safetensors"))


def _open_safetensors(path: Path, allow_pickle: bool) -> StoredCheckpoint:
    tensors: dict[Keys, TensorInFiles] = {}
    files = _safetensors_of(path)
    metadata: dict[str, Any] = {}
    for file in files:
        in_file, strings = read_safetensors(file)
        tensors |= {(name,): _whole((name,), tensor, file) for name, tensor in in_file.items()}
        metadata |= strings
    for name, same in metadata.items():
        if (same,) in tensors and (name,) not in tensors:
            tensors[(name,)] = replace(tensors[(same,)], keys=(name,))
    return StoredCheckpoint(
        path=path,
        kind="safetensors",
        writer=f"safetensors, for {metadata['format']}" if "format" in metadata else "safetensors",
        num_ranks=None,
        tensors=tensors,
        values={},
        files=tuple(files),
        problems=partial(_problems_of_safetensors, files),
        has_checksums=any((files[0].parent / name).exists() for name in CHECKSUMS_NAMES) if files else False,
    )


def _problems_of_safetensors(files: Sequence[Path]) -> Iterator[str]:
    try:
        check_recorded_sums(files, 0, 1, progress_bar("", asked=False, here=False))
    except LoadError as error:
        yield str(error)


# -- accelerate and the Trainer ----------------------------------------------------------------------------------------

# What they name the parts of a folder: folders of torch.distributed.checkpoint, or files of torch.save.
_PART = re.compile(r"(?:pytorch_(model)_fsdp|(optimizer))(_\d+)?(\.bin)?$")


def _parts_of(path: Path) -> dict[str, list[Path]]:
    """Return by "model" and "optimizer" what a folder of accelerate has of each; nothing without a model."""
    found: dict[str, list[Path]] = {}
    for each in sorted(path.iterdir()) if path.is_dir() else ():
        if match := _PART.match(each.name):
            found.setdefault(match[1] or match[2], []).append(each)
    return found if "model" in found else {}


def _open_parts(path: Path, allow_pickle: bool) -> StoredCheckpoint:
    opened: dict[str, StoredCheckpoint] = {}
    for name, parts in _parts_of(path).items():
        if len(parts) > 1:
            raise OptionError(
                f"{path} has more than one {name}: {' and '.join(each.name for each in parts)}. Pass one."
            )
        part = open_checkpoint(parts[0], allow_pickle=allow_pickle)
        opened[name] = part if all(keys[0] == name for keys in (*part.tensors, *part.values)) else part.under(name)
    archives = [each for each in _archives_in(path) if not _PART.match(each.name)]
    each_problems = [part.problems for part in opened.values()]
    return StoredCheckpoint(
        path=path,
        kind="accelerate",
        writer="accelerate or transformers",
        num_ranks=opened["model"].num_ranks,
        tensors={keys: tensor for part in opened.values() for keys, tensor in part.tensors.items()},
        values={keys: value for part in opened.values() for keys, value in part.values.items()},
        files=(*(file for part in opened.values() for file in part.files), *archives),
        problems=lambda: chain(*(found() for found in each_problems), _problems_of_archives(archives)),
    )


# -- torch.save --------------------------------------------------------------------------------------------------------


def _is_plain_tensor(value: Any) -> bool:
    # A file has no elements of a tensor on the meta device.
    is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    return is_plain and value.device.type == "cpu"


def _whole(keys: Keys, tensor: torch.Tensor, file: Path) -> TensorInFiles:
    plain, shape = tensor.detach(), tuple(tensor.shape)
    shared = (plain.data_ptr(), plain.stride(), shape, plain.dtype) if plain.numel() else None
    return TensorInFiles(keys, shape, plain.dtype, (Part((0,) * len(shape), shape, lambda: plain, file),), shared)


def _archives_in(path: Path) -> list[Path]:
    """Return the files of ``torch.save`` in a folder."""
    found = []
    for file in sorted(path.iterdir()):
        if file.suffix in (*TORCH_SUFFIXES, ".pkl") and file.is_file():
            with file.open("rb") as opened:
                if opened.read(2) == b"PK":
                    found.append(file)
    return found


def _has_rank_files(path: Path) -> bool:
    """Return whether the files of ``torch.save`` in a folder are one checkpoint, not beside others or of many kinds."""
    files = _rank_files(path)
    if files and _HUB_FILE.match(files[0].name):
        return True
    return bool(files) and (len(files) == 1 or _counts_ranks(files)) and not _inside(path)


def _rank_files(path: Path) -> list[Path]:
    """Return the files of a folder that ranks have saved, one each, by rank."""
    files = [file for file in path.iterdir() if file.suffix in TORCH_SUFFIXES] if path.is_dir() else []
    # A model of a hub, beside which the Trainer writes others.
    files = [file for file in files if _HUB_FILE.match(file.name)] or files
    return sorted(files, key=lambda file: ([int(number) for number in re.findall(r"\d+", file.stem)], file.name))


def _counts_ranks(files: list[Path]) -> bool:
    numbers = [re.findall(r"\d+", file.stem) for file in files]
    return all(numbers) and len({re.sub(r"\d+", "", file.name) for file in files}) == 1


def _open_torch_files(path: Path, allow_pickle: bool) -> StoredCheckpoint:
    """Open what one process has saved, or each rank of several; rank 0's counts of what ranks have alike."""
    files = [path] if path.is_file() else _rank_files(path)
    tensors: dict[Keys, TensorInFiles] = {}
    values: dict[Keys, Any] = {}
    for rank, file in enumerate(files):
        for keys, value in flattened(_state_of(read_archive(file, allow_pickle=allow_pickle), file)):
            if (parts := _sharded_parts(value, file, rank)) is not None:
                before = tensors[keys].parts if keys in tensors else ()
                tensors[keys] = TensorInFiles(keys, tuple(value.shape), value.dtype, (*before, *parts))
            elif _is_plain_tensor(value):
                tensors.setdefault(keys, _whole(keys, value, file))
            else:
                values.setdefault(keys, value)
    return StoredCheckpoint(
        path=path,
        kind="torch" if path.is_file() else "rank files",
        writer="torch.save",
        num_ranks=None if path.is_file() else len(files),
        tensors=tensors,
        values=values,
        files=tuple(files),
        problems=partial(_problems_of_archives, files),
    )


def _state_of(saved: Any, file: Path) -> Any:
    """Return what a file holds; raise a LoadError for a module that was pickled as a whole."""
    state = saved.state if isinstance(saved, Described) else getattr(saved, "__dict__", None)
    if isinstance(state, Mapping) and {"_parameters", "_modules"} <= state.keys():
        kind = saved.kind if isinstance(saved, Described) else f"{type(saved).__module__}.{type(saved).__qualname__}"
        raise LoadError(
            f"{file} is a pickled module, {kind}, not a state dict. Where its class can be imported, and if you "
            f"trust the file: torch.save(torch.load({str(file)!r}, weights_only=False).state_dict(), ...)."
        )
    return saved


def _problems_of_archives(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        if (bad := damaged_record(path)) is not None:
            yield f"{path.name}: {bad} is damaged"


def _sharded_parts(value: Any, file: Path, rank: int) -> tuple[Part, ...] | None:
    """Return this rank's parts of a tensor; None for anything else.

    Args:
        value: a DTensor, or the description of one or of a ShardedTensor.
        file: the file that it is in.
        rank: the rank that wrote the file, for DTensors of torch versions that do not store it.

    Raises:
        LoadError: the sharding is one that cannot be described by boxes.
    """
    kind = type(value).__name__
    if kind == "ShardedTensor":
        return tuple(_part_of_shard(shard, file, rank) for shard in value.state[0])
    if kind == "DTensor":
        return (_part_of_dtensor(value, file, rank),)
    return None


def _part(offsets: list[int], local: torch.Tensor, file: Path, rank: int) -> Part:
    return Part(tuple(offsets), tuple(local.shape), local.detach, file, rank)


def _part_of_shard(shard: Any, file: Path, rank: int) -> Part:
    writer = getattr(shard.metadata.placement, "_rank", None)
    return _part(list(shard.metadata.shard_offsets), shard.tensor, file, rank if writer is None else writer)


def _part_of_dtensor(value: Any, file: Path, rank: int) -> Part:
    # Attributes that an object and its description have alike.
    mesh, local = value._spec.mesh, value._local_tensor
    coordinate = getattr(mesh, "_coordinate_on_dim", None)
    if not coordinate:
        raise LoadError(f"{file} does not say where in the mesh of its DTensors the rank is that wrote it.")
    offsets, sizes = [0] * len(value.shape), list(value.shape)
    for placement, num, at in zip(value._spec.placements, _mesh_shape(mesh), coordinate, strict=True):
        name = type(placement).__name__
        if name == "Shard":
            rows = chunk_rows(sizes[placement.dim], num, at)
            offsets[placement.dim], sizes[placement.dim] = offsets[placement.dim] + rows.start, rows.numel
        elif name != "Replicate":
            raise LoadError(f"{file} has a DTensor with the placement {name}, which is no box of the tensor.")
    if tuple(local.shape) != tuple(sizes):
        raise LoadError(f"{file} has a part of shape {tuple(local.shape)} where its placements give {tuple(sizes)}.")
    return _part(offsets, local, file, getattr(mesh, "_rank", rank))


def _mesh_shape(mesh: Any) -> list[int]:
    """Return the shape of a mesh, of which torch has stored the ranks, and then a layout in two forms."""
    layout = getattr(mesh, "_layout", None)
    if layout is None:
        return list(mesh.mesh.shape)
    each = [axis.shape for axis in layout.axes] if hasattr(layout, "axes") else layout.shape
    return [
        size if isinstance(size, int) else prod(size) for size in (each if isinstance(each, (list, tuple)) else [each])
    ]


Finds = Callable[[Path], bool]
_FORMATS: tuple[tuple[Finds, Callable[[Path, bool], StoredCheckpoint]], ...] = (
    (has_steps, _open_newest),
    (lambda path: (path / ".metadata").is_file(), _open_dcp),
    (lambda path: bool(_parts_of(path)), _open_parts),
    (_has_safetensors, _open_safetensors),
    (_has_rank_files, _open_torch_files),
)


def problems_of(checkpoint: StoredCheckpoint) -> Iterator[str]:
    """Yield what is wrong with a checkpoint: checksums, sizes, missing files, and tensors that are not all there."""
    yield from checkpoint.problems()
    for tensor in checkpoint.tensors.values():
        if (held := sum(part.numel for part in tensor.distinct_parts)) != tensor.numel:
            yield f"{tensor.name}: the files hold {held:,} of {tensor.numel:,} elements"
