"""Maps names of torch's FSDPs to the modules of fsdp_flat that provide them: the one table of these names.

``install()``, the migration tool and the tests read it. Nothing of torch's FSDPs is imported.
"""

from __future__ import annotations

import importlib

from fsdp_flat.compat.private_names import JOINED, PASSES, WORKS

PEER = "torch.distributed.fsdp"
OURS = "fsdp_flat"
SUBSTITUTES = f"{OURS}.compat.private_functions"
"""Module of the names that are there after ``install()`` only: code keeps importing them from torch."""

MIRRORED_MODULES = ("", "api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
"""Modules with the same name and the same public names on both sides."""

PRIVATE_MODULES = (
    *("_common_utils", "_flat_param", "_init_utils", "_runtime_utils"),
    *("_traversal_utils", "_unshard_param_utils", "_wrap_utils"),
)
"""Modules of torch with names that clients import."""

_NAMES_BY_HOME = {
    OURS: "FlatParameter clean_tensor_name",
    f"{OURS}.fully_sharded_data_parallel": (
        "FSDP_PREFIX FSDP_WRAPPED_MODULE HYBRID_SHARDING_STRATEGIES HandleTrainingState HybridShardProcessGroupType "
        "ProcessGroupType TrainingState"
    ),
    f"{OURS}.compat.semi_private": "NO_RESHARD_AFTER_FORWARD_STRATEGIES",
    f"{OURS}.wrap": "_Policy _module_wrap_policy _or_policy _wrap_module_cls_individually",
    SUBSTITUTES: " ".join(["FlatParamHandle", *WORKS.values()]),
}
HOMES = {name: home for home, names in _NAMES_BY_HOME.items() for name in names.split()}
"""Our module for each name that torch's private modules hold, or that is private itself."""

_ABSENT = (
    "_all_gather_flat_param _all_reduce_stream _alloc_padded_unsharded_flat_param _buffer_name_to_orig_dtype "
    "_buffer_names _check_low_precision_shard _check_on_compute_device _check_on_cpu _check_sharded "
    "_check_sharded_strategy _check_storage_allocated _check_storage_freed _check_unsharded _default_stream "
    "_deregister_orig_params _exec_order_data _free_event_queue _free_low_precision_sharded_param "
    "_free_unsharded_flat_param _fsdp_extension _get_flat_param_offsets _get_shard _get_shard_metadata "
    "_get_sharded_size _get_unflat_views _get_unflat_views_aligned _get_unflat_views_unaligned "
    "_get_unpadded_shard _handle_index _has_optim_in_backward _ignored_buffer_names _init_flat_param_and_metadata "
    "_init_get_unflat_views_fn _init_param_reduce_dtypes _init_setattr_fns _init_shard_metadata "
    "_low_prec_param_dtype_specified _low_prec_reduce_dtype_specified _needs_pre_backward_unshard "
    "_needs_pre_forward_unshard _post_backward_callback_queued _post_backward_stream _post_forward_handles "
    "_post_forward_index _pre_forward_handles _pre_forward_order_index _pre_unshard_stream _prefetched "
    "_ran_pre_backward_hook _reset_is_grad_none _root_pre_forward_handles _saved_grad_shard _setattr_param "
    "_setattr_tensor _skip_writeback_check _skipped_use_sharded_views _unshard_event _unshard_params_ctx "
    "_unshard_stream _unsharded_flat_param_for_skipped_views _use_fake_all_gather _use_fake_reduce "
    "_use_low_precision_shard _use_sharded_flat_param _use_sharded_grad_views _use_sharded_views "
    "_use_unsharded_flat_param _use_unsharded_grad_views _use_unsharded_views _validate_tensors_to_flatten "
    "_writeback_orig_params _writeback_tensor _zero_scalar flatten_tensors flatten_tensors_into_flat_param "
    "init_flat_param_attributes prepare_gradient_for_backward prepare_gradient_for_optim reshard_grad shard "
    "to_cpu unflatten_as_params unshard_grad"
)
ABSENT_ATTRIBUTES = frozenset(_ABSENT.split())
"""Attributes of FSDP1's wrappers, handles and flat parameters that have no counterpart here."""

_INSTEAD = {
    "The step sets it: call summon_full_params, unshard or unshard_for for full parameters": "training_state",
    "DTensors of parallelize_module are sharded without an extension: wrap the module as it is": "_fsdp_extension",
    "Call set_modules_to_forward_prefetch and set_modules_to_backward_prefetch for another order": "_exec_order_data",
    "At most two units are unsharded at a time: see limit_all_gathers and backward_prefetch": "_free_event_queue",
    "The library orders its own streams: see set_post_optim_event and share_comm_ctx": (
        "_all_reduce_stream _default_stream _post_backward_stream _unshard_event _pre_unshard_stream _unshard_stream"
    ),
    "Buffers are cast as MixedPrecision(buffer_dtype=...) says": (
        "_buffer_name_to_orig_dtype _buffer_names _ignored_buffer_names"
    ),
    "Register hooks by register_forward_pre_hook and register_forward_hook": (
        "_post_forward_handles _pre_forward_handles _root_pre_forward_handles"
    ),
    "Call summon_full_params": "_unshard_params_ctx",
    "Call reset_iter_state after a backward that raised": "_post_backward_callback_queued",
    "Call clip_grad_norm_": "_zero_scalar",
    "Set TORCH_DISTRIBUTED_DEBUG, or call fsdp_flat.debug()": "_debug_level",
    "Pass it to the constructor": (
        "process_group rank world_size _inter_node_pg _device_mesh sharding_strategy mixed_precision cpu_offload "
        "_use_orig_params _ignored_modules _ignored_params"
    ),
    "Set FSDP_USE_FULL_PREC_IN_EVAL=1 in the environment before wrapping": "_use_full_prec_in_eval",
    "Units make their handles themselves: assign to _flat_param.data, or wrap another module": (
        "_handle _flat_param params _fully_sharded_module_to_handle _all_handles _all_fsdp_states _has_params"
    ),
    "Pass device_id to the constructor, or call model.to(device)": "compute_device _device_handle",
}
INSTEAD_OF_ASSIGNING = {name: advice for advice, names in _INSTEAD.items() for name in names.split()}
"""Maps attributes of FSDP1's wrapper that hold its own state to what a program calls instead of assigning them."""

FSDP2_MODULES = (
    *(PEER, f"{PEER}._fully_shard", "torch.distributed._composable.fsdp"),
    "torch.distributed._composable.fsdp.fully_shard",
)
"""Modules that clients import FSDP2 from, without those that define it: torch's ``replicate`` runs on these."""

FSDP2_NAMES = (
    *("CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "GradientReductionHandle", "MixedPrecisionPolicy"),
    *("OffloadPolicy", "UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"),
)
"""Names of FSDP2, which ``fsdp_flat`` has too; a version of torch may lack some."""


def home_of(module: str, name: str) -> str | None:
    """Return our module that provides a name of torch's FSDP1; None if there is none, and for names of FSDP2.

    Args:
        module: the part of its module's name after ``torch.distributed.fsdp.``, or the empty string.
        name: the name in that module.
    """
    if name in FSDP2_NAMES:
        return None
    if module in MIRRORED_MODULES:
        mirrored = f"{OURS}.{module}" if module else OURS
        if name in importlib.import_module(mirrored).__all__:
            return mirrored
    return HOMES.get(name) if module in (*MIRRORED_MODULES, *PRIVATE_MODULES) else None


def no_attribute(owner: object, name: str) -> AttributeError:
    """Create the error for an attribute that ``owner`` lacks, with a hint if it is one of FSDP1's."""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in ABSENT_ATTRIBUTES:
        text += (
            ", which FSDP1 has: it has no counterpart in fsdp_flat. Call a public method of the wrapper instead, "
            "unshard, reshard, reset_iter_state or summon_full_params."
        )
    return AttributeError(text)


def not_assignable(owner: object, name: str) -> AttributeError:
    """Create the error for an attribute of FSDP1 that a program assigns, which would have no effect."""
    instead = INSTEAD_OF_ASSIGNING.get(name, "Call a public method of the wrapper, or pass it to the constructor")
    return AttributeError(
        f"{name} of {type(owner).__name__} was assigned: FSDP1 reads it in its steps, fsdp_flat does not, so the value "
        f"would have no effect. {instead}."
    )


# -- dotted names, as source code has them --------------------------------------------------------------------------


def is_inside(name: str, package: str = PEER) -> bool:
    """Return whether a dotted name is ``package`` or below it."""
    return name == package or name.startswith(package + ".")


def is_fsdp2(name: str) -> bool:
    """Return whether a dotted name inside ``torch.distributed.fsdp`` belongs to FSDP2."""
    return symbol_of(name).rpartition(".")[2] in FSDP2_NAMES or is_inside(name, f"{PEER}._fully_shard")


def is_module(name: str) -> bool:
    """Return whether a dotted name inside ``torch.distributed.fsdp`` is a module rather than a name in a module."""
    tail = name.removeprefix(PEER).removeprefix(".")
    return "." not in tail and (tail in MIRRORED_MODULES or tail.startswith("_"))


def symbol_of(name: str) -> str:
    """Return the module, or the name in a module, that a dotted name inside ``torch.distributed.fsdp`` begins with.

    ``torch.distributed.fsdp.ShardingStrategy.NO_SHARD`` begins with ``torch.distributed.fsdp.ShardingStrategy``.
    """
    symbol = PEER
    for part in name.removeprefix(PEER).split(".")[1:]:
        if not is_module(symbol):
            break
        symbol = f"{symbol}.{part}"
    return symbol


def counterpart(name: str) -> str | None:
    """Return the dotted name in fsdp_flat for a module or name inside ``torch.distributed.fsdp``, or None.

    Args:
        name: dotted name, as returned by :func:`symbol_of`.
    """
    tail = name.removeprefix(PEER).removeprefix(".")
    if tail in MIRRORED_MODULES:
        return OURS + name.removeprefix(PEER)
    module, _, last = tail.rpartition(".")
    home = home_of(module, last)
    return None if home in (None, SUBSTITUTES) else f"{home}.{last}"


def is_installed_only(name: str) -> bool:
    """Return whether a name inside ``torch.distributed.fsdp`` is a function that knows our wrappers after install()."""
    module, _, last = name.removeprefix(PEER).removeprefix(".").rpartition(".")
    known = [*(names for table in (WORKS, PASSES) for names in table.values()), *(name for _, name in JOINED)]
    is_ours = home_of(module, last) not in (None, SUBSTITUTES)
    return last.startswith("_") and not is_ours and any(last in names.split() for names in known)
