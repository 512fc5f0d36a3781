"""What is importable, and the methods' names, order and defaults beside the installed torch's."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch.distributed.fsdp as peer_library
from torch import nn

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.runtime import Arguments

PUBLIC = {
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FsdpFlatError",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MatrixOptimizer",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateHandler",
    "OptimStateKeyType",
    "ShardedEMA",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StatePart",
    "UnshardHandle",
    "check_replicas",
    "clean_named_modules",
    "clean_named_parameters",
    "clean_tensor_name",
    "compare_with",
    "debug",
    "describe",
    "fully_shard",
    "install",
    "installed",
    "iter_full_state_dict",
    "list_checkpoints",
    "load_checkpoint",
    "load_full",
    "matrix_params",
    "offload_activations",
    "offload_optimizer",
    "participate",
    "plan",
    "record",
    "register_forward_method",
    "register_fsdp_forward_method",
    "register_optim_state_handler",
    "save_checkpoint",
    "save_full",
    "share_comm_ctx",
    "uninstall",
    "unshard_for",
    "unwrap",
    "verify_checkpoint",
    "whole_shape",
}
# Every public method of FSDP1 that model code calls, the optimizer's state dicts aside.
METHODS = [
    "apply",
    "check_is_root",
    "clip_grad_norm_",
    "fsdp_modules",
    "get_state_dict_type",
    "named_buffers",
    "named_parameters",
    "no_sync",
    "register_comm_hook",
    "set_state_dict_type",
    "state_dict_type",
    "summon_full_params",
]


def test_the_public_names_are_sorted_and_pinned() -> None:
    names = fsdp_flat.__all__
    assert set(names) == PUBLIC
    assert names == sorted(names)
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(fsdp_flat, name)] == []


def test_the_constructors_record_of_arguments_which_it_fills_by_position_has_their_order() -> None:
    _, *arguments = inspect.signature(FSDP).parameters.values()
    found = [(field.name, field.default) for field in dataclasses.fields(Arguments)]
    assert found == [(each.name, each.default) for each in arguments]


def test_the_constructor_agrees_with_the_installed_torch() -> None:
    theirs = inspect.signature(peer_library.FullyShardedDataParallel).parameters
    ours = inspect.signature(FSDP).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        default = parameter.default
        assert getattr(ours[name].default, "name", ours[name].default) == getattr(default, "name", default), name


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_fsdp1s_arguments(name: str) -> None:
    theirs = inspect.signature(getattr(peer_library.FullyShardedDataParallel, name)).parameters
    ours = inspect.signature(getattr(FSDP, name)).parameters
    # What we have beside them comes after them.
    assert list(ours)[: len(theirs)] == list(theirs)
    for key, parameter in theirs.items():
        assert ours[key].default == parameter.default, key
        assert ours[key].kind == parameter.kind, key


def test_the_names_of_the_prefix_and_the_flat_parameter_are_fsdp1s() -> None:
    from torch.distributed.fsdp import _common_utils as theirs

    from fsdp_flat import layout

    assert (layout.FSDP_WRAPPED_MODULE, layout.FSDP_PREFIX, layout.FLAT_PARAM) == (
        theirs.FSDP_WRAPPED_MODULE,
        theirs.FSDP_PREFIX,
        "_flat_param",
    )


def test_no_process_group_is_an_error_that_says_how_to_start_one() -> None:
    with pytest.raises(fsdp_flat.FsdpFlatError, match=r"init_process_group.*torchrun") as caught:
        FSDP(nn.Linear(2, 2))
    assert isinstance(caught.value, RuntimeError)


def test_a_flat_parameter_cannot_be_constructed() -> None:
    with pytest.raises(TypeError, match="a type to test against"):
        fsdp_flat.FlatParameter()
