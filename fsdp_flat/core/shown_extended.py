"""Shows parameters of other classes than torch.Tensor as DTensors, whose local tensors are of these classes too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from fsdp_flat.core.inner_tensors import inner_tensors, made_like, made_on, seeded_alike
from fsdp_flat.core.params import PLAIN, ManagedParam
from fsdp_flat.core.shown_dtensors import DTensorShown, InnerPart
from fsdp_flat.core.torch_core import is_plain, local_of
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.layout import chunk_rows


class ExtendedShown(DTensorShown):
    """Shows DTensors whose local tensors are of classes of their own, each with memory of its own."""

    def _locals_of(self, params: Sequence[ManagedParam]) -> list[torch.Tensor]:
        locals_ = [self._on_shard_device(self._part_of(index, entry.param)) for index, entry in enumerate(params)]
        self._wholes = [_without_memory(entry.param.detach()) for entry in params]
        return locals_

    def _part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor of any class, in memory of its own.

        The operations are those of torch's ``fully_shard``: a class implements these, and perhaps no others.
        """
        dim, (_, shape) = self.layout.dims[index], self._local_parts[index]
        world_size, rank, chunk_shape = self.layout.world_size, self.spec.rank, self.layout.chunk_shapes[index]
        try:
            with torch.no_grad():
                padded = full.detach().new_zeros(chunk_shape)
                part = padded.narrow(dim, 0, shape[dim])
                # A class that refuses the last rank's part, the smallest, fails on every rank.
                padded.narrow(dim, 0, self.layout.local_shape(index, world_size - 1)[dim])
                if math.prod(shape):
                    part.copy_(torch.chunk(full.detach(), world_size, dim)[rank])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            inner = {name: tuple(each.shape) for name, each in inner_tensors(full.detach()).items()}
            raise UnsupportedError(
                f"Parameter {self.describe(index)}, a {type(full.data).__name__} of shape {tuple(full.shape)}, cannot "
                f"be sharded on dim {dim} over {world_size} ranks; this is rank {rank}: {error!r}. It is made of "
                f"tensors of shapes {inner}; expected such as divide into {world_size} equal parts, for parts of "
                f"shape {chunk_shape}. Quantize it in smaller blocks, shard it over fewer ranks, or leave it out with "
                "ignored_params (ignored_states of the wrapper)."
            ) from error
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
        if isinstance(value, DTensor):
            # torch's functions for full state dicts have made one of a plain tensor.
            return self._has_several(index) and is_plain(local_of(value).data) and value.shape == param.shape
        return type(value.data) in (torch.Tensor, type(local_of(param))) and value.shape == param.shape

    def _has_several(self, index: int) -> bool:
        """Return whether parameter ``index`` is made of several tensors, so that no part knows what the whole is."""
        whole = self._wholes[index]
        return whole is not None and len(inner_tensors(whole)) > 1

    def distribute(self, index: int, full: torch.Tensor) -> DTensor:
        local = self._part_of(index, self.params[index].adapter.local_slice(full.detach()))
        return self.with_local(index, self._on_shard_device(local))

    def in_class(self, index: int, full: torch.Tensor) -> torch.Tensor:
        whole, local = self._wholes[index], local_of(self.params[index].param)
        if isinstance(full, DTensor):
            full = full.full_tensor()  # every rank loads
        # A class that keeps its values in one tensor takes those of each part.
        if whole is None or not self._has_several(index) or not is_plain(full.data) or full.is_meta:
            return full
        device = full.device if local.is_meta else local.device
        with torch.no_grad(), seeded_alike(device):
            made = made_on(whole, device)
            made.copy_(full.detach().to(device))  # which may round at random
        return made

    def inner_parts(self, index: int, local: torch.Tensor) -> dict[str, InnerPart] | None:
        whole, own = self._wholes[index], inner_tensors(local)
        wholes = {} if whole is None else inner_tensors(whole)
        if len(own) < 2 or own.keys() != wholes.keys() or self.params[index].adapter is not PLAIN:
            return None
        found: dict[str, InnerPart] = {}
        for name, part in own.items():
            shape = tuple(wholes[name].shape)
            dims = [dim for dim in range(len(shape)) if part.dim() == len(shape) and part.size(dim) != shape[dim]]
            offsets: tuple[int, ...] | None = None
            if not is_plain(part) or part.dim() != len(shape) or len(dims) > 1:
                return None
            for dim in dims:
                rows = chunk_rows(shape[dim], self.layout.world_size, self.spec.rank)
                if rows.numel != part.size(dim):
                    return None
                offsets = tuple(rows.start if each == dim else 0 for each in range(len(shape)))
            found[name] = InnerPart(part, shape, offsets)
        return found


def _without_memory(whole: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor of the class and settings of another one, made of tensors on the meta device.

    None if the class does not make one: training does not need it.
    """
    try:
        inner = {name: torch.empty_like(each, device="meta") for name, each in inner_tensors(whole).items()}
        return made_like(whole, inner) if inner else None
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None
