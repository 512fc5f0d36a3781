"""Shows sharded parameters as FSDP1 does: the user's Parameters with local shards as data, or one flat parameter."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.errors import UsageError
from fsdp_flat.flat.bindings import Bindings
from fsdp_flat.flat.flat_parameter import refuse_replaced, renew_shard, warn_of_lost_hooks
from fsdp_flat.flat.gradients import set_grad
from fsdp_flat.flat.handle import FlatParamHandle
from fsdp_flat.flat.layout_views import VisibleParam
from fsdp_flat.flat.params import PLAIN, ManagedParam
from fsdp_flat.flat.placeholders import ShardedPlaceholder
from fsdp_flat.layout import FLAT_PARAM


class OriginalsHandle(FlatParamHandle):
    """Shows the user's Parameters (``use_orig_params=True``)."""

    def _show_first(self, params: Sequence[ManagedParam]) -> None:
        is_sharded = self.layout.world_size > 1
        self._set_visible(
            VisibleParam(
                entry.param,
                range(index, index + 1),
                own.in_shard.to_slice(),
                None if is_sharded else param_info.shape,
                own.is_empty and param_info.numel > 0,
            )
            for index, (entry, own, param_info) in enumerate(
                zip(self.params, self.local_shards, self.layout.param_infos, strict=True)
            )
        )
        self._versioned = (self.flat_param, *self.visible_params())
        self._places: tuple[Any, ...] = ()
        self._bind_shard()
        self.show_sharded()

    def show_full_params(self, tensors: Sequence[torch.Tensor]) -> None:
        self._saved_grads = self.visible_grads()
        self.show_sharded()
        for hooks in self._guarded:
            hooks.pop(self._guard_key, None)
        for entry, tensor in zip(self.params, tensors, strict=True):
            entry.param.grad = None
            entry.param.data = tensor
            if entry.adapter is not PLAIN:
                # The managed Parameter is plain and cannot become a DTensor, so modules get another Parameter.
                shown = nn.Parameter(entry.adapter.from_local(tensor), requires_grad=entry.param.requires_grad)
                for site in entry.sites:
                    site.module._parameters[site.name] = shown

    def hide_full_params(self) -> None:
        if self._saved_grads is None:
            return
        saved, self._saved_grads = self._saved_grads, None
        for entry in self.params:
            entry.param.grad = None
        self.show_sharded()
        self._bind_shard()
        for entry, grad in zip(self.params, saved, strict=True):
            set_grad(entry.param, grad)

    def _bind_shard(self, *, rebuilt: bool = False) -> None:
        shard = self.flat_param.data
        for each in self.visible:
            param, data = each.param, each.part_of(shard)
            grad, param.grad = param.grad, None
            param.data = data
            # Only Module._apply changes the dtype or device of a parameter with a gradient; torch converts both.
            if grad is not None and grad.shape == data.shape:
                set_grad(param, grad.to(dtype=data.dtype, device=data.device) if rebuilt else grad)
        self._places = tuple(map(self._place_of, self._visible_params))

    def changed(self) -> list[int]:
        if self._places == tuple(map(self._place_of, self._visible_params)) and self._hold_sharded():
            return []
        return [
            index
            for index, entry in enumerate(self.params)
            if self._place_of(entry.param) != self._places[index]
            or any(site.module._parameters.get(site.name) is not entry.param for site in entry.sites)
        ]

    def _adopt(self, changed: Sequence[int]) -> None:
        replaced = []
        for index, site in self._sites:
            current, entry = site.module._parameters.get(site.name), self.params[index]
            if isinstance(current, DTensor) and entry.adapter is PLAIN:
                refuse_replaced(f"Parameter {self.describe(index)}")
            if current is not None and current is not entry.param:
                replaced.append((entry.param, current.data))
        for param, data in replaced:  # after the loop: modules may have exchanged parameters
            param.data = data
        assigned = [i for i, entry in enumerate(self.params) if self._place_of(entry.param) != self._places[i]]
        if assigned:
            renew_shard(self.flat_param)
        for index in assigned:
            self._write_back(index, self.params[index].param.data)
        self.show_sharded()
        self._bind_shard()

    def _write_back(self, index: int, data: torch.Tensor) -> None:
        self.raise_weights_epoch()
        param_info, local_shard = self.layout.param_infos[index], self.local_shards[index]
        target = self.local(index)
        if data.shape == target.shape:
            target.copy_(data)
        elif tuple(data.shape) == param_info.shape:
            target.copy_(data.reshape(-1)[local_shard.in_param.to_slice()])
        else:
            raise UsageError(
                f"Parameter {param_info.fqn!r} of unit {self.spec.unit_name!r} was replaced by a tensor of shape "
                f"{tuple(data.shape)} on rank {self.spec.rank}; expected the unsharded shape {param_info.shape} or "
                f"this rank's local shard {tuple(target.shape)}. Change shapes before wrapping or inside "
                "summon_full_params."
            )


class FlatHandle(FlatParamHandle):
    """Shows the flat parameter (``use_orig_params=False``); modules hold original ones as plain attributes."""

    def _shown_instead(self, params: Sequence[ManagedParam]) -> Sequence[ManagedParam]:
        return [entry.replaced_by(shown) for entry, shown in zip(params, self.unsharded_params, strict=True)]

    def _show_first(self, params: Sequence[ManagedParam]) -> None:
        self._set_visible([VisibleParam(self.flat_param, range(len(params)))])
        self._versioned = (self.flat_param,)
        self._registered = [site.module._parameters for _, site in self._sites]
        warn_of_lost_hooks(params, self.spec.unit_name)
        self.hide_full_params()

    def _bind(self) -> Bindings:
        placeholders: Sequence[torch.Tensor] = self.unsharded_params
        if self.layout.world_size > 1:
            placeholders = [
                ShardedPlaceholder.of(param, param.device, partial(self.describe_with_shape, index), self._trains)
                for index, param in enumerate(self.unsharded_params)
            ]
        return Bindings(
            [*[site.module.__dict__ for _, site in self._sites], self.spec.module._parameters],
            [*[site.name for _, site in self._sites], FLAT_PARAM],
            [*[self.unsharded_params[index] for index, _ in self._sites], self.flat_param],
            [*[placeholders[index] for index, _ in self._sites], self.flat_param],
        )

    def _trains(self) -> bool:
        return self.flat_param.requires_grad

    def _remove_all(self) -> None:
        self.spec.module._parameters.pop(FLAT_PARAM, None)
        for _, site in self._sites:
            site.module.__dict__.pop(site.name, None)

    def show_full_params(self, tensors: Sequence[torch.Tensor]) -> None:
        self._remove_all()
        super().show_full_params(tensors)

    def hide_full_params(self) -> None:
        for _, site in self._sites:
            site.module._parameters.pop(site.name, None)
        super().hide_full_params()

    def restore_unsharded_params(self) -> list[int]:
        # torch.func.functional_call puts back the Parameter that it found by an assignment, which registers it.
        for index, site in self._sites if any(map(operator.contains, self._registered, self._bindings.names)) else ():
            if site.module._parameters.get(site.name) is self.unsharded_params[index]:
                site.module.__dict__[site.name] = site.module._parameters.pop(site.name)
        return super().restore_unsharded_params()

    def show_names(self, tensors: Sequence[torch.Tensor]) -> None:
        self._remove_all()
        super().show_names(tensors)

    def hide_names(self, *, shows_unsharded: bool = False) -> None:
        for _, site in self._sites if self.shows_names else ():
            site.module._parameters.pop(site.name, None)
        super().hide_names(shows_unsharded=shows_unsharded)

    def remove(self) -> None:
        self.spec.module._parameters[FLAT_PARAM] = None

    def adopt_requires_grad(self, shown: Sequence[bool], before: Sequence[bool]) -> None:
        pass  # the flat parameter's own flag counts

    def optimizer_param_of(self) -> dict[nn.Parameter, nn.Parameter]:
        return {}

    def unreduced_grads(self, flat_grad: torch.Tensor) -> list[torch.Tensor]:
        return [flat_grad[: self.layout.unpadded_numel]]

    def changed(self) -> list[int]:
        # A Parameter that the user assigns goes to ``_parameters``, any other value to the module's ``__dict__``.
        places = zip(self._sites, self._registered, *self._bindings, strict=False)
        return [
            index
            for (index, _), registered, held, name, _, own in places
            if name in registered or held.get(name, own) is not own
        ]

    def adopt_changes(self) -> None:
        current = self.spec.module._parameters.get(FLAT_PARAM)
        if current is not None and current is not self.flat_param:
            refuse_replaced(f"The flat parameter of unit {self.spec.unit_name!r}")
        super().adopt_changes()

    def _adopt(self, changed: Sequence[int]) -> None:
        for index in changed:
            raise UsageError(
                f"Parameter {self.describe(index)} was assigned on rank {self.spec.rank}, but with "
                "use_orig_params=False it is a part of the unit's flat parameter, and the assignment would be lost. "
                "Assign inside summon_full_params, copy a value to it there, or wrap with use_orig_params=True."
            )
