"""Saves and loads checkpoints of a training run that survive a crash at any moment, at any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.checkpoint import directory as disk
from fsdp_flat.checkpoint.consensus import LOADING, SAVING, Consensus, consensus_of
from fsdp_flat.checkpoint.contents import (
    CheckpointValues,
    check_readable,
    model_template,
    optim_state_of,
    optim_template,
    packed,
    saved_values,
)
from fsdp_flat.checkpoint.progress import ProgressBar, progress_bar
from fsdp_flat.comm import digest_of
from fsdp_flat.errors import FsdpFlatError, LoadError, OptionError
from fsdp_flat.runtime import BackgroundWork, check_idle, units_of
from fsdp_flat.state import OptimContents, ParamIndex, contents_of, load_optim_state
from fsdp_flat.user_warnings import warn_user

# The module dcp_files is imported where it is used, because the import of torch.distributed.checkpoint is slow.


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


class CheckpointSave:
    """Tracks a save, finished or running in the background.

    Attributes:
        step: the checkpoint's number.
        path: its directory once it is complete.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self._work: Future[None] | None = None
        self._is_reported = False

    def _run(self, work: Callable[[], None]) -> None:
        # The thread is joined at exit: a script that ends must not interrupt its last checkpoint.
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"fsdp_flat checkpoint {self.step}")
        self._work = executor.submit(work)
        executor.shutdown(wait=False)

    @property
    def done(self) -> bool:
        """True once the save has succeeded or failed."""
        return self._work is None or self._work.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and return its directory.

        Raises:
            Exception: the error of the save, on this rank or on another one (PeerFailureError).
        """
        self._is_reported = True
        if self._work is not None:
            self._work.result()
        return self.path

    def _finish(self) -> str:
        """Wait until the save is over; return its error if it has one that :meth:`wait` has not raised."""
        error = None if self._work is None else self._work.exception()
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
    progress: bool = False,
) -> CheckpointSave:
    """Save model, optimizer and extra values as the newest checkpoint in ``directory``.

    Each rank writes its own shards; nothing is all-gathered. The files have the format of
    ``torch.distributed.checkpoint``, so ``dcp.load`` reads them too, into any sharding, under ``"model"`` and
    ``"optim"``. A checkpoint is valid only once all of it is on disk with sizes and checksums; a crash at any moment
    leaves the earlier ones intact.

    Every rank must call this, between steps.

    Args:
        directory: directory of all checkpoints of the run, on a file system shared by all ranks.
        model: a wrapped model, or a module that holds wrappers.
        optim: its optimizer.
        extra: other values of this rank to save (step counts, random states, a learning-rate scheduler's state dict):
            tensors, numbers, strings, None, and lists, tuples and dicts of them.
        step: the checkpoint's number; by default one more than the highest in the directory.
        keep_last: number of checkpoints to keep; older ones are removed once this one is complete.
        background: copy the shards to the CPU and return; a thread writes them while training continues. The next
            save waits for it. Call ``wait()`` on the result to find out whether it succeeded.
        progress: show a progress bar on rank 0 (needs tqdm).

    Returns:
        The save; :meth:`CheckpointSave.wait` returns its directory, or raises the error of the background save.

    Raises:
        OptionError: bad arguments, an optimizer of another model, or values that cannot be read back safely: in
            ``extra``, of the optimizer, or from a module's ``get_extra_state``.
        PeerFailureError: another rank failed; then nothing is saved.
        PhaseError: called in the middle of a step.
    """
    directory, together = Path(directory), consensus_of(model, SAVING)
    _wait_for_last(model)
    together.barrier("save_checkpoint")
    start = _Start(model, together, directory, keep_last=keep_last, has_optim=optim is not None)
    values = start.collect(optim, extra, step=step, copy=background, progress=progress)
    save = CheckpointSave(start.step, disk.path_of(directory, start.step))
    if not background:
        _write(start, values, together)
        return save
    work = _background_of(model, together)
    # A gloo group communicates CPU tensors.
    save._run(partial(_write, start, values, Consensus(work.group, SAVING, torch.device("cpu"))))
    work.finish = save._finish
    return save


def _check_arguments(step: int | None, keep_last: int) -> None:
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise OptionError(f"step must be a number of at least 0, or None; got {step!r}.")
    if keep_last < 1:
        raise OptionError(f"keep_last must be at least 1; got {keep_last!r}.")


def _wait_for_last(model: nn.Module) -> None:
    """Wait for the last background save of ``model``; warn if it failed and ``wait()`` has not raised its error."""
    units = units_of(model)
    background = units[0].background if units else None
    text = "" if background is None else background.finish()
    if text:
        warn_user(text, stacklevel=3)


def _background_of(model: nn.Module, together: Consensus) -> BackgroundWork:
    unit = units_of(model)[0]
    if unit.background is None:
        group = dist.new_group(together.ranks, backend="gloo", use_local_synchronization=True)
        assert group is not None
        unit.background = BackgroundWork(group)
    return unit.background


class _Start:
    """Collects this rank's values, and compares all ranks in one collective before anything is written.

    It is the ``Peers`` of optimizer states.

    Args:
        model: the model.
        together: its ranks.
        directory: directory of all checkpoints.
        keep_last: number of checkpoints to keep.
        has_optim: an optimizer is saved.

    Attributes:
        directory, keep_last: the arguments.
        bar: shows the progress of a number of bytes.
        ranks: the global ranks.
        step: the checkpoint's number, as rank 0 has chosen it.
        error: the exception that stopped this rank. One from after the comparison is raised like those of the writing,
            at which ranks meet again.
        file_error: the exception of rank 0 that the file system raised; it is raised like those of the writing.
        is_prepared: rank 0 has no such exception.
    """

    bar: ProgressBar

    def __init__(
        self, model: nn.Module, together: Consensus, directory: Path, *, keep_last: int, has_optim: bool
    ) -> None:
        self.directory = directory
        self.keep_last = keep_last
        self.ranks = together.ranks
        self.step = 0
        self.error: Exception | None = None
        self.file_error: Exception | None = None
        self.is_prepared = False
        self._unmanaged: list[str] = []
        self._is_alike = True
        self._is_compared = False
        self._model = model
        self._index = ParamIndex(model)
        self._together = together
        handlers = sorted({name for unit in units_of(model) for name in unit.optim_state_handlers})
        self._has_handlers = bool(handlers)
        self._same = [*(f"a handler of {name!r}" for name in handlers), f"{'an' if has_optim else 'no'} optimizer"]

    def collect(
        self, optim: torch.optim.Optimizer | None, extra: Any, *, step: int | None, copy: bool, progress: bool
    ) -> CheckpointValues:
        """Return the values that this rank writes; raise on every rank if any cannot save.

        An exception on one rank alone after the comparison is kept in ``error``.
        """
        values = CheckpointValues()
        contents: OptimContents | None = None
        try:
            _check_arguments(step, self.keep_last)
            self.bar = progress_bar("Saving", asked=progress, here=self._together.rank == 0)
            values.add_model(self._model, copy=copy)
            values.tensors["extra"] = {str(self._together.rank): packed(extra, "extra")}
            if optim is not None:
                contents = contents_of(optim)
                check_readable(contents)
            if self._together.rank == 0:
                self._prepare(step)
            self._unmanaged = values.unmanaged_names(self._index)
        except Exception as error:
            self.error = error
        self._compare(values, contents, copy=copy)
        if self.error is None:
            try:
                values.keep_share(self._index, self._together.rank, is_alike=self._is_alike)
            except Exception as error:
                self.error = error
        return values

    def _prepare(self, step: int | None) -> None:
        """Choose the number, and remove files of an earlier attempt."""
        self.step = 1 + max(disk.list_steps(self.directory), default=-1) if step is None else step
        try:
            disk.remove_attempt(self.directory, self.step)
            self.is_prepared = True
        except OSError as error:
            self.file_error = error

    def _compare(self, values: CheckpointValues, contents: OptimContents | None, *, copy: bool) -> None:
        """Compare all ranks, and add the states of the optimizer."""
        if contents is None or self.error is not None:
            # As many as save_optim_state exchanges: a digest of the groups, and one for each parameter.
            self.integers([0] * (1 + len(self._index.params)), None)
            return
        error: Exception | None = None
        try:
            values.add_optim(self._index, contents, self, copy=copy)
        except Exception as raised:
            error = raised
        # Once ranks have compared, only merges and transfers may fail on one rank alone.
        if self._is_compared and (contents.owners or self._has_handlers):
            self._together.fail(error)
        elif error is not None and (not self._is_compared or isinstance(error, FsdpFlatError)):
            # The comparison raises on every rank.
            raise error
        self.error = error

    def integers(self, values: list[int], error: Exception | None) -> list[list[int]]:
        """All-gather integers, with rank 0's number; raise on every rank if any has an error."""
        own = [self.step, int(self.is_prepared), digest_of(json.dumps(self._unmanaged).encode()), *values]
        rows = self._together.integers(own, self.error or error, self._same)
        self._is_compared = True
        self.step, self.is_prepared = rows[0][0], bool(rows[0][1])
        self._is_alike = len({row[2] for row in rows}) == 1
        return [row[3:] for row in rows]

    def texts(self, text: str) -> list[str]:
        """All-gather texts."""
        return self._together.texts(text)


def _write(start: _Start, values: CheckpointValues, together: Consensus) -> None:
    """Write this rank's files, and on rank 0 everything else once all ranks have written theirs."""
    from fsdp_flat.checkpoint.dcp_files import write_files, write_metadata

    directory, writing = start.directory, disk.writing_path(start.directory, start.step)
    text, error = "", start.error or start.file_error
    with start.bar(values.nbytes) as update:
        try:
            if error is None and start.is_prepared:
                written = write_files(values.tensors, writing, together.rank, update)
                text = json.dumps([written, _records(writing, together.rank), values.rows_text])
        except Exception as raised:
            error = raised
        texts = together.gather_texts(text)
        try:
            if texts and all(texts):
                each_written, each_records, each_rows = zip(*map(json.loads, texts), strict=True)
                # One more file, as if of a further rank.
                last = write_files({"plain": values.plain_of(each_rows)}, writing, together.size, update)
                write_metadata([*each_written, last], writing)
                records = [record for records in each_records for record in records] + _records(writing, together.size)
                metadata = disk.record_of(writing / ".metadata")
                disk.commit(directory, start.step, [*(disk.FileRecord(*record) for record in records), metadata])
                disk.prune(directory, start.keep_last)
        except Exception as raised:
            error = raised
        together.fail(error)


def _records(writing: Path, rank: int) -> list[tuple[str, int, int]]:
    return [astuple(disk.record_of(path)) for path in sorted(writing.glob(f"__{rank}_*.distcp"))]


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
    _wait_for_last(model)
    together = consensus_of(model, LOADING)
    together.barrier("load_checkpoint")
    steps: list[int] = [] if step is None else [step]
    cut_off: list[str] = []
    with together.propagate_errors():
        for unit in units_of(model):
            check_idle(unit, "load_checkpoint")
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
        plain, extra = saved_values(reader, found, together)
        template: dict[str, Any] = {}
        template["model"], own_names = model_template(model, reader)
        if optim is not None:
            contents = contents_of(optim)
            template["optim"], deferred = optim_template(model, contents, reader, plain)
        read_into(template, reader)
        if optim is not None:
            state = optim_state_of(plain, [template["optim"]["state"], deferred])
            loaded = load_optim_state(
                model, contents.params, state, own_groups=optim.param_groups, owners=contents.owners
            )
    if optim is not None:
        # The optimizer loads first, because it checks its groups before it changes anything; the model is checked.
        with together.propagate_errors():
            optim.load_state_dict(loaded)
    values = {**template["model"], **plain["model"]}
    model.load_state_dict({own_names.get(name, name): value for name, value in values.items()})
    return extra
