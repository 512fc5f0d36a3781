"""Shows a group's parameters in modules and to optimizers: as FSDP1 does, the user's Parameters or a flat parameter.

A :class:`Shown` is a group's ``shown``. Its subclasses differ in what modules hold outside of compute:

* :class:`OriginalsShown` (``use_orig_params=True``): ``module.weight`` is the user's Parameter, whose data is this
  rank's 1-D local shard (possibly empty), or the full parameter if nothing is sharded.
* :class:`FlatShown` (``use_orig_params=False``): the original parameters leave ``module._parameters``, and an optimizer
  sees only the flat parameter. Modules hold placeholders that raise when used.
* ``DTensorShown`` (``shown_dtensors.py``, for ``fully_shard``): ``module.weight`` is a DTensor under its own name.

In compute modules hold the unsharded parameters, views of the group's buffer, one for each original parameter.
"""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, contains, getitem, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.core.buffers import AllGatherOutput
from fsdp_flat.core.flat_parameter import refuse_replaced, renew_shard, set_grad, warn_of_lost_hooks
from fsdp_flat.core.group_spec import ParamGroupSpec
from fsdp_flat.core.layout import Layout
from fsdp_flat.core.params import PLAIN, FlattenedBy, ManagedParam
from fsdp_flat.core.placeholders import ShardedPlaceholder, module_guard
from fsdp_flat.core.torch_core import dynamo_disabled_here
from fsdp_flat.core.visible_params import VisibleParam
from fsdp_flat.errors import PhaseError, UsageError
from fsdp_flat.layout import FLAT_PARAM

_REQUIRES_GRAD = attrgetter("requires_grad")
_GRAD_HOOKS = attrgetter("_backward_hooks")


class _Assignments(UserDict[str, Any]):
    """The parameters of a module whose class has a ``__setattr__`` that keeps them elsewhere too."""

    def __init__(self, module: nn.Module) -> None:
        self.data = module._parameters
        self._module = module

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        setattr(self._module, name, param)


def _parameters_of(module: nn.Module) -> Any:
    """Return the parameters that a module holds itself, as a mapping that sets them as the module needs it."""
    # The checks of ``nn.Module.__setattr__`` take long. Recurrent modules look at their parameters in each forward too.
    is_plain = type(module).__setattr__ in (nn.Module.__setattr__, nn.RNNBase.__setattr__)
    return module._parameters if is_plain else _Assignments(module)


def apply_hooks(hooks: Mapping[int, Callable[..., Any]], grad: torch.Tensor) -> torch.Tensor:
    """Pass a gradient through gradient hooks of a parameter that is not in the autograd graph."""
    for hook in hooks.values():
        result = hook(grad)
        grad = grad if result is None else result
    return grad


@dynamo_disabled_here
def _through_hooks(shown: weakref.ref[Shown], index: int, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Pass a gradient of an unsharded parameter through the user's hooks, as its own hook, which must not own them."""
    owner = shown()
    return None if owner is None or grad is None else owner.through_hooks(index, grad)


class Bindings(NamedTuple):
    """Lists the places of a group's tensors in modules, as columns: a step goes through them several times a unit.

    Attributes:
        attributes: for each place, the mapping of a module that holds the tensor, by ``names``.
        unsharded, sharded: the tensors for compute, and outside of it.
    """

    attributes: Sequence[Any]
    names: Sequence[str]
    unsharded: Sequence[torch.Tensor]
    sharded: Sequence[torch.Tensor]


class Shown:
    """Holds what modules and optimizers see of a group's parameters; subclasses choose it.

    Args:
        params: the user's parameters, in layout order.

    Attributes:
        spec, layout, flat_param: those of the group.
        params: the managed parameters, in layout order; the group has the same list.
        buffer: the group's buffer for the present compute dtype, with the unsharded parameters.
        visible: the parameters that an optimizer holds, with their places in the shard.
        visible_params: these parameters.
        versioned: tensors whose version counters rise with each change of this rank's values.
        num_trainable: number of original parameters that require a gradient.
        shows_names: the modules hold the tensors that :meth:`show_names` was given.
        exposes_unreduced: ``.grad`` shows unreduced gradients inside ``no_sync``.
        registered, names: mappings that have one of the names only after an assignment; see :meth:`unregister`.
    """

    visible: tuple[VisibleParam, ...]
    visible_params: tuple[nn.Parameter, ...]
    versioned: tuple[torch.Tensor, ...]
    exposes_unreduced = True
    registered: Sequence[Any] = ()
    names: Sequence[str] = ()
    # Creates the forward pre-hook of modules that are called while their parameters are sharded.
    _make_guard: Callable[..., Callable[..., Any]] = staticmethod(module_guard)

    def __init__(
        self,
        params: Sequence[ManagedParam],
        *,
        spec: ParamGroupSpec,
        layout: Layout,
        flat_param: nn.Parameter,
        buffer: AllGatherOutput,
    ) -> None:
        self.spec, self.layout, self.flat_param, self.buffer = spec, layout, flat_param, buffer
        # Of the user's original parameters, whose gradient hooks count.
        self._original_hooks = [entry.param._backward_hooks for entry in params]
        self.params = list(self._replaced(params))
        self._sites = [(index, site) for index, entry in enumerate(self.params) for site in entry.sites]
        self._guarded, self._guard = self._guarded_hooks(), self._make_guard(self._describe_one_of)
        self._guard_key = f"fsdp_flat_guard_{id(self)}"  # several units may guard one module
        self._bindings = self._bind()
        self._saved_grads: list[torch.Tensor | None] | None = None
        self.shows_names = False
        self.num_trainable = 0
        self._synced_requires_grad = [False] * len(self.params)
        self._accept_hook: Callable[[torch.Tensor], None] | None = None
        self._show_first(params)
        self.mark_params()

    def mark_params(self) -> None:
        """Mark the parameters as those of the group's unit, which has a name."""
        for entry, param_info in zip(self.params, self.layout.param_infos, strict=True):
            entry.mark(FlattenedBy(entry.fqn, self.spec.unit_name, param_info.shape))

    def _set_visible(self, visible: Iterable[VisibleParam]) -> None:
        self.visible = tuple(visible)
        self.visible_params = tuple([each.param for each in self.visible])

    def _guarded_hooks(self) -> list[dict[Any, Any]]:
        """Return the forward pre-hooks of modules that must not be called with sharded parameters."""
        modules = dict.fromkeys(site.module for _, site in self._sites)
        return [module._forward_pre_hooks for module in modules] if self.layout.world_size > 1 else []

    # -- what subclasses choose --------------------------------------------------------------------------------------

    def _replaced(self, params: Sequence[ManagedParam]) -> Sequence[ManagedParam]:
        """Return ``params`` with the parameters that modules hold in the place of the original ones."""
        return params

    def _show_first(self, params: Sequence[ManagedParam]) -> None:
        """Set ``visible`` and ``versioned``, and show the sharded parameters for the first time."""
        raise NotImplementedError

    def _bind(self) -> Bindings:
        unsharded_params = self.buffer.params
        return Bindings(
            [_parameters_of(site.module) for _, site in self._sites],
            [site.name for _, site in self._sites],
            [unsharded_params[index] for index, _ in self._sites],
            [self.params[index].param for index, _ in self._sites],
        )

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        """Make sharded parameters views of the shard, which has another dtype or device if ``rebuilt``."""

    def changed(self) -> list[int]:
        """Return indices of sharded parameters that the user has replaced, or given other ``.data``."""
        raise NotImplementedError

    def adopt(self, changed: Sequence[int]) -> bool:
        """Adopt the tensors that the user assigned to sharded parameters, and return whether any value has changed."""
        raise NotImplementedError

    def check_convertible(self) -> None:
        """Raise a UsageError if a parameter cannot change its dtype or device."""

    def unregister(self) -> None:
        """Undo assignments of unsharded parameters, which have registered them."""

    # -- in modules --------------------------------------------------------------------------------------------------

    def use_buffer(self, buffer: AllGatherOutput) -> None:
        """Show the unsharded parameters of ``buffer`` in compute from now on, and the sharded ones now."""
        self.buffer = buffer
        self._bindings = self._bind()
        self.show_sharded()
        # Unsharded parameters that were in use before still have their flags and hooks.
        self._synced_requires_grad = [param.requires_grad for param in buffer.params]
        self._sync_requires_grad()

    def accept_grads_by(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Call ``hook`` with each unsharded parameter that has got a gradient."""
        self._accept_hook = hook
        self._sync_requires_grad()

    def show_unsharded(self) -> None:
        """Point the modules at the unsharded parameters, with the ``requires_grad`` that the user set."""
        synced, wanted = self._synced_requires_grad, list(map(_REQUIRES_GRAD, self.visible_params))
        if list(map(_REQUIRES_GRAD, self.buffer.params)) != synced or (
            wanted != synced and wanted * len(synced) != synced  # one flag may be that of all parameters
        ):
            self._sync_requires_grad()
        if any(map(_GRAD_HOOKS, self.visible_params)) or any(self._original_hooks):
            self._run_grad_hooks()
        for hooks in self._guarded:
            hooks.pop(self._guard_key, None)
        attributes, names, unsharded, _ = self._bindings
        for held, name, tensor in zip(attributes, names, unsharded, strict=True):
            held[name] = tensor

    def show_sharded(self) -> None:
        """Point the modules at the sharded parameters, or at placeholders for them."""
        attributes, names, _, sharded = self._bindings
        for held, name, tensor in zip(attributes, names, sharded, strict=True):
            held[name] = tensor
        for hooks in self._guarded:
            hooks[self._guard_key] = self._guard

    def show_full_params(self, tensors: Sequence[torch.Tensor]) -> None:
        """Point the modules at full Parameters made from ``tensors``, until :meth:`hide_full_params`."""
        for hooks in self._guarded:
            hooks.pop(self._guard_key, None)
        full = [
            entry.unsharded(tensor, requires_grad=requires_grad)
            for entry, tensor, requires_grad in zip(self.params, tensors, self.requires_grad(), strict=True)
        ]
        for index, site in self._sites:
            site.module._parameters[site.name] = full[index]

    def hide_full_params(self) -> None:
        """Undo :meth:`show_full_params`; does nothing if no full parameters are shown."""
        self.show_sharded()

    def unflatten(self, whole: torch.Tensor) -> None:
        """Register ordinary Parameters with the values of ``whole`` (1-D, ``layout.numel``) permanently."""
        self.show_full_params([view.clone() for view in self.layout.views(whole)])
        self._saved_grads = None
        for entry in self.params:
            for name in ("_fsdp_flat_owner", "_fsdp_flattened"):
                entry.param.__dict__.pop(name, None)

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

    def full_local(self, index: int) -> torch.Tensor:
        """Return the local tensor of parameter ``index`` at its first site while full parameters are shown."""
        return self.params[index].adapter.to_local(self.full_param(index))

    def show_names(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register ``tensors``, one per parameter, under the original names, until :meth:`hide_names`."""
        self.shows_names = True
        for index, site in self._sites:
            site.module._parameters[site.name] = tensors[index]  # type: ignore[assignment]

    def hide_names(self, *, shows_unsharded: bool = False) -> None:
        """Undo :meth:`show_names`: show the sharded parameters again, or the unsharded ones (``shows_unsharded``)."""
        if self.shows_names:
            self.shows_names = False
            (self.show_unsharded if shows_unsharded else self.show_sharded)()

    def remove(self) -> None:
        """Take the managed parameters out of the modules, so that ``Module._apply`` skips them."""
        # Empty Parameters keep the places: optimizers number parameters in registration order, and modules that
        # rebuild their list of weights after a conversion (nn.RNN) would keep a None.
        for parameters, name in zip(self._bindings.attributes, self._bindings.names, strict=True):
            parameters[name] = nn.Parameter(self.flat_param.new_empty(0), requires_grad=False)

    def check_not_assigned(self, *, shows_unsharded: bool) -> None:
        """Raise a PhaseError if a parameter was assigned while the buffer was filled: the assignment would be lost."""
        if not shows_unsharded:
            for index in self.changed():
                raise PhaseError(
                    f"Parameter {self.describe(index)} was assigned while the unit was kept unsharded after backward, "
                    "and the assignment would be lost. Call reshard() of its module on every rank, now or before "
                    "assignments, or do not keep parameters (set_reshard_after_backward, SHARD_GRAD_OP in no_sync)."
                )
            return
        places, storages = zip(self._sites, *self._bindings, strict=False), self.buffer.storages
        for (index, _), attributes, name, unsharded_param, sharded in places:
            current, storage = attributes.get(name), storages[index]
            is_same = storage is None or unsharded_param.untyped_storage()._cdata == storage
            if current is not sharded and (current is not unsharded_param or not is_same):
                raise PhaseError(
                    f"Parameter {self.describe(index)} was assigned after a forward, while the unit was unsharded, and "
                    "the assignment would be lost. The weights were changed before the backward of that forward, or "
                    "without one. Assign between steps, after backward, or inside summon_full_params."
                )

    # -- gradients ---------------------------------------------------------------------------------------------------

    def requires_grad(self) -> list[bool]:
        """Return for each original parameter whether it requires a gradient."""
        flags = list(map(_REQUIRES_GRAD, self.visible_params))
        return flags if len(flags) > 1 else flags * len(self.params)

    def _sync_requires_grad(self) -> None:
        """Give the unsharded parameters the ``requires_grad`` that the user set, and hooks for their gradients."""
        unsharded_params, before = self.buffer.params, self._synced_requires_grad
        shown = list(map(_REQUIRES_GRAD, unsharded_params))
        if shown != before:
            self._adopt_requires_grad(shown, before)
        wanted = self.requires_grad()
        for index, (param, want, was) in enumerate(zip(unsharded_params, wanted, before, strict=True)):
            param.requires_grad_(want)
            if want and not was:
                param._fsdp_flat_index = index  # type: ignore[attr-defined]
                param.register_post_accumulate_grad_hook(self._accept_hook)
            elif was and not want:
                param._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._synced_requires_grad = wanted
        self.num_trainable = sum(wanted)

    def _adopt_requires_grad(self, shown: Sequence[bool], before: Sequence[bool]) -> None:
        """Adopt the ``requires_grad`` that the user set on unsharded parameters (``shown``, formerly ``before``)."""
        for entry, now, was in zip(self.params, shown, before, strict=True):
            if now != was:
                entry.param.requires_grad_(now)

    def _run_grad_hooks(self) -> None:
        """Have the unsharded parameters, which are in the graph, run the gradient hooks of the user's parameters."""
        for index, unsharded_param in enumerate(self.buffer.params):
            is_hooked = "_fsdp_flat_hooked" in unsharded_param.__dict__
            if not is_hooked and unsharded_param.requires_grad and self._grad_hooks_of(index):
                unsharded_param._fsdp_flat_hooked = True  # type: ignore[attr-defined]
                unsharded_param.register_hook(partial(_through_hooks, weakref.ref(self), index))

    def _grad_hooks_of(self, index: int) -> Mapping[int, Callable[..., Any]] | None:
        """Return the user's hooks for the gradient of a parameter, but for those that autograd runs by itself."""
        param = self.params[index].param
        own = None if param is self.buffer.params[index] else param._backward_hooks
        return own or self._original_hooks[index]

    def through_hooks(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient of unsharded parameter ``index`` (its shape) after the user's hooks.

        Raises:
            UsageError: a hook changes the gradient's shape.
        """
        changed = apply_hooks(self._grad_hooks_of(index) or {}, grad)
        if changed.shape != grad.shape:
            raise UsageError(
                f"A gradient hook of {self.describe(index)} returned a tensor of shape {tuple(changed.shape)} "
                f"on rank {self.spec.rank} of the shard group; expected the gradient's shape "
                f"{tuple(grad.shape)}. Return a tensor of this shape, or None."
            )
        return changed.to(grad.dtype)

    def visible_grads(self) -> list[torch.Tensor | None]:
        """Return this rank's local gradient of each visible parameter, or None."""
        return [param.grad for param in self.visible_params] if self._saved_grads is None else self._saved_grads

    def reduced_grads(self, shard_grad: torch.Tensor) -> list[torch.Tensor]:
        """Return views of ``shard_grad`` (1-D, ``shard_numel``): the gradient of each visible parameter."""
        return [each.part_of(shard_grad) for each in self.visible]

    def unreduced_grads(self, flat_grad: torch.Tensor) -> list[torch.Tensor]:
        """Return the unreduced gradient of each visible parameter, as views of an unsharded flat gradient."""
        return self.layout.views(flat_grad)

    def optimizer_param_of(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a map from unsharded parameters to the parameters that an optimizer holds, if they differ."""
        return dict(zip(self.buffer.params, self.visible_params, strict=True))

    # -- texts of errors ---------------------------------------------------------------------------------------------

    def describe(self, index: int) -> str:
        """Return the FQN of a parameter and its unit, for error texts."""
        return f"{self.layout.param_infos[index].fqn!r} of unit {self.spec.unit_name!r}"

    def describe_with_shape(self, index: int) -> str:
        """Return the FQN, the unsharded shape and the unit of a parameter, for error texts."""
        shape = tuple(self.buffer.params[index].shape)
        return f"{self.layout.param_infos[index].fqn!r} {shape} of unit {self.spec.unit_name!r}"

    def _describe_one_of(self, module: nn.Module) -> str:
        own = (index for index, site in self._sites if site.module is module)
        return self.describe_with_shape(next(own, 0))  # no site: a copy of a module, which has the hook too, was called


class OriginalsShown(Shown):
    """Shows the user's Parameters (``use_orig_params=True``)."""

    def _show_first(self, params: Sequence[ManagedParam]) -> None:
        layout, rank = self.layout, self.spec.rank
        visible = []
        for index, (entry, param_info) in enumerate(zip(self.params, layout.param_infos, strict=True)):
            own, shape = layout.local_shard(index, rank), None if layout.world_size > 1 else param_info.shape
            is_elsewhere = own.is_empty and param_info.numel > 0
            place = range(index, index + 1), own.in_shard.to_slice(), shape, is_elsewhere
            visible.append(VisibleParam(entry.param, *place))
        self._set_visible(visible)
        self.versioned = (self.flat_param, *self.visible_params)
        self._places: tuple[Any, ...] = ()
        self.bind_shard()
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

    def through_hooks(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if self.layout.world_size > 1:
            return super().through_hooks(index, grad)
        # Nothing is sharded: hooks see the gradient of this backward so far, and may change it, as in the plain module.
        param, unsharded_param = self.params[index].param, self.buffer.params[index]
        before = param.grad
        set_grad(param, unsharded_param.grad)
        try:
            return super().through_hooks(index, grad)
        finally:
            set_grad(unsharded_param, param.grad)
            set_grad(param, before)

    def hide_full_params(self) -> None:
        if self._saved_grads is None:
            return
        saved, self._saved_grads = self._saved_grads, None
        for entry in self.params:
            entry.param.grad = None
        self.show_sharded()
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
        self._places = tuple(map(self.buffer.place_of, self.visible_params))

    def changed(self) -> list[int]:
        attributes, names, _, sharded = self._bindings
        try:
            is_same = all(map(is_, map(getitem, attributes, names), sharded))
        except KeyError:  # a parameter was deleted
            is_same = False
        if is_same and self._places == tuple(map(self.buffer.place_of, self.visible_params)):
            return []
        return [
            index
            for index, entry in enumerate(self.params)
            if self.buffer.place_of(entry.param) != self._places[index]
            or any(site.module._parameters.get(site.name) is not entry.param for site in entry.sites)
        ]

    def adopt(self, changed: Sequence[int]) -> bool:
        replaced = []
        for index, site in self._sites:
            current, entry = site.module._parameters.get(site.name), self.params[index]
            if isinstance(current, DTensor) and entry.adapter is PLAIN:
                refuse_replaced(f"Parameter {self.describe(index)}")
            if current is not None and current is not entry.param:
                replaced.append((entry.param, current.data))
        for param, data in replaced:  # after the loop: modules may have exchanged parameters
            param.data = data
        assigned = [i for i, entry in enumerate(self.params) if self.buffer.place_of(entry.param) != self._places[i]]
        if assigned:
            renew_shard(self.flat_param)
        for index in assigned:
            self._write_back(index, self.params[index].param.data)
        self.show_sharded()
        self.bind_shard()
        return bool(assigned)

    def _write_back(self, index: int, data: torch.Tensor) -> None:
        param_info, local_shard = self.layout.param_infos[index], self.layout.local_shard(index, self.spec.rank)
        target = self.flat_param.data[local_shard.in_shard.to_slice()]
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


class FlatShown(Shown):
    """Shows the flat parameter (``use_orig_params=False``); modules hold original ones as plain attributes."""

    def _replaced(self, params: Sequence[ManagedParam]) -> Sequence[ManagedParam]:
        return [entry.replaced_by(shown) for entry, shown in zip(params, self.buffer.params, strict=True)]

    def _show_first(self, params: Sequence[ManagedParam]) -> None:
        self._set_visible([VisibleParam(self.flat_param, range(len(params)))])
        self.versioned = (self.flat_param,)
        self.registered = [site.module._parameters for _, site in self._sites]
        self.names = self._bindings.names
        warn_of_lost_hooks(params, self.spec.unit_name)
        self.hide_full_params()

    def _bind(self) -> Bindings:
        unsharded_params = self.buffer.params
        placeholders: Sequence[torch.Tensor] = unsharded_params
        if self.layout.world_size > 1:
            placeholders = [
                ShardedPlaceholder.of(param, param.device, partial(self.describe_with_shape, index), self._trains)
                for index, param in enumerate(unsharded_params)
            ]
        return Bindings(
            [*[site.module.__dict__ for _, site in self._sites], self.spec.module._parameters],
            [*[site.name for _, site in self._sites], FLAT_PARAM],
            [*[unsharded_params[index] for index, _ in self._sites], self.flat_param],
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

    def unregister(self) -> None:
        # torch.func.functional_call puts back the Parameter that it found by an assignment, which registers it.
        for index, site in self._sites:
            if site.module._parameters.get(site.name) is self.buffer.params[index]:
                site.module.__dict__[site.name] = site.module._parameters.pop(site.name)

    def show_names(self, tensors: Sequence[torch.Tensor]) -> None:
        self._remove_all()
        super().show_names(tensors)

    def hide_names(self, *, shows_unsharded: bool = False) -> None:
        for _, site in self._sites if self.shows_names else ():
            site.module._parameters.pop(site.name, None)
        super().hide_names(shows_unsharded=shows_unsharded)

    def remove(self) -> None:
        self.spec.module._parameters[FLAT_PARAM] = None

    def _adopt_requires_grad(self, shown: Sequence[bool], before: Sequence[bool]) -> None:
        pass  # the flat parameter's own flag counts

    def optimizer_param_of(self) -> dict[nn.Parameter, nn.Parameter]:
        return {}

    def unreduced_grads(self, flat_grad: torch.Tensor) -> list[torch.Tensor]:
        return [flat_grad[: self.layout.unpadded_numel]]

    def changed(self) -> list[int]:
        attributes, names, _, sharded = self._bindings
        try:
            is_same = all(map(is_, map(getitem, attributes, names), sharded))
        except KeyError:  # a parameter was deleted, or the flat one is not shown
            is_same = False
        # A Parameter that the user assigns goes to ``_parameters``, any other value to the module's ``__dict__``.
        if is_same and not any(map(contains, self.registered, names)):
            return []
        current = self.spec.module._parameters.get(FLAT_PARAM)
        if current is not None and current is not self.flat_param:
            refuse_replaced(f"The flat parameter of unit {self.spec.unit_name!r}")
        places = zip(self._sites, self.registered, *self._bindings, strict=False)
        return [
            index
            for (index, _), registered, held, name, _, own in places
            if name in registered or held.get(name, own) is not own
        ]

    def adopt(self, changed: Sequence[int]) -> bool:
        raise UsageError(
            f"Parameter {self.describe(changed[0])} was assigned on rank {self.spec.rank}, but with "
            "use_orig_params=False it is a part of the unit's flat parameter, and the assignment would be lost. "
            "Assign inside summon_full_params, copy a value to it there, or wrap with use_orig_params=True."
        )
