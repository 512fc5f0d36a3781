"""Streams full models into safetensors files, so that never more than one parameter is unsharded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.api import flag
from fsdp_flat.checkpoint.adapter_files import ADAPTER_CONFIG_NAME, ADAPTER_NAME, Adapters, adapters_of
from fsdp_flat.checkpoint.consensus import SAVING, Consensus
from fsdp_flat.checkpoint.files import folder_of_user
from fsdp_flat.checkpoint.format import Records
from fsdp_flat.checkpoint.full_entries import ADAPTER_CHECKSUMS_NAME, CHECKSUMS_NAME, Entry, entries_of, no_values
from fsdp_flat.checkpoint.progress import progress_bar
from fsdp_flat.checkpoint.safetensors_files import INDEX_NAME, SINGLE_NAME, FileWriter, PartialFile, divided, index_of
from fsdp_flat.comm import (
    ALONE,
    P2PChannels,
    RankGroup,
    UntilRanksMeet,
    agree,
    digest_of,
    meet,
    reported_failure,
)
from fsdp_flat.core import local_of, no_units, unit_of, units_of
from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError
from fsdp_flat.guards import ReplicatedTensors
from fsdp_flat.sizes import nbytes_of
from fsdp_flat.state import StateShard, full_tensor, rank_groups_of
from fsdp_flat.state.plain_states import full_precision, is_wrapper

CONFIG_NAME = "config.json"
_SHARD_PATTERN = "model-*-of-*.safetensors"
# Ranks meet so often while one uploads, well within the timeouts of process groups.
_MEETING_S = 60.0
_LEAST_NBYTES, _MOST_NBYTES = 1 << 22, 1 << 26


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


class _Gathering:
    """Gathers one entry on rank ``dst`` of its shard group (None: on every rank), in steps that all its ranks make.

    Only making this object, with the values of this rank and the memory of the result, may fail on one rank alone.
    """

    def __init__(self, entry: Entry, dst: int | None) -> None:
        param, value = entry.param, entry.value
        rank_group = ALONE if param is None else param.rank_group
        # An unsharded tensor is complete on every rank already.
        self._dst = dst if rank_group.size > 1 else None
        self._is_here = self._dst in (None, rank_group.rank)
        self._shard: StateShard | None = None
        if value is None:
            assert param is not None
            self._shard = shard = StateShard(param, param.local, param.shape)
            self._value = shard.local.new_empty(shard.shape) if self._is_here else None
        else:
            value = _values_of(entry.name, value) if is_wrapper(value) else value
            self._value = value if isinstance(value, DTensor) else value.clone() if self._is_here else None

    def begin(self, channels: P2PChannels) -> None:
        """Begin the transfer of a part of a unit."""
        if self._shard is not None:
            self._shard.send(self._dst, self._value, channels)

    def end(self) -> torch.Tensor | None:
        """Return the full tensor, after the transfer; None on other ranks."""
        if isinstance(self._value, DTensor):
            full = full_tensor(self._value)
            return full if self._is_here else None
        if self._shard is None or self._value is None:
            return self._value
        adapter = self._shard.param.adapter
        return adapter.full_tensor(adapter.from_local(self._value))


def _values_of(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the plain values of a tensor made of others."""
    try:
        made = full_precision(value)
    except torch.OutOfMemoryError as error:
        kind = type(local_of(value)).__name__
        raise torch.OutOfMemoryError(f"No memory for the values of {name!r}, a {kind}: {error}") from error
    if made is None:
        raise no_values(name, value)
    return made


def _together(entries: Sequence[Entry]) -> Iterator[range]:
    """Yield the positions of successive entries that are gathered together: in no more memory than the largest takes.

    These are up to 64 MiB, since ranks meet before each transfer, and at least 4 MiB.
    """
    sizes = [entry.template.nbytes for entry in entries]
    most = max(_LEAST_NBYTES, min(_MOST_NBYTES, max(sizes, default=0)))
    start = nbytes = 0
    for at, size in enumerate(sizes):
        if at > start and nbytes + size > most:
            yield range(start, at)
            start, nbytes = at, 0
        nbytes += size
    yield range(start, len(sizes))


def _full_tensors(
    wanted: Sequence[tuple[Entry, int | None]],
    rank_groups: Sequence[RankGroup],
    fail: Callable[[Exception | None], None],
) -> Iterator[torch.Tensor | None]:
    """Yield each entry's full tensor, in the dtype to store, on the given rank of its shard group, None on the others.

    Every rank of ``rank_groups``, over which entries are sharded, must take all. Before each transfer, and after the
    last, ranks ``fail`` together if one has an error, so that nothing is yielded that is not whole.
    """
    until_met = UntilRanksMeet()
    for positions in _together([entry for entry, _ in wanted]):
        gatherings: list[_Gathering] = []
        with until_met:
            gatherings += [_Gathering(*wanted[at]) for at in positions]
        fail(until_met.error)
        with reported_failure(rank_groups):
            channels = P2PChannels()
            for each in gatherings:
                each.begin(channels)
            channels.wait()
        for at in positions:
            full: torch.Tensor | None = None
            # After an error too: another rank may need this one's part of what follows.
            with until_met:
                full = gatherings.pop(0).end()
                full = None if full is None else full.to(wanted[at][0].template.dtype)
            if until_met.error is None:
                yield full
    fail(until_met.error)


def _lines_of(entries: Iterable[Entry]) -> list[str]:
    """Describe the entries of which ranks have parts, in the order in which they are gathered."""
    return [
        f"the entry {entry.name!r}" for entry in entries if entry.param is not None or isinstance(entry.value, DTensor)
    ]


def iter_full_state_dict(
    model: nn.Module,
    *,
    dst: int | None = 0,
    dtype: torch.dtype | None = None,
    keep: Callable[[str], bool] | None = None,
    trainable_only: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Iterate over the full state dict as ``(name, full tensor)``, with one parameter in memory at a time.

    Small ones are gathered together, in no more memory than the largest takes (or 4 MiB, and at most 64 MiB). An
    error of a rank is raised on all, before they gather what it cannot give or take: what was yielded is whole.

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
    until_met, units = UntilRanksMeet(), units_of(model)
    rank_groups = rank_groups_of(units, of_replicas=False)
    entries, lines = list[Entry](), list[str]()
    with until_met:
        entries = entries_of(model, keep, dtype=dtype, trainable_only=trainable_only)
        size = _shard_group(model, entries).size
        if dst is not None and not isinstance(dst, int):
            raise OptionTypeError(f"dst must be a rank of the shard group, or None; got {dst!r}.")
        if dst is not None and not 0 <= dst < size and size > 1:
            raise OptionError(f"dst must be a rank of the shard group, 0 to {size - 1}, or None; got {dst!r}.")
        lines += [f"dst={dst!r}", *_lines_of(entries)]
    meet("iter_full_state_dict", rank_groups, until_met.error, SAVING, lines=lines)

    def fail(error: Exception | None) -> None:
        agree((), error, rank_groups, SAVING)

    fulls = _full_tensors([(entry, dst) for entry in entries], rank_groups, fail)
    try:
        for entry, full in zip(entries, fulls, strict=True):
            yield entry.name, full
    finally:
        for _ in fulls:
            pass


def save_full(
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    keep: Callable[[str], bool] | None = None,
    trainable_only: bool = False,
    max_file_bytes: float | str = 5_000_000_000,
    spread: bool = False,
    progress: bool | None = None,
    push_to_hub: str | None = None,
    hub_api: Any = None,
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
        directory: a path or a URL of fsspec, created if needed; the same for every rank that writes.
        dtype: floating-point tensors are converted to it.
        keep: returns whether to save the entry of a name; the same on every rank.
        trainable_only: save only parameters with ``requires_grad``, as of an adapter.
        max_file_bytes: maximum size of a file's tensors, bytes or a text like "5GB", exceeded only by a single larger
            tensor. Tensors are divided among files as the huggingface_hub package does it.
        spread: the ranks of the shard group, which share a file system, write files in parallel; else rank 0 alone.
        progress: show a progress bar on rank 0, if tqdm is installed. By default on a terminal only, after two seconds.
        push_to_hub: the id of a repository of a model hub ("user/name"), which is made if needed: one rank then uploads
            the files in one commit, which removes those of an earlier save there, and the others wait for it.
        hub_api: the ``huggingface_hub.HfApi`` that uploads; by default a new one, with the token of ``hf auth login``.

    Returns:
        The directory.

    Raises:
        OptionError: nothing to write, ``max_file_bytes`` is not positive, ``dtype`` is not a floating-point one, or
            with ``spread`` the directory is not shared by all ranks.
        OptionTypeError: an argument of the wrong type.
        UnsupportedError: units sharded over different groups, an entry that is no tensor and has no plain values, a
            dtype that safetensors does not have, or huggingface_hub is not installed.
        RankMismatchError: (an OptionError) ranks pass other arguments.
        PeerFailureError: another rank failed, because its disk is full for instance.
    """
    together, until_met = Consensus.of(model, SAVING), UntilRanksMeet()
    same, prints = [f"dtype={dtype!r}", f"max_file_bytes={max_file_bytes!r}", f"spread={bool(spread)}"], ""
    same.append(f"push_to_hub={push_to_hub!r}")
    with until_met:
        replicated = ReplicatedTensors(model)
        prints = json.dumps(replicated.fingerprints, sort_keys=True)
        flag(trainable_only, "trainable_only"), flag(spread, "spread")
        if push_to_hub is not None:
            hub_api = hub_api or _new_hub_api()
        if isinstance(max_file_bytes, str):
            max_file_bytes = nbytes_of(max_file_bytes, "max_file_bytes")
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
        path = folder_of_user(directory)
        adapters = adapters_of(model) if trainable_only else None
        plan = _planned(entries, path, max_file_bytes) if adapters is None else _by_adapter(entries, path, adapters)
        files = list(plan)
        own = [file for index, file in enumerate(files) if index % num_writers == rank]
        bar = progress_bar("Saving the model", asked=progress, here=rank == 0)
        turns = list(_in_turn(files, num_writers))
        same += _lines_of(plan[file][name] for _, file, name in turns)
    each_digest = together.meet("save_full", [digest_of(prints.encode())], until_met.error, same)
    are_equal = each_digest.count(each_digest[0]) == together.size
    replicated.compare([together.rank_group], are_equal=are_equal)
    texts: dict[str, PartialFile] = {}
    try:
        with bar(sum(file.nbytes for file in files)) as update:
            _write_in_turn(turns, plan, rank=rank, update=update, together=together)
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
    if push_to_hub is not None:
        names = [_name_in(path, each.path) for each in (*files, *texts.values())]
        earlier = [SINGLE_NAME, INDEX_NAME, _SHARD_PATTERN] if adapters is None else None
        upload = partial(_upload, hub_api, push_to_hub, path, allow_patterns=names, delete_patterns=earlier)
        _run_together(upload if rank == 0 else bool, together)
    return path


def _new_hub_api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UnsupportedError(
            "save_full(push_to_hub=...) uploads by huggingface_hub: pip install huggingface_hub."
        ) from error
    return HfApi()


def _upload(api: Any, repo_id: str, directory: Path, **patterns: list[str] | None) -> None:
    api.create_repo(repo_id, exist_ok=True)
    api.upload_folder(repo_id=repo_id, folder_path=directory, **patterns)


def _run_together(task: Callable[[], object], together: Consensus) -> None:
    """Run a task that takes long on some rank, and return when all ranks have ended theirs; raise on all if one does.

    Ranks meet every minute, so that no timeout of a process group ends the wait.
    """
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(task)
        while True:
            wait([job], _MEETING_S)
            is_done = job.done()
            error: Any = job.exception() if is_done else None
            if all(done for (done,) in together.integers([int(is_done)], error)):
                return


_Plan: TypeAlias = dict[FileWriter, dict[str, Entry]]
"""The entries of each file, by their names in it."""


def _planned(entries: list[Entry], directory: Path, max_file_bytes: float) -> _Plan:
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
    turns: Sequence[tuple[int, FileWriter, str]],
    plan: _Plan,
    *,
    rank: int | None,
    update: Callable[[int], object],
    together: Consensus,
) -> None:
    """Gather each tensor on its writer, which appends it to its file; an error of a rank is raised on all."""
    until_met = UntilRanksMeet()

    def fail(error: Exception | None) -> None:
        together.fail(error or until_met.error)

    fulls = _full_tensors([(plan[file][name], writer) for writer, file, name in turns], [together.rank_group], fail)
    for (writer, file, name), full in zip(turns, fulls, strict=True):
        update(file.tensors[name].nbytes)
        if writer == rank and full is not None and until_met.error is None:
            with until_met:
                file.write(name, full)


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
    for path in (directory / SINGLE_NAME, *directory.glob(_SHARD_PATTERN)):
        if path.name not in written:
            path.unlink(missing_ok=True)
