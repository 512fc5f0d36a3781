"""Evaluations before and between steps see the current parameters and buffers."""

from __future__ import annotations

import pytest
import torch

from tests.support import OWN_STATISTICS, assert_close, on_ranks
from tests.support.beside import CLOSE, WRAPPER_FRONTS
from tests.support.both_sides import Layout, beside_case
from tests.support.zoo import CASES

# -- evaluation ---------------------------------------------------------------------------------------------------


@on_ranks(2)
@WRAPPER_FRONTS
@pytest.mark.parametrize("name", [pytest.param("batch norm", marks=OWN_STATISTICS), "transformer", "nested units"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_evaluation_before_and_between_steps_sees_the_current_parameters_and_buffers(
    name: str, front: str, strategy: str
) -> None:
    beside = beside_case(name, front, Layout(strategy))
    for step in range(3):
        losses = []
        for model in beside.models:
            model.eval()
            with torch.no_grad():
                losses.append(CASES[name].loss_of(model, beside.batch(100 + step)))
            model.train()
        assert_close(losses[0], losses[1], **CLOSE, what=f"evaluation {step}")
        beside.train()
    beside.check_state_dict()
