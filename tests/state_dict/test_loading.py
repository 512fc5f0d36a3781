"""Loads that do not fit: told by name on every rank, with nothing changed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.utils.weak import TensorWeakRef

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType
from fsdp_flat.errors import OptionTypeError, RankMismatchError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.state_dict.kit import FULL, LOCAL, SHARDED, TASKS, groups_of, seeded_task
from tests.state_dict.test_full_state_dict import Versioned
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import square_loss
from tests.support.models import Model
from tests.support.steps import recorded
from tests.support.wrapper_models import batch, seeded, shard, whole_state

CODECS = pytest.mark.parametrize("kind", [FULL, LOCAL, SHARDED], ids=lambda kind: kind.name.split("_")[0].lower())


def saved(model: nn.Module, kind: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, kind):
        return dict(model.state_dict())


def refused(model: nn.Module, kind: Any, state: Any, *, strict: bool = True) -> str:
    """The error of a load, after which the model is as it was."""
    before = whole_state(model)
    with FSDP.state_dict_type(model, kind), pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state, strict=strict)
    assert_equal(whole_state(model), before)
    return str(caught.value)


@ORIG_PARAMS
@CODECS
@on_ranks(2)
def test_after_a_load_that_does_not_fit_the_model_is_as_it_was(kind: Any, use_orig_params: bool) -> None:
    model = shard(seeded_task(TASKS["batch norm"], 0), use_orig_params=use_orig_params)
    other = shard(seeded_task(TASKS["batch norm"], 1), use_orig_params=use_orig_params)
    state = saved(other, kind)
    last = "_flat_param" if kind is LOCAL else "last.weight"
    value = state.pop(last)
    assert f'Missing key(s) in state_dict: "{last}"' in refused(model, kind, state)
    state[last] = value
    state["more"] = torch.ones(1)
    assert 'Unexpected key(s) in state_dict: "more"' in refused(model, kind, state)
    del state["more"]
    state["blocks.1.running_mean"] = torch.ones(7)
    text = refused(model, kind, state, strict=False)
    assert "size mismatch for blocks.1.running_mean" in text
    state["blocks.1.running_mean"] = torch.ones(5)
    state[last] = torch.ones(3)
    text = refused(model, kind, state)
    assert f"size mismatch for {last}" in text or f"{last}: a local state dict fits the wrapping" in text
    state[last] = value
    with FSDP.state_dict_type(model, kind):
        model.load_state_dict(state)
    expected = whole_state(other)
    expected["blocks.1.running_mean"] = torch.ones(5)
    assert_equal(whole_state(model), expected)


@ORIG_PARAMS
@on_ranks(2)
def test_names_that_are_missing_change_what_is_there_only_if_not_strict(use_orig_params: bool) -> None:
    model, other = (shard(seeded(seed=seed), use_orig_params=use_orig_params) for seed in (0, 1))
    state = saved(other, SHARDED)
    del state["first.weight"]
    refused(model, SHARDED, state)
    with FSDP.state_dict_type(model, SHARDED):
        assert model.load_state_dict(state, strict=False).missing_keys == ["first.weight"]
    expected = {**whole_state(other), "first.weight": seeded().state_dict()["first.weight"]}
    assert_equal(whole_state(model), expected)


@ORIG_PARAMS
@pytest.mark.parametrize("how", ["FULL_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_a_sharded_load_that_fails_on_one_rank_fails_on_all(how: str, use_orig_params: bool, rank: int) -> None:
    groups = groups_of(how)
    model = shard(seeded(), how, use_orig_params=use_orig_params, **groups)
    state = saved(shard(seeded(seed=1), how, use_orig_params=use_orig_params, **groups), SHARDED)
    if rank == 1:
        state["blocks.0.up.weight"] = torch.ones(2)
    text = refused(model, SHARDED, state)
    assert "size mismatch for blocks.0.up.weight" in text
    assert rank == 1 or "of the group failed while loading a state dict" in text


@on_ranks(2)
def test_ranks_with_different_entries_say_which(rank: int) -> None:
    model = shard(seeded())
    state = saved(model, SHARDED)
    del state["last.bias" if rank else "first.bias"]
    text = refused(model, SHARDED, state, strict=False)
    assert "Ranks were given state dicts with different entries" in text
    assert "first.bias" in text or "last.bias" in text


@on_ranks(2)
def test_a_full_state_dict_that_one_rank_alone_loads_is_an_error_of_the_next_backward(rank: int) -> None:
    """It mixed the parts of two models; on FSDP1 this rank would wait for the others."""
    model = shard(seeded())
    state = whole_state(model)
    if rank == 0:
        model.load_state_dict(state)
    with pytest.raises(RankMismatchError, match=r"rank 0 of the group has \d loads.*, rank 1 has 0 loads"):
        square_loss(model, batch(0)).backward()
    if rank == 1:
        model.load_state_dict(state)
    square_loss(model, batch(0)).backward()


@on_ranks(2)
def test_a_chunk_of_another_number_of_ranks_is_refused(rank: int) -> None:
    model = shard(seeded())
    state = saved(model, SHARDED)
    value: ShardedTensor = state["blocks.0.up.weight"]
    for part in value.local_shards():
        part.tensor = part.tensor[:-1]
    text = refused(model, SHARDED, state)
    assert f"blocks.0.up.weight: rank {rank} of the shard group holds a chunk of shape" in text
    assert "torch.distributed.checkpoint, which reshards" in text


@on_ranks(2)
def test_a_local_state_dict_of_another_wrapping_is_refused_by_its_key() -> None:
    model, other = shard(seeded()), shard(seeded(lambda: Model(num_blocks=2)), by_blocks=False)
    state = saved(other, LOCAL)
    text = refused(model, LOCAL, state)
    assert "_flat_param: a local state dict fits the wrapping and number of ranks that wrote it only" in text
    assert '"blocks.0._flat_param"' in text


@on_ranks(2)
def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(OptionTypeError, match="a mapping of names to tensors; got list"):
        shard(seeded()).load_state_dict([1])


@ORIG_PARAMS
@CODECS
@on_ranks(2)
def test_values_assigned_to_what_the_optimizer_holds_are_saved(kind: Any, use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    for param in model.parameters():
        param.data = torch.full_like(param, 3.0)
    other = shard(seeded(seed=1), use_orig_params=use_orig_params)
    with FSDP.state_dict_type(other, kind):
        other.load_state_dict(saved(model, kind))
    names = [name for name, _ in seeded().named_parameters()]
    assert all(bool((whole_state(other)[name] == 3.0).all()) for name in names)


@ORIG_PARAMS
@on_ranks(2)
def test_a_save_while_parameters_are_gathered_has_the_shards_and_leaves_them_gathered(
    use_orig_params: bool, rank: int
) -> None:
    for kind in (FULL, SHARDED, LOCAL):
        model = shard(seeded(), "SHARD_GRAD_OP", use_orig_params=use_orig_params)
        loss = model(batch(rank)).square().mean()
        state = saved(model, kind)
        loss.backward()
        assert all(param.grad is not None for param in model.parameters() if param.numel() > 0)
        other = shard(seeded(seed=1), use_orig_params=use_orig_params)
        with FSDP.state_dict_type(other, kind):
            other.load_state_dict(state)
        assert_equal(whole_state(other), dict(seeded().state_dict()), what=kind.name)


class Adapter(nn.Module):
    """A wrapped part below a plain parent."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), Versioned(3, 3))


@on_ranks(2)
def test_a_plain_parent_tells_wrapped_modules_the_version_that_they_were_saved_with() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"net": FSDP(seeded(Adapter))})

    parent, other = make(), make()
    state = parent.state_dict()
    other["net"].body[1].loaded_version = None
    other.load_state_dict(state)
    assert other["net"].body[1].loaded_version == 3


@on_ranks(2)
def test_below_a_plain_parent_wrapped_modules_get_no_version_of_a_plain_model() -> None:
    """Torch passes a module the version under its own name only; loading the wrapper itself gives all of them."""
    parent = nn.ModuleDict({"net": FSDP(seeded(Adapter))})
    state = nn.ModuleDict({"net": seeded(Adapter)}).state_dict()
    names = set(state._metadata)
    parent.load_state_dict(state)
    assert parent["net"].body[1].loaded_version is None
    assert set(state._metadata) == names
    parent["net"].load_state_dict(seeded(Adapter).state_dict())
    assert parent["net"].body[1].loaded_version == 3


class Parts(nn.ModuleDict):
    """Modules by name, one after another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.values():
            x = part(x)
        return x


def parent_of_units(seed: int, use_orig_params: bool) -> nn.Module:
    torch.manual_seed(seed)
    parts = {name: FSDP(nn.Linear(5, 5), use_orig_params=use_orig_params) for name in ("first", "second")}
    return nn.ModuleDict({**parts, "head": nn.Linear(5, 2)})


@ORIG_PARAMS
@CODECS
@on_ranks(2)
def test_of_a_load_by_a_plain_parent_each_unit_is_written_whole_or_not_at_all(kind: Any, use_orig_params: bool) -> None:
    other = parent_of_units(1, use_orig_params)
    state, loaded, before = saved(other, kind), wholes(other), wholes(parent_of_units(0, use_orig_params))
    key = "second._flat_param" if kind is LOCAL else "second.weight"
    for change, text, expected in (
        ({"head.bias": None}, 'Missing key(s) in state_dict: "head.bias"', loaded),
        ({"more": torch.ones(1)}, 'Unexpected key(s) in state_dict: "more"', loaded),
        ({"head.weight": torch.ones(3, 3)}, "size mismatch for head.weight", loaded),
        ({key: torch.ones(7)}, key, [loaded[0], before[1]]),
    ):
        model = parent_of_units(0, use_orig_params)
        given = {name: value for name, value in {**state, **change}.items() if value is not None}
        with FSDP.state_dict_type(model, kind), pytest.raises(RuntimeError) as caught:
            model.load_state_dict(given)
        assert text in str(caught.value)
        assert_equal(wholes(model), expected, what=text)
    twin = parent_of_units(0, use_orig_params)
    del state["head.bias"], state[key]
    with FSDP.state_dict_type(twin, kind):
        assert set(twin.load_state_dict(state, strict=False).missing_keys) == {"head.bias", key}
    assert_equal(wholes(twin)[0], loaded[0])


@ORIG_PARAMS
@on_ranks(2)
def test_chunks_below_a_plain_parent_that_do_not_fit_on_one_rank_are_an_error_on_all(
    use_orig_params: bool, rank: int
) -> None:
    model, other = (parent_of_units(seed, use_orig_params) for seed in (0, 1))
    state, before = saved(other, SHARDED), wholes(model)
    if rank == 1:
        state["second.weight"] = torch.ones(7)
    with FSDP.state_dict_type(model, SHARDED), pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    assert "size mismatch for second.weight" in text
    assert rank == 1 or "of the group failed while loading a state dict" in text
    assert_equal(wholes(model), [wholes(other)[0], before[1]])


@on_ranks(2)
def test_a_wrapper_below_a_plain_parent_puts_back_its_buffers_if_a_value_does_not_fit() -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        body = FSDP(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
        body.module[0].running_mean.fill_(seed + 1.0)
        return nn.ModuleDict({"body": body, "head": nn.Linear(3, 2)})

    model, state = make(0), saved(make(1), FULL)
    before = {name: value.clone() for name, value in model["body"].state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for body\.1\.bias"):
        model.load_state_dict({**state, "body.1.bias": torch.ones(7)})
    assert_equal(dict(model["body"].state_dict()), before)
    model.load_state_dict(state)
    assert_equal(dict(model.state_dict()), state)


@ORIG_PARAMS
@CODECS
@pytest.mark.parametrize("root", ["plain", "wrapped"])
@on_ranks(2)
def test_a_unit_at_two_places_is_loaded_and_so_is_what_comes_before_and_after(
    kind: Any, root: str, use_orig_params: bool
) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        block = FSDP(nn.Linear(3, 3), use_orig_params=use_orig_params)
        first, last = (FSDP(nn.Linear(3, 3), use_orig_params=use_orig_params) for _ in range(2))
        made = Parts({"first": first, "one": block, "two": block, "last": last})
        return FSDP(made, use_orig_params=use_orig_params) if root == "wrapped" else made

    model, other = make(0), make(1)
    with FSDP.state_dict_type(model, kind):
        model.load_state_dict(saved(other, kind))
    for name in ("first", "one", "last"):
        whole = [whole_state((each.module if root == "wrapped" else each)[name]) for each in (model, other)]
        assert_equal(*whole, what=name)


@pytest.mark.parametrize("root", ["plain", "wrapped"])
@CODECS
@on_ranks(2)
def test_hooks_of_the_users_forgive_what_is_missing_and_see_what_was_loaded(kind: Any, root: str) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = Parts({"body": FSDP(nn.Linear(3, 3)), "head": nn.Linear(3, 2)})
        return FSDP(made) if root == "wrapped" else made

    def part(model: nn.Module, name: str) -> Any:
        return (model.module if root == "wrapped" else model)[name]

    model, other = make(0), make(1)
    with FSDP.state_dict_type(model, kind):
        model.load_state_dict(saved(other, kind))  # from here on it has hooks of ours
        seen = []
        part(model, "body").register_load_state_dict_post_hook(lambda module, _: seen.append(whole_state(module)))
        model.register_load_state_dict_post_hook(lambda _module, keys: keys.missing_keys.clear())
        newest = make(2)
        state = saved(newest, kind)
        del state["body._flat_param" if kind is LOCAL else "body.bias"]
        if kind is SHARDED and root == "wrapped":
            with pytest.raises(RuntimeError, match="a load hook has taken them off the list"):
                model.load_state_dict(state)
            return
        model.load_state_dict(state)
    name = "head.weight"
    assert_equal(saved(model, FULL)[name], saved(newest, FULL)[name])
    if kind is not LOCAL:
        assert_equal(saved(model, FULL)["body.weight"], saved(newest, FULL)["body.weight"])
        assert_equal(saved(model, FULL)["body.bias"], saved(other, FULL)["body.bias"])
    if kind is FULL and root == "plain":
        assert_equal(seen[0]["weight"], saved(newest, FULL)["body.weight"])


@on_ranks(2)
def test_a_wrapper_that_a_hook_below_it_loads_again_is_an_error() -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 3)))
    state = {name: value + 1 for name, value in whole_state(model).items()}
    calls = []

    def nest(_module: nn.Module, _keys: Any) -> None:
        if not calls:
            calls.append(1)
            model.load_state_dict(state)

    model.module[0].register_load_state_dict_post_hook(nest)
    with pytest.raises(RuntimeError, match="before its own load was over"):
        model.load_state_dict(state)
    model.load_state_dict(state)
    assert_equal(whole_state(model), state)


@on_ranks(2)
def test_after_an_exception_in_a_hook_buffers_and_weights_are_of_one_checkpoint() -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        body[1].running_mean.fill_(seed + 1.0)
        return FSDP(body)

    def fail(_module: nn.Module, _keys: Any) -> None:
        raise ValueError("a hook")

    model, other = make(0), make(1)
    handle = model.register_load_state_dict_post_hook(fail)
    with pytest.raises(ValueError, match="a hook"):
        model.load_state_dict(other.state_dict())
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))
    handle.remove()
    model.load_state_dict(make(2).state_dict())
    assert model._load is None


@on_ranks(2)
def test_loads_in_hooks_of_loads_are_whole_too() -> None:
    torch.manual_seed(0)
    inner = nn.ModuleDict({"unit": FSDP(nn.Linear(3, 3))})
    wrapped = FSDP(nn.Linear(2, 2))
    model = nn.ModuleDict({"inner": inner, "last": FSDP(nn.Linear(3, 3))})
    state = {name: value + 1 for name, value in saved(model, FULL).items()}
    ones = {name: torch.ones_like(value) for name, value in whole_state(wrapped).items()}
    before = whole_state(wrapped)
    calls = []

    def nest(_module: nn.Module, _keys: Any) -> None:
        if not calls:
            calls.append(1)
            inner.load_state_dict({name: torch.ones_like(value) for name, value in saved(inner, FULL).items()})
            with pytest.raises(RuntimeError, match="more"):
                wrapped.load_state_dict({**ones, "more": torch.ones(1)})

    inner.register_load_state_dict_post_hook(nest)
    inner.register_load_state_dict_post_hook(lambda _module, _keys: None)
    model.load_state_dict(state)
    assert calls == [1]
    assert_equal(whole_state(wrapped), before)
    assert_equal(whole_state(model["last"]), {name: state[f"last.{name}"] for name in ("weight", "bias")})
    assert set(whole_state(inner["unit"])["weight"].flatten().tolist()) == {1.0}


class Failing(nn.Linear):
    """Its load ends with an exception."""

    def _load_from_state_dict(self, *args: Any) -> None:
        raise ValueError("no")


@on_ranks(2)
def test_a_load_that_an_exception_ends_keeps_nothing_and_leaves_the_dict_as_it_was() -> None:
    model = nn.ModuleDict({"body": FSDP(seeded(Adapter)), "tail": Failing(2, 2)})
    plain = nn.ModuleDict({"body": seeded(Adapter), "tail": nn.Linear(2, 2)})
    state = plain.state_dict()
    names = set(state._metadata)
    with pytest.raises(ValueError, match="no"):
        model.load_state_dict(state)
    gc.collect()
    assert set(state._metadata) == names
    held = [TensorWeakRef(value) for value in state.values()]
    del state, plain
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


@pytest.mark.parametrize("root", ["plain", "wrapped"])
@on_ranks(2)
def test_after_an_exception_inside_of_a_wrapper_the_next_load_is_as_any(root: str) -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        body = FSDP(nn.Sequential(nn.BatchNorm1d(3), FSDP(nn.Linear(3, 3)), nn.Linear(3, 3)))
        return nn.ModuleDict({"body": body}) if root == "plain" else body

    def fail(_module: nn.Module, _keys: Any) -> None:
        raise ValueError("a hook")

    model = make(0)
    before, state = saved(model, FULL), saved(make(1), FULL)
    body = model["body"] if root == "plain" else model
    handle = body.module[2].register_load_state_dict_post_hook(fail)
    with pytest.raises(ValueError, match="a hook"):
        model.load_state_dict(state)
    # Called on a plain parent, torch has written the buffers by then.
    unchanged = [name for name in before if root == "wrapped" or name.endswith(("weight", "bias"))]
    after = saved(model, FULL)
    assert_equal([after[name] for name in unchanged], [before[name] for name in unchanged])
    handle.remove()
    model.load_state_dict(state)
    assert_equal(saved(model, FULL), state)
    assert all("_load" not in module.__dict__ for module in model.modules())


def wholes(parent: Any) -> list[Any]:
    return [whole_state(parent[name]) for name in ("first", "second")]


@CODECS
@on_ranks(2)
def test_loads_of_full_and_local_dicts_take_no_communication(kind: Any) -> None:
    model, other = shard(seeded()), shard(seeded(seed=1))
    state = saved(other, kind)
    with recorded() as record, FSDP.state_dict_type(model, kind):
        model.load_state_dict(state)
    exchanges = set(record.counts()) - {"all_gather"}
    assert (exchanges == {"transfer"}) if kind is SHARDED else (record.calls == [])


FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
# Saved as, loaded as, what the error says.
WRONG = [
    (LOCAL, FULL, r"0\._flat_param: an entry of a LOCAL_STATE_DICT.*'0\.weight' the first"),
    (LOCAL, SHARDED, r"0\._flat_param: an entry of a LOCAL_STATE_DICT.*unit '0'.*'0\.weight' the first"),
    (FULL, LOCAL, r"0\._flat_param: this load is of a LOCAL_STATE_DICT.*unit '0'.*FULL_STATE_DICT or a SHARDED"),
    (SHARDED, LOCAL, r"1\._flat_param: this load is of a LOCAL_STATE_DICT.*unit '1'.*FULL_STATE_DICT or a SHARDED"),
    (SHARDED, FULL, r"4 entries of the state dict are sharded tensors, '0\.weight' the first.*SHARDED_STATE_DICT\)"),
]


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
def test_a_state_dict_of_another_type_is_refused_by_its_type_and_nothing_is_written(use_orig_params: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(module, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    for saved_as, loaded_as, text in WRONG:
        with FSDP.state_dict_type(model, saved_as):
            state = model.state_dict()
        if saved_as is FULL:
            state = {name: value + 1 for name, value in state.items()}
        before = [param.detach().clone() for param in model.parameters()]
        with FSDP.state_dict_type(model, loaded_as), pytest.raises(RuntimeError, match=rf"(?s){text}") as caught:
            model.load_state_dict(state)
        assert "Missing key" not in str(caught.value)
        assert "Unexpected key" not in str(caught.value)
        assert_equal([param.detach().clone() for param in model.parameters()], before)
    # Whole tensors are taken as sharded ones.
    full = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(full)
    assert_equal(dict(model.state_dict()), full)
