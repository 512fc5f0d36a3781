"""Saves checkpoints of a training run that survive a crash at any moment, and loads them at any number of ranks."""

from __future__ import annotations

import base64
import json
import logging
import math
import weakref
import zlib
from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import ShardedOptimStateDictConfig, flag
from fsdp_flat.checkpoint.commit import (
    candidates,
    check_all_here,
    commit,
    discarded_on_error,
    invalidate,
    prepare,
    prune,
)
from fsdp_flat.checkpoint.consensus import LOADING, SAVING, Consensus
from fsdp_flat.checkpoint.files import folder_of_user, path_of_user
from fsdp_flat.checkpoint.format import (
    check_number,
    check_step,
    check_sums,
    next_step,
    orders_in,
    path_of,
    sized_commit,
    verified,
    writing_path,
)
from fsdp_flat.checkpoint.progress import ProgressBar, progress_bar
from fsdp_flat.comm import UntilRanksMeet, digest_of, fingerprints, outliving_group, while_ranks_live
from fsdp_flat.core import local_of, units_of
from fsdp_flat.errors import LoadError, OptionError, RankMismatchError, UnsupportedError, phrase, some_of
from fsdp_flat.guards import ReplicatedTensors
from fsdp_flat.layout import clean_fqn, renamed
from fsdp_flat.runtime import Settings, differing_settings, group_settings
from fsdp_flat.state import (
    BOXES,
    BoxedTensor,
    IndexedParam,
    OptimContents,
    OptimStates,
    ParamIndex,
    SplitParams,
    are_equal,
    boxed_state_dict,
    contents_of,
    encoded_states,
    merged_states,
    named_groups,
    own_settings,
    rows_of,
)
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
# Optimizer states in boxes of live memory.
_LIVE = ShardedOptimStateDictConfig(offload_to_cpu=False, boxes=True)


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

    Each rank writes its own shards; nothing is all-gathered. A parameter of several tensors, a quantized one, is saved
    as these, each under its name below the parameter's (``fc.weight.codes``), without rounding. The files have the
    format of ``torch.distributed.checkpoint``, so ``dcp.load`` reads them too, into any sharding, under ``"model"`` and
    ``"optim"``. A checkpoint is valid only once all of it is on disk with sizes and checksums; a crash at any moment
    leaves the earlier ones intact.

    Every rank must call this, between steps.

    Args:
        directory: directory of all checkpoints of the run, on a file system shared by all ranks, or a URL of fsspec
            (``"s3://bucket/run"``); rank 0 looks there for the files of all ranks before it removes older checkpoints.
            One save at a time may run there: saves of one process wait for each other. A second model of the run needs
            its own, because steps and ``keep_last`` count all checkpoints there.
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
            an accelerator later work of the current stream waits for the copies, which go to pinned memory of this
            save; once it is written that is kept for the next one, as long as the model. The next save of the model
            waits for this one. Call
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
        RankMismatchError: (an OptionError) ``step``, ``keep_last`` or ``background``, the optimizer's settings, its
            learning rate for instance, or constants of a quantized parameter differ between ranks.
        UnsupportedError: the model has a tensor made of others that no unit shards or whose parts are not those of a
            whole, or the optimizer has a state of a parameter's class that is made of several tensors.
        OptionTypeError: an argument of the wrong type.
        PeerFailureError: another rank failed; then nothing is saved.
        PhaseError: called in the middle of a step.
    """
    saving = _Saving(model, optim)
    saving.collect(directory, extra, step, keep_last, background=background)
    replicated = saving.meet()
    saving.merge(background=background)
    together, save = saving.together, CheckpointSave(saving.step, path_of(saving.directory, saving.step))
    bar = progress_bar("Saving", asked=progress, here=together.rank == 0 and (progress or not background))
    if not background:
        saving.write(save.path, bar, keep_last, together)
        save._work.set_result(None)
    else:
        # The script may destroy its process groups while its last checkpoint is written.
        # A gloo group communicates CPU tensors.
        group = while_ranks_live(partial(outliving_group, together.group), together.rank_group)
        in_thread = Consensus(group, SAVING)
        save._run(partial(saving.write, save.path, bar, keep_last, in_thread), model, together.ranks)
    replicated.warn()
    if saving.unreduced:
        warn_user(
            f"save_checkpoint was called between backwards inside no_sync: gradients of {some_of(saving.unreduced, 3)} "
            "are not reduced yet, and a checkpoint holds no gradients, so a run that goes on from it lacks those "
            "batches. Save after optimizer.step()."
        )
    return save


class _Saving:
    """Makes one checkpoint: ranks collect what they have, meet, merge the states that need all ranks, and write.

    What raises on one rank is kept until it meets the others; then all raise.
    """

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer | None) -> None:
        self.together, self._until_met = Consensus.of(model, SAVING), UntilRanksMeet()
        self._model, self._optim = model, optim
        # What ranks compare: lines that are the same on all, and numbers.
        self._same, self._own = list[str](), list[int]()
        self._tensors, self._plain, self._rows_text = dict[str, Any](), dict[str, Any](), ""
        # In the background, an error of the file system is one of wait(): it may come while files are written too.
        self._unprepared: OSError | None = None

    def collect(self, directory: str | Path, extra: Any, step: int | None, keep_last: int, *, background: bool) -> None:
        """Collect what this rank has, as views, and what ranks compare; the arguments are the caller's."""
        model, optim, rank = self._model, self._optim, self.together.rank
        with self._until_met:
            from fsdp_flat.checkpoint.dcp_files import check_optim, packed

            self._same += [f"{'an' if optim is not None else 'no'} optimizer", f"background={bool(background)}"]
            self._same += [f"step={step!r}", f"keep_last={keep_last!r}"]
            self._handled = sorted({name for unit in units_of(model) for name in own_settings(unit).optim_handlers})
            handlers = some_of(list(map(repr, self._handled)), 6)
            self._same.append(f"a handler of {handlers}" if handlers else "no handler")
            index, self._replicated = ParamIndex(model), ReplicatedTensors(model)
            self.directory = folder_of_user(directory)
            _wait_for_background(model, self.directory)
            self.unreduced = [
                unit.name for unit in units_of(model) if any(g.grads.has_waiting for g in unit.param_groups)
            ]
            check_step(step)
            check_number(keep_last, "keep_last", 1)
            flag(background, "background")
            self._tensors["model"], self._plain["model"], constants = _model_values(model)
            self._tensors["extra"] = {str(rank): packed(extra, "extra", "extra")}
            settings, contents = Settings(), OptimContents(())
            if optim is not None:
                settings, contents = group_settings(model, optim), contents_of(optim, index)
                check_optim(contents, index)
            self._alike = settings, constants
            self._states = OptimStates.read(index, contents, compares=True, keeps_dtensors=False, in_boxes=True)
            # Copies of quantized states may not fit in the memory of one rank, so this is before ranks meet.
            self._encodings = encoded_states(self._states.states, BOXES, _LIVE, on_owner=True)
            number = step if step is not None else next_step(self.directory) if rank == 0 else -1
            if rank == 0:
                try:
                    prepare(self.directory, number)
                except OSError as raised:
                    self._unprepared = raised
            # Hooks may name tensors as no unit does; every rank saves those unless all have the same names.
            unmanaged = [name for name in self._tensors["model"] if name not in index.by_name]
            compared = (unmanaged, self._replicated.fingerprints, self._alike)
            told = [digest_of(json.dumps(each, sort_keys=True).encode()) for each in compared]
            flags = int(self._unprepared is None), int(any(map(has_quantized, contents.state.values())))
            self._own += [number, *flags, *told, *self._states.digests()]

    def meet(self) -> ReplicatedTensors:
        """Meet the other ranks, and know of them what this rank has to before it writes.

        Returns what each rank has a copy of, of which a warning may follow.
        """
        together = self.together
        everyone = together.meet("save_checkpoint", self._own, self._until_met.error, self._same)
        numbers, prepared, quantized, names, prints, each_alike, *each_states = zip(*everyone, strict=True)
        self.step, self._is_prepared, self._has_wrappers = numbers[0], bool(prepared[0]), any(quantized)
        self._writes_others = together.rank == 0 or len({*names}) > 1
        if len({*each_alike}) > 1:
            _check_settings(*self._alike, together)
        self._replicated.compare([together.rank_group], are_equal=len({*prints}) == 1)
        # With handlers and owned parameters every rank has to know all states.
        states = self._states
        self._shares = bool(self._handled or states.contents.owners)
        if self._shares or not are_equal(each_states):
            texts = together.texts(json.dumps([*states.described(), states.numels()]))
            states.complete(together.ranks, list(map(json.loads, texts)))
        return self._replicated

    def merge(self, *, background: bool) -> None:
        """Merge states that have handlers, and keep what this rank writes: copies if it does in the ``background``."""
        states, tensors, values = self._states, self._tensors, self._encodings
        with self._until_met:
            values |= merged_states(states.states, _LIVE, in_turn=True)
        if self._shares:
            self.together.fail(self._until_met.error)
        self._copies = units_of(self._model)[0].step.streams.host_copies()
        with self._until_met:
            tensors["model"] = {name: value for name, value in tensors["model"].items() if self._writes(name, value)}
            if self._optim is not None and self._until_met.error is None:
                tensors["optim"], rows = {"state": {}}, dict[str, dict[str, Any]]()
                self._plain["optim"] = {"param_groups": named_groups(states)}
                if self._has_wrappers:
                    self._plain["optim"]["has_wrappers"] = True
                for fqn, row in rows_of(states, values, BOXES, _LIVE, copies=False).items():
                    if self._writes(fqn):
                        tensors["optim"]["state"][fqn], others = _divided(row, self._handled)
                        if others and self._sends_row(fqn):
                            rows[fqn] = others
                # Serialized, so that training can change the live ones while a thread writes.
                self._rows_text = base64.b64encode(serialized(rows)).decode() if rows else ""
            if background:
                _copy(tensors, self._copies.copied)
        # A thread that writes keeps no memory but that of the copies.
        del self._model, self._optim, self._states, self._encodings, self._replicated

    def _param(self, name: str) -> IndexedParam | None:
        index = self._states.index
        return index.by_name.get(name) or index.dtensors_by_name.get(name)

    def _writes(self, name: str, value: Any = None) -> bool:
        """Return whether this rank writes a value, or the optimizer's states, of a name.

        Replicas take turns by name, and rank 0 writes what every rank has: values under names that no parameter has,
        if all ranks have the same of these.
        """
        param = self._param(name) or getattr(value, "param", None)
        if param is None:
            return self._writes_others or isinstance(value, BoxedTensor)
        if param.full_shape == param.shape and not param.adapter.is_first_of_mesh:
            return False
        replicas = param.unit.options.groups.replicate
        return zlib.crc32(name.encode()) % replicas.size == replicas.rank

    def _sends_row(self, name: str) -> bool:
        """Return whether this rank sends the states of a parameter that are no tensors.

        Ranks with elements of it have the same ones: the rank with the first element sends them.
        """
        param = self._param(name)
        if param is None:
            return True
        if not param.unit.options.api.has_wrapper or math.prod(param.shape) == 0:
            return param.rank_group.rank == 0
        own = param.local_shard.in_param
        return own.start == 0 < own.stop

    def write(self, path: Path, bar: ProgressBar, keep_last: int, together: Consensus) -> None:
        """Write this rank's files, and on rank 0 everything else once all ranks have written theirs."""
        until_met, text = UntilRanksMeet(self._until_met.error or self._unprepared), ""
        directory, writing = path.parent, writing_path(path.parent, self.step)
        nbytes = sum(part.nbytes for *_, parts in _parts(self._tensors) for part in parts)
        with discarded_on_error(directory, self.step, together.rank), bar(nbytes) as update:
            with until_met:
                from fsdp_flat.checkpoint.dcp_files import write_files, write_metadata

                if together.rank == 0 and until_met.error is None and self._is_prepared:
                    invalidate(writing)
                self._copies.wait()
                if until_met.error is None and self._is_prepared:
                    written, records = write_files(self._tensors, writing, together.rank, update)
                    text = json.dumps([written, records, self._rows_text])
                self._copies.release()
            texts = together.texts(text, only_on_rank0=True)
            with until_met:
                if texts and all(texts):
                    each_written, each_records, each_rows = zip(*map(json.loads, texts), strict=True)
                    check_all_here(writing, each_records)
                    # One more file, as if of a further rank.
                    plain = {"plain": _packed_plain(self._plain, each_rows)}
                    last, own = write_files(plain, writing, together.size, update)
                    own |= write_metadata([*each_written, last], writing)
                    commit(directory, self.step, dict(ChainMap(own, *each_records)))
                    prune(path, keep_last)
            together.fail(until_met.error)


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
    if _background:
        _background[:] = [save for save in _background if save._unit() is not None or not save.done]


def _check_settings(settings: Settings, constants: Mapping[str, Any], together: Consensus) -> None:
    """Raise if settings, or ``constants``, of the same parameter differ between ranks. Every rank must call this."""
    each_settings, each_constants = zip(
        *map(json.loads, together.texts(json.dumps([settings, constants]))), strict=True
    )
    for rank, found in zip(together.ranks, each_constants, strict=True):
        differing = [(name, said) for name, said in found.items() if each_constants[0].get(name, said) != said]
        for name, (_, param, shape) in differing[:1]:
            raise RankMismatchError(
                f"Tensor {name!r} of shape {tuple(shape)}, of which every rank has its own, differs between rank "
                f"{together.ranks[0]} and rank {rank}, so nothing was saved: parameter {param} is quantized otherwise "
                "there. Expected the same on all ranks. Quantize the same whole parameter on every rank before it is "
                "sharded, or load a full one by load_state_dict or load_full."
            )
    told = differing_settings(list(each_settings), together.ranks)
    if told:
        raise RankMismatchError(
            f"Settings of the optimizer's parameter groups differ between ranks, so nothing was saved: {told}. A "
            "checkpoint has one value for all ranks. Give a scheduler that reads a loss, as ReduceLROnPlateau, the "
            "mean over ranks (torch.distributed.all_reduce)."
        )


def _model_values(model: nn.Module) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return the model's tensors, as boxes, and its other values (results of ``get_extra_state``).

    Also a hash of each tensor that is a part of a parameter and the same on all ranks, with what an error says of it.
    """
    from fsdp_flat.checkpoint.dcp_files import packed

    for unit in units_of(model):
        unit.check_idle("save_checkpoint")
    tensors, plain = dict[str, Any](), dict[str, Any]()
    apart = SplitParams(model)
    for key, value in boxed_state_dict(model, apart).items():
        # The state dict of a compiled model has torch.compile's prefix in its names.
        name = clean_fqn(key)
        (tensors if isinstance(value, torch.Tensor) else plain)[name] = value
    if quantized := [name for name, value in tensors.items() if is_wrapper(value)]:
        kind = type(local_of(tensors[quantized[0]])).__name__
        raise UnsupportedError(
            "The model's state dict has tensors made of other tensors, quantized ones for instance: "
            f"{some_of([repr(name) for name in quantized], 6)}, the first a {kind}. A checkpoint holds plain tensors, "
            "so nothing was saved. Keep them out of the state dict by a hook (register_state_dict_post_hook) or as "
            "buffers that are not persistent, and save them apart."
        )
    # A copy: a thread may write them while training changes the live ones.
    others = unpacked(packed(plain, "The state dict's values that are no tensors (get_extra_state)"))
    prints = zip(apart.constants.items(), fingerprints(list(apart.constants.values())), strict=True)
    constants = {name: [found, str(apart.names[name]), list(each.shape)] for (name, each), found in prints}
    return {name: boxed(value) for name, value in tensors.items()}, others, constants


def _divided(row: Mapping[str, Any], handled: Container[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Divide the states of a parameter into tensors to write and other values."""
    tensors, others = dict[str, torch.Tensor](), dict[str, Any]()
    for name, value in row.items():
        # Merged states are on one rank each, so they are tensors whatever their shape; a 0-dim parameter has boxes.
        is_written = isinstance(value, torch.Tensor) and (
            name in handled or value.dim() > 0 or isinstance(value, BoxedTensor)
        )
        (tensors if is_written else others)[name] = boxed(value)
    return tensors, others


def _parts(tensors: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Sequence[torch.Tensor]]]:
    """Yield the dict and the name of each tensor, and the parts of it that this rank has."""
    for row in (tensors.get("model", {}), *tensors.get("optim", {"state": {}})["state"].values()):
        for name, value in row.items():
            yield row, name, value.parts if isinstance(value, BoxedTensor) else (value,)


def _copy(tensors: dict[str, Any], copied_of: Callable[[list[torch.Tensor]], Iterable[torch.Tensor]]) -> None:
    """Replace tensors by the copies that a function makes of their parts."""
    places = list(_parts(tensors))
    copied = iter(copied_of([part.detach() for *_, parts in places for part in parts]))
    for row, name, _ in places:
        value = row[name]
        row[name] = value.with_parts(copied) if isinstance(value, BoxedTensor) else next(copied)


def _packed_plain(plain: dict[str, Any], each_rows: Sequence[str]) -> bytes:
    """Serialize the plain values with the rows of all ranks."""
    if "optim" in plain:
        state: dict[str, dict[str, Any]] = {}
        for text in filter(None, each_rows):
            state = {**unpacked(base64.b64decode(text)), **state}
        plain["optim"]["state"] = state
    return serialized(plain)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Describes the checkpoint that :func:`load_checkpoint` loaded.

    Attributes:
        step: the checkpoint's number.
        path: its directory.
        extra: the ``extra`` that this rank saved; rank 0's if the number of ranks has changed.
        skipped: the saves skipped in the directory (incomplete later ones, interrupted ones), each with the reason.
        missing: names of the model that the checkpoint does not have, which keep their values; only with
            ``strict=False``.
        unexpected: names in the checkpoint that the model does not have, of those that are not left
            out by ``prefix`` and ``rename``.
    """

    step: int
    path: Path
    extra: Any
    skipped: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


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
    directory = path_of_user(directory, "directory")
    listed = []
    for step in orders_in(directory):
        path, nbytes, problem = path_of(directory, step), 0, ""
        try:
            nbytes = sized_commit(path).nbytes
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

    path = path_of_user(path, "path")
    found = sized_commit(path)
    check_sums(path, found.files, progress_bar("Verifying", asked=progress, here=True))
    SafeReader(path).read_metadata()
    return CheckpointInfo(found.step, path, found.nbytes, "")


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    prefix: str = "",
    rename: Callable[[str], str | None] | None = None,
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
        strict: names of the model and of the checkpoint that do not match are an error. With False these keep their
            values, and the result has them. Shapes have to fit in any case.
        prefix: load only names in the checkpoint that begin with it, without it: ``"model."`` loads the part of that
            name. Without an optimizer.
        rename: returns the model's name for a name in the checkpoint, after ``prefix``; None leaves it out. Without an
            optimizer.
        progress: show a progress bar of the comparison on rank 0, if tqdm is installed. By default on a terminal only,
            after two seconds.

    Returns:
        The loaded checkpoint; None if ``directory`` does not exist or is empty, which is logged.

    Raises:
        LoadError: (a RuntimeError) no checkpoint is complete, none has the number ``step``, ``directory`` is a file or
            holds only other files, or names or shapes do not fit the model; on every rank.
        OptionError: ``directory`` is empty, or a URL that fsspec cannot open, ``prefix`` lacks its dot, ``rename``
            gives one name twice, or either comes with an optimizer, whose states have names of parameters too.
        RankMismatchError: (an OptionError) ranks pass another ``step``, ``strict`` or ``prefix``, an optimizer on some
            ranks only, directories of different checkpoints, or load a parameter from other names.
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
    names, cut_off, until_met = list[str](), list[str](), UntilRanksMeet()
    same = [f"step={step!r}", f"{'an' if optim is not None else 'no'} optimizer", f"strict={bool(strict)}"]
    same += [f"prefix={prefix!r}", f"{'no' if rename is None else 'a'} rename"]
    with until_met:
        directory = path_of_user(directory, "directory")
        if optim is not None and (prefix or rename is not None):
            raise OptionError(
                "prefix and rename map names of the model's tensors, and an optimizer's states have names of "
                "parameters too. Load the model alone, with optim=None. Nothing was loaded."
            )
        _wait_for_background(model, directory)
        for unit in units_of(model):
            unit.check_idle("load_checkpoint")
        check_step(step)
        flag(strict, "strict")
        if directory.exists() and not directory.is_dir():
            raise LoadError(f"{directory} is a file; pass the directory that was given to save_checkpoint.")
        if together.rank == 0:
            names, cut_off = candidates(directory, step)
    together.meet("load_checkpoint", [], until_met.error, same)
    names, cut_off = json.loads(together.texts(json.dumps([names, cut_off]))[0])
    skipped = [f"{name}: it was never finished" for name in cut_off]
    bar = progress_bar("Verifying", asked=progress, here=together.rank == 0)
    for name in names:
        path = directory / name
        # Each rank reads some files; the first rank's problem counts.
        found, problem = verified(path, together.rank, together.size, bar)
        record = "" if found is None else json.dumps([found.step, found.order, found.files], sort_keys=True)
        told = map(json.loads, together.texts(json.dumps([problem, digest_of(record.encode()), str(path)])))
        problems, records, paths = zip(*told, strict=True)
        if not any(problems):
            break
        skipped.append(phrase(next(filter(None, problems))))
    else:
        if not names and not skipped:
            return None
        raise LoadError(f"No complete checkpoint in {directory}: {'; '.join(skipped)}.")
    if len({*records}) > 1:
        of_ranks = [f"{name} of rank {rank}" for rank, name in zip(together.ranks, paths, strict=True)]
        raise RankMismatchError(
            f"Ranks find different checkpoints, so nothing was loaded: {some_of(of_ranks, 8)} have different records. "
            "Expected one checkpoint, or copies of it. Pass the same directory on every rank."
        )
    if skipped:
        # A warning may raise.
        with together.propagate_errors():
            if together.rank == 0:
                warn_user(f"Loading {path.name}; passed over: {'; '.join(skipped)}.")
    assert found is not None
    parts = ("model.", "plain", "extra.") if optim is None else ()
    names_of = partial(renamed, prefix=prefix, rename=rename) if prefix or rename is not None else None
    reader = SafeReader(path, parts)
    extra, missing, unexpected = load_files(reader, model, optim, together=together, strict=strict, names_of=names_of)
    return LoadedCheckpoint(found.step, path, extra, tuple(skipped), missing, unexpected)
