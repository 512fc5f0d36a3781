"""Fills the slots of a group's parameters: the places in modules where the program finds them, and optimizers.

A slot is a place of a parameter in a module. In compute it holds the unsharded parameter, a view of the group's buffer;
outside of compute what the group's :class:`SlotPlan` says: a placeholder beside one flat parameter, the user's
Parameter with this rank's part, or a DTensor. :meth:`Slots.diff` says what the program did to them meanwhile.
"""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, contains, getitem, is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fsdp_flat.core.all_gather_output import AllGatherOutput
from fsdp_flat.core.flat_parameter import set_grad
from fsdp_flat.core.group_spec import ParamGroupSpec
from fsdp_flat.core.layout import Layout
from fsdp_flat.core.params import PLAIN, FlattenedBy, ManagedParam, is_managed
from fsdp_flat.core.storage import Storage
from fsdp_flat.core.torch_core import VERSION_OF, dynamo_disabled_here, has_values, is_alias, local_of
from fsdp_flat.core.visible_params import VisibleParam
from fsdp_flat.errors import UsageError

_REQUIRES_GRAD = attrgetter("requires_grad")
_GRAD_HOOKS = attrgetter("_backward_hooks")
_IS_META = attrgetter("is_meta")


class Changes(NamedTuple):
    """Lists what the program did to a group's parameters since their slots were filled, by index in the layout.

    A slot from which the parameter was deleted is no change: it is filled again.

    Attributes:
        assigned: parameters of which a slot holds another object.
        data: parameters that have other ``.data``, or another local tensor, than the shard or the buffer.
        requires_grad: the flag of a parameter, or of its unsharded one, was set.
    """

    assigned: Sequence[int] = ()
    data: Sequence[int] = ()
    requires_grad: bool = False


class Bindings(NamedTuple):
    """Lists the slots of a group as columns: a step goes through them several times a unit.

    Attributes:
        attributes: for each slot, the mapping of a module that holds the tensor, by ``names``.
        unsharded, sharded: what the slots hold in compute, and outside of it.
        registered: mappings that have the first of the names only after an assignment, or while full parameters are
            shown; none if ``attributes`` are those in which modules register parameters.
    """

    attributes: Sequence[Any]
    names: Sequence[str]
    unsharded: Sequence[torch.Tensor]
    sharded: Sequence[torch.Tensor]
    registered: Sequence[Any] = ()


class SlotPlan(Protocol):
    """Says what slots hold while the parameters are sharded, and adopts what the program put there.

    Attributes:
        make_guard: creates the forward pre-hook of modules that are called while their parameters are sharded.
        guards_alone: modules have the hook on one rank too, where nothing is sharded.
        hooks_see_grads: where nothing is sharded, hooks of a gradient see the ``.grad`` of the user's parameter.
        exposes_unreduced: ``.grad`` shows unreduced gradients inside ``no_sync``.
        local_tensors: returns the tensors with the values of visible parameters, in their order.
    """

    make_guard: Callable[[Callable[[nn.Module], str]], Callable[..., Any]]
    guards_alone: bool
    hooks_see_grads: bool
    exposes_unreduced: bool
    local_tensors: Callable[[Sequence[nn.Parameter]], Iterable[torch.Tensor]]

    def entries(self, slots: Slots, params: Sequence[ManagedParam]) -> list[ManagedParam]:
        """Return ``params``, the full ones, with the parameters that the group manages in their place."""

    def visible(self, slots: Slots) -> Iterable[VisibleParam]:
        """Return the parameters that an optimizer holds, with their places in the shard."""

    def bind(self, slots: Slots, *, rebuilt: bool) -> None:
        """Make these parameters parts of the shard, which has another dtype or device if ``rebuilt``."""

    def bindings(self, slots: Slots) -> Bindings:
        """Return the slots, with what they hold."""

    def adopt(self, slots: Slots, changes: Changes) -> bool:
        """Adopt what the program assigned to sharded parameters, and return whether any value has changed."""

    def full_params(self, slots: Slots, tensors: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """Return a Parameter of each full tensor, for the slots."""

    def reduced_grads(self, slots: Slots, shard_grad: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradient of each visible parameter, as views of ``shard_grad`` (1-D, ``shard_numel``)."""


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


def registered_bindings(slots: Slots) -> Bindings:
    """Return slots that hold the managed parameters themselves, under their own names."""
    return Bindings(
        [_parameters_of(site.module) for _, site in slots.sites],
        [site.name for _, site in slots.sites],
        [slots.output.params[index] for index, _ in slots.sites],
        [slots.params[index].param for index, _ in slots.sites],
    )


def new_full_params(slots: Slots, tensors: Sequence[torch.Tensor]) -> list[nn.Parameter]:
    """Return a new Parameter of each full tensor, in the class of the user's."""
    places = zip(slots.params, tensors, slots.requires_grad(), strict=True)
    return [entry.unsharded(tensor, requires_grad=requires_grad) for entry, tensor, requires_grad in places]


def views_of_grad(slots: Slots, shard_grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the part of each visible parameter in a gradient (1-D, ``shard_numel``)."""
    return [each.part_of(shard_grad) for each in slots.visible]


def held_instead(entry: ManagedParam) -> nn.Parameter:
    """Return the object that the program assigned in the place of a registered parameter, or else the parameter."""
    held = [site.module._parameters.get(site.name) for site in entry.sites]
    return next((each for each in held if each is not None and each is not entry.param), entry.param)


def apply_hooks(hooks: Mapping[int, Callable[..., Any]], grad: torch.Tensor) -> torch.Tensor:
    """Pass a gradient through gradient hooks of a parameter that is not in the autograd graph."""
    for hook in hooks.values():
        result = hook(grad)
        grad = grad if result is None else result
    return grad


@dynamo_disabled_here
def _through_hooks(slots: weakref.ref[Slots], index: int, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Pass a gradient of an unsharded parameter through the user's hooks, as its own hook, which must not own them."""
    owner = slots()
    return None if owner is None or grad is None else owner.through_hooks(index, grad)


def _have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; NaN equals NaN.

    Of tensors without values (``FakeTensorMode``) it returns True.
    """
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return False
    return not has_values(first) or torch.equal(
        *[each.reshape(-1).contiguous().view(torch.uint8) for each in (first, second)]
    )


class Slots:
    """Holds what modules and optimizers have of a group's parameters.

    Args:
        params: the user's parameters, in layout order: the group's list, in which those that the group manages take
            their places.

    Attributes:
        plan: what the slots hold while the parameters are sharded.
        spec, layout, storage: those of the group.
        flat_param: the shards as one parameter; None if they have no common memory.
        params: the managed parameters, in layout order; the group has the same list.
        sites: the places of the parameters in modules, each with the index of its parameter.
        output: the output of all-gathers to compute in the present dtype, with the unsharded parameters.
        visible: the parameters that an optimizer holds, with their places in the shard.
        visible_params: these parameters.
        versioned: tensors whose version counters rise with each change of this rank's values.
        num_trainable: number of original parameters that require a gradient.
        shows_unsharded: the slots were filled with the unsharded parameters last.
        shows_names: the modules hold the tensors that :meth:`show_names` was given.
        saved_grads: gradients of the visible parameters while these hold full values; else None.
    """

    visible: tuple[VisibleParam, ...]
    visible_params: tuple[nn.Parameter, ...]
    versioned: tuple[torch.Tensor, ...]

    def __init__(
        self,
        params: list[ManagedParam],
        plan: SlotPlan,
        *,
        spec: ParamGroupSpec,
        layout: Layout,
        storage: Storage,
        output: AllGatherOutput,
    ) -> None:
        self.plan, self.spec, self.layout, self.storage, self.output = plan, spec, layout, storage, output
        self.flat_param = storage.flat_param
        self._shards = () if self.flat_param is None else (self.flat_param,)
        # Of the user's original parameters, whose gradient hooks count.
        self._original_hooks = [entry.param._backward_hooks for entry in params]
        self.params = params
        params[:] = plan.entries(self, list(params))
        self.sites = [(index, site) for index, entry in enumerate(self.params) for site in entry.sites]
        is_guarded = layout.world_size > 1 or plan.guards_alone
        modules = dict.fromkeys(site.module for _, site in self.sites) if is_guarded else ()
        self._guarded: list[dict[Any, Any]] = [module._forward_pre_hooks for module in modules]
        self._guard = plan.make_guard(self._name_in)
        self._guard_key = f"fsdp_flat_guard_{id(self)}"  # several units may guard one module
        self.shows_unsharded = self.shows_names = False
        self._full_params: Sequence[nn.Parameter] = ()
        self.saved_grads: list[torch.Tensor | None] | None = None
        self.num_trainable = 0
        self._synced_requires_grad = [False] * len(self.params)
        self._accept_hook: Callable[[torch.Tensor], None] | None = None
        self._bindings = plan.bindings(self)
        self._unregister()
        self.bind_shard()

    def mark_params(self) -> None:
        """Mark the parameters as those of the group's unit, which has a name."""
        for entry, param_info in zip(self.params, self.layout.param_infos, strict=True):
            entry.mark(FlattenedBy(entry.fqn, self.spec.unit_name, param_info.shape))

    # -- in modules --------------------------------------------------------------------------------------------------

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        """Make the sharded parameters parts of the shard, which has another dtype or device if ``rebuilt``."""
        self.plan.bind(self, rebuilt=rebuilt)
        self.fill()

    def fill(self) -> None:
        """Fill the slots with the sharded parameters, which may be others than before, and mark them."""
        self.visible = tuple(self.plan.visible(self))
        self.visible_params = tuple([each.param for each in self.visible])
        local_tensors = tuple(self.plan.local_tensors(self.visible_params))
        # A DTensor and its local tensor have separate version counters.
        self.versioned = tuple(dict.fromkeys((*self._shards, *self.visible_params, *local_tensors)))
        self._places = tuple(map(self.storage.place_of, (*local_tensors, *self._shards)))
        self.mark_params()  # a conversion of an inner module swaps the contents of DTensors, attributes included
        self._bindings = self.plan.bindings(self)
        self.show_sharded()

    def use_output(self, output: AllGatherOutput) -> None:
        """Show the unsharded parameters of ``output`` in compute from now on, and the sharded ones now."""
        self.output = output
        self._bindings = self.plan.bindings(self)
        self.show_sharded()
        # Unsharded parameters that were in use before still have their flags and hooks.
        self._synced_requires_grad = [param.requires_grad for param in output.params]
        self._sync_requires_grad()

    def accept_grads_by(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Call ``hook`` with each unsharded parameter that has got a gradient."""
        self._accept_hook = hook
        self._sync_requires_grad()

    def show_unsharded(self) -> None:
        """Fill the slots with the unsharded parameters, with the ``requires_grad`` that the user set."""
        if self.diff().requires_grad:
            self._sync_requires_grad()
        if any(map(_GRAD_HOOKS, self.visible_params)) or any(self._original_hooks):
            self._run_grad_hooks()
        for hooks in self._guarded:
            hooks.pop(self._guard_key, None)
        for held, name, tensor in zip(*self._bindings[:3], strict=True):
            held[name] = tensor
        self.shows_unsharded = True

    def show_sharded(self) -> None:
        """Fill the slots with the sharded parameters, or with placeholders for them."""
        attributes, names, _, sharded, _ = self._bindings
        for held, name, tensor in zip(attributes, names, sharded, strict=True):
            held[name] = tensor
        for hooks in self._guarded:
            hooks[self._guard_key] = self._guard
        self.shows_unsharded = False

    def show_names(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register ``tensors``, one per parameter, under the original names, until :meth:`hide_names`."""
        self.shows_names = True
        self._register(tensors)

    def hide_names(self) -> None:
        """Undo :meth:`show_names`: fill the slots as before."""
        if self.shows_names:
            self.shows_names = False
            self._unregister()
            (self.show_unsharded if self.shows_unsharded else self.show_sharded)()

    def show_full_params(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register full Parameters made from ``tensors`` under the original names, until :meth:`hide_full_params`."""
        self._full_params = full = self.plan.full_params(self, tensors)
        for hooks in self._guarded:
            hooks.pop(self._guard_key, None)
        self._register(full)

    def hide_full_params(self) -> None:
        """Undo :meth:`show_full_params`, and show the sharded parameters; does nothing if no full ones are shown."""
        if not self._full_params:
            return
        for index, param in enumerate(self._full_params):
            if not is_managed(param):
                param._fsdp_flat_index = index  # type: ignore[attr-defined]  # for guards: an optimizer may hold it
        self._full_params = ()
        self._unregister()
        saved, self.saved_grads = self.saved_grads, None
        if saved is None:
            self.show_sharded()
            return
        for param in self.visible_params:
            param.grad = None
        self.bind_shard()
        for param, grad in zip(self.visible_params, saved, strict=True):
            set_grad(param, grad)

    def _register(self, tensors: Sequence[torch.Tensor]) -> None:
        attributes, names, _, _, registered = self._bindings
        for held, name in zip(attributes, names, strict=True) if registered else ():
            held.pop(name, None)
        for index, site in self.sites:
            site.module._parameters[site.name] = tensors[index]  # type: ignore[assignment]

    def _unregister(self) -> None:
        for held, name in zip(self._bindings.registered, self._bindings.names, strict=False):
            held.pop(name, None)

    def unflatten(self, whole: torch.Tensor) -> None:
        """Register ordinary Parameters with the values of ``whole`` (1-D, ``layout.numel``) permanently."""
        self.show_full_params([view.clone() for view in self.layout.views(whole)])
        self.saved_grads = None
        for entry in self.params:
            for name in ("_fsdp_flat_owner", "_fsdp_flattened"):
                entry.param.__dict__.pop(name, None)

    def remove(self) -> None:
        """Take the managed parameters out of the modules, so that ``Module._apply`` skips them."""
        # Empty Parameters keep the places: optimizers number parameters in registration order, and modules that
        # rebuild their list of weights after a conversion (nn.RNN) would keep a None.
        for held, name in zip(self._bindings.attributes, self._bindings.names, strict=True):
            held[name] = nn.Parameter(self.storage.empty(), requires_grad=False)

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

    # -- what the program did ----------------------------------------------------------------------------------------

    def diff(self) -> Changes:
        """Return what the program did to the parameters since the slots were filled."""
        attributes, names, unsharded, sharded, registered = self._bindings
        held, output, synced = unsharded if self.shows_unsharded else sharded, self.output, self._synced_requires_grad
        flags = list(map(_REQUIRES_GRAD, self.visible_params))
        is_flagged = list(map(_REQUIRES_GRAD, output.params)) != synced or (
            flags != synced and flags * len(synced) != synced  # one flag may be that of all parameters
        )
        try:
            is_assigned = not all(map(is_, map(getitem, attributes, names), held))
        except KeyError:  # a parameter was deleted, or the flat one is not shown
            is_assigned = True
        # A Parameter that the user assigns goes to ``_parameters``, any other value to the module's ``__dict__``.
        is_assigned = is_assigned or any(map(contains, registered, names))
        if self.shows_unsharded:
            is_moved = bool(output.plain) and not all(map(partial(is_alias, output.tensors[0]), output.plain))
        else:
            is_moved = self.is_sharded_moved()
        if is_assigned or is_moved:
            return Changes(self._assigned() if is_assigned else (), self.moved() if is_moved else (), is_flagged)
        return _FLAGGED if is_flagged else _UNCHANGED

    def is_sharded_moved(self) -> bool:
        """Return whether sharded parameters have other memory than the shard, whatever the slots hold."""
        local_tensors = self.plan.local_tensors(self.visible_params)
        is_moved = self._places != tuple(map(self.storage.place_of, (*local_tensors, *self._shards)))
        # A part without elements is nowhere, on the meta device or not.
        return is_moved or (any(map(_IS_META, self._shards)) and not all(map(_IS_META, self.visible_params)))

    def _assigned(self) -> list[int]:
        attributes, names, unsharded, sharded, registered = self._bindings
        indices = [*[index for index, _ in self.sites], 0]  # the last one for a flat parameter
        rows = zip(indices, attributes, names, unsharded if self.shows_unsharded else sharded, sharded, strict=False)
        found = [index for index, held, name, *own in rows if all(held.get(name, own[0]) is not each for each in own)]
        found += [index for index, held, name in zip(indices, registered, names, strict=False) if name in held]
        return sorted(set(found))

    def moved(self) -> Sequence[int]:
        """Return the parameters that have other ``.data``, or another local tensor; all if the shard has moved."""
        if self.shows_unsharded:
            flat, params = self.output.tensors[0], enumerate(zip(self.params, self.output.params, strict=True))
            return [index for index, (entry, own) in params if entry.adapter is PLAIN and not is_alias(own, flat)]
        place_of, local_tensors = self.storage.place_of, self.plan.local_tensors(self.visible_params)
        shard = self.flat_param
        if shard is not None and (shard.is_meta or place_of(shard) != self._places[-1]):
            return range(len(self.params))
        found = zip(self.visible, local_tensors, self._places, strict=False)  # the last place may be the shard's
        return [index for each, local, place in found if place_of(local) != place for index in each.indices]

    def restore(self, changes: Changes) -> list[int]:
        """Undo what a module's forward did to unsharded parameters; return the indices of those with other values."""
        # torch.func.functional_call puts back the Parameter that it found by an assignment, which registers it.
        for (index, site), registered in zip(self.sites, self._bindings.registered, strict=False):
            if registered.get(site.name) is self.output.params[index]:
                site.module.__dict__[site.name] = registered.pop(site.name)
        other: list[int] = []
        views = self.layout.views(self.output.tensors[0]) if changes.data else []
        for index in changes.data:
            param, place = self.output.params[index], views[index]
            # A module may cast its parameter for good, as a 4-bit layer its bias: the next one is cast again.
            if self.output.nbytes and not _have_same_bits(param.detach(), place.to(param.dtype)):
                other.append(index)
            param.data = place
        return other

    def check_unchanged(self, other: Sequence[int]) -> None:
        """Raise a UsageError if the program has changed unsharded parameters, which a reshard would lose.

        ``other`` is what :meth:`restore` has returned. A module may compute with other values (quantized ones, for
        example) that it assigns to ``.data``, if it then restores the weights. Changes in place of ``.data`` are not
        noticed.
        """
        filled, versions = self.output.versions_when_filled, tuple(map(VERSION_OF, self.output.params))
        shard = self.flat_param
        if shard is not None and filled is not None and filled != versions and not other:
            with torch.no_grad():
                own = self.layout.shard_of(self.spec.rank, self.output.tensors[0])
                if not _have_same_bits(own, shard.data.to(own.device, own.dtype)):
                    other = [index for index, version in enumerate(versions) if version != filled[index]]
        if other:
            raise UsageError(
                f"Parameter {self.describe(other[0])} was changed in forward, or while it was unsharded by hand, on "
                f"rank {self.spec.rank} of the shard group. It is a copy there, all-gathered or in the dtype of "
                "compute, so the change would be lost. Change weights between steps inside summon_full_params, "
                "compute with a changed copy in forward, or leave the module out of sharding (ignored_modules)."
            )

    # -- gradients ---------------------------------------------------------------------------------------------------

    def requires_grad(self) -> list[bool]:
        """Return for each original parameter whether it requires a gradient."""
        flags = list(map(_REQUIRES_GRAD, self.visible_params))
        return flags if len(flags) > 1 else flags * len(self.params)

    def _sync_requires_grad(self) -> None:
        """Adopt the ``requires_grad`` that the user set, and hook unsharded parameters for their gradients."""
        unsharded_params, before = self.output.params, self._synced_requires_grad
        for entry, param, was in zip(self.params, unsharded_params, before, strict=True):
            if param.requires_grad != was:
                entry.param.requires_grad_(not was)  # the flag of a flat parameter counts, which is no entry's
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

    def _run_grad_hooks(self) -> None:
        """Have the unsharded parameters, which are in the graph, run the gradient hooks of the user's parameters."""
        for index, unsharded_param in enumerate(self.output.params):
            is_hooked = "_fsdp_flat_hooked" in unsharded_param.__dict__
            if not is_hooked and unsharded_param.requires_grad and self._grad_hooks_of(index):
                unsharded_param._fsdp_flat_hooked = True  # type: ignore[attr-defined]
                unsharded_param.register_hook(partial(_through_hooks, weakref.ref(self), index))

    def _grad_hooks_of(self, index: int) -> Mapping[int, Callable[..., Any]] | None:
        """Return the user's hooks for the gradient of a parameter, but for those that autograd runs by itself."""
        param = self.params[index].param
        own = None if param is self.output.params[index] else param._backward_hooks
        return own or self._original_hooks[index]

    def through_hooks(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient of unsharded parameter ``index`` (its shape) after the user's hooks.

        Raises:
            UsageError: a hook changes the gradient's shape.
        """
        param, unsharded_param, hooks = self.params[index].param, self.output.params[index], self._grad_hooks_of(index)
        if self.plan.hooks_see_grads and self.layout.world_size == 1:
            # They see the gradient of this backward so far, and may change it, as in the plain module.
            before = param.grad
            set_grad(param, unsharded_param.grad)
            try:
                changed = apply_hooks(hooks or {}, grad)
            finally:
                set_grad(unsharded_param, param.grad)
                set_grad(param, before)
        else:
            changed = apply_hooks(hooks or {}, grad)
        if changed.shape != grad.shape:
            raise UsageError(
                f"A gradient hook of {self.describe(index)} returned a tensor of shape {tuple(changed.shape)} "
                f"on rank {self.spec.rank} of the shard group; expected the gradient's shape "
                f"{tuple(grad.shape)}. Return a tensor of this shape, or None."
            )
        return changed.to(grad.dtype)

    def visible_grads(self) -> list[torch.Tensor | None]:
        """Return this rank's local gradient of each visible parameter, or None."""
        if self.saved_grads is not None:
            return self.saved_grads
        found = [param.grad for param in self.visible_params]
        return [None if grad is None else local_of(grad) for grad in found]

    def unreduced_grads(self, flat_grad: torch.Tensor) -> list[torch.Tensor]:
        """Return the unreduced gradient of each visible parameter, as views of an unsharded flat gradient."""
        is_flat = self.visible_params[0] is self.flat_param
        return [flat_grad[: self.layout.unpadded_numel]] if is_flat else self.layout.views(flat_grad)

    def optimizer_param_of(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a map from unsharded parameters to the parameters that an optimizer holds, one for each."""
        own = [each for each in self.visible if each.param is not self.flat_param]
        return {self.output.params[index]: each.param for each in own for index in each.indices}

    # -- texts of errors ---------------------------------------------------------------------------------------------

    def describe(self, index: int) -> str:
        """Return the FQN of a parameter and its unit, for error texts."""
        return f"{self.layout.param_infos[index].fqn!r} of unit {self.spec.unit_name!r}"

    def describe_with_shape(self, index: int) -> str:
        """Return the FQN, the unsharded shape and the unit of a parameter, for error texts."""
        shape = tuple(self.output.params[index].shape)
        return f"{self.layout.param_infos[index].fqn!r} {shape} of unit {self.spec.unit_name!r}"

    def _name_in(self, module: nn.Module) -> str:
        own = (index for index, site in self.sites if site.module is module)
        return self.describe_with_shape(next(own, 0))  # no site: a copy of a module, which has the hook too, was called


_UNCHANGED, _FLAGGED = Changes(), Changes(requires_grad=True)
