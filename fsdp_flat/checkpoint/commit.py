"""Completes, finds and removes checkpoints, so that a crash at any moment leaves one complete.

Every file, then ``commit.json``, then the directory under its final name: each of these steps is flushed to disk before
the next. In an object store, where no directory can be renamed, ``commit.json`` is the last step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp_flat.checkpoint.files import is_remote, lexists, remove, sizes_in
from fsdp_flat.checkpoint.format import (
    COMMIT_NAME,
    FILES_OF_RANK,
    REMOVING,
    REPLACED,
    Records,
    names_in,
    orders_in,
    path_of,
    step_number_of,
    unfinished,
    write_commit,
    writing_path,
)
from fsdp_flat.errors import LoadError, OptionError, some_of

_logger = logging.getLogger("fsdp_flat")


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
    if writing.exists() and not is_remote(writing):
        raise FileExistsError(f"{writing} is in the way of the checkpoint's directory and cannot be removed.")


def invalidate(path: Path) -> None:
    """Have a checkpoint that is written, or removed, under its own name be unfinished."""
    if is_remote(path):
        (path / COMMIT_NAME).unlink(missing_ok=True)


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
                if not (writing / COMMIT_NAME).exists() or not is_remote(writing):
                    remove(writing)
            else:
                for path in writing.glob(FILES_OF_RANK.format(rank)):
                    path.unlink()
                # Another rank's files are there unless the directory is this rank's alone.
                if not is_remote(writing):
                    writing.rmdir()
        raise


def recover(directory: Path) -> None:
    """Restore a checkpoint that was being replaced by another of its number when the process was killed."""
    for away in directory.glob(f"step-*{REPLACED}"):
        final = away.with_suffix("")
        if final.exists():
            remove(away)
        else:
            os.replace(away, final)


def check_all_here(writing: Path, each_records: Sequence[Records]) -> None:
    """Raise unless this rank finds the files of every rank, with the sizes in their records."""
    found = sizes_in(writing)
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
    order = 1 + max(orders_in(directory).values(), default=0)
    if is_remote(directory):
        for name in sizes_in(writing).keys() - records:  # of a checkpoint of this number, of more ranks
            (writing / name).unlink(missing_ok=True)
        write_commit(writing, step, order, records)
        return
    write_commit(writing, step, order, records)
    _flush_directory(writing)
    # The old checkpoint is missing only between these two renames; recover() restores it after a kill there.
    away = final.with_suffix(REPLACED)
    if lexists(final):
        os.replace(final, away)
    os.replace(writing, final)
    _flush_directory(directory)
    remove(away)


def _flush_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    steps, cut_off = orders_in(directory), unfinished(directory)
    number = step_number_of(directory.name)
    is_named_so = number is not None and directory == path_of(directory.parent, number)
    if (directory / COMMIT_NAME).exists() or (is_named_so and not steps and not cut_off):
        if not directory.exists():
            recover(directory.parent)
        return ["."], []
    if directory.is_symlink() and not directory.exists():
        raise LoadError(f"{directory} is a link to {os.readlink(directory)}, which does not exist.")
    if not steps and not cut_off:
        if (directory / ".metadata").exists():
            raise LoadError(
                f"{directory} is a checkpoint of torch.distributed.checkpoint, not of save_checkpoint. Load it by "
                f"torch.distributed.checkpoint (dcp.load), or convert it: fsdp-flat convert {directory} NEW --to "
                "sharded, and load_checkpoint(NEW, ...)."
            )
        if others := _visible(directory):
            inside = [name for name in others if orders_in(directory / name)]
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
    return sorted(name for name in names_in(directory) if not name.startswith("."))


def prune(path: Path, keep_last: int) -> None:
    """Remove all but the last ``keep_last`` checkpoints; those without a valid record remain and do not count.

    What prevents it is logged, since the new one, at ``path``, is complete.
    """
    try:
        valid = [step for step, order in orders_in(path.parent).items() if order]
        for step in valid[keep_last:]:
            # Rename first, or remove the record: an interrupted removal must not leave a partial checkpoint.
            old = path_of(path.parent, step)
            if is_remote(old):
                invalidate(old)
                continue
            remove(old.with_suffix(REMOVING))
            os.replace(old, old.with_suffix(REMOVING))
        remove_unfinished(path.parent)
    except OSError as error:
        _logger.warning("%s is complete, but checkpoints before it are not all removed: %r", path, error)


def remove_unfinished(directory: Path) -> None:
    """Remove what interrupted saves and removals have left."""
    for name in unfinished(directory):
        remove(directory / name)
