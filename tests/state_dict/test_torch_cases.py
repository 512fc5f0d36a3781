"""Cases of torch's suite of state dicts that are tested nowhere else: prefixes, attached modules, files, one rank."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from tests.support import assert_equal
from tests.support.both_sides import Layout, build
from tests.support.models import Layer
from tests.support.torch_and_ours import BLOCKS, FULL, Side, on_both_sides, state_of
from tests.support.zoo import CASES

NESTED = BLOCKS
KINDS = pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
WHOLE_KINDS = pytest.mark.parametrize("kind", ["FULL", "SHARDED"])


def plain(value: Any) -> Any:
    """The part of a state dict's value that both sides have: shape and the local shards of this rank."""
    if isinstance(value, ShardedTensor):
        parts = [
            [list(part.metadata.shard_offsets), list(part.metadata.shard_sizes), part.tensor.detach().clone()]
            for part in value.local_shards()
        ]
        return ["sharded", tuple(value.size()), parts]
    if isinstance(value, DTensor):
        return ["dtensor", tuple(value.shape), str(value.placements), value.to_local().detach().clone()]
    return value.detach().clone()


def saved(side: Side, model: nn.Module, kind: str) -> dict[str, Any]:
    with side.state_dict_as(model, kind):
        return dict(model.state_dict())


def plain_items(state: dict[str, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in state.items()}


def load_equal(side: Side, model: nn.Module, kind: str, state: dict[str, Any], source: nn.Module) -> None:
    """Load a state dict of ``source``, after which both models have the same values."""
    with side.state_dict_as(model, kind):
        model.load_state_dict(state)
    assert_equal(state_of(model), state_of(source))


def spoiled(model: nn.Module) -> nn.Module:
    """Change all parameters and floating buffers, so that a load that does nothing is seen."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.fill_(7.0)
    return model


# -- models of all kinds -------------------------------------------------------------------------------------------


@on_both_sides(layouts=FULL)
@WHOLE_KINDS
def test_a_prefix_goes_before_every_key_and_ignored_tensors_are_no_copies(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    case = CASES["buffers"]
    model = build(case)
    wrapped = side.wrap(
        model, layout, units=case.units, ignored_modules=[model.stages[0]], use_orig_params=use_orig_params
    )
    with side.state_dict_as(wrapped, kind):
        state = wrapped.state_dict(prefix="foo.")
    assert list(state) == [f"foo.{name}" for name in build(case).state_dict()]
    for name in ("linear.weight", "linear.bias", "mean", "num_calls"):
        tensor = model.stages[0].get_parameter(name) if "linear" in name else model.stages[0].get_buffer(name)
        assert state[f"foo.stages.0.{name}"].data_ptr() == tensor.data_ptr(), name
    return plain_items(state)


@on_both_sides(layouts=FULL)
@WHOLE_KINDS
def test_a_module_that_was_attached_after_wrapping_is_saved_and_loaded(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    def wrapped() -> Any:
        model: Any = build(CASES["uneven sizes"])
        kept, model.second = model.second, None
        model = side.wrap(model, layout, units=(Layer,), use_orig_params=use_orig_params)
        model.module.second = kept
        return model

    first, second = wrapped(), spoiled(wrapped())
    state = saved(side, first, kind)
    assert sorted(state) == sorted(build(CASES["uneven sizes"]).state_dict())
    load_equal(side, second, kind, state, first)
    return plain_items(state)


# -- types ---------------------------------------------------------------------------------------------------------


@on_both_sides(layouts=FULL)
@WHOLE_KINDS
def test_state_dicts_survive_a_file(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    other = spoiled(side.wrap_case(NESTED, layout, use_orig_params=use_orig_params))
    state = saved(side, model, kind)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    if kind == "SHARDED":
        with load_with_process_group(dist.group.WORLD):
            loaded = torch.load(file, weights_only=False)
    else:
        loaded = torch.load(file)
    load_equal(side, other, kind, loaded, model)
    return state_of(other)
