"""Defines the parameter group of tensors of other classes than torch.Tensor, whose shards are of these classes too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn, cast

import torch
from torch.distributed.tensor import DTensor

from fsdp_flat.core.buffers import AllGatherOutput
from fsdp_flat.core.flat_parameter import replace_shard
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.params import ManagedParam
from fsdp_flat.core.shown import Shown
from fsdp_flat.core.shown_dtensors import DTensorShown
from fsdp_flat.core.torch_core import local_of, plain_tensors_in
from fsdp_flat.errors import UnsupportedError


class ExtendedShown(DTensorShown):
    """Shows DTensors whose local tensors are of classes of their own, each with memory of its own."""

    def _locals_of(self, params: Sequence[ManagedParam]) -> list[torch.Tensor]:
        return [self._on_shard_device(self._part_of(index, entry.param)) for index, entry in enumerate(params)]

    def _part_of(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor of any class, in memory of its own.

        The operations are those of torch's ``fully_shard``: a class implements these, and perhaps no others.
        """
        dim, (_, shape) = self.layout.dims[index], self._local_parts[index]
        with torch.no_grad():
            padded = full.detach().new_zeros(self.layout.chunk_shapes[index])
            part = padded.narrow(dim, 0, shape[dim])
            if math.prod(shape):
                part.copy_(torch.chunk(full.detach(), self.layout.world_size, dim)[self.spec.rank])
        return part

    def _on_shard_device(self, local: torch.Tensor) -> torch.Tensor:
        if local.is_meta or not self.per_param_sharding.offloads:
            return local
        return local.cpu() if self.spec.device.type == "cpu" else local.cpu().pin_memory()

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        pass  # there is no flat shard; the local tensors were bound before

    def adopt(self, changed: Sequence[int]) -> bool:
        params = list(self.params)
        for index in changed:
            current = self._assigned(index)
            self._check_assigned(index, current)
            params[index] = replace(params[index], param=current)
        self._show(params)
        return True

    def can_distribute(self, index: int, value: torch.Tensor) -> bool:
        param = self.params[index].param
        return type(value.data) in (torch.Tensor, type(local_of(param))) and value.shape == param.shape

    def distribute(self, index: int, full: torch.Tensor) -> DTensor:
        local = self._part_of(index, self.params[index].adapter.local_slice(full.detach()))
        return self.with_local(index, self._on_shard_device(local))


class ExtendedGroup(ParamGroup):
    """Owns parameters of a unit that are of other classes of tensors; each rank has a part of each, of its class.

    The parts of several parameters cannot share memory, so there is no flat shard: ``flat_param`` has no elements, and
    only says the dtype and device of the parts. Gradients are plain tensors, in the layout of any other group.
    """

    _has_extensions = True

    def _kind_of_shown(self) -> type[Shown]:
        return ExtendedShown

    def _shard_of(self, params: Sequence[ManagedParam]) -> torch.Tensor:
        return torch.empty(0, dtype=self.orig_dtype, device=self.spec.shard_device)

    def _new_buffer(self, params: Sequence[ManagedParam]) -> AllGatherOutput:
        return self._new_extended(params, id)  # such tensors have no address

    def flat_shard(self) -> NoReturn:
        """Raise an UnsupportedError: the parts of the parameters have no common memory."""
        raise UnsupportedError(
            f"Parameter {self.shown.describe(0)} is a {type(local_of(self.params[0].param)).__name__}, which has no "
            "full plain tensor. Save it by get_model_state_dict of torch.distributed.checkpoint.state_dict, or by "
            "torch.distributed.checkpoint."
        )

    @property
    def shard_nbytes(self) -> int:
        """Number of bytes of the tensors that the local tensors keep their values in."""
        return sum(each.nbytes for entry in self.params for each in plain_tensors_in(local_of(entry.param)))

    def local(self, index: int) -> torch.Tensor:
        """Return this rank's part of parameter ``index``, in its class and shape; call :meth:`adopt_changes` first."""
        return local_of(self.params[index].param).detach()

    def adopt_changes(self) -> None:
        """Adopt parameters that the user assigned, and local tensors."""
        shown = cast(ExtendedShown, self.shown)
        if shown.shows_names:
            shown.hide_names()
        changed = shown.changed()
        if not changed or not shown.adopt(changed):
            return
        self._weights_epoch += 1
        self._follow_locals()

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` (of ``Module.to`` and similar methods) to the local tensors."""
        shown = cast(ExtendedShown, self.shown)
        if self.is_changed_by(fn):
            shown.check_convertible()
        with torch.no_grad():
            converted = [fn(local_of(entry.param)) for entry in self.params]
        if all(new is local_of(entry.param) for new, entry in zip(converted, self.params, strict=True)):
            return
        shown.bind_locals(converted)
        self._weights_epoch += 1
        self._follow_locals()

    def _follow_locals(self) -> None:
        """Compute on the device, and in the dtype, of the local tensors, once all have left the meta device."""
        locals_ = [local_of(entry.param) for entry in self.params]
        like = next((each for each in locals_ if each.is_meta), locals_[0])
        if (like.dtype, like.device) != (self.orig_dtype, self.spec.shard_device):
            shard = torch.empty(0, dtype=like.dtype, device=like.device)
            replace_shard(self.flat_param, shard)
            self._rebuild(shard)
