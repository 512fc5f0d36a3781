"""A call on rank 0 alone, while others are in torch's barrier, ends in seconds."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullStateDictConfig, check_replicas, iter_full_state_dict
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.checkpoint import full_save
from fsdp_flat.comm import RankGroup, calls, failures, host_group, rank_groups, torch_barriers, torch_comm
from fsdp_flat.comm.failures import named_errors
from fsdp_flat.comm.flat_collectives import Collectives
from fsdp_flat.errors import PeerFailureError, UsageError
from fsdp_flat.state.codecs import FULL
from fsdp_flat.state.model_save import _shards_of
from tests.comm.test_faults import LIMIT_S, joined, save, step, told, trained, write_error
from tests.support import on_ranks
from tests.support.kit import BLOCKS, batch, square_loss, wrapped
from tests.support.models import Stack
from tests.support.patience import LATE_S, impatient


def forward(model: FSDP, _optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(batch(0))


def forward_of_a_block(model: FSDP, _optimizer: torch.optim.Optimizer) -> None:
    model.blocks[1](batch(0))


def summon(model: FSDP, _optimizer: torch.optim.Optimizer) -> None:
    with FSDP.summon_full_params(model):
        pass


def compare_replicas(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    check_replicas(model, optimizer)


def clip(model: FSDP, _optimizer: torch.optim.Optimizer) -> None:
    model.clip_grad_norm_(1.0)


def clip_by_torch(model: FSDP, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def state_dict(model: FSDP, _optimizer: torch.optim.Optimizer) -> None:
    model.state_dict()


def optimizer_state(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    FSDP.optim_state_dict(model, optimizer)


def iterate(model: FSDP, _optimizer: torch.optim.Optimizer) -> None:
    list(iter_full_state_dict(model))


def transfer(model: FSDP, _optimizer: torch.optim.Optimizer) -> None:
    """Gather the full parameters on this rank, without a meeting before."""
    assert model._unit is not None
    FULL.gather(_shards_of([model._unit], FULL, ""), FullStateDictConfig())


Call = Callable[[FSDP, torch.optim.Optimizer], None]
# Calls by rank 0 alone, and what the error names.
CALLS: dict[str, tuple[Call, str]] = {
    "forward": (forward, "the all-gather of unit"),
    "forward of a block": (forward_of_a_block, "the all-gather of unit 'blocks.1'"),
    "summon_full_params": (summon, "the all-gather of unit .*, in summon_full_params"),
    "check_replicas": (compare_replicas, "check_replicas"),
    "clip_grad_norm_": (clip, "clip_grad_norm_"),
    "torch's clip_grad_norm_": (clip_by_torch, "clip_grad_norm_"),
    "state_dict": (state_dict, "state_dict"),
    "iter_full_state_dict": (iterate, "iter_full_state_dict"),
    "a transfer": (transfer, "a transfer between ranks, for a state dict"),
    "optim_state_dict": (optimizer_state, "optim_state_dict|an optimizer state dict"),
}


def call_on_rank_0(rank: int, port: int, name: str, places: str, folder: str) -> None:
    """Rank 0 alone makes a call; all others are in a barrier. Each writes its error."""
    with joined(rank, port, places):
        model, optimizer = trained(folder)
        square_loss(model, batch(rank)).backward()
        write_error(folder, (lambda: CALLS[name][0](model, optimizer)) if rank == 0 else dist.barrier)


@pytest.mark.parametrize("places", ["aaaa", "abcd", "ab"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_rank_0_alone_beside_a_barrier_ends_on_all_ranks_in_seconds(
    name: str, places: str, tmp_path: Path
) -> None:
    texts = told(tmp_path, call_on_rank_0, name, places, num_ranks=len(places))
    assert texts.keys() == set(range(len(places))), texts
    for rank, text in texts.items():
        assert float(text.partition(" ")[0]) < LIMIT_S, texts
        assert re.search(CALLS[name][1], text), f"rank {rank}: {text}"
        assert "torch.distributed.barrier()" in text, f"rank {rank}: {text}"
        assert "Every rank must" in text, f"rank {rank}: {text}"


def leave_an_iteration(rank: int, port: int, places: str, folder: str) -> None:
    """Rank 0 iterates over all entries; the others leave after the first. Each writes its error."""
    with joined(rank, port, places):
        model, _ = trained(folder)
        with mock.patch.object(full_save, "_LEAST_NBYTES", 0):  # one tensor at a time
            remaining = iter_full_state_dict(model)
            next(remaining)
            write_error(folder, dist.barrier if rank else lambda: list(remaining))


@pytest.mark.parametrize("places", ["aaaa", "ab"])
def test_an_iterator_that_ranks_leave_for_a_barrier_is_named_in_seconds(places: str, tmp_path: Path) -> None:
    texts = told(tmp_path, leave_an_iteration, places, num_ranks=len(places))
    for rank, text in texts.items():
        assert float(text.partition(" ")[0]) < LIMIT_S, texts
        assert "an exchange between ranks while saving" in text, f"rank {rank}: {text}"


@contextmanager
def as_of_nccl() -> Iterator[None]:
    """Have the default group take no CPU tensors, as NCCL's, and its works not wait, inside the block.

    The collectives of units go on to be gloo's. Every rank must enter the block.
    """
    world, backend_of = dist.group.WORLD, rank_groups.backend_of

    def without_cpu(group: dist.ProcessGroup, device: torch.device) -> Any:
        return None if group is world and device.type == "cpu" else backend_of(group, device)

    with mock.patch.object(rank_groups, "backend_of", without_cpu):
        yield


class BegunWork:
    """A collective that a device may never run; the host goes on."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@contextmanager
def begun_only() -> Iterator[None]:
    """Have the host go on from collectives of units that it has begun, as with NCCL, though no values come."""
    with ExitStack() as stack:
        for name in ("all_gather_single", "reduce_scatter_single"):
            stack.enter_context(mock.patch.object(torch_comm, name, return_value=BegunWork()))
        yield


def of_nccl(rank: int, port: int, task: str, places: str, folder: str) -> None:
    """Rank 1 does something else than the others, in a group whose collectives do not make the host wait."""
    with joined(rank, port, places), as_of_nccl():
        model, optimizer = trained(folder)
        assert model._unit.param_groups[0].comm.state_collectives.__class__ is Collectives
        with begun_only():

            def go() -> None:
                if rank == 1:
                    TASKS_OF_NCCL[task](model, optimizer, folder)
                for _ in range(3):
                    step(model, optimizer, folder)
                dist.barrier()

            write_error(folder, go)


def stay_in_a_barrier(*_: object) -> None:
    dist.barrier()


def end_now(*_: object) -> None:
    os._exit(0)


def skip_a_step(model: FSDP, optimizer: torch.optim.Optimizer, folder: str) -> None:
    for _ in range(2):
        step(model, optimizer, folder)
    dist.barrier()


TASKS_OF_NCCL: dict[str, Callable[[FSDP, torch.optim.Optimizer, str], object]] = {
    "saves": save,
    "is in a barrier": stay_in_a_barrier,
    "skips a step, and is in a barrier at the end": skip_a_step,
    "takes a state dict": lambda model, *_: model.state_dict(),
    "skips a backward": lambda model, *_: forward(model, _[0]),
    "ends": end_now,
}


@pytest.mark.parametrize("task", TASKS_OF_NCCL)
def test_ranks_of_a_group_without_cpu_tensors_find_out_in_the_exchange_beside_it(task: str, tmp_path: Path) -> None:
    texts = told(tmp_path, of_nccl, task, "aa", num_ranks=2)
    assert texts.keys() == ({0} if task == "ends" else {0, 1}), texts
    for rank, text in texts.items():
        assert float(text.partition(" ")[0]) < LIMIT_S, texts
        assert re.search("Error: .*(came to|waits for rank|rank\\(?s?\\)? \\[?1)", text, re.IGNORECASE), (
            f"{rank}: {text}"
        )


@on_ranks(2, 4, timeout=90)
def test_ranks_that_are_late_around_barriers_are_never_refused(rank: int, num_ranks: int, tmp_path: Path) -> None:
    with impatient():
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS)
        optimizer = torch.optim.AdamW(model.parameters())
        plain = Stack()
        for late in range(num_ranks):
            step(model, optimizer, str(tmp_path))
            if rank == late:  # loads data, or evaluates a plain module
                time.sleep(LATE_S)
                square_loss(plain, batch(rank))
            dist.barrier()
            time.sleep(LATE_S * (rank == late))
            model.state_dict()
            dist.barrier()
            time.sleep(LATE_S * (rank == (late + 1) % num_ranks))
            step(model, optimizer, str(tmp_path))


@on_ranks(3, timeout=60)
def test_a_barrier_that_is_begun_without_waiting_is_no_reason(rank: int) -> None:
    with impatient():
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS)
        forward(model, torch.optim.SGD(model.parameters()))
        dist.barrier()
        time.sleep(LATE_S * (rank == 2))
        if rank == 0:
            work = dist.barrier(async_op=True)
            forward(model, torch.optim.SGD(model.parameters()))
            work.wait()
        else:
            dist.barrier()
            forward(model, torch.optim.SGD(model.parameters()))
    calls._State.has_begun_barriers = False


@on_ranks(4, timeout=60)
def test_a_barrier_of_other_ranks_is_no_reason(rank: int) -> None:
    group = dist.new_group([2, 3])
    with impatient():
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS)
        dist.barrier()
        if rank >= 2:
            time.sleep(LATE_S * (rank == 3))
            dist.barrier(group)
        forward(model, torch.optim.SGD(model.parameters()))


@on_ranks(2, timeout=60)
def test_a_barrier_in_a_thread_of_the_program_is_no_reason(rank: int) -> None:
    group = dist.new_group()
    with impatient():
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS)
        dist.barrier()
        # As while a checkpoint is written: rank 0's part takes longer.
        thread = threading.Thread(target=lambda: (time.sleep(2 * LATE_S * (rank == 0)), dist.barrier(group)))
        thread.start()
        time.sleep(LATE_S * (rank == 1))
        forward(model, torch.optim.SGD(model.parameters()))
        thread.join()


@on_ranks(2, timeout=60)
def test_the_calls_of_a_group_and_of_its_host_group_are_in_one_order(rank: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    with as_of_nccl():
        host = host_group(RankGroup.of(world)).process_group
        assert host is not world
        assert host_group(RankGroup.of(world)).process_group is host
        assert calls.calls_of(host) is calls.calls_of(world)
        assert calls.unit_names(host) is calls.unit_names(world)
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS)
        before = calls.calls_of(world).number
        square_loss(model, batch(rank)).backward()
        made = [operation for number, _, operation in calls.calls_of(host).last if number > before]
        assert made.count("the exchange of ranks in a backward") == 1
        assert made.count("the reduce-scatter") == 4
        assert made.count("the all-gather") >= 4
        # What a rank reports over one of them is read by ranks that wait in the other.
        if rank == 1:
            failures.report_failure(RankGroup.of(world), "said so")
        dist.barrier()
        if rank == 0:
            assert failures.has_failed(RankGroup.of(host), [1])
        dist.barrier()
        if rank == 1:
            calls.calls_of(world).before_next("", 0)


OF_NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a "
    "network error, NCCL version 2.28.9\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer"
)


class FailedWork:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise dist.DistBackendError(OF_NCCL)


def raises(*_: object, **__: object) -> None:
    raise dist.DistBackendError(OF_NCCL)


@pytest.mark.parametrize("when", ["it is begun", "it is waited for"])
@pytest.mark.parametrize("operation", ["all_gather_single", "reduce_scatter_single"])
@on_ranks(2)
def test_an_error_of_nccl_names_the_unit_and_the_rank_and_stays_the_cause(operation: str, when: str, rank: int) -> None:
    with as_of_nccl(), impatient(REPORT_TIMEOUT_S=0.2):
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS)
        loss = square_loss(model, batch(rank))
        fails = raises if when == "it is begun" else lambda *_, **__: FailedWork()
        begin = partial(square_loss, model, batch(rank)) if operation == "all_gather_single" else loss.backward
        with mock.patch.object(torch_comm, operation, fails), pytest.raises(PeerFailureError) as caught:
            begin()
        text = str(caught.value)
        assert f"Rank {rank} of the group was in the {operation.partition('_single')[0].replace('_', '-')} of" in text
        assert "ncclRemoteError: A call failed possibly due to a network error" in text
        assert "Every rank must run the same units" in text
        assert isinstance(caught.value.__cause__, dist.DistBackendError)
        assert "NCCLUtils.cpp" not in text
        dist.barrier()
        calls.calls_of(dist.group.WORLD).before_next("", 0)


def test_errors_that_are_not_of_a_collective_stay_as_they_are() -> None:
    alone = RankGroup(None, 0, 1)
    for error in (RuntimeError("wrong shape"), torch.OutOfMemoryError("out of memory")):
        with pytest.raises(type(error)) as caught, named_errors("an all-reduce", alone):
            raise error
        assert caught.value is error


@on_ranks(2, timeout=60)
def test_a_thread_shows_that_a_rank_waits_where_the_barrier_blocks_the_host(rank: int) -> None:
    with impatient(), mock.patch.object(torch_barriers, "moves_by_gloo", return_value=False):
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS, process_group=dist.new_group(timeout=timedelta(seconds=30)))
        square_loss(model, batch(rank)).backward()
        dist.barrier()
        if rank == 0:
            with pytest.raises(UsageError, match="waits for rank 1 in the all-gather of unit"):
                forward(model, torch.optim.SGD(model.parameters()))
        dist.barrier()
