"""Saves on a fake accelerator: copies are ordered, and the host waits only where it is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType, save_checkpoint
from fsdp_flat.checkpoint import checkpoints
from fsdp_flat.comm.streams import HostCopies, HostSwap
from fsdp_flat.state.torch_state import ShardedTensors
from tests.rehearsal.kit import Rehearsal, batch, rehearsal, train
from tests.rehearsal.models import BOTH_KINDS

WRITING = "checkpoint/checkpoints.py"


class Alone(checkpoints.Consensus):
    """Exchanges nothing: the fake process group would give what is in memory."""

    def integers(self, values: list[int], error: Exception | None, same: Any = ()) -> list[list[int]]:
        if error is not None:
            raise error
        return [values] * self.size

    def texts(self, text: str, *, only_on_rank0: bool = False) -> list[str]:
        return []

    def barrier(self, what: str) -> None:
        pass


@contextmanager
def saving() -> Iterator[threading.Event]:
    """Let a rank save by itself inside the block; its thread begins to write once the event is set."""
    may_write, start = threading.Event(), checkpoints.CheckpointSave._run

    def run(save: Any, work: Any, *args: Any) -> None:
        start(save, lambda: (may_write.wait(), work()), *args)

    with (
        mock.patch.object(checkpoints, "Consensus", Alone),
        mock.patch.object(checkpoints.CheckpointSave, "_run", run),
        mock.patch.object(checkpoints, "outliving_group", lambda group: group),
    ):
        yield may_write


@contextmanager
def transfers(run: Rehearsal) -> Iterator[None]:
    """Have messages between ranks write what is received, in order, inside the block."""

    def begin(ops: list[Any]) -> list[Any]:
        found = []
        for each in ops:
            reads, writes = ([], [each.tensor]) if each.op is dist.irecv else ([each.tensor], [])
            found.append(run.collectives._begin("p2p", None, True, reads, writes))
        return found

    with (
        mock.patch.object(dist, "batch_isend_irecv", begin),
        # A ShardedTensor's metadata name a numbered device, which the fake one is not.
        mock.patch.object(ShardedTensors, "make", lambda _made, chunk, *_: chunk),
    ):
        yield


def save_between_steps(run: Rehearsal, path: Path, *, use_orig_params: bool, num_saves: int = 2) -> Any:
    """Train, save in the background at once after a step, and step again while nothing has been written."""
    model = run.wrap(use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for number in range(num_saves):
        with saving() as may_write:
            model(batch()).pow(2).mean().backward()
            optimizer.step()
            run.recorder.name_storages()
            run.recorder.log.append("save")
            save = save_checkpoint(path, model, optimizer, step=number, background=True)
            run.recorder.log.append("saved")
            # The optimizer overwrites shards and states, before the forward would.
            optimizer.step()
            optimizer.zero_grad()
            may_write.set()
            save.wait()
    return model


@BOTH_KINDS
def test_a_save_in_the_background_is_ordered_and_does_not_stop_the_host(use_orig_params: bool, tmp_path: Path) -> None:
    """The caller waits for nothing, and the thread once."""
    with rehearsal() as run:
        save_between_steps(run, tmp_path, use_orig_params=use_orig_params)
    run.check(allowed=[f"{WRITING}:"])
    log = run.recorder.log
    for number, begin in enumerate([at for at, entry in enumerate(log) if entry == "save"]):
        end = [at for at, entry in enumerate(log) if entry == "saved"][number]
        assert "aten::copy_ to the host" in log[begin:end]
        assert "wait" not in log[begin:end]
    assert [str(each).count(" write ") for each in run.findings] == [1]


def test_a_save_whose_copies_the_next_step_does_not_wait_for_is_found(tmp_path: Path) -> None:
    """The test above can fail."""
    with rehearsal() as run, mock.patch.object(type(run.machine.compute), "wait_event", return_value=None):
        save_between_steps(run, tmp_path, use_orig_params=True, num_saves=1)
    assert "conflict" in run.kinds()


def test_memory_for_copies_is_taken_once(tmp_path: Path) -> None:
    """Pinned memory is kept for the next save."""
    with rehearsal() as run:
        made: list[int] = []
        empty = torch.empty

        def noted(*size: Any, **kwargs: Any) -> torch.Tensor:
            made.extend([1] * bool(kwargs.get("pin_memory")))
            return empty(*size, **kwargs)

        with mock.patch.object(torch, "empty", noted):
            save_between_steps(run, tmp_path, use_orig_params=True, num_saves=3)
    assert made == [1]


def test_copies_take_blocks_that_fit_and_give_others_back() -> None:
    """What is kept is bounded by what the last copies took."""
    with rehearsal() as run, mock.patch("fsdp_flat.comm.streams._BLOCK_NBYTES", 1024):
        swap = HostSwap(run.machine.device, run.machine.new_stream, run.machine.current_stream)
        copies = HostCopies(swap, [])

        def sizes(*numels: int) -> list[int]:
            found = copies.copied([torch.zeros(numel, device=run.machine.device) for numel in numels])
            assert [each.numel() for each in found] == list(numels)
            assert len({each.data_ptr() for each in found}) == len(numels)
            copies.wait()
            copies.release()
            return sorted(block.numel() for block in copies._kept)

        assert sizes(100, 100, 1000) == [1024, 4000]
        assert sizes(100, 100, 200, 1000) == [1024, 1024, 4000]
        assert sizes(3) == [1024]


def test_copies_that_are_not_released_share_no_memory_with_later_ones_of_the_tree() -> None:
    with rehearsal() as run:
        streams, tensor = run.wrap(use_orig_params=True)._unit.step.streams, torch.zeros(5, device=run.machine.device)
        places: list[int] = []
        first, second, third = (streams.host_copies() for _ in range(3))
        for copies in (first, second, third):
            (copy,) = copies.copied([tensor])
            places.append(copy.data_ptr())
            if copies is second:
                first.wait()
                first.release()
    assert places[1] != places[0] == places[2]


@BOTH_KINDS
def test_a_sharded_state_dict_waits_once_for_the_counts_and_not_for_each_tensor(use_orig_params: bool) -> None:
    """Without offload_to_cpu nothing else goes to the host, and nothing waits."""
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.parameters())
        train(run, model, num_steps=1, optimizer=lambda _: optimizer)
        for row in optimizer.state.values():
            # As fused optimizers keep them.
            row["step"] = torch.ones((), device=run.machine.device)
        assert len(optimizer.state) > 1
        config = ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu=False)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *config), transfers(run):
            run.recorder.log.clear()
            found = model.state_dict()
            assert run.recorder.log
            assert "wait" not in run.recorder.log
            run.recorder.log.clear()
            states = FSDP.optim_state_dict(model, optimizer)["state"]
        log = run.recorder.log
        assert [entry for entry in log if entry == "wait" or "to the host" in entry] == [
            "aten::_to_copy to the host",
            "wait",
        ]
        assert {each.device for each in found.values()} == {run.machine.device}
        assert {each["exp_avg"].device for each in states.values()} == {run.machine.device}
        assert {each["step"].device.type for each in states.values()} == {"cpu"}
