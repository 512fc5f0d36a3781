"""Defines the enums and option records of FSDP1's public interface, with its names, values and defaults.

``fsdp_flat.api`` mirrors ``torch.distributed.fsdp.api``. Everything here is a plain value without behaviour, so every
layer may import it; :func:`member_of` and :func:`is_a` accept torch's own, which clients may have bound earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp_flat.errors import FsdpFlatError, OptionError, OptionTypeError

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class _NamedEnum(Enum):
    """Compares members as equal to those of the same name in another library's enum of the same name.

    For example torch's ``ShardingStrategy.FULL_SHARD``, still used by a client that moved over, equals ours.
    """

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same_enum = isinstance(other, Enum) and type(other).__name__ == type(self).__name__
        return same_enum and other.name == self.name  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self.name)  # as every Enum's, so that both find the same dict entry


_Member = TypeVar("_Member", bound=_NamedEnum)


def member_of(
    kind: type[_Member],
    value: object,
    argument: str,
    *,
    others: str = "",
    error: type[FsdpFlatError] = OptionError,
) -> _Member:
    """Return the member of ``kind`` that equals ``value``, a member of it or of torch's own enum of that name.

    Without one, an ``error`` is raised that lists the choices, and ``others``.
    """
    if isinstance(value, kind):
        return value
    for member in kind:
        if member == value:
            return member
    choices = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
    raise error(f"{argument} must be one of {choices}{others}; got {value!r} of type {type(value).__name__}.")


def flag(value: object, argument: str) -> bool:
    """Return an argument as a bool; raise an OptionTypeError for a text that says no, which Python counts as True."""
    if isinstance(value, str) and value.strip().lower() in ("0", "false", "no", "none", "off"):
        raise OptionTypeError(
            f"{argument} must be True or False; got {value!r}, a text, which counts as True in Python. A command line "
            "or a config file may have made it: convert it there."
        )
    return bool(value)


def is_a(value: object, class_name: str) -> bool:
    """Return whether ``value`` is an option object of the class of this name, ours or torch's, or of a subclass."""
    return any(kind.__name__ == class_name for kind in type(value).__mro__)


class ShardingStrategy(_NamedEnum):
    """Selects how parameters are sharded, and when they are freed.

    | member | sharded over | replicated over | freed after forward | after backward |
    |---|---|---|---|---|
    | ``FULL_SHARD`` | the group | nothing | yes | yes |
    | ``SHARD_GRAD_OP`` | the group | nothing | no | not in ``no_sync`` |
    | ``NO_SHARD`` | nothing | the group | nothing to free | nothing to free |
    | ``HYBRID_SHARD`` | the inner (shard) group | the outer group | yes | yes |
    | ``_HYBRID_SHARD_ZERO2`` | the inner (shard) group | the outer group | no | not in ``no_sync`` |

    A text is the name of a member, in any case. With a size, ``"FULL_SHARD:40GB"`` or ``"HYBRID_SHARD:40GB"``, it has a
    memory budget: besides the outermost unit's, the parameters of the last units of the forward, which backward
    needs first, stay until then, as far as this many bytes (``GB``, 10**9, or ``GiB``, 2**30) a rank go. One budget is
    for a tree of units. (Not in FSDP1.)
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(_NamedEnum):
    """Selects when backward begins the next unit's all-gather.

    ``BACKWARD_PRE`` begins it before the gradients of the current unit are computed, ``BACKWARD_POST`` after.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """Sets dtypes of compute, gradient reduction and buffers; ``None`` keeps the original dtype.

    Args:
        param_dtype: dtype of the unsharded parameters, so of compute.
        reduce_dtype: dtype in which gradients are reduced; ``None`` follows ``param_dtype``.
        buffer_dtype: dtype of floating-point buffers.
        keep_low_precision_grads: leave reduced gradients in ``reduce_dtype``.
        cast_forward_inputs: every unit casts its floating-point inputs to ``param_dtype``.
        cast_root_forward_inputs: the outermost unit casts its floating-point inputs.
        _module_classes_to_ignore: classes that an auto-wrap policy keeps in full precision, as separate units.
        master_dtype: dtype of the shards, so of the optimizer's work, if the model was built in a shorter one; compute
            stays in ``param_dtype`` or the model's own dtype. (Not in FSDP1.)
        full_precision_modules: classes whose parameters stay in their own dtype inside their unit, with inputs cast to
            it and outputs cast back. (Not in FSDP1.)
        uncast_inputs: names of forward arguments that are not cast. (Not in FSDP1.)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[torch.nn.Module]] = (_BatchNorm,)
    master_dtype: torch.dtype | None = None
    full_precision_modules: Sequence[type[torch.nn.Module]] = ()
    uncast_inputs: Sequence[str] = ()


@dataclass
class CPUOffload:
    """Selects what lives on the CPU.

    Args:
        offload_params: shards, their gradients and so the optimizer.
        offload_optimizer: the optimizer's states, between its steps, as :func:`fsdp_flat.offload_optimizer` does; the
            accelerator runs the steps. (Not in FSDP1.)
    """

    offload_params: bool = False
    offload_optimizer: bool = False


class StateDictType(_NamedEnum):
    """Selects the values of a state dict: full tensors, flat shards, or per-parameter shards."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(_NamedEnum):
    """Selects the keys of optimizer state: parameter names, or the ids by which optimizers number parameters."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """Holds options of every model state dict: ``offload_to_cpu`` moves values to the CPU."""

    offload_to_cpu: bool = False
    rank0_only = False  # the class default; Full configs make it a field


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Holds options of ``FULL_STATE_DICT``.

    With ``rank0_only`` other ranks get ignored parameters only, and no buffers.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Holds options of ``LOCAL_STATE_DICT``."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Holds options of ``SHARDED_STATE_DICT``; ``_use_dtensor`` is set from the device mesh.

    With ``boxes`` values are neither ShardedTensors nor DTensors but chunks of the live shard, which
    ``torch.distributed.checkpoint`` saves and loads without any communication here. (Not in FSDP1.) Optimizer states
    that have a handler are exchanged, since it makes full tensors of them.
    """

    _use_dtensor: bool = False
    boxes: bool = False


@dataclass
class OptimStateDictConfig:
    """Holds options of every optimizer state dict."""

    offload_to_cpu: bool = True
    rank0_only = False  # the class default; Full configs make it a field


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Holds options of a full optimizer state dict."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Holds options of a local optimizer state dict."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Holds options of a sharded optimizer state dict; ``boxes`` as in :class:`ShardedStateDictConfig`."""

    _use_dtensor: bool = False
    boxes: bool = False


@dataclass
class StateDictSettings:
    """Holds the settings that ``set_state_dict_type`` sets and ``get_state_dict_type`` returns."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


@dataclass(frozen=True, slots=True)
class StatePart:
    """Holds one rank's part of an optimizer's state. (Not in FSDP1.)

    Attributes:
        tensor: the state as the rank's optimizer keeps it, of any shape.
        start: first element of the rank's slice of the flattened parameter.
        stop: the element after its last; the slices of all ranks are contiguous.
    """

    tensor: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class OptimStateHandler:
    """Holds the functions that merge and split one optimizer state. (Not in FSDP1.)

    Attributes:
        merge: ``merge(parts, shape)`` returns the tensor to save, made from every rank's part. ``parts`` are in the
            order of the slices, without ranks that hold no elements or no such state. ``shape`` is the parameter's.
        split: ``split(saved, shape, start, stop)`` returns the state of a rank's optimizer for the elements ``start``
            to ``stop`` of the flattened parameter.
    """

    merge: Callable[[Sequence[StatePart], torch.Size], torch.Tensor]
    split: Callable[[torch.Tensor, torch.Size, int, int], torch.Tensor]
