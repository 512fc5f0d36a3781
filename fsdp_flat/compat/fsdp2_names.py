"""Lists the names of torch's FSDP2 that ``fsdp_flat`` provides too, and the modules of torch that hold them.

The names in ``fsdp_flat`` are the same. Nothing of torch's FSDP2 is imported.
"""

from __future__ import annotations

FSDP2_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
"""Modules that clients import the names from, without those that define them: torch's ``replicate`` runs on these."""

# A version of torch may lack some.
FSDP2_NAMES = (
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
