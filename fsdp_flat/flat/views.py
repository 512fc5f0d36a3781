"""Sets the tensors that a unit's modules point at; :class:`DTensorViews` does so for ``fully_shard``.

* :class:`OrigViews` (``use_orig_params=True``): outside of compute ``module.weight`` is always the user's Parameter,
  whose data is this rank's 1-D local shard (possibly empty), or the full parameter if nothing is sharded.
* :class:`FlatViews` (``use_orig_params=False``): the original parameters leave ``module._parameters``; the optimizer
  sees only the flat parameter. Outside of compute the modules hold placeholders that raise when used.

During compute, both show ``unsharded_params``: one Parameter per original, a view of the unsharded buffer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.errors import PhaseError, UsageError
from fsdp_flat.flat.arrangement import VisibleParam, views_of
from fsdp_flat.flat.bindings import Bindings, parameters_of
from fsdp_flat.flat.guards import (
    ShardedPlaceholder,
    module_guard,
    refuse_replaced,
    renew_shard,
    set_grad,
    warn_of_lost_hooks,
)
from fsdp_flat.flat.params import PLAIN, ManagedParam
from fsdp_flat.flat.torch_flat import VERSION_OF
from fsdp_flat.layout import FLAT_PARAM, FlatLayout, LocalShard


class Views:
    """Defines the interface and the shared code of all implementations.

    Attributes:
        params: the managed parameters, in layout order.
        unsharded_params: one Parameter per managed parameter, a view of the unsharded buffer.
        module: the unit's module, where a visible flat parameter is registered.
        visible: the parameters that an optimizer holds.
        shows_unsharded: the modules point at the unsharded parameters.
        exposes_unreduced: ``.grad`` shows unreduced gradients inside ``no_sync``.
        shows_names: the modules hold the tensors of :meth:`show_names`.
        is_stepped: an optimizer that holds these parameters has stepped since their all-gather; so it has on all ranks.
    """

    visible: tuple[VisibleParam, ...]
    _versioned: tuple[torch.Tensor, ...]
    exposes_unreduced = True

    def __init__(
        self,
        params: Sequence[ManagedParam],
        unsharded_params: Sequence[nn.Parameter],
        layout: FlatLayout,
        *,
        rank: int,
        flat_param: nn.Parameter,
        module: nn.Module,
        unit_name: str,
    ) -> None:
        self.unit_name, self.module = unit_name, module
        self.params, self.layout, self.rank, self.flat_param = tuple(params), layout, rank, flat_param
        self._sites = [(index, site) for index, entry in enumerate(params) for site in entry.sites]
        self._weights_epoch = 0
        self._versions: tuple[int, ...] = ()
        self.shows_unsharded = self.is_stepped = self.shows_names = False
        self._saved_grads: list[torch.Tensor | None] | None = None
        self._guarded, self._guard = self._guarded_hooks(), module_guard(self._describe_one_of)
        self._guard_key = f"fsdp_flat_guard_{id(self)}"  # several units may guard one module
        self.use_unsharded_params(unsharded_params)

    @functools.cached_property
    def local_shards(self) -> tuple[LocalShard, ...]:
        """This rank's local shard of each parameter."""
        return tuple(self.layout.local_shard(i, self.rank) for i in range(len(self.layout.param_infos)))

    def _guarded_hooks(self) -> list[dict[Any, Any]]:
        """Return the forward pre-hooks of modules that must not be called with sharded parameters."""
        modules = dict.fromkeys(site.module for _, site in self._sites)
        return [module._forward_pre_hooks for module in modules] if self.layout.world_size > 1 else []

    def _describe_one_of(self, module: nn.Module) -> str:
        own = (index for index, site in self._sites if site.module is module)
        return self.describe_with_shape(next(own, 0))  # a copy of a module is called, which has the hook too

    # -- the implementations differ in these ---------------------------------------------------------------------

    def use_full_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Point the modules at full Parameters made from ``tensors``, until :meth:`unregister_full_params`."""
        self.unguard()
        full = [
            nn.Parameter(entry.adapter.from_local(tensor), requires_grad)
            for entry, tensor, requires_grad in zip(self.params, tensors, self.requires_grad(), strict=True)
        ]
        for index, site in self._sites:
            site.module._parameters[site.name] = full[index]

    def unregister_full_params(self) -> None:
        """Undo :meth:`use_full_tensors`; does nothing if no full parameters are shown."""
        self.use_sharded_views()

    def show_names(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register a tensor for each parameter under its original names, until :meth:`hide_names`."""
        self.shows_names = True
        for index, site in self._sites:
            site.module._parameters[site.name] = tensors[index]  # type: ignore[assignment]

    def hide_names(self) -> None:
        """Undo :meth:`show_names`, if that is not done yet: the sharded or unsharded parameters are shown again."""
        if self.shows_names:
            self.shows_names = False
            (self.use_unsharded_views if self.shows_unsharded else self.use_sharded_views)()

    def changed(self) -> list[int]:
        """Return the parameters to which the user assigned tensors, or data, since their sharded ones were shown."""
        raise NotImplementedError

    def adopt_changes(self) -> bool:
        """Adopt tensors that the user assigned to sharded parameters; return whether there were any."""
        raise NotImplementedError

    def restore_places(self) -> None:
        """Hold unsharded parameters where they belong, if a caller has put them back elsewhere in a forward."""

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        """Make sharded parameters views of the data of ``flat_param``."""

    def check_materialized(self) -> None:
        """Raise a UsageError if parameters that may stay on the meta device until a step are still there."""

    def check_plain(self) -> None:
        """Raise an UnsupportedError if local tensors have extensions that would not be called."""

    def _bind(self) -> Bindings:
        return Bindings(
            [parameters_of(site.module) for _, site in self._sites],
            [site.name for _, site in self._sites],
            [self.unsharded_params[index] for index, _ in self._sites],
            [self.params[index].param for index, _ in self._sites],
        )

    def remove(self) -> None:
        """Remove the managed parameters from the modules, so that ``Module._apply`` skips them."""
        # Not absent, because optimizers number parameters in registration order, and not None, which modules that
        # rebuild their list of weights after a conversion (nn.RNN) would keep.
        for parameters, name in zip(self._bindings.attributes, self._bindings.names, strict=True):
            parameters[name] = nn.Parameter(self.flat_param.new_empty(0), requires_grad=False)

    def adopt_requires_grad(self, shown: Sequence[bool], before: Sequence[bool]) -> None:
        """Adopt the ``requires_grad`` that the user set on unsharded parameters (``shown``, formerly ``before``)."""
        for entry, now, was in zip(self.params, shown, before, strict=True):
            if now != was:
                entry.param.requires_grad_(now)

    def optimizer_param_of(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a map from unsharded parameters to the parameters that an optimizer holds, if they differ."""
        return dict(zip(self.unsharded_params, self.visible_params(), strict=True))

    # -- unsharded and sharded views -----------------------------------------------------------------------------

    def use_unsharded_params(self, unsharded_params: Sequence[nn.Parameter]) -> None:
        """Use other unsharded parameters from now on (of another compute dtype)."""
        self.unsharded_params = tuple(unsharded_params)
        self._storages = [
            param.untyped_storage()._cdata if entry.adapter is PLAIN else None
            for param, entry in zip(self.unsharded_params, self.params, strict=True)
        ]
        self._bindings = self._bind()

    def use_unsharded_views(self) -> None:
        """Point the modules at the unsharded parameters."""
        self.shows_unsharded = True
        self.unguard()
        attributes, names, unsharded, _ = self._bindings
        for held, name, tensor in zip(attributes, names, unsharded, strict=True):
            held[name] = tensor

    def use_sharded_views(self) -> None:
        """Point the modules at the sharded parameters or their placeholders."""
        self.shows_unsharded = False
        attributes, names, _, sharded = self._bindings
        for held, name, tensor in zip(attributes, names, sharded, strict=True):
            held[name] = tensor
        for hooks in self._guarded:
            hooks[self._guard_key] = self._guard

    def _hold_sharded(self) -> bool:
        """Return whether every place in a module has its sharded tensor."""
        attributes, names, _, own = self._bindings
        return False not in [held.get(name) is each for held, name, each in zip(attributes, names, own, strict=True)]

    def hide_unsharded(self) -> None:
        """Point the modules at the sharded parameters, unless they do: what a user assigned is adopted later."""
        if self.shows_unsharded:
            self.use_sharded_views()

    def unguard(self) -> None:
        """Remove the guards, which raise when modules are called with sharded parameters."""
        for hooks in self._guarded:
            hooks.pop(self._guard_key, None)

    def check_shown(self) -> None:
        """Raise a PhaseError if a parameter was assigned while the unit was unsharded, which would be lost."""
        if not self.shows_unsharded:
            for index in self.changed():
                raise PhaseError(
                    f"Parameter {self.describe(index)} was assigned while the unit was kept unsharded after backward, "
                    "and the assignment would be lost. Call reshard() of its module on every rank, now or before "
                    "assignments, or do not keep parameters (set_reshard_after_backward, SHARD_GRAD_OP in no_sync)."
                )
            return
        places = zip(self._sites, *self._bindings, strict=False)
        for (index, _), attributes, name, unsharded_param, sharded in places:
            current, storage = attributes.get(name), self._storages[index]
            is_same = storage is None or unsharded_param.untyped_storage()._cdata == storage
            if current is not sharded and (current is not unsharded_param or not is_same):
                raise PhaseError(
                    f"Parameter {self.describe(index)} was assigned after a forward, while the unit was unsharded, and "
                    "the assignment would be lost. The weights were changed before the backward of that forward, or "
                    "without one. Assign between steps, after backward, or inside summon_full_params."
                )

    def local(self, index: int) -> torch.Tensor:
        """Return this rank's local shard of parameter ``index`` (1-D, a view); call :meth:`adopt_changes` first."""
        return self.flat_param.data[self.local_shards[index].in_shard.to_slice()]

    # -- full parameters -----------------------------------------------------------------------------------------

    def unflatten(self, whole: torch.Tensor) -> None:
        """Register ordinary Parameters with the values of ``whole`` (1-D, ``layout.numel``) permanently."""
        self.use_full_tensors([view.clone() for view in views_of(whole, self.layout)])
        self._saved_grads = None
        for entry in self.params:
            entry.param.__dict__.pop("_fsdp_flattened", None)

    def full_local(self, index: int) -> torch.Tensor:
        """Return the local tensor of parameter ``index`` at its first site while full parameters are shown."""
        return self.params[index].adapter.to_local(self.full_param(index))

    def full_param(self, index: int) -> nn.Parameter:
        """Return parameter ``index`` as its modules hold it while full parameters are shown."""
        site = self.params[index].sites[0]
        current = site.module._parameters.get(site.name)
        if current is None:
            raise UsageError(
                f"Parameter {self.describe(index)} was removed from its module while full parameters were shown, but "
                "the unit keeps its values. Set it to zero and requires_grad=False, or remove it before wrapping."
            )
        return current

    # -- the parameters of the optimizer -------------------------------------------------------------------------

    def visible_params(self) -> list[nn.Parameter]:
        """Return the parameters of this handle that an optimizer holds."""
        return [each.param for each in self.visible]

    def grads(self) -> list[torch.Tensor | None]:
        """Return this rank's gradient of each visible parameter."""
        return [each.param.grad for each in self.visible] if self._saved_grads is None else self._saved_grads

    def reduced_grads(self, shard_grad: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradient of each visible parameter, as views of a gradient like the shard."""
        return [each.part_of(shard_grad) for each in self.visible]

    def unreduced_grads(self, flat_grad: torch.Tensor) -> list[torch.Tensor]:
        """Return the unreduced gradient of each visible parameter, as views of an unsharded flat gradient."""
        return views_of(flat_grad, self.layout)

    def requires_grad(self) -> list[bool]:
        """Return for each original parameter whether it requires a gradient."""
        flags = [each.param.requires_grad for each in self.visible]
        return flags if len(flags) > 1 else flags * len(self.params)

    def raise_weights_epoch(self) -> None:
        """Record a change of shard values that raises no version counter: a load, a write-back, ``.data =``."""
        self._weights_epoch += 1

    def note_step(self) -> None:
        """Record a step of an optimizer that holds parameters of these views."""
        self.is_stepped = True

    def weights_epoch(self) -> int:
        """Return a number that increases when sharded values change, and never falls."""
        versions = tuple(map(VERSION_OF, self._versioned))
        if versions != self._versions:
            self._versions = versions
            self._weights_epoch += 1
        return self._weights_epoch

    # -- error texts ---------------------------------------------------------------------------------------------

    def describe(self, index: int) -> str:
        """Return the FQN of a parameter and its unit, for error texts."""
        return f"{self.layout.param_infos[index].fqn!r} of unit {self.unit_name!r}"

    def describe_with_shape(self, index: int) -> str:
        """Return the FQN, the unsharded shape and the unit of a parameter, for error texts."""
        shape = tuple(self.unsharded_params[index].shape)
        return f"{self.layout.param_infos[index].fqn!r} {shape} of unit {self.unit_name!r}"


class OrigViews(Views):
    """Implements :class:`Views` for ``use_orig_params=True``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_sharded = self.layout.world_size > 1
        self.visible = tuple(
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
        self._pointers: tuple[int, ...] = ()
        self.bind_shard()
        self.use_sharded_views()

    def use_full_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        self._saved_grads = self.grads()
        self.use_sharded_views()
        self.unguard()
        for entry, tensor in zip(self.params, tensors, strict=True):
            entry.param.grad = None
            entry.param.data = tensor
            if entry.adapter is not PLAIN:
                # The user's plain Parameter replaces a DTensor, which it cannot become.
                shown = nn.Parameter(entry.adapter.from_local(tensor), requires_grad=entry.param.requires_grad)
                for site in entry.sites:
                    site.module._parameters[site.name] = shown

    def unregister_full_params(self) -> None:
        if self._saved_grads is None:
            return
        saved, self._saved_grads = self._saved_grads, None
        for entry in self.params:
            entry.param.grad = None
        self.use_sharded_views()
        self.bind_shard()
        for entry, grad in zip(self.params, saved, strict=True):
            set_grad(entry.param, grad)

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        shard = self.flat_param.data
        for each in self.visible:
            param, data = each.param, each.part_of(shard)
            grad, param.grad = param.grad, None
            param.data = data
            # Only Module._apply changes the dtype or device of a parameter with a gradient; torch converts both.
            if grad is not None and grad.shape == data.shape:
                set_grad(param, grad.to(dtype=data.dtype, device=data.device) if rebuilt else grad)
        self._pointers = tuple(each.param.data_ptr() for each in self.visible)

    def changed(self) -> list[int]:
        pointers = tuple([each.param.data_ptr() for each in self.visible])
        if self._pointers == pointers and self._hold_sharded():
            return []
        return [
            index
            for index, entry in enumerate(self.params)
            if entry.param.data_ptr() != self._pointers[index]
            or any(site.module._parameters.get(site.name) is not entry.param for site in entry.sites)
        ]

    def adopt_changes(self) -> bool:
        if not self.changed():
            return False
        replaced = []
        for index, site in self._sites:
            current, entry = site.module._parameters.get(site.name), self.params[index]
            if isinstance(current, DTensor) and entry.adapter is PLAIN:
                refuse_replaced(f"Parameter {self.describe(index)}")
            if current is not None and current is not entry.param:
                replaced.append((entry.param, current.data))
        for param, data in replaced:  # after the loop: modules may have exchanged parameters
            param.data = data
        assigned = [i for i, entry in enumerate(self.params) if entry.param.data_ptr() != self._pointers[i]]
        if assigned:
            renew_shard(self.flat_param)
        for index in assigned:
            self._write_back(index, self.params[index].param.data)
        self.use_sharded_views()
        self.bind_shard()
        return True

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
                f"Parameter {param_info.fqn!r} of unit {self.unit_name!r} was replaced by a tensor of shape "
                f"{tuple(data.shape)} on rank {self.rank}; expected the unsharded shape {param_info.shape} or this "
                f"rank's local shard {tuple(target.shape)}. Change shapes before wrapping or inside summon_full_params."
            )


class FlatViews(Views):
    """Implements :class:`Views` for ``use_orig_params=False``; modules hold tensors as plain attributes."""

    def __init__(
        self, params: Sequence[ManagedParam], unsharded_params: Sequence[nn.Parameter], *args: Any, **kwargs: Any
    ) -> None:
        entries = [entry.replaced_by(shown) for entry, shown in zip(params, unsharded_params, strict=True)]
        super().__init__(entries, unsharded_params, *args, **kwargs)
        self.visible = (VisibleParam(self.flat_param, range(len(entries))),)
        self._versioned = (self.flat_param,)
        self._registered = [site.module._parameters for _, site in self._sites]
        warn_of_lost_hooks(params, self.unit_name)
        self.unregister_full_params()

    def _bind(self) -> Bindings:
        placeholders: Sequence[torch.Tensor] = self.unsharded_params
        if self.layout.world_size > 1:
            placeholders = ShardedPlaceholder.of(self.unsharded_params, self.describe_with_shape)
        return Bindings(
            [*[site.module.__dict__ for _, site in self._sites], self.module._parameters],
            [*[site.name for _, site in self._sites], FLAT_PARAM],
            [*[self.unsharded_params[index] for index, _ in self._sites], self.flat_param],
            [*[placeholders[index] for index, _ in self._sites], self.flat_param],
        )

    def _remove_all(self) -> None:
        self.module._parameters.pop(FLAT_PARAM, None)
        for _, site in self._sites:
            site.module.__dict__.pop(site.name, None)

    def use_full_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        self._remove_all()
        super().use_full_tensors(tensors)

    def unregister_full_params(self) -> None:
        for _, site in self._sites:
            site.module._parameters.pop(site.name, None)
        super().unregister_full_params()

    def restore_places(self) -> None:
        # torch.func.functional_call puts back the Parameter that it found by an assignment, which registers it.
        for index, site in self._sites if any(map(operator.contains, self._registered, self._bindings.names)) else ():
            if site.module._parameters.get(site.name) is self.unsharded_params[index]:
                site.module.__dict__[site.name] = site.module._parameters.pop(site.name)

    def show_names(self, tensors: Sequence[torch.Tensor]) -> None:
        self._remove_all()
        super().show_names(tensors)

    def hide_names(self) -> None:
        for _, site in self._sites if self.shows_names else ():
            site.module._parameters.pop(site.name, None)
        super().hide_names()

    def remove(self) -> None:
        self.module._parameters[FLAT_PARAM] = None

    def adopt_requires_grad(self, shown: Sequence[bool], before: Sequence[bool]) -> None:
        pass  # that of the flat parameter counts

    def optimizer_param_of(self) -> dict[nn.Parameter, nn.Parameter]:
        return {}

    def unreduced_grads(self, flat_grad: torch.Tensor) -> list[torch.Tensor]:
        return [flat_grad[: self.layout.unpadded_numel]]

    def changed(self) -> list[int]:
        # A module puts a Parameter that is assigned to it there, any other value in the place of the binding.
        places = zip(self._sites, self._registered, *self._bindings, strict=False)
        return [
            index
            for (index, _), registered, held, name, _, own in places
            if name in registered or held.get(name, own) is not own
        ]

    def adopt_changes(self) -> bool:
        current = self.module._parameters.get(FLAT_PARAM)
        if current is not None and current is not self.flat_param:
            refuse_replaced(f"The flat parameter of unit {self.unit_name!r}")
        for index in self.changed():
            raise UsageError(
                f"Parameter {self.describe(index)} was assigned on rank {self.rank}, but with use_orig_params=False "
                "it is a part of the unit's flat parameter, and the assignment would be lost. Assign inside "
                "summon_full_params, copy a value to it there, or wrap with use_orig_params=True."
            )
        return False
