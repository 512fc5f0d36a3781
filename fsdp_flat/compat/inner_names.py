"""Says what each attribute of FSDP2's states, parameter groups and parameters is on our objects: the one table of them.

Programs read and assign these, although none is public. The objects that stand for those of torch have, by class:

* :data:`HAS`: what torch's has, a value that is true of our unit or a method that does the same.
* :data:`TAKES`: likewise, and an assignment has the effect that it has in torch.
* :data:`INSTEAD`: nothing. Reading or assigning raises an AttributeError that says what to call.

A test compares the table with the classes of the installed torch, so that no name is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping

HAS: Mapping[str, str] = {
    "FSDPState": (
        "_auto_reshard_after_forward _comm_ctx _device _device_handle _fsdp_param_group _fsdp_param_groups "
        "_get_state_for_module _is_root _lazy_init _modules _modules_to_run_forward _mp_policy _post_forward "
        "_pre_forward _reset_iter_state _root_post_backward_final_callback _root_pre_forward _state_ctx _state_name"
    ),
    "FSDPParamGroup": (
        "_all_gather_process_group _all_gather_result _all_reduce_process_group _is_hsdp _module_fqn "
        "_num_param_groups _orig_dtype _param_group_index _reduce_dtype _reduce_scatter_process_group "
        "_reshard_after_forward _sharded_state _use_post_forward_mesh comm_ctx device device_handle fsdp_params "
        "is_sharded is_sharded_post_forward is_unsharded lazy_init mesh_info modules mp_policy offload_policy reshard "
        "unshard wait_for_unshard"
    ),
    "FSDPParam": (
        "_contiguous_orig_stride _module_info _orig_size _param_fqn _shard_mesh _sharded_local_tensor "
        "_sharded_param_data _sharding_spec _spmd_mesh _spmd_placements _unsharded_param "
        "accumulate_unsharded_grad_if_needed contiguous_sharded_stride device fsdp_placement grad_offload_event "
        "is_dtensor mesh_info mp_policy offload_to_cpu orig_dtype padded_sharded_param_size param_dtype pin_memory "
        "post_forward_mesh_info reduce_dtype reset_sharded_param shard_mesh shard_mesh_from_root sharded_param "
        "sharded_size sharded_state to_accumulated_grad_if_needed to_sharded_dtensor unsharded_param"
    ),
    "FSDPCommContext": (
        "all_gather_copy_in_stream all_gather_stream all_reduce_stream device_handle reduce_scatter_stream"
    ),
    "FSDPStateContext": "all_states iter_forward_root post_backward_final_callback_queued",
}

TAKES: Mapping[str, str] = {
    "FSDPState": (
        "_post_forward_hook_handle _pre_forward_hook_handle _states_to_backward_prefetch _states_to_forward_prefetch "
        "_training_state"
    ),
    "FSDPParamGroup": (
        "_all_reduce_hook _all_reduce_hook_stream _training_state all_reduce_grads force_sum_reduction_for_comms "
        "gradient_divide_factor post_backward post_forward_mesh_info pre_backward reduce_grads "
        "reduce_scatter_max_input_buffers reduce_scatter_unused_params reshard_after_backward unshard_async_op "
        "unshard_in_backward"
    ),
    "FSDPParam": "unsharded_accumulated_grad",
    "FSDPCommContext": "",
    "FSDPStateContext": "is_last_backward",
}

_FORWARD = "call the module; fsdp_flat.unshard_for(module) unshards for a block of code"
_UNSHARD = "call unshard() or reshard() of the module"
_BACKWARD = (
    "call backward(); its own reductions are replaced by set_custom_reduce_scatter or set_all_reduce_hook of the "
    "module, and delayed by set_requires_gradient_sync(False)"
)
_CONSTRUCT = "call fsdp_flat.fully_shard(module), which does this"
_MEMORY = "read unsharded_param or sharded_param; those of a unit share one memory, which reshard() of the module frees"

INSTEAD: Mapping[str, Mapping[str, str]] = {
    "FSDPState": {
        _CONSTRUCT: "_init_fqns _init_shared_state _validate_no_duplicate_params init",
        _FORWARD: "_cast_forward_inputs _cast_output_dtype _force_complete_incomplete_states",
        "call unshard() of the module": "_pre_backward",
        _BACKWARD: "_register_pre_backward_hook _register_root_post_backward_final_callback",
    },
    "FSDPParamGroup": {
        _CONSTRUCT: (
            "_init_mp_dtypes _module_to_pre_load_state_dict_hook_handle _module_to_pre_save_state_dict_hook_handle "
            "_register_state_dict_hooks _reset_sharded_params _validate_cpu_offload_params _validate_no_meta_params "
            "_validate_reduce_scatter_max_input_buffers"
        ),
        _FORWARD: "post_forward pre_forward use_training_state",
        _UNSHARD: (
            "_all_gather_output _reshard_after_forward_event _to_sharded _to_sharded_post_forward _to_unsharded "
            "_wait_all_gather_streams_on_event"
        ),
        "call set_modules_to_forward_prefetch or set_modules_to_backward_prefetch of the module": (
            "_backward_prefetch _post_forward_indices _prefetch_unshard _record_post_forward"
        ),
        "call set_custom_all_gather or set_custom_reduce_scatter of the module": (
            "_all_gather_comm _reduce_scatter_comm"
        ),
        "call set_allocate_memory_from_process_group_for_comm of the module": "set_allocate_memory_from_process_group",
        "call set_symm_mem_for_comm of the module": "set_symm_mem",
        "call set_separate_reduce_scatter_group of the module": "_set_separate_reduce_scatter_group",
        "call reset_iter_state() of the outermost module": "_reset_iter_state",
        "call set_requires_all_reduce(True) of the module before a backward, which then adds what waits": (
            "_partial_reduce_output"
        ),
        "read _module_fqn": "_with_fqn",
        _BACKWARD: (
            "_all_reduce_state _post_reduce_event _register_post_backward_hook _wait_for_post_backward "
            "finalize_backward"
        ),
    },
    "FSDPParam": {
        _CONSTRUCT: (
            "_build_spmd_sharding_spec _dp_dim_indices _get_unsharded_dtensor_spec _init_extensions _init_shard_mesh "
            "_init_sharded_param _init_sharded_post_forward_param_metadata _init_sharding_spec "
            "_init_sharding_spec_plain _init_sharding_spec_spmd _init_sharding_spec_tp _orig_param_uid "
            "_post_load_hook_handle _unsharded_dtensor_spec init_dtype_attrs"
        ),
        _UNSHARD: (
            "_assert_in_states _extensions_data _setattr_on_modules _unflatten_all_gather_outputs all_gather_inputs "
            "alloc_all_gather_outputs free_unsharded_param init_all_gather_outputs init_unsharded_param to_sharded "
            "to_sharded_post_forward to_sharded_post_forward_dtensor to_unsharded"
        ),
        _MEMORY: (
            "_sharded_post_forward_param _sharded_post_forward_param_data _unsharded_inner_tensors all_gather_outputs "
            "contiguous_sharded_post_forward_stride sharded_post_forward_size"
        ),
        "read unsharded_accumulated_grad, the gradient that waits to be reduced": (
            "_get_grad_inner_tensor unsharded_accumulated_grad_data unsharded_grad_data unsharded_zero_grad_data"
        ),
    },
    "FSDPCommContext": {
        "call fsdp_flat.share_comm_ctx(modules) to share streams and memory": (
            "all_gather_state get_all_gather_streams lazy_init"
        ),
        _BACKWARD: "_last_post_reduce_events reduce_scatter_states",
        "call set_reduce_scatter_max_input_buffers of the module": "reduce_scatter_max_input_buffers",
        "call set_modules_to_backward_prefetch of the module": "post_forward_order",
    },
    "FSDPStateContext": {"call set_post_optim_event of the outermost module": "post_optim_event"},
}


def advice_for(kind: str, name: str) -> str:
    """Return what to do instead of reading or assigning attribute ``name`` of torch's class ``kind``."""
    by_advice = INSTEAD.get(kind, {})
    return next((advice for advice, names in by_advice.items() if name in names.split()), _DEFAULT)


_DEFAULT = "call a method of the sharded module"
