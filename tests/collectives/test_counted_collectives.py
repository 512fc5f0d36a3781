"""Tools that count a step's operations see the kinds and numbers of collectives that torch's FSDPs issue."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as peer_library
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_flat
from tests.support import on_ranks
from tests.support.kit import BLOCKS, batch, mesh, seeded, square_loss, wrapped
from tests.support.models import Block, Stack
from tests.support.peer import peer_fsdp, peer_warnings_silenced

GATHER, REDUCE, ALL_REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


def counts(model: nn.Module, rank: int) -> list[dict[str, int]]:
    """The collectives of three whole steps, the first one and its comparisons of ranks included, by kind."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        with warnings.catch_warnings():
            # The mode's hooks on modules make torch warn, of views and of inputs without gradients.
            warnings.simplefilter("ignore")
            with CommDebugMode() as mode:
                square_loss(model, batch(rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        # FSDP1 all-gathers into lists on the CPU, and into one tensor on accelerators.
        by_name = {operation.__name__: number for operation, number in mode.get_comm_counts().items()}
        found.append({GATHER if name == "allgather_" else name: number for name, number in by_name.items()})
    return found


def wrapper_options(strategy: str, library: Any, num_ranks: int) -> dict[str, Any]:
    options = {"device_mesh": mesh(num_ranks // 2, 2)} if "HYBRID" in strategy else {}
    return {"sharding_strategy": library.ShardingStrategy[strategy], **options}


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
@pytest.mark.parametrize(
    "strategy, expected",
    [
        ("FULL_SHARD", {GATHER: 7, REDUCE: 4}),
        ("SHARD_GRAD_OP", {GATHER: 4, REDUCE: 4}),
        ("NO_SHARD", {ALL_REDUCE: 4}),
        ("HYBRID_SHARD", {GATHER: 7, REDUCE: 4, ALL_REDUCE: 4}),
        ("_HYBRID_SHARD_ZERO2", {GATHER: 4, REDUCE: 4, ALL_REDUCE: 4}),
    ],
)
@on_ranks(4)
def test_a_wrapper_with_backend_collectives_shows_those_of_fsdp1(
    strategy: str, expected: dict[str, int], use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    options = wrapper_options(strategy, fsdp_flat, num_ranks)
    ours = wrapped(seeded(Stack), auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params, **options)
    ours.set_backend_collectives()
    policy: Any = peer_library.wrap.ModuleWrapPolicy({Block})
    with peer_warnings_silenced():
        options = wrapper_options(strategy, peer_library, num_ranks)
        theirs = peer_fsdp(seeded(Stack), auto_wrap_policy=policy, use_orig_params=use_orig_params, **options)
    assert counts(ours, rank) == counts(theirs, rank) == [expected] * 3


@on_ranks(4)
def test_without_them_only_reductions_over_replicas_are_shown_of_ranks_that_share_memory(rank: int) -> None:
    # As docs/communication.md says.
    assert counts(wrapped(seeded(Stack), auto_wrap_policy=BLOCKS), rank)[1:] == [{}, {}]
    model = wrapped(seeded(Stack), auto_wrap_policy=BLOCKS, **wrapper_options("HYBRID_SHARD", fsdp_flat, 4))
    assert counts(model, rank)[1:] == [{ALL_REDUCE: 4}] * 2
