"""Checkpoints of a training run that survive a crash at any moment, at any number of ranks."""

from __future__ import annotations

import io
import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.api import ShardedStateDictConfig, StateDictType
from fsdp_flat.checkpoint import directory as disk
from fsdp_flat.checkpoint.progress import progress_bar
from fsdp_flat.checkpoint.together import LOADING, SAVING, Together, all_of
from fsdp_flat.errors import LoadError, OptionError
from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_flat.optim_state import OptimContents, blank_states, contents_of, load_optim_state, save_optim_state
from fsdp_flat.runtime import check_idle, units_of
from fsdp_flat.state_dict import BoxedTensor

_OPTIM_PREFIX = "optim.state."
# Saves in the background have a gloo group.
_CPU = torch.device("cpu")

__all__ = ["CheckpointSave", "LoadedCheckpoint", "load_checkpoint", "save_checkpoint"]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """What :func:`load_checkpoint` found.

    Attributes:
        step: the checkpoint's number.
        path: its directory.
        extra: what this rank had saved as ``extra``; rank 0's where the number of ranks is another one.
        skipped: what was passed over in the directory (later saves that are not whole, saves that were cut off), and
            why.
    """

    step: int
    path: Path
    extra: Any
    skipped: tuple[str, ...]


class CheckpointSave:
    """A save, finished or going on in the background.

    Attributes:
        step: the checkpoint's number.
        path: where it is once it is whole.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_told = False

    def _begin(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # Not a daemon: a script that ends must not cut its last checkpoint off.
        self._thread = threading.Thread(target=run, name=f"fsdp_flat checkpoint {self.step}")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    @property
    def done(self) -> bool:
        """Whether the save is over, for good or for bad."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is whole; its directory.

        Raises:
            Exception: what the save failed with, on this rank or on another one (PeerFailureError).
        """
        self._join()
        self._is_told = True
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
    """Save model, optimizer and more as the newest checkpoint in ``directory``.

    Each rank writes its own shards as they are; nothing is gathered. The files are those of
    ``torch.distributed.checkpoint``, so ``dcp.load`` reads them too, into any sharding, under ``"model"`` and
    ``"optim"``. A checkpoint counts only once all of it is on disk with sizes and checksums; a crash at any moment
    leaves the earlier ones as they are.

    Every rank must call this, between steps.

    Args:
        directory: of all checkpoints of the run, on a file system that every rank sees.
        model: a wrapped model, or a module that holds wrappers.
        optim: its optimizer.
        extra: what else this rank wants back (step counts, random states, a learning-rate scheduler's state dict):
            tensors, numbers, strings, None, and lists, tuples and dicts of them.
        step: the checkpoint's number; by default one more than the newest there.
        keep_last: how many checkpoints are kept; older ones are removed after this one is whole.
        background: copy the shards to the CPU and return; a thread does the rest, and training may go on. The next
            save waits for it. Call ``wait()`` on the result to learn whether it went well.
        progress: show a progress bar on rank 0 (needs tqdm).

    Returns:
        The save; :meth:`CheckpointSave.wait` gives its directory, or raises what went wrong in the background.

    Raises:
        OptionError: bad arguments, an ``extra`` that cannot be read back safely, or an optimizer of another model.
        PeerFailureError: another rank failed; nothing counts as saved then.
        PhaseError: in the middle of a step.
    """
    directory = Path(directory)
    together = all_of(model, SAVING)
    _wait_for_the_last(model)
    together.meet("save_checkpoint")
    handlers = sorted({name for unit in units_of(model) for name in unit.optim_state_handlers})
    with together.failing(same=[f"a handler of {name!r}" for name in handlers]):
        _check_arguments(step, keep_last)
        bar = progress_bar("Saving", 0, asked=progress, here=together.rank == 0)
        state, plain = _collected(model, copy=background)
        contents = None if optim is None else contents_of(optim)
    with together.failing():
        if contents is not None:
            _add_optim(state, plain, model, contents, copy=background)
        blob = _packed({"extra": extra, **plain})
    with together.failing():
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
            _write(directory, step, state, blob, keep_last, Together(background_saver.group, SAVING, _CPU), bar)

    saving._begin(work)
    background_saver.last = saving
    return saving


class _Saver:
    """Saves of one model in the background: the group for their collectives, since those of training go on meanwhile.

    Attributes:
        group: made once. A new one for each save would meet the keys of the last one in the store.
        last: the newest save.
    """

    def __init__(self, ranks: list[int]) -> None:
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert group is not None
        self.group = group
        self.last: CheckpointSave | None = None


def _saver_of(model: nn.Module, together: Together) -> _Saver:
    unit = units_of(model)[0]
    if not isinstance(unit.saver, _Saver):
        unit.saver = _Saver(dist.get_process_group_ranks(together.group))
    return unit.saver


def _wait_for_the_last(model: nn.Module) -> None:
    """Saves and loads of one model come one after another; that the last save failed is said, if nobody has asked."""
    units = units_of(model)
    saver = units[0].saver if units else None
    if isinstance(saver, _Saver) and saver.last is not None:
        saver.last._join()
        if saver.last._error is not None and not saver.last._is_told:
            saver.last._is_told = True
            warnings.warn(
                f"The save of {saver.last.path} in the background failed: {saver.last._error!r}.", stacklevel=3
            )


def _check_arguments(step: int | None, keep_last: int) -> None:
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise OptionError(f"step must be a number of at least 0, or None; got {step!r}.")
    if keep_last < 1:
        raise OptionError(f"keep_last must be at least 1; got {keep_last!r}.")


def _next_step(directory: Path) -> int:
    return max(disk.listed(directory), default=-1) + 1


def _name_of(rank: int) -> str:
    """The file of what a rank saves besides tensors that are sharded."""
    return f"rank-{rank:05d}.pt"


def _packed(value: Any) -> bytes:
    """``value`` as ``torch.save`` writes it, once it is certain that it can be read back with ``weights_only``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise OptionError(
            "extra (or the optimizer's settings) holds something that torch.load(weights_only=True) refuses to read "
            f"back, for safety: {str(error).splitlines()[0]}. Keep to tensors, numbers, strings and containers of them."
        ) from error
    return buffer.getvalue()


def _collected(model: nn.Module, *, copy: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's tensors for the files, in boxes, and the plain values beside them."""
    for unit in units_of(model):
        check_idle(unit, "save_checkpoint")
    values = _boxed_model(model, copy=copy)
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    plain: dict[str, Any] = {"model": {name: value for name, value in values.items() if name not in tensors}}
    if copy:
        # Boxes are copies already; buffers are the live ones.
        tensors = {name: _copied(value) for name, value in tensors.items()}
    return {"model": tensors}, plain


def _add_optim(
    state: dict[str, Any], plain: dict[str, Any], model: nn.Module, contents: OptimContents, *, copy: bool
) -> None:
    """Add the optimizer's. Every rank must call this: states that have a handler are made whole, each on one rank."""
    found = save_optim_state(
        model, contents, whole=False, rank0_only=False, offload_to_cpu=copy, boxes=True, handled_once=True
    )
    rows = found["state"]
    # Merged states are on one rank each, so they are no plain values whatever their shape.
    merged = {name for unit in units_of(model) for name in unit.optim_state_handlers}
    arrays = {
        fqn: {k: v for k, v in row.items() if _is_array(v) or (k in merged and isinstance(v, torch.Tensor))}
        for fqn, row in rows.items()
    }
    state["optim"] = {"state": arrays}
    plain["optim"] = {
        "state": {fqn: {k: v for k, v in row.items() if k not in arrays[fqn]} for fqn, row in rows.items()},
        "param_groups": found["param_groups"],
    }


def _copied(value: torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, BoxedTensor) else value.detach().to("cpu", copy=True)


def _is_array(value: Any) -> bool:
    # Boxes may be of a parameter of shape ().
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or isinstance(value, BoxedTensor))


def _boxed_model(model: nn.Module, *, copy: bool) -> dict[str, Any]:
    config = ShardedStateDictConfig(boxes=True, offload_to_cpu=copy)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        return model.state_dict()


def _write(
    directory: Path,
    step: int,
    state: dict[str, Any],
    blob: bytes,
    keep_last: int,
    together: Together,
    bar: Any,
) -> None:
    writing = disk.writing_path(directory, step)
    with together.failing():
        if together.rank == 0:
            disk.begin(directory, step)
    with together.failing():
        own = [_put(writing / _name_of(together.rank), blob)]
    # Imported here, since it takes long and only savers need it.
    from fsdp_flat.checkpoint.tensor_files import write_tensors

    with _watched(writing, bar):
        write_tensors(state, writing, together)
    with together.failing():
        own += [disk.flush(path) for path in sorted(writing.glob(f"__{together.rank}_*.distcp"))]
        if together.rank == 0:
            own.append(disk.flush(writing / ".metadata"))
    everyone = together.texts(json.dumps([(record.name, record.size, record.crc) for record in own]))
    with together.failing():
        if together.rank == 0:
            records = [disk.FileRecord(*row) for text in everyone for row in json.loads(text)]
            disk.commit(directory, step, records)
            disk.prune(directory, keep_last)


def _put(path: Path, data: bytes) -> disk.FileRecord:
    path.write_bytes(data)
    return disk.flush(path)


@contextmanager
def _watched(writing: Path, bar: Any) -> Iterator[None]:
    """Move the bar by the bytes that appear on disk."""
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
    """Load the newest whole checkpoint of :func:`save_checkpoint`, at any number of ranks, wrapping and strategy.

    Sizes and checksums of all files are compared first; a checkpoint that is not whole is passed over with a warning
    that names the file. Nothing of model and optimizer is changed unless everything fits.

    Every rank must call this, between steps.

    Args:
        directory: the one given to :func:`save_checkpoint`.
        model: a wrapped model, or a module that holds wrappers.
        optim: its optimizer; None leaves the saved optimizer state alone.
        step: load this checkpoint, and raise if it is not whole.

    Returns:
        What was found; None if there is no checkpoint at all.

    Raises:
        LoadError: (a RuntimeError) no checkpoint is whole, or names or shapes do not fit the model; on every rank.
        PhaseError: in the middle of a step.
    """
    directory = Path(directory)
    _wait_for_the_last(model)
    together = all_of(model, LOADING)
    together.meet("load_checkpoint")
    steps: list[int] = []
    cut_off: list[str] = []
    with together.failing():
        for unit in units_of(model):
            check_idle(unit, "load_checkpoint")
        if together.rank == 0 and step is None:
            disk.recover(directory)
            steps, cut_off = disk.listed(directory), disk.unfinished(directory)
        elif step is not None:
            steps = [step]
    steps, cut_off = json.loads(together.texts(json.dumps([steps, cut_off]))[0])
    skipped = [f"{name}: it was never finished" for name in cut_off]
    for candidate in steps:
        found, problem = _whole(directory, candidate, together)
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


def _whole(directory: Path, step: int, together: Together) -> tuple[disk.Commit, str]:
    """The record of a checkpoint, and what is wrong with it on any rank; each rank reads a share of the files."""
    found = disk.Commit(disk.path_of(directory, step), step, 0, ())
    try:
        found = disk.read_commit(directory, step)
        problem = disk.damage(found, together.rank, together.size)
    except (LoadError, OSError) as error:
        problem = str(error)
    return found, next((text for text in together.texts(problem) if text), "")


def _load(found: disk.Commit, model: nn.Module, optim: torch.optim.Optimizer | None, together: Together) -> Any:
    from fsdp_flat.checkpoint.metadata import SafeReader
    from fsdp_flat.checkpoint.tensor_files import read_tensors

    reader = SafeReader(found.path)

    def read(fqn: str, name: str, into: torch.Tensor) -> torch.Tensor:
        read_tensors({"optim": {"state": {fqn: {name: into}}}}, reader)
        return into

    with together.failing():
        metadata = reader.read_metadata().state_dict_metadata
        plain = _Plain(found)
        template: dict[str, Any] = {"model": _model_template(model, metadata, found.path)}
        deferred: dict[str, dict[str, Any]] = {}
        if optim is not None:
            wanted = _wanted_of_optim(metadata, plain, found.path)
            blank, deferred = blank_states(model, wanted, read)
            template["optim"] = {"state": blank}
    with together.failing():
        read_tensors(template, reader)
    with together.failing():
        extra = plain.of(together.rank if plain.num_ranks == together.size else 0)["extra"]
    if optim is not None:
        # Checks all of it, on all ranks, before anything is changed.
        with together.failing():
            params = contents_of(optim).params
            state = _optim_state([template["optim"]["state"], deferred], plain)
        with together.failing():
            loaded = load_optim_state(model, params, state)
        # First, since it compares groups before it changes anything; that the model fits is known.
        with together.failing():
            optim.load_state_dict(loaded)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict({**template["model"], **plain.of(0)["model"]})
    return extra


class _Plain:
    """What ranks saved besides sharded tensors, read when it is asked for."""

    def __init__(self, found: disk.Commit) -> None:
        self._path = found.path
        self.num_ranks = sum(record.name.startswith("rank-") for record in found.files)
        self._read: dict[int, dict[str, Any]] = {}

    def of(self, rank: int) -> dict[str, Any]:
        """What ``rank`` saved."""
        if rank not in self._read:
            path = self._path / _name_of(rank)
            self._read[rank] = torch.load(path, map_location="cpu", weights_only=True)
        return self._read[rank]

    def optim_row(self, fqn: str) -> dict[str, Any]:
        """The plain states of a parameter; a rank without a piece of it may have had none."""
        ranks = (self.of(rank)["optim"]["state"] for rank in range(self.num_ranks))
        return next((state[fqn] for state in ranks if fqn in state), {})


def _model_template(model: nn.Module, metadata: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Copies of what the model has, for the files to be read into; checked against the files' names and shapes."""
    values = _boxed_model(model, copy=True)
    template = {name: _copied(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
    saved = {name.removeprefix("model."): entry for name, entry in metadata.items() if name.startswith("model.")}
    problems = [f"{name!r} is missing there" for name in template if name not in saved]
    problems += [f"{name!r} is not in the model" for name in saved if name not in template]
    problems += [
        f"{name!r} has shape {tuple(saved[name].size)} there and {tuple(value.shape)} in the model"
        for name, value in template.items()
        if name in saved and tuple(saved[name].size) != tuple(value.shape)
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise LoadError(f"{path} does not fit the model: {'; '.join(problems[:5])}{more}. Nothing was loaded.")
    return template


def _wanted_of_optim(
    metadata: Mapping[str, Any], plain: _Plain, path: Path
) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """By parameter and state, shape and dtype of what was saved of the optimizer."""
    if "optim" not in plain.of(0):
        raise LoadError(f"{path} was saved without an optimizer; load it with optim=None. Nothing was loaded.")
    wanted: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for key, entry in metadata.items():
        if key.startswith(_OPTIM_PREFIX):
            fqn, _, name = key.removeprefix(_OPTIM_PREFIX).rpartition(".")
            wanted.setdefault(fqn, {})[name] = (tuple(entry.size), entry.properties.dtype)
    return wanted


def _optim_state(given: Sequence[Mapping[str, Mapping[str, Any]]], plain: _Plain) -> dict[str, Any]:
    """The optimizer's state under names: what ranks saved beside tensors, and tensors."""
    names = dict.fromkeys([*plain.of(0)["optim"]["state"], *(fqn for part in given for fqn in part)])
    state: dict[str, dict[str, Any]] = {fqn: dict(plain.optim_row(fqn)) for fqn in names}
    for part in given:
        for fqn, row in part.items():
            state[fqn].update(row)
    return {"state": state, "param_groups": plain.of(0)["optim"]["param_groups"]}
