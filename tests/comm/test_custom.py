"""Collectives of a caller's own, and those in 8-bit integers with their error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.collectives import QuantizedAllGather, QuantizedReduceScatter, use_collectives
from fsdp_flat.comm.torch_comm import all_gather_single, reduce_scatter_single
from fsdp_flat.errors import OptionError, PhaseError
from tests.support import assert_equal, on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside, batch
from tests.support.kit import full_params, square_loss
from tests.support.models import Stack
from tests.support.steps import recorded


class Plain:
    """The backend's own, called in the way of torch's ``fully_shard``; counts its calls."""

    def __init__(self) -> None:
        self.num_gathers = self.num_reductions = 0

    def gather(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.num_gathers += 1
        return all_gather_single(output_tensor, input_tensor.clone(), group=group, async_op=async_op)

    def reduce(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        self.num_reductions += 1
        reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


@on_ranks(2, 4)
@WRAPPER_FRONTS
def test_a_callers_collectives_move_what_a_step_needs_and_nothing_else(front: str) -> None:
    beside = Beside(Stack(), front)
    plain = Plain()
    use_collectives(beside.ours, all_gather=plain.gather, reduce_scatter=plain.reduce)
    for step in range(1, 4):
        beside.train()
        assert (plain.num_gathers, plain.num_reductions) == (6 * step, 4 * step)
    before = plain.num_gathers
    beside.ours.state_dict()
    assert plain.num_gathers == before
    use_collectives(beside.ours)
    beside.train()
    assert plain.num_gathers == before


@on_ranks(2)
def test_collectives_are_not_replaced_during_a_step(rank: int) -> None:
    beside = Beside(Stack())
    loss = square_loss(beside.ours, batch(rank))
    beside.ours.register_forward_pre_hook(lambda *_: use_collectives(beside.ours))
    loss.backward()
    beside.ours.module.first.register_forward_pre_hook(lambda *_: use_collectives(beside.ours))
    with pytest.raises(PhaseError, match="between steps"):
        beside.ours(batch(rank))


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of very different sizes, a stretch of zeros among them."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(numel, generator=generator) * torch.logspace(-6, 3, numel)
    x[: numel // 7] = 0
    return x.to(dtype)


def largest_of_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """For each element the largest magnitude in its block."""
    return torch.cat([part.abs().max().expand(part.numel()) for part in x.split(block)])


@on_ranks(2, 4)
@pytest.mark.parametrize("numel", [1, 100, 1000])
def test_an_8_bit_gather_is_off_by_half_a_step_of_each_block_and_the_same_on_every_rank(numel: int, rank: int) -> None:
    size = dist.get_world_size()
    slices = [values(r, numel) for r in range(size)]
    full = torch.zeros(size * numel)
    full.view(size, -1)[rank] = slices[rank]
    own = full.view(size, -1)[rank]
    work = QuantizedAllGather(block=64)(full, own, dist.group.WORLD, async_op=True)
    assert work is not None
    work.wait()
    work.wait()
    assert work.is_completed()
    for got, exact in zip(full.view(size, -1), slices, strict=True):
        assert ((got - exact).abs() <= largest_of_blocks(exact, 64) / 253.9).all()
    theirs = full.clone()
    dist.broadcast(theirs, 0)
    assert_equal(full, theirs)


@on_ranks(2, 4)
def test_an_8_bit_reduction_is_off_by_half_a_step_of_each_ranks_block(rank: int) -> None:
    size, numel = dist.get_world_size(), 500
    everyone = [values(r, size * numel) for r in range(size)]
    out = torch.zeros(numel)
    assert QuantizedReduceScatter(block=64)(out, everyone[rank], dist.group.WORLD, dist.ReduceOp.SUM) is None
    parts = [x.view(size, numel)[rank] for x in everyone]
    bound = sum(largest_of_blocks(part, 64) for part in parts) / 253.9
    exact = torch.stack(parts).double().sum(0)
    assert ((out - exact).abs() <= bound + 1e-6 * exact.abs()).all()
    with pytest.raises(OptionError, match="sums"):
        QuantizedReduceScatter()(out, everyone[rank], dist.group.WORLD, dist.ReduceOp.MAX)


@on_ranks(2)
def test_what_is_not_finite_or_tiny_stays_so_in_8_bits(rank: int) -> None:
    full = torch.zeros(2, 128)
    full[rank, :4] = torch.tensor([1e-38, 0.0, -1e-40, 1e-39])
    full[rank, 64] = float("inf") if rank == 0 else float("nan")
    QuantizedAllGather(block=64)(full.view(-1), full[rank], dist.group.WORLD)
    assert torch.isfinite(full[:, :64]).all()
    assert full[:, :64].abs().max() < 1e-35
    assert torch.isnan(full[:, 64:]).all()


def test_blocks_have_elements() -> None:
    for kind in (QuantizedAllGather, QuantizedReduceScatter):
        with pytest.raises(OptionError, match="at least 1, got 0"):
            kind(block=0)


@on_ranks(2)
def test_training_in_8_bits_stays_near_exact_training_with_a_quarter_of_the_bytes(rank: int) -> None:
    losses = {}
    for quantized in (False, True):
        torch.manual_seed(0)
        beside = Beside(Stack(width=32))
        if quantized:
            use_collectives(beside.ours, all_gather=QuantizedAllGather(), reduce_scatter=QuantizedReduceScatter())
        for _ in range(20):
            beside.zero_grad()
            loss = square_loss(beside.ours, batch(0, width=32))
            loss.backward()
            beside.optimizer.step()
        losses[quantized] = loss.item()
    assert losses[True] == pytest.approx(losses[False], rel=0.1)
    assert losses[True] != losses[False]
    with recorded() as record:
        square_loss(beside.ours, batch(rank, width=32)).backward()
    numel = sum(param.numel() for param in beside.plain.parameters())
    assert record.sent("all_to_all_single") < 0.5 * numel * 8 * 0.3
    with FSDP.summon_full_params(beside.ours):
        shown = {name: param.detach().clone() for name, param in beside.ours.named_parameters()}
    assert_equal(shown, full_params(beside.ours))
