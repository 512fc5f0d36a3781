"""Selects the submodules that become units (layer 1), under the import path of FSDP1's policies.

Everything here works on module trees; the wrapper is passed in, so this layer does not depend on sharding. Users'
names equal those of ``torch.distributed.fsdp.wrap``; a wrapper's constructor calls ``plan_units`` and ``apply_plan``.
"""

from __future__ import annotations

from fsdp_flat.wrap.plan import WrapPlan, apply_plan, plan_units
from fsdp_flat.wrap.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    _module_wrap_policy,
    _or_policy,
    _Policy,
    _wrap_module_cls_individually,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
