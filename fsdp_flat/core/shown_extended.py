"""Shows parameters of other classes than torch.Tensor as DTensors, whose local tensors are of these classes too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from fsdp_flat.core.params import ManagedParam
from fsdp_flat.core.shown_dtensors import DTensorShown
from fsdp_flat.core.torch_core import local_of


class ExtendedShown(DTensorShown):
    """Shows DTensors whose local tensors are of classes of their own, each with memory of its own."""

    def _locals_of(self, params: Sequence[ManagedParam]) -> list[torch.Tensor]:
        return [self._on_shard_device(self._part_of(index, entry.param)) for index, entry in enumerate(params)]

    def _part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor of any class, in memory of its own.

        The operations are those of torch's ``fully_shard``: a class implements these, and perhaps no others.
        """
        dim, (_, shape) = self.layout.dims[index], self._local_parts[index]
        with torch.no_grad():
            padded = full.detach().new_zeros(self.layout.chunk_shapes[index])
            part = padded.narrow(dim, 0, shape[dim])
            if math.prod(shape):
                part.copy_(torch.chunk(full.detach(), self.layout.world_size, dim)[self.spec.rank])
        return part

    def _on_shard_device(self, local: torch.Tensor) -> torch.Tensor:
        if local.is_meta or not self.per_param_sharding.offloads:
            return local
        return local.cpu() if self.spec.device.type == "cpu" else local.cpu().pin_memory()

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        pass  # there is no flat shard; the local tensors were bound before

    def adopt(self, changed: Sequence[int]) -> bool:
        params = list(self.params)
        for index in changed:
            current = self._assigned(index)
            self._check_assigned(index, current)
            params[index] = replace(params[index], param=current)
        self._show(params)
        return True

    def can_distribute(self, index: int, value: torch.Tensor) -> bool:
        param = self.params[index].param
        return type(value.data) in (torch.Tensor, type(local_of(param))) and value.shape == param.shape

    def distribute(self, index: int, full: torch.Tensor) -> DTensor:
        local = self._part_of(index, self.params[index].adapter.local_slice(full.detach()))
        return self.with_local(index, self._on_shard_device(local))
