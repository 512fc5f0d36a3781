"""A rank that has ended, or goes elsewhere, is named by every other rank in seconds, and no other rank is."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import save_checkpoint
from fsdp_flat.comm import RankGroup, barrier, torch_comm
from fsdp_flat.comm.calls import StallDetector, calls_of
from fsdp_flat.comm.shm import transport_of
from fsdp_flat.errors import UsageError
from tests.support import on_ranks
from tests.support.hosts import on_hosts
from tests.support.kit import BLOCKS, batch, square_loss, wrapped
from tests.support.models import Stack
from tests.support.patience import LATE_S, give_up_soon, impatient
from tests.support.pool import spawn

# Within which a rank that has ended is named, with room for a loaded machine; and the timeout of the group, which must
# not be what tells.
LIMIT_S, GROUP_TIMEOUT_S = 15.0, 60.0


@on_ranks(3, timeout=50)
def test_a_rank_that_gave_up_to_wait_and_ended_is_not_named_as_the_one_that_is_absent(rank: int) -> None:
    group = RankGroup.of(dist.new_group())
    transport = transport_of(group)
    assert transport is not None
    give_up_soon(group.group)
    if rank < 2:
        time.sleep(LATE_S * rank)  # rank 0 gives up first
        with impatient(), pytest.raises(UsageError) as caught:
            barrier("saving", group)
        transport.leave()  # as the end of the process does
        text = str(caught.value)
        assert re.search(r"rank\(s\) \[2\] (have not called it|reported nothing)", text), text
        assert not re.search(r"rank [01] has not called it|\[[01], 2\]", text), text
    dist.barrier()


Task = Callable[[FSDP, torch.optim.Optimizer, str], Any]


def step(model: FSDP, optimizer: torch.optim.Optimizer, _folder: str) -> None:
    square_loss(model, batch(dist.get_rank())).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()


def save(model: FSDP, optimizer: torch.optim.Optimizer, folder: str) -> None:
    save_checkpoint(Path(folder) / "checkpoints", model, optimizer)


def state_dict(model: FSDP, _optimizer: torch.optim.Optimizer, _folder: str) -> None:
    model.state_dict()


TASKS: dict[str, Task] = {"a step": step, "save_checkpoint": save, "state_dict": state_dict}


@contextmanager
def joined(rank: int, port: int, places: str, *, real: bool = False) -> Iterator[dist.ProcessGroup]:
    """Join a group with a rank on each of ``places`` and a store that is no rank's; the process ends with the block.

    Ranks look at others as soon as in all tests, or as late as in programs if ``real``.
    """
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    limit = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(places), timeout=limit)
    assert dist.group.WORLD is not None
    with on_hosts(places), impatient(real=real):
        yield dist.group.WORLD
    # A rank that another one waits for in vain may not wait for it in turn.
    os._exit(0)


def trained(folder: str) -> tuple[FSDP, torch.optim.Optimizer]:
    """Return a model and its optimizer after one step, which all ranks have ended."""
    torch.manual_seed(0)
    model = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, folder)
    dist.barrier()
    return model, optimizer


def end_before(rank: int, port: int, task: str, places: str, folder: str, *, real: bool = False) -> None:
    """Rank 2 ends before the task; each other rank writes its error, and after how many seconds."""
    with joined(rank, port, places, real=real):
        model, optimizer = trained(folder)
        if rank == 2:
            return
        write_error(folder, lambda: TASKS[task](model, optimizer, folder))


def write_error(folder: str, task: Callable[[], object]) -> None:
    """Run a task that raises; write after how many seconds, and the error."""
    begun, error = time.monotonic(), "nothing"
    try:
        task()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    Path(folder, f"rank{dist.get_rank()}").write_text(f"{time.monotonic() - begun:.1f} s, {error}")


def told(folder: Path, function: Callable[..., None], *arguments: str, num_ranks: int = 4) -> dict[int, str]:
    """Run a function on ranks of its own, and return what each wrote, by rank."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    spawn(function, store.port, *arguments, str(folder), num_ranks=num_ranks)
    return {int(path.name[-1]): path.read_text() for path in sorted(folder.glob("rank*"))}


@pytest.mark.parametrize("places", ["aaaa", "aabb", "abcd"])
@pytest.mark.parametrize("task", TASKS)
def test_a_rank_that_ended_is_named_by_all_others_in_seconds(task: str, places: str, tmp_path: Path) -> None:
    assert_rank_2_is_named(told(tmp_path, end_before, task, places))


def end_before_as_in_programs(rank: int, port: int, task: str, places: str, folder: str) -> None:
    end_before(rank, port, task, places, folder, real=True)


@pytest.mark.from_size("all", "waits for as long as a program")
@pytest.mark.parametrize("places", ["aaaa", "aabb", "abcd"])
@pytest.mark.parametrize("task", TASKS)
def test_a_rank_that_ended_is_named_with_the_patience_of_the_library_too(
    task: str, places: str, tmp_path: Path
) -> None:
    assert_rank_2_is_named(told(tmp_path, end_before_as_in_programs, task, places))


def assert_rank_2_is_named(texts: dict[int, str]) -> None:
    assert texts.keys() == {0, 1, 3}, texts
    for text in texts.values():
        assert float(text.partition(" ")[0]) < LIMIT_S, texts
        assert re.search(r"rank(\(s\))? \[?2\b\]?[^.]{0,40}(ha(s|ve) ended|reported nothing)", text, re.IGNORECASE), (
            texts
        )
        assert not re.search(r"rank [013] (of the group has|has not called it but has) ended", text), texts


def end_in_a_save(rank: int, port: int, places: str, folder: str) -> None:
    """Rank 2 ends in a hook of its model while all save; each other rank writes its error."""
    with joined(rank, port, places):
        model, optimizer = trained(folder)
        if rank == 2:
            model.blocks[0].register_state_dict_post_hook(lambda *_: os._exit(0))
        write_error(folder, lambda: save(model, optimizer, folder))


@pytest.mark.parametrize("places", ["aaaa", "aabb", "abcd"])
def test_the_error_of_a_rank_that_ends_in_a_save_speaks_of_the_save(places: str, tmp_path: Path) -> None:
    texts = told(tmp_path, end_in_a_save, places)
    assert texts.keys() == {0, 1, 3}, texts
    for rank, text in texts.items():
        assert float(text.partition(" s, ")[0]) < LIMIT_S, f"rank {rank}: {text}"
        # A rank that ends before ranks meet has not come to the save for the others.
        assert re.search("PeerFailureError.*( while saving|save_checkpoint was called)", text), f"rank {rank}: {text}"


def clip_twice(model: FSDP, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model.clip_grad_norm_(1.0)
    step(model, optimizer, folder)


def skip_a_backward(model: FSDP, optimizer: torch.optim.Optimizer, folder: str) -> None:
    square_loss(model, batch(dist.get_rank()))
    step(model, optimizer, folder)


def keep_gradients(model: FSDP, optimizer: torch.optim.Optimizer, folder: str) -> None:
    with model.no_sync():
        square_loss(model, batch(dist.get_rank())).backward()
    step(model, optimizer, folder)


def two_backwards(model: FSDP, optimizer: torch.optim.Optimizer, folder: str) -> None:
    square_loss(model, batch(dist.get_rank())).backward()
    step(model, optimizer, folder)


TASKS_OF_ONE: dict[str, Task] = {
    "saves": save,
    "takes a state dict": state_dict,
    "clips alone": clip_twice,
    "skips a backward": skip_a_backward,
    "sits in no_sync": keep_gradients,
    "runs two backwards": two_backwards,
}


def go_elsewhere(rank: int, port: int, task: str, places: str, folder: str) -> None:
    """Rank 1 does something else before it goes on with steps, as the others do."""
    with joined(rank, port, places):
        model, optimizer = trained(folder)

        def go() -> None:
            if rank == 1:
                TASKS_OF_ONE[task](model, optimizer, folder)
            for _ in range(3):
                step(model, optimizer, folder)

        write_error(folder, go)


@pytest.mark.parametrize("places", ["aaaa", "aabb", "abcd"])
@pytest.mark.parametrize("task", TASKS_OF_ONE)
def test_ranks_that_wait_in_different_collectives_end_in_seconds(task: str, places: str, tmp_path: Path) -> None:
    texts = told(tmp_path, go_elsewhere, task, places)
    assert texts.keys() == {0, 1, 2, 3}, texts
    for text in texts.values():
        assert float(text.partition(" ")[0]) < LIMIT_S, texts
        assert "came to" in text or "rank 1" in text.lower(), texts


@on_ranks(4, timeout=90)
@pytest.mark.parametrize("places", ["aaaa", "aabb", "abcd"])
def test_a_rank_that_is_late_ends_no_wait_of_the_others_wherever_they_are(
    places: str, rank: int, tmp_path: Path
) -> None:
    with on_hosts(places), impatient():
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS, process_group=dist.new_group())
        optimizer = torch.optim.AdamW(model.parameters())
        for late, task in enumerate([step, save, state_dict, step]):
            # Others wait in several collectives: of the forward, which some have left, and of what follows.
            time.sleep(LATE_S * (rank == late))
            task(model, optimizer, str(tmp_path))
            time.sleep(LATE_S * (rank == (late + 1) % 4))


@on_ranks(2)
def test_a_call_that_a_rank_has_withdrawn_does_not_count(rank: int) -> None:
    group = RankGroup.of(dist.new_group())
    assert group.group is not None
    calls, looks = calls_of(group.group), StallDetector(group)
    calls.add("a barrier" if rank else "a step")
    dist.barrier()
    assert looks.difference() is None  # it may be left from an earlier wait
    dist.barrier()
    if rank:
        calls.withdraw()
        calls.add("a step")
        assert looks.difference() is None
    dist.barrier()
    assert looks.difference() is None
    dist.barrier()


@on_ranks(2)
def test_calls_of_one_number_that_differ_are_an_error_on_both_ranks_once_shown_twice(rank: int) -> None:
    group = RankGroup.of(dist.new_group())
    assert group.group is not None
    calls, looks = calls_of(group.group), StallDetector(group)
    for operation in ("alike", *(["a step", "the next"] if rank else ["a barrier"])):
        calls.add(operation)
    found = []
    # A look may read what the other rank has shown in the one before: two of these four show it twice.
    for _ in range(4):
        dist.barrier()
        found.append(str(looks.difference()))
    assert found[0] == "None"
    assert "a step where" in found[3] or "a barrier where" in found[3]


def end_in_a_new_group(rank: int, port: int, folder: str) -> None:
    """Rank 2 ends while ranks make the group of their first save in the background."""
    with joined(rank, port, "abcd"):
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS)
        square_loss(model, batch(rank)).backward()
        if rank == 2:
            with mock.patch.object(torch_comm, "new_group", side_effect=lambda *_, **__: os._exit(0)):
                save_checkpoint(Path(folder) / "checkpoints", model, background=True)
        write_error(folder, lambda: save_checkpoint(Path(folder) / "checkpoints", model, background=True))


def test_a_rank_that_ends_while_ranks_make_a_group_is_named_in_seconds(tmp_path: Path) -> None:
    texts = told(tmp_path, end_in_a_new_group)
    assert texts.keys() == {0, 1, 3}, texts
    for text in texts.values():
        assert float(text.partition(" ")[0]) < LIMIT_S, texts
        # The first that finds it may have ended too when another one looks.
        assert re.search(r"Rank\(s\) \[(\d, )*2(, \d)*\] of the group have ended", text), texts
