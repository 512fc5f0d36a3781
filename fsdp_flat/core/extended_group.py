"""Defines the parameter group of tensors of other classes than torch.Tensor, whose shards are of these classes too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from fsdp_flat.core.buffers import AllGatherOutput
from fsdp_flat.core.flat_parameter import replace_shard
from fsdp_flat.core.inner_tensors import plain_tensors_in
from fsdp_flat.core.layout import PerParamLayout
from fsdp_flat.core.local_tensors import LocalTensors, OwnTensors
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.params import ManagedParam
from fsdp_flat.core.torch_core import local_of
from fsdp_flat.errors import UnsupportedError


class ExtendedGroup(ParamGroup):
    """Owns parameters of a unit that are of other classes of tensors; each rank has a part of each, of its class.

    The parts of several parameters cannot share memory, so there is no flat shard: ``flat_param`` has no elements, and
    only says the dtype and device of the parts. Gradients are plain tensors, in the layout of any other group.
    """

    _has_extensions = True

    def _keep_locals(self, params: Sequence[ManagedParam], layout: PerParamLayout) -> LocalTensors:
        self._locals = OwnTensors(params, self.spec, layout)
        return self._locals

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

    def adopt(self) -> None:
        shown = self.shown
        shown.hide_names()
        changes = shown.diff()
        if (changes.assigned or changes.data) and shown.plan.adopt(shown, changes):
            self._weights_epoch += 1
            self._follow_locals()

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` (of ``Module.to`` and similar methods) to the local tensors."""
        if self.dtensors is not None and self.is_changed_by(fn):
            self.dtensors.check_convertible()
        with torch.no_grad():
            converted = [fn(local_of(entry.param)) for entry in self.params]
        if all(new is local_of(entry.param) for new, entry in zip(converted, self.params, strict=True)):
            return
        self._locals.tensors = converted
        self.shown.bind_shard()
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
