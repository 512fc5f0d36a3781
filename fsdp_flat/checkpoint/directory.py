"""Reads and writes the directory of checkpoints, finds the ranks that hold a model, and makes them act together.

``step-00000100/`` is a checkpoint. While it is written its name ends in ``.writing``. ``commit.json`` completes it: it
is written last and holds the size and the CRC-32 of every other file, the numbers of the save, and the CRC-32 of all
this (a record without that one is read too); then the directory is renamed. Each of these steps is flushed to disk
before the next. All other files are those of torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.api import ShardedStateDictConfig, StateDictType
from fsdp_flat.comm import (
    ErrorTexts,
    RankGroup,
    agree,
    barrier,
    decoded,
    digest_of,
    encoded,
    exchange_bytes,
    exchange_ints,
    global_ranks,
)
from fsdp_flat.core import no_units, units_of
from fsdp_flat.errors import LoadError, OptionError, OptionTypeError, UnsupportedError, some_of
from fsdp_flat.state import BoxedTensor, rank_groups_of, settings_for, state_dict_settings
from fsdp_flat.state.plain_states import values_of

_logger = logging.getLogger("fsdp_flat")

COMMIT_NAME = "commit.json"
# A pattern of the names that torch.distributed.checkpoint gives to a rank's files.
FILES_OF_RANK = "__{}_*.distcp"
_FORMAT = 2
_WRITING = ".writing"
_REPLACED = ".replaced"
_REMOVING = ".removing"
# A checkpoint's number has 18 digits at most, so that it fits in 64 bits.
_NAME = re.compile(r"step-([0-9]{8,18})$")
_MOST = 10**18 - 1
_CHUNK = 1 << 22

# The "size" of a file in bytes and its "crc32"; and these by name, as in commit.json.
Record = dict[str, int]
Records = dict[str, Record]


@dataclass(frozen=True, slots=True)
class Commit:
    """Holds what ``commit.json`` says of a checkpoint.

    Attributes:
        step: its number.
        order: sequence number of the save in the directory; the newest checkpoint has the highest.
        files: the records of all files but this one.
    """

    step: int
    order: int
    files: Records

    @property
    def nbytes(self) -> int:
        """Size of the files in bytes."""
        return sum(record["size"] for record in self.files.values())


_ADVICE = "Call it with the same model and arguments on every rank."
SAVING = ErrorTexts("saving", "Ranks save different things.", _ADVICE)
LOADING = ErrorTexts("loading", "Ranks load different things.", _ADVICE)

ProgressBar = Callable[[int], AbstractContextManager[Callable[[int], object]]]


def progress_bar(label: str, *, asked: bool | None, here: bool) -> ProgressBar:
    """Return a function that shows a bar for a number of bytes: ``with show(num_bytes) as update: update(1024)``.

    If ``asked`` is None, only a terminal gets one, after two seconds. Without tqdm there is none.
    """

    @contextmanager
    def show(num_bytes: int) -> Iterator[Callable[[int], object]]:
        try:
            from tqdm import tqdm
        except ImportError:
            yield lambda nbytes: None
            return
        # tqdm takes None for a choice by whether the output is a terminal.
        is_off = None if here and asked is None else not (here and asked)
        delay = 2 if asked is None else 0
        with tqdm(desc=label, total=num_bytes, unit="B", unit_scale=True, delay=delay, disable=is_off) as bar:
            yield bar.update

    return show


def boxed_state_dict(model: nn.Module, *, copy: bool = False) -> dict[str, Any]:
    """Return a model's state dict with the shards of this rank as boxes, or copies of all tensors on the CPU."""
    config = ShardedStateDictConfig(boxes=True, offload_to_cpu=copy)
    with state_dict_settings(model, settings_for(StateDictType.SHARDED_STATE_DICT, config, None)):
        found = {name: values_of(value) for name, value in model.state_dict().items()}
    for name, value in found.items() if copy else ():
        # Boxes are copies already; buffers are the live ones.
        if isinstance(value, torch.Tensor) and not isinstance(value, BoxedTensor):
            found[name] = value.detach().to("cpu", copy=True)
    return found


def path_of_user(value: Any, name: str) -> Path:
    """Return a path argument as an absolute path, so that a later change of directory does not matter."""
    try:
        return Path(value).absolute()
    except TypeError as error:
        raise OptionTypeError(f"{name} must be a path, as a str or a Path; got {value!r}.") from error


def check_file(path: Path) -> None:
    """Raise unless there is a regular file: opening a FIFO or a device may wait for ever."""
    if not path.is_file():
        raise LoadError(f"{path} {'is no regular file' if os.path.lexists(path) else 'does not exist'}.")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in an OSError of the block that names no file, that of a full disk for instance."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def check_number(value: Any, name: str, least: int, *, is_optional: bool = False) -> None:
    """Raise unless an argument is an int of at least ``least``, or None if it ``is_optional``."""
    if value is None and is_optional:
        return
    wanted = f"{name} must be an int of at least {least}{', or None' if is_optional else ''}; got {value!r}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionTypeError(wanted)
    if value < least:
        raise OptionError(wanted)


def check_step(value: Any) -> None:
    """Raise unless an argument is the number of a checkpoint, or None."""
    check_number(value, "step", 0, is_optional=True)
    if value is not None and value > _MOST:
        raise OptionError(f"step must be an int of at most 18 digits; got {value!r}.")


def next_step(directory: Path) -> int:
    """Return one more than the highest number; the last of all numbers, which a folder may have, does not count."""
    return 1 + max((step for step in list_steps(directory) if step < _MOST), default=-1)


def _group_of(model: nn.Module) -> dist.ProcessGroup:
    """Return the process group of all ranks that hold a shard or a replica of the model."""
    units = units_of(model)
    if not units:
        raise no_units(model)
    params = [entry for unit in units for handle in unit.param_groups for entry in handle.params]
    groups = [rank_group.group for rank_group in rank_groups_of(units) if rank_group.group is not None]
    groups += [group for entry in params for group in entry.adapter.mesh_groups if dist.get_world_size(group) > 1]
    # There may be several groups of the same ranks; every rank must choose the same one.
    by_ranks: dict[frozenset[int], dist.ProcessGroup] = {}
    for group in groups:
        by_ranks.setdefault(frozenset(global_ranks(group)), group)
    meshes = [unit.options.groups.mesh for unit in units if unit.options.strategy.is_hybrid]
    meshes += [entry.param.device_mesh for entry in params if isinstance(entry.param, DTensor)]
    joined = {frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes if mesh is not None and mesh.size() > 1}
    joined.update(by_ranks)
    # Meshes of other parameters, experts among them, divide the same ranks in other ways.
    largest = [ranks for ranks in joined if not any(ranks < others for others in joined)]
    joint = units[0].options.groups.process_group
    if len(largest) == 1 and largest[0] in by_ranks:
        joint = by_ranks[largest[0]]
    elif largest:
        # The sets are mesh dims: they intersect in this rank only, and the mesh size is the product of their sizes.
        joint, num_ranks = dist.group.WORLD, math.prod(map(len, largest))
        overlaps = any(len(a & b) > 1 for a, b in combinations(largest, 2))
        if overlaps or num_ranks != dist.get_world_size():
            where = f"{num_ranks} of {dist.get_world_size()} ranks, along {len(by_ranks)} groups"
            if overlaps:
                where = f"groups that overlap, of the ranks {' and '.join(map(str, sorted(map(sorted, largest))))}"
            raise UnsupportedError(
                f"The model is on {where} (sharded, replicated, tensor parallel), and no process group joins just "
                "these. Save it by state_dict() and torch.distributed.checkpoint."
            )
    assert joint is not None
    return joint


class Consensus:
    """Exchanges errors and small values between the ranks of a group: an exception on one rank is raised on all.

    ``device`` is used for groups without a CPU backend; ``ranks`` are the global ranks.
    """

    def __init__(self, group: dist.ProcessGroup, words: ErrorTexts, device: torch.device) -> None:
        self.ranks = global_ranks(group)
        self.group = group
        self._words = words
        self.device = device
        self.rank_group = RankGroup.of(group)
        self.rank, self.size = self.rank_group.rank, self.rank_group.size

    @classmethod
    def of(cls, model: nn.Module, words: ErrorTexts) -> Consensus:
        """Return the consensus of all ranks that hold a shard or a replica of the model."""
        return cls(_group_of(model), words, units_of(model)[0].options.device)

    def barrier(self, what: str) -> None:
        """Wait for the other ranks; raises within seconds if a rank does not call this."""
        barrier(what, self.rank_group)

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Raise on every rank if the block raises on one. Every rank must enter the block."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.fail(error)

    def fail(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an error. Every rank must call this."""
        self.integers([], error)

    def integers(self, values: list[int], error: Exception | None, same: Sequence[str] = ()) -> list[list[int]]:
        """All-gather 64-bit integers, as many on every rank, in one collective. Every rank must call this.

        Raises on every rank if one has an error, or if the lines ``same`` differ.
        """
        if error is not None and self.size == 1:
            raise error
        own = [int(error is None), digest_of(encoded("\n".join(same))), *values]
        rows = exchange_ints(own, self.group, self.device, self._words.doing)
        differ = len({digest for _, digest, *_ in rows}) > 1
        if differ or not all(ok for ok, *_ in rows):
            # A difference may be the cause of an error.
            agree(same, None if differ else error, [self.rank_group], self.device, self._words)
        return [row[2:] for row in rows]

    def texts(self, text: str, *, only_on_rank0: bool = False) -> list[str]:
        """All-gather every rank's text, by rank, or gather them on rank 0. Every rank must call this."""
        doing, sent = self._words.doing, encoded(text)
        payloads = exchange_bytes(sent, self.group, self.device, doing, only_on_rank0=only_on_rank0)
        return list(map(decoded, payloads))


# -- the directory -----------------------------------------------------------------------------------------------------


def path_of(directory: Path, step: int) -> Path:
    """Return the directory of checkpoint ``step`` once it is complete."""
    return directory / f"step-{step:08d}"


def writing_path(directory: Path, step: int) -> Path:
    """Return the directory of checkpoint ``step`` while it is written."""
    return path_of(directory, step).with_suffix(_WRITING)


def prepare(directory: Path, step: int) -> None:
    """Remove all that earlier saves have left unfinished. The ranks that write create the directory of ``step``.

    No other save may be running in this directory. It may be full, so room is made before anything is written.
    """
    if directory.exists() and not directory.is_dir():
        raise OptionError(f"{directory} is a file; pass a directory, which is created if needed.")
    if (directory / COMMIT_NAME).exists():
        raise OptionError(
            f"{directory} is a checkpoint itself; pass the directory of all checkpoints, here {directory.parent}."
        )
    recover(directory)
    remove_unfinished(directory)
    writing = writing_path(directory, step)
    if writing.exists():
        raise FileExistsError(f"{writing} is in the way of the checkpoint's directory and cannot be removed.")


@contextmanager
def discarded_on_error(directory: Path, step: int, rank: int) -> Iterator[None]:
    """Remove what the block has written for ``step`` if it raises: each rank its own files, and rank 0 all."""
    try:
        yield
    except Exception:
        writing = writing_path(directory, step)
        with suppress(OSError):
            if rank == 0:
                recover(directory)
                shutil.rmtree(writing, ignore_errors=True)
            else:
                for path in writing.glob(FILES_OF_RANK.format(rank)):
                    path.unlink()
                # Another rank's files are there unless the directory is this rank's alone.
                writing.rmdir()
        raise


def recover(directory: Path) -> None:
    """Restore a checkpoint that was being replaced by another of its number when the process was killed."""
    for away in directory.glob(f"step-*{_REPLACED}"):
        final = away.with_suffix("")
        if final.exists():
            _remove(away)
        else:
            os.replace(away, final)


def records_of(path: Path, pattern: str) -> Records:
    """Return the records of the files in a directory whose names match a pattern."""
    return {each.name: _record(each) for each in sorted(path.glob(pattern))}


def _record(path: Path, update: Callable[[int], object] = int) -> Record:
    crc = 0
    check_file(path)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            update(len(chunk))
        return {"size": file.tell(), "crc32": crc}


def check_all_here(writing: Path, each_records: Sequence[Records]) -> None:
    """Raise unless this rank finds the files of every rank, with the sizes in their records."""
    # To list a directory makes a network file system ask its server; a lookup may be answered from a cache.
    found = {entry.name: entry.stat().st_size for entry in os.scandir(writing)}
    for rank, records in enumerate(each_records):
        for name, record in records.items():
            if found.get(name) != record["size"]:
                here = f"finds {found[name]} bytes" if name in found else "does not find it"
                raise OptionError(
                    f"Rank {rank} has written {name} ({record['size']} bytes) to {writing.name}, and rank 0 {here} in "
                    f"{writing.parent}. The directory must be one and the same for all ranks, on a file system that "
                    "they share, and one run alone may save there. Nothing was saved, and no checkpoint was removed."
                )


def commit(directory: Path, step: int, records: Records) -> None:
    """Complete the checkpoint that was written for ``step``, replacing an earlier one of this number."""
    final, writing = path_of(directory, step), writing_path(directory, step)
    # The newest checkpoint has the highest sequence number, whatever its step.
    order = 1 + max((_order(directory, other) for other in list_steps(directory)), default=0)
    body = {"format": _FORMAT, "step": step, "order": order, "files": dict(sorted(records.items()))}
    body["crc32"] = _crc_of(body)
    with naming(writing / COMMIT_NAME), open(writing / COMMIT_NAME, "w") as file:
        json.dump(body, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _flush_directory(writing)
    # The old checkpoint is missing only between these two renames; recover() restores it after a kill there.
    away = final.with_suffix(_REPLACED)
    if os.path.lexists(final):
        os.replace(final, away)
    os.replace(writing, final)
    _flush_directory(directory)
    _remove(away)


def _flush_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_steps(directory: Path) -> list[int]:
    """Return the numbers of all checkpoints with their final names: those without a valid record, then newest first."""
    return sorted(_numbers(directory), key=lambda step: (_order(directory, step) or math.inf, step), reverse=True)


def step_number_of(name: str) -> int | None:
    """Return the number of a checkpoint by the name of its directory; None for another name."""
    match = _NAME.match(name)
    return None if match is None else int(match[1])


def _numbers(directory: Path) -> list[int]:
    return sorted(step for name in _listed(directory) if (step := step_number_of(name)) is not None)


def unfinished(directory: Path) -> list[str]:
    """Return the names of directories that interrupted or running saves and removals have left."""
    names = [name for name in _listed(directory) if name.endswith((_WRITING, _REMOVING))]
    return sorted(name for name in names if _NAME.match(Path(name).stem))


def _listed(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


def candidates(directory: Path, step: int | None) -> tuple[list[str], list[str]]:
    """Return the names of checkpoints in ``directory``, the one to try first at the front, and of unfinished ones.

    The name "." is that of ``directory`` itself, if it is a checkpoint. Both lists are empty only where there is no
    directory, or an empty one, which is logged.

    Raises:
        LoadError: there are other files or directories only; the text lists them.
    """
    if step is not None:
        return [path_of(directory, step).name], []
    recover(directory)
    steps, cut_off = list_steps(directory), unfinished(directory)
    match = _NAME.match(directory.name)
    is_named_so = match is not None and directory == path_of(directory.parent, int(match[1]))
    if (directory / COMMIT_NAME).exists() or (is_named_so and not steps and not cut_off):
        if not directory.exists():
            recover(directory.parent)
        return ["."], []
    if directory.is_symlink() and not directory.exists():
        raise LoadError(f"{directory} is a link to {os.readlink(directory)}, which does not exist.")
    if not steps and not cut_off:
        if others := _visible(directory):
            inside = [name for name in others if list_steps(directory / name)]
            raise LoadError(
                f"{directory} holds no checkpoint, but {some_of(others, 10)}. Pass the directory that was given to "
                f"save_checkpoint{f' ({some_of(inside, 3)} has checkpoints)' if inside else ''}, or that of one "
                f"checkpoint ({path_of(Path(), 100)}). To start without a checkpoint, pass a directory for checkpoints "
                "alone."
            )
        state = "is empty" if directory.exists() else "does not exist"
        beside = some_of(_visible(directory.parent), 4) or "nothing"
        _logger.warning(
            "Starting without a checkpoint: %s %s, so load_checkpoint loads nothing and returns None, as in the first "
            "run of a training. If it should have found one: beside that directory there is %s.",
            directory,
            state,
            beside,
        )
    return [path_of(directory, step).name for step in steps], cut_off


def _visible(directory: Path) -> list[str]:
    """Return the sorted names of what is in a directory, those that begin with a dot aside."""
    return sorted(name for name in _listed(directory) if not name.startswith("."))


def _order(directory: Path, step: int) -> int:
    try:
        return read_commit(path_of(directory, step)).order
    except (LoadError, OSError):
        return 0


def _crc_of(body: Mapping[str, Any]) -> int:
    """Return the checksum of what a record says."""
    return zlib.crc32(json.dumps([body["step"], body["order"], body["files"]], sort_keys=True).encode())


def read_commit(path: Path) -> Commit:
    """Return the record of a checkpoint; raise a LoadError if it cannot be read, or was altered."""
    file = path / COMMIT_NAME
    if not os.path.lexists(file):
        if path.exists():
            raise LoadError(f"{path} has no {COMMIT_NAME}: it was never finished")
        if path.is_symlink():
            raise LoadError(f"{path} is a link to {os.readlink(path)}, which does not exist")
        steps = ", ".join(map(str, _numbers(path.parent))) or "none"
        raise LoadError(f"{path} does not exist; checkpoints there: {steps}")
    check_file(file)
    try:
        body: dict[str, Any] = json.loads(file.read_text())
        if body["format"] != _FORMAT:
            raise LoadError(f"{path} has format {body['format']}; this version reads format {_FORMAT}")
        records = {name: {key: entry[key] for key in ("size", "crc32")} for name, entry in body["files"].items()}
        numbers = [body["step"], body["order"], *(number for record in records.values() for number in record.values())]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("a number is no int, or is negative")
        if body.get("crc32", _crc_of(body)) != _crc_of(body):
            raise LoadError(f"{file} was altered: its checksum is not that of what was written")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{file} cannot be read: {error!r}") from error
    if not records:
        raise LoadError(f"{file} names no files")
    if outside := [name for name in records if Path(name).name != name]:
        raise LoadError(f"{file} names {some_of(outside, 3)}, outside of its directory")
    return Commit(body["step"], body["order"], records)


def sized_commit(path: Path) -> Commit:
    """Return the record of a checkpoint; raise unless its files are there, with the sizes in it."""
    found = read_commit(path)
    for name, record in found.files.items():
        check_size(path / name, record)
    return found


def check_size(path: Path, record: Record) -> None:
    """Raise unless a file is there, with the size in its record."""
    check_file(path)
    size = path.stat().st_size
    if size != record["size"]:
        raise LoadError(f"{path} has {size} bytes, {record['size']} were written")


def check_sums(path: Path, records: Records, show: ProgressBar) -> None:
    """Raise unless files of the directory ``path`` have the checksums in their records."""
    with show(sum(record["size"] for record in records.values())) as update:
        for name, record in records.items():
            if _record(path / name, update) != record:
                raise LoadError(f"{path / name} was altered: its checksum is not that of what was written.")


def verified(path: Path, share: int, num_shares: int, show: ProgressBar) -> tuple[Commit | None, str]:
    """Return the record of a checkpoint, None if there is a problem with its files, and the first problem or ``""``.

    Sizes are compared for all files, checksums for those at positions ``share``, ``share + num_shares`` and so on.
    """
    try:
        found = sized_commit(path)
        check_sums(path, dict(list(found.files.items())[share::num_shares]), show)
        return found, ""
    except (LoadError, OSError) as error:
        return None, str(error)


def prune(directory: Path, keep_last: int) -> None:
    """Remove all but the last ``keep_last`` checkpoints; those without a valid record remain and do not count."""
    valid = [step for step in list_steps(directory) if _order(directory, step)]
    for step in valid[keep_last:]:
        # Rename first: an interrupted removal must not leave a partial checkpoint under its name.
        path = path_of(directory, step)
        _remove(path.with_suffix(_REMOVING))
        os.replace(path, path.with_suffix(_REMOVING))
    remove_unfinished(directory)


def remove_unfinished(directory: Path) -> None:
    """Remove what interrupted saves and removals have left."""
    for name in unfinished(directory):
        _remove(directory / name)


def _remove(path: Path) -> None:
    """Remove a directory, or a link to one, as far as possible."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
