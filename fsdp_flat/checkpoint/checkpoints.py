"""Saves and loads checkpoints of a training run that survive a crash at any moment, at any number of ranks."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.api import StateDictType
from fsdp_flat.checkpoint import directory as disk
from fsdp_flat.checkpoint.consensus import LOADING, SAVING, Consensus, consensus_of
from fsdp_flat.checkpoint.contents import (
    NonTensorState,
    add_optim,
    collected,
    model_template,
    name_of,
    optim_state_of,
    packed,
    wanted_of_optim,
)
from fsdp_flat.checkpoint.progress import progress_bar
from fsdp_flat.comm import global_ranks
from fsdp_flat.errors import LoadError, OptionError
from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_flat.runtime import check_idle, units_of
from fsdp_flat.state import contents_of, load_optim_state, template_states

# Background saves use a gloo group, which communicates CPU tensors.
_CPU = torch.device("cpu")

__all__ = ["CheckpointSave", "LoadedCheckpoint", "load_checkpoint", "save_checkpoint"]


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
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_reported = False

    def _begin(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # Not a daemon: a script that ends must not interrupt its last checkpoint.
        self._thread = threading.Thread(target=run, name=f"fsdp_flat checkpoint {self.step}")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    @property
    def done(self) -> bool:
        """True once the save has succeeded or failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and return its directory.

        Raises:
            Exception: the error of the save, on this rank or on another one (PeerFailureError).
        """
        self._join()
        self._is_reported = True
        if self._error is not None:
            raise self._error
        return self.path


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
        OptionError: bad arguments, an ``extra`` that cannot be read back safely, or an optimizer of another model.
        PeerFailureError: another rank failed; then nothing is saved.
        PhaseError: called in the middle of a step.
    """
    directory = Path(directory)
    together = consensus_of(model, SAVING)
    _wait_for_the_last(model)
    together.barrier("save_checkpoint")
    handlers = sorted({name for unit in units_of(model) for name in unit.optim_state_handlers})
    with together.propagate_errors(same=[f"a handler of {name!r}" for name in handlers]):
        _check_arguments(step, keep_last)
        bar = progress_bar("Saving", 0, asked=progress, here=together.rank == 0)
        state, plain = collected(model, copy=background)
        contents = None if optim is None else contents_of(optim)
    with together.propagate_errors():
        if contents is not None:
            add_optim(state, plain, model, contents, copy=background)
        blob = packed({"extra": extra, **plain})
    with together.propagate_errors():
        number = _next_step(directory) if step is None and together.rank == 0 else step
    step = int(together.texts(str(number))[0])
    saving = CheckpointSave(step, disk.path_of(directory, step))
    if not background:
        with bar:
            _write(directory, step, state, blob, keep_last, together, bar)
        return saving
    background_saver = _saver_of(model, together)

    def work() -> None:
        with bar:
            _write(directory, step, state, blob, keep_last, Consensus(background_saver.group, SAVING, _CPU), bar)

    saving._begin(work)
    background_saver.last = saving
    return saving


class _Saver:
    """Holds the background saves of one model and their process group, separate from the collectives of training.

    Attributes:
        group: created once, because a new group per save would collide with keys of the previous one in the store.
        last: the newest save.
    """

    def __init__(self, ranks: list[int]) -> None:
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert group is not None
        self.group = group
        self.last: CheckpointSave | None = None


def _saver_of(model: nn.Module, together: Consensus) -> _Saver:
    unit = units_of(model)[0]
    if not isinstance(unit.saver, _Saver):
        unit.saver = _Saver(global_ranks(together.group))
    return unit.saver


def _wait_for_the_last(model: nn.Module) -> None:
    """Wait for the last background save of ``model``; warn if it failed and ``wait()`` has not raised its error."""
    units = units_of(model)
    saver = units[0].saver if units else None
    if isinstance(saver, _Saver) and saver.last is not None:
        saver.last._join()
        if saver.last._error is not None and not saver.last._is_reported:
            saver.last._is_reported = True
            warnings.warn(
                f"The save of {saver.last.path} in the background failed: {saver.last._error!r}.", stacklevel=3
            )


def _check_arguments(step: int | None, keep_last: int) -> None:
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise OptionError(f"step must be a number of at least 0, or None; got {step!r}.")
    if keep_last < 1:
        raise OptionError(f"keep_last must be at least 1; got {keep_last!r}.")


def _next_step(directory: Path) -> int:
    return max(disk.list_steps(directory), default=-1) + 1


def _write(
    directory: Path,
    step: int,
    state: dict[str, Any],
    blob: bytes,
    keep_last: int,
    together: Consensus,
    bar: Any,
) -> None:
    writing = disk.writing_path(directory, step)
    with together.propagate_errors():
        if together.rank == 0:
            disk.begin(directory, step)
    with together.propagate_errors():
        own = [_put(writing / name_of(together.rank), blob)]
    # Imported here, because the import is slow and only saving needs it.
    from fsdp_flat.checkpoint.tensor_files import write_tensors

    with _watched(writing, bar):
        write_tensors(state, writing, together)
    with together.propagate_errors():
        own += [disk.flush(path) for path in sorted(writing.glob(f"__{together.rank}_*.distcp"))]
        if together.rank == 0:
            own.append(disk.flush(writing / ".metadata"))
    everyone = together.texts(json.dumps([(record.name, record.size, record.crc) for record in own]))
    with together.propagate_errors():
        if together.rank == 0:
            records = [disk.FileRecord(*row) for text in everyone for row in json.loads(text)]
            disk.commit(directory, step, records)
            disk.prune(directory, keep_last)


def _put(path: Path, data: bytes) -> disk.FileRecord:
    path.write_bytes(data)
    return disk.flush(path)


@contextmanager
def _watched(writing: Path, bar: Any) -> Iterator[None]:
    """Advance the progress bar by the bytes that appear on disk."""
    over = threading.Event()

    def watch() -> None:
        seen = 0
        while not over.wait(0.2):
            size = sum(path.stat().st_size for path in writing.glob("*.distcp"))
            bar.update(size - seen)
            seen = size

    thread = threading.Thread(target=watch, daemon=True)
    if bar.is_shown:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if bar.is_shown:
            thread.join()


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
    _wait_for_the_last(model)
    together = consensus_of(model, LOADING)
    together.barrier("load_checkpoint")
    steps: list[int] = []
    cut_off: list[str] = []
    with together.propagate_errors():
        for unit in units_of(model):
            check_idle(unit, "load_checkpoint")
        if together.rank == 0 and step is None:
            disk.recover(directory)
            steps, cut_off = disk.list_steps(directory), disk.unfinished(directory)
        elif step is not None:
            steps = [step]
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
        raise LoadError(f"No whole checkpoint in {directory}: {'; '.join(skipped)}.")
    if skipped and together.rank == 0:
        warnings.warn(f"Loading {found.path.name}; passed over: {'; '.join(skipped)}.", stacklevel=2)
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
    from fsdp_flat.checkpoint.metadata import SafeReader
    from fsdp_flat.checkpoint.tensor_files import read_tensors

    reader = SafeReader(found.path)

    def read(fqn: str, name: str, into: torch.Tensor) -> torch.Tensor:
        read_tensors({"optim": {"state": {fqn: {name: into}}}}, reader)
        return into

    with together.propagate_errors():
        metadata = reader.read_metadata().state_dict_metadata
        plain = NonTensorState(found)
        copies, own_names = model_template(model, metadata, found.path)
        template: dict[str, Any] = {"model": copies}
        deferred: dict[str, dict[str, Any]] = {}
        if optim is not None:
            wanted = wanted_of_optim(metadata, plain, found.path)
            blank, deferred = template_states(model, wanted, read, owners=contents_of(optim).owners)
            template["optim"] = {"state": blank}
    with together.propagate_errors():
        read_tensors(template, reader)
    with together.propagate_errors():
        extra = plain.of(together.rank if plain.num_ranks == together.size else 0)["extra"]
    if optim is not None:
        # Everything is checked, on all ranks, before anything is changed.
        with together.propagate_errors():
            contents = contents_of(optim)
            state = optim_state_of([template["optim"]["state"], deferred], plain)
        with together.propagate_errors():
            loaded = load_optim_state(
                model, contents.params, state, own_groups=optim.param_groups, owners=contents.owners
            )
        # The optimizer loads first, because it checks its groups before it changes anything; the model is checked.
        with together.propagate_errors():
            optim.load_state_dict(loaded)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        values = {**template["model"], **plain.of(0)["model"]}
        model.load_state_dict({own_names.get(name, name): value for name, value in values.items()})
    return extra
