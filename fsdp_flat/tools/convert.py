"""Writes a checkpoint as one of another kind, with one tensor in memory at a time: the command ``convert``.

``consolidate`` and ``reshard`` are conversions too. :data:`KINDS` lists what can be written.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fsdp_flat.checkpoint.commit import commit
from fsdp_flat.checkpoint.dcp_files import on_host, write_metadata
from fsdp_flat.checkpoint.files import is_url
from fsdp_flat.checkpoint.format import records_of, writing_path
from fsdp_flat.checkpoint.progress import progress_bar
from fsdp_flat.checkpoint.safetensors_files import INDEX_NAME, FileWriter, divided, index_of
from fsdp_flat.errors import OptionError, UnsupportedError, counted, some_of
from fsdp_flat.layout import chunk_rows, owners_of_constants
from fsdp_flat.sizes import size_text
from fsdp_flat.tools.checkpoint_readers import open_checkpoint
from fsdp_flat.tools.command_output import show
from fsdp_flat.tools.stored_checkpoint import (
    Keys,
    Position,
    StoredCheckpoint,
    TensorInFiles,
    dotted_name,
    flattened,
    nested,
)
from fsdp_flat.tools.torch_archives import Described
from fsdp_flat.tools.torch_writer import write_archive

Update = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Holds what a caller chooses about the files to write.

    Attributes:
        key: the name of the model in the checkpoint; by default a common one.
        model_only: leave out everything but the model, also where the kind could hold it.
        num_ranks: the ranks whose files a "dcp" or "sharded" checkpoint has.
        max_file_bytes: maximum size of the tensors of a safetensors file, exceeded by a single larger one only.
        config: the file config.json of the model, for a folder of safetensors; by default that beside the source.
        dtype: what floating-point tensors of the model become, in safetensors.
    """

    key: str | None = None
    model_only: bool = False
    num_ranks: int = 1
    max_file_bytes: int = 5_000_000_000
    config: Path | None = None
    dtype: torch.dtype | None = None


def named_dtype(name: str | None) -> torch.dtype | None:
    """Return the floating-point dtype of a name like "bfloat16"; raise an OptionError for others."""
    if name is None:
        return None
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(f"--dtype names a floating-point type, as bfloat16, float16 or float32; got {name!r}.")
    return found


def config_of(source: Path, options: WriteOptions) -> Path | None:
    """Return the file config.json that describes a model: the one that was given, or one beside its files."""
    if options.config is not None:
        if not options.config.is_file():
            raise OptionError(f"--config {options.config}: there is no such file.")
        return options.config
    folders = [source.parent] if source.is_file() else [source, source.parent]
    return next((path for folder in folders if (path := folder / "config.json").is_file()), None)


def write_checkpoint(source: StoredCheckpoint, path: Path, kind: str, options: WriteOptions, update: Update) -> None:
    """Write a checkpoint of another kind, under a temporary name until it is complete.

    Args:
        source: the checkpoint to read.
        path: the file or the folder to make; there must be none.
        kind: one of :data:`KINDS`.
        options: what else to choose.
        update: called with the bytes of tensors as they are written.

    Raises:
        OptionError: ``path`` exists, or the checkpoint does not say what is the model.
        UnsupportedError: the kind cannot hold a value of the checkpoint, or its tensors are flat parameters.
        LoadError: the checkpoint is not complete.
    """
    if is_url(path):
        raise OptionError(
            f"The target must be a local path; got {str(path)!r}. Write it here, and copy it to the store."
        )
    if path.exists():
        raise OptionError(f"{path} exists; name a file or folder to make.")
    if flat := [name for name in map(dotted_name, source.tensors) if name.split(".")[-1] == "_flat_param"]:
        raise UnsupportedError(
            f"{source.path} holds a LOCAL_STATE_DICT: {some_of(flat, 3)} is the flat parameter of a unit, and the "
            "files do not say where in it each parameter is. Load it into the model, wrapped as it was, on as many "
            "ranks, inside FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT), and save that by save_full or "
            "save_checkpoint."
        )
    if kind != "safetensors" and (options.config is not None or options.dtype is not None):
        raise OptionError("--config and --dtype are for --to safetensors.")
    if kind in ("full", "safetensors") or (options.model_only and kind != "sharded"):
        source = source.below(source.model_keys(options.key))
    partial_path = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove(partial_path)
    try:
        KINDS[kind](source, partial_path, options, update)
        partial_path.rename(path)
    finally:
        _remove(partial_path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_values(values: Mapping[Keys, Any]) -> None:
    """Raise if a value cannot be written, since its class was not made."""
    bad = [
        dotted_name(keys) for keys, value in values.items() if _holds_object(value) or isinstance(value, torch.Tensor)
    ]
    if bad:
        raise UnsupportedError(
            f"{some_of(bad, 3)}: objects of classes, which are not read without --allow-pickle. "
            "Pass that if you trust the files, or --model-only."
        )


def _holds_object(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_holds_object, value))
    return isinstance(value, Described)


# -- torch.save --------------------------------------------------------------------------------------------------------


def _write_torch(source: StoredCheckpoint, path: Path, _options: WriteOptions, update: Update) -> None:
    _check_values(source.values)
    write_archive(nested({**source.values, **source.tensors}), path, update)


# -- safetensors -------------------------------------------------------------------------------------------------------


def _write_safetensors(source: StoredCheckpoint, path: Path, options: WriteOptions, update: Update) -> None:
    if source.values:
        bad = some_of(list(map(dotted_name, source.values)), 3)
        raise UnsupportedError(f"{bad}: no tensors, which safetensors files cannot hold. Use --to full.")
    first: dict[Any, str] = {}
    tensors: dict[str, TensorInFiles] = {}
    aliases = {}
    for tensor in source.tensors.values():
        same = first.setdefault(tensor.identity, tensor.name)
        if same != tensor.name:
            aliases[tensor.name] = same
        else:
            tensors[tensor.name] = tensor
    if options.dtype is not None:
        if coded := sorted(set(owners_of_constants(tensors).values())):
            raise OptionError(
                f"--dtype would change the codes of quantized parameters, {some_of(coded, 3)}. Write them as they are "
                "stored, without it."
            )
        floats = {name: tensor for name, tensor in tensors.items() if tensor.dtype.is_floating_point}
        tensors |= {name: replace(tensor, dtype=options.dtype) for name, tensor in floats.items()}  # cast when read
    files = divided({name: tensor.nbytes for name, tensor in tensors.items()}, options.max_file_bytes)
    if path.name.endswith(".safetensors.partial"):
        if len(files) > 1:
            raise OptionError(f"The model is larger than one file of {options.max_file_bytes:,} bytes; name a folder.")
        if options.config is not None:
            raise OptionError("config.json is written into a folder, and one file was named; name a folder.")
        _write_safetensors_file(path, tensors, aliases, update)
        return
    path.mkdir()
    for file, names in files.items():
        group = {name: tensors[name] for name in names}
        same_there = {alias: same for alias, same in aliases.items() if same in group}
        _write_safetensors_file(path / file, group, same_there, update)
    if len(files) > 1:
        index = index_of(files, sum(tensor.nbytes for tensor in tensors.values()))
        (path / INDEX_NAME).write_text(json.dumps(index, indent=2))
    config = config_of(source.path, options)
    if config is not None:
        _write_config(config, path / "config.json", options.dtype)


def _write_config(config: Path, to: Path, dtype: torch.dtype | None) -> None:
    """Copy config.json, with the dtype that was chosen."""
    try:
        settings = json.loads(config.read_text())
    except ValueError as error:
        raise OptionError(f"{config} is no JSON: {error}") from error
    if dtype is not None:
        # transformers 5 writes dtype, earlier versions torch_dtype; both read either.
        name = "dtype" if "dtype" in settings else "torch_dtype"
        settings[name] = str(dtype).removeprefix("torch.")
    to.write_text(json.dumps(settings, indent=2) + "\n")


def _write_safetensors_file(
    path: Path, tensors: Mapping[str, TensorInFiles], aliases: Mapping[str, str], update: Update
) -> None:
    templates = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    writer = FileWriter(path, templates, {"format": "pt", **aliases})
    try:
        for name, tensor in tensors.items():
            writer.write(name, tensor.full())
            update(tensor.nbytes)
        writer.commit()
    except BaseException:
        writer.discard()
        raise


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def _write_dcp(source: StoredCheckpoint, path: Path, options: WriteOptions, update: Update) -> None:
    _check_values(source.values)
    path.mkdir()
    each_rows: list[list[Any]] = []  # as of ``write_files``, by rank
    for rank in range(options.num_ranks):
        rows: list[Any] = []
        written: dict[Any, list[Any]] = {}  # by what tensors share, the bytes and the place of this rank's part
        with open(path / f"__{rank}_0.distcp", "wb") as file:
            for tensor in source.tensors.values():
                held = chunk_rows(tensor.num_rows, options.num_ranks, rank)  # as ``fully_shard`` divides a tensor
                offsets = (held.start, *(0 for _ in tensor.shape[1:])) if tensor.shape else ()
                sizes = (held.numel, *tensor.shape[1:]) if tensor.shape else ()
                if held.numel or (rank == 0 and not tensor.numel):
                    if tensor.identity not in written:
                        part = tensor.rows(held.start, held.stop).reshape(sizes)
                        written[tensor.identity] = [part.nbytes, *_append(on_host(part), file)]
                        update(part.nbytes)
                        del part
                    kind = ["SHARD", offsets, sizes, str(tensor.dtype), tensor.shape]
                    rows.append([_plain_keys(tensor.keys), kind, *written[tensor.identity]])
            for keys, value in source.values.items() if rank == 0 else ():
                place = _append(value, file)
                rows.append([_plain_keys(keys), [], place[-1], *place])
        each_rows.append(rows)
    write_metadata(each_rows, path)


def _plain_keys(keys: Keys) -> list[Any]:
    """Return nested keys as torch's planner records them: positions in lists are integers, all others texts."""
    return [int(key) if isinstance(key, Position) else str(key) for key in keys]


def _append(value: Any, file: Any) -> tuple[str, int, int]:
    """Append a value to a file of a rank; return the file's name, and the begin and the number of the bytes."""
    start = file.tell()
    torch.save(value, file)
    return Path(file.name).name, start, file.tell() - start


# -- this library's ----------------------------------------------------------------------------------------------------


def _write_sharded(source: StoredCheckpoint, path: Path, options: WriteOptions, update: Update) -> None:
    model_keys = source.model_keys(options.key)
    model = source.below(model_keys)
    tensors = {("model", *keys): tensor for keys, tensor in model.tensors.items()}
    plain: dict[str, Any] = {"model": nested(model.values)}
    others = [] if options.model_only or not model_keys else [*source.tensors, *source.values]
    optim_keys = source.optim_keys(model_keys) if others else None
    if optim_keys is not None:
        optim = source.below(optim_keys)
        tensors |= {("optim", *keys): tensor for keys, tensor in _optim_tensors(optim, model).items()}
        left = {keys: tensor.full() for keys, tensor in optim.tensors.items() if ("optim", *keys) not in tensors}
        plain["optim"] = {"state": {}, **nested({**optim.values, **left})}
    taken = [keys for keys in (model_keys, optim_keys) if keys]
    left_over = [keys for keys in others if not any(keys[: len(each)] == each for each in taken)]
    rest = nested(
        {keys: source.tensors[keys].full() if keys in source.tensors else source.values[keys] for keys in left_over}
    )
    extras = {"0": rest or None}
    if source.kind == "fsdp_flat" and others:
        # By rank; another number of ranks gets that of rank 0, as from load_checkpoint.
        extras = rest["extra"] if len(rest["extra"]) == options.num_ranks else {"0": rest["extra"]["0"]}
    values: dict[Keys, Any] = {("plain",): plain, **{("extra", rank): extra for rank, extra in extras.items()}}
    _check_values({keys: entry for keys, value in values.items() for _, entry in flattened(value, keys)})
    step = 0 if source.step is None else source.step
    path.mkdir()
    writing = writing_path(path, step)
    named = {keys: replace(tensor, keys=keys) for keys, tensor in tensors.items()}
    _write_dcp(replace(source, tensors=named, values=values), writing, options, update)
    commit(path, step, records_of(writing, "*"))


def _optim_tensors(optim: StoredCheckpoint, model: StoredCheckpoint) -> dict[Keys, TensorInFiles]:
    """Return the states that ranks share as they share the parameters: those with dims, and those of scalars."""
    shapes = {tensor.name: tensor.shape for tensor in model.tensors.values()}
    states = {keys: tensor for keys, tensor in optim.tensors.items() if keys[0] == "state" and len(keys) > 2}
    unknown = [str(keys[1]) for keys in states if str(keys[1]) not in shapes]
    if unknown:
        raise UnsupportedError(
            f"The optimizer's states are of {some_of(list(dict.fromkeys(unknown)), 3)}, which are no names of the "
            "model's parameters. Save them by FSDP.optim_state_dict or get_optimizer_state_dict, or pass --model-only."
        )
    return {keys: tensor for keys, tensor in states.items() if tensor.shape or shapes[str(keys[1])] == ()}


KINDS: Mapping[str, Callable[[StoredCheckpoint, Path, WriteOptions, Update], None]] = {
    "full": _write_torch,
    "torch": _write_torch,
    "safetensors": _write_safetensors,
    "dcp": _write_dcp,
    "sharded": _write_sharded,
}
"""By name, the kinds of files that can be written; docs/command.md describes them."""


_NO_CONFIG = (
    "There is no config.json beside these files, so from_pretrained will not know the model: "
    "convert --to safetensors writes one into a folder, with --config FILE."
)


def convert_checkpoint(
    source: Path, target: Path, kind: str | None, options: WriteOptions, *, allow_pickle: bool, as_json: bool
) -> int:
    """Write a checkpoint as one of another kind (None: of the same, or torch's), and show what was written."""
    checkpoint = open_checkpoint(source, allow_pickle=allow_pickle)
    kind = kind or ("sharded" if checkpoint.kind == "fsdp_flat" else "dcp")
    bar = progress_bar(f"Writing {target.name}", asked=sys.stderr.isatty() and not as_json, here=True)
    with bar(checkpoint.nbytes) as update:
        write_checkpoint(checkpoint, target, kind, options, update)
    made = open_checkpoint(target, allow_pickle=allow_pickle)
    text = f"{target}: {made.kind}, {counted(len(made.tensors), 'tensors')}, {size_text(made.nbytes)} in "
    text += counted(len(made.files), "files")
    config = kind == "safetensors" and target.is_dir() and (target / "config.json").exists()
    unknown = "" if kind != "safetensors" or config else _NO_CONFIG
    show({**made.summary(), "has_config": bool(config)}, text, *([unknown] if unknown else []), as_json=as_json)
    return 0
