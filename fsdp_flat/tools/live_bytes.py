"""Counts the bytes that a step holds after each operator, on tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from fsdp_flat.comm import PLANNED, is_accelerator
from fsdp_flat.tools.planned_job import Machine
from fsdp_flat.tools.torch_tools import FakeTensor, TorchDispatchMode, has_left_fake_mode

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS = KINDS = range(5)

# Collectives of which a rank sends its part of the first tensor to every other rank.
_GATHERS = {"_allgather_base_", "allgather_", "alltoall_base_", "broadcast_"}
_COPIES = {"_to_copy", "clone", "copy"}
_DEVICE = torch.ops.prim.device.default


class _Memory:
    """Describes the memory of one storage, as it was counted last."""

    __slots__ = ("kind", "nbytes", "on_host", "storage")

    def __init__(self, storage: weakref.ref[torch.UntypedStorage], kind: int, *, on_host: bool) -> None:
        self.storage, self.kind, self.on_host = storage, kind, on_host
        self.nbytes = 0


def _on_planned_device(value: Any) -> Any:
    """Return what stands on the planned accelerator for a tensor of the caller: none of theirs can be there."""
    is_real = type(value) in (torch.Tensor, nn.Parameter) and not isinstance(value, FakeTensor)
    if is_real and value.dim() and value.layout is torch.strided:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=PLANNED)
    return value


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators inside the block have returned, while they are alive.

    Memory that ``torch.empty`` and similar functions return may be resized, and is measured again before each operator;
    that of other operators stays as it is.

    Args:
        machine: is told of operations and of bytes sent.
        on_change: called after each operator.
        on_accelerator: memory of tensors that are not on the planned accelerator is the host's.

    Attributes:
        kind: what memory is for that is allocated from now on, unless it is for communication.
        nbytes: bytes by kind.
        host_nbytes: bytes of the host.
    """

    def __init__(self, machine: Machine, on_change: Callable[[], object], *, on_accelerator: bool) -> None:
        super().__init__()
        self._machine, self._on_change, self._on_accelerator = machine, on_change, on_accelerator
        self.kind = PARAMETERS
        self.nbytes = [0 for _ in KINDS]
        self.host_nbytes = 0
        self._known: dict[int, _Memory] = {}
        self._resizable: dict[int, _Memory] = {}

    def use(self, tensor: torch.Tensor, kind: int) -> None:
        """Count the memory of a tensor as what it is for; that of gathered parameters is resized."""
        key = tensor.untyped_storage()._cdata
        memory = self._known.get(key)
        if memory is None:
            return
        if kind == GATHERED:
            self._resizable[key] = memory
        if memory.kind != kind:
            self._set_kind(memory, kind)

    def communicate(self, tensor: torch.Tensor, *, is_gradient: bool) -> None:
        """Count the memory of a tensor that is sent or received, if it is not that of parameters."""
        memory = self._known.get(tensor.untyped_storage()._cdata)
        if memory is not None and memory.kind != PARAMETERS:
            self._set_kind(memory, GRADIENTS if is_gradient else GATHERED)

    def _set_kind(self, memory: _Memory, kind: int) -> None:
        nbytes = memory.nbytes
        self._add(memory, -nbytes)
        memory.kind = kind
        self._add(memory, nbytes)

    def _note(self, tensor: torch.Tensor, kind: int, *, is_empty: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or tensor.device.type == "meta":
            return
        on_host = self._on_accelerator and not is_accelerator(tensor.device)
        reference = weakref.ref(storage, partial(self._freed, key))
        memory = self._known[key] = _Memory(reference, kind, on_host=on_host)
        self._add(memory, storage.nbytes())
        if is_empty:
            self._resizable[key] = memory

    def _add(self, memory: _Memory, nbytes: int) -> None:
        memory.nbytes += nbytes
        if memory.on_host:
            self.host_nbytes += nbytes
        else:
            self.nbytes[memory.kind] += nbytes

    def _freed(self, key: int, _reference: object) -> None:
        memory = self._known.pop(key)
        self._resizable.pop(key, None)
        self._add(memory, -memory.nbytes)

    def measure(self) -> None:
        """Count memory that was resized since the last operator."""
        for memory in list(self._resizable.values()):
            storage = memory.storage()
            if storage is not None and storage.nbytes() != memory.nbytes:
                self._add(memory, storage.nbytes() - memory.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # The device of a tensor is asked for most, and known in Python.
            return args[0].device if func is _DEVICE else func(*args, **kwargs)
        if has_left_fake_mode():
            return func(*args, **kwargs)  # with values
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # of a DTensor, or a tensor of others: its operators on these come next
        self.measure()
        self._on_change()
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d":
            self._count_collective(name, args)
        if name.startswith("_fused_") and not func._schema.returns:
            return None  # a fused update has no kernel without memory, and allocates nothing
        if self._on_accelerator:
            args, kwargs = tree_map(_on_planned_device, (args, kwargs))
        result = func(*args, **kwargs)
        kind = self.kind if self.kind in (PARAMETERS, OPTIMIZER) else self._kind_of_result(name, args, kwargs)
        for tensor in _tensors_in((result,)):
            self._note(tensor, kind, is_empty="empty" in name)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self._machine.run(int(formula(*args, **kwargs, out_val=result)))
        self._on_change()
        return result

    def _kind_of_result(self, name: str, args: Any, kwargs: Any) -> int:
        """Return what the result of an operator is for: what is computed from gradients is a gradient.

        Memory that ``torch.empty`` returned, and that an operator on gradients takes, is for gradients too.
        """
        keys = [tensor.untyped_storage()._cdata for tensor in _tensors_in((*args, *kwargs.values()))]
        kinds = {self._known[key].kind for key in keys if key in self._known}
        if GRADIENTS in kinds:
            for memory in [self._resizable[key] for key in keys if key in self._resizable]:
                if memory.kind == ACTIVATIONS:
                    self._set_kind(memory, GRADIENTS)
            return GRADIENTS
        if (name in _COPIES or "empty" in name) and kinds & {PARAMETERS, GATHERED}:
            return GATHERED
        return self.kind

    def _count_collective(self, name: str, args: Any) -> None:
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        size, first = group.size(), sum(tensor.nbytes for tensor in _tensors_in(args[:1]))
        gathers = name in _GATHERS
        for tensor in _tensors_in(args):
            self.communicate(tensor, is_gradient=not gathers)
        if gathers:
            sent = first * (size - 1) / size
        elif name == "allreduce_":
            sent = 2 * first * (size - 1) / size
        else:  # of a reduce-scatter the result comes first
            sent = first * (size - 1.0)
        end = self._machine.send(sent)
        if self._on_accelerator:  # the work of a stream is in order; without streams the end of a backward waits
            self._machine.current.wait_until(end)


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results of an operator, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
