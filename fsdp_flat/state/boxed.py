"""Represents a parameter as N-d boxes of this rank's flat shard, which checkpoints store without communication.

A rank's local shard of a parameter is a flat interval, which splits into at most ``2 * ndim - 1`` boxes
(``layout.boxes``). ``torch.distributed.checkpoint`` saves and loads any set of boxes that tile a tensor, so ranks
exchange nothing to write a checkpoint that every sharding can read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_flat.errors import LoadError, UnsupportedError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import Box, boxes

__all__ = ["BoxedTensor", "boxed_value", "boxes_of", "boxes_to_shard", "check_boxes"]

_aten = torch.ops.aten


class BoxedTensor(torch.Tensor):
    """Represents a tensor of which this process holds some boxes.

    ``torch.distributed.checkpoint`` saves it, and loads into it, through the protocol of its
    ``_checkpointable.py``. Beyond that it can be copied, detached and moved; arithmetic is not supported.

    Attributes:
        boxes: offsets and sizes of the parts in the full tensor.
        parts: one tensor per box, of the box's sizes; views of the live shard unless they were copied.
    """

    boxes: tuple[Box, ...]
    parts: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        found: Sequence[Box],
        parts: Sequence[torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> BoxedTensor:
        """Create a tensor of full shape ``shape`` of which this rank holds ``parts`` at the boxes ``found``."""
        made = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.boxes, made.parts = tuple(found), tuple(parts)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (_aten.detach.default, _aten.alias.default):
            return args[0]._with(torch.Tensor.detach)
        if func in (_aten.clone.default, _aten._to_copy.default, _aten.empty_like.default):
            kwargs = {key: value for key, value in (kwargs or {}).items() if key != "memory_format"}
            return args[0]._with(lambda part: func(part, **kwargs))
        if func is _aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            # ``dcp.async_save`` copies a tensor as an empty one, then its attributes.
            return args[0]._with(lambda part: func(part, part.shape, **(kwargs or {})))
        if func is _aten.copy_.default and isinstance(args[1], BoxedTensor) and args[0].boxes == args[1].boxes:
            for part, source in zip(args[0].parts, args[1].parts, strict=True):
                part.copy_(source)
            return args[0]
        raise UnsupportedError(
            f"{func} on a tensor of a sharded state dict in the form of boxes, of which this rank holds "
            f"{[box.sizes for box in args[0].boxes] if args and isinstance(args[0], BoxedTensor) else 'parts'}. It is "
            "for torch.distributed.checkpoint to save and load; leave ShardedStateDictConfig(boxes=True) out to get "
            "ShardedTensors or DTensors, or use FULL_STATE_DICT."
        )

    def _with(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> BoxedTensor:
        parts = [fn(part) for part in self.parts]
        kind = parts[0] if parts else self
        return BoxedTensor(self.shape, self.boxes, parts, kind.dtype, kind.device)

    def __repr__(self) -> str:  # type: ignore[override]
        places = ", ".join(f"{box.sizes} at {box.offsets}" for box in self.boxes)
        return f"BoxedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, boxes=[{places}])"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A saver in another process gets its own copies.
        return BoxedTensor, (tuple(self.shape), self.boxes, self.parts, self.dtype, self.device)

    # torch.distributed.checkpoint is slow to import; callers of these three methods have imported it already.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for box, part in zip(self.boxes, self.parts, strict=True):
            if index.offset is None or tuple(index.offset) == box.offsets:
                return part
        raise LoadError(f"{index.fqn!r}: this rank holds no box at {tuple(index.offset)}; it holds {self!r}.")


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def boxes_of(handle: FlatParamHandle, index: int) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """Return the shape of a parameter's full tensor, and the boxes of it that this rank holds."""
    shape, adapter = handle.layout.param_infos[index].shape, handle.views.params[index].adapter
    start, found = adapter.offsets(shape), boxes(shape, handle.views.local_shards[index].in_param)
    return adapter.full_shape(shape), tuple(box.within(start) for box in found) if any(start) else found


def boxed_value(handle: FlatParamHandle, index: int, local_shard: torch.Tensor) -> torch.Tensor:
    """Represent a parameter, or an optimizer state of one, as boxes of this rank's local shard.

    Nothing is communicated or copied.

    Args:
        handle: the handle that holds the parameter.
        index: index of the parameter in the handle.
        local_shard: this rank's local shard, 1-D.

    Returns:
        A :class:`BoxedTensor` whose parts are views of ``local_shard``; a plain empty tensor if the full tensor has
        no elements, because without a box a checkpoint would not contain it.
    """
    shape, found = boxes_of(handle, index)
    if math.prod(shape) == 0:
        return local_shard.new_empty(shape)
    start = handle.views.local_shards[index].in_param.start
    parts = [local_shard[box.interval.shift(-start).to_slice()].view(box.sizes) for box in found]
    return BoxedTensor(shape, found, parts, local_shard.dtype, local_shard.device)


def check_boxes(value: BoxedTensor, handle: FlatParamHandle, index: int) -> None:
    """Raise if the boxes of one parameter are not those of this rank's local shard.

    Raises:
        LoadError: the shape or the boxes differ from this rank's.
    """
    fqn, run = handle.layout.param_infos[index].fqn, handle.views.local_shards[index].in_param
    shape, expected = boxes_of(handle, index)
    if tuple(value.shape) != shape:
        raise LoadError(f"{fqn!r}: a tensor of shape {tuple(value.shape)}; expected {shape}.")
    if value.boxes != expected:
        raise LoadError(
            f"{fqn!r}: {value!r} does not hold what rank {handle.spec.rank} of {handle.layout.world_size} holds, the "
            f"elements {run.start} to {run.stop}. Boxes fit the sharding that they were made for: load the checkpoint "
            "into this model's own state_dict() with torch.distributed.checkpoint, which reshards."
        )


def boxes_to_shard(value: BoxedTensor, handle: FlatParamHandle, index: int, local_shard: torch.Tensor) -> None:
    """Copy checked boxes into this rank's local shard (1-D), except those that are views of it already."""
    run = handle.views.local_shards[index].in_param
    for box, part in zip(value.boxes, value.parts, strict=True):
        target = local_shard[box.interval.shift(-run.start).to_slice()]
        if target.data_ptr() != part.data_ptr():
            target.copy_(part.reshape(-1))
