"""Maps names of torch's FSDPs to the modules of fsdp_flat that provide them: the one table of these names.

``install()``, the migration tool and the tests read it. Nothing of torch's FSDPs is imported.
"""

from __future__ import annotations

import importlib

PEER = "torch.distributed.fsdp"
OURS = "fsdp_flat"
SUBSTITUTES = f"{OURS}.compat.installation"
"""Module of the names that are there after ``install()`` only: code keeps importing them from torch."""

MIRRORED_MODULES = ("", "api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
"""Modules with the same name and the same public names on both sides."""

PRIVATE_MODULES = (
    *("_common_utils", "_flat_param", "_init_utils", "_runtime_utils"),
    *("_traversal_utils", "_unshard_param_utils", "_wrap_utils"),
)
"""Modules of torch with names that clients import."""

HOMES = {
    **dict.fromkeys(("FlatParameter", "clean_tensor_name"), OURS),
    **dict.fromkeys(
        (
            *("FSDP_PREFIX", "FSDP_WRAPPED_MODULE", "HYBRID_SHARDING_STRATEGIES", "HandleTrainingState"),
            *("HybridShardProcessGroupType", "ProcessGroupType", "TrainingState"),
        ),
        f"{OURS}.fully_sharded_data_parallel",
    ),
    "NO_RESHARD_AFTER_FORWARD_STRATEGIES": f"{OURS}.compat.semi_private",
    **dict.fromkeys(("_Policy", "_module_wrap_policy", "_or_policy", "_wrap_module_cls_individually"), f"{OURS}.wrap"),
    **dict.fromkeys(
        (
            *("FlatParamHandle", "_get_fsdp_handles", "_get_fsdp_root_states", "_get_fsdp_states"),
            *("_get_fsdp_states_with_modules", "_get_module_fsdp_state"),
            *("_get_module_fsdp_state_if_fully_sharded_module", "_has_fsdp_params", "_is_fsdp_root", "_lazy_init"),
            *("_module_handle", "_post_backward_final_callback", "_reshard", "_unshard_params"),
            "_unshard_params_for_summon",
        ),
        SUBSTITUTES,
    ),
}
"""Our module for each name that torch's private modules hold, or that is private itself."""

ABSENT_ATTRIBUTES = frozenset(
    (
        *("_all_gather_flat_param", "_alloc_padded_unsharded_flat_param", "_all_reduce_stream"),
        *("_deregister_orig_params", "_exec_order_data", "_free_event_queue", "_free_unsharded_flat_param"),
        *("_fsdp_extension", "_get_unflat_views_aligned", "_get_unflat_views_unaligned"),
        *("_gradient_postdivide_factor", "_gradient_predivide_factor", "_param_infos"),
        *("_post_backward_stream", "_pre_unshard_stream", "_reset_flat_param_grad_info_if_needed"),
        *("_saved_grad_shard", "_shared_param_infos", "_unshard_params_ctx", "_unshard_stream"),
        *("_use_low_precision_shard", "_use_sharded_flat_param", "_use_sharded_views"),
        *("_use_unsharded_flat_param", "_use_unsharded_views", "_writeback_orig_params"),
        *("prepare_gradient_for_backward", "prepare_gradient_for_optim", "unflatten_as_params"),
    )
)
"""Attributes of FSDP1's wrappers, handles and flat parameters that have no counterpart here."""

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
    return last.startswith("_") and home_of(module, last) == SUBSTITUTES
