"""Validates the constructor's arguments, and defines the types of a unit's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.api import BackwardPrefetch, CPUOffload, MixedPrecision, member_of
from fsdp_flat.comm import ShardingGroups, Strategy
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.flat import RowSharding
from fsdp_flat.runtime.precision import Precision
from fsdp_flat.user_warnings import warn_user

SyncStates = Literal["warn", "broadcast", "auto", "raise"]


@dataclass(frozen=True, slots=True)
class Ignored:
    """Holds the modules and parameters that no unit manages; buffers of ignored modules are not touched either."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """Holds the validated options of one unit.

    Attributes:
        strategy: row of the strategy table.
        groups: the shard and the replicate group.
        device: the compute device.
        device_given: the caller passed the device, so parameters are moved there.
        use_orig_params: original parameters stay visible, as 1-D slices.
        backward_prefetch: when backward begins the next all-gather; None for never.
        forward_prefetch: forward begins the next all-gather early, also where streams would overlap anyway.
        limit_all_gathers: kept for compatibility with FSDP1; the number of unsharded units is bounded in any case.
        sync_states: action if ranks start from different weights.
        precision: dtypes and casts.
        offload_params: shards and gradients, and so the optimizer, live on the CPU.
        param_init_fn: initialises a module that is on the meta device.
        rows: shards each parameter by itself and shows DTensors; None for flat parameters.
        mixed_precision, cpu_offload: the constructor's arguments, which the wrapper shows.
    """

    strategy: Strategy
    groups: ShardingGroups
    device: torch.device
    device_given: bool
    use_orig_params: bool
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    sync_states: SyncStates
    precision: Precision
    offload_params: bool
    param_init_fn: Callable[[nn.Module], None] | None
    rows: RowSharding | None = None
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)


class StateHandler(Protocol):
    """Describes a caller's functions to save (``merge``) and load (``split``) one optimizer state."""

    @property
    def merge(self) -> Callable[..., torch.Tensor]: ...

    @property
    def split(self) -> Callable[..., torch.Tensor]: ...


@dataclass(slots=True, eq=False)
class BackgroundWork:
    """Holds the process group of a thread beside the step, and that thread's newest work.

    Attributes:
        group: a gloo group, separate from the collectives of training. It is created once, because another group of the
            same ranks would collide with its keys in the store.
        finish: waits for the newest work, and returns its error if the caller has not seen it yet, else an empty text.
    """

    group: dist.ProcessGroup
    finish: Callable[[], str] = str


def prefetch_from(value: object) -> BackwardPrefetch | None:
    """Convert ``value``, a ``BackwardPrefetch`` member (or torch's) or None, to our own member or None.

    Raises:
        OptionError: ``value`` is anything else.
    """
    return None if value is None else member_of(BackwardPrefetch, value, "backward_prefetch", others=" or None")


def sync_states_from(value: object) -> SyncStates:
    """Convert ``sync_module_states`` to an action.

    False warns if ranks differ, True broadcasts from rank 0, ``"auto"`` broadcasts only if ranks differ, ``"raise"``
    raises.

    Raises:
        OptionError: ``value`` is anything else.
    """
    if value is None or isinstance(value, int):
        return "broadcast" if value else "warn"
    if value == "auto":
        return "auto"
    if value == "raise":
        return "raise"
    raise OptionError(f'sync_module_states must be True, False, "auto" or "raise"; got {value!r}.')


def compute_device_from(device_id: object) -> tuple[torch.device, bool]:
    """Return the compute device, and whether the caller passed it.

    Args:
        device_id: an index of the current accelerator, a device, or None for the current accelerator, or the CPU if
            there is none. ``cpu:0`` is the CPU.

    Raises:
        OptionTypeError: ``device_id`` has another type.
        OptionError: this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device_id is None:
        if accelerator is None:
            return torch.device("cpu"), False
        return torch.device(accelerator.type, torch.accelerator.current_device_index()), False
    if isinstance(device_id, bool) or not isinstance(device_id, (int, str, torch.device)):
        raise OptionTypeError(f"device_id must be an int or a torch.device; got {device_id!r}.")
    if isinstance(device_id, int):
        if accelerator is None:
            raise OptionError(
                f"device_id={device_id} names an accelerator, but this machine has none. Leave device_id out to run on "
                'the CPU, or pass torch.device("cpu").'
            )
        return torch.device(accelerator.type, device_id), True
    try:
        device = torch.device(device_id)
    except RuntimeError as error:
        raise OptionError(f"device_id={device_id!r} names no device: {error}") from error
    if device.type == "cpu":
        return torch.device("cpu"), True
    if accelerator is None or device.type != accelerator.type:
        there = "no accelerator" if accelerator is None else f"a {accelerator.type} accelerator"
        raise OptionError(
            f"device_id={device_id!r} names a device that cannot compute here; this machine has {there}. Leave "
            "device_id out to have the best there is."
        )
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
        warn_user(
            f"device_id={device_id!r} has no index; the current device, {device}, is used. Pass it with its index.",
            stacklevel=6,
        )
    return device, True


def offloads_params(cpu_offload: object) -> bool:
    """Return whether a ``CPUOffload`` (ours or torch's) or None requests shards on the CPU.

    Raises:
        OptionTypeError: ``cpu_offload`` has another type.
    """
    if cpu_offload is None:
        return False
    if not any(kind.__name__ == "CPUOffload" for kind in type(cpu_offload).__mro__):
        raise OptionTypeError(f"cpu_offload must be a CPUOffload; got {type(cpu_offload).__name__}.")
    return bool(getattr(cpu_offload, "offload_params", False))
