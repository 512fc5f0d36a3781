"""Encodes tensors as N-d boxes of this rank's flat shard, which checkpoints store without communication.

A rank's local shard of a parameter is a flat interval, which splits into at most ``2 * ndim - 1`` boxes
(``layout.boxes``). ``torch.distributed.checkpoint`` saves and loads any set of boxes that tile a tensor, so ranks
exchange nothing to write a checkpoint that every sharding can read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_flat.api import OptimStateDictConfig, StateDictConfig
from fsdp_flat.errors import LoadError, UnsupportedError
from fsdp_flat.layout import Box, boxes
from fsdp_flat.state.shards import LoadPlan, StateDictCodec, StateShard

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


class BoxCodec(StateDictCodec):
    """Encodes :class:`BoxedTensor` views of live memory, or copies on the CPU with ``offload_to_cpu``."""

    communicates = False

    def encode(self, shards: Sequence[StateShard], config: StateDictConfig | OptimStateDictConfig) -> list[Any]:
        """Return the boxes of this rank's elements.

        A tensor without any elements is a plain empty one: without a box a checkpoint would not contain it.
        """
        found: list[torch.Tensor] = []
        for shard in shards:
            local = shard.local.to("cpu", copy=True) if config.offload_to_cpu else shard.local
            shape, own = _boxes_of(shard)
            if math.prod(shape) == 0:
                found.append(local.new_empty(shape))
                continue
            parts = [local[box.interval.shift(-shard.run.start).to_slice()].view(box.sizes) for box in own]
            found.append(BoxedTensor(shape, own, parts, local.dtype, local.device))
        return found

    def reads(self, value: Any) -> bool:
        return isinstance(value, BoxedTensor)

    def decode(self, value: Any, target: StateShard, plan: LoadPlan) -> None:
        """Plan the copies of boxes that are this rank's elements, except of those that are views of it already."""
        run = target.run
        shape, expected = _boxes_of(target)
        if tuple(value.shape) != shape:
            raise LoadError(f"{target.label}: a tensor of shape {tuple(value.shape)}; expected {shape}.")
        if value.boxes != expected:
            raise LoadError(
                f"{target.label}: {value!r} does not hold what rank {target.param.rank_group.rank} of "
                f"{target.param.rank_group.size} holds, the elements {run.start} to {run.stop}. Boxes fit the sharding "
                "that they were made for: load the checkpoint into this model's own state_dict() "
                "with torch.distributed.checkpoint, which reshards."
            )
        for box, part in zip(value.boxes, value.parts, strict=True):
            own = target.local[box.interval.shift(-run.start).to_slice()]
            if own.data_ptr() != part.data_ptr():
                plan.copy(own, part.reshape(-1))


def _boxes_of(shard: StateShard) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """Return the shape of the full tensor, and the boxes of it that this rank holds."""
    param = shard.param
    start, found = param.adapter.offsets(param.shape), boxes(param.shape, shard.run)
    return param.full_shape, tuple(box.within(start) for box in found) if any(start) else found
