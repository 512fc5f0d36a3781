"""When unsharded parameters are freed, and over how many ranks they are held between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_flat.composable import MixedPrecisionPolicy, fully_shard
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionError, PhaseError
from tests.support import on_ranks
from tests.support.beside import batch_of, blocks_and_root, by_steps
from tests.support.kit import mesh, seeded, square_loss
from tests.support.models import Stack
from tests.support.steps import acquaint, recorded

ITEMSIZE = 8


@on_ranks(4)
@pytest.mark.parametrize("size", [2, 4, True, False])
def test_training_with_parameters_held_by_smaller_groups_equals_a_replica_and_torch(size: int) -> None:
    by_steps(Stack(), reshard_after_forward=size).train(num_steps=3)


@on_ranks(4)
def test_rows_of_uneven_and_of_other_dims_come_back_in_backward() -> None:
    def dim_of(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.dim() == 2 and param.shape[1] % 4 == 0 and param.shape[0] % 4 else None

    # torch fails on a row that the smaller group has to itself.
    beside = by_steps(Stack(), "fully_shard", reshard_after_forward=2, shard_placement_fn=dim_of)
    assert {dim for unit in units_of(beside.ours) for handle in unit.param_groups for dim in handle.layout.dims} == {
        0,
        1,
    }
    beside.train(num_steps=2)


@on_ranks(4)
def test_the_smaller_group_holds_parameters_in_their_low_precision() -> None:
    model = seeded().double()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    losses = []
    for size in (2, True):
        copy = seeded().double()
        copy.load_state_dict(model.state_dict())
        blocks_and_root(copy, fully_shard, reshard_after_forward=size, mp_policy=policy)
        loss = square_loss(copy, batch_of(0))
        kept = [handle.kept_shards for unit in units_of(copy) for handle in unit.param_groups]
        held = [shards for shards in kept if shards is not None]
        assert {shards.dtype for shards in held} <= {torch.bfloat16}
        assert len(held) == (3 if size == 2 else 0)
        loss.backward()
        losses.append([param.grad.full_tensor() for param in copy.parameters()])
    for one, other in zip(*losses, strict=True):
        assert torch.equal(one, other)


@on_ranks(4)
def test_backward_gathers_fewer_bytes_over_the_smaller_group_and_each_rank_holds_its_part() -> None:
    model = blocks_and_root(Stack().double(), fully_shard, reshard_after_forward=2)
    acquaint(model)
    square_loss(model, batch_of(0)).backward()
    root, *blocks = units_of(model)
    numels = [handle.layout.shard_numel for unit in (root, *blocks) for handle in unit.param_groups]
    with recorded() as forward:
        loss = square_loss(model, batch_of(1))
    # Over all four ranks a shard goes to three others.
    assert forward.counts() == {"gather": 4}
    assert forward.sent("gather") == sum(numels) * 3 * ITEMSIZE
    # The last unit keeps its buffers, the others two shards; all modules show shards.
    held = [unit.param_groups[0].kept_shards for unit in (root, *blocks)]
    assert [None if shards is None else shards.numel() for shards in held] == [2 * n for n in numels[:-1]] + [None]
    assert all(unit.is_sharded for unit in units_of(model))
    with recorded() as backward:
        loss.backward()
    # Two shards go to one other rank.
    assert backward.count("gather") == 3
    assert backward.sent("gather") == sum(numels[:-1]) * 2 * ITEMSIZE
    assert all(unit.param_groups[0].kept_shards is None for unit in units_of(model))


@on_ranks(4)
def test_several_forwards_before_one_backward_train_right_with_smaller_groups() -> None:
    def run(model: nn.Module, step: int) -> None:
        first = square_loss(model, batch_of(2 * step))
        (first + square_loss(model, batch_of(2 * step + 1))).backward()

    by_steps(Stack(), reshard_after_forward=2).train(run, num_steps=2)


@on_ranks(4)
def test_a_forward_without_backward_leaves_no_old_rows_behind() -> None:
    def run(model: nn.Module, step: int) -> None:
        model(batch_of(50 + step))
        with torch.no_grad():
            model(batch_of(60 + step))
        square_loss(model, batch_of(step)).backward()

    beside = by_steps(Stack(), reshard_after_forward=2)
    beside.train(run, num_steps=3)
    beside.ours(batch_of(0))
    for param in beside.ours.parameters():
        with torch.no_grad():
            param.add_(1.0)
    expected = torch.stack([param.full_tensor().sum() for param in beside.ours.parameters()])
    beside.ours(batch_of(0))
    for module in (beside.ours, *beside.ours.blocks):
        module.unshard()
    assert torch.allclose(torch.stack([param.sum() for param in beside.ours.parameters()]), expected, rtol=1e-4)
    for module in (beside.ours, *beside.ours.blocks):
        module.reshard()


@pytest.mark.of_guards
@on_ranks(4)
def test_weights_changed_between_forward_and_backward_are_refused_as_without_groups() -> None:
    model = blocks_and_root(Stack().double(), fully_shard, reshard_after_forward=2)
    loss = square_loss(model, batch_of(0))
    with torch.no_grad():
        next(model.blocks[0].parameters()).mul_(2.0)
    with pytest.raises(PhaseError, match=r"weights of unit 'blocks\.0' were changed"):
        loss.backward()
    model.reset_iter_state()
    square_loss(model, batch_of(0)).backward()


@on_ranks(4)
@pytest.mark.parametrize("size", [2, True])
def test_one_rank_may_take_a_state_dict_between_forward_and_backward(size: int, rank: int) -> None:
    def run(model: nn.Module, step: int) -> None:
        loss = square_loss(model, batch_of(step))
        if rank == 0:
            model.state_dict()
        loss.backward()

    by_steps(Stack(), "fully_shard", reshard_after_forward=size).train(run, num_steps=2)


@on_ranks(4)
def test_a_switch_to_true_or_false_replaces_the_number_of_ranks() -> None:
    beside = by_steps(Stack(), reshard_after_forward=2)
    acquaint(beside.ours)
    for wanted, num_gathers, other_ranks in ((True, 3, 3), (False, 0, 3)):
        for side in (beside.ours, beside.theirs):
            side.set_reshard_after_forward(wanted)
        beside.train()
        loss = square_loss(beside.ours, batch_of(9))
        with recorded() as record:
            loss.backward()
        # The last unit keeps its buffers if units reshard; the root does as it is told, too.
        assert record.count("gather") == num_gathers
        numels = [unit.param_groups[0].layout.shard_numel for unit in units_of(beside.ours)]
        assert record.sent("gather") == (sum(numels[:-1]) * other_ranks * ITEMSIZE if num_gathers else 0)
        beside.ours.zero_grad()
    with pytest.raises(OptionError, match="must be True or False"):
        beside.ours.set_reshard_after_forward(2)


@on_ranks(4)
@pytest.mark.parametrize("size", [3, 0, -1, 8, 2.0])
def test_a_number_of_ranks_that_does_not_divide_the_group_is_refused_with_those_that_do(size: Any) -> None:
    with pytest.raises(OptionError, match=rf"reshard_after_forward must .*\(1, 2, 4\); got {size!r}"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=size)


@on_ranks(4)
def test_one_rank_is_false_with_a_warning_and_all_ranks_are_true() -> None:
    with pytest.warns(UserWarning, match="reshard_after_forward=1 leaves the parameters unsharded"):
        one = fully_shard(nn.Linear(4, 4), reshard_after_forward=1)
    assert units_of(one)[0].control.reshard_after_forward is False
    every = fully_shard(nn.Linear(4, 4), reshard_after_forward=dist.get_world_size())
    assert units_of(every)[0].control.reshard_after_forward is True
    assert units_of(every)[0].param_groups[0].comm.smaller_group is None
    with pytest.raises(OptionError, match=r"divides the 2 that shard \(1, 2\); got 4"):
        fully_shard(nn.Linear(4, 4), mesh=mesh(2, 2), reshard_after_forward=4)


@on_ranks(2, 4)
def test_parameters_freed_by_hand_after_forward_come_back_in_backward() -> None:
    def run(model: Any, step: int) -> None:
        loss = square_loss(model, batch_of(step))
        if hasattr(model, "reshard"):
            for module in (*model.blocks, model):
                module.reshard()
        loss.backward()

    beside = by_steps(Stack(), reshard_after_forward=False)
    beside.train(run, num_steps=2)
    assert all(unit.is_sharded for unit in units_of(beside.ours))


@on_ranks(2)
@pytest.mark.parametrize("sync", [True, False])
def test_parameters_kept_after_backward_are_not_gathered_again_until_they_change(sync: bool) -> None:
    def run(model: Any, step: int) -> None:
        if hasattr(model, "set_reshard_after_backward"):
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(sync)
        square_loss(model, batch_of(2 * step)).backward()
        if hasattr(model, "set_reshard_after_backward"):
            model.set_reshard_after_backward(True)
            model.set_requires_gradient_sync(True)
        square_loss(model, batch_of(2 * step + 1)).backward()

    beside = by_steps(Stack(), reshard_after_forward=None)
    beside.train(run, num_steps=2)
    acquaint(beside.ours)
    beside.ours.set_reshard_after_backward(False)
    square_loss(beside.ours, batch_of(1)).backward()
    with recorded() as record:
        beside.ours(batch_of(1))
    assert record.count("gather") == 0
    beside.ours.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("way", ["in place", "data", "foreach", "one rank", "state dict", "load"])
def test_changes_of_parameters_that_are_kept_after_backward_are_seen(way: str, rank: int) -> None:
    def change(model: Any) -> None:
        if way in ("data", "foreach", "one rank"):
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
        params = list(model.parameters())
        if way == "in place":
            for param in params:
                param.mul_(1.1)
        elif way == "data":
            for param in params:
                param.data.mul_(1.1)
        elif way == "foreach":
            torch._foreach_mul_(params, 1.1)
        elif way == "one rank":
            # The first row is on rank 0.
            for param in params if rank == 0 or not isinstance(params[0], DTensor) else ():
                local = param.to_local() if isinstance(param, DTensor) else param
                local[0] *= 1.1
        else:
            state = model.state_dict()
            for value in state.values():
                value.mul_(1.1)
            if way == "load":
                model.load_state_dict({name: value.clone() for name, value in state.items()})

    def run(model: Any, step: int) -> None:
        if hasattr(model, "set_reshard_after_backward"):
            model.set_reshard_after_backward(False)
        for micro_batch in range(2):
            square_loss(model, batch_of(2 * step + micro_batch)).backward()
            with torch.no_grad():
                change(model)

    # Modules of torch's fully_shard hold unsharded parameters here, whose changes are lost.
    by_steps(Stack(), "fully_shard").train(run, num_steps=2)


@on_ranks(4)
@pytest.mark.parametrize("size", [2, True])
def test_frozen_and_trainable_parameters_of_a_unit_come_back_together(size: int) -> None:
    model = Stack()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    by_steps(model, reshard_after_forward=size).train(num_steps=2)


@on_ranks(4)
def test_a_switch_between_forward_and_backward_drops_the_rows_of_the_smaller_group() -> None:
    def run(model: Any, step: int) -> None:
        loss = square_loss(model, batch_of(step))
        if hasattr(model, "reshard"):
            model.set_reshard_after_forward(True)
        loss.backward()

    by_steps(Stack(), "fully_shard", reshard_after_forward=2).train(run, num_steps=2)
