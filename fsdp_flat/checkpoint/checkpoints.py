"""Saves checkpoints of a training run that survive a crash at any moment, and loads them at any number of ranks."""

from __future__ import annotations

import base64
import json
import logging
import math
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.api import ShardedOptimStateDictConfig, StateDictType
from fsdp_flat.checkpoint import directory as disk
from fsdp_flat.checkpoint.directory import LOADING, SAVING, Consensus, ProgressBar, boxed_state_dict, progress_bar
from fsdp_flat.comm import digest_of, outliving_group, while_ranks_live
from fsdp_flat.core import local_of, units_of
from fsdp_flat.errors import FsdpFlatError, LoadError, RankMismatchError, UnsupportedError, some_of
from fsdp_flat.guards import RankZeroTensors
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime import Settings, differing_settings, group_settings
from fsdp_flat.state import BoxedTensor, OptimContents, ParamIndex, codec_of, contents_of, save_optim_state
from fsdp_flat.state.plain_states import boxed, has_quantized, is_wrapper
from fsdp_flat.state.shards import serialized, unpacked
from fsdp_flat.user_warnings import warn_user

# The module dcp_files is imported where it is used, because the import of torch.distributed.checkpoint is slow.

_logger = logging.getLogger("fsdp_flat")
# Background saves whose results no later save or load of their models has looked at: process-wide, because models may
# share a directory.
_background: list[CheckpointSave] = []
# By ranks, the thread of their saves, which run in the order of their calls, the same on all ranks.
_threads: dict[tuple[int, ...], ThreadPoolExecutor] = {}


class CheckpointSave:
    """Tracks a save, finished or running in the background.

    Attributes:
        step: the checkpoint's number.
        path: its directory once it is complete.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self._work: Future[None] = Future()
        self._is_reported = False

    def _run(self, work: Callable[[], None], model: nn.Module, ranks: Sequence[int]) -> None:
        def logged() -> None:
            try:
                work()
            except BaseException as error:
                # At once, because a script may end without another call that could report it.
                _logger.error("The save of %s in the background failed: %r", self.path, error)
                raise

        if tuple(ranks) not in _threads:
            # The thread is joined at exit: a script that ends must not interrupt its last checkpoint.
            _threads[tuple(ranks)] = ThreadPoolExecutor(1, thread_name_prefix="fsdp_flat checkpoint")
        self._unit = weakref.ref(units_of(model)[0])
        self._work = _threads[tuple(ranks)].submit(logged)
        _background.append(self)

    @property
    def done(self) -> bool:
        """True once the save has succeeded or failed."""
        return self._work.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and return its directory.

        Raises:
            Exception: the error of the save, on this rank or on another one (PeerFailureError).
        """
        self._is_reported = True
        self._work.result()
        return self.path

    def _finish(self) -> str:
        """Wait until the save is over; return its error if it has one that :meth:`wait` has not raised."""
        error = self._work.exception()
        if error is None or self._is_reported:
            return ""
        self._is_reported = True
        return f"The save of {self.path} in the background failed: {error!r}."


def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    step: int | None = None,
    keep_last: int = 3,
    background: bool = False,
    progress: bool | None = None,
) -> CheckpointSave:
    """Save model, optimizer and extra values as the newest checkpoint in ``directory``.

    Each rank writes its own shards; nothing is all-gathered. The files have the format of
    ``torch.distributed.checkpoint``, so ``dcp.load`` reads them too, into any sharding, under ``"model"`` and
    ``"optim"``. A checkpoint is valid only once all of it is on disk with sizes and checksums; a crash at any moment
    leaves the earlier ones intact.

    Every rank must call this, between steps.

    Args:
        directory: directory of all checkpoints of the run, on a file system shared by all ranks; rank 0 looks there
            for the files of all ranks before it removes older checkpoints. One save at a time may run there: saves of
            one process wait for each other. A second model of the run needs its own, because steps and ``keep_last``
            count all checkpoints there.
        model: a wrapped model, or a module that holds wrappers.
        optim: its optimizer.
        extra: other values of this rank to save (random states, a learning-rate scheduler's state dict): tensors,
            numbers, strings, None, and lists, tuples and dicts of them.
        step: the checkpoint's number, which names its directory and is the ``step`` of :func:`load_checkpoint`'s
            result: pass that of the last training step. By default one more than the highest in the directory, which
            is no training step. The save replaces a checkpoint of the same number.
        keep_last: number of checkpoints to keep; older ones are removed once this one is complete. One that cannot be
            removed is logged, and the save succeeds.
        background: begin to copy the shards to the CPU and return; a thread writes them while training continues. On
            an accelerator later work of the current stream waits for the copies, which go to pinned memory; that is
            kept for the next save, as long as the model. The next save of the model waits for this one. Call
            ``wait()`` on the result to find out whether it succeeded; a failure is also logged. The process does not
            end before, and may destroy its process groups meanwhile.
        progress: show a progress bar on rank 0, if tqdm is installed. By default on a terminal only, for a save in the
            foreground that takes more than two seconds.

    Returns:
        The save; :meth:`CheckpointSave.wait` returns its directory, or raises the error of the background save.

    Raises:
        OptionError: bad arguments, an optimizer of another model, a directory that is not shared by all ranks, or
            values that cannot be read back safely: in ``extra``, of the optimizer, or from a module's
            ``get_extra_state``.
        RankMismatchError: (an OptionError) the optimizer's settings, its learning rate for instance, differ between
            ranks.
        OptionTypeError: an argument of the wrong type.
        PeerFailureError: another rank failed; then nothing is saved.
        PhaseError: called in the middle of a step.
    """
    together = Consensus.of(model, SAVING)
    together.barrier("save_checkpoint")
    values = CheckpointValues(model, together)
    values.collect(directory, optim, extra, step=step, keep_last=keep_last, copy=background, progress=progress)
    values.compare_rank_zeros()
    save = CheckpointSave(values.step, disk.path_of(values.directory, values.step))
    if not background:
        _write(values, keep_last, together)
        save._work.set_result(None)
        values.rank_zeros.warn()
        return save
    # The script may destroy its process groups while its last checkpoint is written.
    # A gloo group communicates CPU tensors.
    group = while_ranks_live(partial(outliving_group, together.group), together.rank_group)
    in_thread = Consensus(group, SAVING, torch.device("cpu"))
    save._run(partial(_write, values, keep_last, in_thread), model, together.ranks)
    values.rank_zeros.warn()
    return save


def _wait_for_background(model: nn.Module, directory: Path) -> None:
    """Wait for the last background save of ``model``, and for those of other models that write into ``directory``.

    Warn if that of the model failed and ``wait()`` has not raised its error.
    """
    unit = units_of(model)[0]
    for save in list(_background):
        if save._unit() is unit:
            _background.remove(save)
            if text := save._finish():
                warn_user(text)
        elif directory.resolve() in (save.path.parent.resolve(), save.path.resolve()):
            wait([save._work])
    _background[:] = [save for save in _background if save._unit() is not None or not save.done]


class CheckpointValues:
    """Collects this rank's values, and compares all ranks in one collective before anything is written.

    It is the ``Peers`` of optimizer states.

    Attributes:
        directory: absolute path of the directory of all checkpoints.
        step: the checkpoint's number, as rank 0 has chosen it.
        error: an exception that is raised like those of the writing: one of the file system on rank 0, or one of this
            rank alone after the comparison.
        is_prepared: rank 0 has removed the files of an earlier attempt.
        tensors: nested dicts of this rank's tensors.
        rows_text: the optimizer states that are no tensors and that this rank sends, as a text for :meth:`plain_of`;
            empty if there are none.
        plain: all other values that are no tensors; rank 0's are saved.
    """

    directory: Path
    bar: ProgressBar

    def __init__(self, model: nn.Module, together: Consensus) -> None:
        self.ranks, self.texts = together.ranks, together.texts
        self.step = 0
        self.error: Exception | None = None
        self.is_prepared = False
        self.tensors: dict[str, Any] = {}
        self.rows_text = ""
        self.plain: dict[str, Any] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._model = model
        self._index = ParamIndex(model)
        self.rank_zeros = RankZeroTensors(model)
        self._together = together
        self._copies = units_of(model)[0].step.streams.kept_copies
        self._handled = {name for unit in units_of(model) for name in unit.optim_state_handlers}
        self._refusal: Exception | None = None
        self._same: list[str] = []
        self._settings: Settings = {}
        self._is_alike = self._has_equal_rank_zeros = True
        self._is_compared = self._has_wrappers = False

    def collect(
        self,
        directory: str | Path,
        optim: torch.optim.Optimizer | None,
        extra: Any,
        *,
        step: int | None,
        keep_last: int,
        copy: bool,
        progress: bool | None,
    ) -> None:
        """Collect the values that this rank writes; raise on every rank if any cannot save."""
        from fsdp_flat.checkpoint.dcp_files import check_optim, packed

        rank, contents = self._together.rank, None
        self._same = [f"a handler of {name!r}" for name in sorted(self._handled)]
        self._same.append(f"{'an' if optim is not None else 'no'} optimizer")
        self._same.append(f"background={bool(copy)}")
        try:
            self.directory = disk.path_of_user(directory, "directory")
            _wait_for_background(self._model, self.directory)
            disk.check_step(step)
            disk.check_number(keep_last, "keep_last", 1)
            self.bar = progress_bar("Saving", asked=progress, here=rank == 0 and (progress or not copy))
            self._add_model()
            self.tensors["extra"] = {str(rank): packed(extra, "extra", "extra")}
            if optim is not None:
                self._settings = group_settings(self._model, optim)
                contents = contents_of(optim, self._index)
                check_optim(contents, self._index)
                self._has_wrappers = has_quantized(contents.state)
            if rank == 0:
                self._prepare(step)
        except Exception as error:
            self._refusal = error
        if contents is None or self._refusal is not None:
            # As many as save_optim_state exchanges: a digest of the groups, and one for each parameter.
            self.integers([0] * (1 + len(self._index.params)), None)
        else:
            self._add_optim(contents)
        if self.error is None:
            try:
                self._keep_share()
                if copy:
                    self._copy_to_host()
            except Exception as error:
                self.error = error

    def _prepare(self, step: int | None) -> None:
        """Choose the number, and remove files of earlier attempts."""
        self.step = disk.next_step(self.directory) if step is None else step
        try:
            disk.prepare(self.directory, self.step)
            self.is_prepared = True
        except OSError as error:
            self.error = error

    def _add_model(self) -> None:
        """Add the model's tensors, as boxes, and its other values (results of ``get_extra_state``)."""
        from fsdp_flat.checkpoint.dcp_files import packed

        for unit in units_of(self._model):
            unit.check_idle("save_checkpoint")
        # The state dict of a compiled model has torch.compile's prefix in its names.
        found = {clean_fqn(name): value for name, value in boxed_state_dict(self._model).items()}
        self.tensors["model"] = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        if made_of_others := [name for name, value in self.tensors["model"].items() if is_wrapper(value)]:
            kind = type(local_of(found[made_of_others[0]])).__name__
            raise UnsupportedError(
                "The model's state dict has tensors made of other tensors, quantized ones for instance: "
                f"{some_of(list(map(repr, made_of_others)), 6)}, the first a {kind}. A checkpoint holds plain tensors, "
                "so nothing was saved. Keep them out of the state dict by a hook (register_state_dict_post_hook) or as "
                "buffers that are not persistent, and save them apart."
            )
        plain = {name: value for name, value in found.items() if name not in self.tensors["model"]}
        # A copy: a thread may write them while training changes the live ones.
        self.plain["model"] = unpacked(packed(plain, "The state dict's values that are no tensors (get_extra_state)"))

    def _add_optim(self, contents: OptimContents) -> None:
        """Compare all ranks, and add the states of the optimizer; one with a handler is merged on one rank."""
        config = ShardedOptimStateDictConfig(offload_to_cpu=False, boxes=True)
        codec = codec_of(StateDictType.SHARDED_STATE_DICT, config)
        found: dict[str, Any] = {"state": {}}
        error: Exception | None = None
        try:
            found = save_optim_state(self._index, contents, codec=codec, config=config, peers=self)
        except Exception as raised:
            error = raised
        # Once ranks have compared, only merges and transfers may fail on one rank alone.
        if self._is_compared and (contents.owners or self._handled):
            self._together.fail(error)
        elif error is not None and (not self._is_compared or isinstance(error, FsdpFlatError)):
            # The comparison raises on every rank.
            raise error
        self.error = self.error or error
        tensors: dict[str, dict[str, Any]] = {}
        for fqn, row in found["state"].items():
            # Merged states are on one rank each, so they are tensors whatever their shape; a 0-dim parameter has boxes.
            tensors[fqn] = {
                name: value
                for name, value in row.items()
                if isinstance(value, torch.Tensor)
                and (name in self._handled or value.dim() > 0 or isinstance(value, BoxedTensor))
            }
            self._rows[fqn] = {name: value for name, value in row.items() if name not in tensors[fqn]}
        self.tensors["optim"] = {"state": tensors}
        self.plain["optim"] = {"param_groups": found.get("param_groups")}
        if self._has_wrappers:
            self.plain["optim"]["has_wrappers"] = True

    def integers(self, values: list[int], error: Exception | None) -> list[list[int]]:
        """All-gather integers, with rank 0's number; raise on every rank if any has an error."""
        # Hooks may name tensors as no unit does; every rank saves those unless all have the same names.
        unmanaged = [name for name in self.tensors.get("model", ()) if name not in self._index.by_name]
        compared = (unmanaged, self.rank_zeros.prints, self._settings)
        digests = [digest_of(json.dumps(each, sort_keys=True).encode()) for each in compared]
        own = [self.step, int(self.is_prepared), int(self._has_wrappers), *digests, *values]
        rows = self._together.integers(own, self._refusal or error, self._same)
        self._is_compared = True
        self.step, self.is_prepared = rows[0][0], bool(rows[0][1])
        self._has_wrappers = any(row[2] for row in rows)
        self._is_alike = len({row[3] for row in rows}) == 1
        self._has_equal_rank_zeros = len({row[4] for row in rows}) == 1
        if len({row[5] for row in rows}) > 1:
            self._check_settings()
        return [row[6:] for row in rows]

    def _check_settings(self) -> None:
        """Raise if settings of the same parameter differ between ranks. Every rank must call this."""
        told = differing_settings(list(map(json.loads, self.texts(json.dumps(self._settings)))), self.ranks)
        if told:
            raise RankMismatchError(
                f"Settings of the optimizer's parameter groups differ between ranks, so nothing was saved: {told}. A "
                "checkpoint has one value for all ranks. Give a scheduler that reads a loss, as ReduceLROnPlateau, the "
                "mean over ranks (torch.distributed.all_reduce)."
            )

    def compare_rank_zeros(self) -> None:
        """Find the tensors that differ between ranks, of which rank 0's are saved. Every rank must call this."""
        if not self._has_equal_rank_zeros:
            self.rank_zeros.compare([self._together.rank_group], self._together.device)

    def _keep_share(self) -> None:
        """Drop the values that other ranks write: replicas take turns by name, and rank 0 writes what every rank has.

        Rows are serialized, so that training can change the live ones while a thread writes.
        """
        index, rank = self._index, self._together.rank
        by_name = {**index.by_name, **index.dtensors_by_name}

        def mine(values: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if is_mine(name, value)}

        def is_mine(name: str, value: Any) -> bool:
            param = by_name.get(name)
            if param is None:
                return rank == 0 or not self._is_alike or isinstance(value, (BoxedTensor, DTensor))
            if param.full_shape == param.shape and not param.adapter.is_first_of_mesh:
                return False
            replicas = param.unit.options.groups.replicate
            return zlib.crc32(name.encode()) % replicas.size == replicas.rank

        def has_own_rows(name: str) -> bool:
            # Ranks with elements of a parameter have the same row: the one with the first element sends it.
            param = by_name.get(name)
            if param is None:
                return True
            if name in index.dtensors_by_name or math.prod(param.shape) == 0:
                return param.rank_group.rank == 0
            own = param.local_shard.in_param
            return own.start == 0 and not own.is_empty

        self.tensors["model"] = mine(self.tensors["model"])
        if "optim" in self.tensors:
            self.tensors["optim"]["state"] = mine(self.tensors["optim"]["state"])
        rows = mine({fqn: row for fqn, row in self._rows.items() if row and has_own_rows(fqn)})
        self.rows_text = base64.b64encode(serialized(rows)).decode() if rows else ""

    def _copy_to_host(self) -> None:
        """Replace the tensors by copies, which may be read after :meth:`wait_for_copies`."""
        rows = [self.tensors["model"], *self.tensors.get("optim", {"state": {}})["state"].values()]
        places = [(row, name, boxed(value)) for row in rows for name, value in row.items()]
        each_parts = [value.parts if isinstance(value, BoxedTensor) else (value,) for *_, value in places]
        copies = iter(self._copies.copied([part.detach() for parts in each_parts for part in parts]))
        for row, name, value in places:
            row[name] = value.with_parts(copies) if isinstance(value, BoxedTensor) else next(copies)

    def wait_for_copies(self) -> None:
        """Wait until the copies for a save in the background are complete."""
        self._copies.wait()

    @property
    def nbytes(self) -> int:
        """Size of this rank's tensors in bytes."""
        states = self.tensors.get("optim", {"state": {}})["state"]
        values = [*self.tensors["model"].values(), *(value for row in states.values() for value in row.values())]
        each_parts = [value.parts if isinstance(value, BoxedTensor) else (value,) for value in values]
        parts = [part for found in each_parts for part in found]
        return sum((part.to_local() if isinstance(part, DTensor) else part).nbytes for part in parts)

    def plain_of(self, each_rows: Sequence[str]) -> bytes:
        """Serialize the plain values with the rows of all ranks, which :attr:`rows_text` holds."""
        if "optim" in self.plain:
            state: dict[str, dict[str, Any]] = {}
            for text in filter(None, each_rows):
                state = {**unpacked(base64.b64decode(text)), **state}
            self.plain["optim"]["state"] = state
        return serialized(self.plain)


def _write(values: CheckpointValues, keep_last: int, together: Consensus) -> None:
    """Write this rank's files, and on rank 0 everything else once all ranks have written theirs."""
    from fsdp_flat.checkpoint.dcp_files import write_files, write_metadata

    directory, text, error = values.directory, "", values.error
    writing = disk.writing_path(directory, values.step)
    with disk.discarded_on_error(directory, values.step, together.rank), values.bar(values.nbytes) as update:
        try:
            values.wait_for_copies()
            if error is None and values.is_prepared:
                written, records = write_files(values.tensors, writing, together.rank, update)
                text = json.dumps([written, records, values.rows_text])
        except Exception as raised:
            error = raised
        texts = together.texts(text, only_on_rank0=True)
        try:
            if texts and all(texts):
                each_written, each_records, each_rows = zip(*map(json.loads, texts), strict=True)
                disk.check_all_here(writing, each_records)
                # One more file, as if of a further rank.
                last, own = write_files({"plain": values.plain_of(each_rows)}, writing, together.size, update)
                own |= write_metadata([*each_written, last], writing)
                disk.commit(directory, values.step, {k: v for each in (*each_records, own) for k, v in each.items()})
                _prune(directory, values.step, keep_last)
        except Exception as raised:
            error = raised
        together.fail(error)


def _prune(directory: Path, step: int, keep_last: int) -> None:
    """Remove older checkpoints; log what prevents it, since the new one is complete."""
    try:
        disk.prune(directory, keep_last)
    except OSError as error:
        path = disk.path_of(directory, step)
        _logger.warning("%s is complete, but checkpoints before it are not all removed: %r", path, error)


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


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Describes a checkpoint on disk.

    Attributes:
        step: the number in the name of its directory.
        path: its directory.
        nbytes: size of its files in bytes, 0 if its record cannot be read.
        problem: why it cannot be loaded, or an empty text.
    """

    step: int
    path: Path
    nbytes: int
    problem: str


def list_checkpoints(directory: str | Path) -> list[CheckpointInfo]:
    """List the checkpoints in a directory of :func:`save_checkpoint`, the newest first, then those with a problem.

    Sizes of files are compared, contents are not. Needs neither a model nor a process group.

    Args:
        directory: the directory given to :func:`save_checkpoint`.

    Returns:
        The checkpoints; none if ``directory`` does not exist. Unfinished saves are left out.

    Raises:
        OptionTypeError: ``directory`` is no path.

    Example::

        for found in list_checkpoints("run"):
            print(found.step, found.nbytes, found.problem or "complete")
    """
    directory = disk.path_of_user(directory, "directory")
    listed = []
    for step in disk.list_steps(directory):
        path, nbytes, problem = disk.path_of(directory, step), 0, ""
        try:
            nbytes = disk.sized_commit(path).nbytes
        except (LoadError, OSError) as error:
            problem = str(error)
        listed.append(CheckpointInfo(step, path, nbytes, problem))
    return sorted(listed, key=lambda found: bool(found.problem))


def verify_checkpoint(path: str | Path, *, progress: bool | None = None) -> CheckpointInfo:
    """Compare the files of one checkpoint with their sizes and checksums, as :func:`load_checkpoint` does.

    Needs neither a model nor a process group.

    Args:
        path: directory of the checkpoint, ``list_checkpoints("run")[0].path`` for instance.
        progress: show a progress bar, if tqdm is installed. By default on a terminal only, after two seconds.

    Returns:
        The checkpoint's description, without a problem.

    Raises:
        LoadError: (a RuntimeError) a file is missing or was altered; the text names it.
        OptionTypeError: ``path`` is no path.
    """
    from fsdp_flat.checkpoint.dcp_files import SafeReader

    path = disk.path_of_user(path, "path")
    found = disk.sized_commit(path)
    disk.check_sums(path, found.files, progress_bar("Verifying", asked=progress, here=True))
    SafeReader(path).read_metadata()
    return CheckpointInfo(found.step, path, found.nbytes, "")


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    progress: bool | None = None,
) -> LoadedCheckpoint | None:
    """Load the newest complete checkpoint of :func:`save_checkpoint`, at any number of ranks, wrapping and strategy.

    Sizes and checksums of all files are compared first; an incomplete checkpoint is skipped with a warning that names
    the file. Model and optimizer are unchanged unless everything fits.

    Every rank must call this, between steps.

    Args:
        directory: the directory given to :func:`save_checkpoint`, or that of one checkpoint (``step-00000100``), under
            any name.
        model: a wrapped model, or a module that holds wrappers.
        optim: its optimizer; with None the saved optimizer states are left out, which rank 0 logs.
        step: load this checkpoint, and raise if it is incomplete.
        progress: show a progress bar of the comparison on rank 0, if tqdm is installed. By default on a terminal only,
            after two seconds.

    Returns:
        The loaded checkpoint; None if ``directory`` does not exist or is empty, which is logged.

    Raises:
        LoadError: (a RuntimeError) no checkpoint is complete, none has the number ``step``, ``directory`` is a file or
            holds only other files, or names or shapes do not fit the model; on every rank.
        OptionTypeError: an argument of the wrong type.
        PhaseError: called in the middle of a step.

    Example::

        found = load_checkpoint("run", model, optimizer)
        start = 0 if found is None else found.step + 1
        for step in range(start, num_steps):
            ...
            save_checkpoint("run", model, optimizer, step=step)
    """
    from fsdp_flat.checkpoint.dcp_files import SafeReader, load_files

    together = Consensus.of(model, LOADING)
    together.barrier("load_checkpoint")
    names: list[str] = []
    cut_off: list[str] = []
    with together.propagate_errors():
        directory = disk.path_of_user(directory, "directory")
        _wait_for_background(model, directory)
        for unit in units_of(model):
            unit.check_idle("load_checkpoint")
        disk.check_step(step)
        if directory.exists() and not directory.is_dir():
            raise LoadError(f"{directory} is a file; pass the directory that was given to save_checkpoint.")
        if together.rank == 0:
            names, cut_off = disk.candidates(directory, step)
    names, cut_off = json.loads(together.texts(json.dumps([names, cut_off]))[0])
    skipped = [f"{name}: it was never finished" for name in cut_off]
    bar = progress_bar("Verifying", asked=progress, here=together.rank == 0)
    for name in names:
        path = directory / name
        # Each rank reads some files; the first rank's problem counts.
        found, problem = disk.verified(path, together.rank, together.size, bar)
        problems = together.texts(problem)
        if not any(problems):
            break
        skipped.append(next(filter(None, problems)))
    else:
        if not names and not skipped:
            return None
        raise LoadError(f"No complete checkpoint in {directory}: {'; '.join(skipped)}.")
    if skipped and together.rank == 0:
        warn_user(f"Loading {path.name}; passed over: {'; '.join(skipped)}.")
    assert found is not None
    parts = ("model.", "plain", "extra.") if optim is None else ()
    extra = load_files(SafeReader(path, parts), model, optim, together=together)
    return LoadedCheckpoint(found.step, path, extra, tuple(skipped))
