"""How many collectives a step makes beside torch's fully_shard, and in which order by the public trace."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_flat.composable import fully_shard, trace
from fsdp_flat.errors import OptionError
from tests.composable.sides import batch_of, blocks_and_root
from tests.runtime.kit import acquaint, recorded
from tests.support import on_ranks
from tests.support.kit import BLOCKS, Stack, square_loss, wrapped
from tests.support.peer import peer_fully_shard

GATHER, REDUCE = "_allgather_base_", "_reduce_scatter_base_"


def numbers(model: nn.Module, step: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of the backend's all-gathers and reduce-scatters in a forward and in its backward."""

    def of(mode: CommDebugMode) -> dict[str, int]:
        by_name = {operation.__name__: number for operation, number in mode.get_comm_counts().items()}
        return {name: by_name.get(name, 0) for name in (GATHER, REDUCE)}

    with warnings.catch_warnings():
        # The mode's hooks on modules make torch warn, of views and of inputs without gradients.
        warnings.simplefilter("ignore")
        with CommDebugMode() as forward:
            loss = square_loss(model, batch_of(step))
        with CommDebugMode() as backward:
            loss.backward()
    return of(forward), of(backward)


@on_ranks(2, 4)
@pytest.mark.parametrize("reshards", [None, True, False, 2])
def test_with_backend_collectives_the_numbers_are_those_of_torch(reshards: Any, num_ranks: int) -> None:
    plain = Stack()
    ours = blocks_and_root(copy.deepcopy(plain), fully_shard, reshard_after_forward=reshards)
    theirs = blocks_and_root(copy.deepcopy(plain), peer_fully_shard, reshard_after_forward=reshards)
    ours.set_backend_collectives()
    num_blocks = len(plain.blocks)
    in_backward = {None: num_blocks, True: num_blocks + 1, False: 0, 2: num_blocks + 1}[reshards]
    for step in range(3):
        expected = numbers(theirs, step)
        assert numbers(ours, step) == expected
        assert expected == ({GATHER: num_blocks + 1, REDUCE: 0}, {GATHER: in_backward, REDUCE: num_blocks + 1})
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor())
    with recorded() as record:
        square_loss(ours, batch_of(3)).backward()
    sizes = Counter(call.size for call in record.calls if call.name == "all_gather_single")
    in_group = in_backward if reshards == 2 else 0
    assert sizes == Counter({num_ranks: num_blocks + 1 + in_backward - in_group}) + Counter({2: in_group})


@on_ranks(2)
def test_frozen_and_trainable_parameters_of_a_unit_are_gathered_at_once() -> None:
    plain = Stack()
    for block in plain.blocks:
        block.up.weight.requires_grad_(False)
    ours = blocks_and_root(copy.deepcopy(plain), fully_shard)
    theirs = blocks_and_root(copy.deepcopy(plain), peer_fully_shard)
    ours.set_backend_collectives()
    for step in range(2):
        assert numbers(ours, step) == numbers(theirs, step)


@on_ranks(2)
def test_the_default_makes_fewer_collectives_and_is_restored() -> None:
    model = blocks_and_root(Stack(), fully_shard)
    model.set_backend_collectives()
    square_loss(model, batch_of(0)).backward()
    model.set_backend_collectives(False)
    acquaint(model)
    with recorded() as record:
        square_loss(model, batch_of(1)).backward()
    # The root and the last block are gathered once.
    assert record.counts() == {"gather": 6, "reduction": 4, "all_reduce": 1}


@on_ranks(2)
@pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
def test_the_trace_names_events_and_modules_in_their_order(front: str) -> None:
    model: Any = (
        blocks_and_root(Stack(2), fully_shard) if front == "fully_shard" else wrapped(Stack(2), auto_wrap_policy=BLOCKS)
    )
    model.set_backend_collectives()
    loss = square_loss(model, batch_of(0))
    loss.backward()
    with trace(model) as events:
        loss = square_loss(model, batch_of(1))
        forward = list(events)
        loss.backward()
    numbers = Counter(event for event, _ in events)
    assert numbers["all_gather"] == numbers["unshard"] == numbers["reshard"] == numbers["wait_for_unshard"] == 5
    assert numbers["reduce_scatter"] == numbers["post_backward"] == 3
    assert [entry for entry in forward if entry[0] in ("unshard", "reshard")] == [
        ("unshard", "Stack"),
        ("unshard", "blocks.0"),
        ("unshard", "blocks.1"),
        ("reshard", "blocks.0"),
        ("reshard", "blocks.1"),
    ]
    assert ("forward_prefetch", "blocks.1") in forward
    backward = events[len(forward) :]
    assert [entry for entry in backward if entry[0] != "all_gather"] == [
        ("pre_backward", "Stack"),
        ("backward_prefetch", "blocks.1"),
        ("unshard", "blocks.1"),
        ("pre_backward", "blocks.1"),
        ("wait_for_unshard", "blocks.1"),
        ("backward_prefetch", "blocks.0"),
        ("unshard", "blocks.0"),
        ("post_backward", "blocks.1"),
        ("reshard", "blocks.1"),
        ("reduce_scatter", "blocks.1"),
        ("pre_backward", "blocks.0"),
        ("wait_for_unshard", "blocks.0"),
        ("post_backward", "blocks.0"),
        ("reshard", "blocks.0"),
        ("reduce_scatter", "blocks.0"),
        ("post_backward", "Stack"),
        ("reshard", "Stack"),
        ("reduce_scatter", "Stack"),
        ("root_post_backward", "Stack"),
    ]
    before = len(events)
    model(batch_of(2))
    assert len(events) == before


@on_ranks(2)
def test_a_trace_of_a_module_without_units_is_refused_and_one_above_roots_sees_them() -> None:
    with pytest.raises(OptionError, match="Linear has no unit"), trace(nn.Linear(2, 2)):
        pass
    models = nn.ModuleList([blocks_and_root(Stack(1), fully_shard) for _ in range(2)])
    with trace(models) as events:
        for model in models:
            model(batch_of(0))
    assert events.count(("pre_forward", "Stack")) == 2
