"""Says what slots hold outside of compute on FSDP1's two fronts: one flat parameter, or the user's Parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.core.flat_parameter import refuse_replaced, replace_shard, set_grad, warn_of_lost_hooks
from fsdp_flat.core.params import PLAIN, ManagedParam
from fsdp_flat.core.placeholders import ShardedPlaceholder, module_guard
from fsdp_flat.core.slots import (
    Bindings,
    Changes,
    SlotPlan,
    Slots,
    held_instead,
    new_full_params,
    registered_bindings,
    views_of_grad,
)
from fsdp_flat.core.storage import FlatStorage
from fsdp_flat.core.visible_params import VisibleParam
from fsdp_flat.errors import UsageError
from fsdp_flat.layout import FLAT_PARAM


class FlatPlan(SlotPlan):
    """Has one flat parameter for optimizers, and placeholders, which raise when they are used, for modules.

    This is ``use_orig_params=False``: the original parameters leave ``module._parameters``.
    """

    make_guard = staticmethod(module_guard)
    guards_alone = hooks_see_grads = False
    exposes_unreduced = True
    local_tensors = staticmethod(iter)
    full_params = staticmethod(new_full_params)
    reduced_grads = staticmethod(views_of_grad)

    def __init__(self, storage: FlatStorage) -> None:
        self._flat_param = storage.flat_param

    def bind(self, slots: Slots, *, rebuilt: bool) -> None:
        pass  # the flat parameter is the shard itself

    def entries(self, slots: Slots, params: Sequence[ManagedParam]) -> list[ManagedParam]:
        warn_of_lost_hooks(params, slots.spec.unit_name)
        return [entry.replaced_by(own) for entry, own in zip(params, slots.output.params, strict=True)]

    def visible(self, slots: Slots) -> Sequence[VisibleParam]:
        return [VisibleParam(self._flat_param, range(len(slots.params)))]

    def bindings(self, slots: Slots) -> Bindings:
        unsharded_params, flat_param, sites = slots.output.params, self._flat_param, slots.sites
        placeholders: Sequence[torch.Tensor] = unsharded_params
        if slots.layout.world_size > 1 or slots.output.owns_memory:
            placeholders = [
                ShardedPlaceholder.of(
                    param,
                    param.device,
                    partial(slots.describe_with_shape, index),
                    partial(getattr, flat_param, "requires_grad"),
                )
                for index, param in enumerate(unsharded_params)
            ]
        return Bindings(
            [*[site.module.__dict__ for _, site in sites], slots.spec.module._parameters],
            [*[site.name for _, site in sites], FLAT_PARAM],
            [*[unsharded_params[index] for index, _ in sites], flat_param],
            [*[placeholders[index] for index, _ in sites], flat_param],
            [site.module._parameters for _, site in sites],
        )

    def adopt(self, slots: Slots, changes: Changes) -> bool:
        """Refuse what was assigned to an original parameter: it is a part of the flat one.

        Raises:
            UsageError: something was assigned.
        """
        if not changes.assigned:
            return False
        current = slots.spec.module._parameters.get(FLAT_PARAM)
        if current is not None and current is not self._flat_param:
            refuse_replaced(f"The flat parameter of unit {slots.spec.unit_name!r}")
        raise UsageError(
            f"Parameter {slots.describe(changes.assigned[0])} was assigned on rank {slots.spec.rank}, but with "
            "use_orig_params=False it is a part of the unit's flat parameter, and the assignment would be lost. "
            "Assign inside summon_full_params, copy a value to it there, or wrap with use_orig_params=True."
        )


class OriginalsPlan(SlotPlan):
    """Has the user's Parameters in their places (``use_orig_params=True``).

    Their data is this rank's 1-D local shard (possibly empty), or the full parameter if nothing is sharded.
    """

    make_guard = staticmethod(module_guard)
    guards_alone = False
    hooks_see_grads = exposes_unreduced = True
    local_tensors = staticmethod(iter)
    reduced_grads = staticmethod(views_of_grad)
    bindings = staticmethod(registered_bindings)

    def __init__(self, storage: FlatStorage) -> None:
        self._storage = storage

    def entries(self, slots: Slots, params: Sequence[ManagedParam]) -> list[ManagedParam]:
        return list(params)

    def visible(self, slots: Slots) -> Sequence[VisibleParam]:
        layout, found = slots.layout, []
        for index, (entry, param_info) in enumerate(zip(slots.params, layout.param_infos, strict=True)):
            own, shape = layout.local_shard(index, slots.spec.rank), None if layout.world_size > 1 else param_info.shape
            is_elsewhere = own.is_empty and param_info.numel > 0
            place = range(index, index + 1), own.in_shard.to_slice(), shape, is_elsewhere
            found.append(VisibleParam(entry.param, *place))
        return found

    def bind(self, slots: Slots, *, rebuilt: bool) -> None:
        """Make the data of the parameters their parts of the shard."""
        shard = self._storage.flat_param.data
        for each in self.visible(slots):
            param, data = each.param, each.part_of(shard)
            grad, param.grad = param.grad, None
            replace_shard(param, data)
            # Only Module._apply changes the dtype or device of a parameter with a gradient; torch converts both.
            if grad is not None and grad.shape == data.shape:
                set_grad(param, grad.to(dtype=data.dtype, device=data.device) if rebuilt else grad)

    def full_params(self, slots: Slots, tensors: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        slots.saved_grads = slots.visible_grads()
        slots.show_sharded()
        found = []
        for entry, tensor in zip(slots.params, tensors, strict=True):
            entry.param.grad = None
            entry.param.data = tensor
            # The managed Parameter is plain and cannot become a DTensor, so modules get another Parameter.
            is_plain, trains = entry.adapter is PLAIN, entry.param.requires_grad
            found.append(entry.param if is_plain else nn.Parameter(entry.adapter.from_local(tensor), trains))
        return found

    def adopt(self, slots: Slots, changes: Changes) -> bool:
        """Copy what was assigned, a full tensor or this rank's part, to the shard.

        Raises:
            UsageError: it has another shape, or is of another FSDP.
        """
        replaced = []
        for index in changes.assigned:
            entry = slots.params[index]
            current = held_instead(entry)
            if isinstance(current, DTensor) and entry.adapter is PLAIN:
                refuse_replaced(f"Parameter {slots.describe(index)}")
            replaced.append((entry.param, current.data))
        for param, data in replaced:  # after the loop: modules may have exchanged parameters
            param.data = data
        moved = slots.moved()
        if moved:
            self._storage.renew()
        for index in moved:
            self._write_back(slots, index)
        slots.bind_shard()
        return bool(moved)

    def _write_back(self, slots: Slots, index: int) -> None:
        param_info, local_shard = slots.layout.param_infos[index], slots.layout.local_shard(index, slots.spec.rank)
        data, target = slots.params[index].param.data, self._storage.local(index)
        if data.shape == target.shape:
            target.copy_(data)
        elif tuple(data.shape) == param_info.shape:
            target.copy_(data.reshape(-1)[local_shard.in_param.to_slice()])
        else:
            raise UsageError(
                f"Parameter {slots.describe(index)} was replaced by a tensor of shape {tuple(data.shape)} on rank "
                f"{slots.spec.rank}; expected the unsharded shape {param_info.shape} or this rank's local shard "
                f"{tuple(target.shape)}. Change shapes before wrapping or inside summon_full_params."
            )
