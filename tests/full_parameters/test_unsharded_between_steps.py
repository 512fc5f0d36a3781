"""Parameters that stay unsharded between steps: what the user assigns then is adopted, or an error says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedStateDictConfig, ShardingStrategy, StateDictType
from fsdp_flat.core import MemoryState
from fsdp_flat.errors import PhaseError, UsageError
from tests.support import assert_close, on_ranks
from tests.support.kit import BLOCKS, batch, full_params, seeded, square_loss, wrapped

BOTH = pytest.mark.parametrize("use_orig_params", [False, True])
HOWS = pytest.mark.parametrize("how", ["told to", "no_sync"])


def kept(how: str, *, use_orig_params: bool = True) -> FSDP:
    """Return a model after a backward that has left the parameters of all units unsharded."""
    strategy = ShardingStrategy.FULL_SHARD if how == "told to" else ShardingStrategy.SHARD_GRAD_OP
    model = wrapped(seeded(), auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params, sharding_strategy=strategy)
    with ExitStack() as stack:
        if how == "told to":
            model.set_reshard_after_backward(False)
        else:
            stack.enter_context(model.no_sync())
        square_loss(model, batch(dist.get_rank(), 0)).backward()
    assert {module._unit.state for module in FSDP.fsdp_modules(model)} == {MemoryState.RETAINED_POST_BACKWARD}
    return model


def halve(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def summoned(model: Any) -> None:
    with FSDP.summon_full_params(model):
        pass


def saved_in_boxes(model: Any) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(boxes=True)):
        model.state_dict()


CALLS: dict[str, Callable[[Any], object]] = {
    "forward": lambda model: model(batch(0, 1)),
    "state_dict": lambda model: model.state_dict(),
    "summon_full_params": summoned,
    "boxes": saved_in_boxes,
}


@pytest.mark.of_guards
@on_ranks(2)
@HOWS
@pytest.mark.parametrize("call", CALLS)
def test_new_data_of_kept_parameters_is_an_error_until_they_are_resharded(how: str, call: str) -> None:
    model = kept(how)
    before = full_params(model)
    halve(model)
    with pytest.raises(PhaseError, match=r"was assigned while the unit was kept unsharded .* Call reshard\(\)"):
        CALLS[call](model)
    model.reshard()
    for module in FSDP.fsdp_modules(model.module):
        module.reshard()
    CALLS[call](model)
    assert_close(full_params(model), {name: 0.5 * value for name, value in before.items()}, atol=0, rtol=0)


@pytest.mark.of_guards
@on_ranks(2)
def test_an_assigned_parameter_is_adopted_once_the_unit_is_resharded() -> None:
    model = kept("told to")
    model.module.head.weight = nn.Parameter(torch.ones(model.module.head.weight.shape))
    with pytest.raises(PhaseError, match=r"'head.weight' .*was assigned while the unit was kept unsharded"):
        model(batch(0, 1))
    model.reshard()
    model(batch(0, 1))
    assert bool((full_params(model)["head.weight"] == 1).all())


@on_ranks(2)
@BOTH
@HOWS
@pytest.mark.parametrize("call", ["state_dict", "summon_full_params"])
def test_modules_hold_sharded_parameters_after_a_call_between_steps(call: str, how: str, use_orig_params: bool) -> None:
    model = kept(how, use_orig_params=use_orig_params)
    before = {name: (param, param.shape) for name, param in model.named_parameters()}
    CALLS[call](model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is param and param.shape == shape for name, (param, shape) in before.items())
    for head in (model.module.head, copy.copy(model.module.head)):
        with pytest.raises(UsageError, match="is sharded"):
            head(torch.ones(1, 8))


@on_ranks(1, 2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["parameter", "tensor", "none"])
def test_an_assigned_parameter_of_a_flat_one_is_an_error(call: str, kind: str) -> None:
    model: Any = wrapped(seeded(), auto_wrap_policy=BLOCKS, use_orig_params=False)
    ones = torch.ones(5, 8)
    model.module.head.weight = {"parameter": nn.Parameter(ones), "tensor": ones, "none": None}[kind]
    with pytest.raises(UsageError, match=r"'head.weight' .* was assigned on rank \d.* summon_full_params"):
        CALLS[call](model)


@on_ranks(2)
@HOWS
@BOTH
def test_a_forward_sees_weights_that_were_written_while_parameters_were_kept(how: str, use_orig_params: bool) -> None:
    model = kept(how, use_orig_params=use_orig_params)
    before = model(batch(0, 1))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    after = model(batch(0, 1))
    assert bool(before.any())
    assert not bool(after.any())
