"""Encodes full tensors and N-d boxes, and maps each state-dict type to its codec and options.

A rank's local shard of a parameter is a flat interval, which splits into at most ``2 * ndim - 1`` boxes
(``layout.boxes``). ``torch.distributed.checkpoint`` saves and loads any set of boxes that tile a tensor, so ranks
exchange nothing to write a checkpoint that every sharding can read.

docs/architecture.md has the recipe for a new state-dict type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, final

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.overrides import is_tensor_like

from fsdp_flat import api
from fsdp_flat.api import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType, flag, member_of
from fsdp_flat.comm import P2PChannels
from fsdp_flat.core import PLAIN, TensorAdapter, place_of, without_data
from fsdp_flat.errors import LoadError, UnsupportedError, UsageError
from fsdp_flat.layout import Box, boxes
from fsdp_flat.state.chunks import ChunkCodec, FlatCodec
from fsdp_flat.state.shards import (
    Config,
    IndexedParam,
    PendingWrites,
    StateDictCodec,
    StateShard,
    shape_of,
)
from fsdp_flat.state.torch_state import full_tensor

_aten = torch.ops.aten


class FullCodec(StateDictCodec):
    """Encodes full tensors, on every rank or on rank 0 of each shard group; a load communicates nothing.

    While a model is saved, its modules and their hooks see full parameters, and :meth:`stored` encodes each as the
    modules then hold it. A subclass that overrides ``stored`` stores full tensors in another form.
    """

    def gather(self, shards: Iterable[StateShard], config: Config) -> list[torch.Tensor]:
        """Return the unsharded tensors, under tensor parallelism this rank's parts; ``rank0_only`` leaves others empty.

        Every rank must call this.
        """
        dst = 0 if config.rank0_only else None
        found: list[torch.Tensor] = []
        channels = P2PChannels()
        with torch.no_grad():
            # Results are allocated one by one, as earlier transfers release their memory.
            for shard in shards:
                shape = shard.shape if dst in (None, shard.param.rank_group.rank) else (0,)
                target = torch.empty(shape, dtype=shard.local.dtype, device=shard.param.unit.options.device)
                found.append(target)
                shard.send(dst, target, channels)
            channels.wait()
        return found

    @final
    def encode(self, shards: Sequence[StateShard], config: Config) -> list[Any]:
        found: list[Any] = []
        for shard, unsharded in zip(shards, self.gather(shards, config), strict=True):
            adapter, is_left_out = shard.param.adapter, config.rank0_only and shard.param.rank_group.rank
            found.append(None if is_left_out else self.stored(adapter.from_local(unsharded), adapter, config))
        return found

    def stored(self, tensor: torch.Tensor, adapter: TensorAdapter, config: Config) -> torch.Tensor:
        """Return the value of an unsharded tensor, a DTensor under tensor parallelism; they may share memory.

        Every rank of the adapter's mesh must call this.
        """
        full = tensor if adapter is PLAIN else adapter.full_tensor(tensor)
        return full.cpu() if config.offload_to_cpu else full

    def of_dtensor(self, value: Any, config: Config) -> Any:
        """Return the full tensor of a DTensor, any other value itself. Every rank of its mesh must call this."""
        if not isinstance(value, DTensor):
            return value
        full = full_tensor(value).detach()
        return full.cpu() if config.offload_to_cpu else full

    def fits(self, value: Any, target: StateShard) -> bool:
        shape, expected = shape_of(value), target.full_shape
        # Any tensor of one element is one, as for torch; what is no tensor is an error of decoding.
        return shape == expected or math.prod(shape) == math.prod(expected) == 1 or not is_tensor_like(value)

    def decode(self, value: Any, target: StateShard, writes: PendingWrites) -> None:
        """Plan the copy of this rank's part of a full tensor, or of a proxy of one."""
        full, interval, adapter = value, target.interval.to_slice(), target.param.adapter
        is_read = isinstance(value, torch.Tensor)
        if not is_read:
            if not is_tensor_like(value):
                raise LoadError(
                    f'While copying the parameter named "{target.label}", expected a tensor, but got {type(value)}.'
                )
            if interval.start == interval.stop:
                return
            # A proxy of a tensor in a file (Lightning's lazy loading) is read here; only this rank's part is kept.
            full = torch.empty(shape_of(value), dtype=value.dtype).copy_(value)
        elif isinstance(value, ShardedTensor):
            raise LoadError(
                f"{target.label}: a sharded tensor, where this load of unit {target.param.unit.name!r} expects a full "
                "one. Load a SHARDED_STATE_DICT inside FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)."
            )
        # Slicing a DTensor may communicate, so every rank does it now; plain tensors are only viewed.
        if adapter is not PLAIN:
            full = adapter.local_slice(full.detach().reshape(target.full_shape))
        local = full.reshape(-1)[interval]
        if local.is_meta and not target.local.is_meta:
            raise LoadError(f"{target.label}: a tensor on the meta device, which has no data to load.")
        if local.dtype is not target.local.dtype:
            # A dtype that is not converted fails here, and not in the middle of the writes.
            target.local[:0].copy_(local[:0])
        writes.copy(target.local, local if is_read else local.clone())


class BoxedTensor(torch.Tensor):
    """Represents a tensor of which this process holds some boxes: ``parts``, views of the live shard or copies.

    ``param`` is the parameter that it was made of in this process; None if it is an optimizer state.

    ``torch.distributed.checkpoint`` saves it, and loads into it, through the protocol of its
    ``_checkpointable.py``. Beyond that it can be copied, detached and moved; arithmetic is not supported.
    """

    boxes: tuple[Box, ...]
    parts: tuple[torch.Tensor, ...]
    param: IndexedParam | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        found: Sequence[Box],
        parts: Sequence[torch.Tensor],
        like: torch.Tensor,
        param: IndexedParam | None = None,
    ) -> BoxedTensor:
        """Create one with the dtype and device of ``like``, which those of the parts are."""
        made: BoxedTensor = without_data(cls, shape, dtype=like.dtype, device=like.device)
        made.boxes, made.parts, made.param = tuple(found), tuple(parts), param
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_same = func is _aten.view.default and tuple(args[1]) == tuple(args[0].shape)
        if is_same or func in (_aten.detach.default, _aten.alias.default):
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

    def with_parts(self, given: Iterator[torch.Tensor]) -> BoxedTensor:
        """Return a tensor of the same boxes with the next tensors as its parts."""
        return self._with(lambda _: next(given))

    def _with(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> BoxedTensor:
        parts = [fn(part) for part in self.parts]
        return BoxedTensor(self.shape, self.boxes, parts, parts[0] if parts else self, self.param)

    def __repr__(self) -> str:  # type: ignore[override]
        places = ", ".join(f"{box.sizes} at {box.offsets}" for box in self.boxes)
        return f"BoxedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, boxes=[{places}])"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A saver in another process gets its own copies.
        return BoxedTensor, (
            tuple(self.shape),
            self.boxes,
            self.parts,
            torch.empty(0, dtype=self.dtype, device=self.device),
        )

    # torch.distributed.checkpoint is slow to import; callers of these three methods have imported it already.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        found: list[Any] = []
        for box in self.boxes:
            chunk, properties = _chunk(box), TensorProperties(dtype=self.dtype)
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.shape)
            index = MetadataIndex(fqn, torch.Size(box.offsets))
            found.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return found

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
    kinds = (BoxedTensor,)

    def encode(self, shards: Sequence[StateShard], config: Config) -> list[Any]:
        found: list[torch.Tensor] = []
        for shard in shards:
            local = shard.local.to("cpu", copy=True) if config.offload_to_cpu else shard.local
            boxed = _boxed(shard, local)
            # A tensor without any elements is a plain empty one: without a box a checkpoint would not contain it.
            found.append(boxed if math.prod(boxed.shape) else local.new_empty(boxed.shape))
        return found

    def decode(self, value: Any, target: StateShard, writes: PendingWrites) -> None:
        own, interval = _boxed(target, target.local), target.interval
        if value.boxes != own.boxes:
            raise LoadError(
                f"{target.label}: {value!r} does not hold what rank {target.param.rank_group.rank} of "
                f"{target.param.rank_group.size} holds, the elements {interval.start} to {interval.stop}. Boxes fit "
                "the sharding that they were made for: load the checkpoint into this model's own state_dict() with "
                "torch.distributed.checkpoint, which reshards."
            )
        for part, given in zip(own.parts, value.parts, strict=True):
            if place_of(part) != place_of(given):
                writes.copy(part, given)


def _boxed(shard: StateShard, local: torch.Tensor) -> BoxedTensor:
    """Return views of this rank's elements ``local`` as boxes of the full tensor."""
    param, found = shard.param, boxes(shard.param.shape, shard.interval)
    parts: list[torch.Tensor] = []
    at = 0
    for box in found:
        # Boxes are in the order of the elements, and adjacent.
        parts.append(local[at : at + math.prod(box.sizes)].view(box.sizes))
        at += math.prod(box.sizes)
    if param.adapter is not PLAIN and any(start := param.adapter.offsets(param.shape)):
        found = tuple(box.within(start) for box in found)
    return BoxedTensor(param.full_shape, found, parts, local, param if shard.state is None else None)


FULL, BOXES, _CHUNKS, _FLAT = FullCodec(), BoxCodec(), ChunkCodec(), FlatCodec()


@dataclass(frozen=True, slots=True)
class CodecRow:
    """Holds the codecs and classes of options of one state-dict type, for models and for optimizers.

    ``boxed`` is the codec of both with the option ``boxes=True``.
    """

    model: StateDictCodec
    optim: StateDictCodec
    model_config: type[StateDictConfig]
    optim_config: type[OptimStateDictConfig]
    boxed: StateDictCodec | None = None


CODECS = MappingProxyType(
    {
        StateDictType.FULL_STATE_DICT: CodecRow(FULL, FULL, api.FullStateDictConfig, api.FullOptimStateDictConfig),
        StateDictType.LOCAL_STATE_DICT: CodecRow(
            _FLAT, _CHUNKS, api.LocalStateDictConfig, api.LocalOptimStateDictConfig
        ),
        StateDictType.SHARDED_STATE_DICT: CodecRow(
            _CHUNKS, _CHUNKS, api.ShardedStateDictConfig, api.ShardedOptimStateDictConfig, boxed=BOXES
        ),
    }
)


def codec_of(kind: StateDictType, config: Config) -> StateDictCodec:
    """Return the codec of a state-dict type for models or optimizers, whichever ``config`` is for."""
    row = CODECS[kind]
    if row.boxed is not None and getattr(config, "boxes", False):
        return row.boxed
    return row.optim if isinstance(config, OptimStateDictConfig) else row.model


def contained_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a list, tuple or dict, at any depth; nothing of another value."""
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for entry in values:
        if isinstance(entry, torch.Tensor):
            yield entry
        else:
            yield from contained_tensors(entry)


def holds_tensors(value: Any, *, min_dim: int = 1) -> bool:
    """Return whether a list, tuple or dict has a tensor of at least ``min_dim`` dims in it."""
    return any(tensor.dim() >= min_dim for tensor in contained_tensors(value))


def decoder_of(value: Any) -> StateDictCodec:
    """Return the codec that reads ``value``: the one of its own kind, else that of full tensors."""
    if type(value) is torch.Tensor:
        return FULL
    for row in CODECS.values():
        for codec in (row.boxed, row.model, row.optim):
            if codec is not None and isinstance(value, codec.kinds):
                return codec
    return FULL


def settings_for(
    state_dict_type: object,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Build the settings from the arguments of ``set_state_dict_type``."""
    kind = member_of(StateDictType, state_dict_type, "state_dict_type", error=UsageError)
    row = CODECS[kind]
    return StateDictSettings(
        kind,
        _config(kind, state_dict_config, row.model_config),
        _config(kind, optim_state_dict_config, row.optim_config),
    )


def _config(kind: StateDictType, given: Any, expected: type[Any]) -> Any:
    """Return ``given`` as this library's config, if it is another library's class of that name; defaults for None."""
    if given is not None and type(given).__name__ != expected.__name__:
        raise UsageError(f"{kind} takes a {expected.__name__}; got a {type(given).__name__}.")
    for name, value in ({} if given is None else vars(given)).items():
        flag(value, f"{expected.__name__}.{name}")
    if isinstance(given, expected):
        return given
    return expected(**{each.name: getattr(given, each.name) for each in fields(expected) if hasattr(given, each.name)})
