"""Copies outputs that are views of unsharded parameters, whose memory a reshard frees."""

from __future__ import annotations

import torch

from fsdp_flat.core import Guard, UnitForward, is_alias, local_of
from fsdp_flat.core.containers import map_tensors, tensors_in


class BufferViews(Guard):
    """Returns copies where a module returns its parameters, or views of them."""

    def after_compute(self, forward: UnitForward) -> None:
        """Replace views of the unit's buffers, in the outputs and in the caller's containers, by copies."""
        call, output = forward.call, forward.output
        buffers: list[torch.Tensor] = []
        for param_group in forward.unit.param_groups:
            if param_group.buffer.owns_memory:
                buffers += param_group.buffer.tensors
        if call is None or not buffers:
            return

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            local = local_of(tensor)
            if local.layout is torch.strided:  # tensors of other layouts have no storage
                for buffer in buffers:
                    if is_alias(local, buffer):
                        return tensor.clone()
            return tensor

        if call.inputs is not None:
            call.inputs.replace(copied)
        if isinstance(output, torch.Tensor):
            forward.output = copied(output)
        elif any(copied(tensor) is not tensor for tensor in tensors_in(output)):
            forward.output = map_tensors(output, copied)
