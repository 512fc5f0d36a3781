"""Shows each sharded parameter as a DTensor, as FSDP2 does: the parameter groups of ``fully_shard``.

Outside of compute ``module.weight`` is an ``nn.Parameter`` that is a DTensor, under its own name, whose local tensor is
a view of this rank's shard. State dicts, optimizers and gradient clipping are therefore those of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, getitem, is_
from typing import Any, NoReturn, cast

import torch
import torch.utils
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.core.layout import PerParamLayout
from fsdp_flat.core.params import ManagedParam
from fsdp_flat.core.per_param_sharding import PerParamSharding
from fsdp_flat.core.placeholders import call_adviser
from fsdp_flat.core.shown import Shown
from fsdp_flat.core.torch_core import dtensor_of, dtensor_parameter, is_in_a_graph, local_of
from fsdp_flat.core.visible_params import VisibleParam, split_storage
from fsdp_flat.errors import UsageError, some_of

_LOCAL_TENSOR = attrgetter("_local_tensor")


@dataclass(frozen=True, slots=True)
class InnerPart:
    """Holds this rank's part of one of the tensors that a parameter is made of.

    Attributes:
        tensor: the part, of any shape and dtype.
        shape: the shape of the whole.
        offsets: where the part begins in the whole; None if every rank has the whole.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None


class DTensorShown(Shown):
    """Shows DTensors, which replace the managed parameters in their modules.

    As in FSDP2, a DTensor that the user assigns takes the place of a parameter before the unit's first all-gather, and
    when a state dict is loaded; later an assignment is an error.

    Attributes:
        takes_assigned: assigned parameters are adopted: the group has not been all-gathered since it was made, or since
            a state dict was loaded.
    """

    exposes_unreduced = False
    layout: PerParamLayout
    # Operations on DTensors are defined, and mixing them with plain tensors raises an error of torch's.
    _make_guard = staticmethod(call_adviser)

    @property
    def per_param_sharding(self) -> PerParamSharding:
        """The mesh of the DTensors, and how they are placed on it."""
        assert self.spec.per_param is not None
        return self.spec.per_param

    def _replaced(self, params: Sequence[ManagedParam]) -> Sequence[ManagedParam]:
        layout, rank = self.layout, self.spec.rank
        self.takes_assigned = True
        self._local_parts = [
            (layout.local_shard(index, rank).in_shard, layout.local_shape(index, rank)) for index in range(len(params))
        ]
        self._held: dict[nn.Module, list[tuple[str, nn.Parameter, torch.Tensor]]] = {}
        return [
            entry.replaced_by(dtensor_parameter(self.per_param_sharding.template(entry, dim, local), like=entry.param))
            for entry, dim, local in zip(params, layout.dims, self._locals_of(params), strict=True)
        ]

    def _locals_of(self, params: Sequence[ManagedParam]) -> list[torch.Tensor]:
        """Return the local tensor of each of ``params``, the full ones."""
        return split_storage(self.flat_param.data, self._local_parts)

    def _show_first(self, params: Sequence[ManagedParam]) -> None:
        self._show(self.params)

    def _guarded_hooks(self) -> list[dict[Any, Any]]:
        return [module._forward_pre_hooks for module in dict.fromkeys(site.module for _, site in self._sites)]

    def _show(self, params: Sequence[ManagedParam]) -> None:
        """Manage ``params``, whose local tensors are views of the shard, in the place of the present ones."""
        self.params[:] = params
        parts = zip(self.params, self._local_parts, strict=True)
        self._set_visible(
            VisibleParam(entry.param, range(index, index + 1), in_shard.to_slice(), shape)
            for index, (entry, (in_shard, shape)) in enumerate(parts)
        )
        self._dtensors = dtensors = [cast(DTensor, entry.param) for entry in self.params]
        local_tensors = list(map(_LOCAL_TENSOR, dtensors))
        # A DTensor and its local tensor have separate version counters.
        self.versioned = (self.flat_param, *dtensors, *local_tensors)
        self._places = list(map(self.buffer.place_of, local_tensors))
        for held in self._held.values():
            held.clear()
        self.mark_params()  # a conversion of an inner module swaps the parameters' contents, attributes included
        for index, site in self._sites:
            held = self._held.setdefault(site.module, [])
            held.append((site.name, self.params[index].param, local_tensors[index]))
        self._bindings = self._bind()
        self.show_sharded()

    def visible_grads(self) -> list[torch.Tensor | None]:
        found = [param.grad for param in self.visible_params]
        return [None if grad is None else local_of(grad) for grad in found]

    def reduced_grads(self, shard_grad: torch.Tensor) -> list[torch.Tensor]:
        parts = split_storage(shard_grad, self._local_parts)
        return [dtensor_of(part, param._spec) for param, part in zip(self._dtensors, parts, strict=True)]

    def can_distribute(self, index: int, value: torch.Tensor) -> bool:
        """Return whether ``value`` is a full tensor that :meth:`distribute` takes for parameter ``index``."""
        return type(value.data) is torch.Tensor and value.shape == self.params[index].param.shape

    def distribute(self, index: int, full: torch.Tensor) -> DTensor:
        """Return ``full`` (the unsharded shape) as a DTensor sharded like parameter ``index``, without communication.

        The local tensor, which may be a view of ``full``, is on the device of shards, or on meta if ``full`` is.
        """
        entry = self.params[index]
        inner = entry.adapter.local_slice(full.detach())
        local = self.layout.local_part(index, self.spec.rank, inner).view(
            self.layout.local_shape(index, self.spec.rank)
        )
        device_type = "cpu" if self.per_param_sharding.offloads else self.per_param_sharding.mesh.device_type
        return self.with_local(index, local if local.is_meta else local.to(device_type))

    def in_class(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return a full value of parameter ``index`` for :meth:`distribute`, in the class of the parameter.

        A plain tensor is turned into one of a class that is made of several tensors, quantized as a whole and so as on
        one rank.
        """
        return full

    def inner_parts(self, index: int, local: torch.Tensor) -> dict[str, InnerPart] | None:
        """Return this rank's part of each of the plain tensors that parameter ``index`` is made of, by name.

        ``local`` is the local tensor or one like it. None if there is one such tensor when it is sharded, or if these
        cannot be known as parts of a whole.
        """
        return None

    def with_local(self, index: int, local: torch.Tensor) -> DTensor:
        """Return a DTensor of ``local`` with the mesh and placements of parameter ``index``."""
        return self.per_param_sharding.template(self.params[index], self.layout.dims[index], local)

    # -- changes ---------------------------------------------------------------------------------------------------

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        self.bind_locals(split_storage(self.flat_param.data, self._local_parts))

    def bind_locals(self, locals_: Sequence[torch.Tensor]) -> None:
        """Give the DTensors these local tensors, which may have another dtype or device than before."""
        for index, (entry, local) in enumerate(zip(self.params, locals_, strict=True)):
            param = entry.param
            if (local.dtype, local.device) == (param.dtype, param.device):
                param._local_tensor = local  # type: ignore[attr-defined]
            else:
                # A DTensor cannot change its dtype or device: swap another one into the Parameter that optimizers hold.
                template = self.per_param_sharding.template(entry, self.layout.dims[index], local)
                other = dtensor_parameter(template, like=param)
                if param.grad is not None:
                    other.grad = dtensor_of(local_of(param.grad).to(local.device, local.dtype), template._spec)
                torch.utils.swap_tensors(param, other)
        self._show(self.params)

    def check_convertible(self) -> None:
        """Raise a UsageError if a parameter cannot change its dtype or device in place."""
        for index, entry in enumerate(self.params):
            if is_in_a_graph(entry.param) or weakref.getweakrefs(entry.param):
                raise UsageError(
                    f"Parameter {self.describe(index)} cannot change its dtype or device: an autograd graph (of "
                    "param.full_tensor(), for example) or a weak reference (of torch.compile, for example) uses it. "
                    "Convert the model before, or drop these first."
                )

    def _assigned(self, index: int) -> nn.Parameter:
        """Return the Parameter that was assigned in the place of parameter ``index``, or else the parameter itself."""
        entry = self.params[index]
        held = [site.module._parameters.get(site.name) for site in entry.sites]
        return next((each for each in held if each is not None and each is not entry.param), entry.param)

    def loaded(self) -> list[torch.Tensor] | None:
        """Keep parameters that were assigned for those on the meta device; return None while any is still there.

        Afterwards return all local tensors, for :meth:`fill` once the caller has allocated the shard.
        """
        params = []
        for index, entry in enumerate(self.params):
            current = self._assigned(index)
            if current is not entry.param:
                self._check_assigned(index, current)
            params.append(replace(entry, param=current))
        self._show(params)
        left = any(entry.param.is_meta for entry in params)
        return None if left else [local_of(entry.param) for entry in params]

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Copy ``values``, a local tensor per parameter, to the shard."""
        with torch.no_grad():
            for entry, value in zip(self.params, values, strict=True):
                local_of(entry.param).copy_(value)
        self.layout.clear_padding(self.flat_param.data, self.spec.rank)

    def held_by(self, module: nn.Module) -> list[tuple[str, nn.Parameter, torch.Tensor]]:
        """Return the name, the parameter and its local tensor for each parameter of ``module``.

        The list is updated when parameters are replaced; every state-dict hook compares it with the module.
        """
        return self._held[module]

    def changed(self) -> list[int]:
        attributes, names, _, sharded = self._bindings
        try:
            is_same = all(map(is_, map(getitem, attributes, names), sharded))
        except KeyError:  # a parameter was deleted
            is_same = False
        if is_same and self._places == list(map(self.buffer.place_of, map(_LOCAL_TENSOR, self._dtensors))):
            return []
        found = [(self._assigned(index), entry.param) for index, entry in enumerate(self.params)]
        return [
            index
            for index, (current, param) in enumerate(found)
            if current is not param or self.buffer.place_of(local_of(current)) != self._places[index]
        ]

    def adopt(self, changed: Sequence[int]) -> bool:
        params = list(self.params)
        assigned = {index: self._assigned(index) for index in changed}
        for index, current in assigned.items():
            self._check_assigned(index, current)
        for index, current in assigned.items():
            before = params[index].param
            if before is not current:
                # The caller may use the replaced parameter again or elsewhere, so it gets memory of its own.
                before._local_tensor = local_of(before).clone()  # type: ignore[attr-defined]
        for index, current in assigned.items():
            params[index] = replace(params[index], param=self._adopted(index, current))
        self._show(params)
        return True

    def _adopted(self, index: int, current: nn.Parameter) -> nn.Parameter:
        """Copy the values of an assigned parameter to the shard, and return it as a view of the shard."""
        (local,) = split_storage(self.flat_param.data, [self._local_parts[index]])
        with torch.no_grad():
            local.copy_(local_of(current))
        if (local.dtype, local.device) != (current.dtype, current.device):
            old = self.params[index]
            template = self.per_param_sharding.template(old, self.layout.dims[index], local)
            return nn.Parameter(template, requires_grad=current.requires_grad)
        current._local_tensor = local  # type: ignore[attr-defined]
        return current

    def _check_assigned(self, index: int, current: nn.Parameter) -> None:
        shape = self.layout.local_shape(index, self.spec.rank)
        if not self.takes_assigned:
            raise UsageError(
                f"Parameter {self.describe(index)} was assigned on rank {self.spec.rank} after the unit's first "
                "all-gather, or got another local tensor (by a conversion of a module inside the unit, for example). "
                "fully_shard takes assigned parameters only before, and from load_state_dict. Copy the values instead, "
                "under torch.no_grad(): param.copy_(torch.distributed.tensor.distribute_tensor(tensor, "
                "param.device_mesh, param.placements)); or load a state dict."
            )
        if not isinstance(current, DTensor) or tuple(current._local_tensor.shape) != shape:
            held = f"a {type(current.data).__name__} of shape {tuple(local_of(current).shape)}"
            raise UsageError(
                f"Parameter {self.describe(index)} was replaced by {held} on rank {self.spec.rank}; expected a DTensor "
                f"with the local shape {shape}. Convert full tensors by "
                "torch.distributed.tensor.distribute_tensor(tensor, param.device_mesh, param.placements)."
            )
        if self.per_param_sharding.offloads and current.device.type not in ("cpu", "meta"):
            self._raise_not_on_cpu([index], current.device)

    def check_device(self) -> None:
        """Raise a UsageError if parameters are on the meta device, or offloaded ones elsewhere than in host memory."""
        if self.flat_param.is_meta:
            meta = [self.describe(index) for index, entry in enumerate(self.params) if entry.param.is_meta]
            raise UsageError(
                f"Parameters are on the meta device: {some_of(meta, 4)}. Call model.to_empty(device=...) "
                "and initialise them, or load a state dict with assign=True, before the first forward."
            )
        if self.per_param_sharding.offloads and not self.flat_param.is_cpu:
            self._raise_not_on_cpu(range(len(self.params)), self.flat_param.device)

    def _raise_not_on_cpu(self, indices: Iterable[int], device: torch.device) -> NoReturn:
        raise UsageError(
            f"With CPUOffloadPolicy sharded parameters are in host memory, but these are on {device}: "
            f"{some_of([self.describe(index) for index in indices], 4)}. Load a state dict of CPU tensors, or call "
            'model.to_empty(device="cpu").'
        )
