"""Batches of an accumulation that are skipped since their forward raised: gradients of the others stay."""

from __future__ import annotations

import pytest
import torch

from tests.support import on_ranks
from tests.support.beside import FRONTS, Beside
from tests.support.kit import Trouble, square_loss
from tests.support.models import Stack


@FRONTS
@pytest.mark.parametrize(("trains", "raising"), [(False, [0, 1]), (False, [0]), (True, [0, 1])])
@on_ranks(2)
def test_gradients_of_earlier_batches_stay_when_a_forward_raises(
    trains: bool, raising: list[int], front: str, rank: int
) -> None:
    beside = Beside(Stack(), front)
    beside.train()
    (head,) = [module for name, module in beside.ours.named_modules() if name.rpartition(".")[2] == "head"]

    def raise_after_the_last_layer(*_: object) -> None:
        raise Trouble("an odd batch")

    with beside.no_sync():
        beside.backward()
        if rank in raising:
            handle = head.register_forward_hook(raise_after_the_last_layer)
            with torch.set_grad_enabled(trains), pytest.raises(Trouble):
                square_loss(beside.ours, beside.batch())
            handle.remove()
        else:
            with torch.set_grad_enabled(trains):
                square_loss(beside.ours, beside.batch())
    beside.train(num_steps=2)
