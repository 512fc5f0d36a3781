"""Saves that fail, that share a directory or should, and that run while the script ends."""

from __future__ import annotations

import logging
import os
import resource
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import load_checkpoint, save_checkpoint
from fsdp_flat.checkpoint import commit as disk
from fsdp_flat.checkpoint import dcp_files
from fsdp_flat.comm import HostCopies
from fsdp_flat.errors import LoadError, OptionError, PeerFailureError
from tests.checkpoint.held_saves import held
from tests.support import assert_equal, on_ranks
from tests.support.pool import spawn
from tests.support.wrapper_models import batch, seeded, shard, whole_state

WRITE = "fsdp_flat.checkpoint.dcp_files.write_files"


def names_in(directory: Path) -> list[str]:
    """The names in a directory, after every rank has come here."""
    dist.barrier()
    found = sorted(path.name for path in directory.iterdir())
    dist.barrier()
    return found


# -- the process around a save -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_save_in_the_background_leaves_the_warning_filters_alone(tmp_path: Path) -> None:
    model, is_writing, go_on = shard(seeded()), threading.Event(), threading.Event()
    resolve = dcp_files._SavePlanner.resolve_data

    def slow(*args: Any) -> Any:
        is_writing.set()
        assert go_on.wait(60)
        return resolve(*args)

    filters, show = list(warnings.filters), warnings._showwarnmsg_impl  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_files._SavePlanner, "resolve_data", slow)
        with warnings.catch_warnings(record=True):
            save = save_checkpoint(tmp_path, model, background=True)
            assert is_writing.wait(60)
        go_on.set()
        save.wait()
    assert warnings.filters == filters
    assert warnings._showwarnmsg_impl is show  # type: ignore[attr-defined]


@on_ranks(2)
def test_a_checkpoint_may_be_missing_at_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    model, directory = shard(seeded()), os.fsdecode(bytes(tmp_path) + b"/\xff")
    save_checkpoint(directory, model)
    with pytest.raises(LoadError, match="77"):
        load_checkpoint(directory, model, step=77)


@on_ranks(2)
def test_a_full_disk_is_named_as_the_cause(tmp_path: Path) -> None:
    model = shard(nn.Sequential(nn.Linear(200, 200)), by_blocks=False)
    write, limits = dcp_files.write_files, resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_little(*args: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            return write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WRITE, write_little)
        with pytest.raises(OSError, match=r"\[Errno 27\] File too large: '.*step-00000000.writing'"):
            save_checkpoint(tmp_path, model)
    assert names_in(tmp_path) == []
    save_checkpoint(tmp_path, model)


# -- the end of a script ---------------------------------------------------------------------------------------------


def save_and_end(rank: int, path: Path) -> None:
    """The end of a training script: a save in the background, and no process group any more."""
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = FSDP(seeded(), use_orig_params=True)
    is_destroyed = threading.Event()
    with held(is_destroyed):
        save_checkpoint(path / "run", model, extra={"rank": rank}, background=True)
    dist.destroy_process_group()
    is_destroyed.set()


def load_at_the_end(rank: int, path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}/second_store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = FSDP(seeded(seed=1), use_orig_params=True)
    found = load_checkpoint(path / "run", model)
    assert found is not None
    (path / f"found-{rank}").write_text(f"{found.step} {found.extra} {found.skipped}")
    dist.destroy_process_group()


def test_a_save_in_the_background_is_completed_after_the_process_groups_are_destroyed(tmp_path: Path) -> None:
    spawn(save_and_end, tmp_path, num_ranks=2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000000"]
    spawn(load_at_the_end, tmp_path, num_ranks=2)
    assert [(tmp_path / f"found-{rank}").read_text() for rank in range(2)] == [
        "0 {'rank': 0} ()",
        "0 {'rank': 1} ()",
    ]


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_failure_in_the_background_is_logged_at_once(failing: int, tmp_path: Path, rank: int) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no space left")

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_flat")
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(WRITE, fail)
            with pytest.raises(OSError if rank == failing else PeerFailureError, match="no space left"):
                save_checkpoint(tmp_path, shard(seeded()), background=True).wait()
    finally:
        logger.removeHandler(handler)
    assert len(lines) == 1
    assert lines[0].startswith(f"ERROR The save of {tmp_path}/step-00000000 in the background failed: ")
    assert "no space left" in lines[0]


# -- directories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_a_directory_that_ranks_do_not_share_is_an_error_before_a_checkpoint_is_removed(
    background: bool, tmp_path: Path, rank: int
) -> None:
    """As disks of two machines that have the same path."""
    model = shard(seeded())
    expected = whole_state(model)
    save_checkpoint(tmp_path / "0", model)
    with pytest.raises(OptionError if rank == 0 else PeerFailureError, match=r"does not find it.*they share") as caught:
        save_checkpoint(tmp_path / str(rank), model, keep_last=1, background=background).wait()
    assert "Rank 1 has written __1_0.distcp" in str(caught.value)
    assert (names_in(tmp_path / "0"), names_in(tmp_path / "1")) == (["step-00000000"], [])
    other = shard(seeded(seed=1))
    load_checkpoint(tmp_path / "0", other)
    assert_equal(whole_state(other), expected)


@on_ranks(2)
def test_a_file_of_another_rank_with_another_size_is_an_error(tmp_path: Path, rank: int) -> None:
    write = dcp_files.write_files
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(WRITE, lambda *args: (write(*args)[0], {"__1_0.distcp": {"size": 1 << 40, "crc32": 0}}))
        with pytest.raises(
            OptionError if rank == 0 else PeerFailureError, match=r"1099511627776 bytes.*finds \d+ bytes"
        ):
            save_checkpoint(tmp_path, shard(seeded()))
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("step", [None, 7])
@on_ranks(2)
def test_saves_of_two_models_into_one_directory_wait_for_each_other(
    step: int | None, tmp_path: Path, rank: int
) -> None:
    models = [shard(seeded(seed=seed)) for seed in range(2)]
    (tmp_path / "other").mkdir(exist_ok=True)
    may_write = threading.Event()
    with held(may_write):
        first = save_checkpoint(tmp_path / "run", models[0], background=True, step=step)
        # A second save that did not wait would be done by then.
        threading.Timer(0.5, may_write.set).start()
        second = save_checkpoint(tmp_path / "other" / ".." / "run", models[1], background=True, step=step)
    assert first.done
    for save in (first, second):
        save.wait()
    expected = {None: ["step-00000000", "step-00000001"], 7: ["step-00000007"]}[step]
    assert names_in(tmp_path / "run") == expected
    # Of two with one number, the later one is kept.
    for model, name in zip(models[-len(expected) :], expected, strict=True):
        other = shard(seeded(seed=5))
        load_checkpoint(tmp_path / "run", other, step=int(name[-1]))
        assert_equal(whole_state(other), whole_state(model))


@on_ranks(2)
def test_saves_of_several_models_share_a_group_and_a_thread(tmp_path: Path, rank: int) -> None:
    save_checkpoint(tmp_path / "first", shard(seeded()), background=True).wait()
    opened, threads = os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")
    may_write = threading.Event()
    with held(may_write):
        saves = [save_checkpoint(tmp_path / str(n), shard(seeded(seed=n)), background=True) for n in range(3)]
    may_write.set()
    for number, save in enumerate(saves):
        save.wait()
        loaded = shard(seeded(seed=5))
        load_checkpoint(tmp_path / str(number), loaded)
        assert_equal(whole_state(loaded), whole_state(shard(seeded(seed=number))))
    assert len(os.listdir("/proc/self/fd")) <= len(opened)
    assert len(os.listdir("/proc/self/task")) <= len(threads)


@on_ranks(1, 2)
def test_saves_of_a_model_and_of_a_unit_of_it_share_no_memory_while_both_are_written(tmp_path: Path) -> None:
    """Their copies go to memory of one tree, as on an accelerator; here it is not pinned."""
    model, may_write, empty = shard(seeded(), use_orig_params=True), threading.Event(), torch.empty
    model(batch(0)).sum().backward()  # joins the units to a tree
    expected = whole_state(model)

    def copied(copies: HostCopies, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
            places = copies._places(tensors)
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        return places

    with pytest.MonkeyPatch.context() as patch, held(may_write):
        patch.setattr(HostCopies, "copied", copied)
        first = save_checkpoint(tmp_path / "model", model, background=True)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
        second = save_checkpoint(tmp_path / "block", model.module.blocks[0], background=True)
    may_write.set()
    for save in (first, second):
        save.wait()
    load_checkpoint(tmp_path / "model", model)
    assert_equal(whole_state(model), expected)


@on_ranks(2)
def test_a_load_waits_for_the_save_of_another_model(tmp_path: Path, rank: int) -> None:
    model, other = shard(seeded()), shard(seeded(seed=1))
    may_write = threading.Event()
    with held(may_write):
        save_checkpoint(tmp_path, model, background=True)
    threading.Timer(0.5, may_write.set).start()
    found = load_checkpoint(tmp_path, other)
    assert found is not None
    assert found.skipped == ()
    assert_equal(whole_state(other), whole_state(model))


@on_ranks(2)
def test_a_save_in_the_background_goes_to_the_directory_of_its_call(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    may_write = threading.Event()
    (tmp_path / "a").mkdir(exist_ok=True)
    (tmp_path / "b").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, held(may_write):
        patch.chdir(tmp_path / "a")
        save = save_checkpoint("run", model, background=True)
        patch.chdir(tmp_path / "b")
        may_write.set()
        assert save.wait() == tmp_path / "a" / "run" / "step-00000000"
    assert save.path.is_dir()
    assert names_in(tmp_path / "b") == []


# -- failures --------------------------------------------------------------------------------------------------------


def fail_after(write: Callable[..., Any]) -> Callable[..., Any]:
    """Write everything, and then find the disk full."""

    def written(*args: Any) -> Any:
        write(*args)
        raise OSError("no space left")

    return written


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_save_that_failed_leaves_no_files_and_the_next_one_succeeds(
    failing: int, background: bool, tmp_path: Path, rank: int
) -> None:
    model = shard(seeded())
    save_checkpoint(tmp_path, model, step=1, keep_last=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing:
            patch.setattr(WRITE, fail_after(dcp_files.write_files))
        with pytest.raises(OSError if rank == failing else PeerFailureError, match="no space left"):
            save_checkpoint(tmp_path, model, step=2, keep_last=1, background=background).wait()
    assert names_in(tmp_path) == ["step-00000001"]
    save_checkpoint(tmp_path, model, step=3, keep_last=1)
    assert names_in(tmp_path) == ["step-00000003"]


@on_ranks(2)
def test_a_save_makes_room_before_it_writes(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    save_checkpoint(tmp_path, model, step=1)
    dist.barrier()
    if rank == 0:
        for name in ("step-00000004.writing", "step-00000000.removing"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__0_0.distcp").write_text("half")
    dist.barrier()
    seen: list[str] = []

    def write(state: Any, path: Path, *args: Any) -> Any:
        seen.extend(each.name for each in tmp_path.iterdir())
        return written(state, path, *args)

    written = dcp_files.write_files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WRITE, write)
        save_checkpoint(tmp_path, model, step=2)
    assert set(seen) <= {"step-00000001", "step-00000002.writing"}


@on_ranks(2)
def test_the_replaced_checkpoint_comes_back_if_its_replacement_fails(tmp_path: Path, rank: int) -> None:
    model = shard(seeded())
    save_checkpoint(tmp_path, model, step=1)
    replace = disk.os.replace

    def fail(source: Path, target: Path) -> None:
        if str(source).endswith(".writing"):
            raise OSError("no inode left")
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk.os, "replace", fail)
        with pytest.raises(OSError if rank == 0 else PeerFailureError, match="no inode left"):
            save_checkpoint(tmp_path, model, step=1)
    assert names_in(tmp_path) == ["step-00000001"]
    assert load_checkpoint(tmp_path, model).step == 1
