"""A rank waits for other ranks' hosts at the end of a backward only if it has to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, save_checkpoint, unshard_for
from fsdp_flat.core import units_of
from fsdp_flat.core.exchange import BackwardExchange
from fsdp_flat.errors import RankMismatchError
from fsdp_flat.sharded_grad_scaler import ShardedGradScaler
from tests.support import on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, batch, placed
from tests.support.kit import mesh, square_loss
from tests.support.models import Block, Stack
from tests.support.steps import mesh_for

ALL_ROUND = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD]


@contextmanager
def rank_one_exchanges_late() -> Iterator[None]:
    """Let rank 1 begin the exchange of the backward inside the block only when rank 0 has left the block."""
    store, begin = dist.distributed_c10d._get_default_store(), BackwardExchange.begin
    key = f"rank 0 has gone on {store.add(f'blocks of rank {dist.get_rank()}', 1)}"

    def late(exchange: BackwardExchange, *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 1:
            store.wait([key], timedelta(seconds=60))
        begin(exchange, *args, **kwargs)

    with mock.patch.object(BackwardExchange, "begin", late):
        yield
        if dist.get_rank() == 0:
            store.set(key, "")


@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", ALL_ROUND)
@WRAPPER_FRONTS
def test_a_rank_whose_parameters_all_have_gradients_steps_without_the_other_hosts(
    strategy: ShardingStrategy, front: str, rank: int
) -> None:
    beside = Beside(Stack(3), front, sharding_strategy=strategy, **mesh_for(strategy))
    beside.train()
    for _ in range(2):
        beside.zero_grad()
        with rank_one_exchanges_late():
            square_loss(beside.ours, batch(rank)).backward()
            beside.optimizer.step()
        assert beside.ours._fsdp_step().end.unread is not None


@on_ranks(2, 4)
def test_a_rank_of_fully_shard_whose_parameters_all_have_gradients_steps_without_the_other_hosts(rank: int) -> None:
    beside = Beside(Stack(3), "fully_shard")
    model, optimizer = beside.ours, beside.optimizer
    square_loss(model, batch(rank)).backward()
    with rank_one_exchanges_late():
        square_loss(model, batch(rank)).backward()
        optimizer.step()
    model.state_dict()
    assert units_of(model)[0].step.end.unread is None


class _Sometimes(Block):
    """A block with a layer that runs only if asked for."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, uses: bool = False) -> torch.Tensor:
        x = super().forward(x)
        return x + self.sometimes(x) if uses else x


class SometimesUsed(Stack):
    """Uses a layer for batches that say so."""

    def __init__(self) -> None:
        super().__init__(2)
        self.blocks[1] = _Sometimes()

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.first(x)), uses))


@on_ranks(2, 4)
def test_a_rank_with_an_unused_parameter_waits_and_gets_the_gradient_of_the_ranks_that_have_gone_on(rank: int) -> None:
    """After it all ranks wait, since such a rank may hold gradients that all have to reduce; then none does again."""
    everywhere = tuple(range(dist.get_world_size()))
    beside = Beside(SometimesUsed(), "originals")
    for step in range(6):
        ranks = (1,) if step in (2, 3) else everywhere
        beside.backward(lambda model, x, ranks=ranks: model(x, rank in ranks).pow(2).mean())
        has_gone_on = {0: False, 1: True, 2: rank == 1, 3: False, 4: False, 5: True}[step]
        assert (beside.ours._fsdp_step().end.unread is not None) == has_gone_on
        beside.check_gradients()
        beside.step()
        beside.check_parameters()


def _forward(model: FSDP, _optimizer: Any, _folder: Path) -> None:
    model(batch(dist.get_rank()))


def _save(model: FSDP, optimizer: Any, folder: Path) -> None:
    save_checkpoint(folder, model, optimizer)


READERS: dict[str, Callable[[FSDP, Any, Path], object]] = {
    "forward": _forward,
    "state_dict": lambda model, _optimizer, _folder: model.state_dict(),
    "optim_state_dict": lambda model, optimizer, _folder: FSDP.optim_state_dict(model, optimizer),
    "save_checkpoint": _save,
    "check_replicas": lambda model, _optimizer, _folder: fsdp_flat.check_replicas(model),
    "unshard": lambda model, _optimizer, _folder: model.unshard(),
    "summon_full_params": lambda model, _optimizer, _folder: FSDP.summon_full_params(model).__enter__(),
    "clip_grad_norm_": lambda model, _optimizer, _folder: model.clip_grad_norm_(1.0),
    "torch's clip_grad_norm_": lambda model, _optimizer, _folder: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
}


def _first(model: nn.Module) -> Any:
    return next(model.parameters())


FULLY_SHARD_READERS: dict[str, Callable[[Any, Any], object]] = {
    "clip_grad_norm_": lambda model, _optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "full_tensor": lambda model, _optimizer: _first(model).full_tensor(),
    "full_tensor of values": lambda model, _optimizer: _first(model).detach().full_tensor(),
    "full_tensor of a gradient": lambda model, _optimizer: _first(model).grad.full_tensor(),
    "GradScaler": lambda _model, optimizer: _scaler(torch.amp.GradScaler("cpu")).unscale_(optimizer),
    "ShardedGradScaler": lambda _model, optimizer: _scaler(ShardedGradScaler("cpu")).unscale_(optimizer),
}


def _scaler(scaler: Any) -> Any:
    scaler.scale(torch.ones(()))
    return scaler


@on_ranks(2)
@pytest.mark.parametrize("reader", READERS)
def test_ranks_that_train_different_parameters_are_told_before_anything_is_saved(
    reader: str, rank: int, tmp_path: Path
) -> None:
    beside = Beside(Stack(3), "originals")
    beside.train()
    model, optimizer = beside.ours, beside.optimizer
    optimizer.zero_grad()
    square_loss(model, batch(rank)).backward()
    model(batch(rank))  # reads that exchange
    if rank == 1:
        model.module.blocks[1].down.weight.requires_grad_(False)
    model(batch(rank)).sum().backward()
    optimizer.step()
    with pytest.raises(RankMismatchError) as raised:
        READERS[reader](model, optimizer, tmp_path)
    text = str(raised.value)
    assert "'blocks.1.down.weight'" in text or "'down.weight' of unit 'blocks.1'" in text
    assert "if an optimizer has stepped since, weights are wrong" in text
    assert not list(tmp_path.iterdir())


@on_ranks(2)
@pytest.mark.parametrize("layout", ["FULL_SHARD", "HYBRID_SHARD 2x1"])
@pytest.mark.parametrize("reader", FULLY_SHARD_READERS)
def test_ranks_of_fully_shard_that_train_different_parameters_are_told_before_a_call_where_all_meet(
    reader: str, layout: str, rank: int
) -> None:
    beside = Beside(Stack(3), "fully_shard", **placed(layout, "fully_shard"))
    model, optimizer = beside.ours, beside.optimizer
    for _ in range(2):
        optimizer.zero_grad()
        square_loss(model, batch(rank)).backward()
    FULLY_SHARD_READERS[reader](model, optimizer)
    assert units_of(model)[0].step.end.unread is None
    if rank == 1:
        model.blocks[1].down.weight.requires_grad_(False)
    square_loss(model, batch(rank)).backward()
    assert units_of(model)[0].step.end.unread is not None
    optimizer.step()
    with pytest.raises(RankMismatchError, match="if an optimizer has stepped since, weights are wrong") as raised:
        FULLY_SHARD_READERS[reader](model, optimizer)
    assert "'blocks.1.down.weight'" in str(raised.value) or "'down.weight' of unit 'blocks.1'" in str(raised.value)


@on_ranks(4)
def test_full_tensor_on_another_mesh_reads_nothing(rank: int) -> None:
    pairs = mesh(2, 2)
    other = distribute_tensor(torch.ones(4), pairs["shard"], [Shard(0)])
    beside = Beside(Stack(2), "fully_shard")
    beside.train()
    square_loss(beside.ours, batch(rank)).backward()
    square_loss(beside.ours, batch(rank)).backward()
    other.full_tensor()
    assert units_of(beside.ours)[0].step.end.unread is not None
    _first(beside.ours).full_tensor()
    assert units_of(beside.ours)[0].step.end.unread is None


def _late_loss(model: FSDP, x: torch.Tensor, *, is_late: bool) -> torch.Tensor:
    """Return a loss; if ``is_late``, a weight of a block gets its gradient after the block's own backward."""
    with unshard_for(model):
        shift = model.module.blocks[1].up.weight.mean()
    return square_loss(model, x + shift if is_late else x)


@on_ranks(2, 4)
@pytest.mark.parametrize("num_before", [0, 2])
def test_gradients_that_one_rank_alone_reduces_late_are_reduced_if_all_wait_and_else_an_error(
    num_before: int, rank: int
) -> None:
    beside = Beside(Stack(3), "originals")
    model, optimizer = beside.ours, beside.optimizer
    for _ in range(num_before):
        _late_loss(model, batch(rank), is_late=False).backward()
    optimizer.zero_grad()
    _late_loss(model, batch(rank), is_late=rank == 0).backward()
    if num_before == 0:
        late = rank == 0
        beside.follow(lambda plain, x: square_loss(plain, x + plain.blocks[1].up.weight.mean() if late else x))
        beside.check_gradients()
        return
    optimizer.step()
    with pytest.raises(RankMismatchError) as raised:
        model(batch(rank))
    assert "some ranks alone had gradients of these units that were not reduced yet: 'blocks.1'" in str(raised.value)
    assert "if an optimizer has stepped since, weights are wrong" in str(raised.value)


@on_ranks(2)
def test_a_root_that_takes_over_a_unit_reads_what_its_ranks_exchanged(rank: int) -> None:
    model = Beside(Stack(3), "originals").ours
    block = model.module.blocks[1]
    for _ in range(2):
        square_loss(block, batch(rank)).backward()
    assert units_of(block)[0].step.end.unread is not None
    if rank == 1:
        block.module.down.weight.requires_grad_(False)
    square_loss(block, batch(rank)).backward()
    with pytest.raises(RankMismatchError, match="if an optimizer has stepped since"):
        model(batch(rank))


@on_ranks(2)
def test_a_graph_that_one_rank_retains_serves_its_next_backward(rank: int) -> None:
    beside = Beside(Stack(2), "originals")
    beside.train()
    square_loss(beside.ours, batch(rank)).backward()
    loss = square_loss(beside.ours, batch(rank))
    loss.backward(retain_graph=rank == 0)
    assert (beside.ours._fsdp_step().end.unread is not None) == (rank == 1)
    beside.zero_grad()
    beside.train()
