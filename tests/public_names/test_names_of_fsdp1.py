"""Every name that the modules of torch 2.13's FSDP1 define is here, or is on a list that says why it is not needed."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.compat.torch_names import PEER, home_of
from fsdp_flat.errors import OptionError
from fsdp_flat.fully_sharded_data_parallel import HandleTrainingState, ProcessGroupType, TrainingState
from tests.compat.test_private_names import does
from tests.support import on_ranks
from tests.support.wrapper_models import seeded, shard

needs_torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the list is of torch 2.13, and this is {torch.__version__}"
)
# By module: why its names are not needed, and the names. Functions that take a module, a state or a handle are in the
# table of ``fsdp_flat.compat.private_names``.
NOT_NEEDED: dict[str, tuple[str, str]] = {
    "_common_utils": (
        "They serve FSDP1's own runtime: its state object, its device handle, marks of its parameters.",
        "_MAX_TRAVERSE_DEPTH _is_namedtuple collect_grad_tensors _collect_grad_tensors replace_grad_tensors "
        "_replace_grad_tensors FSDP_FLATTENED _MODULE_TO_INP_DTYPE _FSDPDeviceHandle "
        "_UninitializedDeviceHandle _FSDPState _no_dispatch_record_stream",
    ),
    "_debug_utils": (
        "They print FSDP1's trees and times; describe(model) and torch.profiler do that here.",
        "SimpleProfiler",
    ),
    "_exec_order_utils": (
        "They compare the order of forwards in the first step; here every backward compares it.",
        "_ExecOrderWarnStatus _ExecOrderData",
    ),
    "_flat_param": (
        "They are parts of FSDP1's flat parameter and handle; here a layout is a value (fsdp_flat.layout).",
        "_FSDP_USE_UNSAFE_SETATTR _FSDP_SKIP_WRITEBACK_CHECK _FSDP_USE_FULL_PREC_IN_EVAL "
        "_FLAT_PARAM_PADDING_VALUE _FSDP_USE_FAKE_ALL_GATHER _FSDP_USE_FAKE_REDUCE HandleShardingStrategy "
        "RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES ParamInfo "
        "SharedParamInfo _ShardParamInfo FlatParamShardMetadata _FlatParameterMeta _convert_to_params "
        "_is_truly_contiguous _detach_if_needed _get_aligned_numel _get_dtype_size _construct_padding_tensor "
        "_warn_skip_writeback_check _warn_use_fake_all_gather _warn_use_fake_reduce _same_storage "
        "_same_storage_size _storage_size_allocated",
    ),
    "_fsdp_extensions": (
        "They are hooks for tensor parallelism; here DTensor parameters work without one.",
        "FSDPExtensions _extensions _set_fsdp_extensions _ext_pre_flatten_transform "
        "_ext_post_unflatten_transform _ext_chunk_tensor _ext_chunk_dtensor "
        "_ext_pre_load_state_dict_transform _ext_all_gather_dtensor",
    ),
    "_init_utils": (
        "They are steps of FSDP1's constructor.",
        "_TORCHDISTX_AVAIL PARAM_BROADCAST_BUCKET_SIZE FSDP_SYNCED SHARDING_STRATEGY_MAP "
        "_is_valid_hybrid_shard_pg_type _is_valid_hybrid_shard_device_mesh _init_intra_node_process_group "
        "_init_inter_node_process_group _init_intra_and_inter_node_groups _check_ignored_states "
        "_get_device_from_device_id _move_states_to_device _warn_cpu_init "
        "_check_module_states_for_sync_module_states _get_default_comm_hook _get_default_comm_hook_state",
    ),
    "_limiter_utils": (
        "It limits all-gathers by events of an accelerator; here the schedule does.",
        "_FreeEventQueue",
    ),
    "_optim_utils": (
        "They are steps of FSDP1's optimizer state dicts.",
        "FSDPParamInfo sorted_items _ConsolidatedOptimState _PosDimTensorInfo _OptimStateKey "
        "_is_zero_dim_tensor _flatten_zero_dim_tensor_optim_state _flatten_non_tensor_optim_state "
        "_check_missing_keys_on_rank _unflatten_param_groups _is_named_optimizer StateInfo",
    ),
    "_runtime_utils": (
        "They are steps of FSDP1's forward and backward.",
        "HOMOGENEOUS_ATTR_NAMES _PrefetchMode _div_if_needed _check_grad_to_accumulate "
        "_wait_for_computation_stream _cast_buffers_to_dtype_and_device",
    ),
    "_shard_utils": (
        "They make the chunks of FSDP1's sharded state dicts.",
        "_get_remote_device_str _create_chunk_sharded_tensor _create_chunk_dtensor _all_gather_dtensor",
    ),
    "_state_dict_utils": (
        "They are hooks of FSDP1's state dicts, and their steps.",
        "_convert_to_wrapped_module_name",
    ),
    "_trace_utils": (
        "They trace with torch.fx and know no wrapper, so torch's work as they are.",
        "TracingConfig _ParamUsageInfo _ExecutionInfo _ExecOrderTracer",
    ),
    "_unshard_param_utils": (
        "They are steps of FSDP1's summon_full_params.",
        "FLAT_PARAM",
    ),
    "_wrap_utils": (
        "They are steps of FSDP1's auto-wrapping.",
        "_warn_on_overridden_mixed_precision",
    ),
    "sharded_grad_scaler": (
        "They are helpers of FSDP1's scaler.",
        "_refresh_per_optimizer_state _is_supported_device _GeneralMultiDeviceReplicator",
    ),
    "wrap": (
        "They are steps of FSDP1's auto-wrapping, which a plan does here.",
        "_ConfigAutoWrap",
    ),
}


def defined() -> list[tuple[str, str]]:
    """Return module and name of each function, class and constant that torch's modules of FSDP1 define."""
    found = []
    for path in sorted(Path(torch.distributed.fsdp.__file__).parent.glob("*.py")):
        module = "" if path.stem == "__init__" else path.stem
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.append((module, node.name))
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found += [(module, each.id) for each in targets if isinstance(each, ast.Name)]
    return [(module, name) for module, name in dict.fromkeys(found) if name not in ("__all__", "log", "logger")]


@needs_torch_2_13
def test_each_name_is_ours_or_not_needed_and_none_is_missing() -> None:
    missing, both = [], []
    for module, name in defined():
        listed = name in NOT_NEEDED.get(module, ("", ""))[1].split() or bool(does(f"fsdp.{module}", name))
        home = home_of(module, name)
        if home is not None:
            assert hasattr(importlib.import_module(home), name), f"{home} has no {name}"
            both += [(module, name)] if name in NOT_NEEDED.get(module, ("", ""))[1].split() else []
        elif not listed:
            missing.append((module, name))
    assert missing == []
    assert both == []


@needs_torch_2_13
def test_each_name_on_the_list_is_torchs_and_has_a_reason() -> None:
    known = set(defined())
    for module, (reason, names) in NOT_NEEDED.items():
        assert reason.endswith(".")
        assert [name for name in names.split() if (module, name) not in known] == []


@needs_torch_2_13
def test_the_wrapper_has_every_member_of_fsdp1s() -> None:
    theirs: Any = importlib.import_module(PEER).FullyShardedDataParallel
    assert [name for name in dir(theirs) if not hasattr(FSDP, name)] == []


def test_the_type_of_process_groups_is_that_of_the_argument() -> None:
    assert ProcessGroupType == importlib.import_module(f"{PEER}._init_utils").ProcessGroupType


@on_ranks(2)
def test_a_caller_may_set_the_state_of_the_step(rank: int) -> None:
    model = shard(seeded())
    for state in ((TrainingState.FORWARD_BACKWARD, HandleTrainingState.FORWARD), (TrainingState.IDLE,) * 2):
        wanted = state[0], HandleTrainingState[state[1].name]
        with model._use_training_state(*wanted):
            assert (model.training_state, model._handle._training_state) == wanted
        assert model.training_state is TrainingState.IDLE
    with (
        pytest.raises(OptionError, match="do not occur together"),
        model._use_training_state(TrainingState.IDLE, HandleTrainingState.FORWARD),
    ):
        pass


def test_the_warnings_of_older_arguments_can_be_called() -> None:
    FSDP._warn_optim_input(None)
    with pytest.warns(FutureWarning, match="optim_input"):
        FSDP._warn_optim_input([nn.Parameter(torch.ones(1))])
    with pytest.warns(FutureWarning, match="old is an older form of new"):
        FSDP._warn_legacy_optim_state_dict("old", "new")
