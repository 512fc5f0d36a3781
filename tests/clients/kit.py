"""Runs a client's function on torch's FSDP and on fsdp_flat, on the same ranks, and counts the forwards of each."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_state

import fsdp_flat
from tests.clients.scripts.tiny import Tiny, TinyLayer, tokens
from tests.support.peer import PeerFSDP, mend_peer
from tests.support.transport import rank_device

__all__ = ["Outcome", "Tiny", "TinyLayer", "on_both", "rank_environment", "tokens"]

_PEER = {"class": PeerFSDP}  # install() replaces bare names


@dataclass(slots=True)
class Outcome:
    """Holds the results of a client's run.

    Attributes:
        result: return value of the function.
        peer_forwards: number of forwards of units of torch's FSDP during the run.
        our_units: number of fsdp_flat units that ran a forward.
    """

    result: Any
    peer_forwards: int
    our_units: int


def on_both(run: Callable[..., Any], *, fully_shard: bool = False, **arguments: Any) -> tuple[Outcome, Outcome]:
    """Call ``run(**arguments)`` on torch's FSDP, then on fsdp_flat, installed after the client was imported.

    Each run gets a separate folder under the ``folder`` argument. Every rank must call this.

    Args:
        run: the client's function.
        fully_shard: the client uses FSDP2 instead of FSDP1.
        arguments: those of the function.

    Returns:
        The outcomes of torch's FSDP and of fsdp_flat.
    """
    folder = arguments.pop("folder", None)
    outcomes = []
    for ours in (False, True):
        if folder is not None:
            arguments["folder"] = _made(Path(folder) / ("ours" if ours else "theirs"))
        with warnings.catch_warnings(), rank_environment(), _peer_on_rank_device(), _counted(fully_shard) as counts:
            warnings.simplefilter("ignore")  # clients and torch use deprecated functions
            torch.manual_seed(0)
            if ours:
                with fsdp_flat.installed(fully_shard):
                    result = run(**arguments)
            else:
                result = run(**arguments)
        outcomes.append(Outcome(result, counts["peer"], counts["ours"]))
    theirs, mine = outcomes
    assert theirs.peer_forwards > 0, "the peer's run did not use torch's FSDP, so it proves nothing"
    assert theirs.our_units == 0
    assert mine.peer_forwards == 0, "torch's FSDP ran a forward while fsdp_flat was installed"
    assert mine.our_units > 1, "no nested unit of fsdp_flat ran a forward"
    return theirs, mine


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return folder


@contextmanager
def _peer_on_rank_device() -> Iterator[None]:
    """Set ``device_id`` for torch's FSDP1, which needs one without GPUs, if the client (Lightning) sets none."""
    mend_peer()
    made = _PEER["class"].__init__

    def init(self: Any, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        made(self, *args, device_id=rank_device() if device_id is None else device_id, **kwargs)

    _PEER["class"].__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _PEER["class"].__init__ = made  # type: ignore[method-assign]


@contextmanager
def _counted(fully_shard: bool) -> Iterator[dict[str, int]]:
    """Count the forwards of units of torch's FSDP, and the fsdp_flat units that run a forward."""
    counts = {"peer": 0, "ours": 0}
    units: set[int] = set()
    if fully_shard:
        methods = (_fsdp_state.FSDPState, "_pre_forward"), (fsdp_flat.FSDPModule, "__call__")
    else:
        methods = (_PEER["class"], "forward"), (fsdp_flat.FullyShardedDataParallel, "forward")
    peer_forward, our_forward = (getattr(*method) for method in methods)

    def of_peer(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["peer"] += 1
        return peer_forward(self, *args, **kwargs)

    def of_ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        units.add(id(self))
        counts["ours"] = len(units)
        return our_forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*methods[0], of_peer)
        patch.setattr(*methods[1], of_ours)
        yield counts


@contextmanager
def rank_environment() -> Iterator[None]:
    """Set the variables that torchrun sets; the default process group exists already."""
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    # Ranks that share a GPU say so by the number of their device.
    local_rank = rank if rank_device().type == "cpu" else "0"
    names = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "HF_HUB_OFFLINE": "1",
    }
    before = dict(os.environ)
    os.environ.update(names)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
