"""Loads checkpoints of a training run, at any number of ranks, wrapping and strategy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_flat.checkpoint import directory as disk
from fsdp_flat.checkpoint.directory import LOADING, Consensus, boxed_state_dict, unpacked, wait_for_background
from fsdp_flat.errors import LoadError, some_of
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime import units_of
from fsdp_flat.state import OptimContents, contents_of, load_optim_state, template_states
from fsdp_flat.user_warnings import warn_user

# The module dcp_files is imported where it is used, because the import of torch.distributed.checkpoint is slow.

_OPTIM_PREFIX = "optim.state."


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Describes the checkpoint that :func:`load_checkpoint` loaded.

    Attributes:
        step: the checkpoint's number.
        path: its directory.
        extra: the ``extra`` that this rank saved; rank 0's if the number of ranks has changed.
        skipped: the saves skipped in the directory (incomplete later ones, interrupted ones), each with the reason.
    """

    step: int
    path: Path
    extra: Any
    skipped: tuple[str, ...]


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
) -> LoadedCheckpoint | None:
    """Load the newest complete checkpoint of :func:`save_checkpoint`, at any number of ranks, wrapping and strategy.

    Sizes and checksums of all files are compared first; an incomplete checkpoint is skipped with a warning that names
    the file. Model and optimizer are unchanged unless everything fits.

    Every rank must call this, between steps.

    Args:
        directory: the directory given to :func:`save_checkpoint`.
        model: a wrapped model, or a module that holds wrappers.
        optim: its optimizer; None ignores the saved optimizer state.
        step: load this checkpoint, and raise if it is incomplete.

    Returns:
        The loaded checkpoint; None if there is none at all.

    Raises:
        LoadError: (a RuntimeError) no checkpoint is complete, or names or shapes do not fit the model; on every rank.
        PhaseError: called in the middle of a step.
    """
    directory = Path(directory)
    wait_for_background(model)
    together = Consensus.of(model, LOADING)
    together.barrier("load_checkpoint")
    steps: list[int] = [] if step is None else [step]
    cut_off: list[str] = []
    with together.propagate_errors():
        for unit in units_of(model):
            unit.check_idle("load_checkpoint")
        if together.rank == 0 and step is None:
            disk.recover(directory)
            steps, cut_off = disk.list_steps(directory), disk.unfinished(directory)
    steps, cut_off = json.loads(together.texts(json.dumps([steps, cut_off]))[0])
    skipped = [f"{name}: it was never finished" for name in cut_off]
    for candidate in steps:
        found, problem = _verified(directory, candidate, together)
        if not problem:
            break
        skipped.append(problem)
    else:
        if not steps and not skipped:
            return None
        raise LoadError(f"No complete checkpoint in {directory}: {'; '.join(skipped)}.")
    if skipped and together.rank == 0:
        warn_user(f"Loading {found.path.name}; passed over: {'; '.join(skipped)}.", stacklevel=2)
    extra = _load(found, model, optim, together)
    return LoadedCheckpoint(found.step, found.path, extra, tuple(skipped))


def _verified(directory: Path, step: int, together: Consensus) -> tuple[disk.Commit, str]:
    """Return the record of a checkpoint, and the first rank's error in it or ``""``; each rank reads some files.

    Every rank must call this.
    """
    found = disk.Commit(disk.path_of(directory, step), step, 0, ())
    try:
        found = disk.read_commit(directory, step)
        problem = disk.verify_files(found, together.rank, together.size)
    except (LoadError, OSError) as error:
        problem = str(error)
    return found, next((text for text in together.texts(problem) if text), "")


def _load(found: disk.Commit, model: nn.Module, optim: torch.optim.Optimizer | None, together: Consensus) -> Any:
    from fsdp_flat.checkpoint.dcp_files import SafeReader, read_into

    # Everything is read and checked, on all ranks, before anything is changed.
    with together.propagate_errors():
        reader = SafeReader(found.path)
        plain, extra = _saved_values(reader, found, together)
        template: dict[str, Any] = {}
        template["model"], own_names = _model_template(model, reader)
        if optim is not None:
            contents = contents_of(optim)
            states, deferred = _optim_template(model, contents, reader, plain)
            template["optim"] = {"state": states}
        read_into(template, reader)
        if optim is not None:
            parts = plain["optim"]["state"], states, deferred
            rows = {
                fqn: {k: v for part in parts for k, v in part.get(fqn, {}).items()}
                for fqn in {**parts[0], **states, **deferred}
            }
            state = {"state": rows, "param_groups": plain["optim"]["param_groups"]}
            loaded = load_optim_state(model, contents, state)
    if optim is not None:
        # The optimizer loads first, because it checks its groups before it changes anything; the model is checked.
        with together.propagate_errors():
            optim.load_state_dict(loaded)
    values = {**template["model"], **plain["model"]}
    model.load_state_dict({own_names.get(name, name): value for name, value in values.items()})
    return extra


def _saved_values(reader: Any, found: disk.Commit, together: Consensus) -> tuple[dict[str, Any], Any]:
    """Read the values that are no tensors, and this rank's ``extra``: rank 0's if another number of ranks saved it."""
    from fsdp_flat.checkpoint.dcp_files import read_value

    # Format 1: a file of each rank has its extra, and the rows of parameters of which it has elements.
    files = [found.path / record.name for record in found.files if record.name.startswith("rank-")]
    if not files:
        num_ranks = sum(name.startswith("extra.") for name in reader.read_metadata().state_dict_metadata)
        rank = together.rank if num_ranks == together.size else 0
        return read_value("plain", reader), read_value(f"extra.{rank}", reader)
    each = [unpacked(path.read_bytes()) for path in sorted(files)]
    plain = each[0]
    for other in each if "optim" in plain else ():
        plain["optim"]["state"] = {**other["optim"]["state"], **plain["optim"]["state"]}
    return plain, each[together.rank if len(each) == together.size else 0]["extra"]


def _model_template(model: nn.Module, reader: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Create tensors to read the model's files into, and check the files' names and shapes against the model.

    Returns the tensors, and the names in the model's own state dict, by the files' names.
    """
    values = boxed_state_dict(model, copy=True)
    metadata = reader.read_metadata().state_dict_metadata
    own = {clean_fqn(name): name for name in values}
    template = {name: values[raw] for name, raw in own.items() if isinstance(values[raw], torch.Tensor)}
    saved = {name.removeprefix("model."): entry for name, entry in metadata.items() if name.startswith("model.")}
    problems = [f"{name!r} is missing there" for name in template if name not in saved]
    problems += [f"{name!r} is not in the model" for name in saved if name not in template]
    problems += [
        f"{name!r} has shape {tuple(saved[name].size)} there and {tuple(value.shape)} in the model"
        for name, value in template.items()
        if name in saved and tuple(saved[name].size) != tuple(value.shape)
    ]
    if problems:
        raise LoadError(f"{reader.path} does not fit the model: {some_of(problems, 5, '; ')}. Nothing was loaded.")
    return template, own


def _optim_template(
    model: nn.Module, contents: OptimContents, reader: Any, plain: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Create tensors to read the optimizer's files into; and states that are full tensors, read on demand."""
    from fsdp_flat.checkpoint.dcp_files import read_into

    if "optim" not in plain:
        raise LoadError(f"{reader.path} was saved without an optimizer; load it with optim=None. Nothing was loaded.")
    wanted: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(_OPTIM_PREFIX):
            fqn, _, name = key.removeprefix(_OPTIM_PREFIX).rpartition(".")
            wanted.setdefault(fqn, {})[name] = (tuple(entry.size), entry.properties.dtype)

    def read(fqn: str, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        into = torch.zeros(shape, dtype=dtype)
        read_into({"optim": {"state": {fqn: {name: into}}}}, reader)
        return into

    return template_states(model, wanted, read, owners=contents.owners)
