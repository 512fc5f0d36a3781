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
from tests.support import on_ranks
from tests.wrapper.models import seeded, shard

needs_torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"the list is of torch 2.13, and this is {torch.__version__}"
)
# By module: why its names are not needed, and the names.
NOT_NEEDED: dict[str, tuple[str, str]] = {
    "_common_utils": (
        "They serve FSDP1's own runtime: its state object, its device handle, marks of its parameters.",
        "_MAX_TRAVERSE_DEPTH _is_namedtuple collect_grad_tensors _collect_grad_tensors replace_grad_tensors "
        "_replace_grad_tensors FSDP_FLATTENED _MODULE_TO_INP_DTYPE _FSDPDeviceHandle "
        "_UninitializedDeviceHandle _FSDPState _is_composable _get_sharding_strategy _set_fsdp_flattened "
        "_is_fsdp_flattened _named_parameters_with_duplicates _get_param_to_fqns _log_post_backward_hook "
        "_get_handle_fqns_from_root _apply_to_modules _assert_in_training_states _get_root_modules "
        "_override_module_mixed_precision _no_dispatch_record_stream ",
    ),
    "_debug_utils": (
        "They print FSDP1's trees and times; describe(model) and torch.profiler do that here.",
        "SimpleProfiler _get_sharded_module_tree_with_module_name_to_fqns ",
    ),
    "_dynamo_utils": (
        "It marks modules for torch.compile; here the functions that are not compiled are marked.",
        "_annotate_modules_for_dynamo ",
    ),
    "_exec_order_utils": (
        "They compare the order of forwards in the first step; here every backward compares it.",
        "_ExecOrderWarnStatus _ExecOrderData ",
    ),
    "_flat_param": (
        "They are parts of FSDP1's flat parameter and handle; here a layout is a value (fsdp_flat.layout).",
        "_FSDP_USE_UNSAFE_SETATTR _FSDP_SKIP_WRITEBACK_CHECK _FSDP_USE_FULL_PREC_IN_EVAL "
        "_FLAT_PARAM_PADDING_VALUE _FSDP_USE_FAKE_ALL_GATHER _FSDP_USE_FAKE_REDUCE HandleShardingStrategy "
        "RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES ParamInfo "
        "SharedParamInfo _ShardParamInfo FlatParamShardMetadata _FlatParameterMeta _unsafe_setattr_param "
        "_unsafe_setattr_tensor _safe_setattr_tensor_or_param _convert_to_params _is_truly_contiguous "
        "_detach_if_needed _get_aligned_numel _get_dtype_size _construct_padding_tensor "
        "_warn_skip_writeback_check _warn_use_fake_all_gather _warn_use_fake_reduce _same_storage "
        "_same_storage_size _storage_size_allocated ",
    ),
    "_fsdp_extensions": (
        "They are hooks for tensor parallelism; here DTensor parameters work without one.",
        "FSDPExtensions _extensions _set_fsdp_extensions _ext_pre_flatten_transform "
        "_ext_post_unflatten_transform _ext_chunk_tensor _ext_chunk_dtensor "
        "_ext_pre_load_state_dict_transform _ext_all_gather_dtensor ",
    ),
    "_init_utils": (
        "They are steps of FSDP1's constructor.",
        "_TORCHDISTX_AVAIL PARAM_BROADCAST_BUCKET_SIZE FSDP_SYNCED "
        "SHARDING_STRATEGY_MAP _init_process_group_state "
        "_init_process_group_state_for_hybrid_shard _is_valid_hybrid_shard_pg_type "
        "_is_valid_hybrid_shard_device_mesh _init_intra_node_process_group _init_inter_node_process_group "
        "_init_intra_and_inter_node_groups _init_ignored_module_states _check_ignored_states "
        "_init_device_handle _init_buffer_state _init_core_state _init_runtime_state _init_prefetching_state "
        "_init_extension _init_state_dict_state _verify_managed_params _init_param_handle_from_module "
        "_init_param_handle_from_params _get_ignored_modules _get_ignored_params _get_ignored_buffer_names "
        "_get_buffer_names _check_single_device_module _get_device_from_device_id _need_to_materialize_module "
        "_materialize_with_param_init_fn _materialize_meta_module _get_modules_to_materialize "
        "_move_module_to_device _move_states_to_device _warn_cpu_init _get_compute_device "
        "_sync_module_params_and_buffers _check_module_states_for_sync_module_states _get_orig_params "
        "_check_orig_params_flattened _get_default_comm_hook _get_default_comm_hook_state ",
    ),
    "_limiter_utils": (
        "It limits all-gathers by events of an accelerator; here the schedule does.",
        "_FreeEventQueue ",
    ),
    "_optim_utils": (
        "They are steps of FSDP1's optimizer state dicts.",
        "FSDPParamInfo sorted_items _ConsolidatedOptimState _PosDimTensorInfo _OptimStateKey "
        "_unflatten_optim_state _is_zero_dim_tensor _communicate_optim_state "
        "_unflatten_communicated_optim_state _broadcast_processed_state _broadcast_state "
        "_shard_orig_param_state _flatten_optim_state_dict _flatten_optim_state _flatten_tensor_optim_state "
        "_flatten_zero_dim_tensor_optim_state _flatten_non_tensor_optim_state _rekey_sharded_optim_state_dict "
        "_get_param_id_to_param_from_optim_input _get_flat_param_to_fqn _get_param_key_to_param "
        "_get_param_to_param_key _get_param_to_param_id_from_optim_input _check_missing_keys_on_rank "
        "_map_param_key_to_optim_keys _unflatten_param_groups _is_named_optimizer StateInfo "
        "_allgather_state_info _convert_all_state_info _unflatten_orig_param_states "
        "_allgather_orig_param_states _gather_all_orig_param_state _convert_state_with_orig_params "
        "_convert_state_with_flat_params _optim_state_dict _get_fqn_to_fsdp_param_info _set_optim_use_dtensor ",
    ),
    "_runtime_utils": (
        "They are steps of FSDP1's forward and backward.",
        "HOMOGENEOUS_ATTR_NAMES _PrefetchMode _get_fsdp_root_states_with_modules "
        "_check_flat_params_on_expected_device _share_state_and_init_handle_attrs _init_streams _unshard "
        "_unshard_grads _reshard_grads _pre_forward _pre_forward_unshard _post_forward _post_forward_reshard "
        "_root_pre_forward _root_cast_forward_input _pre_backward_hook _post_backward_hook "
        "_post_backward_reshard_only_hook _post_backward_reshard _should_free_in_backward _reduce_grad "
        "_get_reduce_scatter_tensors _accumulate_sharded_grad _reduce_grad_no_shard "
        "_post_reduce_grad_callback _offload_grad _post_backward_use_sharded_grad_views _div_if_needed "
        "_cast_grad_to_param_dtype _check_grad_to_accumulate _low_precision_hook_enabled _catch_all_reshard "
        "_finalize_params _prefetch_handle _get_handle_to_prefetch _get_training_state "
        "_register_pre_forward_hook _register_post_forward_hook _register_root_pre_forward_hook "
        "_register_pre_backward_hooks _register_post_backward_hook _register_post_backward_reshard_only_hook "
        "_register_post_backward_final_callback _wait_for_computation_stream "
        "_reset_flat_param_grad_info_if_needed _get_buffers_and_dtypes_for_computation "
        "_get_orig_buffer_dtypes _cast_buffers_to_dtype_and_device ",
    ),
    "_shard_utils": (
        "They make the chunks of FSDP1's sharded state dicts.",
        "_get_remote_device_str _create_chunk_sharded_tensor _create_chunk_dtensor _all_gather_dtensor ",
    ),
    "_state_dict_utils": (
        "They are hooks of FSDP1's state dicts, and their steps.",
        "_should_unshard_params _convert_to_wrapped_module_name _param_name_infos "
        "_shared_param_name_infos _enter_unshard_params_ctx _exit_unshard_params_ctx "
        "_common_pre_state_dict_hook _common_unshard_pre_state_dict_hook _common_unshard_post_state_dict_hook "
        "_full_pre_state_dict_hook _full_post_state_dict_hook _full_pre_load_state_dict_hook "
        "_full_post_load_state_dict_hook _local_pre_state_dict_hook _local_post_state_dict_hook "
        "_local_post_load_state_dict_hook _local_pre_load_state_dict_hook _sharded_pre_state_dict_hook "
        "_sharded_post_state_dict_hook _sharded_post_load_state_dict_hook _sharded_pre_load_state_dict_hook "
        "_replace_with_full_state_dict_type _post_state_dict_hook _pre_state_dict_hook _set_use_dtensor "
        "_pre_load_state_dict_hook _post_load_state_dict_hook _register_all_state_dict_hooks "
        "_register_state_dict_hooks_base ",
    ),
    "_trace_utils": (
        "They trace with torch.fx and know no wrapper, so torch's work as they are.",
        "TracingConfig _ParamUsageInfo _ExecutionInfo _ExecOrderTracer ",
    ),
    "_traversal_utils": (
        "It is the mark of FSDP1's earlier composable interface, which torch has removed.",
        "_composable ",
    ),
    "_unshard_param_utils": (
        "They are steps of FSDP1's summon_full_params.",
        "FLAT_PARAM _writeback_to_local_shard _deregister_flat_param _register_flat_param "
        "_unflatten_as_params _validate_unshard_params_args _unshard_fsdp_state_params "
        "_deregister_orig_params _register_orig_params ",
    ),
    "_wrap_utils": (
        "They are steps of FSDP1's auto-wrapping.",
        "_auto_wrap _check_nested_wrapping _warn_on_overridden_mixed_precision _validate_frozen_params "
        "_get_post_order_named_modules _get_managed_param_to_fqn ",
    ),
    "sharded_grad_scaler": (
        "They are helpers of FSDP1's scaler.",
        "_refresh_per_optimizer_state _is_supported_device _GeneralMultiDeviceReplicator ",
    ),
    "wrap": (
        "They are steps of FSDP1's auto-wrapping, which a plan does here.",
        "_post_order_apply _construct_wrap_fn _run_mixed_precision_override_policy _wrap "
        "_recursive_wrap _ConfigAutoWrap ",
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
        home, listed = home_of(module, name), name in NOT_NEEDED.get(module, ("", ""))[1].split()
        if home is not None:
            assert hasattr(importlib.import_module(home), name), f"{home} has no {name}"
            both += [(module, name)] if listed else []
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
