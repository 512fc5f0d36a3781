"""Every collective that the library begins is waited for before the call that needs it returns.

A process whose gloo collectives are under way when the interpreter ends is aborted by torch ("terminate called without
an active exception"), so a program may end after any call of ours without destroying its groups. A collective that has
just ended is in test_process_end.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.comm import torch_comm
from tests.support import on_ranks
from tests.support.beside import sgd
from tests.support.kit import BLOCKS, batch, square_loss, wrapped
from tests.support.models import Stack
from tests.support.steps import COLLECTIVES, shared_memory


class Waited:
    """Stands for the work of a collective, and notes that a caller waits for it."""

    def __init__(self, name: str, work: Any) -> None:
        self.name, self.work, self.is_waited = name, work, False

    def wait(self, *args: Any) -> Any:
        self.is_waited = True
        return self.work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def works() -> Iterator[list[Waited]]:
    """Collect the work of every asynchronous collective inside the block."""
    found: list[Waited] = []

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = original(*args, **kwargs)
            if not isinstance(work, dist.Work):
                return work
            found.append(Waited(name, work))
            return found[-1]

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner in (dist, torch_comm):
            for name in COLLECTIVES:
                if hasattr(owner, name):
                    patch.setattr(owner, name, watched(name, getattr(owner, name)))
        yield found


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("a bad batch")


def forward_alone(model: FSDP, rank: int) -> None:
    square_loss(model, batch(rank))


def evaluation(model: FSDP, rank: int) -> None:
    with torch.no_grad():
        model(batch(rank))


def training(model: FSDP, rank: int) -> None:
    optimizer = sgd(model)
    for _ in range(2):
        square_loss(model, batch(rank)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    optimizer.zero_grad()


def failure(model: FSDP, rank: int) -> None:
    with mock.patch.object(model.module, "head", Failing()), pytest.raises(ValueError, match="a bad batch"):
        model(batch(rank))


def states(model: FSDP, rank: int) -> None:
    optimizer = sgd(model)
    state = FSDP.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    model.load_state_dict(model.state_dict())
    with FSDP.summon_full_params(model):
        pass


@on_ranks(2)
@pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared"])
@pytest.mark.parametrize("run", [forward_alone, evaluation, training, failure, states])
def test_after_each_call_no_collective_is_under_way(run: Callable[[FSDP, int], None], shared: bool, rank: int) -> None:
    with shared_memory(shared):
        model = wrapped(Stack(), auto_wrap_policy=BLOCKS, use_orig_params=True)
        training(model, rank)
        with works() as found:
            run(model, rank)
    # What ranks exchange in a backward is waited for where it is read: training reads it when it clips.
    assert [work.name for work in found if not work.is_waited] == []
    assert found or shared
