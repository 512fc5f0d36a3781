"""Streams full models to and from safetensors files, so that never more than one parameter is unsharded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.api import StateDictType
from fsdp_flat.checkpoint.adapter_files import ADAPTER_CONFIG_NAME, ADAPTER_NAME, Adapters, adapters_of
from fsdp_flat.checkpoint.consensus import LOADING, SAVING, Consensus
from fsdp_flat.checkpoint.format import COMMIT_NAME, Records, check_file, check_sums, orders_in, path_of_user
from fsdp_flat.checkpoint.progress import ProgressBar, progress_bar
from fsdp_flat.checkpoint.safetensors_files import (
    INDEX_NAME,
    SINGLE_NAME,
    FileWriter,
    PartialFile,
    divided,
    files_in_index,
    index_of,
    read_safetensors,
)
from fsdp_flat.comm import ALONE, P2PChannels, RankGroup, digest_of
from fsdp_flat.core import (
    ExtendedGroup,
    ParamGroup,
    copy_of,
    local_of,
    no_units,
    plain_tensors_in,
    unit_of,
    units_of,
)
from fsdp_flat.core.quantized import constants_of
from fsdp_flat.errors import LoadError, OptionError, OptionTypeError, UnsupportedError, counted, some_of
from fsdp_flat.guards import ReplicatedTensors
from fsdp_flat.layout import added_prefix, advice_on, clean_fqn, misfits, owners_of_constants
from fsdp_flat.state import (
    TEMPLATE,
    BoxedTensor,
    IndexedParam,
    ParamIndex,
    StateShard,
    boxed_state_dict,
    distributed_param,
    full_tensor,
    settings_for,
    state_dict_settings,
)
from fsdp_flat.state.plain_states import full_precision, is_wrapper, values_of

CHECKSUMS_NAME = "model.checksums.json"
ADAPTER_CHECKSUMS_NAME = "adapter_model.checksums.json"
CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True)
class _Entry:
    """Describes one entry of a model's state dict.

    Attributes:
        name: its name without ``torch.compile``'s prefix, which ``key``, that in the state dict, may have.
        value: a tensor that every rank has (a buffer, an ignored parameter, a tensor that a hook computes), or the
            DTensor of a parameter that ``fully_shard`` has sharded; None for any other managed parameter. It, or its
            local tensor, may be made of others that :func:`full_precision` turns into a plain one.
        template: a tensor on the meta device, of the full shape and the dtype to store.
        same_as: an earlier name of the same tied parameter.
    """

    name: str
    key: str
    value: torch.Tensor | None
    template: torch.Tensor
    param: IndexedParam | None
    same_as: str | None


def _entries_of(
    model: nn.Module,
    keep: Callable[[str], bool] | None,
    *,
    dtype: torch.dtype | None = None,
    trainable_only: bool = False,
    loads: bool = False,
) -> list[_Entry]:
    """List the entries of a model's state dict in its order, without communication; see :func:`save_full`.

    Those of a model that ``loads`` have names, shapes and dtypes alone.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionTypeError(f"dtype must be a floating-point torch.dtype or None; got {dtype!r}.")
    if dtype is not None and not dtype.is_floating_point:
        raise OptionError(f"dtype must be a floating-point torch.dtype or None; got {dtype!r}.")
    if keep is not None and not callable(keep):
        raise OptionTypeError(f"keep must be a function of a name, or None; got {keep!r}.")
    for unit in units_of(model):
        unit.check_idle("a full save or load")
    index = ParamIndex(model)
    by_name = index.dtensors_by_name
    params = model.named_parameters() if trainable_only else ()
    trainable = {clean_fqn(name) for name, param in params if param.requires_grad}
    handles = {param.param_group for param in (*index.params, *by_name.values())} if trainable_only else ()
    flags = {handle: handle.shown.requires_grad() for handle in handles}
    state = _template_of(model) if loads else boxed_state_dict(model)
    owners = owners_of_constants([clean_fqn(key) for key in state]) if dtype is not None else {}
    quantized = {*owners, *owners.values()}
    found: list[_Entry] = []
    plain_kinds: dict[type, bool] = {}
    first: dict[tuple[ParamGroup, int], str] = {}
    for key, value in state.items():
        name = clean_fqn(key)
        # Hooks and modules put there in the place of a parameter may have renamed, or replaced, what has a known name.
        param = value.param if isinstance(value, BoxedTensor) else None
        param = by_name.get(name) if isinstance(value, DTensor) else param
        if trainable_only and not (name in trainable if param is None else flags[param.param_group][param.index]):
            continue
        if keep is not None and not keep(name):
            continue
        if is_wrapper(value) and not loads:
            # Tried on the first of a class: the values of all at once would need much memory.
            kind = type(local_of(value))
            plain_kinds[kind] = plain_kinds[kind] if kind in plain_kinds else full_precision(value) is not None
        if not isinstance(value, torch.Tensor) or not plain_kinds.get(type(local_of(value)), True):
            raise UnsupportedError(
                f"{name!r} of the state dict is a {type(local_of(value)).__name__}; only plain tensors can be streamed,"
                " and tensors that to(dtype) or dequantize() turns into such. Leave it out with keep=..., or "
                "trainable_only=True, and save it beside the tensors."
            )
        stored = value.dtype if param is None else param.param_group.orig_dtype
        if dtype is not None and stored.is_floating_point and name not in quantized:
            stored = dtype
        shape = value.shape if param is None else torch.Size(param.full_shape)
        earlier = name if param is None else first.setdefault((param.param_group, param.index), name)
        same_as = None if earlier == name else earlier
        plain = value.detach() if param is None or isinstance(value, DTensor) else None
        found.append(_Entry(name, key, plain, torch.empty(shape, dtype=stored, device="meta"), param, same_as))
    return found


def _template_of(model: nn.Module) -> dict[str, Any]:
    with state_dict_settings(model, TEMPLATE):
        return {name: values_of(value) for name, value in model.state_dict().items()}


def _shard_group(model: nn.Module, entries: list[_Entry]) -> RankGroup:
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


def _full_tensor_on(entry: _Entry, dst: int | None) -> torch.Tensor | None:
    """Return the full tensor of an entry on rank ``dst`` of its shard group (None: on every rank), else None.

    Every rank of the shard group, and of the groups of tensor parallelism, must call this.
    """
    param, value = entry.param, entry.value
    rank_group = ALONE if param is None else param.rank_group
    # An unsharded tensor is complete on every rank already.
    dst = dst if rank_group.size > 1 else None
    is_here = dst in (None, rank_group.rank)
    if value is not None:
        if is_wrapper(value):
            value = full_precision(value)
            assert value is not None
        full = full_tensor(value) if isinstance(value, DTensor) else value.clone()
        return full if is_here else None
    assert param is not None
    shard = StateShard(param, param.local, param.shape)
    part = shard.local.new_empty(shard.shape) if is_here else None
    channels = P2PChannels()
    shard.send(dst, part, channels)
    channels.wait()
    return None if part is None else param.adapter.full_tensor(param.adapter.from_local(part))


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
    entries = _entries_of(model, keep, dtype=dtype, trainable_only=trainable_only)
    rank_group = _shard_group(model, entries)
    if dst is not None and not isinstance(dst, int):
        raise OptionTypeError(f"dst must be a rank of the shard group, or None; got {dst!r}.")
    if dst is not None and not 0 <= dst < rank_group.size and rank_group.size > 1:
        raise OptionError(f"dst must be a rank of the shard group, 0 to {rank_group.size - 1}, or None; got {dst!r}.")
    remaining = iter(entries)
    try:
        for entry in remaining:
            full = _full_tensor_on(entry, dst)
            yield entry.name, None if full is None else full.to(entry.template.dtype)
    finally:
        for entry in remaining:
            _full_tensor_on(entry, dst)


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
        entries = _entries_of(model, keep, dtype=dtype, trainable_only=trainable_only)
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


_Plan: TypeAlias = dict[FileWriter, dict[str, _Entry]]
"""The entries of each file, by their names in it."""


def _planned(entries: list[_Entry], directory: Path, max_file_bytes: int) -> _Plan:
    """Divide the tensors among files."""
    stored = {entry.name: entry for entry in entries if entry.same_as is None}
    sizes = {name: entry.template.nbytes for name, entry in stored.items()}
    plan: _Plan = {}
    for file, names in divided(sizes, max_file_bytes).items():
        aliases = {entry.name: entry.same_as for entry in entries if entry.same_as in names}
        group = {name: stored[name].template for name in names}
        plan[FileWriter(directory / file, group, {"format": "pt", **aliases})] = {name: stored[name] for name in names}
    return plan


def _by_adapter(entries: list[_Entry], directory: Path, adapters: Adapters) -> _Plan:
    """Put the tensors of each adapter into a file; peft reads a tied one under each of its names."""
    by_name = {entry.name: entry for entry in entries}
    groups: dict[str, dict[str, _Entry]] = {}
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
    error: Exception | None = None
    for writer, file, name in turns:
        template = file.tensors[name]
        full = _full_tensor_on(plan[file][name], writer)
        update(template.nbytes)
        # A rank that has failed still takes part in the remaining transfers.
        if writer == rank and full is not None and error is None:
            try:
                file.write(name, full.to(template.dtype))
            except Exception as raised:
                error = raised
    return error


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


def load_full(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    keep: Callable[[str], bool] | None = None,
    prefix: str = "",
    rename: Callable[[str], str | None] | None = None,
    progress: bool | None = None,
) -> tuple[list[str], list[str]]:
    """Load a full model from files; each rank reads only its own slices of each parameter.

    A parameter of several tensors, a quantized one, takes the values of full precision: each rank reads all of these,
    and quantizes them as without sharding. A file that lacks such a parameter leaves it as it is, as an adapter's does.

    If :func:`save_full` has written ``model.checksums.json`` beside the files, checksums are compared first, each rank
    those of some files.

    Every rank must call this, and must have access to the files. The model is unchanged unless everything fits; until
    then each rank holds a copy of its shards.

    Args:
        model: a wrapped model, or a module that holds wrappers.
        path: a ``.safetensors`` file (read by the package safetensors), a directory with ``model.safetensors`` or with
            an index as on model hubs, or a file of ``torch.save`` with a state dict (read by ``torch.load`` with
            ``mmap`` and ``weights_only``). A directory of an adapter of the peft package is loaded into that adapter of
            the model, with ``strict=False``.
        strict: missing and unexpected names in the files are an error, and integers where the model has floating-point
            numbers, or the other way.
        keep: returns whether to load the entry of a name of the model.
        prefix: load only names in the files that begin with it, without it: ``"model."`` loads the part of that name.
        rename: returns the model's name for a name in the files, after ``prefix``; None leaves the entry out.
        progress: show a progress bar of the comparison of checksums on rank 0, if tqdm is installed. By default on a
            terminal only, after two seconds.

    Returns:
        Missing names and unexpected names; both empty with ``strict``.

    Raises:
        LoadError: (a RuntimeError) files that cannot be read, names or shapes that do not fit; on every rank.
        UnsupportedError: a ``.safetensors`` file, and the package safetensors is not installed.
        OptionTypeError: an argument of the wrong type.
        PhaseError: called in the middle of a step.
    """
    together = Consensus.of(model, LOADING)
    with together.propagate_errors("load_full"):
        path = path_of_user(path, "path")
        paths = _files_of(path)
        _check_sums(paths, together, progress_bar("Verifying", asked=progress, here=together.rank == 0))
        tensors, names = _stored_in(paths)
        if prefix or rename is not None:
            names = _renamed(names, prefix, rename)
            tensors = {name: tensors[name] for name in sorted(set(names.values()))}
        entries = _entries_of(model, keep, loads=True)
        if rename is None and paths[0].name == ADAPTER_NAME and (adapters := adapters_of(model)) is not None:
            adapter = paths[0].parent.name if paths[0].parent.name in adapters.configs else adapters.first
            own = [entry.name for entry in entries if adapters.owner(entry.name) == adapter]
            fqns = {adapters.stored_name(name, adapter): name for name in own}
            names = {fqns.get(name, name): stored for name, stored in names.items()}
        # An adapter's file has no quantized base.
        entries = [entry for entry in entries if entry.name in names or not is_wrapper(entry.value)]
        # A tied parameter may be in the file under any of its names.
        found = {entry.same_as or entry.name: names[entry.name] for entry in entries if entry.name in names}
        missing = [entry.name for entry in entries if (entry.same_as or entry.name) not in found]
        known = {names[entry.name] for entry in entries if entry.name in names}
        unexpected = [name for name in tensors if name not in known]
        pairs = [(entry, tensors[found[entry.name]]) for entry in entries if entry.name in found]
        problems = _unlike(pairs, strict=strict) + (_misfits(missing, unexpected) if strict else [])
        if problems:
            raise LoadError(f"{path} does not fit the model: {'; '.join(problems)}. Nothing was loaded.")
    given = [(entry, found.get(entry.same_as or entry.name)) for entry in entries]
    error: Exception | None = None
    # Modules and hooks may raise after others have loaded, on one rank alone too.
    undo = _copied(model)
    try:
        state = {entry.key: _loadable(entry, tensors[name]) for entry, name in given if name is not None}
        not_taken = _load(model, state)
        if strict and not_taken:
            raise LoadError(f"No module has taken {some_of(not_taken, 5)} of {path}. Nothing was loaded.")
        unexpected += not_taken
    except Exception as raised:
        error = raised
    try:
        together.fail(error)
    except Exception:
        undo()
        raise
    return missing, unexpected


def _renamed(names: Mapping[str, str], prefix: str, rename: Callable[[str], str | None] | None) -> dict[str, str]:
    """Return the names of :func:`_stored_in` as :func:`load_full` maps them."""
    if not isinstance(prefix, str) or not (rename is None or callable(rename)):
        raise OptionTypeError(
            f"prefix must be a str, and rename a function of a name, or None; got {prefix!r} and {rename!r}."
        )
    found: dict[str, str] = {}
    for name, stored in names.items():
        new = name.removeprefix(prefix) if name.startswith(prefix) else None
        if rename is not None and new is not None:
            new = rename(new)
        if new is not None and found.setdefault(new, stored) != stored:
            raise OptionError(f"rename gives the name {new!r} to {found[new]!r} and to {stored!r} of the file.")
    return found


def _unlike(pairs: Sequence[tuple[_Entry, torch.Tensor]], *, strict: bool) -> list[str]:
    """Tell which tensors of files have another shape than the entries, or if ``strict`` another kind of numbers."""

    def kind(tensor: torch.Tensor) -> tuple[bool, bool]:
        return tensor.is_floating_point(), tensor.is_complex()

    told = []
    owners = owners_of_constants([entry.name for entry, _ in pairs])
    coded = set(owners.values())
    for entry, there in pairs:
        here = entry.template
        if entry.name in owners:
            continue  # the load compares how parameters are quantized
        if entry.name in coded and there.dtype != here.dtype:
            told.append(f"{entry.name!r} has codes in {there.dtype} in the file, in {here.dtype} in the model")
        elif there.shape != here.shape:
            told.append(f"{entry.name!r} has shape {tuple(there.shape)} in the file, {tuple(here.shape)} in the model")
        elif strict and kind(there) != kind(here):
            kinds = f"{there.dtype} in the file, of {here.dtype} in the model"
            told.append(f"{entry.name!r} is of {kinds} (strict=False converts)")
    return told


def _misfits(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """Tell how the names of a file differ from the model's, and what argument maps them if they have another prefix."""
    lacking, given = set(missing), set(unexpected)
    pairs: dict[str, str] = {}
    found = []
    if prefix := added_prefix(unexpected, lacking):
        pairs, advice = {name: prefix + name for name in missing if prefix + name in given}, f"prefix={prefix!r}"
    elif prefix := added_prefix(missing, given):
        pairs = {prefix + name: name for name in unexpected if prefix + name in lacking}
        advice = f"rename=lambda name: {prefix!r} + name"
    if pairs:
        found.append(f"load_full(..., {advice}) would find {counted(len(pairs), 'names')} missing now")
    mapped = set(pairs.values())
    return found + misfits([n for n in missing if n not in pairs], [n for n in unexpected if n not in mapped])


def _load(model: nn.Module, state: dict[str, Any]) -> list[str]:
    """Load full tensors, and return the names that no module has taken."""
    unit = unit_of(model)
    # A plain module may have a method of its own with other arguments.
    has_wrapper = unit is not None and unit.options.front.has_wrapper
    load = type(model).load_state_dict if has_wrapper else nn.Module.load_state_dict
    with state_dict_settings(model, settings_for(StateDictType.FULL_STATE_DICT, None, None)):
        return [clean_fqn(name) for name in load(model, state, strict=False).unexpected_keys]


def _copied(model: nn.Module) -> Callable[[], None]:
    """Copy this rank's tensors of a model, and return a function that restores their values."""
    handles = [handle for unit in units_of(model) for handle in unit.param_groups]
    for unit in units_of(model):
        unit.reshard()
        unit.before_gather()
    managed = {param for handle in handles for param in handle.shown.visible_params}
    others = [each for each in chain(model.parameters(), model.buffers()) if each not in managed]
    quantized = [*(entry.param for handle in handles for entry in handle.params), *others]
    others += [each for param in quantized for each in constants_of(param).values()]
    # Tensors of other classes have no part in a flat parameter.
    extended = [entry.param for handle in handles if isinstance(handle, ExtendedGroup) for entry in handle.params]
    others += [inner for param in extended for inner in plain_tensors_in(local_of(param))]
    tensors = [each.detach() for each in (*(handle.flat_param for handle in handles), *others) if not each.is_meta]
    copies = list(map(copy_of, tensors))

    def restore() -> None:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for handle in handles:
            handle.raise_weights_epoch()

    return restore


def _loadable(entry: _Entry, full: torch.Tensor) -> torch.Tensor:
    """Return the value of an entry for ``load_state_dict``: a DTensor of this rank's part, or the full tensor."""
    if entry.param is None or not isinstance(entry.value, DTensor):
        return full
    return distributed_param(entry.param, full, repr(entry.name))


def _files_of(path: Path) -> list[Path]:
    """Return the files of a path of :func:`load_full`, the index first if there is one."""
    if not path.is_dir():
        check_file(path)
        return [path]
    index = path / INDEX_NAME
    if not os.path.lexists(index):
        if not os.path.lexists(path / SINGLE_NAME):
            if os.path.lexists(path / ADAPTER_NAME):
                return [path / ADAPTER_NAME]
            raise LoadError(f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}{_held_instead(path)}.")
        return [path / SINGLE_NAME]
    return [index, *files_in_index(index)]


def _held_instead(path: Path) -> str:
    """Return what a directory holds instead of a full model, and what loads that; empty if it is nothing known."""
    if (path / COMMIT_NAME).exists() or orders_in(path):
        return (
            ", but a checkpoint of save_checkpoint. Load it by fsdp_flat.load_checkpoint(directory, model, optimizer), "
            "or write a full model from it: fsdp-flat convert CHECKPOINT TARGET --to safetensors"
        )
    if (path / ".metadata").exists():
        return (
            ", but a checkpoint of torch.distributed.checkpoint. Load it by torch.distributed.checkpoint.load, or "
            "write a full model from it: fsdp-flat convert CHECKPOINT TARGET --to safetensors"
        )
    return ""


def _check_sums(paths: Sequence[Path], together: Consensus, show: ProgressBar) -> None:
    """Compare this rank's share of the files with the checksums beside them, if these are there."""
    directory = paths[0].parent
    sums = directory / (ADAPTER_CHECKSUMS_NAME if paths[0].name == ADAPTER_NAME else CHECKSUMS_NAME)
    if not os.path.lexists(sums):
        return
    check_file(sums)
    try:
        found = json.loads(sums.read_text())
        records = {
            path.name: {key: found[path.name][key] for key in ("size", "crc32")} for path in paths if path.name in found
        }
        check_sums(directory, dict(list(records.items())[together.rank :: together.size]), show)
    except LoadError as error:
        raise LoadError(f"{error} If the file was replaced on purpose, remove {sums}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{sums} cannot be read: {error!r}. Without it, files are loaded as they are.") from error


def _stored_in(paths: Sequence[Path]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of files, which are read when they are used; and by each of their names the one in this."""
    if len(paths) == 1 and paths[0].suffix != ".safetensors":
        return _from_torch_file(paths[0])
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for path in paths:
        if path.name == INDEX_NAME:
            continue
        found, metadata = read_safetensors(path)
        if twice := sorted(tensors.keys() & found):
            raise LoadError(
                f"{path} has {some_of(list(map(repr, twice)), 3)}, which another file of the model has too."
            )
        tensors |= found
        aliases |= {name: same for name, same in metadata.items() if name != "format"}
    own = {name: name for name in tensors}
    return tensors, {**{name: same for name, same in aliases.items() if same in tensors}, **own}


def _from_torch_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise LoadError(
            f"{path} cannot be read by torch.load(weights_only=True): {error}. Expected a state dict of plain tensors, "
            "or a .safetensors file."
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        advice = advice_on(state, ()) if isinstance(state, Mapping) else ""
        raise LoadError(f"{path} holds no state dict of tensors; save model.state_dict() by itself. {advice}".rstrip())
    return dict(state), {name: name for name in state}
