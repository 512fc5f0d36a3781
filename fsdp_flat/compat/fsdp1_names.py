"""Maps names of torch's FSDP1 to the modules of fsdp_flat that provide them, as strings.

``install()``, the migration tool and the tests read this table. Nothing of torch's FSDP1 is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from fsdp_flat.compat.fsdp2_names import FSDP2_NAMES

PEER = "torch.distributed.fsdp"
OURS = "fsdp_flat"
SUBSTITUTES = f"{OURS}.compat.installation"
"""Module of the names that are there after ``install()`` only: code keeps importing them from torch."""

MIRRORED_MODULES = ("", "api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
"""Modules with the same name and the same public names on both sides."""

PRIVATE_MODULES = (
    "_common_utils",
    "_flat_param",
    "_init_utils",
    "_runtime_utils",
    "_traversal_utils",
    "_unshard_param_utils",
    "_wrap_utils",
)
"""Modules of torch with names that clients import."""

_WRAPPER = f"{OURS}.fully_sharded_data_parallel"

HOMES: Mapping[str, str] = MappingProxyType(
    {
        "FlatParameter": OURS,
        "clean_tensor_name": OURS,
        "FSDP_PREFIX": _WRAPPER,
        "FSDP_WRAPPED_MODULE": _WRAPPER,
        "HYBRID_SHARDING_STRATEGIES": _WRAPPER,
        "HandleTrainingState": _WRAPPER,
        "TrainingState": _WRAPPER,
        "NO_RESHARD_AFTER_FORWARD_STRATEGIES": f"{OURS}.compat.semi_private",
        "_ConfigAutoWrap": f"{OURS}.wrap",
        "_Policy": f"{OURS}.wrap",
        "_construct_wrap_fn": f"{OURS}.wrap",
        "_module_wrap_policy": f"{OURS}.wrap",
        "_or_policy": f"{OURS}.wrap",
        "_post_order_apply": f"{OURS}.wrap",
        "_recursive_wrap": f"{OURS}.wrap",
        "_wrap": f"{OURS}.wrap",
        "_wrap_module_cls_individually": f"{OURS}.wrap",
        "FlatParamHandle": SUBSTITUTES,
        "_get_fsdp_handles": SUBSTITUTES,
        "_get_fsdp_root_states": SUBSTITUTES,
        "_get_fsdp_states": SUBSTITUTES,
        "_get_fsdp_states_with_modules": SUBSTITUTES,
        "_get_module_fsdp_state": SUBSTITUTES,
        "_get_module_fsdp_state_if_fully_sharded_module": SUBSTITUTES,
        "_has_fsdp_params": SUBSTITUTES,
        "_is_fsdp_root": SUBSTITUTES,
        "_lazy_init": SUBSTITUTES,
        "_module_handle": SUBSTITUTES,
        "_reshard": SUBSTITUTES,
        "_unshard_params": SUBSTITUTES,
        "_unshard_params_for_summon": SUBSTITUTES,
    }
)
"""Our module for each name that torch's private modules hold, or that is private itself."""


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
        if name in _public_names(mirrored):
            return mirrored
    return HOMES.get(name) if module in (*MIRRORED_MODULES, *PRIVATE_MODULES) else None


@cache
def _public_names(module: str) -> frozenset[str]:
    return frozenset(importlib.import_module(module).__all__)
