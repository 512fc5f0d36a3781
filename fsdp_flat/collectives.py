"""Replaces the library's all-gathers and reduce-scatters with custom ones, and offers two that use 8-bit integers.

By default each backend and device uses its cheapest route. On the CPU with gloo: shared memory for ranks of one Linux
host, both shared memory and one exchange between hosts for ranks of several, else broadcasts into place and an exchange
of slices. Elsewhere the backend's own all_gather and reduce_scatter.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fsdp_flat.comm import AllGather, CollectiveChoice, QuantizedAllGather, QuantizedReduceScatter, ReduceScatter
from fsdp_flat.runtime import replace_collectives, units_of

__all__ = ["AllGather", "QuantizedAllGather", "QuantizedReduceScatter", "ReduceScatter", "use_collectives"]


def use_collectives(
    module: nn.Module, *, all_gather: AllGather | None = None, reduce_scatter: ReduceScatter | None = None
) -> None:
    """Set the all-gather and reduce-scatter of later training steps, for the units at and below ``module``.

    State dicts, ``summon_full_params`` and units that are not sharded keep the library's own. Objects made for
    ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` of torch's ``fully_shard`` are called the same
    way; ``allocate`` is not used, since the units own their buffers (the methods of these names use it). Every rank
    must choose the same.

    Args:
        module: a wrapper, or any module that holds wrappers.
        all_gather: see :class:`AllGather`; None is the library's own.
        reduce_scatter: see :class:`ReduceScatter`; None is the library's own.

    Raises:
        PhaseError: a step is under way.
    """
    own = CollectiveChoice(all_gather, reduce_scatter)
    units = units_of(module)
    meshes = [mesh for unit in units for mesh in unit.meshes]
    kept = {mesh: replace(own, reduce_group=mesh.choice.reduce_group, backend=mesh.choice.backend) for mesh in meshes}
    replace_collectives(units, kept)
