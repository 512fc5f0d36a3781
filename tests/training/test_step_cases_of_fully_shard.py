"""Steps other than one forward and one backward of everything train as a replica, and as torch's where it can."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.utils.checkpoint import checkpoint

from fsdp_flat import participate
from fsdp_flat.composable import trace
from fsdp_flat.core import units_of
from tests.support import on_ranks
from tests.support.fully_shard_sides import SGD, Sides, assert_no_step_runs, batch_of, blocks_and_root, one_backward
from tests.support.kit import Block, Stack, mesh, square_loss
from tests.support.peer import peer_fully_shard

RESHARDS = pytest.mark.parametrize("reshards", [None, True, False, 2])


class Fork(nn.Module):
    """A trunk and two branches, whose outputs are returned apart."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 8), Block())
        self.branches = nn.ModuleList([Block(), nn.Sequential(Block(), nn.Linear(8, 8))])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.branches[0](x), self.branches[1](x)


def shard_fork(model: Any, shard: Callable[..., Any], **kwargs: Any) -> Any:
    for module in (model.trunk[1], model.trunk, *model.branches):
        shard(module, **kwargs)
    return shard(model, **kwargs)


@on_ranks(2, 4)
@RESHARDS
@pytest.mark.parametrize("way", ["in turn", "left open", "one branch", "together"])
def test_two_branches_whose_losses_go_backward_in_turn(way: str, reshards: Any, num_ranks: int) -> None:
    def run(model: Any, step: int) -> None:
        losses = [output.pow(2).mean() for output in model(batch_of(step))]
        if way == "together":
            (losses[0] + losses[1]).backward()
        elif way == "one branch":
            losses[step % 2].backward()
        else:
            if way == "left open" and hasattr(model, "set_is_last_backward"):
                model.set_is_last_backward(False)
            losses[step % 2].backward(retain_graph=True)
            if way == "left open" and hasattr(model, "set_is_last_backward"):
                model.set_is_last_backward(True)
            losses[1 - step % 2].backward()

    Sides(Fork(), functools.partial(shard_fork, reshard_after_forward=reshards)).step(run, num_steps=3)


@on_ranks(2, 4)
@RESHARDS
def test_several_forwards_before_one_backward(reshards: Any) -> None:
    def run(model: Any, step: int) -> None:
        outputs = [model(batch_of(3 * step + number)) for number in range(3)]
        torch.stack(outputs).pow(2).mean().backward()

    Sides(Stack(), functools.partial(blocks_and_root, reshard_after_forward=reshards)).step(run, num_steps=2)


@on_ranks(2)
@RESHARDS
def test_several_forwards_whose_backwards_follow_in_either_order(reshards: Any) -> None:
    def run(model: Any, step: int) -> None:
        losses = [square_loss(model, batch_of(2 * step + number)) for number in range(2)]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()

    Sides(Stack(), functools.partial(blocks_and_root, reshard_after_forward=reshards)).step(run, num_steps=4)


class Checkpointed(Stack):
    """Runs each block under a checkpoint."""

    use_reentrant = False

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Reentrant(Checkpointed):
    use_reentrant = True


@on_ranks(2, 4)
@RESHARDS
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_blocks_recomputed_by_checkpoints_around_units(kind: type[Stack], reshards: Any) -> None:
    sides = Sides(kind(), functools.partial(blocks_and_root, reshard_after_forward=reshards))
    sides.step(num_steps=3)


@on_ranks(2)
@RESHARDS
@pytest.mark.parametrize("impl", list(CheckpointImpl))
@pytest.mark.parametrize("place", ["around units", "inside units", "units are wrappers"])
def test_blocks_recomputed_by_checkpoint_wrappers(place: str, impl: CheckpointImpl, reshards: Any) -> None:
    def shard(model: Any, fully_shard: Any) -> Any:
        wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
        if place == "inside units":
            for block in model.blocks:
                block.up, block.down = wrap(block.up), wrap(block.down)
        elif place == "units are wrappers":
            apply_activation_checkpointing(model, wrap, check_fn=lambda module: isinstance(module, Block))
        blocks_and_root(model, fully_shard, reshard_after_forward=reshards)
        if place == "around units":
            apply_activation_checkpointing(model, wrap, check_fn=lambda module: isinstance(module, Block))
        return model

    Sides(Stack(), shard).step(num_steps=2)


class Experts(nn.Module):
    """Layers of which each forward runs some; ``choose`` returns their indices for a step."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.experts = nn.ModuleList([Block() for _ in range(num_experts)])
        self.head = nn.Linear(8, 5)
        self.chosen: list[int] = []
        self.joins = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, expert in enumerate(self.experts):
            if index in self.chosen:
                x = expert(x)
            elif self.joins:
                participate(expert, x)
        return self.head(x)


def shard_experts(model: Any, shard: Callable[..., Any], *, inside: bool = False, **kwargs: Any) -> Any:
    if not inside:
        for expert in model.experts:
            shard(expert, **kwargs)
    return shard(model, **kwargs)


def choosing(choose: Callable[[int], list[int]]) -> Callable[[Any, int], None]:
    def run(model: Any, step: int) -> None:
        model.chosen = choose(step)
        square_loss(model, batch_of(step)).backward()

    return run


@on_ranks(2, 4)
@RESHARDS
@pytest.mark.parametrize("inside", [True, False], ids=["one unit", "own units"])
def test_experts_chosen_by_step(inside: bool, reshards: Any) -> None:
    shard = functools.partial(shard_experts, inside=inside, reshard_after_forward=reshards)
    sides = Sides(Experts(), shard, optimizer=SGD)
    sides.step(choosing(lambda step: [step % 3]), num_steps=4)
    sides.step(choosing(lambda step: []))
    sides.step(choosing(lambda step: [0, 2]))


@on_ranks(2, 4)
@RESHARDS
def test_experts_of_one_unit_chosen_by_rank(reshards: Any, rank: int) -> None:
    def shard(model: Any, fully_shard: Any) -> Any:
        shard_experts(model, fully_shard, inside=True, reshard_after_forward=reshards)
        if fully_shard is peer_fully_shard:
            # By default torch reduces what a rank has used, and so mixes parameters of different ranks.
            model.set_reduce_scatter_unused_params(True)
        return model

    with_torch = hasattr(TorchFSDPModule, "set_reduce_scatter_unused_params")
    Sides(Experts(), shard, optimizer=SGD, with_torch=with_torch).step(
        choosing(lambda step: [(rank + step) % 3]), num_steps=3
    )


@on_ranks(2, 4)
@RESHARDS
def test_experts_of_own_units_chosen_by_rank_when_the_others_participate(reshards: Any, rank: int) -> None:
    model = Experts()
    model.joins = True
    sides = Sides(model, functools.partial(shard_experts, reshard_after_forward=reshards), with_torch=False)
    sides.step(choosing(lambda step: [(rank + step) % 3]), num_steps=3)


@on_ranks(4)
@RESHARDS
def test_experts_on_another_mesh_than_the_rest(reshards: Any) -> None:
    two = mesh(2, 2)

    def shard(model: Any, fully_shard: Any) -> Any:
        for expert in model.experts:
            fully_shard(expert, mesh=two, reshard_after_forward=reshards)
        return fully_shard(model, reshard_after_forward=reshards)

    Sides(Experts(), shard).step(choosing(lambda step: [0, 1, 2]), num_steps=2)


@on_ranks(2, 4)
@RESHARDS
def test_a_group_that_one_rank_alone_does_not_use_in_its_loss(reshards: Any, rank: int) -> None:
    def run(model: Any, step: int) -> None:
        losses = [output.pow(2).mean() for output in model(batch_of(step))]
        (losses[0] if (rank + step) % 2 else losses[0] + losses[1]).backward()

    Sides(Fork(), functools.partial(shard_fork, reshard_after_forward=reshards), with_torch=False).step(
        run, num_steps=3
    )


# -- several modules as one unit -------------------------------------------------------------------------------------


def shard_pairs(model: Any, shard: Callable[..., Any], **kwargs: Any) -> Any:
    """Make one unit of the first two blocks, and one of the others with the head."""
    shard([model.blocks[0], model.blocks[1]], **kwargs)
    shard([*model.blocks[2:], model.head], **kwargs)
    return shard(model, **kwargs)


@on_ranks(2, 4)
@RESHARDS
def test_a_list_of_modules_is_one_unit(reshards: Any) -> None:
    sides = Sides(Stack(4), functools.partial(shard_pairs, reshard_after_forward=reshards))
    assert len(units_of(sides.ours)) == 3
    with trace(sides.ours) as events:
        sides.step()
    assert ("unshard", "blocks.0, blocks.1") in events
    assert events.count(("reduce_scatter", "blocks.2, blocks.3, head")) == 1
    sides.step(num_steps=2)


@on_ranks(2, 4)
@RESHARDS
def test_a_module_of_a_list_that_does_not_run(reshards: Any) -> None:
    def run(model: Any, step: int) -> None:
        model.order = [[0, 2, 3], [0, 1, 3], [1, 2], [0, 1, 2, 3]][step % 4]
        square_loss(model, batch_of(step)).backward()

    sides = Sides(Stack(4), functools.partial(shard_pairs, reshard_after_forward=reshards), optimizer=SGD)
    sides.step(run, num_steps=5)


@on_ranks(2)
@RESHARDS
@pytest.mark.parametrize("order", [[1, 0, 3, 2], [0, 2, 1, 3], [0, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3], [3, 3, 0]])
def test_modules_of_a_list_that_run_in_another_order_or_twice(order: list[int], reshards: Any) -> None:
    plain = Stack(4)
    plain.order = order
    Sides(plain, functools.partial(shard_pairs, reshard_after_forward=reshards), optimizer=SGD).step(num_steps=3)


@on_ranks(2)
@RESHARDS
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_modules_of_a_list_under_checkpoints(kind: Any, reshards: Any) -> None:
    sides = Sides(kind(4), functools.partial(shard_pairs, reshard_after_forward=reshards), optimizer=SGD)
    sides.step(num_steps=2)


@on_ranks(2)
@RESHARDS
def test_a_list_of_which_one_module_is_called_alone_outside_of_the_root(reshards: Any) -> None:
    def chunked(model: Any, step: int) -> None:
        hidden = model.only_features(batch_of(step))
        for rows in hidden.chunk(3):
            model.head(rows).pow(2).mean().backward(retain_graph=True)

    class Chunked(Stack):
        features_only = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.features(x)
            return hidden if self.features_only else self.head(hidden)

        def only_features(self, x: torch.Tensor) -> torch.Tensor:
            self.features_only = True
            try:
                return self(x)
            finally:
                self.features_only = False

    sides = Sides(Chunked(4), functools.partial(shard_pairs, reshard_after_forward=reshards), optimizer=SGD)
    sides.step(num_steps=1)
    sides.step(chunked, num_steps=2)


@on_ranks(2)
@RESHARDS
@pytest.mark.parametrize("where", [0, 1, 3])
def test_an_exception_in_the_middle_of_a_list(where: int, reshards: Any) -> None:
    sides = Sides(Stack(4), functools.partial(shard_pairs, reshard_after_forward=reshards), optimizer=SGD)
    sides.step()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for register in (sides.ours.blocks[where].up.register_forward_hook, sides.ours.blocks[where].register_forward_hook):
        handle = register(fail)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                sides.ours(batch_of(0))
            assert_no_step_runs(sides.ours)
        handle.remove()
        sides.step()


@on_ranks(2)
@RESHARDS
def test_an_exception_that_the_model_catches_in_the_middle_of_a_list(reshards: Any) -> None:
    class Catching(Stack):
        fails = False

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.first(x))
            try:
                x = self.blocks[1](x if not self.fails else x[:, :3])
            except RuntimeError:
                x = self.blocks[1](x)
            return self.blocks[3](self.blocks[2](x))

    def run(model: Any, step: int) -> None:
        model.fails = step % 2 == 1
        square_loss(model, batch_of(step)).backward()

    sides = Sides(Catching(4), functools.partial(shard_pairs, reshard_after_forward=reshards), with_torch=False)
    sides.step(run, num_steps=4)


# -- parameters ------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@RESHARDS
def test_frozen_and_trainable_parameters_in_one_unit_also_when_they_change(reshards: Any) -> None:
    def run(model: Any, step: int) -> None:
        if step == 2:
            model.blocks[0].up.weight.requires_grad_(True)
            model.blocks[1].up.bias.requires_grad_(False)
        square_loss(model, batch_of(step)).backward()

    model = Stack()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    for param in model.blocks[2].parameters():
        param.requires_grad_(False)
    Sides(model, functools.partial(blocks_and_root, reshard_after_forward=reshards)).step(run, num_steps=4)


class Tied(Stack):
    """Its head is the transpose of an embedding, inside one unit with it."""

    def __init__(self) -> None:
        super().__init__(num_outputs=8)
        self.head.weight = self.first.weight


@on_ranks(2, 4)
@RESHARDS
def test_shared_parameters_inside_a_unit(reshards: Any) -> None:
    sides = Sides(Tied(), functools.partial(blocks_and_root, reshard_after_forward=reshards))
    assert sides.ours.head.weight is sides.ours.first.weight
    sides.step(num_steps=3)


# -- forwards in other orders ----------------------------------------------------------------------------------------


@on_ranks(2)
@RESHARDS
def test_a_root_that_runs_after_a_child_has_run_alone(reshards: Any) -> None:
    def run(model: Any, step: int) -> None:
        (square_loss(model.blocks[1], batch_of(100 + step)) + square_loss(model, batch_of(step))).backward()

    sides = Sides(Stack(), functools.partial(blocks_and_root, reshard_after_forward=reshards), with_torch=False)
    sides.step(run, num_steps=3)


@on_ranks(2)
@RESHARDS
def test_a_child_that_trains_alone_before_and_after_the_root(reshards: Any) -> None:
    def run(model: Any, step: int) -> None:
        square_loss(model if step % 2 else model.blocks[1], batch_of(step)).backward()

    sides = Sides(Stack(), functools.partial(blocks_and_root, reshard_after_forward=reshards), with_torch=False)
    sides.step(run, num_steps=4)


@on_ranks(2, 4)
@RESHARDS
@pytest.mark.parametrize("order", [[0, 0], [0, 1, 0, 2], [2, 1, 0, 1]])
def test_a_module_called_twice(order: list[int], reshards: Any) -> None:
    model = Stack()
    model.order = order
    Sides(model, functools.partial(blocks_and_root, reshard_after_forward=reshards)).step(num_steps=3)


@on_ranks(2)
@RESHARDS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_between_and_inside_steps(mode: Any, reshards: Any) -> None:
    def run(model: Any, step: int) -> None:
        with mode():
            model.eval()
            model(batch_of(50 + step))
            model.train()
        loss = square_loss(model, batch_of(step))
        with mode():
            model(batch_of(60 + step))
        loss.backward()
        with mode():
            model(batch_of(70 + step))

    # torch's modules show unsharded parameters after the last forward, and do not take buffers made in inference mode.
    shard = functools.partial(blocks_and_root, reshard_after_forward=reshards)
    Sides(Stack(), shard, with_torch=False).step(run, num_steps=3)


@on_ranks(2, 4)
@RESHARDS
@pytest.mark.parametrize("way", ["sync", "no sync", "blocks sync", "kept"])
def test_gradients_accumulate_over_micro_batches(way: str, reshards: Any) -> None:
    def run(model: Any, step: int) -> None:
        for number in range(3):
            last = number == 2
            if way != "sync" and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
                if way == "blocks sync":
                    for block in model.blocks[:2]:
                        block.set_requires_gradient_sync(True)
                if way == "kept":
                    model.set_reshard_after_backward(last)
            square_loss(model, batch_of(3 * step + number)).backward()

    Sides(Stack(), functools.partial(blocks_and_root, reshard_after_forward=reshards)).step(run, num_steps=2)


@on_ranks(2)
def test_every_pair_of_resharding_of_blocks_and_root_trains_right() -> None:
    for one, other in itertools.product([None, True, False], repeat=2):

        def shard(model: Any, fully_shard: Any, one: Any = one, other: Any = other) -> Any:
            for block in model.blocks:
                fully_shard(block, reshard_after_forward=one)
            return fully_shard(model, reshard_after_forward=other)

        Sides(Stack(2), shard).step(num_steps=2)


@on_ranks(2)
@RESHARDS
def test_units_on_three_levels(reshards: Any) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Stack(2, num_outputs=8) for _ in range(2)])
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def shard(model: Any, fully_shard: Any) -> Any:
        for block in model.blocks:
            blocks_and_root(block, fully_shard, reshard_after_forward=reshards)
        return fully_shard(model, reshard_after_forward=reshards)

    Sides(Deep(), shard).step(num_steps=2)


@on_ranks(2)
def test_the_sides_differ_if_a_gradient_does() -> None:
    sides = Sides(Stack())

    def run(model: Any, step: int) -> None:
        (square_loss(model, batch_of(step)) * (1.01 if model is sides.ours else 1.0)).backward()

    with pytest.raises(AssertionError, match="elements differ"):
        sides.step(run)


@on_ranks(2)
def test_the_sides_differ_if_an_output_does() -> None:
    sides = Sides(Stack())

    def run(model: Any, step: int) -> None:
        with torch.no_grad():
            model(batch_of(step) * (1.01 if model is sides.theirs else 1.0))
        one_backward(model, step)

    with pytest.raises(AssertionError, match=r"value\[0\]: .* elements differ"):
        sides.step(run)
