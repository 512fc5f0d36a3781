"""FULL state dicts: the plain model's keys and values, saved and loaded from anywhere in the tree."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer_library
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_flat
from fsdp_flat import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import PhaseError, UsageError
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import square_loss, train_on
from tests.support.models import BufferedBlock, Model, Tied
from tests.support.peer import peer_warnings_silenced
from tests.support.wrapper_models import WIDTH, batch, mesh_options, message, seeded, shard, shard_by_peer, whole_state

BOTH = pytest.mark.parametrize("use_orig_params", [False, True])
FULL = StateDictType.FULL_STATE_DICT


# ------------------------------------------------------------------------------------------- saving


@BOTH
@pytest.mark.parametrize("strategy", [member.name for member in ShardingStrategy])
@on_ranks(4)
def test_a_saved_state_has_the_plain_models_keys_in_order_and_its_values(strategy: str, use_orig_params: bool) -> None:
    for make in (Model, Tied):
        model = shard(seeded(make), strategy, use_orig_params=use_orig_params, **mesh_options(strategy))
        state, plain = model.state_dict(), seeded(make).state_dict()
        assert isinstance(state, OrderedDict)
        assert list(state) == list(plain)
        assert_equal(dict(state), dict(plain))
        assert {type(value) for value in state.values()} == {torch.Tensor}
        assert not any(value.requires_grad for value in state.values())


@BOTH
@on_ranks(2)
def test_a_nested_wrapper_and_a_plain_parent_save_under_their_own_names(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    plain = seeded()
    assert_equal(dict(model.blocks[1].state_dict()), dict(plain.blocks[1].state_dict()))
    assert_equal(dict(model.blocks.state_dict()), dict(plain.blocks.state_dict()))
    parent = nn.ModuleDict({"net": model, "other": FSDP(nn.Linear(2, 2)), "plain": nn.Linear(2, 2)})
    expected = nn.ModuleDict({"net": plain, "other": nn.Linear(2, 2), "plain": nn.Linear(2, 2)})
    assert list(parent.state_dict()) == list(expected.state_dict())
    state = model.state_dict(prefix="net.")
    assert_equal(dict(state), {f"net.{name}": value for name, value in plain.state_dict().items()})
    destination: OrderedDict[str, Any] = OrderedDict(already=1)
    assert model.state_dict(destination=destination) is destination
    assert list(destination) == ["already", *plain.state_dict()]


@BOTH
@on_ranks(2)
def test_rank0_only_leaves_other_ranks_with_what_is_not_managed(use_orig_params: bool, rank: int) -> None:
    plain = dict(seeded().state_dict())
    for library, make in ((fsdp_flat, shard), (peer_library, shard_by_peer)):
        module = seeded()
        # A buffer of an ignored module is one of the wrapper's buffers all the same.
        module.last.register_buffer("seen", torch.ones(2))
        ignored = {"ignored_states": [module.last.bias]}
        model = make(module, use_orig_params=use_orig_params, **ignored)
        outer = nn.ModuleDict({"net": model, "norm": nn.BatchNorm1d(2, affine=False)})
        only = library.FullStateDictConfig(rank0_only=True)
        full = library.StateDictType.FULL_STATE_DICT
        with peer_warnings_silenced(), library.FullyShardedDataParallel.state_dict_type(model, full, only):
            state = outer.state_dict()
        own = {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}
        if rank == 0:
            assert_equal(own, {**plain, "last.seen": torch.ones(2)})
        else:
            assert_equal(own, {"last.bias": plain["last.bias"]})
        assert len(state) - len(own) == 3


@on_ranks(4)
def test_rank0_only_means_rank_zero_of_each_shard_group(rank: int) -> None:
    model = shard(seeded(), "HYBRID_SHARD", device_mesh=init_device_mesh("cpu", (2, 2)))
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        state = model.state_dict()
    assert ("first.weight" in state) == (rank % 2 == 0)


@BOTH
@on_ranks(2)
def test_hooks_of_wrapped_modules_see_whole_tensors_and_what_they_do_is_kept(use_orig_params: bool) -> None:
    module = seeded()
    seen: dict[str, tuple[int, ...]] = {}

    def after(layer: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name in list(state):
            if name.startswith(prefix):
                seen[name] = tuple(state[name].shape)
        state[prefix + "weight"] = state[prefix + "weight"] * 2
        state["extra"] = torch.ones(1)
        del state[prefix + "bias"]

    calls: list[str] = []
    module.first.register_state_dict_post_hook(after)
    module.blocks[0].up.register_state_dict_post_hook(after)
    module.register_state_dict_pre_hook(lambda *args: calls.append("pre"))
    model = shard(module, use_orig_params=use_orig_params)
    model.register_state_dict_pre_hook(lambda *args: calls.append("wrapper's pre"))
    model.register_state_dict_post_hook(lambda *args: calls.append("wrapper's post"))
    state = model.state_dict()
    assert seen["first.weight"] == (WIDTH, 3)
    assert seen["blocks.0.up.bias"] == (2 * WIDTH + 1,)
    assert calls == ["wrapper's pre", "pre", "wrapper's post"]
    expected = dict(seeded().state_dict())
    for layer in ("first", "blocks.0.up"):
        expected[f"{layer}.weight"] = expected[f"{layer}.weight"] * 2
        del expected[f"{layer}.bias"]
    assert_equal(dict(state), {**expected, "extra": torch.ones(1)})
    assert_equal(dict(model.first.named_parameters()), dict(model.first.named_parameters()))


@BOTH
@on_ranks(2)
def test_ignored_parameters_and_buffers_are_normal_entries(use_orig_params: bool) -> None:
    module = seeded()
    model = shard(module, use_orig_params=use_orig_params, ignored_modules=[module.blocks[0].up])
    state = model.state_dict()
    assert list(state) == list(seeded().state_dict())
    assert_equal(dict(state), dict(seeded().state_dict()))
    changed = {name: value + 1 for name, value in state.items()}
    model.load_state_dict(changed)
    assert_equal(whole_state(model), changed)
    assert_equal(module.blocks[0].up.weight, changed["blocks.0.up.weight"])
    assert_equal(module.blocks[0].shift, changed["blocks.0.shift"])


# ------------------------------------------------------------------------------------------- loading


@BOTH
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_a_state_of_the_plain_model_loads_on_every_rank(
    strategy: str, assign: bool, use_orig_params: bool, rank: int
) -> None:
    for make in (Model, Tied):
        model = shard(seeded(make), strategy, use_orig_params=use_orig_params, **mesh_options(strategy))
        plain = seeded(make, seed=1)
        params = [id(param) for param in model.parameters()]
        given = plain.state_dict()
        before = {name: value.clone() for name, value in given.items()}
        keys = model.load_state_dict(given, assign=assign)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        assert [id(param) for param in model.parameters()] == params, "the optimizer's parameters stay"
        assert list(given) == list(before)
        assert_equal(dict(given), before)
        assert_equal(whole_state(model), dict(plain.state_dict()))
        x = batch(rank) if make is Model else torch.arange(7)
        assert_equal(model(x), plain(x))


@BOTH
@on_ranks(2)
def test_the_peer_the_plain_model_and_we_load_each_others_states(use_orig_params: bool) -> None:
    ours = shard(seeded(seed=1), use_orig_params=use_orig_params)
    theirs = shard_by_peer(seeded(seed=2), use_orig_params=use_orig_params)
    plain = seeded(seed=3)
    with peer_warnings_silenced():
        one = {name: value.clone() for name, value in ours.state_dict().items()}
        two = {name: value.clone() for name, value in theirs.state_dict().items()}
        assert list(ours.state_dict()) == list(plain.state_dict())
        theirs.load_state_dict(one)
        ours.load_state_dict(two)
        assert_equal(whole_state(theirs), one)
    assert_equal(whole_state(ours), two)
    plain.load_state_dict(ours.state_dict())
    assert_equal(dict(plain.state_dict()), two)


@BOTH
@on_ranks(2)
def test_parts_of_a_tree_load_on_their_own(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    other = seeded(seed=1)
    model.blocks[1].load_state_dict(other.blocks[1].state_dict())
    assert_equal(whole_state(model.blocks[1]), dict(other.blocks[1].state_dict()))
    assert_equal(whole_state(model.blocks[0]), dict(seeded().blocks[0].state_dict()))
    parent = nn.ModuleDict({"net": model, "plain": nn.Linear(2, 2)})
    expected = nn.ModuleDict({"net": other, "plain": nn.Linear(2, 2)})
    keys = parent.load_state_dict(expected.state_dict())
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert_equal(whole_state(parent), dict(expected.state_dict()))


@BOTH
@pytest.mark.parametrize("name", ["first.weight", "blocks.1.up.bias", "blocks.0.shift"])
@on_ranks(2)
def test_a_size_mismatch_has_the_text_of_the_plain_model(name: str, use_orig_params: bool) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    state = dict(plain.state_dict())
    state[name] = torch.zeros(2, 3, 4)
    texts = []
    for which in (model, plain):
        with pytest.raises(RuntimeError) as caught:
            which.load_state_dict(state)
        texts.append(str(caught.value).partition("\n")[2])
    assert f"size mismatch for {name}: copying a param with shape torch.Size([2, 3, 4])" in texts[0]
    assert texts[0] == texts[1]


@BOTH
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_load_between_steps_counts_at_once(strategy: str, use_orig_params: bool, rank: int, num_ranks: int) -> None:
    model, plain = shard(seeded(), strategy, use_orig_params=use_orig_params), seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_on(model, optimizer, [batch(rank)])
    square_loss(model, batch(rank, 1))  # a forward without backward leaves units gathered
    other = seeded(seed=1).state_dict()
    model.load_state_dict(other)
    plain.load_state_dict(other)
    assert_equal(model(batch(rank)), plain(batch(rank)))
    train_on(model, optimizer, [batch(rank)])
    sum(square_loss(plain, batch(other)) for other in range(num_ranks)).div(num_ranks).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(whole_state(model), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


@BOTH
@on_ranks(2)
def test_a_load_after_values_were_assigned_to_sharded_parameters_wins(use_orig_params: bool, rank: int) -> None:
    model, other = shard(seeded(), use_orig_params=use_orig_params), seeded(seed=1)
    for param in model.parameters():
        param.data = torch.full_like(param, 9.0)
    state = dict(other.state_dict())
    del state["first.weight"]
    model.load_state_dict(state, strict=False)
    state["first.weight"] = torch.full((WIDTH, 3), 9.0)
    assert_equal(whole_state(model), state)
    other.load_state_dict(state)
    assert_equal(model(batch(rank)), other(batch(rank)))


@on_ranks(2)
def test_a_load_inside_summon_full_params_is_an_error() -> None:
    model = shard(seeded())
    state = seeded(seed=1).state_dict()
    with FSDP.summon_full_params(model):
        text = message(PhaseError, AssertionError, lambda: model.load_state_dict(state))
    assert "load_state_dict" in text
    assert_equal(whole_state(model), dict(seeded().state_dict()))


@on_ranks(2)
def test_values_of_another_dtype_are_converted() -> None:
    model = shard(seeded())
    other = seeded(seed=1).double()
    model.load_state_dict(other.state_dict())
    assert_equal(whole_state(model), dict(other.float().state_dict()))


class Versioned(nn.Linear):
    """A module that reads the version it was saved with, as batch norm does."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.loaded_version = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


@on_ranks(2)
def test_modules_are_told_the_version_that_they_were_saved_with() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Versioned(3, 3))

    model = FSDP(seeded(make))
    for source in (model, seeded(make)):
        model[1].loaded_version = None
        model.load_state_dict(source.state_dict())
        assert model[1].loaded_version == 3
        plain = seeded(make)
        plain.load_state_dict(source.state_dict())
        assert plain[1].loaded_version == 3


# ------------------------------------------------------------------------------------------- the settings


@on_ranks(2)
def test_the_default_is_full_on_every_rank() -> None:
    settings = FSDP.get_state_dict_type(shard(seeded()))
    assert settings.state_dict_type is FULL
    assert settings.state_dict_config == FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    assert settings.optim_state_dict_config == FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=False)
    assert FSDP.get_state_dict_type(nn.Linear(2, 2)) is None


@on_ranks(2)
def test_set_state_dict_type_returns_what_was_set_before_and_reaches_every_wrapper() -> None:
    parent = nn.Sequential(shard(seeded()), FSDP(nn.Linear(2, 2)))
    config = FullStateDictConfig(rank0_only=True)
    before = FSDP.set_state_dict_type(parent, FULL, config, FullOptimStateDictConfig(rank0_only=True))
    assert before.state_dict_config == FullStateDictConfig()
    for wrapper in FSDP.fsdp_modules(parent):
        settings = FSDP.get_state_dict_type(wrapper)
        assert settings.state_dict_config == config
        assert settings.optim_state_dict_config.rank0_only
    assert FSDP.set_state_dict_type(parent, FULL).state_dict_config == config
    assert parent[0].set_state_dict_type(parent[0], FULL).state_dict_config == FullStateDictConfig()


@on_ranks(2)
def test_the_context_gives_the_previous_settings_back_after_an_exception() -> None:
    model = shard(seeded())
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    with (
        contextlib.suppress(KeyError),
        FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True)),
    ):
        assert FSDP.get_state_dict_type(model).state_dict_config.offload_to_cpu
        raise KeyError
    for wrapper in FSDP.fsdp_modules(model):
        assert FSDP.get_state_dict_type(wrapper).state_dict_config == FullStateDictConfig(rank0_only=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((FULL, ShardedStateDictConfig()), ["FullStateDictConfig", "ShardedStateDictConfig"]),
        ((FULL, FullOptimStateDictConfig()), ["FullStateDictConfig", "FullOptimStateDictConfig"]),
        ((FULL, None, FullStateDictConfig()), ["FullOptimStateDictConfig", "a FullStateDictConfig"]),
        (("full", None), ["'full'", "StateDictType.FULL_STATE_DICT"]),
    ],
)
@on_ranks(2)
def test_a_config_that_does_not_belong_to_the_type_is_an_error(arguments: Any, words: list[str]) -> None:
    model = shard(seeded())
    text = message(UsageError, RuntimeError, lambda: FSDP.set_state_dict_type(model, *arguments))
    assert [word for word in words if word not in text] == []
    assert FSDP.get_state_dict_type(model).state_dict_config == FullStateDictConfig()


@on_ranks(2)
def test_wrappers_of_one_tree_that_disagree_are_an_error() -> None:
    model = shard(seeded())
    FSDP.set_state_dict_type(model.blocks[0], FULL, FullStateDictConfig(rank0_only=True))
    text = message(PhaseError, AssertionError, lambda: FSDP.get_state_dict_type(model))
    assert "different state-dict settings" in text


@on_ranks(2)
def test_a_unit_without_parameters_saves_and_loads_its_buffers() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(2))

    model = FSDP(nn.Sequential(FSDP(Shift()), BufferedBlock()))
    state = whole_state(model)
    assert next(iter(state)) == "0.shift"
    state["0.shift"] += 1
    model.load_state_dict(state)
    assert_equal(model.module[0].module.shift, torch.full((2,), 2.0))
    dist.barrier()
