"""Loads full models from files, of which each rank reads its own slices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.api import StateDictType, flag
from fsdp_flat.checkpoint.adapter_files import ADAPTER_NAME, adapters_of
from fsdp_flat.checkpoint.consensus import LOADING, Consensus, compare_names
from fsdp_flat.checkpoint.files import lexists, local_file, path_of_user
from fsdp_flat.checkpoint.format import COMMIT_NAME, Records, check_file, check_sums, orders_in
from fsdp_flat.checkpoint.full_entries import ADAPTER_CHECKSUMS_NAME, CHECKSUMS_NAME, Entry, entries_of
from fsdp_flat.checkpoint.progress import ProgressBar, progress_bar
from fsdp_flat.checkpoint.safetensors_files import INDEX_NAME, SINGLE_NAME, files_in_index, read_safetensors
from fsdp_flat.comm import UntilRanksMeet, digest_of
from fsdp_flat.core import copy_of, inner_tensors, local_of, plain_tensors_in, unit_of, units_of
from fsdp_flat.core.quantized import constants_of
from fsdp_flat.errors import LoadError, RankMismatchError, phrase, some_of
from fsdp_flat.layout import advice_on, clean_fqn, names_unlike, owners_of_constants, renamed
from fsdp_flat.state import distributed_param, settings_for, state_dict_settings
from fsdp_flat.state.plain_states import is_wrapper

# owner/model
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+$")


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
    One that no unit manages takes them by its ``copy_``.

    If :func:`save_full` has written ``model.checksums.json`` beside the files, checksums are compared first, each rank
    those of some files.

    Every rank must call this, and must have access to the files. The model is unchanged unless everything fits; until
    then each rank holds a copy of its shards.

    Args:
        model: a wrapped model, or a module that holds wrappers.
        path: a ``.safetensors`` file (read by the package safetensors), a directory with ``model.safetensors`` or with
            an index as on model hubs, or a file of ``torch.save`` with a state dict (read by ``torch.load`` with
            ``mmap`` and ``weights_only``); a path or a URL of fsspec. A directory of an adapter of the peft package is
            loaded into that adapter of the model, with ``strict=False``.
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
        LoadError: (a RuntimeError) files that cannot be read, names or shapes that do not fit, no name that begins with
            ``prefix``, or a quantized parameter that no unit manages and whose class takes no plain values; on every
            rank.
        OptionError: ``path`` is empty, or a URL that fsspec cannot open, ``prefix`` lacks its dot, or ``rename`` gives
            one name twice.
        UnsupportedError: a ``.safetensors`` file, and the package safetensors is not installed.
        RankMismatchError: (an OptionError) ranks pass another ``strict``, load a parameter from other names, or files
            with other checksums.
        OptionTypeError: an argument of the wrong type.
        PhaseError: called in the middle of a step.
    """
    together, until_met, sums = Consensus.of(model, LOADING), UntilRanksMeet(), 0
    with until_met:
        flag(strict, "strict")
        path, given_path = path_of_user(path, "path"), str(path)
        if not path.exists() and _HUB_NAME.match(given_path) and not path.parent.exists():
            raise LoadError(
                f"{path} does not exist. For a model of that name on the Hugging Face hub: "
                f"load_full(model, huggingface_hub.snapshot_download({given_path!r}))."
            )
        paths = _files_of(path)
        sums = _check_sums(paths, together, progress_bar("Verifying", asked=progress, here=together.rank == 0))
        tensors, names = _stored_in(paths)
        if prefix or rename is not None:
            names = renamed(names, prefix, rename)
            tensors = {name: tensors[name] for name in sorted(set(names.values()))}
        entries = entries_of(model, keep, loads=True)
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
        problems = _unlike(pairs, strict=strict) + (names_unlike("load_full", missing, unexpected) if strict else [])
        if problems:
            raise LoadError(f"{path} does not fit the model: {'; '.join(problems)}. Nothing was loaded.")
        if refused := _refused(model, pairs):
            told = [f"{name!r} ({why})" for name, why in refused.items()]
            raise LoadError(
                f"{path} has plain values of {some_of(told, 3)}, which no unit manages; expected classes whose copy_ "
                f"takes a plain tensor. Leave these out with keep=... and strict=False, "
                "and load them by themselves, by copy_ of tensors of their class. Nothing was loaded."
            )
        given = [(entry, found.get(entry.same_as or entry.name)) for entry in entries]
        undo = _copied(model)
    each_sums = together.meet("load_full", [sums], until_met.error, [f"strict={bool(strict)}"])
    if len({each for (each,) in each_sums if each}) > 1:
        each_path = zip(together.texts(str(path)), together.ranks, strict=True)
        told = [f"{name} of rank {rank}" for name, rank in each_path]
        raise RankMismatchError(
            f"Ranks load different files, so nothing was loaded: {some_of(told, 8)} have different checksums. "
            "Expected the same files, or copies of them. Pass the same path on every rank."
        )
    named = [
        (entry.param.unit, entry.name, name) for entry, name in given if entry.param is not None and name is not None
    ]
    compare_names(named, units_of(model))
    # Modules and hooks may raise after others have loaded, on one rank alone too.
    until_loaded = UntilRanksMeet()
    with until_loaded:
        state = {entry.key: _loadable(entry, tensors[name]) for entry, name in given if name is not None}
        not_taken = _load(model, state)
        if strict and not_taken:
            raise LoadError(f"No module has taken {some_of(not_taken, 5)} of {path}. Nothing was loaded.")
        unexpected += not_taken
    try:
        together.fail(until_loaded.error)
    except Exception:
        undo()
        raise
    return missing, unexpected


def _unlike(pairs: Sequence[tuple[Entry, torch.Tensor]], *, strict: bool) -> list[str]:
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


def _refused(model: nn.Module, pairs: Sequence[tuple[Entry, torch.Tensor]]) -> dict[str, str]:
    """Tell by name which tensors of other classes, those that no unit manages, cannot be loaded from plain ones.

    Each is tried on a copy, one at a time. Modules that load in a way of their own are left to it.
    """
    found: dict[str, str] = {}
    unmanaged = {entry.name: there for entry, there in pairs if entry.param is None}
    for prefix, module in model.named_modules(remove_duplicate=False) if unmanaged else ():
        is_usual = type(module)._load_from_state_dict is nn.Module._load_from_state_dict
        if not is_usual or module._load_state_dict_pre_hooks:
            continue
        for name, own in chain(module._parameters.items(), module._buffers.items()):
            fqn = clean_fqn(f"{prefix}.{name}" if prefix else name)
            if own is None or fqn not in unmanaged or not inner_tensors(own.detach()):
                continue
            try:
                copy = copy_of(own)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                continue  # the class makes no copy to try; a load that fails is undone
            try:
                with torch.no_grad():
                    copy.copy_(unmanaged[fqn])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                found[fqn] = f"a {type(own.data).__name__}, whose copy_ raises {error!r}"
    return found


def _load(model: nn.Module, state: dict[str, Any]) -> list[str]:
    """Load full tensors, and return the names that no module has taken."""
    unit = unit_of(model)
    # A plain module may have a method of its own with other arguments.
    has_wrapper = unit is not None and unit.options.api.has_wrapper
    load = type(model).load_state_dict if has_wrapper else nn.Module.load_state_dict
    with state_dict_settings(model, settings_for(StateDictType.FULL_STATE_DICT, None, None)):
        return [clean_fqn(name) for name in load(model, state, strict=False).unexpected_keys]


def _copied(model: nn.Module) -> Callable[[], None]:
    """Copy this rank's tensors of a model, and return a function that restores their values."""
    handles = [handle for unit in units_of(model) for handle in unit.param_groups]
    for unit in units_of(model):
        unit.reshard()
        unit.adopt_assigned()
    managed = {param for handle in handles for param in handle.slots.visible_params}
    others = [each for each in chain(model.parameters(), model.buffers()) if each not in managed]
    quantized = [*(entry.param for handle in handles for entry in handle.params), *others]
    others += [each for param in quantized for each in constants_of(param).values()]
    # Tensors of other classes have perhaps no copy_.
    found = [inner.detach() for each in others for inner in plain_tensors_in(local_of(each))]
    found += [tensor for handle in handles for tensor in handle.storage.tensors()]
    tensors = [each for each in found if not each.is_meta]
    copies = list(map(copy_of, tensors))

    def restore() -> None:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for handle in handles:
            handle.raise_weights_epoch()

    return restore


def _loadable(entry: Entry, full: torch.Tensor) -> torch.Tensor:
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
    if not lexists(index):
        if not lexists(path / SINGLE_NAME):
            if lexists(path / ADAPTER_NAME):
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
    if others := sorted(path.glob("pytorch_model*.bin")):
        if len(others) == 1 and others[0].name == "pytorch_model.bin":
            return f", but {others[0].name}. Load that file: load_full(model, {str(others[0])!r})"
        return f", but {others[0].name}. Convert them: fsdp-flat convert {path} TARGET --to safetensors"
    return ""


def _check_sums(paths: Sequence[Path], together: Consensus, show: ProgressBar) -> int:
    """Compare this rank's share of the files with the checksums beside them; return a digest of all, 0 without any."""
    records = check_recorded_sums(paths, together.rank, together.size, show)
    return digest_of(json.dumps(records, sort_keys=True).encode()) if records else 0


def check_recorded_sums(paths: Sequence[Path], share: int, num_shares: int, show: ProgressBar) -> Records:
    """Compare a share of the files with the checksums beside them; return the records of all, none without any."""
    directory = paths[0].parent
    sums = directory / (ADAPTER_CHECKSUMS_NAME if paths[0].name == ADAPTER_NAME else CHECKSUMS_NAME)
    if not lexists(sums):
        return {}
    check_file(sums)
    try:
        found = json.loads(sums.read_text())
        records = {
            path.name: {key: found[path.name][key] for key in ("size", "crc32")} for path in paths if path.name in found
        }
        check_sums(directory, dict(list(records.items())[share::num_shares]), show)
    except LoadError as error:
        raise LoadError(f"{phrase(error)}. If the file was replaced on purpose, remove {sums}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{sums} cannot be read: {error!r}. Without it, files are loaded as they are.") from error
    return records


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
        with local_file(path) as file:
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise LoadError(
            f"{path} cannot be read by torch.load(weights_only=True): {phrase(error)}. Expected a state dict of plain "
            "tensors, or a .safetensors file."
        ) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        advice = advice_on(state, ()) if isinstance(state, Mapping) else ""
        raise LoadError(f"{path} holds no state dict of tensors; save model.state_dict() by itself. {advice}".rstrip())
    return dict(state), {name: name for name in state}
