"""The cases of torch's suite of state dicts.

Covered: keys, values, shapes and dtypes of FULL, SHARDED and LOCAL state dicts on every rank; ``rank0_only`` and
``offload_to_cpu``; save and load into a wrapped, another wrapped, and a plain model; loads that change parameters
after a forward; buffers; shared parameters and modules; activation checkpoints in and around units, before wrapping
and after it; ignored modules; modules attached after wrapping; prefixes; units under a plain parent and the state
dict of an inner unit; keys that are missing or unexpected; ``strict=False``; mixed precision and models in half
precision; types set, nested, read back, and refused; files of ``torch.save``; ranks that hold nothing; state dicts
that are copies.

Not covered: the values of ShardedTensor's private metadata, loads over several backends, and the state dict of
offloaded parameters, which torch's class cannot make on a CPU.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support import OWN_STATISTICS, assert_close, assert_equal
from tests.support.beside import adamw
from tests.support.both_sides import TOLERANCE, Layout, batch_of, build
from tests.support.models import Layer, Outside
from tests.support.torch_and_ours import BLOCKS, FULL, ORIG, STRATEGIES, Side, on_both_sides, sgd, state_of, train
from tests.support.transport import mesh_type
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


# -- saving --------------------------------------------------------------------------------------------------------


@on_both_sides(layouts=STRATEGIES)
@KINDS
@pytest.mark.parametrize("name", ["nested units", "uneven sizes", "tied inside a unit"])
def test_keys_and_values_are_the_same(side: Side, layout: Layout, use_orig_params: bool, kind: str, name: str) -> Any:
    if kind == "LOCAL" and (use_orig_params or layout.strategy == "NO_SHARD"):
        return None  # torch's cannot be loaded back, or is not there
    case = CASES[name]
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    if kind == "LOCAL" and layout.mesh is not None:
        with pytest.raises(RuntimeError):
            saved(side, model, kind)
        return None
    train(model, case, adamw(model), range(1))
    state = saved(side, model, kind)
    if kind != "LOCAL":
        # torch puts the second names of shared parameters last.
        expected = list(build(case).state_dict())
        assert list(state) == expected if "tied" not in name else sorted(state) == sorted(expected)
    return plain_items(state)


@on_both_sides(layouts=STRATEGIES)
@pytest.mark.parametrize("offload", [False, True], ids=["on device", "offloaded"])
@pytest.mark.parametrize("rank0_only", [False, True], ids=["all ranks", "rank 0"])
def test_full_state_dicts_are_on_the_ranks_that_asked(
    side: Side, layout: Layout, use_orig_params: bool, offload: bool, rank0_only: bool
) -> Any:
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    config = side.api.FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
    with side.state_dict_as(model, "FULL", config):
        state = plain_items(model.state_dict())
    if layout.strategy.startswith("NO") and rank0_only:
        return None  # torch gives unsharded entries to all ranks
    if rank0_only and dist.get_rank() != 0:
        assert state == {}
    else:
        assert_equal(state, {name: value.detach() for name, value in build(NESTED).state_dict().items()})
    return state


@on_both_sides(layouts=FULL)
def test_a_full_state_dict_is_a_copy(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    train(model, NESTED, adamw(model), range(1))
    assert_equal(dict(state), before)
    for value in state.values():
        value.zero_()
    after = state_of(model)
    assert all(bool(value.any()) for value in after.values())
    return after


# -- saving and loading --------------------------------------------------------------------------------------------


@on_both_sides(layouts=STRATEGIES)
@KINDS
@pytest.mark.parametrize("name", ["uneven sizes", pytest.param("batch norm", marks=OWN_STATISTICS)])
def test_a_saved_model_loads_into_another_and_goes_on_alike(
    side: Side, layout: Layout, use_orig_params: bool, kind: str, name: str
) -> Any:
    if kind == "LOCAL" and (use_orig_params or layout.strategy == "NO_SHARD" or layout.mesh is not None):
        return None
    case = CASES[name]
    first, second = (side.wrap_case(case, layout, use_orig_params=use_orig_params) for _ in range(2))
    train(first, case, adamw(first), range(1))
    spoiled(second)
    state = saved(side, first, kind)
    with side.state_dict_as(second, kind):
        keys = second.load_state_dict(state)
    assert not keys.missing_keys
    assert not keys.unexpected_keys
    assert_equal(state_of(second), state_of(first))
    ends = [train(each, case, sgd(each), [3]) for each in (first, second)]
    assert_equal(ends[1], ends[0])
    return [ends[0], state_of(second)]


@on_both_sides(layouts=STRATEGIES)
def test_full_state_dicts_go_into_plain_models_and_back(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    train(model, NESTED, adamw(model), range(2))
    unwrapped = spoiled(build(NESTED))
    unwrapped.load_state_dict(model.state_dict())
    x = batch_of(NESTED, dist.get_rank(), 5)["x"]
    with torch.no_grad():
        assert_close(model(x), unwrapped(x), **TOLERANCE)
    spoiled(model)
    model.load_state_dict(unwrapped.state_dict())
    return state_of(model)


@on_both_sides(layouts=FULL)
@WHOLE_KINDS
@pytest.mark.parametrize("when", ["after forward", "between forward and backward"])
def test_a_load_after_a_forward_is_seen_by_the_next(
    side: Side, layout: Layout, use_orig_params: bool, kind: str, when: str
) -> Any:
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    batch = batch_of(NESTED, dist.get_rank(), 0)
    state = saved(side, model, kind)
    spoiled(model)
    with torch.set_grad_enabled(when != "after forward"):
        loss = NESTED.loss_of(model, batch)
    if when != "after forward":
        loss.backward()
    with side.state_dict_as(model, kind):
        model.load_state_dict(state)
    return [NESTED.loss_of(model, batch).detach(), state_of(model)]


@on_both_sides(layouts=FULL, kinds=ORIG)
@WHOLE_KINDS
def test_a_mesh_makes_distributed_tensors(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    mesh = init_device_mesh(mesh_type(), (dist.get_world_size(),))
    first, second = (
        side.wrap_case(NESTED, layout, use_orig_params=use_orig_params, device_mesh=mesh) for _ in range(2)
    )
    state = saved(side, first, kind)
    spoiled(second)
    load_equal(side, second, kind, state, first)
    return plain_items(state)


# -- models of all kinds -------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """A parameter with two names and a module with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.three = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x)))


@on_both_sides(layouts=FULL)
def test_shared_parameters_and_modules_have_all_their_names(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    torch.manual_seed(1)
    first = side.wrap(Shared(), layout, use_orig_params=use_orig_params)
    second = side.wrap(Shared(), layout, use_orig_params=use_orig_params)
    names = list(Shared().state_dict())
    first(torch.ones(2, 4)).sum().backward()
    sgd(first).step()
    state = first.state_dict()
    assert sorted(state) == sorted(names)
    second.load_state_dict(state)
    assert_equal(state_of(second), state_of(first))
    missing = {name: value for name, value in state.items() if name != "two.weight"}
    with pytest.raises(RuntimeError):
        second.load_state_dict(missing)
    return state_of(second)


@on_both_sides(layouts=FULL)
@WHOLE_KINDS
@pytest.mark.parametrize("nesting", ["inside", "outside", "both"])
def test_activation_checkpoints_in_and_around_units_change_no_key(
    side: Side, layout: Layout, use_orig_params: bool, kind: str, nesting: str
) -> Any:
    def wrapped() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(Layer(5, 5), Layer(5, 5), nn.Linear(5, 1))
        for index in range(2):
            if nesting != "outside":
                model[index] = checkpoint_wrapper(model[index])
            model[index] = side.wrap(model[index], layout, use_orig_params=use_orig_params)
            if nesting != "inside":
                model[index] = checkpoint_wrapper(model[index])
        return side.wrap(model, layout, use_orig_params=use_orig_params)

    first, second = wrapped(), spoiled(wrapped())
    first(torch.ones(2, 5)).sum().backward()
    sgd(first).step()
    state = saved(side, first, kind)
    assert list(state) == ["0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias", "2.weight", "2.bias"]
    load_equal(side, second, kind, state, first)
    return state_of(second)


@on_both_sides(layouts=FULL, kinds=ORIG)
@WHOLE_KINDS
@pytest.mark.parametrize("which", ["source", "target", "both"])
def test_activation_checkpoints_applied_after_wrapping_change_no_key(
    side: Side, layout: Layout, use_orig_params: bool, kind: str, which: str
) -> Any:
    def wrapped(applies: bool) -> Any:
        model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
        if applies:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
        return model

    first, second = wrapped(which != "target"), spoiled(wrapped(which != "source"))
    train(first, NESTED, sgd(first), range(1))
    state = saved(side, first, kind)
    assert list(state) == list(build(NESTED).state_dict())
    load_equal(side, second, kind, state, first)
    return state_of(second)


@on_both_sides(layouts=FULL)
@KINDS
def test_models_in_half_precision_save_and_load_while_gradients_exist(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    if kind == "LOCAL" and use_orig_params:
        return None

    def wrapped() -> Any:
        model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params).bfloat16()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* is sharded in torch.bfloat16, so an optimizer")
            model(batch_of(NESTED, dist.get_rank(), 0)["x"].bfloat16()).sum().backward()
        return model

    first, second = wrapped(), spoiled(wrapped())
    state = saved(side, first, kind)
    with side.state_dict_as(second, kind):
        second.load_state_dict(state)
    end = state_of(second)
    assert {value.dtype for value in end.values()} == {torch.bfloat16}
    assert_equal(end, state_of(first))
    return end


@on_both_sides(layouts=FULL)
@WHOLE_KINDS
def test_a_plain_parent_s_state_dict_has_the_plain_names(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    def wrapped() -> Any:
        torch.manual_seed(1)
        model = Outside(5, 1)
        model.tree = side.wrap(model.tree, layout, units=(Layer,), use_orig_params=use_orig_params)
        return model

    first, second = wrapped(), spoiled(wrapped())
    state = saved(side, first, kind)
    assert list(state) == list(Outside(5, 1).state_dict())
    load_equal(side, second, kind, state, first)
    return plain_items(state)


@on_both_sides(layouts=FULL)
@WHOLE_KINDS
def test_an_inner_unit_s_state_dict_has_its_own_names(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    train(model, NESTED, sgd(model), range(1))
    block = model.module.blocks[1]
    state = saved(side, block, kind)
    assert list(state) == list(build(NESTED).blocks[1].state_dict())
    return plain_items(state)


@on_both_sides(layouts=FULL)
@pytest.mark.parametrize("what", ["unit", "root", "both"])
def test_ignored_modules_are_saved_whole(side: Side, layout: Layout, use_orig_params: bool, what: str) -> Any:
    def wrapped() -> nn.Module:
        model = build(CASES["uneven sizes"])
        ignored = {"unit": [model.second], "root": [model.last.linear], "both": [model.second, model.last.linear]}[what]
        return side.wrap(model, layout, units=(Layer,), ignored_modules=ignored, use_orig_params=use_orig_params)

    first, second = wrapped(), spoiled(wrapped())
    state = first.state_dict()
    assert_equal(
        dict(state), {name: value.detach() for name, value in build(CASES["uneven sizes"]).state_dict().items()}
    )
    second.load_state_dict(state)
    assert_equal(state_of(second), dict(state))
    return state_of(second)


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


@on_both_sides(layouts=FULL, tolerance={"rtol": 1e-2, "atol": 1e-2})
@WHOLE_KINDS
def test_mixed_precision_saves_and_loads_in_full_precision(
    side: Side, layout: Layout, use_orig_params: bool, kind: str
) -> Any:
    case = CASES["uneven sizes"]
    precision = side.api.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options = {"use_orig_params": use_orig_params, "mixed_precision": precision}
    first, second = (side.wrap_case(case, layout, **options) for _ in range(2))
    first(batch_of(case, dist.get_rank(), 0)["x"]).float().sum().backward()
    sgd(first).step()
    spoiled(second)
    state = saved(side, first, kind)
    load_equal(side, second, kind, state, first)
    return plain_items(state)


@on_both_sides(num_ranks=4, layouts=FULL)
@KINDS
def test_ranks_that_hold_nothing_save_and_load(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    if kind == "LOCAL" and use_orig_params:
        return None

    def wrapped() -> Any:
        torch.manual_seed(1)
        return side.wrap(
            nn.Sequential(Layer(1, 1), nn.Linear(1, 1)), layout, units=(Layer,), use_orig_params=use_orig_params
        )

    first, second = wrapped(), spoiled(wrapped())
    state = saved(side, first, kind)
    load_equal(side, second, kind, state, first)
    return plain_items(state)


# -- keys ----------------------------------------------------------------------------------------------------------


@on_both_sides(layouts=FULL)
def test_missing_and_unexpected_keys_have_the_plain_names(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    state = model.state_dict()
    state["blocks.0.first.linear.other"] = torch.ones(3)
    del state["head.bias"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    assert '"head.bias"' in text
    assert '"blocks.0.first.linear.other"' in text
    assert "_fsdp_wrapped_module" not in text
    return None


@on_both_sides(layouts=FULL)
def test_strict_off_loads_what_is_there(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    state = model.state_dict()
    state["blocks.0.first.linear.other"] = torch.ones(3)
    spoiled(model)
    keys = model.load_state_dict(state, strict=False)
    return [sorted(keys.missing_keys), sorted(keys.unexpected_keys), state_of(model)]


# -- types ---------------------------------------------------------------------------------------------------------


@on_both_sides(layouts=FULL)
def test_types_are_set_nested_and_read_back(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    api = side.api
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    seen = []

    def note() -> None:
        settings = side.FSDP.get_state_dict_type(model)
        configs = (settings.state_dict_config, settings.optim_state_dict_config)
        seen.append([settings.state_dict_type.name, *[type(config).__name__ for config in configs]])
        for unit in side.units(model):
            assert unit._state_dict_type == settings.state_dict_type

    note()
    with side.state_dict_as(model, "SHARDED"):
        note()
        with side.state_dict_as(model, "LOCAL", api.LocalStateDictConfig()):
            note()
        note()
    note()
    before = side.FSDP.set_state_dict_type(
        model, api.StateDictType.FULL_STATE_DICT, api.FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    )
    seen.append(before.state_dict_type.name)
    note()
    assert side.FSDP.get_state_dict_type(nn.Linear(2, 2)) is None
    return seen


@on_both_sides(layouts=FULL)
def test_a_config_of_another_type_is_refused(side: Side, layout: Layout, use_orig_params: bool) -> None:
    model = side.wrap_case(NESTED, layout, use_orig_params=use_orig_params)
    api = side.api
    wrong = {
        "FULL": [api.LocalStateDictConfig(), api.ShardedStateDictConfig()],
        "LOCAL": [api.FullStateDictConfig(), api.ShardedStateDictConfig()],
        "SHARDED": [api.FullStateDictConfig(), api.LocalStateDictConfig()],
    }
    for kind, configs in wrong.items():
        for config in configs:
            with pytest.raises(RuntimeError), side.state_dict_as(model, kind, config):
                pass


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


@on_both_sides(layouts=STRATEGIES)
@WHOLE_KINDS
def test_a_group_of_one_rank_saves_and_loads(side: Side, layout: Layout, use_orig_params: bool, kind: str) -> Any:
    if layout.mesh is not None:
        return None
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"use_orig_params": use_orig_params, "process_group": groups[dist.get_rank()]}
        first, second = (side.wrap_case(NESTED, layout, **options) for _ in range(2))
        spoiled(second)
        state = saved(side, first, kind)
        load_equal(side, second, kind, state, first)
        return state_of(second)
