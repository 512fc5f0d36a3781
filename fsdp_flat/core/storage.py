"""Keeps this rank's shards of a group's parameters: as one flat tensor, or as tensors of their own classes.

A :class:`Storage` lasts as long as its group. It makes an output of all-gathers for each dtype of compute.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fsdp_flat.core.all_gather_output import AllGatherOutput, FlatOutput
from fsdp_flat.core.buffers import MemoryPool
from fsdp_flat.core.flat_parameter import as_flat_parameter, replace_shard, set_grad
from fsdp_flat.core.group_spec import ParamGroupSpec
from fsdp_flat.core.inner_tensors import inner_tensors, plain_tensors_in
from fsdp_flat.core.layout import Layout, PerParamLayout
from fsdp_flat.core.params import ManagedParam
from fsdp_flat.core.tensor_output import TensorOutput
from fsdp_flat.core.torch_core import place_function
from fsdp_flat.core.visible_params import split_storage
from fsdp_flat.errors import UnsupportedError


class Storage(ABC):
    """Keeps this rank's shards of the parameters of a group.

    Args:
        params: the managed parameters in the order of ``layout``: at first the full ones, then the sharded ones. It is
            the group's own list.

    Attributes:
        flat_param: the shards as one parameter (1-D, ``layout.shard_numel``); None if they have no common memory.
        place_of: identifies the memory of a shard, equal for tensors that begin at one place.
        calls_extensions: all-gathers call the extensions of local tensors.
        outputs: the outputs of all-gathers so far, by the dtype of compute.
        outputs_made_for: what :meth:`state` was when they were made.
    """

    flat_param: nn.Parameter | None = None
    place_of: Callable[[torch.Tensor], Any]
    calls_extensions = False

    def __init__(self, params: list[ManagedParam], layout: Layout, spec: ParamGroupSpec) -> None:
        self._params, self._layout, self._spec = params, layout, spec
        self.outputs: dict[torch.dtype, AllGatherOutput] = {}
        self.outputs_made_for: Any = None

    def output(self, dtype: torch.dtype, pool: MemoryPool) -> AllGatherOutput:
        """Return the output of all-gathers to compute in ``dtype``; it is made on first use, and freed."""
        if dtype not in self.outputs:
            self.outputs_made_for = self.state()
            self.outputs[dtype] = self._new_output(dtype)
            self.outputs[dtype].free(pool)
        return self.outputs[dtype]

    def _new_output(self, dtype: torch.dtype) -> AllGatherOutput:
        assert isinstance(self._layout, PerParamLayout)
        return TensorOutput(self._params, self._layout, self._spec, dtype)

    @abstractmethod
    def state(self) -> tuple[Any, ...]:
        """Return dtype and device of the shards, and their place if outputs depend on it, for ``outputs_made_for``."""

    @abstractmethod
    def empty(self) -> torch.Tensor:
        """Return a plain tensor without elements, of the dtype and device of the shards: meta if any shard is there."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Number of bytes of the shards."""

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Return the plain tensors, detached, in which the shards have their values."""

    @abstractmethod
    def local(self, index: int) -> torch.Tensor:
        """Return the shard of parameter ``index``: 1-D, a view; or, of a class of its own, in its shape."""

    @abstractmethod
    def local_tensors(self) -> list[torch.Tensor]:
        """Return the shard of each parameter in its shape, for a DTensor to hold."""

    @abstractmethod
    def part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``full``, which is like the whole parameter ``index``, on the shards' device."""

    @abstractmethod
    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Apply ``fn`` (of ``Module.to`` and similar methods) to the shards; return whether they are others now."""

    @abstractmethod
    def take(self, index: int, assigned: torch.Tensor) -> torch.Tensor:
        """Make a tensor that was assigned the shard of parameter ``index``; return it, or the shard with its values."""

    @abstractmethod
    def released(self, local: torch.Tensor) -> torch.Tensor:
        """Return what a DTensor keeps in the place of ``local`` when another one has taken its place in the group."""


class FlatStorage(Storage):
    """Keeps the shards as the data of a flat parameter; local tensors are views of it."""

    flat_param: nn.Parameter

    def __init__(self, params: list[ManagedParam], layout: Layout, spec: ParamGroupSpec) -> None:
        super().__init__(params, layout, spec)
        first, rank, device = params[0].param, spec.rank, spec.shard_device
        trains = first.requires_grad and first.is_floating_point()
        dtype = (spec.master_dtype if trains else None) or first.dtype
        is_offloaded = device.type == "cpu" and spec.device.type != "cpu"
        shard = torch.empty(layout.shard_numel, dtype=dtype, device=device, pin_memory=is_offloaded)
        layout.clear_padding(shard, rank)
        for own in layout.local_shards(rank):
            shard[own.in_shard.to_slice()].copy_(layout.local_part(own.index, rank, params[own.index].param.detach()))
        self.flat_param = as_flat_parameter(nn.Parameter(shard, first.requires_grad))
        self.place_of = place_function(shard)

    def _new_output(self, dtype: torch.dtype) -> AllGatherOutput:
        if self.calls_extensions:
            return super()._new_output(dtype)
        return FlatOutput(self._params, self._layout, self._spec, self.flat_param, dtype)

    def state(self) -> tuple[Any, ...]:
        shard = self.flat_param.data
        return shard.dtype, shard.device, self.place_of(shard)

    def renew(self) -> None:
        """Move the shards to new memory, before values that a caller has assigned are copied to them.

        The caller may hold the old memory as the data to restore (``saved = p.data; p.data = averaged``).
        """
        copied, is_pinned = self.flat_param.data.clone(), self.flat_param.data.is_pinned()
        self.flat_param.data = copied.pin_memory() if is_pinned else copied
        if all(output.owns_memory for output in self.outputs.values()):
            self.outputs_made_for = self.state()

    def empty(self) -> torch.Tensor:
        return self.flat_param.data.new_empty(0)

    @property
    def nbytes(self) -> int:
        return self._layout.shard_numel * self.flat_param.itemsize

    def tensors(self) -> list[torch.Tensor]:
        return [self.flat_param.detach()]

    def local(self, index: int) -> torch.Tensor:
        return self.flat_param.data[self._layout.local_shard(index, self._spec.rank).in_shard.to_slice()]

    def local_tensors(self) -> list[torch.Tensor]:
        return self._views(range(len(self._params)))

    def _views(self, indices: Iterable[int]) -> list[torch.Tensor]:
        layout, rank = self._layout, self._spec.rank
        parts = [(layout.local_shard(index, rank).in_shard, layout.local_shape(index, rank)) for index in indices]
        return split_storage(self.flat_param.data, parts)

    def part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        rank, per_param = self._spec.rank, self._spec.per_param
        assert per_param is not None
        part = self._layout.local_part(index, rank, full).view(self._layout.local_shape(index, rank))
        return part if part.is_meta else part.to("cpu" if per_param.offloads else per_param.mesh.device_type)

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        flat_param, spec = self.flat_param, self._spec
        converted = fn(flat_param.data)
        if flat_param.is_meta and not converted.is_meta:
            self._layout.clear_padding(converted, spec.rank)
        # Offloaded shards are pinned, once they have left the meta device.
        if spec.device.type != "cpu" and spec.device != spec.shard_device and converted.device.type == "cpu":
            converted = converted.pin_memory()
        grad, flat_param.grad = flat_param.grad, None
        replace_shard(flat_param, converted)
        if grad is not None:
            set_grad(flat_param, fn(grad))
        self.place_of = place_function(converted)
        return self.state() != self.outputs_made_for

    def take(self, index: int, assigned: torch.Tensor) -> torch.Tensor:
        (local,) = self._views([index])
        with torch.no_grad():
            local.copy_(assigned)
        return local

    def released(self, local: torch.Tensor) -> torch.Tensor:
        return local.clone()  # the caller may use it again or elsewhere


class TensorStorage(Storage):
    """Keeps each shard as a tensor of the parameter's class, with memory of its own."""

    calls_extensions = True

    def __init__(self, params: list[ManagedParam], layout: Layout, spec: ParamGroupSpec) -> None:
        super().__init__(params, layout, spec)
        self._locals = [self.part_of(index, entry.param) for index, entry in enumerate(params)]
        self.place_of = id  # such tensors have no address

    def state(self) -> tuple[Any, ...]:
        # Of the dtype and device of the local tensors once all have left the meta device.
        like = next((each for each in self._locals if each.is_meta), self._locals[0])
        return like.dtype, like.device

    def empty(self) -> torch.Tensor:
        dtype, device = self.state()
        return torch.empty(0, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        return [each.detach() for local in self._locals for each in plain_tensors_in(local)]

    def local(self, index: int) -> torch.Tensor:
        return self._locals[index].detach()

    def local_tensors(self) -> list[torch.Tensor]:
        return self._locals

    def part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor of any class, in memory of its own, on the device of shards.

        The operations are those of torch's ``fully_shard``: a class implements these, and perhaps no others.
        """
        layout, spec = self._layout, self._spec
        assert isinstance(layout, PerParamLayout)
        assert spec.per_param is not None
        dim, shape, chunk_shape = layout.dims[index], layout.local_shape(index, spec.rank), layout.chunk_shapes[index]
        world_size, rank, full = layout.world_size, spec.rank, full.detach()
        try:
            with torch.no_grad():
                padded = full.new_zeros(chunk_shape)
                part = padded.narrow(dim, 0, shape[dim])
                # A class that refuses the last rank's part, the smallest, fails on every rank.
                padded.narrow(dim, 0, layout.local_shape(index, world_size - 1)[dim])
                if math.prod(shape):
                    part.copy_(torch.chunk(full, world_size, dim)[rank])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            inner = {name: tuple(each.shape) for name, each in inner_tensors(full).items()}
            raise UnsupportedError(
                f"Parameter {layout.param_infos[index].fqn!r} of unit {spec.unit_name!r}, a {type(full).__name__} of "
                f"shape {tuple(full.shape)}, cannot be sharded on dim {dim} over {world_size} ranks; this is rank "
                f"{rank}: {error!r}. It is made of tensors of shapes {inner}; expected such as divide into "
                f"{world_size} equal parts, for parts of shape {chunk_shape}. Quantize it in smaller blocks, shard it "
                "over fewer ranks, or leave it out with ignored_params (ignored_states of the wrapper)."
            ) from error
        if part.is_meta or not spec.per_param.offloads:
            return part
        return part.cpu() if spec.device.type == "cpu" else part.cpu().pin_memory()

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        with torch.no_grad():
            converted = list(map(fn, self._locals))
        is_other = any(new is not old for new, old in zip(converted, self._locals, strict=True))
        self._locals = converted
        return is_other

    def take(self, index: int, assigned: torch.Tensor) -> torch.Tensor:
        self._locals[index] = assigned
        return assigned

    def released(self, local: torch.Tensor) -> torch.Tensor:
        return local
