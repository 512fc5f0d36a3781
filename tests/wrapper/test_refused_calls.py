"""Errors of calls where no step can run: on a destroyed process group, and inside ``summon_full_params``."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import unshard_for
from fsdp_flat.errors import UsageError
from tests.support import on_ranks
from tests.support.kit import square_loss
from tests.wrapper.models import Model, batch


@on_ranks(2)
@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_a_model_on_a_destroyed_group_says_so(shared_memory: str, rank: int) -> None:
    os.environ["FSDP_FLAT_SHARED_MEMORY"] = shared_memory
    text = rf"group of 2 ranks, in which this is rank {rank}, was destroyed.*FullyShardedDataParallel"
    for is_used in (False, True):
        group = dist.new_group()
        model = FSDP(Model(), process_group=group, use_orig_params=True)
        if is_used:
            square_loss(model, batch(rank)).backward()
        dist.barrier()
        dist.destroy_process_group(group)
        with pytest.raises(UsageError, match=text):
            model.state_dict()
        if not is_used or shared_memory == "0":
            with pytest.raises(UsageError, match=text):
                model(batch(rank))


@on_ranks(2)
def test_a_forward_inside_summon_full_params_offers_unshard_for(rank: int) -> None:
    model = FSDP(Model(), use_orig_params=True)
    with FSDP.summon_full_params(model), pytest.raises(AssertionError, match=r"generate\(\).*unshard_for\(model\)"):
        model(batch(rank))
    with unshard_for(model):
        model(batch(rank))
