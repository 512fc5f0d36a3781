"""Copies and pickles of a wrapped model, which are refused, and of its parameters."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.core import is_managed
from fsdp_flat.errors import OptionTypeError, PhaseError
from tests.support import assert_equal, on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside
from tests.support.models import BufferedBlock
from tests.support.peer import peer_fsdp
from tests.support.wrapper_models import batch, message, seeded, shard, train


@WRAPPER_FRONTS
@pytest.mark.parametrize("when", ["new", "trained"])
@on_ranks(2)
def test_a_wrapped_model_is_not_copied_as_in_fsdp1_and_the_error_says_what_to_do(front: str, when: str) -> None:
    for side in (FSDP, peer_fsdp):
        model = side(seeded(), use_orig_params=front == "originals")
        if when == "trained":
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), dist.get_rank(), range(1))
        for holder in (model, nn.ModuleDict({"held": model}), [model]):
            with pytest.raises((TypeError, RuntimeError)):
                copy.deepcopy(holder)
    text = message(PhaseError, RuntimeError, lambda: copy.deepcopy(FSDP(seeded())))
    assert all(name in text for name in ("before it is sharded", "state dict", "ShardedEMA", "unwrap", "'Model'"))


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_refused_copy_leaves_the_model_as_it_was(front: str) -> None:
    beside = Beside(seeded(), front, units=(BufferedBlock,), batch=batch)
    beside.train()
    for copied in (copy.deepcopy, AveragedModel):
        with pytest.raises(PhaseError, match="ShardedEMA"):
            copied(beside.ours)
    beside.train()


@on_ranks(2)
def test_pickling_a_wrapped_model_says_what_to_save_instead() -> None:
    model = FSDP(nn.Linear(3, 2))
    for attempt in (lambda: pickle.dumps(model), lambda: copy.copy(model)):
        text = message(OptionTypeError, TypeError, attempt)
        assert "state_dict()" in text
        assert "unwrap" in text


@WRAPPER_FRONTS
@on_ranks(2)
def test_copied_and_pickled_parameters_are_plain_ones_of_the_same_values(front: str) -> None:
    model = shard(seeded(), use_orig_params=front == "originals")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, dist.get_rank(), range(1))
    params = list(model.parameters())
    stored = io.BytesIO()
    torch.save(params, stored)
    stored.seek(0)
    copied_optimizer = copy.deepcopy(optimizer)
    for twins in (
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        # A pickled flat parameter has the description that FSDP1 gives it, of a class of ours, as in FSDP1.
        torch.load(stored, weights_only=front == "originals"),
        copied_optimizer.param_groups[0]["params"],
    ):
        assert [type(twin) for twin in twins] == [nn.Parameter] * len(params)
        assert not any(is_managed(twin) or getattr(twin, "_is_flat_param", None) for twin in twins)
        assert_equal([twin.data for twin in twins], [param.data for param in params])
        # They belong to no unit, so torch's own functions work on them.
        for twin in twins:
            twin.grad = torch.ones_like(twin)
        assert torch.nn.utils.clip_grad_norm_(twins, 1e9) == sum(twin.numel() for twin in twins) ** 0.5
    copied_optimizer.step()
    assert len(copied_optimizer.state) == len(params)
