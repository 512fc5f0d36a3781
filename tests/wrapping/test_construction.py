"""What the constructor accepts, and the unit that comes out of it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer_library
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.errors import OptionTypeError
from fsdp_flat.wrap import ModuleWrapPolicy, always_wrap_policy, enable_wrap, wrap
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import no_shard_allowed, square_loss
from tests.support.models import BufferedBlock, Model
from tests.support.wrapper_models import WIDTH, assert_same_grads, batch, seeded, shard, shard_by_peer, whole_state

# ------------------------------------------------------------------------------------------- groups and meshes


def form_of(name: str) -> dict[str, Any]:
    """The constructor's arguments for one way to give groups to a strategy on four ranks. Every rank must call this."""
    if name == "2-D mesh":
        return {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    if name == "1-D mesh":
        return {"device_mesh": init_device_mesh("cpu", (4,))}
    if name == "group":
        return {"process_group": dist.new_group([0, 1, 2, 3])}
    if name == "tuple":
        rank = dist.get_rank()
        rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        return {"process_group": (rows[rank // 2], columns[rank % 2])}
    return {}


@pytest.mark.parametrize(
    ("strategy", "form", "size"),
    [
        ("FULL_SHARD", "nothing", 4),
        ("FULL_SHARD", "group", 4),
        ("FULL_SHARD", "1-D mesh", 4),
        ("FULL_SHARD", "2-D mesh", 2),
        ("SHARD_GRAD_OP", "1-D mesh", 4),
        ("NO_SHARD", "nothing", 4),
        ("NO_SHARD", "1-D mesh", 4),
        ("HYBRID_SHARD", "2-D mesh", 2),
        ("HYBRID_SHARD", "tuple", 2),
        ("_HYBRID_SHARD_ZERO2", "2-D mesh", 2),
        ("_HYBRID_SHARD_ZERO2", "tuple", 2),
    ],
)
@on_ranks(4)
def test_groups_and_meshes_give_the_peers_axes_and_shards(strategy: str, form: str, size: int, rank: int) -> None:
    groups = form_of(form)
    ours = shard(seeded(), strategy, **groups)
    theirs = shard_by_peer(seeded(), strategy, **groups)
    for mine, other in zip(FSDP.fsdp_modules(ours), peer_library.FullyShardedDataParallel.fsdp_modules(theirs)):
        assert mine.sharding_strategy.name == other.sharding_strategy.name == strategy
        assert (mine.rank, mine.world_size) == (other.rank, other.world_size)
        assert mine.world_size == size
        assert dist.get_process_group_ranks(mine.process_group) == dist.get_process_group_ranks(other.process_group)
        assert_equal(mine._flat_param.data, other._flat_param.data)
    for model in (ours, theirs):
        square_loss(model, batch(rank)).backward()
    assert_same_grads(ours, theirs)


@on_ranks(2)
def test_a_single_rank_becomes_no_shard_with_a_warning(rank: int) -> None:
    alone = [dist.new_group([other]) for other in range(2)][rank]
    with pytest.warns(UserWarning, match="FULL_SHARD over a single rank .* NO_SHARD"):
        model = FSDP(seeded(), process_group=alone)
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    assert (model.rank, model.world_size) == (0, 1)
    square_loss(model, batch(rank)).backward()
    plain = seeded()
    square_loss(plain, batch(rank)).backward()
    flat = torch.cat([param.grad.reshape(-1) for param in plain.parameters()])
    assert_close(model._flat_param.grad, flat, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_no_shard_over_several_ranks_warns_as_fsdp1_does() -> None:
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        FSDP(seeded(), sharding_strategy=ShardingStrategy.NO_SHARD)


# ------------------------------------------------------------------------------------------- enums and devices


@on_ranks(2)
def test_arguments_are_taken_by_position() -> None:
    with no_shard_allowed():
        model = FSDP(seeded(), None, ShardingStrategy.SHARD_GRAD_OP, None, ModuleWrapPolicy({BufferedBlock}), None)
    assert model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert len(FSDP.fsdp_modules(model)) == 3
    assert all(wrapper._unit.options.backward_prefetch is None for wrapper in FSDP.fsdp_modules(model))


# ------------------------------------------------------------------------------------------- ignored states


def ignored_cases(model: Any) -> dict[str, dict[str, Any]]:
    block = model.blocks[0]
    return {
        "modules": {"ignored_modules": [block.up]},
        "states are modules": {"ignored_states": [block.up]},
        "states are parameters": {"ignored_states": [block.up.weight, block.up.bias]},
        "a generator": {"ignored_states": (param for param in block.up.parameters())},
        "a whole block": {"ignored_modules": [block]},
        "a container of blocks": {"ignored_modules": [model.blocks]},
        "one parameter of the root": {"ignored_states": [model.last.bias]},
        "an empty set": {"ignored_states": set()},
    }


@pytest.mark.filterwarnings("ignore:auto_wrap_policy matches only ignored modules")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("case", list(ignored_cases(Model())))
@on_ranks(2)
def test_what_is_ignored_is_left_alone_as_by_the_peer(case: str, use_orig_params: bool, rank: int) -> None:
    plain, theirs = seeded(), seeded()
    ours = shard(plain, use_orig_params=use_orig_params, **ignored_cases(plain)[case])
    peer = shard_by_peer(theirs, use_orig_params=use_orig_params, **ignored_cases(theirs)[case])
    assert {name: (tuple(p.shape), p.dtype) for name, p in ours.named_parameters()} == {
        name: (tuple(p.shape), p.dtype) for name, p in peer.named_parameters()
    }
    assert_equal(whole_state(ours), whole_state(peer))
    for model in (ours, peer):
        square_loss(model, batch(rank)).backward()
    # Ignored parameters keep this rank's own gradient; the rest is the mean.
    assert_same_grads(ours, peer)


@on_ranks(2)
def test_the_root_ignores_what_its_wrapped_children_ignore(rank: int) -> None:
    model = seeded()
    inner = model.blocks[0]
    ignored = inner.up.weight
    model.blocks[0] = FSDP(inner, ignored_states=[ignored])
    root = FSDP(model)
    assert inner.up.weight is ignored
    assert tuple(ignored.shape) == (2 * WIDTH + 1, WIDTH)
    assert ignored in root._unit.ignored.params
    names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in root.named_parameters()]
    assert names == ["_flat_param", "blocks.0._flat_param", "blocks.0.up.weight"]
    assert sorted(whole_state(root)) == sorted(seeded().state_dict())


@on_ranks(2)
def test_nested_wrappers_inside_an_ignored_module_stay_wrappers(rank: int) -> None:
    model = seeded()
    model.blocks[0] = FSDP(model.blocks[0])
    root = FSDP(model, ignored_modules=[model.blocks])
    assert len(FSDP.fsdp_modules(root)) == 2
    names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in root.named_parameters()]
    assert "blocks.0._flat_param" in names
    assert "blocks.1.up.weight" in names
    square_loss(root, batch(rank)).backward()
    assert model.blocks[0]._flat_param.grad is not None


@on_ranks(2)
def test_ignoring_the_root_itself_warns_and_shards_nothing() -> None:
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="nothing of it will be sharded"):
        wrapped = FSDP(model, ignored_modules=[model])
    assert not wrapped._has_params
    assert dict(wrapped.named_parameters())["_fsdp_wrapped_module.weight"] is model.weight


# ------------------------------------------------------------------------------------------- initial weights


@on_ranks(2)
def test_sync_module_states_leaves_ignored_parameters_alone(rank: int) -> None:
    model = seeded(seed=rank)
    shard(model, sync_module_states=True, ignored_states=[model.last.weight])
    assert_equal(model.last.weight, seeded(seed=rank).last.weight)


# ------------------------------------------------------------------------------------------- ways to wrap


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
@on_ranks(2)
def test_wrapping_a_container_without_forward_warns(kind: Any) -> None:
    content = [nn.Linear(2, 2)] if kind is nn.ModuleList else {"a": nn.Linear(2, 2)}
    with pytest.warns(UserWarning, match=rf"wraps a {kind.__name__}, which has no forward, so .* never gathered"):
        FSDP(kind(content))


@on_ranks(2)
def test_a_policy_that_chooses_a_list_warns_if_an_outer_unit_has_its_parameters() -> None:
    with pytest.warns(UserWarning, match=r"'blocks' wraps a ModuleList, .* its parameters are in the unit around it"):
        model = FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({nn.ModuleList}), use_orig_params=True)
    square_loss(model, batch(0)).backward()
    assert all(param.grad is not None for param in model.parameters() if param.numel())


@on_ranks(2)
def test_a_list_whose_entries_are_units_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({nn.ModuleList, BufferedBlock}))


@on_ranks(2)
def test_enable_wrap_wraps_with_its_arguments(rank: int) -> None:
    with enable_wrap(wrapper_cls=FSDP, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        inner = wrap(nn.Linear(3, 3))
        model = wrap(nn.Sequential(inner, nn.Linear(3, 2)), backward_prefetch=None)
    assert isinstance(model, FSDP)
    assert model[0] is inner
    assert inner.sharding_strategy is model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert model._unit.options.backward_prefetch is None
    square_loss(model, batch(rank)).backward()
    assert all(param.grad is not None for param in model.parameters() if param.numel())


@on_ranks(2)
def test_children_of_a_subclass_are_made_of_the_base_class() -> None:
    model = Mine(seeded(), auto_wrap_policy=ModuleWrapPolicy({BufferedBlock}))
    kinds = [type(wrapper) for wrapper in FSDP.fsdp_modules(model)]
    assert kinds == [Mine, FSDP, FSDP]
    assert model.made


class Mine(FSDP):
    """A subclass with a constructor of its own."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.made = True


@on_ranks(2)
def test_every_kind_of_policy_that_fsdp1_takes_is_taken() -> None:
    policies: list[Any] = [
        always_wrap_policy,
        functools.partial(peer_library.wrap.size_based_auto_wrap_policy, min_num_params=60),
        functools.partial(peer_library.wrap.transformer_auto_wrap_policy, transformer_layer_cls={BufferedBlock}),
        peer_library.wrap.ModuleWrapPolicy({BufferedBlock}),
        peer_library.wrap.CustomPolicy(lambda module: isinstance(module, BufferedBlock)),
        lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, BufferedBlock),
    ]
    for policy in policies:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # always_wrap_policy wraps the ModuleList too
            ours = FSDP(seeded(), auto_wrap_policy=policy)
            theirs = shard_by_peer(seeded(), auto_wrap_policy=policy)
        names = [name for name, _ in ours.named_parameters()]
        assert names == [name for name, _ in theirs.named_parameters()]
        assert len(names) > 1


@on_ranks(2)
def test_a_class_of_another_library_named_like_an_option_is_an_error_that_names_its_module() -> None:
    foreign = type("MixedPrecision", (), {"__module__": "elsewhere"})
    with pytest.raises(OptionTypeError, match=r"mixed_precision must be a MixedPrecision; got a elsewhere\.Mixed"):
        FSDP(nn.Linear(4, 4), mixed_precision=foreign())


@on_ranks(2)
def test_an_attribute_of_a_parameter_that_is_called_quant_state_is_the_callers_own(rank: int) -> None:
    """bitsandbytes has constants of 4-bit weights under this name."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.quant_state = {"scale": 1.0}  # type: ignore[assignment]
    FSDP(model, use_orig_params=True)(torch.ones(2, 4)).sum().backward()
