"""Defines the types of a unit's settings, switches and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn

from fsdp_flat.api import BackwardPrefetch, CPUOffload, MixedPrecision
from fsdp_flat.comm import ShardingGroups, Strategy
from fsdp_flat.core.per_param_sharding import PerParamSharding
from fsdp_flat.core.torch_core import BatchNorm

SyncStates = Literal["warn", "broadcast", "auto", "raise"]


@dataclass(frozen=True, slots=True)
class Ignored:
    """Holds the modules and parameters that no unit manages; buffers of ignored modules are not touched either."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]

    def has(self, param: object) -> bool:
        """Return whether a parameter is one of them."""
        return bool(self.params) and param in self.params  # hashing a tensor takes long


@dataclass(frozen=True, slots=True)
class Precision:
    """Holds a validated ``MixedPrecision``; see there for the fields."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    cast_forward_inputs: bool
    cast_root_forward_inputs: bool = False
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    master_dtype: torch.dtype | None = None
    full_precision_modules: tuple[type[nn.Module], ...] = ()
    uncast_inputs: frozenset[str] = frozenset()
    # FSDP_USE_FULL_PREC_IN_EVAL=1: forwards in eval mode run in full precision.
    full_in_eval: bool = False
    # _module_classes_to_ignore.
    ignored_classes: tuple[type[nn.Module], ...] = ()
    # Floating-point outputs of the unit are cast to it.
    output_dtype: torch.dtype | None = None

    def is_full_in(self, module: nn.Module) -> bool:
        """Return whether a module of a unit with this precision nevertheless computes in full precision.

        It does if the caller requested it, or if low precision cannot run: batch norm accepts parameters of its
        inputs' dtype only if its running statistics have this dtype too.
        """
        if isinstance(module, self.full_precision_modules):
            return True
        statistics = self._statistics_dtype(module)
        return statistics not in (None, self.param_dtype) and any(True for _ in module.parameters(recurse=False))

    def rounds_statistics_of(self, module: nn.Module) -> bool:
        """Return whether a module updates running statistics in a dtype shorter than 4 bytes in training."""
        statistics = None if self.is_full_in(module) else self._statistics_dtype(module)
        return statistics is not None and statistics.itemsize < 4 and statistics == self.buffer_dtype

    def _statistics_dtype(self, module: nn.Module) -> torch.dtype | None:
        """Return the compute dtype of the running statistics of a batch norm of ``ignored_classes``, or None."""
        if self.param_dtype is None or not (isinstance(module, BatchNorm) and isinstance(module, self.ignored_classes)):
            return None
        dtype = next((b.dtype for b in module._buffers.values() if b is not None and b.is_floating_point()), None)
        return dtype and (self.buffer_dtype or dtype)


@dataclass(frozen=True, slots=True)
class Api:
    """Describes how callers meet a kind of unit; a step does not ask.

    Attributes:
        has_wrapper: a module around the unit's own saves and loads its parameters, and goes with the unit; else torch
            does both, since the unit's modules hold DTensors.
        shares_options: the units of a tree must have the same options of the constructor.
        stays_on_meta: parameters may be on the meta device until the first forward.
    """

    has_wrapper: bool
    shares_options: bool
    stays_on_meta: bool


WRAPPER = Api(has_wrapper=True, shares_options=True, stays_on_meta=False)
IN_PLACE = Api(has_wrapper=False, shares_options=False, stays_on_meta=True)


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """Holds the validated options of one unit.

    Attributes:
        device_given: parameters on the CPU move to the device: the caller passed it, or the group moves none there.
        sync_states: action if ranks start from different weights.
        offload_params: shards and gradients, and so the optimizer, live on the CPU.
        api: how callers meet the unit.
        per_param: shards each parameter by itself and shows DTensors; None for flat parameters.
        mixed_precision, cpu_offload: the constructor's arguments, which the wrapper shows.
    """

    strategy: Strategy
    groups: ShardingGroups
    device: torch.device
    precision: Precision
    use_orig_params: bool
    device_given: bool = False
    backward_prefetch: BackwardPrefetch | None = None
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    sync_states: SyncStates = "warn"
    offload_params: bool = False
    param_init_fn: Callable[[nn.Module], None] | None = None
    api: Api = WRAPPER
    per_param: PerParamSharding | None = None
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)

    @property
    def mesh_suffix(self) -> str:
        """Text after the unit's name, for a mesh that ``shard_placement_fn`` chose; else empty."""
        return "" if self.per_param is None else self.per_param.suffix


@dataclass(slots=True)
class UnitControl:
    """Holds the switches of one unit. The step reads them; nothing else decides what they decide.

    Attributes:
        reshard_after_forward: free the unsharded parameters after forward; None: unless the unit is the outermost, or
            one that the tree's memory budget keeps.
        reshards_evaluations: free them after a forward that no backward follows, whatever ``reshard_after_forward`` is.
        reshard_after_backward: free them after backward, or keep them for the next forward. None: keep them only where
            gradients are not reduced and ``reshard_after_forward`` is False (SHARD_GRAD_OP in ``no_sync``).
        sync_gradients: reduce gradients at the end of the unit's backward; False accumulates unreduced ones.
        unshard_in_backward: unshard the parameters for backward; False where backward does not read them.
        is_last_backward: at a root: the end of a backward waits for reductions and sets gradients.
        finalizes_by_hand: at a root: no backward does so; ``finalize_backward`` does.
        keeps_unsharded_storage: a reshard leaves the memory of the unsharded parameters, so that it stays in place.
        keeps_last: as the last unit of a forward, keep the buffers for the backward that follows.
        forward_prefetch: modules whose units' all-gathers begin once this unit is unsharded in forward; empty: the next
            one of the last forward.
        backward_prefetch: the same in backward; empty: the next one, by the unit's option.
    """

    reshard_after_forward: bool | None = None
    reshards_evaluations: bool = True
    reshard_after_backward: bool | None = None
    sync_gradients: bool = True
    unshard_in_backward: bool = True
    is_last_backward: bool = True
    finalizes_by_hand: bool = False
    keeps_unsharded_storage: bool = False
    keeps_last: bool = True
    forward_prefetch: tuple[nn.Module, ...] = ()
    backward_prefetch: tuple[nn.Module, ...] = ()

    @classmethod
    def of(cls, strategy: Strategy) -> UnitControl:
        """Return the switches of a new unit, from the columns of its strategy; ``fully_shard`` then sets its own."""
        return cls(reshard_after_forward=None if strategy.reshard_after_forward else False)


@dataclass(slots=True)
class ReductionPolicy:
    """Holds the settings for combining one unit's gradients over ranks; read when a reduction begins and ends.

    Attributes:
        divide_factor: divides the sum over ranks, a number or a scalar tensor; None is the number of ranks, which gives
            the mean.
        predivide_factor: part of ``divide_factor`` that divides before the sum; None is the library's choice, for fp16.
        hook: communication hook that replaces the reduction, called with ``hook_state`` first.
        dtype: dtype in which gradients are communicated, for the built-in low-precision hooks.
        sums_only: backends get sums, also where one that averages needs no division of its own afterwards.
        all_reduce: sum gradients over the replicate group too; False keeps sums over the shard group for a later
            backward.
        all_reduce_hook: called with the shard of each reduced gradient.
        all_reduce_hook_stream: accelerator stream that is current in the hook; None for that of reduce-scatters.
        max_in_flight: number of reductions in flight with this unit's; None is the library's choice.
        zeros_for_unused: trainable parameters that no rank has used get gradients of zeros, not None.
    """

    divide_factor: float | torch.Tensor | None = None
    predivide_factor: float | None = None
    hook: Callable[..., Any] | None = None
    hook_state: Any = None
    dtype: torch.dtype | None = None
    sums_only: bool = False
    all_reduce: bool = True
    all_reduce_hook: Callable[[torch.Tensor], object] | None = None
    all_reduce_hook_stream: Any = None
    max_in_flight: int | None = None
    zeros_for_unused: bool = False


class Phase(Enum):
    """Enumerates the states of a unit within a step."""

    IDLE = "idle"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    SUMMONED = "inside summon_full_params"


class AfterForward(Enum):
    """Enumerates what becomes of a unit's unsharded parameters at the end of its forward."""

    RESHARD = "they are freed"
    RETAIN = "they stay until the next unit has begun its all-gather, or for the next backward"
    STAY_UNSHARDED = "they stay for backward"
