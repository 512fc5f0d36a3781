"""Streams full models into safetensors files, so that never more than one parameter is unsharded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.checkpoint.adapter_files import ADAPTER_CONFIG_NAME, ADAPTER_NAME, Adapters, adapters_of
from fsdp_flat.checkpoint.consensus import SAVING, Consensus
from fsdp_flat.checkpoint.format import Records, path_of_user
from fsdp_flat.checkpoint.full_entries import ADAPTER_CHECKSUMS_NAME, CHECKSUMS_NAME, Entry, entries_of, no_values
from fsdp_flat.checkpoint.progress import progress_bar
from fsdp_flat.checkpoint.safetensors_files import INDEX_NAME, SINGLE_NAME, FileWriter, PartialFile, divided, index_of
from fsdp_flat.comm import ALONE, P2PChannels, RankGroup, digest_of
from fsdp_flat.core import local_of, no_units, unit_of, units_of
from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError
from fsdp_flat.guards import ReplicatedTensors
from fsdp_flat.state import StateShard, full_tensor
from fsdp_flat.state.plain_states import filled_like, full_precision, is_wrapper

CONFIG_NAME = "config.json"


def _shard_group(model: nn.Module, entries: list[Entry]) -> RankGroup:
    """Return the one shard group of the entries; without a managed one that of a unit, of which one rank writes."""
    groups = {entry.param.rank_group for entry in entries if entry.param is not None}
    sharded = [rank_group for rank_group in groups if rank_group.size > 1]
    if len(sharded) > 1:
        raise UnsupportedError(
            "The units of this model are sharded over different process groups, so no rank could receive all of it. "
            "Stream the parts one by one, or use SHARDED_STATE_DICT."
        )
    if groups:
        return sharded[0] if sharded else ALONE
    units = units_of(model)
    if not units:
        raise no_units(model)
    return max((unit.options.groups.shard for unit in units), key=lambda group: group.size)


def _is_replica(model: nn.Module) -> bool:
    """Return whether this rank is a replica of a rank that writes."""
    groups = [unit.options.groups for unit in units_of(model)]
    sharded = [each for each in groups if each.shard.size > 1]
    adapters = [entry.adapter for unit in units_of(model) for handle in unit.param_groups for entry in handle.params]
    return (sharded or groups)[0].replicate.rank != 0 or not all(adapter.is_first_of_mesh for adapter in adapters)


def _full_tensor_on(entry: Entry, dst: int | None, failures: list[Exception]) -> torch.Tensor | None:
    """Return the full tensor of an entry on rank ``dst`` of its shard group (None: on every rank), else None.

    Every rank of the shard group, and of the groups of tensor parallelism, must call this. A rank that cannot make the
    values of its part adds the error to ``failures``, and takes part nevertheless, so that no other waits in vain.
    """
    param, value = entry.param, entry.value
    rank_group = ALONE if param is None else param.rank_group
    # An unsharded tensor is complete on every rank already.
    dst = dst if rank_group.size > 1 else None
    is_here = dst in (None, rank_group.rank)
    if value is not None:
        if is_wrapper(value):
            value = _values_of(entry.name, value, failures)
        full = full_tensor(value) if isinstance(value, DTensor) else value.clone()
        return full if is_here else None
    assert param is not None
    shard = StateShard(param, param.local, param.shape)
    part = shard.local.new_empty(shard.shape) if is_here else None
    channels = P2PChannels()
    shard.send(dst, part, channels)
    channels.wait()
    return None if part is None else param.adapter.full_tensor(param.adapter.from_local(part))


def _values_of(name: str, value: torch.Tensor, failures: list[Exception]) -> torch.Tensor:
    """Return the plain values of a tensor made of others, or, after an error, what nobody takes for values."""
    try:
        if (made := full_precision(value)) is not None:
            return made
        failures.append(no_values(name, value))
    except torch.OutOfMemoryError as error:
        kind = type(local_of(value)).__name__
        failures.append(torch.OutOfMemoryError(f"No memory for the values of {name!r}, a {kind}: {error}"))
    return filled_like(value, math.nan if value.is_floating_point() else 0)


def iter_full_state_dict(
    model: nn.Module,
    *,
    dst: int | None = 0,
    dtype: torch.dtype | None = None,
    keep: Callable[[str], bool] | None = None,
    trainable_only: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Iterate over the full state dict as ``(name, full tensor)``, with one parameter in memory at a time.

    Every rank must iterate, with the same arguments. If a rank leaves the loop early, closing the iterator runs the
    remaining transfers (and drops their tensors), so that the other ranks do not hang.

    Args:
        model: a wrapped model, or a module that holds wrappers.
        dst: rank of the shard group that receives the tensors; the others get None instead. None: every rank.
        dtype: floating-point tensors are converted to it.
        keep: returns whether to yield the entry of a name; the same on every rank.
        trainable_only: yield only parameters with ``requires_grad``.

    Yields:
        Names in the order of ``state_dict()``; a new plain tensor on the parameters' device, with the values of a
        quantized one, or None for a managed parameter on ranks other than ``dst``. A tied parameter is yielded once for
        each of its names.

    Raises:
        OptionError: ``dst`` is not a rank of the shard group, ``dtype`` is not a floating-point one, or ``model`` holds
            no wrapper.
        OptionTypeError: an argument of the wrong type.
        UnsupportedError: units sharded over different groups, or an entry that is no tensor and has no plain values.
        PhaseError: called in the middle of a step.
    """
    entries = entries_of(model, keep, dtype=dtype, trainable_only=trainable_only)
    rank_group = _shard_group(model, entries)
    if dst is not None and not isinstance(dst, int):
        raise OptionTypeError(f"dst must be a rank of the shard group, or None; got {dst!r}.")
    if dst is not None and not 0 <= dst < rank_group.size and rank_group.size > 1:
        raise OptionError(f"dst must be a rank of the shard group, 0 to {rank_group.size - 1}, or None; got {dst!r}.")
    remaining = iter(entries)
    try:
        for entry in remaining:
            failures: list[Exception] = []
            full = _full_tensor_on(entry, dst, failures)
            if failures:
                raise failures[0]
            yield entry.name, None if full is None else full.to(entry.template.dtype)
    finally:
        for entry in remaining:
            _full_tensor_on(entry, dst, [])


def save_full(
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    keep: Callable[[str], bool] | None = None,
    trainable_only: bool = False,
    max_file_bytes: int = 5_000_000_000,
    spread: bool = False,
    progress: bool | None = None,
) -> Path:
    """Write the full model as safetensors files in the layout of model hubs, one parameter in memory at a time.

    The files are ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with
    ``model.safetensors.index.json``; their checksums in ``model.checksums.json``; and ``config.json`` if the model has
    a ``config`` with ``to_json_string()``, as those of transformers, whose ``from_pretrained`` reads the directory. A
    tied parameter is written under its first name; its other names are in the header's metadata, as in the safetensors
    package. Of a quantized parameter, a tensor made of others that ``to(dtype)`` or ``dequantize()`` turns into a plain
    one, the values are written in its dtype. Files of an earlier save in the directory are replaced once all new ones
    are complete. Every rank must call this.

    A model of the peft package, with ``trainable_only``, is written as ``PeftModel.from_pretrained`` reads it:
    ``adapter_model.safetensors`` with peft's names and ``adapter_config.json``, for each adapter that is trained; those
    of further adapters in folders of their names. :func:`load_full` reads them too. A full model in the same directory
    stays. Soft prompts are written as any other model.

    Args:
        model: a wrapped model, or a module that holds wrappers.
        directory: created if needed; the same for every rank that writes.
        dtype: floating-point tensors are converted to it.
        keep: returns whether to save the entry of a name; the same on every rank.
        trainable_only: save only parameters with ``requires_grad``, as of an adapter.
        max_file_bytes: maximum size of a file's tensors in bytes, exceeded only by a single larger tensor.
        spread: the ranks of the shard group, which share a file system, write files in parallel; else rank 0 alone.
        progress: show a progress bar on rank 0, if tqdm is installed. By default on a terminal only, after two seconds.

    Returns:
        The directory.

    Raises:
        OptionError: nothing to write, ``max_file_bytes`` is not positive, ``dtype`` is not a floating-point one, or
            with ``spread`` the directory is not shared by all ranks.
        OptionTypeError: an argument of the wrong type.
        UnsupportedError: units sharded over different groups, an entry that is no tensor and has no plain values, or a
            dtype that safetensors does not have.
        PeerFailureError: another rank failed, because its disk is full for instance.
    """
    together, error = Consensus.of(model, SAVING), None
    replicated: ReplicatedTensors | None = None
    try:
        replicated = ReplicatedTensors(model)
        if not isinstance(max_file_bytes, (int, float)):
            raise OptionTypeError(f"max_file_bytes must be a number; got {max_file_bytes!r}.")
        if max_file_bytes <= 0:
            raise OptionError(f"max_file_bytes must be positive; got {max_file_bytes!r}.")
        entries = entries_of(model, keep, dtype=dtype, trainable_only=trainable_only)
        if not entries:
            raise OptionError("Nothing to save: no entry of the state dict is wanted (keep, trainable_only).")
        rank_group = _shard_group(model, entries)
        # Replicas and ranks that do not write only take part in the transfers.
        rank = None if _is_replica(model) else rank_group.rank
        num_writers = rank_group.size if spread else 1
        path = path_of_user(directory, "directory")
        adapters = adapters_of(model) if trainable_only else None
        plan = _planned(entries, path, max_file_bytes) if adapters is None else _by_adapter(entries, path, adapters)
        files = list(plan)
        own = [file for index, file in enumerate(files) if index % num_writers == rank]
        bar = progress_bar("Saving the model", asked=progress, here=rank == 0)
    except Exception as raised:
        error = raised
    digest = 0 if replicated is None else digest_of(json.dumps(replicated.prints, sort_keys=True).encode())
    each_digest = together.meet("save_full", [digest], error)
    assert replicated is not None
    replicated.compare([together.rank_group], together.device, are_equal=each_digest == [[digest]] * together.size)
    with bar(sum(file.nbytes for file in files)) as update:
        turns = _in_turn(files, num_writers)
        error = _write_in_turn(turns, plan, rank=rank, update=update)
    texts: dict[str, PartialFile] = {}
    try:
        together.fail(error)
        records = together.texts(json.dumps({_name_in(path, file.path): file.record for file in own}))
        with together.propagate_errors():
            if rank == 0:
                for file in files:
                    file.check_here()
                bodies = _texts_of(model, files) if adapters is None else _texts_of_adapters(adapters, path, files)
                checksums = CHECKSUMS_NAME if adapters is None else ADAPTER_CHECKSUMS_NAME
                texts |= {name: PartialFile(path / name) for name in (*bodies, checksums)}
                _write_texts(texts, bodies, checksums, list(map(json.loads, records)))
                # Until all files are renamed, a reader finds no index rather than a mixture of two saves.
                for name in (INDEX_NAME, CHECKSUMS_NAME) if adapters is None else (ADAPTER_CHECKSUMS_NAME,):
                    (path / name).unlink(missing_ok=True)
    except Exception:
        for each in (*own, *texts.values()):
            each.discard()
        raise
    with together.propagate_errors():
        for file in own:
            file.commit()
    with together.propagate_errors():
        if rank == 0:
            if adapters is None:
                _remove_earlier(path, files)
            for text in texts.values():
                text.commit()
    replicated.warn()
    return path


_Plan: TypeAlias = dict[FileWriter, dict[str, Entry]]
"""The entries of each file, by their names in it."""


def _planned(entries: list[Entry], directory: Path, max_file_bytes: int) -> _Plan:
    """Divide the tensors among files."""
    stored = {entry.name: entry for entry in entries if entry.same_as is None}
    sizes = {name: entry.template.nbytes for name, entry in stored.items()}
    plan: _Plan = {}
    for file, names in divided(sizes, max_file_bytes).items():
        aliases = {entry.name: entry.same_as for entry in entries if entry.same_as in names}
        group = {name: stored[name].template for name in names}
        plan[FileWriter(directory / file, group, {"format": "pt", **aliases})] = {name: stored[name] for name in names}
    return plan


def _by_adapter(entries: list[Entry], directory: Path, adapters: Adapters) -> _Plan:
    """Put the tensors of each adapter into a file; peft reads a tied one under each of its names."""
    by_name = {entry.name: entry for entry in entries}
    groups: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        owner = adapters.owner(entry.name)
        stored = entry if entry.same_as is None else by_name[entry.same_as]
        groups.setdefault(owner, {})[adapters.stored_name(entry.name, owner)] = stored
    plan: _Plan = {}
    for owner, group in groups.items():
        path = directory / adapters.folder(owner) / ADAPTER_NAME
        templates = {name: entry.template for name, entry in group.items()}
        plan[FileWriter(path, templates, {"format": "pt"})] = group
    return plan


def _in_turn(files: list[FileWriter], num_writers: int) -> Iterator[tuple[int, FileWriter, str]]:
    """Yield writer, file and name of each tensor: one of each file in turn, so that the writers work in parallel."""
    for start in range(0, len(files), num_writers):
        batch = files[start : start + num_writers]
        for names in zip_longest(*(file.tensors for file in batch)):
            for writer, (file, name) in enumerate(zip(batch, names, strict=True)):
                if name is not None:
                    yield writer, file, name


def _write_in_turn(
    turns: Iterable[tuple[int, FileWriter, str]],
    plan: _Plan,
    *,
    rank: int | None,
    update: Callable[[int], object],
) -> Exception | None:
    """Gather each tensor on its writer, which appends it to its file; return the error of this rank's first failure.

    Every rank of the shard group must call this.
    """
    failures: list[Exception] = []
    for writer, file, name in turns:
        template = file.tensors[name]
        full = _full_tensor_on(plan[file][name], writer, failures)
        update(template.nbytes)
        # A rank that has failed still takes part in the remaining transfers.
        if writer == rank and full is not None and not failures:
            try:
                file.write(name, full.to(template.dtype))
            except Exception as raised:
                failures.append(raised)
    return failures[0] if failures else None


def _texts_of(model: nn.Module, files: Sequence[FileWriter]) -> dict[str, Any]:
    """Return what goes beside the files of tensors, by name: the model's configuration, and the index."""
    bodies: dict[str, Any] = {}
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    if (config := _config_of(model, tensors.values())) is not None:
        bodies[CONFIG_NAME] = config
    if len(files) > 1:
        bodies[INDEX_NAME] = index_of(
            {file.path.name: file.tensors for file in files}, sum(file.nbytes for file in files)
        )
    return bodies


def _texts_of_adapters(adapters: Adapters, directory: Path, files: Sequence[FileWriter]) -> dict[str, Any]:
    """Return the configuration of each adapter that has a file."""
    written = {file.path.parent for file in files}
    folders = {adapter: directory / adapters.folder(adapter) for adapter in adapters.configs}
    return {
        _name_in(directory, folder / ADAPTER_CONFIG_NAME): adapters.config_of(adapter)
        for adapter, folder in folders.items()
        if folder in written
    }


def _name_in(directory: Path, path: Path) -> str:
    return path.relative_to(directory).as_posix()


def _write_texts(
    texts: Mapping[str, PartialFile], bodies: Mapping[str, Any], checksums: str, each_records: Sequence[Records]
) -> None:
    """Write what goes beside the files of tensors, and the checksums of all."""
    records = {name: record for each in each_records for name, record in each.items()}
    # The checksums are the last: they are not yet complete where they are written.
    for name, body in {**bodies, checksums: records}.items():
        texts[name].append((json.dumps(body, indent=2) + "\n").encode())
        texts[name].finish()
        records[name] = texts[name].record


def _config_of(model: nn.Module, tensors: Iterable[torch.Tensor]) -> dict[str, Any] | None:
    """Return the configuration of a model that has one as those of the transformers package, with the saved dtype."""
    unit = unit_of(model)
    module = model if unit is None else unit.module
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    try:
        config = json.loads(to_json()) if to_json is not None else None
    except Exception:
        return None  # a method of another kind that has the name
    if not isinstance(config, dict):
        return None
    # fully_shard puts this before the name of the module's class.
    config["architectures"] = [type(module).__name__.removeprefix("FSDP")]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()]
    # By transformers 5 and earlier versions.
    return config | {key: dtypes[0] for key in ("dtype", "torch_dtype") if key in config and dtypes}


def _remove_earlier(directory: Path, files: list[FileWriter]) -> None:
    """Remove the files of an earlier save that were not replaced."""
    written = {file.path.name for file in files}
    for path in (directory / SINGLE_NAME, *directory.glob("model-*-of-*.safetensors")):
        if path.name not in written:
            path.unlink(missing_ok=True)
