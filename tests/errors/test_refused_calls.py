"""Errors of calls on a destroyed process group or inside ``summon_full_params``, and of arguments of other types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, fully_shard, register_fsdp_forward_method, unshard_for
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.kit import square_loss
from tests.support.models import Model
from tests.support.wrapper_models import batch

TAKES_MODEL: dict[str, Callable[[Any], object]] = {
    "describe": fsdp_flat.describe,
    "participate": fsdp_flat.participate,
    "unwrap": fsdp_flat.unwrap,
    "fsdp_modules": FSDP.fsdp_modules,
    "iter_full_state_dict": lambda model: list(fsdp_flat.iter_full_state_dict(model)),
    "register_fsdp_forward_method": lambda model: register_fsdp_forward_method(model, "forward"),
    "MatrixOptimizer": lambda model: fsdp_flat.MatrixOptimizer(model, torch.optim.SGD),
    "plan": lambda model: fsdp_flat.plan(model, 2),
    "record": lambda model: fsdp_flat.record(model).__enter__(),
    "unshard_for": lambda model: unshard_for(model).__enter__(),
    "matrix_params": fsdp_flat.matrix_params,
    "clean_named_parameters": lambda model: list(fsdp_flat.clean_named_parameters(model)),
    "clean_named_modules": lambda model: list(fsdp_flat.clean_named_modules(model)),
    "ShardedEMA": lambda model: fsdp_flat.ShardedEMA(model, 0.9),
    "state_dict_type": FSDP.get_state_dict_type,
    "optim_state_dict": lambda model: FSDP.optim_state_dict(model, None),  # type: ignore[arg-type]
    "summon_full_params": lambda model: FSDP.summon_full_params(model).__enter__(),
}


@pytest.mark.parametrize("name", TAKES_MODEL)
def test_anything_but_a_module_is_refused_where_a_model_is_expected(name: str) -> None:
    for model in (None, 3, "model", {}):
        with pytest.raises(OptionTypeError, match=rf"takes a model, an nn\.Module; got {type(model).__name__}\."):
            TAKES_MODEL[name](model)


@on_ranks(2)
def test_numbers_of_other_types_are_refused(rank: int) -> None:
    model = FSDP(Model(), use_orig_params=True)
    for decay in (None, "0.9"):
        with pytest.raises(OptionTypeError, match="decay must be a number; got a"):
            fsdp_flat.ShardedEMA(model, decay)  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match="num_ranks and num_replicas must be integers; got '2' and 1"):
        fsdp_flat.plan(Model(), "2")  # type: ignore[arg-type]
    with pytest.raises(OptionTypeError, match="state_dict must be a dict"):
        fsdp_flat.ShardedEMA(model, 0.9).load_state_dict(None)  # type: ignore[arg-type]


CALLS_WITH_ARGUMENTS: dict[str, tuple[tuple[Any, ...], Callable[[Any, Any, Any], object]]] = {
    # Values that are no such argument, and a call with a wrapper, a module of fully_shard and one of them.
    "shard_placement_fn": ((0, "x"), lambda _, __, it: fully_shard(nn.Linear(2, 2), shard_placement_fn=it)),
    "ignored_params": ((1, "x", [3]), lambda _, __, it: fully_shard(nn.Linear(2, 2), ignored_params=it)),
    "dp_mesh_dims": ((0, "x"), lambda _, __, it: fully_shard(nn.Linear(2, 2), dp_mesh_dims=it)),
    "optimizer_class": ((None, 0), lambda model, _, it: fsdp_flat.MatrixOptimizer(model, it)),
    "method_name": ((None, 0), lambda model, _, it: register_fsdp_forward_method(model, it)),
    "modules in forward": ((1, None, [3]), lambda _, sharded, it: sharded.set_modules_to_forward_prefetch(it)),
    "modules in backward": ((1, None, [3]), lambda _, sharded, it: sharded.set_modules_to_backward_prefetch(it)),
    "max_norm": ((None, "x", torch.ones(2)), lambda model, _, it: model.clip_grad_norm_(it)),
    "norm_type": ((None, "x", torch.ones(2)), lambda model, _, it: model.clip_grad_norm_(1.0, it)),
    **{
        name: (
            (None, 0, [3]),
            lambda _, __, it, name=name: FSDP(nn.Linear(2, 2), mixed_precision=MixedPrecision(**{name: it})),
        )
        for name in ("_module_classes_to_ignore", "full_precision_modules", "uncast_inputs")
    },
}


@pytest.mark.parametrize("name", CALLS_WITH_ARGUMENTS)
@on_ranks(2)
def test_an_argument_of_another_type_is_refused_by_its_name(name: str) -> None:
    model, sharded = FSDP(Model(), use_orig_params=True), fully_shard(Model())
    values, call = CALLS_WITH_ARGUMENTS[name]
    for value in values:
        with pytest.raises(OptionTypeError, match=rf"{name.split()[0]} must "):
            call(model, sharded, value)


@on_ranks(1)
def test_a_model_without_wrappers_has_no_full_state_dict_to_iterate_over() -> None:
    with pytest.raises(OptionError, match="Linear holds no FullyShardedDataParallel"):
        list(fsdp_flat.iter_full_state_dict(nn.Linear(2, 2)))


@on_ranks(2)
def test_a_module_may_have_a_name_that_is_not_utf_8(rank: int) -> None:
    plain = nn.Sequential()
    plain.add_module("\udc80", Model())
    model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({Model}), use_orig_params=True)
    square_loss(model, batch(rank)).backward()
    assert "\udc80.first.weight" in model.state_dict()
