"""Backwards that the caller finalizes, and unsharded parameters that stay where they are (both of torch 2.15)."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_flat.composable import FSDPModule
from fsdp_flat.core import units_of
from fsdp_flat.errors import PeerFailureError, UsageError
from tests.support import on_ranks
from tests.support.beside import batch_of, blocks_and_root, by_steps
from tests.support.kit import square_loss
from tests.support.models import Stack
from tests.support.patience import impatient


@on_ranks(2, 4)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("reshards", [None, False, 2])
def test_several_backwards_are_finalized_at_once(reshards: Any, sync: bool, waits: bool) -> None:
    def run(model: Any, step: int) -> None:
        by_hand, is_sharded = hasattr(model, "finalize_backward"), hasattr(model, "reshard")
        for micro_batch in range(3):
            is_last = micro_batch == 2
            if by_hand:
                # As the stages of torch 2.15's pipelines, before each forward.
                model.set_manual_backward_finalization(True)
            elif is_sharded:
                model.set_is_last_backward(is_last)
            if is_sharded:
                model.set_requires_gradient_sync(sync or (is_last and not by_hand))
                model.set_reshard_after_backward(is_last and not by_hand)
            square_loss(model, batch_of(10 * step + micro_batch)).backward()
        if by_hand:
            # Modules of torch's fully_shard hold unsharded parameters here.
            assert not isinstance(model, FSDPModule) or all(param.grad is None for param in model.parameters())
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)
            handle = model.finalize_backward(async_op=not waits)
            assert (handle is None) is waits
            if handle is not None:
                handle.wait()
            assert all(unit.is_sharded for unit in units_of(model))
            model.set_manual_backward_finalization(False)

    by_steps(Stack(), reshard_after_forward=reshards).train(run, num_steps=2)


@on_ranks(2)
def test_a_backward_is_finalized_by_hand_only_where_it_was_said_so() -> None:
    model = blocks_and_root(Stack().double())
    assert model.finalize_backward() is None
    square_loss(model, batch_of(0)).backward()
    with pytest.raises(UsageError, match="without set_manual_backward_finalization"):
        model.finalize_backward()
    with pytest.raises(UsageError, match=r"outermost unit; 'blocks\.0' is nested"):
        model.blocks[0].set_manual_backward_finalization(True)
    with pytest.raises(UsageError, match=r"outermost unit; 'blocks\.0' is nested"):
        model.blocks[0].finalize_backward()
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    square_loss(model, batch_of(0)).backward()
    model.set_manual_backward_finalization(True)
    with pytest.raises(UsageError, match="gradients are not set yet"):
        model.set_manual_backward_finalization(False)
    assert all(param.grad is None for param in model.parameters())
    model.finalize_backward()
    assert all(param.grad is not None for param in model.parameters())
    model.set_manual_backward_finalization(False)
    # A reset drops what was left open.
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    square_loss(model, batch_of(0)).backward()
    model.reset_iter_state()
    model.set_manual_backward_finalization(False)
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_kept_memory_of_unsharded_parameters_stays_in_place() -> None:
    plain = Stack().double()
    model, reference = blocks_and_root(copy.deepcopy(plain)), blocks_and_root(copy.deepcopy(plain))
    found: dict[int, set[int]] = {}

    def note(number: int, block: Any, *_: Any) -> None:
        found.setdefault(number, set()).add(block.up.weight.data_ptr())

    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(functools.partial(note, number))
    model.set_keep_unsharded_storage(True)
    others = []

    def step() -> None:
        for each in (model, reference):
            square_loss(each, batch_of(len(others))).backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
        # Memory that is freed would be used for these.
        others.append([param.full_tensor() for param in reference.parameters()])
        for param, expected in zip(model.parameters(), others[-1], strict=True):
            torch.testing.assert_close(param.full_tensor(), expected)
        assert all(unit.is_sharded for unit in units_of(model))

    for _ in range(3):
        step()
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 3))
    step()
    assert {len(addresses) for addresses in found.values()} == {1}
    model.blocks[0].set_keep_unsharded_storage(False)
    step()
    freed = units_of(model.blocks[0])[0]
    for unit in units_of(model):
        assert all((handle.output.nbytes > 0) is (unit is not freed) for handle in unit.param_groups)


@on_ranks(2)
def test_one_unit_keeps_its_memory() -> None:
    model = blocks_and_root(Stack().double())
    model.set_keep_unsharded_storage(True, recurse=False)
    with torch.no_grad():
        model(batch_of(0))
    model.reshard()
    for unit in units_of(model):
        assert all((handle.output.nbytes > 0) is (unit.module is model) for handle in unit.param_groups)


class Raising(torch.autograd.Function):
    """Passes its input on; its backward raises."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *__: torch.Tensor) -> Any:
        raise ValueError("in backward")


def raising_backward(model: Any, step: int) -> None:
    with pytest.raises(ValueError, match="in backward"):
        model(Raising.apply(batch_of(step).requires_grad_())).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("is_followed", [False, True])
def test_a_backward_that_raised_is_an_error_of_finalize_backward(is_followed: bool) -> None:
    model = blocks_and_root(Stack().double())
    model.set_manual_backward_finalization(True)
    square_loss(model, batch_of(0)).backward()
    raising_backward(model, 1)
    if is_followed:
        square_loss(model, batch_of(2)).backward()
    with pytest.raises(UsageError, match="after a backward that raised"):
        model.finalize_backward()
    model.reset_iter_state()
    square_loss(model, batch_of(0)).backward()
    model.finalize_backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_backward_that_raised_on_one_rank_is_an_error_of_finalize_backward_on_all(rank: int) -> None:
    own = DeviceMesh.from_group(dist.new_group(), "cpu")  # its ranks are out of step afterwards
    with impatient():
        model = blocks_and_root(Stack().double(), mesh=own)
        model.set_manual_backward_finalization(True)
        if rank == 0:
            square_loss(model, batch_of(0)).backward()
            with pytest.raises(PeerFailureError, match="rank 1 raised UsageError: finalize_backward"):
                model.finalize_backward()
        else:
            raising_backward(model, 0)
            with pytest.raises(UsageError, match="after a backward that raised"):
                model.finalize_backward()


@on_ranks(2)
def test_finalization_by_hand_of_a_nested_unit_is_an_error_in_the_first_forward() -> None:
    model = blocks_and_root(Stack().double())
    model.blocks[0].set_manual_backward_finalization(True)
    with pytest.raises(UsageError, match=r"'blocks\.0', which is nested"):
        model(batch_of(0))
