"""Presents units and handles under undocumented names of FSDP1 that callers read.

accelerate, verl, OLMo, composer and torch's own checkpointing read these. None of them is state: a property computes
its value from the unit, the handle and its layout. A docstring says so if an attribute may be assigned.
"""

from __future__ import annotations

from enum import Enum, auto
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import flat
from fsdp_flat.api import ShardingStrategy
from fsdp_flat.comm import STRATEGIES
from fsdp_flat.errors import OptionTypeError
from fsdp_flat.flat import have_grads, sharded_grad_of
from fsdp_flat.layout import Interval, LocalShard
from fsdp_flat.runtime import Phase, Unit

HYBRID_SHARDING_STRATEGIES = [row.member for row in STRATEGIES.values() if row.is_hybrid]
"""Strategies that shard within groups of ranks and replicate between them."""

NO_RESHARD_AFTER_FORWARD_STRATEGIES = tuple(
    row.member for row in STRATEGIES.values() if row.shards and not row.reshard_after_forward
)
"""Strategies that keep parameters unsharded between forward and backward."""


class TrainingState(Enum):
    """Enumerates the states of a wrapper under FSDP1's names."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class HandleTrainingState(Enum):
    """Enumerates the states of a handle under FSDP1's names; BACKWARD_POST has no counterpart here."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    SUMMON_FULL_PARAMS = auto()


TRAINING_STATES = {
    Phase.IDLE: (TrainingState.IDLE, HandleTrainingState.IDLE),
    Phase.FORWARD: (TrainingState.FORWARD_BACKWARD, HandleTrainingState.FORWARD),
    Phase.BACKWARD: (TrainingState.FORWARD_BACKWARD, HandleTrainingState.BACKWARD_PRE),
    Phase.SUMMONED: (TrainingState.SUMMON_FULL_PARAMS, HandleTrainingState.SUMMON_FULL_PARAMS),
}


def derived(path: str, doc: str | None = None) -> Any:
    """Return a read-only property whose value is read at a dotted path below the object."""
    return property(attrgetter(path), doc=doc or f"Reads ``{path}``.")


class GroupMember:
    """Provides the group of a unit, and this rank in it, under FSDP1's names."""

    process_group = derived(
        "_unit.options.groups.process_group",
        "The group that parameters are sharded over (with NO_SHARD: replicated over).",
    )

    @property
    def rank(self) -> int:
        """This rank within ``process_group``."""
        return 0 if self.process_group is None else dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """Size of ``process_group``."""
        return 1 if self.process_group is None else dist.get_world_size(self.process_group)


class _ShardParamInfo(NamedTuple):
    """Locates one parameter in this rank's shard; indices within the parameter are inclusive."""

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


def describe_flat_params(unit: Unit) -> None:
    """Set FSDP1's constant attributes on a unit's flat parameters: names, sizes, and the shard's content."""
    for handle in unit.handles:
        layout, infos = handle.layout, handle.layout.param_infos
        numels = _numels_and_paddings(handle)
        own_shards = {local_shard.index: local_shard for local_shard in layout.local_shards(handle.spec.rank)}
        own = layout.shard(handle.spec.rank).intersect(Interval(0, layout.unpadded_numel))
        handle.flat_param.__dict__.update(
            _num_params=len(infos),
            _fqns=list(layout.fqns),
            _shapes=[torch.Size(param_info.shape) for param_info in infos],
            _numels=tuple(param_info.numel for param_info in infos),
            _numels_with_padding=tuple(numel for numel, _ in numels),
            _is_padding_mask=[is_padding for _, is_padding in numels],
            _shard_param_infos=tuple(_shard_param_info(own_shards.get(index)) for index in range(len(infos))),
            _shard_numel_padded=layout.shard_numel - own.numel,
            _sharded_size=torch.Size([layout.shard_numel]),
            _unpadded_unsharded_size=torch.Size([layout.unpadded_numel]),
            _padded_unsharded_size=torch.Size([layout.numel]),
        )


def _numels_and_paddings(handle: flat.FlatParamHandle) -> list[tuple[int, bool]]:
    found: list[tuple[int, bool]] = []
    end = 0
    for param_info in handle.layout.param_infos:
        if param_info.offset > end:
            found.append((param_info.offset - end, True))
        found.append((param_info.numel, False))
        end = param_info.offset + param_info.numel
    if handle.layout.unpadded_numel > end:
        found.append((handle.layout.unpadded_numel - end, True))
    return found


def _shard_param_info(local_shard: LocalShard | None) -> _ShardParamInfo:
    if local_shard is None:
        return _ShardParamInfo(False, None, None, None, None)
    start, stop = local_shard.in_param.start, local_shard.in_param.stop
    return _ShardParamInfo(True, local_shard.in_shard.start, stop - start, start, stop - 1)


class FlatParamHandle(GroupMember):
    """Presents a handle under FSDP1's names, for ``wrapper._handle`` and ``wrapper._all_handles``.

    Attributes that are not named here are those of :class:`fsdp_flat.flat.FlatParamHandle`.

    Args:
        unit: the unit.
        handle: one of its handles.
    """

    __slots__ = ("_real", "_unit")

    def __init__(self, unit: Unit, handle: flat.FlatParamHandle) -> None:
        self._unit = unit
        self._real = handle

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of this name of the handle itself."""
        if name in FlatParamHandle.__slots__:
            raise AttributeError(name)
        return getattr(self._real, name)

    _fully_sharded_module = derived("_unit.module")
    _sharding_strategy = derived("_unit.options.strategy.member")
    _use_orig_params = derived("_unit.options.use_orig_params")
    _offload_params = derived("_unit.options.offload_params")
    _fwd_bwd_param_dtype = derived("_real.compute_dtype")
    _reduce_dtype = derived("_real.grads.reduce_dtype")
    _keep_low_precision_grads = derived("_unit.options.precision.keep_low_precision_grads")
    device = derived("_real.spec.device", "The compute device.")

    @property
    def flat_param(self) -> nn.Parameter:
        """The flat parameter, with FSDP1's tensor attributes updated."""
        flat_param, views = self._real.flat_param, self._real.views
        flat_param.__dict__.update(
            _local_shard=flat_param.data,
            _full_param_padded=self._real.buffer.tensor,
            _params=views.visible_params() if self._use_orig_params else None,
        )
        return flat_param

    @property
    def uses_sharded_strategy(self) -> bool:
        """True if parameters are sharded over ranks."""
        return self._unit.options.strategy.member is not ShardingStrategy.NO_SHARD

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """Dtype of the shard. Assigning one converts the shard to it."""
        return self._real.orig_dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        if not isinstance(dtype, torch.dtype):
            raise OptionTypeError(f"_orig_param_dtype must be a torch.dtype; got {dtype!r}.")
        self._convert(lambda tensor: tensor.to(dtype))

    @property
    def _training_state(self) -> HandleTrainingState:
        return TRAINING_STATES[self._unit.phase][1]

    @property
    def sharded_grad(self) -> torch.Tensor | None:
        """The gradient of the shard, 1-D and padded like it; with original parameters it is assembled at each read."""
        views = self._real.views
        if not any(have_grads(views)):
            return None
        return sharded_grad_of(views) if self._use_orig_params else self._real.flat_param.grad

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has the shard's size."""
        return self.uses_sharded_strategy and tensor.shape == (self._real.layout.shard_numel,)

    def needs_unshard(self) -> bool:
        """Return whether the parameters must be unsharded before use."""
        return self.uses_sharded_strategy and not self._unit.is_unsharded

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the unsharded parameters of the unit if ``free_unsharded_flat_param``; between steps."""
        self._unit.check_idle("reshard")
        if free_unsharded_flat_param:
            self._unit.reshard()

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move the shard, as ``Tensor.to`` with the same arguments; between steps."""
        self._convert(lambda tensor: tensor.to(*args, **kwargs))
        self.flat_param.__dict__["_local_shard"] = self._real.flat_param.data

    def _convert(self, fn: Any) -> None:
        self._unit.check_idle("converting a flat parameter")
        self._unit.reshard()
        self._real.adopt_changes()
        self._real.convert(fn)
        forget_tensors(self._unit)


def forget_tensors(unit: Unit) -> None:
    """Drop the tensors that reading ``_flat_param`` stored on it, which may keep a replaced shard alive."""
    for handle in unit.handles:
        for name in ("_local_shard", "_full_param_padded", "_params"):
            handle.flat_param.__dict__.pop(name, None)
