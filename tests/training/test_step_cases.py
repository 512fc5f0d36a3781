"""Steps other than one forward and one backward of everything train as a replica, and as torch's where it can."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_flat import ShardingStrategy, participate
from fsdp_flat.composable import FSDPModule, fully_shard, trace
from fsdp_flat.core import units_of
from tests.support import on_ranks
from tests.support.beside import (
    BOTH,
    Beside,
    adamw,
    assert_idle,
    batch_of,
    blocks_and_root,
    by_steps,
    one_backward,
    plain_sgd,
)
from tests.support.kit import mesh, seeded, square_loss
from tests.support.models import Block, Stack
from tests.support.peer import peer_fully_shard

RESHARDS = pytest.mark.parametrize("reshards", [None, True, False, 2])
OF_FULLY_SHARD: dict[str, Any] = {
    f"fully_shard {reshards}": (BOTH, {"reshard_after_forward": reshards}) for reshards in (None, True, False, 2)
}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    **OF_FULLY_SHARD,
    "flat FULL_SHARD": ("flat", {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
    "flat SHARD_GRAD_OP": ("flat", {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "originals FULL_SHARD": ("originals", {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
    "originals SHARD_GRAD_OP": ("originals", {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "originals NO_SHARD": ("originals", {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "flat HYBRID_SHARD": ("flat", {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
}
EVERY = pytest.mark.parametrize("setting", list(SETTINGS))


def cases(module: nn.Module, setting: str, *, with_torch: bool = True, **options: Any) -> Beside:
    """Make a model of a front beside a replica, and of torch's fully_shard where that is the front."""
    fronts, own = SETTINGS[setting]
    if "HYBRID" in setting:
        options["device_mesh"] = mesh(2, dist.get_world_size() // 2)
    return by_steps(module, fronts if with_torch or isinstance(fronts, str) else "fully_shard", **own, **options)


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
    model.trunk[1] = shard(model.trunk[1], **kwargs)
    model.trunk = shard(model.trunk, **kwargs)
    for index, branch in enumerate(model.branches):
        model.branches[index] = shard(branch, **kwargs)
    return shard(model, **kwargs)


@on_ranks(2, 4)
@EVERY
@pytest.mark.parametrize("way", ["in turn", "left open", "one branch", "together"])
def test_two_branches_whose_losses_go_backward_in_turn(way: str, setting: str, num_ranks: int) -> None:
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

    cases(Fork(), setting, shard=shard_fork).train(run, num_steps=3)


@on_ranks(2, 4)
@EVERY
def test_several_forwards_before_one_backward(setting: str) -> None:
    def run(model: Any, step: int) -> None:
        outputs = [model(batch_of(3 * step + number)) for number in range(3)]
        torch.stack(outputs).pow(2).mean().backward()

    cases(Stack(), setting).train(run, num_steps=2)


@on_ranks(2)
@EVERY
def test_several_forwards_whose_backwards_follow_in_either_order(setting: str) -> None:
    def run(model: Any, step: int) -> None:
        losses = [square_loss(model, batch_of(2 * step + number)) for number in range(2)]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()

    cases(Stack(), setting).train(run, num_steps=4)


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
@EVERY
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_blocks_recomputed_by_checkpoints_around_units(kind: type[Stack], setting: str) -> None:
    beside = cases(kind(), setting)
    beside.train(num_steps=3)


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

    by_steps(Stack(), shard=shard).train(num_steps=2)


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
        for index, expert in enumerate(model.experts):
            model.experts[index] = shard(expert, **kwargs)
    return shard(model, **kwargs)


def choosing(choose: Callable[[int], list[int]]) -> Callable[[Any, int], None]:
    def run(model: Any, step: int) -> None:
        getattr(model, "module", model).chosen = choose(step)
        square_loss(model, batch_of(step)).backward()

    return run


@on_ranks(2, 4)
@EVERY
@pytest.mark.parametrize("inside", [True, False], ids=["one unit", "own units"])
def test_experts_chosen_by_step(inside: bool, setting: str) -> None:
    shard = functools.partial(shard_experts, inside=inside)
    beside = cases(Experts(), setting, shard=shard, optimizer=plain_sgd)
    beside.train(choosing(lambda step: [step % 3]), num_steps=4)
    beside.train(choosing(lambda step: []))
    beside.train(choosing(lambda step: [0, 2]))


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
    by_steps(Experts(), BOTH if with_torch else "fully_shard", shard=shard, optimizer=plain_sgd).train(
        choosing(lambda step: [(rank + step) % 3]), num_steps=3
    )


@on_ranks(2, 4)
@EVERY
def test_experts_of_own_units_chosen_by_rank_when_the_others_participate(setting: str, rank: int) -> None:
    model = Experts()
    model.joins = True
    beside = cases(model, setting, with_torch=False, shard=shard_experts)
    beside.train(choosing(lambda step: [(rank + step) % 3]), num_steps=3)


@on_ranks(4)
@RESHARDS
def test_experts_on_another_mesh_than_the_rest(reshards: Any) -> None:
    two = mesh(2, 2)

    def shard(model: Any, fully_shard: Any) -> Any:
        for expert in model.experts:
            fully_shard(expert, mesh=two, reshard_after_forward=reshards)
        return fully_shard(model, reshard_after_forward=reshards)

    by_steps(Experts(), shard=shard).train(choosing(lambda step: [0, 1, 2]), num_steps=2)


@on_ranks(2, 4)
@EVERY
def test_a_group_that_one_rank_alone_does_not_use_in_its_loss(setting: str, rank: int) -> None:
    def run(model: Any, step: int) -> None:
        losses = [output.pow(2).mean() for output in model(batch_of(step))]
        (losses[0] if (rank + step) % 2 else losses[0] + losses[1]).backward()

    cases(Fork(), setting, with_torch=False, shard=shard_fork).train(run, num_steps=3)


# -- several modules as one unit -------------------------------------------------------------------------------------


def shard_pairs(model: Any, shard: Callable[..., Any], **kwargs: Any) -> Any:
    """Make one unit of the first two blocks, and one of the others with the head."""
    shard([model.blocks[0], model.blocks[1]], **kwargs)
    shard([*model.blocks[2:], model.head], **kwargs)
    return shard(model, **kwargs)


@on_ranks(2, 4)
@RESHARDS
def test_a_list_of_modules_is_one_unit(reshards: Any) -> None:
    beside = by_steps(Stack(4), shard=shard_pairs, reshard_after_forward=reshards)
    assert len(units_of(beside.ours)) == 3
    with trace(beside.ours) as events:
        beside.train()
    assert ("unshard", "blocks.0, blocks.1") in events
    assert events.count(("reduce_scatter", "blocks.2, blocks.3, head")) == 1
    beside.train(num_steps=2)


@on_ranks(2, 4)
@RESHARDS
def test_a_module_of_a_list_that_does_not_run(reshards: Any) -> None:
    def run(model: Any, step: int) -> None:
        model.order = [[0, 2, 3], [0, 1, 3], [1, 2], [0, 1, 2, 3]][step % 4]
        square_loss(model, batch_of(step)).backward()

    beside = by_steps(Stack(4), shard=shard_pairs, reshard_after_forward=reshards, optimizer=plain_sgd)
    beside.train(run, num_steps=5)


@on_ranks(2)
@RESHARDS
@pytest.mark.parametrize("order", [[1, 0, 3, 2], [0, 2, 1, 3], [0, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3], [3, 3, 0]])
def test_modules_of_a_list_that_run_in_another_order_or_twice(order: list[int], reshards: Any) -> None:
    plain = Stack(4)
    plain.order = order
    by_steps(plain, shard=shard_pairs, reshard_after_forward=reshards, optimizer=plain_sgd).train(num_steps=3)


@on_ranks(2)
@RESHARDS
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_modules_of_a_list_under_checkpoints(kind: Any, reshards: Any) -> None:
    beside = by_steps(kind(4), shard=shard_pairs, reshard_after_forward=reshards, optimizer=plain_sgd)
    beside.train(num_steps=2)


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

    beside = by_steps(Chunked(4), shard=shard_pairs, reshard_after_forward=reshards, optimizer=plain_sgd)
    beside.train(num_steps=1)
    beside.train(chunked, num_steps=2)


@on_ranks(2)
@RESHARDS
@pytest.mark.parametrize("where", [0, 1, 3])
def test_an_exception_in_the_middle_of_a_list(where: int, reshards: Any) -> None:
    beside = by_steps(Stack(4), shard=shard_pairs, reshard_after_forward=reshards, optimizer=plain_sgd)
    beside.train()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for register in (
        beside.ours.blocks[where].up.register_forward_hook,
        beside.ours.blocks[where].register_forward_hook,
    ):
        handle = register(fail)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                beside.ours(batch_of(0))
            assert_idle(beside.ours)
        handle.remove()
        beside.train()


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

    beside = by_steps(Catching(4), "fully_shard", shard=shard_pairs, reshard_after_forward=reshards)
    beside.train(run, num_steps=4)


# -- parameters ------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if "flat" not in setting])
def test_frozen_and_trainable_parameters_in_one_unit_also_when_they_change(setting: str) -> None:
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
    cases(model, setting).train(run, num_steps=4)


# -- forwards in other orders ----------------------------------------------------------------------------------------


@on_ranks(2)
@EVERY
def test_a_root_that_runs_after_a_child_has_run_alone(setting: str) -> None:
    def run(model: Any, step: int) -> None:
        (square_loss(model.blocks[1], batch_of(100 + step)) + square_loss(model, batch_of(step))).backward()

    beside = cases(Stack(), setting, with_torch=False)
    beside.train(run, num_steps=3)


@on_ranks(2)
@EVERY
def test_a_child_that_trains_alone_before_and_after_the_root(setting: str) -> None:
    def run(model: Any, step: int) -> None:
        square_loss(model if step % 2 else model.blocks[1], batch_of(step)).backward()

    beside = cases(Stack(), setting, with_torch=False)
    beside.train(run, num_steps=4)


@on_ranks(2, 4)
@EVERY
@pytest.mark.parametrize("order", [[0, 0], [0, 1, 0, 2], [2, 1, 0, 1]])
def test_a_module_called_twice(order: list[int], setting: str) -> None:
    model = Stack()
    model.order = order
    cases(model, setting).train(num_steps=3)


@on_ranks(2)
@EVERY
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_between_and_inside_steps(mode: Any, setting: str) -> None:
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
    shard = functools.partial(blocks_and_root)
    cases(Stack(), setting, with_torch=False, shard=shard).train(run, num_steps=3)


@on_ranks(2, 4)
@EVERY
@pytest.mark.parametrize("way", ["sync", "no sync", "blocks sync", "kept"])
def test_gradients_accumulate_over_micro_batches(way: str, setting: str) -> None:
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

    cases(Stack(), setting).train(run, num_steps=2)


@on_ranks(2)
def test_every_pair_of_resharding_of_blocks_and_root_trains_right() -> None:
    for one, other in itertools.product([None, True, False], repeat=2):

        def shard(model: Any, fully_shard: Any, one: Any = one, other: Any = other) -> Any:
            for block in model.blocks:
                fully_shard(block, reshard_after_forward=one)
            return fully_shard(model, reshard_after_forward=other)

        by_steps(Stack(2), shard=shard).train(num_steps=2)


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

    by_steps(Deep(), shard=shard).train(num_steps=2)


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_training_equals_a_replica_and_torch(reshard_after_forward: bool | None) -> None:
    beside = Beside(Stack(), BOTH, optimizer=adamw, reshard_after_forward=reshard_after_forward)
    assert isinstance(beside.ours, FSDPModule)
    assert type(beside.ours).__name__ == "FSDPStack"
    beside.train(num_steps=3)
    for (name, value), other in zip(beside.ours.named_parameters(), beside.theirs.parameters(), strict=True):
        assert isinstance(value, DTensor), name
        assert value.placements == other.placements
        assert value.to_local().shape == other.to_local().shape


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward_clears_gradients_of_unsharded_units(set_to_none: bool) -> None:
    model = blocks_and_root(seeded().double(), fully_shard, reshard_after_forward=False)
    one_backward(model, 0)
    square_loss(model, batch_of(1))
    model.zero_grad(set_to_none)
    for unit in (*model.blocks, model):
        unit.reshard()
    for name, param in model.named_parameters():
        assert param.grad is None if set_to_none else not param.grad.to_local().any(), name


@on_ranks(2)
def test_a_foreach_step_on_an_unsharded_unit_counts_in_the_next_forward() -> None:
    model = blocks_and_root(seeded().double(), fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    one_backward(model, 0)
    model(batch_of(1))  # the outermost unit stays unsharded for a backward that does not follow
    optimizer.step()
    found = model(batch_of(1)).detach()
    for unit in (*model.blocks, model):
        unit.reshard()
    torch.testing.assert_close(found, model(batch_of(1)).detach())
