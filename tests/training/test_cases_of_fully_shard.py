"""Cases that the fuzzer has found, each in its smallest form."""

from __future__ import annotations

import pytest
import torch

from fsdp_flat.composable import fully_shard
from tests.support import on_ranks
from tests.support.beside import batch_of, blocks_and_root, one_backward
from tests.support.kit import seeded, square_loss


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
