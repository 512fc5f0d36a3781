"""Which tests show that fsdp_flat works with a torch: those of what torch changes between its releases."""

from __future__ import annotations

# About a minute on 2 cores: one or two tests of each subject.
SHORT = (
    # Steps with every strategy.
    "tests/training/test_training.py::test_every_strategy_trains_as_in_torch_fsdp1",
    "tests/strategies/test_strategies.py::test_units_of_different_strategies_in_one_tree_train_as_the_reference",
    # Activation checkpointing, re-entrant and not.
    "tests/activation_checkpointing/test_outputs_and_checkpointing.py::test_torchs_checkpoint_wrapper_below_a_unit_equals_the_reference",
    # State dicts of every type with optimizer state, and torch's functions for them.
    "tests/state_dict/test_round_trips.py::test_training_goes_on_to_the_bit_at_two_ranks",
    "tests/optim_state/test_interchange.py::test_fsdp2_and_we_read_each_others_checkpoints",
    "tests/compat/test_state_dict_functions.py::test_hybrid_sharding_is_saved_and_loaded",
    # Checkpoints in chunks.
    "tests/state_dict/test_boxes.py::test_fsdp2_and_plain_models_read_boxes_and_theirs_are_read_into_them",
    "tests/checkpoint/test_checkpoints.py::test_torch_reads_the_files_into_a_plain_model",
    # Tensor parallelism.
    "tests/tensor_parallel/test_tensor_parallel.py::test_training_over_both_axes_equals_a_plain_model_on_the_global_batch",
    "tests/tensor_parallel/test_tensor_parallel.py::test_frozen_tensor_parallel_parameters_stay_as_they_are",
    # Custom collectives.
    "tests/comm/test_custom.py::test_a_callers_collectives_move_what_a_step_needs_and_nothing_else",
    # Meta initialisation.
    "tests/meta_device/test_meta.py::test_reset_parameters_gives_the_weights_of_a_model_built_on_the_cpu",
    # Mixed precision.
    "tests/mixed_precision/test_mixed_precision.py::test_buffers_are_low_in_compute_and_in_their_own_dtype_in_saved_and_loaded_states",
    "tests/mixed_precision/test_mixed_precision.py::test_parameters_are_gathered_in_the_low_dtype_and_sharded_in_the_full_one",
    # Compilation.
    "tests/compile/test_compile.py::test_blocks_compiled_inside_units_train_as_the_reference",
    # fully_shard beside torch's: a step, placements, state dicts, and parameters held by smaller groups.
    "tests/training/test_step_cases.py::test_training_equals_a_replica_and_torch",
    "tests/strategies/test_placements.py::test_tensor_parallelism_inside_composes_placements_as_torch",
    "tests/state_dict/test_fully_shard.py::test_checkpoints_of_torch_pass_between_both_fronts",
    "tests/memory/test_resharding.py::test_training_with_parameters_held_by_smaller_groups_equals_a_replica_and_torch",
)

# Two to four minutes, and about four more for fully_shard.
FULL = (
    *SHORT,
    "tests/comm/test_process_end.py::test_threads_of_gloo_that_wait_for_the_interpreter_do_not_abort_the_process",
    "tests/strategies/test_strategies.py::test_hybrid_on_meshes_of_two_ranks_equals_the_reference_on_every_rank",
    "tests/collectives/test_counts.py::test_object_collectives_are_never_used_for_wrapping_training_or_saving",
    "tests/collectives/test_counts.py::test_a_step_sends_the_least_bytes_that_full_sharding_can",
    "tests/activation_checkpointing/test_activation_checkpointing.py::test_the_same_holds_for_flat_parameters",
    "tests/activation_checkpointing/test_activation_checkpointing.py::test_the_same_holds_for_other_strategies",
    "tests/activation_checkpointing/test_outputs_and_checkpointing.py::test_checkpointing_a_part_of_a_unit_equals_the_reference",
    "tests/state_dict/test_round_trips.py::test_every_optimizer_goes_on_to_the_bit",
    "tests/state_dict/test_round_trips.py::test_training_goes_on_at_another_number_of_ranks_and_with_another_wrapping",
    "tests/state_dict/test_saving.py::test_the_chunks_are_those_of_the_peer",
    "tests/state_dict/test_unusual_parameters.py::test_parameters_without_elements_or_dimensions_are_saved_and_loaded",
    "tests/optim_state/test_interchange.py::test_the_peer_and_we_load_each_others_states_in_every_form",
    "tests/optim_state/test_interchange.py::test_a_plain_optimizers_state_goes_both_ways",
    "tests/compat/test_state_dict_functions.py::test_what_the_functions_return_is_what_they_return_for_the_peer",
    "tests/state_dict/test_boxes.py::test_a_checkpoint_of_boxes_is_loaded_at_any_number_of_ranks_and_wrapping",
    "tests/state_dict/test_boxes.py::test_torch_fsdp1_reads_boxes_and_its_checkpoints_are_read_into_them",
    "tests/checkpoint/test_checkpoints.py::test_training_goes_on_as_if_nothing_had_happened",
    "tests/checkpoint/test_checkpoints.py::test_merged_states_are_read_and_split_one_after_another",
    "tests/checkpoint/test_split_parameters.py::test_parts_of_uneven_size_go_through_every_kind_of_file",
    "tests/checkpoint/test_streaming.py::test_saved_files_are_loaded_at_any_number_of_ranks_and_wrapping",
    "tests/tensor_parallel/test_tensor_parallel.py::test_sharded_states_load_back_and_training_goes_on_alike",
    "tests/tensor_parallel/test_tensor_parallel.py::test_full_optimizer_state_is_that_of_the_plain_model_and_loads_back",
    "tests/tensor_parallel/test_tensor_parallel.py::test_clipping_scales_gradients_by_the_norm_over_both_axes",
    "tests/comm/test_custom.py::test_training_in_8_bits_stays_near_exact_training_with_a_quarter_of_the_bytes",
    "tests/meta_device/test_meta.py::test_tied_weights_stay_tied_when_they_leave_the_meta_device",
    "tests/meta_device/test_meta.py::test_sync_module_states_makes_random_initial_weights_equal",
    "tests/mixed_precision/test_mixed_precision.py::test_full_precision_in_eval_equals_the_plain_model",
    "tests/mixed_precision/test_mixed_precision.py::test_a_custom_policy_overrides_precision_unit_by_unit",
    "tests/clipping/test_clip_grad_norm.py::test_the_norm_and_the_clipped_gradients_are_the_peers",
    "tests/strategies/test_placements.py::test_full_states_of_rows_split_by_both_are_those_of_the_plain_model",
    "tests/strategies/test_placements.py::test_hybrid_meshes_and_tensor_parallelism_compose",
    "tests/strategies/test_placements.py::test_a_hybrid_mesh_replicates_over_its_first_dim",
    "tests/state_dict/test_fully_shard.py::test_a_state_dict_aliases_the_shards",
    "tests/state_dict/test_fully_shard.py::test_meta_parameters_take_a_load_or_an_initialisation",
    "tests/state_dict/test_fully_shard.py::test_conversions_keep_an_optimizers_parameters",
    "tests/state_dict/test_fully_shard.py::test_rank_zero_loads_a_full_state_dict_for_all",
    "tests/state_dict/test_both_fronts.py::test_full_optimizer_states_equal_a_plain_optimizers",
    "tests/state_dict/test_both_fronts.py::test_checkpoints_on_hybrid_meshes",
    "tests/mixed_precision/test_fully_shard.py::test_training_in_mixed_precision_equals_torch",
    "tests/optimizers/test_optimizers_and_norms_of_fully_shard.py::test_clipping_equals_that_of_a_replica",
    "tests/optimizers/test_optimizers_and_norms_of_fully_shard.py::test_gradient_hooks_run_after_the_reduction",
    "tests/accumulation/test_controls_of_reductions.py::test_without_all_reduce_partial_shards_wait_for_the_next_one",
    "tests/training/test_step_cases.py::test_blocks_recomputed_by_checkpoint_wrappers",
    "tests/collectives/test_numbers_of_collectives.py::test_with_backend_collectives_the_numbers_are_those_of_torch",
    "tests/tools/test_plan.py::test_planned_bytes_are_those_counted_in_a_step",
    "tests/tools/test_record.py::test_a_recording_has_the_work_of_each_unit_in_each_step",
    "tests/public_names/test_surface_of_fully_shard.py::test_these_are_all_public_methods_of_the_installed_torch",
    "tests/compat/test_install.py::test_fsdp2s_names_are_replaced_where_asked_and_torchs_again_afterwards",
)
