"""FSDP2's public interface as of torch 2.13: names, signatures and fields."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as peer_library

import fsdp_flat

REQUIRED = inspect.Parameter.empty
Parameters = list[tuple[str, Any]]

# Parameters after ``self`` with their defaults; ``*`` stands before those that are by keyword only.
METHODS: dict[str, Parameters] = {
    "finalize_backward": [("*", None), ("async_op", False)],
    "reset_iter_state": [],
    "reshard": [],
    "set_all_reduce_hook": [("hook", REQUIRED), ("*", None), ("stream", None)],
    "set_allocate_memory_from_process_group_for_comm": [("enable", REQUIRED)],
    "set_custom_all_gather": [("comm", REQUIRED)],
    "set_custom_reduce_scatter": [("comm", REQUIRED)],
    "set_force_sum_reduction_for_comms": [("enable", REQUIRED)],
    "set_gradient_divide_factor": [("factor", REQUIRED)],
    "set_is_last_backward": [("is_last_backward", REQUIRED)],
    "set_keep_unsharded_storage": [("keep", REQUIRED), ("*", None), ("recurse", True)],
    "set_manual_backward_finalization": [("enabled", REQUIRED)],
    "set_modules_to_backward_prefetch": [("modules", REQUIRED)],
    "set_modules_to_forward_prefetch": [("modules", REQUIRED)],
    "set_post_optim_event": [("event", REQUIRED)],
    "set_reduce_scatter_divide_factor": [("factor", REQUIRED)],
    "set_reduce_scatter_max_input_buffers": [("max_input_buffers", REQUIRED), ("*", None), ("recurse", True)],
    "set_reduce_scatter_unused_params": [("reduce_scatter_unused_params", REQUIRED), ("*", None), ("recurse", True)],
    "set_requires_all_reduce": [("requires_all_reduce", REQUIRED), ("*", None), ("recurse", True)],
    "set_requires_gradient_sync": [("requires_gradient_sync", REQUIRED), ("*", None), ("recurse", True)],
    "set_reshard_after_backward": [("reshard_after_backward", REQUIRED), ("*", None), ("recurse", True)],
    "set_reshard_after_forward": [("reshard_after_forward", REQUIRED), ("recurse", True)],
    "set_separate_reduce_scatter_group": [("enable", True), ("*", None), ("recurse", True)],
    "set_symm_mem_for_comm": [("backend", "NCCL")],
    "set_unshard_in_backward": [("unshard_in_backward", REQUIRED)],
    "unshard": [("async_op", False)],
}
FUNCTIONS: dict[str, Parameters] = {
    "fully_shard": [
        ("module", REQUIRED),
        ("*", None),
        ("mesh", None),
        ("reshard_after_forward", None),
        ("shard_placement_fn", None),
        ("mp_policy", fsdp_flat.MixedPrecisionPolicy()),
        ("offload_policy", fsdp_flat.OffloadPolicy()),
        ("ignored_params", None),
        ("dp_mesh_dims", None),
    ],
    "register_fsdp_forward_method": [("module", REQUIRED), ("method_name", REQUIRED)],
    "share_comm_ctx": [("modules", REQUIRED)],
}
FIELDS: dict[str, dict[str, Any]] = {
    "MixedPrecisionPolicy": {
        "param_dtype": None,
        "reduce_dtype": None,
        "output_dtype": None,
        "cast_forward_inputs": True,
    },
    "OffloadPolicy": {},
    "CPUOffloadPolicy": {"pin_memory": True},
}


def assert_takes(function: Any, parameters: Parameters) -> None:
    """Every call that the parameters allow is allowed, with the same defaults; more may follow with defaults."""
    __tracebackhide__ = True
    own = dict(inspect.signature(function).parameters)
    own.pop("self", None)
    names = [name for name, _ in parameters if name != "*"]
    assert [name for name in own if name in names] == names
    assert [name for name, each in own.items() if name not in names and each.default is REQUIRED] == []
    by_keyword = False
    for place, (name, default) in enumerate(parameters):
        if name == "*":
            by_keyword = True
            continue
        # Given by position in FSDP2, it has to be at the same position here.
        assert by_keyword or list(own)[place] == name
        assert by_keyword or own[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        given = own[name].default
        assert given == default or (name == "offload_policy" and given is None)


@pytest.mark.parametrize("name", METHODS)
def test_a_sharded_module_has_every_method_with_fsdp2s_signature(name: str) -> None:
    assert_takes(getattr(fsdp_flat.FSDPModule, name), METHODS[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_package_has_every_function_with_fsdp2s_signature(name: str) -> None:
    assert_takes(getattr(fsdp_flat, name), FUNCTIONS[name])


@pytest.mark.parametrize("name", FIELDS)
def test_the_policies_have_fsdp2s_fields(name: str) -> None:
    policy = getattr(fsdp_flat, name)
    assert {field.name: field.default for field in dataclasses.fields(policy)} == FIELDS[name]
    assert policy(**FIELDS[name]) == policy()
    assert (name == "MixedPrecisionPolicy") is policy.__dataclass_params__.frozen


def test_data_parallel_dims_have_fsdp2s_fields() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(fsdp_flat.DataParallelMeshDims)}
    assert fields == {"shard": None, "replicate": None}


def test_a_handle_waits() -> None:
    assert_takes(fsdp_flat.UnshardHandle.wait, [])
    assert fsdp_flat.UnshardHandle(None).wait() is None


def test_these_are_all_public_methods_of_the_installed_torch() -> None:
    public = {name for name in vars(peer_library.FSDPModule) if not name.startswith("_")}
    assert public <= set(METHODS)
