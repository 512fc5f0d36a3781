"""Replaces the library's all-gathers and reduce-scatters with custom ones, and offers two in 8-bit integers or bf16.

By default each backend and device uses its cheapest route. On the CPU with gloo: shared memory for ranks of one Linux
host, both shared memory and one exchange between hosts for ranks of several, else broadcasts into place and an exchange
of slices. Elsewhere the backend's own all_gather and reduce_scatter.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fsdp_flat.comm import (
    PACKINGS,
    AllGather,
    CollectiveOverrides,
    QuantizedAllGather,
    QuantizedReduceScatter,
    ReduceScatter,
)
from fsdp_flat.core import ManagedParam, units_of
from fsdp_flat.core.quantized import quant_state_of
from fsdp_flat.errors import OptionError
from fsdp_flat.runtime import replace_collectives

__all__ = ["AllGather", "QuantizedAllGather", "QuantizedReduceScatter", "ReduceScatter", "use_collectives"]


def use_collectives(
    module: nn.Module,
    *,
    all_gather: AllGather | None = None,
    reduce_scatter: ReduceScatter | None = None,
    param_dtype_between_hosts: torch.dtype | None = None,
    reduce_dtype_between_hosts: torch.dtype | None = None,
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
        param_dtype_between_hosts: ``torch.bfloat16`` or ``torch.int8``, to which parameters are rounded before they are
            sent from one host to another. All ranks compute with the rounded values; shards, state dicts and
            optimizers keep the exact ones. None sends parameters as they are.
        reduce_dtype_between_hosts: likewise for each host's sum of gradients, of which other hosts add rounded values.

    ``torch.int8`` rounds as :class:`QuantizedAllGather` does. Both need CPU ranks over gloo on several hosts, equally
    many on each (docs/communication.md); elsewhere nothing is rounded, so one program runs on one host and on several.
    Floats of no more bytes than the dtype, and integers, are sent as they are.

    Raises:
        OptionError: a dtype between hosts is neither of these, or goes with a collective that replaces the library's;
            or an all-gather would round 4-bit codes that are stored as floating-point numbers.
        PhaseError: a step is under way.
    """
    for name, dtype, replaced in (
        ("param_dtype_between_hosts", param_dtype_between_hosts, all_gather),
        ("reduce_dtype_between_hosts", reduce_dtype_between_hosts, reduce_scatter),
    ):
        if dtype is not None and dtype not in PACKINGS:
            raise OptionError(f"{name} is {', '.join(map(str, PACKINGS))} or None; got {dtype!r}.")
        if dtype is not None and replaced is not None:
            raise OptionError(
                f"{name} is for the library's own collectives; it goes with no {replaced!r} in their place."
            )
    own = CollectiveOverrides(
        all_gather,
        reduce_scatter,
        gathered_between_hosts=param_dtype_between_hosts,
        reduced_between_hosts=reduce_dtype_between_hosts,
    )
    units = units_of(module)
    groups = [param_group for unit in units for param_group in unit.param_groups]
    coded = [group for group in groups if group.orig_dtype.is_floating_point and any(map(_is_quantized, group.params))]
    between = param_dtype_between_hosts
    if between is not None:
        coded = [group for group in coded if group.orig_dtype.itemsize > between.itemsize]
    if coded and (isinstance(all_gather, QuantizedAllGather) or between is not None):
        fqn = next(entry.fqn for entry in coded[0].params if _is_quantized(entry))
        raise OptionError(
            f"Parameter {fqn!r} of unit {coded[0].spec.unit_name!r} has 4-bit codes in {coded[0].orig_dtype}, which an "
            "all-gather in fewer bits would round. Store them in torch.uint8 (bnb_4bit_quant_storage), which is sent "
            "as it is; or leave all_gather and param_dtype_between_hosts out."
        )
    comms = [group.comm for group in groups]
    kept = {comm: replace(own, reduce_group=comm.choice.reduce_group, backend=comm.choice.backend) for comm in comms}
    replace_collectives(units, kept)


def _is_quantized(entry: ManagedParam) -> bool:
    return quant_state_of(entry.param) is not None
