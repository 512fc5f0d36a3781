"""Chooses the device on which a unit computes: the caller's, else that of the parameters, else that of the group."""

from __future__ import annotations

import functools
import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.comm import PLANNED, has_accelerator_backend, is_accelerator, moves_cpu_tensors
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.user_warnings import warn_user

_LOGGER = logging.getLogger("fsdp_flat")
_CPU = torch.device("cpu")
_is_planned: ContextVar[bool] = ContextVar("_is_planned", default=False)


@contextmanager
def planned_accelerator() -> Iterator[None]:
    """Have the planned device (``comm.PLANNED``) stand for the current accelerator inside the block."""
    token = _is_planned.set(True)
    try:
        yield
    finally:
        _is_planned.reset(token)


def current_accelerator() -> torch.device | None:
    """Return the accelerator that is current, with its index; None without one."""
    if _is_planned.get():
        return PLANNED
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def compute_device_from(device_id: object) -> torch.device | None:
    """Return the device that ``device_id`` names; None for None.

    Raises:
        OptionError: if it names no device, or one that this machine does not have.
        OptionTypeError: if it is of another type.
    """
    if device_id is None:
        return None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if isinstance(device_id, bool) or not isinstance(device_id, (int, str, torch.device)):
        raise OptionTypeError(f"device_id must be an int or a torch.device; got {device_id!r}.")
    if isinstance(device_id, int):
        if accelerator is None:
            raise OptionError(
                f"device_id={device_id} names an accelerator, but this machine has none. Leave device_id out to run on "
                'the CPU, or pass torch.device("cpu").'
            )
        return torch.device(accelerator.type, device_id)
    try:
        device = torch.device(device_id)
    except RuntimeError as error:
        raise OptionError(f"device_id={device_id!r} names no device: {error}") from error
    if device.type == "cpu":
        return _CPU
    if accelerator is None or device.type != accelerator.type:
        there = "no accelerator" if accelerator is None else f"a {accelerator.type} accelerator"
        raise OptionError(
            f"device_id={device_id!r} names a device that cannot compute here; this machine has {there}. Leave "
            "device_id out to compute where the parameters are."
        )
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
        warn_user(
            f"device_id={device_id!r} has no index; the current device, {device}, is used. Pass it with its index."
        )
    return device


def devices_of(modules: Iterable[nn.Module], without: Container[nn.Parameter] = ()) -> list[torch.device]:
    """Return the devices of the parameters that ``modules`` hold, each once; of the buffers if there are none.

    Parameters ``without`` which the module is sharded do not count.
    """
    chosen = list(modules)
    params = [p for module in chosen for p in module._parameters.values() if p is not None and p not in without]
    buffers = [b for module in chosen for b in module._buffers.values() if b is not None]
    return list(dict.fromkeys(each.device for each in params or buffers))


def default_device(
    devices: Sequence[torch.device], groups: Sequence[Any], *, offloads: bool = False
) -> tuple[torch.device, bool]:
    """Return the device for a module without a ``device_id``, and whether CPU tensors move there.

    It is the accelerator on which any parameter is. Parameters on the CPU compute there; if a group moves no CPU
    tensors, as NCCL's, they move to the current accelerator. Parameters without memory (``meta``), shards that are
    offloaded to the CPU, and a module without tensors follow the groups: to the current accelerator if one of them has
    a backend of its own for it. gloo is none, since it moves CPU tensors as well.

    Args:
        devices: those of the module's parameters.
        groups: the process groups that shard and replicate.
        offloads: shards live on the CPU, wherever the module computes.
    """
    there = next((device for device in devices if is_accelerator(device) and device.type != "meta"), None)
    if there is not None:
        return there, False
    accelerator = current_accelerator()
    if accelerator is None:
        return _CPU, False
    own = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    moves = not all(map(moves_cpu_tensors, own))
    follows_groups = offloads or not devices or any(device.type == "meta" for device in devices)
    if not moves and not (follows_groups and any(has_accelerator_backend(group, accelerator) for group in own)):
        return _CPU, False
    if moves and _CPU.type in {device.type for device in devices}:
        backends = {str(dist.get_backend(group)) for group in own if not moves_cpu_tensors(group)}
        _log_move(accelerator, ", ".join(sorted(backends)))
    return accelerator, True


@functools.cache
def _log_move(accelerator: torch.device, backends: str) -> None:
    """Log once for each device that parameters move to it."""
    _LOGGER.info(
        "parameters on the CPU move to %s, the current accelerator, because the process group (%s) moves no CPU "
        "tensors; make the data there too, or pass device_id for another device",
        accelerator,
        backends,
    )


def groups_from(process_group: Any, device_mesh: Any) -> list[Any]:
    """Return the process groups that the arguments of a constructor name, which may not be validated yet."""
    if device_mesh is not None:
        with suppress(Exception):
            return [device_mesh.get_group(dim) for dim in range(device_mesh.ndim)]
        return []
    if process_group is not None:
        return list(process_group) if isinstance(process_group, tuple) else [process_group]
    return [dist.group.WORLD] if dist.is_initialized() else []
