"""An ignored module keeps its dtype under mixed precision, and what runs on FSDP1 runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as peer_library
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision
from tests.support import assert_close, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import seeded
from tests.support.peer import peer_fsdp
from tests.support.rank_tests import OWN_PARAMETERS

LOW = torch.bfloat16


def linears() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def cut_by_a_cast() -> Any:
    return nn.Sequential(nn.Linear(4, 4), Cast(), nn.Linear(4, 4))


class Cast(nn.Linear):
    """A layer that takes any dtype and returns that of its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).to(LOW)


def normed() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def converted() -> Any:
    model = linears()
    model[1].to(LOW)
    return model


@ORIG_PARAMS
@OWN_PARAMETERS
@pytest.mark.parametrize("make", [cut_by_a_cast, normed, converted, linears])
@on_ranks(2)
def test_an_ignored_module_that_runs_on_fsdp1_runs(make: Callable[[], Any], use_orig_params: bool) -> None:
    results = []
    for kind, precision in ((FSDP, MixedPrecision), (peer_fsdp, peer_library.MixedPrecision)):
        model = seeded(make)
        low: Any = precision(param_dtype=LOW)
        model = kind(model, ignored_modules=[model[1]], mixed_precision=low, use_orig_params=use_orig_params)
        with torch.autocast("cpu", LOW, enabled=make is linears):
            output = model(torch.ones(3, 4))
        output.float().sum().backward()
        results.append([output, *(param.grad for param in model.parameters() if param.grad is not None)])
    assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
