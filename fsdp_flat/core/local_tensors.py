"""Keeps the local tensors of DTensors: as views of a group's shard, or as tensors of their own classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from fsdp_flat.core.group_spec import ParamGroupSpec
from fsdp_flat.core.inner_tensors import inner_tensors, made_like
from fsdp_flat.core.layout import PerParamLayout
from fsdp_flat.core.params import ManagedParam
from fsdp_flat.core.visible_params import local_parts, split_storage
from fsdp_flat.errors import UnsupportedError


class LocalTensors(Protocol):
    """Keeps the local tensor of each parameter of a group."""

    def local_tensors(self) -> Sequence[torch.Tensor]:
        """Return the local tensors, in layout order."""

    def take(self, index: int, assigned: torch.Tensor) -> torch.Tensor:
        """Take the values of a local tensor that the program assigned; return the tensor that has them from now on."""

    def released(self, local: torch.Tensor) -> torch.Tensor:
        """Return what a DTensor keeps in the place of ``local`` that is not the group's any more."""

    def part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the full tensor of a parameter, on the device of shards, or on meta."""


class LocalViews:
    """Keeps local tensors as views of a group's shard, with storages of their own."""

    def __init__(self, spec: ParamGroupSpec, layout: PerParamLayout, flat_param: nn.Parameter) -> None:
        self._spec, self._layout, self._flat_param = spec, layout, flat_param
        self._parts = local_parts(layout, spec.rank)

    def local_tensors(self) -> list[torch.Tensor]:
        return split_storage(self._flat_param.data, self._parts)

    def take(self, index: int, assigned: torch.Tensor) -> torch.Tensor:
        (own,) = split_storage(self._flat_param.data, [self._parts[index]])
        with torch.no_grad():
            own.copy_(assigned)
        return own

    def released(self, local: torch.Tensor) -> torch.Tensor:
        return local.clone()  # the caller may use it again or elsewhere

    def part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        local = self._layout.local_part(index, self._spec.rank, full).view(self._parts[index][1])
        per_param = self._spec.per_param
        assert per_param is not None
        return local if local.is_meta else local.to("cpu" if per_param.offloads else per_param.mesh.device_type)


class OwnTensors:
    """Keeps local tensors of classes of their own, each in memory of its own."""

    def __init__(self, params: Sequence[ManagedParam], spec: ParamGroupSpec, layout: PerParamLayout) -> None:
        self._spec, self._layout = spec, layout
        self.tensors = [self.part_of(index, entry.param) for index, entry in enumerate(params)]

    def local_tensors(self) -> list[torch.Tensor]:
        return self.tensors

    def take(self, index: int, assigned: torch.Tensor) -> torch.Tensor:
        self.tensors[index] = assigned
        return assigned

    def released(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        # The operations are those of torch's ``fully_shard``: a class implements these, and perhaps no others.
        layout, spec = self._layout, self._spec
        dim, shape, chunk_shape = layout.dims[index], layout.local_shape(index, spec.rank), layout.chunk_shapes[index]
        world_size, rank = layout.world_size, spec.rank
        try:
            with torch.no_grad():
                padded = full.detach().new_zeros(chunk_shape)
                part = padded.narrow(dim, 0, shape[dim])
                # A class that refuses the last rank's part, the smallest, fails on every rank.
                padded.narrow(dim, 0, layout.local_shape(index, world_size - 1)[dim])
                if math.prod(shape):
                    part.copy_(torch.chunk(full.detach(), world_size, dim)[rank])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            inner = {name: tuple(each.shape) for name, each in inner_tensors(full.detach()).items()}
            raise UnsupportedError(
                f"Parameter {layout.param_infos[index].fqn!r} of unit {spec.unit_name!r}, a {type(full.data).__name__} "
                f"of shape {tuple(full.shape)}, cannot be sharded on dim {dim} over {world_size} ranks; this is rank "
                f"{rank}: {error!r}. It is made of tensors of shapes {inner}; expected such as divide into "
                f"{world_size} equal parts, for parts of shape {chunk_shape}. Quantize it in smaller blocks, shard it "
                "over fewer ranks, or leave it out with ignored_params (ignored_states of the wrapper)."
            ) from error
        if part.is_meta or spec.per_param is None or not spec.per_param.offloads:
            return part
        return part.cpu() if spec.device.type == "cpu" else part.cpu().pin_memory()


def without_memory(whole: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor of the class and settings of another one, made of tensors on the meta device.

    None if it is made of no other tensors, or if the class does not make one: training does not need it.
    """
    try:
        inner = {name: torch.empty_like(each, device="meta") for name, each in inner_tensors(whole).items()}
        return made_like(whole, inner) if inner else None
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return None
