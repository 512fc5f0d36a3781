"""Ranks meet once before a save writes or sends the first byte, unless they have to tell each other something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import save_checkpoint, save_full
from fsdp_flat.checkpoint import dcp_files
from fsdp_flat.comm import agreement
from fsdp_flat.errors import RankMismatchError
from tests.support import on_ranks
from tests.support.steps import recorded
from tests.support.wrapper_models import seeded, shard, train


def trained(rank: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(seeded(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, rank, range(1))
    return model, optimizer


@contextmanager
def counted_meetings() -> Iterator[list[str]]:
    """List what ranks meet for inside the block: the barriers of the group's store."""
    met: list[str] = []
    original = agreement._StoreBarrier.__init__

    def note(barrier: Any, rank_group: Any, said: str = "", **options: Any) -> None:
        met.append(said)
        original(barrier, rank_group, said, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement._StoreBarrier, "__init__", note)
        yield met


@contextmanager
def at_the_first_byte(look: Callable[[], None]) -> Iterator[None]:
    write = dcp_files.write_files

    def looked(*args: Any) -> Any:
        look()
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_files, "write_files", looked)
        yield


@on_ranks(2, 4)
def test_a_checkpoint_of_a_given_step_meets_once_before_it_writes(tmp_path: Path, rank: int) -> None:
    model, optimizer = trained(rank, use_orig_params=False)
    before: list[int] = []
    with (
        counted_meetings() as met,
        recorded() as record,
        at_the_first_byte(lambda: before.append(len(met) + len(record.calls))),
    ):
        save_checkpoint(tmp_path, model, optimizer, step=3)
    assert before[0] == len(met) == 1


@on_ranks(2)
def test_an_optimizers_states_that_are_alike_are_sent_after_one_meeting(rank: int) -> None:
    model, optimizer = trained(rank, use_orig_params=False)
    with counted_meetings() as met, recorded() as record:
        FSDP.optim_state_dict(model, optimizer)
    assert len(met) == 1
    assert set(record.counts()) == {"transfer"}


@on_ranks(2)
def test_a_full_save_meets_once_before_it_sends(tmp_path: Path, rank: int) -> None:
    model, _ = trained(rank)
    sent: list[int] = []
    with counted_meetings() as met, recorded(lambda: sent.append(len(met))) as record:
        save_full(model, tmp_path)
    assert sent[0] == 1
    # Ranks exchange errors, rank 0 receives, then ranks exchange errors again, and what is written.
    assert [call.name for call in record.calls[:3]] == ["all_gather", "transfer", "all_gather"][:: 1 if rank else 2] + (
        [] if rank else ["all_gather"]
    )


@on_ranks(2)
def test_ranks_that_differ_after_equal_saves_are_still_found(tmp_path: Path, rank: int) -> None:
    model, optimizer = trained(rank, use_orig_params=False)
    save_checkpoint(tmp_path, model, optimizer, step=1)
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    with pytest.raises(RankMismatchError, match="Settings of the optimizer's parameter groups differ"):
        save_checkpoint(tmp_path, model, optimizer, step=2)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(RankMismatchError, match="rank 0 of the group has keep_last=3, rank 1 has keep_last=0"):
        save_checkpoint(tmp_path, model, optimizer, step=3, keep_last=0 if rank else 3)
    assert save_checkpoint(tmp_path, model, optimizer, step=4).path.is_dir()
