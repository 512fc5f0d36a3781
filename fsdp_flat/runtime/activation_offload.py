"""Keeps the activations of a forward in host memory until its backward: ``fsdp_flat.offload_activations``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fsdp_flat.comm import HostSwap
from fsdp_flat.core import Step, graph_task_id, is_plain, local_of, modules_of, no_units, step_of, unit_of, units_of
from fsdp_flat.errors import OptionError
from fsdp_flat.user_warnings import entered


class _Stored:
    """Holds the content of one storage on the host, and on the accelerator while it is used there.

    Attributes:
        device: the storage as a 1-D tensor on the accelerator; None while it is on the host alone.
        host: the same in pinned memory.
        event: after the last copy, to or from the host; None if compute has waited for it.
        version: the version counter of ``device`` when it was saved.
        is_changed: the tensor was changed in place after it was saved.
    """

    __slots__ = ("device", "event", "host", "is_changed", "version")

    def __init__(self, device: torch.Tensor, swap: HostSwap) -> None:
        self.device: torch.Tensor | None = device
        self.host = swap.place_for(device)
        self.event = swap.begin_to_host([device], [self.host])
        self.version = device._version
        self.is_changed = False


class _Layer:
    """Holds what one forward of a unit has saved for backward.

    Attributes:
        key: identifies the forward.
        before, after: return the layers that ran before and after it, if backward still needs them.
    """

    def __init__(self, key: tuple[int, int], before: _Layer | None, swap: HostSwap) -> None:
        self.key = key
        self.before = self.after = _no_layer
        if before is not None:
            self.before, before.after = weakref.ref(before), weakref.ref(self)
        self._stored: list[_Stored] = []
        self._swap = swap
        self._in_backward = False

    def add(self, tensor: torch.Tensor) -> _Stored:
        """Begin to copy the storage of ``tensor`` to the host."""
        numel = tensor.untyped_storage().nbytes() // tensor.itemsize
        self._stored.append(_Stored(tensor.as_strided((numel,), (1,), 0), self._swap))
        return self._stored[-1]

    def leave(self) -> None:
        """Give back the memory on the accelerator, once compute has waited for copies under way."""
        self._wait()
        for stored in self._stored:
            if stored.device is not None:
                stored.is_changed |= stored.device._version != stored.version
            stored.device = None
        self._in_backward = False

    def begin_return(self) -> None:
        """Begin to copy to the accelerator what is not there."""
        gone = [stored for stored in self._stored if stored.device is None]
        if gone:
            made, event = self._swap.begin_to_device([stored.host for stored in gone])
            for stored, device in zip(gone, made, strict=True):
                stored.device, stored.event, stored.version = device, event, device._version

    def enter_backward(self) -> None:
        """Have the content on the accelerator, begin to copy that of the layer before, drop that of the layer after."""
        if self._in_backward:
            return
        self._in_backward = True
        after, before = self.after(), self.before()
        if after is not None:
            after.leave()
        self.have_returned()
        if before is not None:
            before.begin_return()

    def have_returned(self) -> None:
        """Have the content on the accelerator, for compute that follows."""
        self.begin_return()
        self._wait()

    def __del__(self) -> None:
        # A backward that failed, or did not reach the layer, has begun copies for which nothing has waited.
        self._wait()

    def _wait(self) -> None:
        for event in dict.fromkeys(stored.event for stored in self._stored):
            if event is not None:
                self._swap.wait(event)
        for stored in self._stored:
            stored.event = None


def _no_layer() -> _Layer | None:
    return None


def _is_same(held: torch.Tensor, tensor: torch.Tensor) -> bool:
    return held.untyped_storage()._cdata == tensor.untyped_storage()._cdata


class _Saved(NamedTuple):
    """Describes a saved tensor: a view of a storage that the layer which saved it first holds."""

    layer: _Layer
    holder: _Layer
    stored: _Stored
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """Return the tensor, on the accelerator."""
        self.layer.enter_backward()
        if self.holder is not self.layer:
            self.holder.have_returned()
        flat = self.stored.device
        assert flat is not None
        if self.stored.is_changed or flat._version != self.stored.version:
            raise RuntimeError(
                f"One of the variables needed for gradient computation, of shape {tuple(self.size)}, has been modified "
                "by an inplace operation after it was saved for backward, inside offload_activations."
            )
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class _Kept(NamedTuple):
    """Holds a saved tensor of one of the last layers, whose backward is the time to copy that of an earlier layer."""

    kept: torch.Tensor
    layer: Callable[[], _Layer | None]

    def tensor(self) -> torch.Tensor:
        """Return the tensor, and begin to copy the content of the layer."""
        layer = self.layer()
        if layer is not None:
            layer.begin_return()
        return self.kept


class ActivationOffload:
    """Decides for each tensor that autograd saves whether it goes to the host.

    Args:
        step: runs the units of the model.
        swap: copies to the host and back.
        kept: storages that stay on the accelerator anyway, by ``_cdata``.
        keep: number of first and of last layers whose tensors stay on the accelerator.
        min_nbytes: smaller storages stay.
    """

    def __init__(self, step: Step, swap: HostSwap, kept: set[int], *, keep: int, min_nbytes: int) -> None:
        self._step, self._swap, self._kept, self._keep, self._min_nbytes = step, swap, kept, keep, min_nbytes
        self._device_type = step.root.options.device.type
        # The layers whose tensors are still on the accelerator, in the order of the forward; and their storages.
        self._recent: list[_Layer] = []
        self._known: dict[int, tuple[_Layer, _Stored]] = {}
        self._last: Callable[[], _Layer | None] = _no_layer

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd saves in place of ``tensor``."""
        iteration = self._step.order.iteration
        if iteration is None or graph_task_id() != -1 or not is_plain(tensor):
            return tensor
        if tensor.device.type != self._device_type:
            return tensor
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if storage._cdata in self._kept or nbytes < max(1, self._min_nbytes) or nbytes % tensor.itemsize:
            return tensor
        # What the outermost unit saves before the first nested unit counts as of that, and the rest as of the one
        # that ran before.
        number, order = len(iteration.order) - 1, self._step.order.last_order.get(iteration.order[0])
        if order is not None and number >= len(order) - self._keep:
            return _Kept(tensor, self._last)
        if number <= self._keep:
            return tensor
        if not self._recent or self._recent[-1].key != (id(iteration), number):
            self._begin_layer((id(iteration), number))
            if storage._cdata in self._kept:
                return tensor
        layer, stored = self._known.get(storage._cdata, (self._recent[-1], None))
        held = None if stored is None else stored.device
        # A backward inside the block may have given the memory back: then another storage has the address.
        if stored is None or not (held is not None and _is_same(held, tensor) and stored.version == tensor._version):
            layer = self._recent[-1]
            stored = layer.add(tensor)
            self._known[storage._cdata] = layer, stored
        view = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _Saved(self._recent[-1], layer, stored, *view)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that :meth:`pack` was given."""
        return saved if isinstance(saved, torch.Tensor) else saved.tensor()

    def _begin_layer(self, key: tuple[int, int]) -> None:
        """Begin the layer whose forward runs now; of those before it, the last one's copies run beside its compute."""
        self._leave(self._recent[:-1])
        # Parameters with all-gather extensions get their memory in their first all-gather.
        for unit in self._step.order.iteration.order if self._step.order.iteration is not None else ():
            self._kept.update(each.untyped_storage()._cdata for g in unit.param_groups for each in g.buffer_tensors)
        self._recent.append(_Layer(key, self._recent[-1] if self._recent else None, self._swap))
        self._last = weakref.ref(self._recent[-1])

    def _leave(self, layers: list[_Layer]) -> None:
        for layer in layers:
            layer.leave()
            self._recent.remove(layer)
        self._known = {key: known for key, known in self._known.items() if known[0] not in layers}

    def close(self) -> None:
        """Give back the memory of the layers that ran last."""
        self._leave(list(self._recent))


def storages_of(model: nn.Module, step: Step) -> set[int]:
    """Return the storages of a model's parameters, sharded and unsharded, and of its buffers, by ``_cdata``."""
    tensors = [local_of(tensor) for tensor in (*model.parameters(), *model.buffers())]
    tensors += [tensor for unit in step.units for group in unit.param_groups for tensor in group.buffer_tensors]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


@entered
@contextmanager
def offload_activations(model: nn.Module, *, keep: int = 1, min_nbytes: int = 1 << 16) -> Iterator[None]:
    """Keep what autograd saves in forwards inside the block in pinned host memory until backward needs it.

    Copies run beside compute: to the host while the next unit runs, and back during the backward of the unit after it.
    What two units have saved is on the accelerator at one time, besides that of the units that ``keep`` names.
    Gradients are those without, to the bit. Of checkpoints of activations the inputs are offloaded. DTensors of tensor
    parallelism and other classes of tensors stay. On a CPU the block changes nothing::

        with offload_activations(model):
            loss = model(x).mean()
        loss.backward()

    Args:
        model: a model with units around its layers and around itself, of ``fully_shard`` or
            ``FullyShardedDataParallel``.
        keep: the number of first and of last units whose tensors stay on the accelerator. Backward needs those of the
            last ones at once; which these are is known after the first forward.
        min_nbytes: smaller tensors stay.

    Raises:
        OptionError: (a ValueError) ``model`` is not one tree of several units, or ``keep`` or ``min_nbytes`` is
            negative.
    """
    if not (isinstance(keep, int) and isinstance(min_nbytes, int) and keep >= 0 and min_nbytes >= 0):
        raise OptionError(f"keep and min_nbytes must be integers from 0; got keep={keep!r}, min_nbytes={min_nbytes!r}.")
    units = units_of(model)
    if not units:
        raise no_units(model)
    root = next(module for module in modules_of(model) if unit_of(module) is units[0])
    step = step_of(root, units[0])
    if len(step.units) < 2 or len(units) > len(step.units):
        raise OptionError(
            f"offload_activations moves what one unit saves while the next one runs, so {type(model).__name__} must be "
            "one tree of several units: shard its layers one by one, and then the model itself."
        )
    if not step.streams.is_accelerator:
        yield
        return
    offload = ActivationOffload(step, step.streams.swap, storages_of(model, step), keep=keep, min_nbytes=min_nbytes)
    try:
        with saved_tensors_hooks(offload.pack, offload.unpack):
            yield
    finally:
        offload.close()
