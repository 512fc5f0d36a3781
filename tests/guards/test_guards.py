"""Guards are told of the events of a step, and a step runs without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import fully_shard
from fsdp_flat.core import Guard, use_guards
from fsdp_flat.errors import PhaseError
from fsdp_flat.guards import DEFAULT, guards_off
from tests.support import assert_equal, on_ranks
from tests.support.kit import BLOCKS, normal, seeded, square_loss, train_on
from tests.support.models import Stack


def original(model: nn.Module) -> nn.Module:
    return FSDP(model, auto_wrap_policy=BLOCKS, use_orig_params=True)


def rows(model: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


FRONTS: dict[str, Callable[[Any], nn.Module]] = {
    "flat": lambda model: FSDP(model, auto_wrap_policy=BLOCKS),
    "originals": original,
    "fully_shard": rows,
}
FRONT = pytest.mark.parametrize("front", FRONTS)


class Noting(Guard):
    """Notes the events that it is told of."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def tree_built(self, *_: Any) -> None:
        self.events.append("tree_built")

    def before_reuse(self, *_: Any) -> None:
        self.events.append("before_reuse")

    def after_compute(self, *_: Any) -> None:
        self.events.append("after_compute")

    def before_backward(self, *_: Any) -> None:
        self.events.append("before_backward")

    def after_reduce(self, *_: Any) -> None:
        self.events.append("after_reduce")


@on_ranks(2)
@FRONT
def test_a_guard_is_told_of_each_event_of_a_step_in_order(front: str) -> None:
    model, guard = FRONTS[front](seeded(Stack)), Noting()
    before = use_guards([*DEFAULT, guard])
    try:
        square_loss(model, normal(0, 3, 8)).backward()
    finally:
        use_guards(before)
    assert guard.events[0] == "tree_built"
    assert guard.events[-1] == "after_reduce"
    firsts = dict.fromkeys(guard.events)
    assert list(firsts) == ["tree_built", "after_compute", "before_reuse", "before_backward", "after_reduce"]
    # The outermost unit and each block compute once, and their backwards begin once.
    num_units = 1 + len(seeded(Stack).blocks)
    assert guard.events.count("after_compute") == guard.events.count("before_backward") == num_units
    assert guard.events.count("tree_built") == guard.events.count("after_reduce") == 1


@on_ranks(2)
@FRONT
def test_steps_without_guards_train_as_with_them(front: str) -> None:
    def trained() -> dict[str, torch.Tensor]:
        model = FRONTS[front](seeded(Stack))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in train_on(model, optimizer, [normal(seed, 3, 8) for seed in range(4)]):
            pass
        full = model.state_dict()
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in full.items()}

    with_guards = trained()
    with guards_off():
        without = trained()
    assert_equal(without, with_guards)


@pytest.mark.of_guards
@on_ranks(2)
def test_guards_that_were_off_are_on_again_after_the_block() -> None:
    model = original(seeded(Stack))
    with guards_off():
        square_loss(model, normal(0, 3, 8)).backward()
    loss = square_loss(model, normal(1, 3, 8))
    with FSDP.summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    with pytest.raises(PhaseError, match="were changed after the forward of this backward"):
        loss.backward()


@on_ranks(2)
@FRONT
def test_gradients_of_parameters_unsharded_by_hand_before_the_first_forward_join_the_first_step(front: str) -> None:
    plain, model = seeded(Stack), FRONTS[front](seeded(Stack))
    x = normal(0, 3, 8)
    for each in (plain, model):
        block: Any = each.blocks[0]
        if each is model:
            block.unshard()
        sum(param.sum() for param in block.parameters() if param.ndim).backward()  # type: ignore[union-attr]
        if each is model:
            block.reshard()
        square_loss(each, x).backward()
    if front == "fully_shard":
        actual = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    else:
        with FSDP.summon_full_params(model, with_grads=True):
            actual = {name: param.grad.clone() for name, param in model.module.named_parameters()}
    expected = {name: param.grad for name, param in plain.named_parameters()}
    assert_equal({name.replace("_fsdp_wrapped_module.", ""): grad for name, grad in actual.items()}, expected)
