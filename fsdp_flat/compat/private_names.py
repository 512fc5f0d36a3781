"""Says what each private function of torch's FSDPs does with our objects: the one table of these functions.

Programs import them. A function that takes a module, a state, a handle or a parameter group does one of three things
while fsdp_flat is installed, if one of its arguments is ours:

* :data:`WORKS`: our function of the same name, in ``private_functions``, does on our object what torch's does on its.
* :data:`PASSES`: torch's own function runs. It asks about modules by class and state, which are found, or reads what
  our objects have too.
* :data:`RAISES`: an error names the function and what to call instead.

Without our objects torch's function runs in any case. Modules are named without ``torch.distributed.``. A test walks
torch's modules, so that no function is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping

WORKS: Mapping[str, str] = {
    "fsdp._optim_utils": "_optim_state_dict",
    "fsdp._runtime_utils": (
        "_get_fsdp_root_states _get_fsdp_root_states_with_modules _is_fsdp_root _lazy_init "
        "_post_backward_final_callback _post_forward _post_forward_reshard _pre_forward _pre_forward_unshard "
        "_reshard _root_pre_forward _unshard"
    ),
    "fsdp._traversal_utils": "_get_fsdp_handles",
    "fsdp._unshard_param_utils": "_unshard_fsdp_state_params _unshard_params _unshard_params_for_summon",
}

PASSES: Mapping[str, str] = {
    "_composable.checkpoint_activation": "_no_hook checkpoint",
    "_composable.contract": "_get_registry",
    "_composable.replicate": "_is_fully_sharded replicate",
    "_composable.replicate_with_fsdp": (
        "_get_module_replicate_state _validate_module is_composable_with_replicate replicate"
    ),
    "_composable_state": "_get_module_state _insert_module_state",
    "fsdp._common_utils": (
        "_apply_to_modules _assert_in_training_states _get_module_fsdp_state "
        "_get_module_fsdp_state_if_fully_sharded_module _get_param_to_fqns _get_root_modules _get_sharding_strategy "
        "_has_fsdp_params _is_composable _is_fsdp_flattened _module_handle _named_parameters_with_duplicates "
        "_override_module_mixed_precision _set_fsdp_flattened"
    ),
    "fsdp._debug_utils": "_get_sharded_module_tree_with_module_name_to_fqns",
    "fsdp._dynamo_utils": "_annotate_modules_for_dynamo",
    "fsdp._flat_param": "_safe_setattr_tensor_or_param _unsafe_setattr_param _unsafe_setattr_tensor",
    "fsdp._fully_shard._fsdp_common": "_is_composable_with_fsdp",
    "fsdp._fully_shard._fsdp_init": (
        "_adjust_managed_modules _apply_to_module _get_managed_modules _get_managed_states _get_modules_and_states "
        "_ignore_module _validate_module"
    ),
    "fsdp._fully_shard._fsdp_param": "unsafe_setattr_param",
    "fsdp._fully_shard._fsdp_param_group": "_get_param_module_infos",
    "fsdp._fully_shard._fsdp_state": "_get_module_fsdp_state _register_group_forward_hooks",
    "fsdp._init_utils": (
        "_check_orig_params_flattened _check_single_device_module _get_buffer_names _get_compute_device "
        "_get_ignored_buffer_names _get_ignored_modules _get_ignored_params _get_modules_to_materialize "
        "_get_orig_params _materialize_meta_module _materialize_with_param_init_fn _move_module_to_device "
        "_need_to_materialize_module _sync_module_params_and_buffers _verify_managed_params"
    ),
    "fsdp._optim_utils": (
        "_broadcast_processed_state _broadcast_state _get_flat_param_to_fqn _get_fqn_to_fsdp_param_info "
        "_get_param_id_to_param_from_optim_input _get_param_key_to_param _get_param_to_param_id_from_optim_input "
        "_get_param_to_param_key _map_param_key_to_optim_keys"
    ),
    "fsdp._runtime_utils": (
        "_check_flat_params_on_expected_device _get_training_state _low_precision_hook_enabled "
        "_reset_flat_param_grad_info_if_needed _root_cast_forward_input"
    ),
    "fsdp._state_dict_utils": "_param_name_infos _shared_param_name_infos _should_unshard_params",
    "fsdp._traversal_utils": "_composable _get_fsdp_states _get_fsdp_states_with_modules",
    "fsdp._unshard_param_utils": "_validate_unshard_params_args",
    "fsdp._wrap_utils": (
        "_auto_wrap _check_nested_wrapping _get_managed_param_to_fqn _get_post_order_named_modules "
        "_validate_frozen_params"
    ),
    "fsdp.fully_sharded_data_parallel": "_get_fqn_to_param _get_grad_norm _get_param_to_fqn",
    "fsdp.wrap": (
        "_construct_wrap_fn _module_wrap_policy _or_policy _post_order_apply _recursive_wrap "
        "_run_mixed_precision_override_policy _wrap _wrap_module_cls_individually lambda_auto_wrap_policy "
        "size_based_auto_wrap_policy transformer_auto_wrap_policy wrap"
    ),
}

RAISES: Mapping[str, Mapping[str, str]] = {
    "Construct fsdp_flat.FullyShardedDataParallel, which does these steps, or call fsdp_flat.fully_shard": {
        "fsdp._fully_shard._fsdp_init": "_init_param_group",
        "fsdp._init_utils": (
            "_init_buffer_state _init_core_state _init_device_handle _init_extension _init_ignored_module_states "
            "_init_param_handle_from_module _init_param_handle_from_params _init_prefetching_state "
            "_init_process_group_state _init_process_group_state_for_hybrid_shard _init_runtime_state "
            "_init_state_dict_state"
        ),
    },
    "Call the wrapper's check_is_root(), which does the set-up before a first forward": {
        "fsdp._runtime_utils": "_init_streams _share_state_and_init_handle_attrs",
    },
    "Buffers are cast by the model's own forward: set buffer_dtype of MixedPrecision": {
        "fsdp._runtime_utils": "_get_buffers_and_dtypes_for_computation _get_orig_buffer_dtypes",
    },
    "Call unshard() of the module, or register_forward_method for another method than forward": {
        "fsdp._fully_shard._fsdp_collectives": (
            "_get_param_all_gather_inputs foreach_all_gather foreach_all_gather_copy_out"
        ),
        "fsdp._runtime_utils": (
            "_register_post_forward_hook _register_pre_forward_hook _register_root_pre_forward_hook"
        ),
    },
    "Call set_modules_to_forward_prefetch or set_modules_to_backward_prefetch of the module": {
        "fsdp._runtime_utils": "_get_handle_to_prefetch _prefetch_handle",
    },
    "Backward does it. For a reduction of your own call register_comm_hook or set_custom_reduce_scatter; to reduce "
    "later, no_sync or set_requires_gradient_sync(False); after a step that raised, reset_iter_state": {
        "fsdp._common_utils": "_get_handle_fqns_from_root _log_post_backward_hook",
        "fsdp._fully_shard._fsdp_collectives": "foreach_reduce",
        "fsdp._runtime_utils": (
            "_accumulate_sharded_grad _cast_grad_to_param_dtype _catch_all_reshard _finalize_params "
            "_get_reduce_scatter_tensors _offload_grad _post_backward_hook _post_backward_reshard "
            "_post_backward_reshard_only_hook _post_backward_use_sharded_grad_views _post_reduce_grad_callback "
            "_pre_backward_hook _reduce_grad _reduce_grad_no_shard _register_post_backward_final_callback "
            "_register_post_backward_hook _register_post_backward_reshard_only_hook _register_pre_backward_hooks "
            "_should_free_in_backward"
        ),
    },
    "Enter summon_full_params(model), with with_grads=True for gradients": {
        "fsdp._runtime_utils": "_reshard_grads _unshard_grads",
        "fsdp._state_dict_utils": "_enter_unshard_params_ctx _exit_unshard_params_ctx",
        "fsdp._unshard_param_utils": "_unflatten_as_params _writeback_to_local_shard",
    },
    "Enter model._deregister_orig_params_ctx(), in which flat parameters are registered": {
        "fsdp._unshard_param_utils": (
            "_deregister_flat_param _deregister_orig_params _register_flat_param _register_orig_params"
        ),
    },
    "Call state_dict or load_state_dict of the model, in the type that FSDP.state_dict_type sets": {
        "fsdp._state_dict_utils": (
            "_common_pre_state_dict_hook _common_unshard_post_state_dict_hook _common_unshard_pre_state_dict_hook "
            "_full_post_load_state_dict_hook _full_post_state_dict_hook _full_pre_load_state_dict_hook "
            "_full_pre_state_dict_hook _local_post_load_state_dict_hook _local_post_state_dict_hook "
            "_local_pre_load_state_dict_hook _local_pre_state_dict_hook _post_load_state_dict_hook "
            "_post_state_dict_hook _pre_load_state_dict_hook _pre_state_dict_hook _register_all_state_dict_hooks "
            "_register_state_dict_hooks_base _replace_with_full_state_dict_type _set_use_dtensor "
            "_sharded_post_load_state_dict_hook _sharded_post_state_dict_hook _sharded_pre_load_state_dict_hook "
            "_sharded_pre_state_dict_hook"
        ),
    },
    "Call FSDP.optim_state_dict(model, optim), and FSDP.optim_state_dict_to_load(model, optim, state) to load": {
        "fsdp._optim_utils": (
            "_allgather_orig_param_states _allgather_state_info _communicate_optim_state _convert_all_state_info "
            "_convert_state_with_flat_params _convert_state_with_orig_params _flatten_optim_state "
            "_flatten_optim_state_dict _flatten_tensor_optim_state _gather_all_orig_param_state "
            "_rekey_sharded_optim_state_dict _set_optim_use_dtensor _shard_orig_param_state "
            "_unflatten_communicated_optim_state _unflatten_optim_state _unflatten_orig_param_states"
        ),
    },
    "Test isinstance(module, fsdp_flat.FSDPModule)": {
        "fsdp._fully_shard._fully_shard": "_assert_all_fsdp_modules",
    },
}

_WRAPPER, _STATE = "fsdp_flat:FullyShardedDataParallel", "fsdp_flat.composable.fsdp_state:FSDPState"
JOINED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("_composable_state", "_State"): (_WRAPPER, _STATE),
    ("fsdp._common_utils", "_FSDPState"): (_WRAPPER,),
    ("fsdp._fully_shard._fsdp_param", "FSDPParam"): ("fsdp_flat.composable.fsdp_state:FSDPParam",),
    ("fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup"): ("fsdp_flat.composable.fsdp_state:FSDPParamGroup",),
    ("fsdp._fully_shard._fsdp_state", "FSDPState"): (_STATE,),
}
"""Classes of torch that look-ups test for, by module and name, and our classes whose instances pass too."""
