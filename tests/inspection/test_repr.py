"""``repr(model)`` shows strategy, ranks, dtypes and bytes of each unit on one line, on both fronts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy, describe, fully_shard, unwrap
from tests.support import on_ranks
from tests.support.kit import BLOCKS, mesh
from tests.support.models import Stack
from tests.support.peer import PeerFSDP

LOW = MixedPrecision(param_dtype=torch.bfloat16)


def lines_with(text: str, model: nn.Module) -> list[str]:
    return [line.strip() for line in repr(model).splitlines() if text in line]


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_each_wrapper_has_a_line_and_the_rest_is_as_fsdp1_shows_it(use_orig_params: bool) -> None:
    kwargs: dict[str, Any] = {"use_orig_params": use_orig_params, "auto_wrap_policy": BLOCKS}
    model = FSDP(Stack(), mixed_precision=LOW, **kwargs)
    # torch shows equal modules of a list once.
    shown = lines_with("ranks", model)
    sizes = [unit.shard_nbytes for unit in describe(model).units][:2]
    assert shown == [
        f"FULL_SHARD over 2 ranks, {number} parameters of float32 computed in bfloat16, {nbytes:,} bytes a rank"
        for number, nbytes in zip([4, 3], sizes, strict=True)
    ]
    rest = [line for line in repr(model).splitlines() if "ranks" not in line]
    theirs = PeerFSDP(Stack(), device_id=torch.device("cpu"), **kwargs)
    assert rest == repr(theirs).splitlines()


@on_ranks(4)
def test_a_hybrid_unit_shows_both_numbers_of_ranks_and_one_without_parameters_says_so() -> None:
    strategy = ShardingStrategy.HYBRID_SHARD
    model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2), device_mesh=mesh(2, 2), sharding_strategy=strategy)))
    shown = lines_with("ranks", model)
    assert shown[0] == "FULL_SHARD over 4 ranks, 0 parameters, 0 bytes a rank"
    assert shown[1] == "HYBRID_SHARD over 2 x 2 ranks (shard x replicate), 2 parameters of float32, 12 bytes a rank"


@on_ranks(2)
def test_modules_of_fully_shard_show_it_after_what_they_show_by_themselves() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    plain = repr(model)
    fully_shard(model[0])
    fully_shard(model)
    assert lines_with("Linear", model) == [
        "(0): FSDPLinear(in_features=3, out_features=2, bias=True, "
        "FULL_SHARD over 2 ranks, 2 parameters of float32, 16 bytes a rank)"
    ]
    assert lines_with("ranks", model)[0] == "FULL_SHARD over 2 ranks, 0 parameters, 0 bytes a rank"
    assert repr(unwrap(model)) == plain
