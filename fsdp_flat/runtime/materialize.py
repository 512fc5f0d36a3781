"""Moves a module's own tensors to the compute device, initialises them, and compares or broadcasts their values.

Ranks that started from different weights would train on a mixture of them. Tensors that left the meta device and were
not written since are found by a mark in their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.comm import ErrorTexts, ShardingGroups, connected, find_disagreement, fingerprints, named_errors
from fsdp_flat.core import (
    ParamGroup,
    Site,
    Unit,
    adapter_if_dtensor,
    has_values,
    is_subclass,
    local_of,
    plain_tensors_in,
    unguarded,
)
from fsdp_flat.core.options import Ignored, SyncStates, UnitOptions
from fsdp_flat.core.quantized import move_constants, quant_state_of
from fsdp_flat.core.torch_core import TorchDispatchMode
from fsdp_flat.errors import MaterializeError, OptionError, UsageError, some_of
from fsdp_flat.layout import join_fqn
from fsdp_flat.runtime.param_walk import named_sites
from fsdp_flat.user_warnings import warn_user


def _own_tensors(module: nn.Module, ignored: Ignored) -> list[torch.Tensor]:
    params = [p for p in module._parameters.values() if p is not None and not ignored.has(p)]
    return [*params, *(b for b in module._buffers.values() if b is not None)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return adapter_if_dtensor(tensor).to_local(tensor.detach())


def materialize(
    modules: Sequence[tuple[str, nn.Module]], root: nn.Module, options: UnitOptions, ignored: Ignored
) -> bool:
    """Allocate meta-device tensors on the compute device and initialise them; return whether there were any.

    ``param_init_fn`` is called with every module in turn. By default each module that holds a meta tensor itself gets
    memory, and its ``reset_parameters`` is called. Parameters that are tied anywhere below ``root`` are tied again.
    """
    meta = [each for each in modules if any(tensor.is_meta for tensor in _own_tensors(each[1], ignored))]
    if not meta:
        return False
    init_fn = options.param_init_fn
    if init_fn is not None and not callable(init_fn):
        raise OptionError(f"param_init_fn must be callable; got {init_fn!r}.")
    sites: dict[nn.Parameter, list[Site]] = {}
    for site, param in named_sites(root):
        sites.setdefault(param, []).append(site)
    with torch.no_grad(), _MarksEmpty():
        if init_fn is not None:
            for name, module in modules:
                with _naming(f"param_init_fn, called with module {_place(name, module)},"):
                    init_fn(module)
        else:
            for name, module in meta:
                _reset(name, module, options.device)
    for before, (first, *others) in sites.items():
        made = first.module._parameters[first.name]
        if made is not None and quant_state_of(before) is not None and quant_state_of(made) is None:
            made.quant_state = quant_state_of(before)  # type: ignore[attr-defined]  # lost with the class
        for other in others:
            other.module._parameters[other.name] = made
    left = [
        join_fqn(name, key)
        for name, module in modules
        for key, param in module._parameters.items()
        if param is not None
        and not ignored.has(param)
        and any(each.is_meta for each in plain_tensors_in(local_of(param)))
    ]
    if left:
        raise OptionError(
            f"param_init_fn left parameters on the meta device: {some_of(left, 5)}. It is called with every module and "
            "has to give each one's own tensors memory, as in module.to_empty(device=..., recurse=False), and then "
            "values."
        )
    return True


def _reset(name: str, module: nn.Module, device: torch.device) -> None:
    where = _place(name, module)
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise MaterializeError(
            f"Module {where} holds parameters or buffers on the meta device but has no reset_parameters() to "
            "initialise them. Give it one, or pass param_init_fn."
        )
    module.to_empty(device=device, recurse=False)
    with _naming(f"reset_parameters() of module {where}"):
        reset()


def _place(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})"


@contextmanager
def _naming(call: str) -> Iterator[None]:
    """Warn which ``call`` of the caller's code failed, if it does; its error stays as it is."""
    try:
        yield
    except BaseException:
        warn_user(f"{call} failed while leaving the meta device.")
        raise


def move_to_device(modules: Iterable[tuple[str, nn.Module]], options: UnitOptions, ignored: Ignored) -> None:
    """Move CPU parameters and buffers to the device that the caller passed; with ``per_param`` meta tensors stay."""
    device, device_given = options.device, options.device_given
    elsewhere: dict[torch.device, str] = {}
    on_cpu: list[torch.Tensor] = []
    for name, module in modules:
        for tensor in _own_tensors(module, ignored):
            if tensor.device.type == "cpu":
                on_cpu.append(tensor)
            elif not (options.api.stays_on_meta and tensor.is_meta):
                elsewhere.setdefault(tensor.device, name)
    if len(elsewhere) > 1:
        raise UsageError(
            f"One unit must be on one device; got {', '.join(f'{d} ({n!r})' for d, n in elsewhere.items())}."
        )
    there = next(iter(elsewhere), None)
    if there is not None and on_cpu and not device_given:
        raise UsageError(
            f"A unit has tensors on the CPU and on {there}. Pass device_id={there!r} to have the rest moved there."
        )
    if there is not None and device_given and there != device:
        raise OptionError(
            f"device_id is {device}, but {elsewhere[there]!r} is on {there}. Move the module or change device_id."
        )
    if device_given and device.type != "cpu":
        with torch.no_grad():
            for tensor in on_cpu:
                tensor.data = tensor.data.to(device)
        move_constants(on_cpu, device)


_WEIGHTS = ErrorTexts(
    "comparing weights",
    "Ranks start from different weights.",
    'To mend it, pass sync_module_states="auto" (or True) to start from rank 0\'s weights, seed every rank alike, or '
    "load a checkpoint on every rank.",
)


def agree_on_weights(named: Sequence[tuple[str, torch.Tensor]], sync: SyncStates, groups: ShardingGroups) -> bool:
    """Compare initial weights across ranks; return whether those of rank 0 must be broadcast.

    Every rank of the groups must call this with tensors of the same shapes.
    """
    if sync == "broadcast":
        return True
    if not connected(groups.rank_groups):
        return False
    named = [
        (n, each) for n, each in named if each.layout is torch.strided and type(each.data) in (torch.Tensor, DTensor)
    ]
    prints = fingerprints([_local(each) for _, each in named])
    # Names may differ between ranks that ignore different modules.
    lines = [f"{print_}\t{name!r}" for (name, _), print_ in zip(named, prints, strict=True)]
    found = find_disagreement(lines, None, groups.rank_groups, _WEIGHTS)
    if found is not None and sync == "raise":
        raise found
    if found is not None and sync == "warn" and all(rank_group.rank == 0 for rank_group in groups.rank_groups):
        warn_user(f"{found} As it is, each rank's shard will hold its own.")
    return found is not None and sync == "auto"


@torch.no_grad()
def broadcast_from_rank_zero(tensors: Iterable[torch.Tensor], groups: ShardingGroups) -> None:
    """Overwrite ``tensors`` with those of rank 0. Every rank of the groups must call this with the same shapes."""
    targets = list(map(_local, dict.fromkeys(tensors)))
    for rank_group in reversed(connected(groups.rank_groups)):
        group = rank_group.process_group
        source = dist.get_global_rank(group, 0)
        works = []
        with named_errors("the broadcast of rank 0's weights", rank_group):
            for data in targets:
                received = data.contiguous()
                # Broadcast bytes: backends support few dtypes (gloo neither float8 nor int16).
                sent = received.view(-1).view(torch.uint8)
                works.append((dist.broadcast(sent, src=source, group=group, async_op=True), received, data))
            for work, received, target in works:
                if work is not None:
                    work.wait()
                if received is not target:
                    target.copy_(received)


# By bytes per element: the dtype for reading the bits, and a pattern, a NaN in every floating-point dtype, that no
# initialisation writes.
_MARKS = {
    8: (torch.int64, 0x7FFDF1A77FEDF1A7),
    4: (torch.int32, 0x7FEDF1A7),
    2: (torch.int16, 0x7FED),
    1: (torch.uint8, 0x7F),
}
# 0x7F is a possible one-byte integer, but not in this many elements at once.
_FEWEST_BYTES = 8
_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty}
_EMPTY.add(_aten.new_empty_strided)


class _MarksEmpty(TorchDispatchMode):
    """Fills memory that is allocated without being written (``to_empty``, ``torch.empty``) with the mark."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in plain_tensors_in(local_of(result)) if func.overloadpacket in _EMPTY else ():
            bits, mark = _bits(each)
            if bits is not None:
                bits.fill_(mark)
        return result


def marking_empty(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a conversion that does as ``fn`` and marks memory that ``fn`` leaves unwritten."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), _MarksEmpty():
            return fn(tensor)

    return convert


def _bits(tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    local = _local(tensor)
    if (
        local.is_meta
        or not has_values(local)
        or is_subclass(local)
        or local.layout is not torch.strided
        or local.is_quantized
        or local.itemsize not in _MARKS
    ):
        return None, 0
    dtype, mark = _MARKS[local.itemsize]
    return local.view(dtype), mark


def is_marked(tensor: torch.Tensor) -> bool:
    """Return whether nothing was written to ``tensor``, of any class, since it left the meta device."""
    return all(map(_is_marked, plain_tensors_in(local_of(tensor))))


def _is_marked(tensor: torch.Tensor) -> bool:
    bits, mark = _bits(tensor)
    if bits is None or bits.numel() == 0:
        return False
    if tensor.dtype in (torch.int8, torch.uint8) and bits.numel() < _FEWEST_BYTES:
        return False
    # For most tensors the first element shows that they were written.
    return bool((bits[(0,) * bits.dim()] == mark).item() and (bits == mark).all())


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Describes a tensor of a unit that had no values when the unit was built; ``read`` returns this rank's part."""

    fqn: str
    read: Callable[[], torch.Tensor | None]
    is_param: bool

    @property
    def is_still(self) -> bool:
        """Return whether the tensor still has no values."""
        with unguarded():
            tensor = self.read()
            if tensor is None or tensor.numel() == 0 or not has_values(tensor):
                return False
            return all(
                # A conversion to another dtype keeps a NaN, but not its bits.
                each.isnan().all() if each.is_floating_point() and each.itemsize > 1 else _is_marked(each)
                for each in plain_tensors_in(tensor)
            )


def unwritten_params(unit: Unit, param_group: ParamGroup) -> list[Unwritten]:
    """Return the parameters of a group of ``unit``, whose memory is new. Values that a caller assigns count too."""

    def read(index: int) -> torch.Tensor:
        unit.adopt_assigned()
        return param_group.local(index)

    return [
        Unwritten(param_info.fqn, partial(read, index), is_param=True)
        for index, param_info in enumerate(param_group.layout.param_infos)
    ]
