"""Every error of the constructor that a caller can cause: FSDP1's type, a name in the text, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer_library
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.errors import FsdpFlatError, OptionError, OptionTypeError, PeerFailureError
from fsdp_flat.wrap import CustomPolicy, ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.kit import square_loss
from tests.support.models import BufferedBlock, Model
from tests.support.peer import peer_fsdp
from tests.support.wrapper_models import batch, message, seeded, shard

HYBRID = ShardingStrategy.HYBRID_SHARD
POLICY = ModuleWrapPolicy({BufferedBlock})


def _with_a_typo(module: nn.Module) -> Any:
    return {"nosuch": 1} if isinstance(module, BufferedBlock) else False


def both_groups(model: Model) -> dict[str, Any]:
    return {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))}


def half_frozen(model: Model) -> dict[str, Any]:
    model.blocks[1].up.bias.requires_grad_(False)
    return {"auto_wrap_policy": POLICY}


def half_frozen_by_hand(model: Model) -> dict[str, Any]:
    model.first.bias.requires_grad_(False)
    return {}


def two_dtypes(model: Model) -> dict[str, Any]:
    model.first.to(torch.float64)
    return {}


def wrapped_child(model: Model) -> dict[str, Any]:
    model.blocks[1] = FSDP(model.blocks[1])
    return {"auto_wrap_policy": POLICY}


def wrapped_ignored(model: Model) -> dict[str, Any]:
    model.blocks[1] = FSDP(model.blocks[1])
    return {"ignored_modules": [model.blocks[1]]}


# What is wrong, the arguments, our error, FSDP1's type, and words of the text.
ERRORS: dict[str, tuple[Callable[[Any], dict[str, Any]], type[Exception], type[Exception], list[str]]] = {
    "a strategy as a string": (
        lambda m: {"sharding_strategy": "full"},
        OptionError,
        ValueError,
        ["'full'", "ShardingStrategy.FULL_SHARD", "ShardingStrategy.HYBRID_SHARD", "str"],
    ),
    "a strategy as a number": (lambda m: {"sharding_strategy": 1}, OptionError, ValueError, ["got 1 of type int"]),
    "a prefetch as a string": (
        lambda m: {"backward_prefetch": "pre"},
        OptionError,
        ValueError,
        ["'pre'", "BackwardPrefetch.BACKWARD_PRE", "None"],
    ),
    "a group and a mesh": (both_groups, OptionError, ValueError, ["process_group and device_mesh"]),
    "a hybrid strategy without groups or policy": (
        lambda m: {"sharding_strategy": HYBRID},
        OptionError,
        ValueError,
        ["HYBRID_SHARD", "device_mesh", "process_group"],
    ),
    "a hybrid strategy with a 1-D mesh": (
        lambda m: {"sharding_strategy": HYBRID, "device_mesh": init_device_mesh("cpu", (2,))},
        OptionError,
        ValueError,
        ["2-D", "1-D mesh"],
    ),
    "a hybrid strategy with one group": (
        lambda m: {"sharding_strategy": HYBRID, "process_group": dist.group.WORLD},
        OptionError,
        ValueError,
        ["tuple (shard_group, replicate_group)"],
    ),
    "a hybrid strategy with three groups": (
        lambda m: {"sharding_strategy": HYBRID, "process_group": (dist.group.WORLD,) * 3},
        OptionError,
        ValueError,
        ["tuple (shard_group, replicate_group)"],
    ),
    "a tuple of groups without a hybrid strategy": (
        lambda m: {"process_group": (dist.group.WORLD, dist.group.WORLD)},
        OptionTypeError,
        TypeError,
        ["FULL_SHARD", "tuple"],
    ),
    "a mesh that is none": (lambda m: {"device_mesh": [0, 1]}, OptionTypeError, TypeError, ["DeviceMesh", "list"]),
    "both ignored arguments": (
        lambda m: {"ignored_modules": [], "ignored_states": []},
        OptionError,
        ValueError,
        ["ignored_modules and ignored_states"],
    ),
    "ignored states of two kinds": (
        lambda m: {"ignored_states": [m.first, m.last.weight]},
        OptionError,
        ValueError,
        ["Linear", "Parameter"],
    ),
    "a parameter among ignored modules": (
        lambda m: {"ignored_modules": [m.first, m.last.weight]},
        OptionError,
        ValueError,
        ["ignored_modules", "Parameter"],
    ),
    "a tensor among ignored states": (
        lambda m: {"ignored_states": [torch.zeros(1)]},
        OptionError,
        ValueError,
        ["Tensor"],
    ),
    "ignored modules that are no list": (
        lambda m: {"ignored_modules": m.first},
        OptionTypeError,
        TypeError,
        ["Linear"],
    ),
    "ignored states that are no list": (lambda m: {"ignored_states": 3}, OptionTypeError, TypeError, ["int"]),
    "a wrapped module among the ignored": (wrapped_ignored, OptionError, ValueError, ["FullyShardedDataParallel"]),
    "a policy over a wrapped child": (wrapped_child, OptionError, ValueError, ["'blocks.1'"]),
    "a policy unit that mixes frozen and trainable": (
        half_frozen,
        OptionError,
        ValueError,
        ["'blocks.1'", "blocks.1.up.bias", "use_orig_params=True"],
    ),
    "a unit that mixes frozen and trainable": (
        half_frozen_by_hand,
        OptionError,
        ValueError,
        ["'Model'", "'first.bias'", "use_orig_params=True"],
    ),
    "a unit of two dtypes": (two_dtypes, OptionError, ValueError, ["'Model'", "'first.weight'", "torch.float64"]),
    "a device that is none": (lambda m: {"device_id": 1.5}, OptionTypeError, TypeError, ["device_id", "1.5"]),
    "a device that is a bool": (lambda m: {"device_id": True}, OptionTypeError, TypeError, ["device_id", "True"]),
    "a sync that is a typo": (
        lambda m: {"sync_module_states": "always"},
        OptionError,
        ValueError,
        ['"auto"', "'always'"],
    ),
}
# Those where torch's FSDP1 can be asked as well; elsewhere it does not check, or cannot run without an accelerator.
PEER = [
    "a group and a mesh",
    "a hybrid strategy without groups or policy",
    "a hybrid strategy with a 1-D mesh",
    "a hybrid strategy with one group",
    "both ignored arguments",
    "ignored states of two kinds",
    "a parameter among ignored modules",
    "ignored modules that are no list",
    "a unit of two dtypes",
    "a unit that mixes frozen and trainable",
]


@pytest.mark.parametrize("case", list(ERRORS))
@on_ranks(2)
def test_a_wrong_argument_raises_fsdp1s_type_with_a_name_on_every_rank(case: str, rank: int) -> None:
    arguments, kind, builtin, words = ERRORS[case]
    model = seeded()
    kwargs = arguments(model)
    text = message(kind, builtin, lambda: FSDP(model, **kwargs))
    assert [word for word in words if word not in text] == [], text
    # No rank is left inside a collective, and the module can be wrapped properly now.
    dist.barrier()


@pytest.mark.parametrize("case", PEER)
@on_ranks(2)
def test_the_error_has_the_type_that_the_peer_raises(case: str) -> None:
    arguments, _, builtin, _ = ERRORS[case]
    model = seeded()
    kwargs = arguments(model)
    if "sharding_strategy" in kwargs:
        kwargs["sharding_strategy"] = peer_library.ShardingStrategy[kwargs["sharding_strategy"].name]
    with pytest.raises(builtin):
        peer_fsdp(model, **kwargs)


@on_ranks(2)
def test_an_index_without_an_accelerator_is_an_error_that_says_how_to_use_the_cpu() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator, so that the index is right")
    text = message(OptionError, ValueError, lambda: FSDP(nn.Linear(2, 2), device_id=0))
    assert "device_id=0" in text
    assert 'torch.device("cpu")' in text


@on_ranks(2)
def test_a_policy_for_a_wrapper_is_an_error_that_names_both() -> None:
    model = FSDP(nn.Sequential(nn.Linear(2, 2)))
    text = message(OptionError, ValueError, lambda: FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})))
    assert "auto_wrap_policy cannot be used on FullyShardedDataParallel" in text
    assert "already" in text


@on_ranks(4)
def test_a_rank_outside_the_group_gets_an_error(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        FSDP(nn.Linear(2, 2), process_group=group)
    else:
        text = message(OptionTypeError, TypeError, lambda: FSDP(nn.Linear(2, 2), process_group=group))
        assert "process_group" in text


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"sharding_strategy": "full"}, "sharding_strategy must be one of"),
        ({"device_id": 1.5}, "device_id must be an int"),
        ({"device_id": "nonsense"}, "device_id='nonsense' names no device"),
        ({"device_id": "meta"}, "device_id='meta' names a device that cannot compute here"),
        ({"auto_wrap_policy": CustomPolicy(_with_a_typo)}, "The policy gave unit 'blocks.0' the argument 'nosuch'"),
        ({"backward_prefetch": "pre"}, "backward_prefetch must be one of"),
    ],
)
@on_ranks(2)
def test_a_wrong_option_of_one_rank_stops_the_others_too(wrong: dict[str, Any], text: str, rank: int) -> None:
    model = seeded()
    if rank == 0:
        with pytest.raises(FsdpFlatError, match=text):
            FSDP(model, **wrong)
    else:
        told = message(PeerFailureError, RuntimeError, lambda: FSDP(model))
        assert "Rank 0" in told
        assert text in told
    assert square_loss(shard(model), batch(0)).isfinite()


@on_ranks(2)
def test_an_initialisation_that_fails_on_one_rank_stops_the_others_too(rank: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def init(module: nn.Module) -> None:
        if rank == 1:
            raise KeyError("no weights for this module")
        module.to_empty(device="cpu", recurse=False)

    if rank == 1:
        with pytest.warns(UserWarning, match=r"param_init_fn, called with module '' \("), pytest.raises(KeyError):
            FSDP(model, param_init_fn=init)
    else:
        told = message(PeerFailureError, RuntimeError, lambda: FSDP(model, param_init_fn=init))
        assert "Rank 1" in told
        assert "no weights for this module" in told


@on_ranks(2)
def test_a_failed_construction_leaves_the_model_as_it_was() -> None:
    model = seeded()
    before = dict(model.named_parameters())
    model.last.bias.requires_grad_(False)
    message(OptionError, ValueError, lambda: shard(model))
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert not any(isinstance(module, FSDP) for module in model.modules())


@on_ranks(2)
def test_units_of_one_tree_that_differ_in_use_orig_params_are_an_error_that_names_both() -> None:
    model = seeded()
    model.blocks[1] = FSDP(model.blocks[1], use_orig_params=True)
    root = FSDP(model, use_orig_params=False)
    text = message(OptionError, ValueError, lambda: root(batch(0)))
    assert "use_orig_params=True in unit 'blocks.1'" in text
    assert "use_orig_params=False in unit 'Model'" in text
