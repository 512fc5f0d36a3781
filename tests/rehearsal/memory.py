"""Notes which storage each operation reads and writes, on which stream, and where the host waits.

A dispatch mode sees every operation, those of autograd and optimizers too, and takes from its schema which tensors it
reads and writes. Operations on tensors of the accelerator go to the current stream, all others run on the host at
once. A storage gets memory from the stream that is current where it is made, and gives it back when it dies or is
resized to no bytes, as with CUDA's caching allocator.

Values never leave the accelerator (see ``fake_device``): a copy to the host gives zeros, ``item()`` gives one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal.check import Block, Checker
from tests.rehearsal.streams import Machine, Queue

aten = torch.ops.aten
_ROOT = str(Path(__file__).resolve().parents[2])
_LIBRARY, _TESTS = str(Path(_ROOT, "fsdp_flat")), str(Path(_ROOT, "tests"))
# Files whose functions pass operations on: of the rehearsal, and the one that stands in for torch.autograd.backward.
_WATCHERS = {
    *(str(Path(__file__).resolve().with_name(name)) for name in ("memory.py", "overlap.py")),
    str(Path(_LIBRARY, "guards", "torch_functions.py")),
}
_MOST_LINES = 3
# These give memory whose content is undefined, and write nothing.
_EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
# These take from their argument its shape, dtype and device, and read no values.
_READ_SHAPES = {"aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like"} | {
    f"aten::new_{how}" for how in ("empty", "empty_strided", "zeros", "ones", "full")
}
# The result depends on values, so the host waits for them.
_READ_BY_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}


def where_in_library() -> str:
    """Return the innermost lines of fsdp_flat on the stack, or the innermost line of the tests."""
    frame = sys._getframe(1)
    lines: list[str] = []
    elsewhere = "outside of fsdp_flat"
    while frame is not None and len(lines) < _MOST_LINES:
        path = frame.f_code.co_filename
        if path.startswith(_LIBRARY):
            lines.append(f"{path[len(_ROOT) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}")
        elif path.startswith(_ROOT) and "/rehearsal/" in path and "/test_" in path and not lines:
            elsewhere = f"{path[len(_ROOT) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines) or elsewhere


def is_issued_by_library() -> bool:
    """Say whether fsdp_flat issues the present operation, and not a module, autograd or an optimizer."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith((_LIBRARY, _TESTS)) and path not in _WATCHERS:
            return bool(path.startswith(_LIBRARY))
        frame = frame.f_back
    return False


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class MemoryRecorder(TorchDispatchMode):
    """Passes each operation on and notes its accesses.

    Args:
        machine: the streams.
        checker: takes the accesses.
        labels: returns names of storages, by ``_cdata``.

    Attributes:
        log: the operations and ``"wait"`` for each wait of the host, in the order in which the host issues them.
    """

    def __init__(self, machine: Machine, checker: Checker, labels: Callable[[], dict[int, str]]) -> None:
        super().__init__()
        self._machine = machine
        self._checker = checker
        self._labels = labels
        self._blocks: dict[int, Block] = {}
        self.log: list[str] = []
        machine.on_host_wait = self._on_host_wait

    def _on_host_wait(self, kind: str, op: str) -> None:
        self.log.append("wait")
        self._checker.report(f"host wait: {kind}", f"{op} ({where_in_library()})")

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lives on the accelerator."""
        return tensor.device.type == self._machine.device.type

    # -- storages ------------------------------------------------------------------------------------------------

    def block_of(self, tensor: torch.Tensor, op: str = "", *, is_new: bool = False) -> Block:
        """Return the block that holds a tensor's data."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            owner: Queue = self._machine.host
            if self.is_on_device(tensor):
                owner = self._machine.current if is_new else self._machine.compute
            block = self._allocate(storage, owner, f"a tensor made by {op} ({where_in_library()})" if op else "")
        return block

    def _allocate(self, storage: torch.UntypedStorage, owner: Queue, label: str) -> Block:
        key = storage._cdata
        if key not in self._blocks:
            weakref.finalize(storage, self._died, key).atexit = False
        block = self._checker.allocate(owner, label or f"a tensor ({where_in_library()})")
        self._blocks[key] = block
        return block

    def _died(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._checker.free(block, "died in " + where_in_library())

    def resize_storage(
        self, resize: Callable[..., torch.UntypedStorage], storage: torch.UntypedStorage, nbytes: int
    ) -> torch.UntypedStorage:
        """Stand in for ``UntypedStorage.resize_``: old memory is given back, and new memory taken."""
        before = storage.nbytes()
        block = self._blocks.get(storage._cdata)
        result = resize(storage, nbytes)
        if storage.device.type == self._machine.device.type and nbytes != before:
            if block is None:
                block = self._allocate(storage, self._machine.compute, "")
            if before:
                self._checker.free(block, where_in_library())
            if nbytes:
                self._allocate(storage, self._machine.current, block.label)
        return result

    def swap_storages(
        self, swap: Callable[..., None], first: torch.UntypedStorage, second: torch.UntypedStorage
    ) -> None:
        """Stand in for ``UntypedStorage._swap_data_ptr_``: what one of two storages had, the other has."""
        swap(first, second)
        blocks = [self._blocks.pop(storage._cdata, None) for storage in (first, second)]
        for storage, block, own in zip((second, first), blocks, reversed(blocks), strict=True):
            if block is not None:
                block.label = own.label if own is not None else block.label
                self._blocks[storage._cdata] = block

    def name_storages(self) -> None:
        """Give blocks the names that the model gives their storages."""
        for key, label in self._labels().items():
            if key in self._blocks:
                self._blocks[key].label = label

    # -- accesses ------------------------------------------------------------------------------------------------

    def note(
        self,
        op: str,
        queue: Queue,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
    ) -> None:
        """Note one operation on ``queue``."""
        self.log.append(op)
        stamp = self._machine.launch(queue)
        where = where_in_library()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel() > 0:
                    block = self.block_of(tensor)
                    self._checker.access(block, queue, op=op, writes=is_write, where=where, stamp=stamp)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if name.startswith("c10d"):
            raise AssertionError(
                f"{name} was called past tests/rehearsal/fake_collectives.py, which has to imitate it."
            )
        if name == "aten::is_pinned":
            return self.block_of(args[0]).is_pinned
        if name in _COPIES:
            return self._copy(func, name, args, kwargs)
        pins = bool(kwargs.pop("pin_memory", False)) or name == "aten::_pin_memory"
        reads, writes = _operands(func, args, kwargs)
        on_device = [self.is_on_device(tensor) for tensor in (*reads, *writes)]
        if name in _READ_BY_HOST and any(on_device):
            return self._read_by_host(func, name, reads)
        self.check_devices(name, [*reads, *writes])
        result = self._run(func, name, args, kwargs)
        outputs = _tensors(result)
        held = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in held]
        for tensor in fresh:
            self.block_of(tensor, name, is_new=True).is_pinned = pins
        if writes or fresh or not outputs:
            made = [] if name in _EMPTY else fresh
            queue = self._machine.current if any(map(self.is_on_device, (*reads, *writes, *fresh))) else None
            read = [] if name in _READ_SHAPES else reads
            self.note(name, queue or self._machine.host, read, [*writes, *made])
        return result

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "aten::_pin_memory":
            return args[0].clone()
        return func(*args, **kwargs)

    def _read_by_host(self, func: Any, name: str, reads: list[torch.Tensor]) -> Any:
        self.note(name, self._machine.current, reads)
        self._machine.host_wait("a value is read", name, self._machine.current.clock)
        if name == "aten::_local_scalar_dense":
            return torch.ones((), dtype=reads[0].dtype).item()
        if name == "aten::equal":
            return True
        raise AssertionError(f"{name} has a shape that depends on values of the accelerator, which has none here.")

    def check_devices(self, name: str, operands: list[torch.Tensor]) -> None:
        # A tensor without dims on the CPU goes along as an argument of the kernel.
        devices = {self.is_on_device(t) for t in operands if self.is_on_device(t) or t.dim() > 0}
        if len(devices) > 1:
            shapes = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in operands)
            self._checker.report("device mismatch", f"{name} of {shapes} ({where_in_library()})")

    # -- copies --------------------------------------------------------------------------------------------------

    def _copy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "aten::_to_copy":
            return self._to_copy(func, name, args[0], kwargs)
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        targets, sources = (args[0], args[1]) if name == "aten::_foreach_copy_" else ([args[0]], [args[1]])
        crosses = [self.is_on_device(a) != self.is_on_device(b) for a, b in zip(targets, sources, strict=True)]
        if not any(crosses):
            queue = self._machine.current if self.is_on_device(targets[0]) else self._machine.host
            result = func(*args, **kwargs)
            self.note(name, queue, sources, targets)
            return result
        for target, source in zip(targets, sources, strict=True):
            self._transfer(name, target, source, blocking=blocking)
            if not self.is_on_device(target):
                target.zero_() if not target.is_inference() else None
        return args[0] if name == "aten::copy_" else None

    def _to_copy(self, func: Any, name: str, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        pins = bool(kwargs.pop("pin_memory", False))
        device = torch.device(kwargs.get("device") or source.device)
        to_device, from_device = device.type == self._machine.device.type, self.is_on_device(source)
        if from_device and not to_device:
            target = torch.zeros_like(source, dtype=kwargs.get("dtype") or source.dtype, device=device)
            # torch takes pinned memory for copies to the host that are not to block.
            pins = pins or bool(kwargs.get("non_blocking"))
        else:
            target = func(source, **kwargs)
        block = self.block_of(target, name, is_new=True)
        block.is_pinned = pins
        if from_device != to_device:
            self._transfer(name, target, source, blocking=not kwargs.get("non_blocking"))
        else:
            self.note(name, self._machine.current if to_device else self._machine.host, [source], [target])
        return target

    def _transfer(self, name: str, target: torch.Tensor, source: torch.Tensor, *, blocking: bool) -> None:
        """Note a copy between host and accelerator."""
        stream = self._machine.current
        on_host = source if self.is_on_device(target) else target
        way = "to the accelerator" if on_host is source else "to the host"
        self.note(f"{name} {way}", stream, [source], [target])
        if on_host.numel() == 0:
            return
        pageable = not self.block_of(on_host).is_pinned or not on_host.is_contiguous()
        shape = tuple(on_host.shape)
        if blocking:
            self._machine.host_wait("blocking copy", f"{name} of {shape} {way}", stream.clock)
        elif pageable:
            self._machine.host_wait("copy of pageable memory", f"{name} of {shape} {way}", stream.clock)


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads, and those that it writes, by its schema."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = _tensors(value)
        if tensors:
            alias = argument.alias_info
            (writes if alias is not None and alias.is_write else reads).extend(tensors)
    return reads, writes
