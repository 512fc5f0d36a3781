"""How many collectives a step makes beside torch's fully_shard, and in which order by the public trace."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_flat import unshard_for
from fsdp_flat.composable import fully_shard, trace
from fsdp_flat.errors import OptionError
from tests.support import on_ranks
from tests.support.beside import batch_of, blocks_and_root, one_backward
from tests.support.kit import BLOCKS, square_loss, wrapped
from tests.support.models import Stack
from tests.support.peer import peer_fully_shard
from tests.support.steps import acquaint, recorded
from tests.training.test_step_cases import Checkpointed, Reentrant, shard_pairs

GATHER, REDUCE = "_allgather_base_", "_reduce_scatter_base_"


def numbers(model: nn.Module, step: int, num_rows: int = 3) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of the backend's all-gathers and reduce-scatters in a forward and in its backward."""

    def of(mode: CommDebugMode) -> dict[str, int]:
        by_name = {operation.__name__: number for operation, number in mode.get_comm_counts().items()}
        return {name: by_name.get(name, 0) for name in (GATHER, REDUCE)}

    with warnings.catch_warnings():
        # The mode's hooks on modules make torch warn, of views and of inputs without gradients.
        warnings.simplefilter("ignore")
        with CommDebugMode() as forward:
            x = batch_of(step, num_rows=num_rows).to(next(model.parameters()).dtype)
            loss = square_loss(model, x)
        with CommDebugMode() as backward:
            loss.backward()
    return of(forward), of(backward)


def twins(plain: nn.Module, shard: Callable[..., Any]) -> tuple[Any, Any]:
    """Shard copies of a model by the library and by torch, with torch's collectives."""
    plain = plain.double()
    ours = shard(copy.deepcopy(plain), fully_shard)
    ours.set_backend_collectives()
    return ours, shard(copy.deepcopy(plain), peer_fully_shard)


def assert_same_grads(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor())


@on_ranks(2, 4)
@pytest.mark.parametrize("reshards", [None, True, False, 2])
def test_with_backend_collectives_the_numbers_are_those_of_torch(reshards: Any, num_ranks: int) -> None:
    ours, theirs = twins(Stack(), functools.partial(blocks_and_root, reshard_after_forward=reshards))
    num_blocks = len(ours.blocks)
    in_backward = {None: num_blocks, True: num_blocks + 1, False: 0, 2: num_blocks + 1}[reshards]
    for step in range(3):
        expected = numbers(theirs, step)
        assert numbers(ours, step) == expected
        assert expected == ({GATHER: num_blocks + 1, REDUCE: 0}, {GATHER: in_backward, REDUCE: num_blocks + 1})
    assert_same_grads(ours, theirs)
    with recorded() as record:
        square_loss(ours, batch_of(3)).backward()
    sizes = Counter(call.size for call in record.calls if call.name == "all_gather_single")
    in_group = in_backward if reshards == 2 else 0
    assert sizes == Counter({num_ranks: num_blocks + 1 + in_backward - in_group}) + Counter({2: in_group})


@on_ranks(2, 4)
def test_a_unit_freed_by_hand_is_gathered_once_more_in_backward_as_by_torch() -> None:
    beside = twins(Stack(), functools.partial(blocks_and_root, reshard_after_forward=False))
    for step in range(3):
        found = []
        for model in beside:
            loss = square_loss(model, batch_of(step))
            for module in (*model.blocks, model)[: 3 + step % 2]:
                module.reshard()
            with CommDebugMode() as mode:
                loss.backward()
            found.append({operation.__name__: number for operation, number in mode.get_comm_counts().items()}[GATHER])
        assert found[0] == found[1] == 3 + step % 2
    assert_same_grads(*beside)


@on_ranks(2, 4)
def test_resharding_is_switched_for_one_unit_or_for_all_as_by_torch() -> None:
    beside = twins(Stack(), blocks_and_root)
    # Blocks that are gathered again in backward; the root is not in the first step only.
    for step, (reshards, recurse, num_gathers) in enumerate(
        [(None, False, 3), (True, False, 4), (False, False, 3), (False, True, 0), (True, True, 4)]
    ):
        for model in beside:
            if reshards is not None:
                model.set_reshard_after_forward(reshards, recurse)
        own, expected = (numbers(model, step) for model in beside)
        assert own == expected
        assert own[1][GATHER] == num_gathers
    assert_same_grads(*beside)


@on_ranks(2)
def test_evaluation_gathers_once_inside_unshard_for_and_sees_every_change_of_weights() -> None:
    model = blocks_and_root(Stack().double(), fully_shard, reshard_after_forward=False)
    params = list(model.parameters())
    acquaint(model)
    with torch.no_grad():
        with recorded() as record, unshard_for(model):
            first = [model(batch_of(0)) for _ in range(3)][-1]
        assert record.count("gather") == 4
        # Neither of these changes a version that autograd counts.
        torch._foreach_mul_([param.detach() for param in params], 1.5)
        second = model(batch_of(0))
        params[0].data.mul_(1.5)
        third = model(batch_of(0))
    assert not torch.allclose(first, second)
    assert not torch.allclose(second, third)


@on_ranks(2)
def test_frozen_and_trainable_parameters_of_a_unit_are_gathered_at_once() -> None:
    plain = Stack()
    for block in plain.blocks:
        block.up.weight.requires_grad_(False)
    ours, theirs = twins(plain, blocks_and_root)
    for step in range(2):
        assert numbers(ours, step) == numbers(theirs, step)


@on_ranks(2)
def test_the_default_makes_fewer_collectives_and_is_restored() -> None:
    model = blocks_and_root(Stack().double(), fully_shard)
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
        blocks_and_root(Stack(2).double(), fully_shard)
        if front == "fully_shard"
        else wrapped(Stack(2).double(), auto_wrap_policy=BLOCKS)
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


@contextmanager
def trace_of_torch() -> Iterator[list[tuple[str, str]]]:
    """Record some of the events of torch's units inside the block, with those names that ours have."""
    events: list[tuple[str, str]] = []
    unshard, reshard, post_backward = FSDPParamGroup.unshard, FSDPParamGroup._to_sharded, FSDPParamGroup.post_backward

    def note_unshard(self: Any, async_op: bool = False) -> None:
        was_begun = self._all_gather_result is not None
        unshard(self, async_op)
        if not was_begun and self._all_gather_result is not None:
            events.append(("unshard", self._module_fqn))

    def note_reshard(self: Any) -> None:
        if self.is_unsharded:
            events.append(("reshard", self._module_fqn))
        reshard(self)

    def note_post_backward(self: Any, *args: Any) -> None:
        events.append(("post_backward", self._module_fqn))
        post_backward(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "unshard", note_unshard)
        patch.setattr(FSDPParamGroup, "_to_sharded", note_reshard)
        patch.setattr(FSDPParamGroup, "post_backward", note_post_backward)
        yield events


def shard_with_lists(model: Any, shard: Callable[..., Any], **kwargs: Any) -> Any:
    """Shard a model whose units prefetch two others, both ways."""
    blocks = blocks_and_root(model, shard, **kwargs).blocks
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 3]))
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(index - 2, 0) : index])))
    return model


# Those of which ours differ on purpose are left out: a backward gathers all units of its forwards, also where it does
# not reach them, and the root's before the last unit's.
ORDERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], list[Any]]] = {
    "plain": (Stack, blocks_and_root, [None, True, False, 2]),
    "checkpointed": (Checkpointed, blocks_and_root, [None, False]),
    "reentrant": (Reentrant, blocks_and_root, [None, False]),
    "pairs": (functools.partial(Stack, 4), shard_pairs, [None, False]),
    "lists": (functools.partial(Stack, 4), shard_with_lists, [None, 2]),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("case", list(ORDERS))
def test_units_are_unsharded_and_freed_in_the_order_of_torch(case: str) -> None:
    build, shard, all_reshards = ORDERS[case]
    for reshards in all_reshards:
        ours, theirs = twins(build(), functools.partial(shard, reshard_after_forward=reshards))
        for step in range(3):
            with trace(ours) as own:
                one_backward(ours, step)
            with trace_of_torch() as other:
                one_backward(theirs, step)
            expected = [(event, name or type(ours).__name__.removeprefix("FSDP")) for event, name in other]
            found = [entry for entry in own if entry[0] in ("unshard", "reshard", "post_backward")]
            # In a forward ours prefetch, so that the next unit's unshard comes before a reshard.
            for event in ("unshard", "reshard"):
                assert [entry for entry in found if entry[0] == event] == [
                    entry for entry in expected if entry[0] == event
                ]
            assert in_backward(found) == in_backward(expected)
        assert_same_grads(ours, theirs)


def in_backward(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the events from the first unit's post-backward on."""
    return events[[event for event, _ in events].index("post_backward") :]


@on_ranks(2)
def test_a_trace_of_a_module_without_units_is_refused_and_one_above_roots_sees_them() -> None:
    with pytest.raises(OptionError, match="Linear has no unit"), trace(nn.Linear(2, 2)):
        pass
    models = nn.ModuleList([blocks_and_root(Stack(1).double(), fully_shard) for _ in range(2)])
    with trace(models) as events:
        for model in models:
            model(batch_of(0))
    assert events.count(("pre_forward", "Stack")) == 2
