"""CPUOffload on a machine without an accelerator: nothing to move, and the numbers of a run without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_flat import CPUOffload, MixedPrecision
from tests.support import assert_equal, on_ranks
from tests.support.kit import full_params
from tests.support.surface_models import ALL_STRATEGIES, batches, mean_loss, sharded, small_model

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")


def train(offload: Any, strategy: str, use_orig_params: bool, precision: Any, rank: int, num_ranks: int) -> Any:
    model = sharded(
        small_model(),
        strategy,
        cpu_offload=offload,
        use_orig_params=use_orig_params,
        mixed_precision=precision,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        for micro in range(2):  # accumulated outside of no_sync, which FSDP1 does not support here
            loss = mean_loss(model, batches(num_ranks, step=2 * step + micro)[rank])
            loss.backward()
            losses.append(loss.item())
        losses.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    devices = {param.device.type for param in model.parameters()}
    return {"losses": losses, "parameters": full_params(model), "devices": sorted(devices)}


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
@on_ranks(2)
def test_offloaded_training_gives_the_same_numbers_to_the_bit(
    strategy: str, use_orig_params: bool, low: bool, rank: int, num_ranks: int
) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else None
    options = (strategy, use_orig_params, precision, rank, num_ranks)
    without = train(None, *options)
    assert without["devices"] == ["cpu"]
    assert len(set(without["losses"])) > 5
    assert_equal(train(CPUOffload(offload_params=True), *options), without, what="offloaded run")


@on_ranks(2)
def test_something_else_than_cpu_offload_is_refused(rank: int) -> None:
    with pytest.raises(TypeError, match="cpu_offload must be a CPUOffload; got True"):
        sharded(small_model(), cpu_offload=True)
