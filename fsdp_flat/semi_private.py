"""Provides undocumented FSDP1 attributes that callers use, derived from the unit.

accelerate, verl, OLMo, composer and torch's own checkpointing read these. None of them is state: a property computes
its value from the unit, the handle and its layout. A docstring says so if an attribute may be assigned.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import flat
from fsdp_flat.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp_flat.errors import OptionTypeError
from fsdp_flat.layout import Interval
from fsdp_flat.runtime import Phase, Schedule, Unit, check_idle, reset_schedule

__all__ = [
    "HYBRID_SHARDING_STRATEGIES",
    "NO_RESHARD_AFTER_FORWARD_STRATEGIES",
    "FlatParamHandle",
    "Given",
    "HandleTrainingState",
    "SemiPrivateNames",
    "TrainingState",
    "describe_flat_params",
    "forget_tensors",
]

HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
"""Strategies that shard within groups of ranks and replicate between them."""

NO_RESHARD_AFTER_FORWARD_STRATEGIES = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
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


_TRAINING_STATES = {
    Phase.IDLE: (TrainingState.IDLE, HandleTrainingState.IDLE),
    Phase.FORWARD: (TrainingState.FORWARD_BACKWARD, HandleTrainingState.FORWARD),
    Phase.BACKWARD: (TrainingState.FORWARD_BACKWARD, HandleTrainingState.BACKWARD_PRE),
    Phase.SUMMONED: (TrainingState.SUMMON_FULL_PARAMS, HandleTrainingState.SUMMON_FULL_PARAMS),
}


@dataclass(frozen=True, slots=True)
class Given:
    """Holds constructor arguments that properties return as given."""

    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload


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
        layout, flat_param = handle.layout, handle.flat_param
        numels = _numels_and_paddings(handle)
        own = layout.shard(handle.spec.rank).intersect(Interval(0, layout.unpadded_numel))
        facts = {
            "_num_params": len(layout.param_infos),
            "_fqns": list(layout.fqns),
            "_shapes": [torch.Size(param_info.shape) for param_info in layout.param_infos],
            "_numels": tuple(param_info.numel for param_info in layout.param_infos),
            "_numels_with_padding": tuple(numel for numel, _ in numels),
            "_is_padding_mask": [is_padding for _, is_padding in numels],
            "_shard_param_infos": tuple(_shard_param_info(handle, index) for index in range(len(layout.param_infos))),
            "_shard_numel_padded": layout.shard_numel - own.numel,
            "_sharded_size": torch.Size([layout.shard_numel]),
            "_unpadded_unsharded_size": torch.Size([layout.unpadded_numel]),
            "_padded_unsharded_size": torch.Size([layout.numel]),
        }
        flat_param.__dict__.update(facts)


def _numels_and_paddings(handle: flat.FlatParamHandle) -> list[tuple[int, bool]]:
    found: list[tuple[int, bool]] = []
    end = 0
    for param_info in handle.layout.param_infos:
        if param_info.offset > end:
            found.append((param_info.offset - end, True))
        found.append((param_info.numel, False))
        end = param_info.interval.stop
    if handle.layout.unpadded_numel > end:
        found.append((handle.layout.unpadded_numel - end, True))
    return found


def _shard_param_info(handle: flat.FlatParamHandle, index: int) -> _ShardParamInfo:
    local_shard = handle.layout.local_shard(index, handle.spec.rank)
    if local_shard.is_empty:
        return _ShardParamInfo(False, None, None, None, None)
    return _ShardParamInfo(
        True, local_shard.in_shard.start, local_shard.numel, local_shard.in_param.start, local_shard.in_param.stop - 1
    )


class FlatParamHandle:
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

    @property
    def flat_param(self) -> nn.Parameter:
        """The flat parameter, with FSDP1's tensor attributes updated."""
        flat_param, views = self._real.flat_param, self._real.views
        tensors = {
            "_local_shard": flat_param.data,
            "_full_param_padded": self._real.buffer.tensor,
            "_params": views.visible_params() if self._use_orig_params else None,
        }
        flat_param.__dict__.update(tensors)
        return flat_param

    @property
    def _fully_sharded_module(self) -> nn.Module:
        return self._unit.module

    @property
    def uses_sharded_strategy(self) -> bool:
        """True if parameters are sharded over ranks."""
        return self._unit.options.strategy.member is not ShardingStrategy.NO_SHARD

    @property
    def _sharding_strategy(self) -> ShardingStrategy:
        return self._unit.options.strategy.member

    @property
    def _use_orig_params(self) -> bool:
        return self._unit.options.use_orig_params

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that parameters are sharded over (with NO_SHARD: replicated over)."""
        return self._unit.options.groups.process_group

    @property
    def rank(self) -> int:
        """This rank within :attr:`process_group`."""
        return _rank(self.process_group)

    @property
    def world_size(self) -> int:
        """Size of :attr:`process_group`."""
        return _world_size(self.process_group)

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self._real.spec.device

    @property
    def _offload_params(self) -> bool:
        return self._unit.options.offload_params

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
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self._real.compute_dtype

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._real.reduce_dtype

    @property
    def _keep_low_precision_grads(self) -> bool:
        return self._unit.options.precision.keep_low_precision_grads

    @property
    def _training_state(self) -> HandleTrainingState:
        return _TRAINING_STATES[self._unit.phase][1]

    @property
    def sharded_grad(self) -> torch.Tensor | None:
        """The gradient of the shard, 1-D and padded like it; with original parameters it is assembled at each read."""
        grads = self._real.grads
        if not any(grads.exist()):
            return None
        return grads.shard() if self._use_orig_params else self._real.flat_param.grad

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has the shard's size."""
        return self.uses_sharded_strategy and tensor.shape == (self._real.layout.shard_numel,)

    def needs_unshard(self) -> bool:
        """Return whether the parameters must be unsharded before use."""
        return self.uses_sharded_strategy and not self._unit.is_unsharded

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Free the unsharded parameters of the unit if ``free_unsharded_flat_param``; between steps."""
        check_idle(self._unit, "reshard")
        if free_unsharded_flat_param:
            self._unit.reshard()

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Move the shard, as ``Tensor.to`` with the same arguments; between steps."""
        self._convert(lambda tensor: tensor.to(*args, **kwargs))
        self.flat_param.__dict__["_local_shard"] = self._real.flat_param.data

    def _convert(self, fn: Any) -> None:
        check_idle(self._unit, "converting a flat parameter")
        self._unit.reshard()
        self._real.adopt_changes()
        self._real.convert(fn)
        forget_tensors(self._unit)


def forget_tensors(unit: Unit) -> None:
    """Drop the tensors that reading ``_flat_param`` stored on it, which may keep a replaced shard alive."""
    for handle in unit.handles:
        for name in ("_local_shard", "_full_param_padded", "_params"):
            handle.flat_param.__dict__.pop(name, None)


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _world_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


class SemiPrivateNames(nn.Module):
    """Provides the wrapper's attributes under FSDP1's names; the wrapper class inherits them."""

    _unit: Unit
    _settings: StateDictSettings
    _given: Given

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.handles)

    def _named_handles(self) -> list[FlatParamHandle]:
        known = self.__dict__.setdefault("_handle_names", {})
        for handle in self._unit.handles:
            if handle not in known:
                known[handle] = FlatParamHandle(self._unit, handle)
        return [known[handle] for handle in self._unit.handles]

    @property
    def _handle(self) -> FlatParamHandle | None:
        handles = self._named_handles()
        return handles[0] if handles else None

    @property
    def _flat_param(self) -> flat.FlatParameter | None:
        handle = self._handle
        return None if handle is None else handle.flat_param  # type: ignore[return-value]

    @property
    def params(self) -> list[nn.Parameter]:
        """The unit's flat parameters."""
        return [handle.flat_param for handle in self._named_handles()]

    @property
    def _fully_sharded_module_to_handle(self) -> dict[nn.Module, FlatParamHandle]:
        handle = self._handle
        return {} if handle is None else {self._unit.module: handle}

    def _of_root(self, name: str) -> list[SemiPrivateNames]:
        if not self._is_root:
            raise AttributeError(f"{name} is there on the outermost wrapper only, after its first use.")
        return [child for child in self.modules() if isinstance(child, SemiPrivateNames)]

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        return [handle for wrapper in self._of_root("_all_handles") for handle in wrapper._named_handles()]

    @property
    def _all_fsdp_states(self) -> list[SemiPrivateNames]:
        return self._of_root("_all_fsdp_states")

    @property
    def _is_root(self) -> bool | None:
        """True for a root; None before the first use. Assigning False or None drops a root's schedule."""
        context = self._unit.context
        return context.root is self._unit if isinstance(context, Schedule) else None

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        if not value and self._is_root:
            self._reset_lazy_init()

    def _reset_lazy_init(self) -> None:
        if isinstance(self._unit.context, Schedule):
            reset_schedule(self._unit.context.units)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that parameters are sharded over (with NO_SHARD: replicated over)."""
        return self._unit.options.groups.process_group

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        if self.sharding_strategy not in HYBRID_SHARDING_STRATEGIES:
            raise AttributeError("_inter_node_pg is there with hybrid strategies only.")
        return self._unit.options.groups.replicate.group

    @property
    def _device_mesh(self) -> Any:
        return self._unit.options.groups.mesh

    @property
    def rank(self) -> int:
        """This rank within :attr:`process_group`."""
        return _rank(self.process_group)

    @property
    def world_size(self) -> int:
        """Size of :attr:`process_group`."""
        return _world_size(self.process_group)

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in force."""
        return self._unit.options.strategy.member

    @property
    def compute_device(self) -> torch.device:
        """The device on which forward and backward run."""
        return self._unit.options.device

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The constructor's argument; without one, the defaults."""
        return self._given.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """The constructor's argument; without one, the defaults."""
        return self._given.cpu_offload

    @property
    def limit_all_gathers(self) -> bool:
        """The constructor's argument."""
        return self._unit.options.limit_all_gathers

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """The constructor's argument."""
        return self._unit.options.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """The constructor's argument."""
        return self._unit.options.forward_prefetch

    @property
    def training_state(self) -> TrainingState:
        """The state of the unit."""
        return _TRAINING_STATES[self._unit.phase][0]

    @property
    def _use_orig_params(self) -> bool:
        return self._unit.options.use_orig_params

    @property
    def _use_full_prec_in_eval(self) -> bool:
        return self._unit.options.precision.full_in_eval

    @property
    def _sync_gradients(self) -> bool:
        return self._unit.sync_gradients

    @property
    def _ignored_modules(self) -> set[nn.Module]:
        return set(self._unit.ignored.modules)

    @property
    def _ignored_params(self) -> set[nn.Parameter]:
        return set(self._unit.ignored.params)

    @property
    def _comm_hook(self) -> Any:
        return self._unit.policy.hook

    @property
    def _comm_hook_state(self) -> Any:
        return self._unit.policy.hook_state

    @property
    def _state_dict_type(self) -> StateDictType:
        return self._settings.state_dict_type

    @property
    def _state_dict_config(self) -> StateDictConfig:
        return self._settings.state_dict_config

    @property
    def _optim_state_dict_config(self) -> OptimStateDictConfig:
        return self._settings.optim_state_dict_config
