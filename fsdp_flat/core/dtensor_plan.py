"""Has each sharded parameter as a DTensor in its slots, as FSDP2 does: the parameter groups of ``fully_shard``.

Outside of compute ``module.weight`` is an ``nn.Parameter`` that is a DTensor, under its own name, whose local tensor is
this rank's part. State dicts, optimizers and gradient clipping are therefore those of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn, cast

import torch
import torch.utils
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.core.inner_tensors import inner_tensors, made_on, seeded_alike, without_memory
from fsdp_flat.core.layout import PerParamLayout
from fsdp_flat.core.params import ManagedParam
from fsdp_flat.core.per_param_sharding import PerParamSharding
from fsdp_flat.core.placeholders import call_adviser
from fsdp_flat.core.slots import Bindings, Changes, SlotPlan, Slots, held_instead, new_full_params, registered_bindings
from fsdp_flat.core.storage import Storage
from fsdp_flat.core.torch_core import dtensor_of, dtensor_parameter, is_in_a_graph, is_plain, local_of
from fsdp_flat.core.visible_params import VisibleParam, local_parts, split_storage
from fsdp_flat.errors import UsageError, some_of


class DTensorPlan(SlotPlan):
    """Has DTensors in the slots, in the place of the managed parameters.

    As in FSDP2, a DTensor that the user assigns takes the place of a parameter before the unit's first all-gather, and
    when a state dict is loaded; later an assignment is an error.

    Args:
        sharding: the mesh of the DTensors, and how they are placed on it.
        storage: keeps their local tensors.

    Attributes:
        wholes: for each parameter a tensor like the whole one without memory, if it is made of other tensors; else
            None.
        takes_assigned: assigned parameters are adopted: the group has not been all-gathered since it was made, or since
            a state dict was loaded.
    """

    # Operations on DTensors are defined, and mixing them with plain tensors raises an error of torch's.
    make_guard = staticmethod(call_adviser)
    guards_alone = True
    hooks_see_grads = exposes_unreduced = False
    local_tensors = staticmethod(partial(map, attrgetter("_local_tensor")))
    full_params = staticmethod(new_full_params)

    def __init__(self, sharding: PerParamSharding, layout: PerParamLayout, rank: int, storage: Storage) -> None:
        self.sharding, self.layout, self._storage = sharding, layout, storage
        self.takes_assigned = True
        self._parts = local_parts(layout, rank)
        self._held: dict[nn.Module, list[tuple[str, nn.Parameter, torch.Tensor]]] = {}

    def entries(self, slots: Slots, params: Sequence[ManagedParam]) -> list[ManagedParam]:
        self._slots = slots
        self.wholes = [without_memory(entry.param.detach()) for entry in params]
        places = zip(params, self.layout.dims, self._storage.local_tensors(), strict=True)
        return [
            entry.replaced_by(dtensor_parameter(self.sharding.template(entry, dim, local), like=entry.param))
            for entry, dim, local in places
        ]

    def visible(self, slots: Slots) -> list[VisibleParam]:
        return [
            VisibleParam(entry.param, range(index, index + 1), in_shard.to_slice(), shape)
            for index, (entry, (in_shard, shape)) in enumerate(zip(slots.params, self._parts, strict=True))
        ]

    def bindings(self, slots: Slots) -> Bindings:
        for held in self._held.values():
            held.clear()
        for index, site in slots.sites:
            param = slots.params[index].param
            self._held.setdefault(site.module, []).append((site.name, param, local_of(param)))
        return registered_bindings(slots)

    def held_by(self, module: nn.Module) -> list[tuple[str, nn.Parameter, torch.Tensor]]:
        """Return the name, the parameter and its local tensor for each parameter of ``module``.

        The list is updated when parameters are replaced; every state-dict hook compares it with the module.
        """
        return self._held[module]

    def reduced_grads(self, slots: Slots, shard_grad: torch.Tensor) -> list[torch.Tensor]:
        parts = split_storage(shard_grad, self._parts)
        return [
            dtensor_of(part, cast(Any, param)._spec) for param, part in zip(slots.visible_params, parts, strict=True)
        ]

    def bind(self, slots: Slots, *, rebuilt: bool) -> None:
        for index, (entry, local) in enumerate(zip(slots.params, self._storage.local_tensors(), strict=True)):
            param = entry.param
            if (local.dtype, local.device) == (param.dtype, param.device):
                param._local_tensor = local  # type: ignore[attr-defined]
                continue
            # A DTensor cannot change its dtype or device: swap another one into the Parameter that optimizers hold.
            other = dtensor_parameter(self.with_local(index, local), like=param)
            if param.grad is not None:
                other.grad = dtensor_of(local_of(param.grad).to(local.device, local.dtype), cast(Any, other)._spec)
            torch.utils.swap_tensors(param, other)

    # -- DTensors of full values -------------------------------------------------------------------------------------

    def can_distribute(self, index: int, value: torch.Tensor) -> bool:
        """Return whether ``value`` is a full tensor that :meth:`distribute` takes for parameter ``index``."""
        param = self._slots.params[index].param
        if value.shape != param.shape:
            return False
        if isinstance(value, DTensor):
            # torch's functions for full state dicts have made one of a plain tensor.
            return self._has_several(index) and is_plain(local_of(value).data)
        return type(value.data) in (torch.Tensor, type(local_of(param)))

    def distribute(self, index: int, full: torch.Tensor) -> DTensor:
        """Return ``full`` (the unsharded shape) as a DTensor sharded like parameter ``index``, without communication.

        The local tensor, which may be a view of ``full``, is on the device of shards, or on meta if ``full`` is.
        """
        inner = self._slots.params[index].adapter.local_slice(full.detach())
        return self.with_local(index, self._storage.part_of(index, inner))

    def with_local(self, index: int, local: torch.Tensor) -> DTensor:
        """Return a DTensor of ``local`` with the mesh and placements of parameter ``index``."""
        return self.sharding.template(self._slots.params[index], self.layout.dims[index], local)

    def _has_several(self, index: int) -> bool:
        """Return whether parameter ``index`` is made of several tensors, so that no part knows what the whole is."""
        whole = self.wholes[index]
        return whole is not None and len(inner_tensors(whole)) > 1

    def in_class(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return a full value of parameter ``index`` for :meth:`distribute`, in the class of the parameter.

        A plain tensor is turned into one of a class that is made of several tensors, quantized as a whole and so as on
        one rank.
        """
        whole, local = self.wholes[index], local_of(self._slots.params[index].param)
        if whole is None:
            return full
        if isinstance(full, DTensor):
            full = full.full_tensor()  # every rank loads
        # A class that keeps its values in one tensor takes those of each part.
        if not self._has_several(index) or not is_plain(full.data) or full.is_meta:
            return full
        device = full.device if local.is_meta else local.device
        with torch.no_grad(), seeded_alike(device):
            made = made_on(whole, device)
            made.copy_(full.detach().to(device))  # which may round at random
        return made

    # -- changes -----------------------------------------------------------------------------------------------------

    def adopt(self, slots: Slots, changes: Changes) -> bool:
        """Take assigned DTensors in the place of the present ones, and other local tensors.

        Raises:
            UsageError: the group has been all-gathered before, or the tensor has another form.
        """
        params = list(slots.params)
        found = {index: held_instead(params[index]) for index in sorted({*changes.assigned, *changes.data})}
        # A slot may hold None, which is filled again.
        assigned = {i: each for i, each in found.items() if each is not params[i].param or i in changes.data}
        for index, current in assigned.items():
            self._check_assigned(index, current)
        for index, current in assigned.items():
            before = params[index].param
            if before is not current:
                before._local_tensor = self._storage.released(local_of(before))  # type: ignore[attr-defined]
        for index, current in assigned.items():
            local = self._storage.take(index, local_of(current))
            if (local.dtype, local.device) == (current.dtype, current.device):
                current._local_tensor = local  # type: ignore[attr-defined]
            else:
                current = nn.Parameter(self.with_local(index, local), requires_grad=current.requires_grad)
            params[index] = replace(params[index], param=current)
        slots.params[:] = params
        slots.fill()
        return bool(assigned)

    def take_loaded(self) -> list[torch.Tensor] | None:
        """Keep parameters that were assigned for those on the meta device; return None while any is still there.

        Afterwards return all local tensors, whose values the shard gets once it has left the meta device.
        """
        params = []
        for index, entry in enumerate(self._slots.params):
            current = held_instead(entry)
            if current is not entry.param:
                self._check_assigned(index, current)
            params.append(replace(entry, param=current))
        self._slots.params[:] = params
        self._slots.fill()
        left = any(entry.param.is_meta for entry in params)
        return None if left else [local_of(entry.param) for entry in params]

    def _check_assigned(self, index: int, current: nn.Parameter) -> None:
        slots, shape = self._slots, self._parts[index][1]
        if not self.takes_assigned:
            raise UsageError(
                f"Parameter {slots.describe(index)} was assigned on rank {slots.spec.rank} after the unit's first "
                "all-gather, or got another local tensor (by a conversion of a module inside the unit, for example). "
                "fully_shard takes assigned parameters only before, and from load_state_dict. Copy the values instead, "
                "under torch.no_grad(): param.copy_(torch.distributed.tensor.distribute_tensor(tensor, "
                "param.device_mesh, param.placements)); or load a state dict."
            )
        if not isinstance(current, DTensor) or tuple(current._local_tensor.shape) != shape:
            held = f"a {type(current.data).__name__} of shape {tuple(local_of(current).shape)}"
            raise UsageError(
                f"Parameter {slots.describe(index)} was replaced by {held} on rank {slots.spec.rank}; expected a "
                f"DTensor with the local shape {shape}. Convert full tensors by "
                "torch.distributed.tensor.distribute_tensor(tensor, param.device_mesh, param.placements)."
            )
        if self.sharding.offloads and current.device.type not in ("cpu", "meta"):
            self._raise_not_on_cpu([index], current.device)

    def check_convertible(self) -> None:
        """Raise a UsageError if a parameter cannot change its dtype or device in place."""
        for index, entry in enumerate(self._slots.params):
            if is_in_a_graph(entry.param) or weakref.getweakrefs(entry.param):
                raise UsageError(
                    f"Parameter {self._slots.describe(index)} cannot change its dtype or device: an autograd graph (of "
                    "param.full_tensor(), for example) or a weak reference (of torch.compile, for example) uses it. "
                    "Convert the model before, or drop these first."
                )

    def check_device(self) -> None:
        """Raise a UsageError if parameters are on the meta device, or offloaded ones elsewhere than in host memory."""
        params, device = self._slots.params, self._slots.spec.shard_device
        if device.type == "meta":
            meta = [self._slots.describe(index) for index, entry in enumerate(params) if entry.param.is_meta]
            raise UsageError(
                f"Parameters are on the meta device: {some_of(meta, 4)}. Call model.to_empty(device=...) "
                "and initialise them, or load a state dict with assign=True, before the first forward."
            )
        if self.sharding.offloads and device.type != "cpu":
            self._raise_not_on_cpu(range(len(params)), device)

    def _raise_not_on_cpu(self, indices: Iterable[int], device: torch.device) -> NoReturn:
        raise UsageError(
            f"With CPUOffloadPolicy sharded parameters are in host memory, but these are on {device}: "
            f"{some_of([self._slots.describe(index) for index in indices], 4)}. Load a state dict of CPU tensors, or "
            'call model.to_empty(device="cpu").'
        )
