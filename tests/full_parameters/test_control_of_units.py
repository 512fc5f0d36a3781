"""Units unsharded and resharded by hand, prefetched in a given order, left open at the end of a backward, and reset."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import register_forward_method
from fsdp_flat.composable import FSDPModule, UnshardHandle, fully_shard, share_comm_ctx, trace
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionError, PhaseError, UsageError
from tests.support import assert_close, on_ranks
from tests.support.beside import APPLY, FRONTS, assert_idle, batch_of, blocks_and_root, by_policy, by_steps, plain_sgd
from tests.support.kit import full_params, square_loss
from tests.support.models import Block, Stack
from tests.support.peer import peer_fully_shard
from tests.support.steps import acquaint, recorded


def stack_of(front: str, num_blocks: int = 4, **kwargs: Any) -> Any:
    return by_policy(Stack(num_blocks).double(), APPLY[front], **kwargs)


close = functools.partial(assert_close, atol=1e-6, rtol=1e-5)


def blocks_of(model: Any) -> Any:
    return (model.module if isinstance(model, FSDP) else model).blocks


# -- unshard and reshard ---------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@FRONTS
@pytest.mark.parametrize("waits", [True, False])
def test_weights_changed_during_their_all_gather_do_not_pass_for_those_gathered(front: str, waits: bool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(stack_of(front, 2))
    model, other = models
    params = list(model.parameters())
    handle = blocks_of(model)[0].unshard(async_op=True)
    with torch.no_grad():
        for param in (*params, *other.parameters()):
            param.mul_(2)
    if waits:
        handle.wait()
    outputs = [each(batch_of(0)) for each in models]
    close(*outputs)
    for output in outputs:
        output.sum().backward()
    close(*[[param.grad for param in each.parameters()] for each in models])


@on_ranks(2, 4)
@FRONTS
@pytest.mark.parametrize("async_op", [False, True])
def test_a_unit_unsharded_by_hand_is_not_gathered_again_by_its_forward(front: str, async_op: bool) -> None:
    model = stack_of(front)
    square_loss(model, batch_of(0)).backward()
    acquaint(model)
    expected = model(batch_of(1)).detach()
    for modules in (list(blocks_of(model)), [model, *blocks_of(model)]):
        with recorded() as record:
            handles = [module.unshard(async_op=async_op) for module in modules]
            assert record.count("gather") == len(modules)
            assert [handle is not None for handle in handles] == [async_op] * len(modules)
            num_before = len(record.calls)
            with torch.no_grad():
                assert_close(model(batch_of(1)), expected, atol=0, rtol=0)
            # The root stays gathered after the first forward, as it awaits a backward.
            assert record.count("gather") - num_before <= 1
        model.reshard()


class Sums(nn.Module):
    """Adds the outputs of blocks, which it unshards before any of them runs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way != "none" and isinstance(self.blocks[0], (FSDPModule, TorchFSDPModule)):
            handles = [block.unshard(async_op=self.way != "sync") for block in self.blocks]
            if self.way == "waited":
                for handle in handles:
                    handle.wait()
        return sum(block(x) for block in self.blocks)


@on_ranks(2, 4)
@pytest.mark.parametrize("way", ["sync", "waited", "async", "none"])
@pytest.mark.parametrize("first", [True, False])
def test_units_unsharded_before_they_run_train_as_those_of_torch(way: str, first: bool) -> None:
    def run(model: Any, step: int) -> None:
        if first and isinstance(model, (FSDPModule, TorchFSDPModule)):
            # In the first step before anything else has run.
            for module in (model, *model.blocks):
                handle = module.unshard(async_op=way != "sync")
                if way == "waited":
                    handle.wait()
        square_loss(model, batch_of(step)).backward()

    by_steps(Sums(way)).train(run, num_steps=3)


@on_ranks(2)
def test_wait_puts_unsharded_parameters_in_place_before_the_first_forward() -> None:
    plain = Stack().double()
    expected = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = blocks_and_root(plain, fully_shard)
    handles = [module.unshard(async_op=True) for module in model.modules() if isinstance(module, FSDPModule)]
    for handle in handles:
        assert isinstance(handle, UnshardHandle)
        handle.wait()
        handle.wait()
    assert_close({name: param.detach() for name, param in model.named_parameters()}, expected, atol=0, rtol=0)
    for module in (model, *model.blocks):
        module.reshard()
        module.reshard()
    assert all(param.to_local().numel() < expected[name].numel() for name, param in model.named_parameters())
    square_loss(model, batch_of(0)).backward()
    assert_idle(model)


@on_ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_module_without_parameters_can_be_unsharded_and_resharded(async_op: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).double()
    for child in model:
        fully_shard(child)
    for _ in range(2):
        handle = model[1].unshard(async_op=async_op)
        assert (handle is None) is not async_op
        if handle is not None:
            handle.wait()
        model[1].reshard()
        model[0](batch_of(0))


@on_ranks(2)
def test_a_wait_after_the_forward_has_resharded_does_nothing() -> None:
    beside = by_steps(Stack())
    handle = beside.ours.blocks[0].unshard(async_op=True)
    beside.train()
    assert handle is not None
    handle.wait()
    assert units_of(beside.ours)[1].is_sharded
    beside.train()


@on_ranks(2)
def test_an_unshard_after_an_optimizer_step_has_the_new_values() -> None:
    beside = by_steps(Stack())
    beside.train()
    for module in (beside.ours, *beside.ours.blocks):
        module.unshard()
    actual = {name: param.detach().clone() for name, param in beside.ours.named_parameters()}
    close(actual, {name: param.detach() for name, param in beside.plain.named_parameters()})
    with torch.no_grad():
        beside.ours(batch_of(0))
    beside.ours.reshard()
    beside.train()


@on_ranks(2)
def test_a_unit_cannot_be_resharded_inside_its_forward_nor_summoned_parameters_be_freed() -> None:
    model = stack_of("flat")
    block = blocks_of(model)[0]
    with FSDP.summon_full_params(model):
        for act in (block.reshard, block.unshard):
            with pytest.raises(PhaseError, match="inside summon_full_params"):
                act()
    block.module.register_forward_pre_hook(lambda *_: block.reshard())
    with pytest.raises(PhaseError, match=r"reshard was called inside the forward of unit '.*blocks\.0'"):
        model(batch_of(0))


# -- prefetch --------------------------------------------------------------------------------------------------------


def unshards(events: list[tuple[str, str]]) -> list[str]:
    return [f"{event} {name}" for event, name in events if event in ("unshard", "wait_for_unshard", "pre_backward")]


@on_ranks(2, 4)
@FRONTS
def test_lists_of_modules_set_the_order_of_prefetch(front: str) -> None:
    model = stack_of(front)
    blocks = blocks_of(model)
    square_loss(model, batch_of(0)).backward()
    model.set_modules_to_forward_prefetch(list(blocks[:2]))
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 3]))
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(index - 2, 0) : index])))
    model.set_backend_collectives()
    model.set_modules_to_backward_prefetch([blocks[3], blocks[2]])
    for step in range(2):
        with trace(model) as events:
            loss = square_loss(model, batch_of(step))
            forward = len(events)
            loss.backward()
    begun = [name for event, name in events[:forward] if event == "unshard"]
    assert begun == ["Stack", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    at = events.index
    assert at(("unshard", "blocks.1")) < at(("pre_forward", "blocks.0"))
    assert at(("pre_forward", "blocks.0")) < at(("unshard", "blocks.2")) < at(("pre_forward", "blocks.1"))
    backward = events[forward:]
    assert [name for event, name in backward if event == "unshard"] == ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]
    at = backward.index
    assert at(("unshard", "blocks.2")) < at(("pre_backward", "blocks.3"))
    assert at(("pre_backward", "blocks.3")) < at(("unshard", "blocks.1")) < at(("pre_backward", "blocks.2"))
    assert at(("pre_backward", "blocks.2")) < at(("unshard", "blocks.0")) < at(("pre_backward", "blocks.1"))


@on_ranks(2, 4)
@pytest.mark.parametrize("reshards", [None, False])
def test_wrong_lists_do_no_harm(reshards: bool | None) -> None:
    def shard(model: Any, fully_shard: Any) -> Any:
        blocks_and_root(model, fully_shard, reshard_after_forward=reshards)
        blocks = model.blocks
        model.set_modules_to_forward_prefetch([blocks[3], blocks[0]])
        blocks[3].set_modules_to_forward_prefetch([blocks[0], blocks[1]])
        blocks[3].set_modules_to_backward_prefetch([blocks[0], blocks[3]])
        blocks[0].set_modules_to_backward_prefetch([blocks[3], blocks[2]])
        blocks[1].set_modules_to_backward_prefetch([blocks[2]])
        return model

    plain = Stack(4)
    # The last block never runs, though others prefetch it.
    plain.order = [0, 1, 2]
    beside = by_steps(plain, shard=shard, optimizer=plain_sgd)
    beside.train(num_steps=3)
    assert all(unit.is_sharded for unit in units_of(beside.ours))
    assert_idle(beside.ours)


@on_ranks(2)
def test_an_empty_list_restores_the_librarys_order_and_other_modules_are_refused() -> None:
    model = stack_of("fully_shard")
    for setter in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
        with pytest.raises(OptionError, match="Linear has none"):
            setter([model.first])
        setter([model.blocks[3]])
        setter([])
    with trace(model) as events:
        for _ in range(2):
            square_loss(model, batch_of(0)).backward()
    assert events.count(("forward_prefetch", "blocks.3")) == 1
    assert events.count(("backward_prefetch", "blocks.0")) == 2


# -- unshard in backward ---------------------------------------------------------------------------------------------


class Embedded(nn.Module):
    """An embedding, whose backward does not read its weight, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.block = Block()
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


@on_ranks(2, 4)
@pytest.mark.parametrize("reshards", [True, False, None])
def test_a_unit_that_backward_does_not_read_is_not_gathered_there(reshards: bool | None) -> None:
    def shard(model: Any, fully_shard: Any) -> Any:
        fully_shard(model.embedding, reshard_after_forward=reshards)
        fully_shard(model.block, reshard_after_forward=reshards)
        model.embedding.set_unshard_in_backward(False)
        return fully_shard(model, reshard_after_forward=reshards)

    def run(model: Any, step: int) -> None:
        tokens = torch.randint(10, (4,), generator=torch.Generator().manual_seed(step))
        model(tokens).pow(2).mean().backward()

    beside = by_steps(Embedded(), shard=shard)
    beside.train(run, num_steps=2)
    with trace(beside.ours) as events:
        beside.train(run)
    assert events.count(("unshard", "embedding")) == 1
    assert events.count(("reduce_scatter", "embedding")) == 1


@on_ranks(2)
def test_a_backward_that_reads_a_unit_it_was_told_not_to_gather_raises() -> None:
    model = stack_of("fully_shard")
    model.blocks[1].set_unshard_in_backward(False)
    with pytest.raises(RuntimeError):
        square_loss(model, batch_of(0)).backward()
    model.reset_iter_state()
    model.blocks[1].set_unshard_in_backward(True)
    square_loss(model, batch_of(0)).backward()


# -- the end of a backward -------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("reshards", [None, False, 2])
def test_gradients_are_set_by_the_last_of_several_backwards(reshards: Any, sync: bool) -> None:
    def run(model: Any, step: int) -> None:
        for micro_batch in range(3):
            if hasattr(model, "set_is_last_backward"):
                model.set_is_last_backward(micro_batch == 2)
                model.set_requires_gradient_sync(sync or micro_batch == 2)
            square_loss(model, batch_of(10 * step + micro_batch)).backward()

    beside = by_steps(Stack(), reshard_after_forward=reshards)
    beside.train(run, num_steps=2)


@on_ranks(2)
def test_a_backward_left_open_exchanges_nothing_and_sets_no_gradient() -> None:
    model = stack_of("fully_shard")
    square_loss(model, batch_of(0)).backward()
    model.zero_grad()
    model.blocks[0].set_is_last_backward(False)
    with recorded() as record:
        square_loss(model, batch_of(0)).backward()
    assert record.count("all_reduce") == 0
    assert all(param.grad is None for param in model.parameters())
    model.set_is_last_backward(True)
    with recorded() as record:
        square_loss(model, batch_of(0)).backward()
    assert record.count("all_reduce") == 1
    twice = [param.grad.full_tensor() for param in model.parameters()]
    model.zero_grad()
    square_loss(model, batch_of(0)).backward()
    close([2 * param.grad.full_tensor() for param in model.parameters()], twice)


# -- recovery --------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_reset_after_an_exception_frees_everything_and_the_next_step_is_right(where: str) -> None:
    beside = by_steps(Stack())
    beside.train()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    block = beside.ours.blocks[1]
    register = block.register_forward_pre_hook if where == "forward" else block.register_full_backward_hook
    handle = register(fail)
    with pytest.raises(ZeroDivisionError):
        square_loss(beside.ours, batch_of(0)).backward()
    handle.remove()
    with pytest.raises(UsageError, match=r"outermost unit; 'blocks\.0' is nested in 'Stack'"):
        beside.ours.blocks[0].reset_iter_state()
    beside.ours.reset_iter_state()
    assert_idle(beside.ours)
    assert all(unit.param_groups[0].output.nbytes == 0 for unit in units_of(beside.ours))
    beside.ours.zero_grad()
    beside.train()


# -- several roots, and methods --------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("early", [True, False])
def test_several_roots_share_streams_and_memory(early: bool) -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([Stack(2, num_outputs=8) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stage in self.stages:
                x = stage(x)
            return x

    def shard(model: Any, fully_shard: Any) -> Any:
        for stage in model.stages:
            blocks_and_root(stage, fully_shard)
        if fully_shard is peer_fully_shard:
            # Older torch has no such function; the numbers are those of stages with streams of their own.
            getattr(torch.distributed.fsdp, "share_comm_ctx", list)(list(model.stages))
        elif early:
            share_comm_ctx(list(model.stages))
        return model

    beside = by_steps(Stages(), shard=shard)
    if not early:
        square_loss(beside.ours, batch_of(0))
        share_comm_ctx(list(beside.ours.stages))
    for number in range(2):
        for model in (beside.ours, beside.theirs):
            square_loss(model, batch_of(number)).backward()
    contexts = {unit.step for unit in units_of(beside.ours)}
    assert len(contexts) == 3
    assert len({context.pool for context in contexts}) == 1
    assert len({context.streams for context in contexts}) == 1
    assert {handle.pool for unit in units_of(beside.ours) for handle in unit.param_groups} == {
        next(iter(contexts)).pool
    }
    for one, other in zip(beside.ours.parameters(), beside.theirs.parameters(), strict=True):
        close(one.grad.full_tensor(), other.grad.full_tensor())
    with pytest.raises(OptionError, match="Linear has none"):
        share_comm_ctx([beside.ours.stages[0].first])
    share_comm_ctx([])


@on_ranks(2)
def test_a_method_runs_with_unsharded_parameters_and_other_modules_are_ignored() -> None:
    class Headed(Stack):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(x)

    beside = by_steps(Headed())
    register_forward_method(nn.Linear(2, 2), "missing")
    register_forward_method(beside.ours, "encode")
    torch_register(beside.theirs, "encode")
    beside.train(lambda model, step: model.encode(batch_of(step)).pow(2).sum().backward(), num_steps=2)


@on_ranks(2)
@FRONTS
def test_switches_of_a_unit_are_the_same_on_both_fronts(front: str) -> None:
    model = stack_of(front)
    expected = full_params(model) if front != "fully_shard" else None
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    blocks_of(model)[0].set_unshard_in_backward(True)
    model._set_unshard_async_op(True)
    acquaint(model)
    for number in (5, 0):
        with recorded() as record:
            square_loss(model, batch_of(0)).backward()
        assert record.count("gather") == number
    model.set_reshard_after_backward(True)
    square_loss(model, batch_of(0)).backward()
    assert all(unit.is_sharded for unit in units_of(model))
    if expected is not None:
        close(full_params(model), expected)
