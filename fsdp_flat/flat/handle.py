"""Defines the handle, which owns one flat parameter: shard, unsharded buffer, gradients, and what modules hold.

A handle never communicates: ``runtime`` all-gathers into its buffer, and reduces its flat gradient. Its three
subclasses differ in what modules and optimizers see:

* :class:`OriginalsHandle` (``use_orig_params=True``): outside of compute ``module.weight`` is the user's Parameter,
  whose data is this rank's 1-D local shard (possibly empty), or the full parameter if nothing is sharded.
* :class:`FlatHandle` (``use_orig_params=False``): the original parameters leave ``module._parameters``, and an
  optimizer sees only the flat parameter. Outside of compute the modules hold placeholders that raise when used.
* :class:`DTensorHandle` (``fully_shard``): ``module.weight`` is a DTensor under its own name.

During compute modules hold ``unsharded_params``, views of the buffer, one for each original parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import PhaseError, UsageError
from fsdp_flat.flat.bindings import Bindings, parameters_of
from fsdp_flat.flat.buffers import EXPIRED, FlatBuffer, MemoryPool, UnshardedParams
from fsdp_flat.flat.flat_parameter import as_flat_parameter, replace_shard
from fsdp_flat.flat.gradients import GradientCollector, set_grad
from fsdp_flat.flat.handle_spec import HandleSpec
from fsdp_flat.flat.layout_views import (
    RowTarget,
    VisibleParam,
    clear_padding,
    local_part,
    shard_of,
    views_of,
)
from fsdp_flat.flat.params import PLAIN, FlattenedBy, ManagedParam
from fsdp_flat.flat.placeholders import module_guard
from fsdp_flat.flat.torch_flat import (
    VERSION_OF,
    has_values,
    is_alias,
    place_function,
    set_versions,
)
from fsdp_flat.layout import FlatLayout, Layout, LocalShard, alignment_numel


def _have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; NaN equals NaN.

    Of tensors without values (``FakeTensorMode``) it returns True.
    """
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return False
    return not has_values(first) or torch.equal(
        *[each.reshape(-1).contiguous().view(torch.uint8) for each in (first, second)]
    )


class FlatParamHandle(GradientCollector):
    """Owns one flat parameter; subclasses show it to modules and optimizers.

    Args:
        params: at least one parameter, all of one dtype (and one ``requires_grad`` with ``use_orig_params=True``).

    Attributes:
        flat_param: the rank's shard, 1-D, ``layout.shard_numel`` elements, in ``orig_dtype``.
        params: the managed parameters, in layout order.
        unsharded_params: one Parameter per managed parameter, a view of the unsharded buffer.
        visible: the parameters that an optimizer holds.
        buffer: the unsharded buffer (1-D, ``layout.numel``, compute dtype); a reshard frees it, unless it is the shard.
        pool: memory pool of the buffers; the units of a tree share one.
        kept_shards: consecutive ranks' shards (1-D, compute dtype), input of the next all-gather over a smaller group.
        storage_epoch: number of times the shard was replaced; graphs from before the last time cannot run backward.
        shows_names: the modules hold the tensors that :meth:`show_names` was given.
    """

    # The group's collectives, which its builder sets.
    comm: Any
    _visible_params: tuple[nn.Parameter, ...]
    # Tensors whose version counters rise with each change of this rank's values.
    _versioned: tuple[torch.Tensor, ...]

    def __init__(self, params: Sequence[ManagedParam], spec: HandleSpec) -> None:
        self.spec = spec
        first = params[0].param
        trainable = first.dtype.is_floating_point and first.requires_grad
        self._use_dtypes((spec.master_dtype if trainable else None) or first.dtype, first.dtype)
        self.layout = self._layout_of(params)
        self.flat_param = as_flat_parameter(nn.Parameter(self._shard_of(params), first.requires_grad))
        self.storage_epoch = self._weights_epoch = self.num_updates = 0
        self._versions: tuple[int, ...] = ()
        self._saved_grads: list[torch.Tensor | None] | None = None
        self.shows_names = False
        self.pool = MemoryPool()
        self.kept_shards: torch.Tensor | None = None
        self._by_dtype: dict[torch.dtype, UnshardedParams] = {}
        self._select_unsharded(params)
        self.params = tuple(self._shown_instead(params))
        self._sites = [(index, site) for index, entry in enumerate(self.params) for site in entry.sites]
        self._guarded, self._guard = self._guarded_hooks(), self._make_guard(self._describe_one_of)
        self._guard_key = f"fsdp_flat_guard_{id(self)}"  # several units may guard one module
        self._bindings = self._bind()
        self._show_first(params)
        self._init_gradients(params)
        self._prepare_grads()
        self._mark_params()

    def rename(self, unit_name: str) -> None:
        """Rename the unit that the handle belongs to."""
        self.spec = replace(self.spec, unit_name=unit_name)
        self._mark_params()

    def _mark_params(self) -> None:
        for entry, param_info in zip(self.params, self.layout.param_infos, strict=True):
            entry.mark(FlattenedBy(entry.fqn, self.spec.unit_name, param_info.shape))

    def _set_visible(self, visible: Iterable[VisibleParam]) -> None:
        self.visible = tuple(visible)
        self._visible_params = tuple([each.param for each in self.visible])

    @functools.cached_property
    def local_shards(self) -> tuple[LocalShard, ...]:
        """This rank's local shard of each parameter."""
        return tuple(self.layout.local_shard(i, self.spec.rank) for i in range(len(self.layout.param_infos)))

    # -- what the kinds of handles differ in -------------------------------------------------------------------------

    def _layout_of(self, params: Sequence[ManagedParam]) -> Layout:
        spec, named = self.spec, [(entry.fqn, tuple(entry.shape)) for entry in params]
        return FlatLayout.build(
            named,
            world_size=spec.world_size,
            align_numel=alignment_numel(self.compute_dtype.itemsize, use_orig_params=spec.use_orig_params),
            tail_multiple=spec.num_ranks if spec.use_orig_params and spec.world_size == 1 else None,
        )

    def _shown_instead(self, params: Sequence[ManagedParam]) -> Sequence[ManagedParam]:
        """Return ``params`` with the parameters that modules hold in the place of the original ones."""
        return params

    def _show_first(self, params: Sequence[ManagedParam]) -> None:
        """Set ``visible`` and show the sharded parameters for the first time."""
        raise NotImplementedError

    def _bind(self) -> Bindings:
        return Bindings(
            [parameters_of(site.module) for _, site in self._sites],
            [site.name for _, site in self._sites],
            [self.unsharded_params[index] for index, _ in self._sites],
            [self.params[index].param for index, _ in self._sites],
        )

    # Creates the forward pre-hook of modules that are called while their parameters are sharded.
    _make_guard = staticmethod(module_guard)

    def _guarded_hooks(self) -> list[dict[Any, Any]]:
        """Return the forward pre-hooks of modules that must not be called with sharded parameters."""
        modules = dict.fromkeys(site.module for _, site in self._sites)
        return [module._forward_pre_hooks for module in modules] if self.layout.world_size > 1 else []

    def show_full_params(self, tensors: Sequence[torch.Tensor]) -> None:
        """Point the modules at full Parameters made from ``tensors``, until :meth:`hide_full_params`."""
        for hooks in self._guarded:
            hooks.pop(self._guard_key, None)
        full = [
            nn.Parameter(entry.adapter.from_local(tensor), requires_grad)
            for entry, tensor, requires_grad in zip(self.params, tensors, self.requires_grad(), strict=True)
        ]
        for index, site in self._sites:
            site.module._parameters[site.name] = full[index]

    def hide_full_params(self) -> None:
        """Undo :meth:`show_full_params`; does nothing if no full parameters are shown."""
        self.show_sharded()

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

    def changed(self) -> list[int]:
        """Return indices of sharded parameters that the user has replaced, or given other ``.data``."""
        raise NotImplementedError

    def _adopt(self, changed: Sequence[int]) -> None:
        """Adopt the tensors that the user assigned to sharded parameters."""
        raise NotImplementedError

    def _bind_shard(self, *, rebuilt: bool = False) -> None:
        """Make sharded parameters views of the shard, which has another dtype or device if ``rebuilt``."""

    def check_plain(self) -> None:
        """Raise an UnsupportedError if local tensors have FSDP2's all-gather extensions, which would not be called."""

    def keep_shards(self, ranks: range) -> None:
        """Copy the shards of ``ranks`` (consecutive) from the unsharded buffer into ``kept_shards``."""
        raise NotImplementedError

    def _check_convertible(self) -> None:
        """Raise a UsageError if a parameter cannot change its dtype or device."""

    def remove(self) -> None:
        """Take the managed parameters out of the modules, so that ``Module._apply`` skips them."""
        # Empty Parameters keep the places: optimizers number parameters in registration order, and modules that
        # rebuild their list of weights after a conversion (nn.RNN) would keep a None.
        for parameters, name in zip(self._bindings.attributes, self._bindings.names, strict=True):
            parameters[name] = nn.Parameter(self.flat_param.new_empty(0), requires_grad=False)

    def optimizer_param_of(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a map from unsharded parameters to the parameters that an optimizer holds, if they differ."""
        return dict(zip(self.unsharded_params, self.visible_params(), strict=True))

    def visible_grads(self) -> list[torch.Tensor | None]:
        """Return this rank's local gradient of each visible parameter, or None."""
        return [each.param.grad for each in self.visible] if self._saved_grads is None else self._saved_grads

    def reduced_grads(self, shard_grad: torch.Tensor) -> list[torch.Tensor]:
        """Return views of ``shard_grad`` (1-D, ``shard_numel``): the gradient of each visible parameter."""
        return [each.part_of(shard_grad) for each in self.visible]

    # -- dtypes, and the buffer of the compute dtype -----------------------------------------------------------------

    def _use_dtypes(self, stored: torch.dtype, given: torch.dtype) -> None:
        """Set the shard's dtype to ``stored``, and the compute dtype to the spec's (floats only) or else ``given``."""
        spec, floating = self.spec, given.is_floating_point
        self.orig_dtype = stored
        self.compute_dtype = self._low_dtype = (spec.compute_dtype if floating else None) or given
        self._reduce_dtype = (spec.reduce_dtype if floating else None) or self._low_dtype

    def dtype_in(self, full: bool) -> torch.dtype:
        """Return the dtype of compute: the shard's in ``full`` precision, else the low-precision dtype."""
        return self.orig_dtype if full else self._low_dtype

    def use_full_precision(self, full: bool) -> None:
        """Switch compute of a sharded handle to the shard's dtype, or back to the low-precision dtype."""
        wanted = self.dtype_in(full)
        if wanted != self.compute_dtype:
            # The bindings are rebuilt, which would lose tensors that the user has assigned.
            self.adopt_changes()
            self.compute_dtype = wanted
            self._switch_unsharded()

    def _select_unsharded(self, params: Sequence[ManagedParam]) -> None:
        """Select the buffer and the unsharded parameters of the compute dtype; they are created on first use."""
        dtype, is_new = self.compute_dtype, self.compute_dtype not in self._by_dtype
        if is_new:
            shard = self.flat_param.data
            self._by_dtype[dtype] = UnshardedParams(
                params, self.layout, rank=self.spec.rank, device=self.spec.device, shard=shard, dtype=dtype
            )
            self._place_of = place_function(shard)
            self._shard_place = self._place_of(shard)
        self._unsharded = self._by_dtype[dtype]
        self.buffer: FlatBuffer = self._unsharded.buffer
        self.unsharded_params = self._unsharded.params
        if is_new:
            self.free()
        self._storages = [
            param.untyped_storage()._cdata if entry.adapter is PLAIN else None
            for param, entry in zip(self.unsharded_params, params, strict=True)
        ]

    def _switch_unsharded(self) -> None:
        self._select_unsharded(self.params)
        self._bindings = self._bind()
        self.show_sharded()
        self._prepare_grads()

    def _prepare_grads(self) -> None:
        reduce_dtype = self._reduce_dtype if self.compute_dtype == self._low_dtype else self.compute_dtype
        self._use_grad_dtypes(self.compute_dtype, reduce_dtype, self.spec.device)

    # -- the unsharded parameters ------------------------------------------------------------------------------------

    def begin_gather(self) -> tuple[torch.Tensor, RowTarget | None]:
        """Allocate the buffer, and return the arguments of its all-gather.

        In place: the buffer, which contains this rank's shard, and None. Else: this rank's shard (1-D, compute dtype),
        and the target that places the shards of all ranks in the buffer.
        """
        unsharded, buffer, shard = self._unsharded, self.buffer, self.flat_param.data
        buffer.alloc(self.pool)
        if shard.device != buffer.tensor.device:
            # Copy in the shard's dtype first: a converting copy between devices would block the host.
            shard = shard.to(buffer.tensor.device, non_blocking=True)
        if unsharded.gather_target is not None:
            return shard.to(buffer.tensor.dtype), unsharded.gather_target
        if buffer.owns_memory:
            unsharded.own_slice.copy_(shard)
        return buffer.tensor, None

    def finish_gather(self) -> None:
        """Restore version counters, so that autograd accepts saved parameters again: the buffer is filled."""
        unsharded = self._unsharded
        if unsharded.versions_before_free is not None:
            set_versions(unsharded.params, unsharded.versions_before_free)
            unsharded.versions_before_free = None
        unsharded.versions_when_filled = tuple(map(VERSION_OF, unsharded.params)) if self.buffer.owns_memory else None

    def free(self) -> None:
        """Free the buffer, and raise version counters, so that autograd refuses parameters that it saved."""
        unsharded = self._unsharded
        # A buffer that is the shard is never freed, so that saved parameters stay valid.
        if unsharded.versions_before_free is None and self.buffer.owns_memory:
            unsharded.versions_before_free = tuple(map(VERSION_OF, unsharded.params))
            set_versions(unsharded.params, tuple(map(EXPIRED.__add__, unsharded.versions_before_free)))
        self.buffer.free(self.pool)

    def show_unsharded(self) -> None:
        """Point the modules at the unsharded parameters, with the ``requires_grad`` that the user set."""
        self.sync_requires_grad()
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

    def _hold_sharded(self) -> bool:
        """Return whether the modules hold every sharded parameter or placeholder."""
        attributes, names, _, sharded = self._bindings
        # ``.get``: some modules keep parameters elsewhere too, and their mapping is no dict.
        return all(map(is_, [held.get(name) for held, name in zip(attributes, names, strict=True)], sharded))

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

    def restore_unsharded_params(self) -> list[int]:
        """Undo assignments to ``.data`` of unsharded parameters; return the indices of those that got other values."""
        unsharded, flat = self._unsharded, self.buffer.tensor
        if all(map(partial(is_alias, flat), unsharded.plain)):
            return []
        changed: list[int] = []
        places = zip(unsharded.params, self.params, views_of(flat, self.layout), strict=True)
        for index, (param, entry, place) in enumerate(places):
            if entry.adapter is PLAIN and not is_alias(param, flat):
                if self.buffer.nbytes and not _have_same_bits(param.detach(), place):
                    changed.append(index)
                param.data = place
        return changed

    def check_after_compute(self) -> None:
        """Raise a UsageError if a forward has changed parameters, which a reshard would lose.

        A module may compute with other values (quantized ones, for example) that it assigns to ``.data``, if it then
        restores the weights. Changes in place of ``.data`` are not noticed.
        """
        filled, versions = self._unsharded.versions_when_filled, tuple(map(VERSION_OF, self.unsharded_params))
        changed = self.restore_unsharded_params()
        if filled is not None and filled != versions and not changed:
            with torch.no_grad():
                own = shard_of(self.layout, self.spec.rank, self.buffer.tensor)
                if not _have_same_bits(own, self.flat_param.data.to(own.device, own.dtype)):
                    changed = [index for index, version in enumerate(versions) if version != filled[index]]
        if changed:
            raise UsageError(
                f"Parameter {self.describe(changed[0])} was changed in forward, or while it was unsharded by "
                f"hand, on rank {self.spec.rank} of the shard group. It is a copy there, all-gathered or in the dtype "
                "of compute, so the change would be lost. Change weights between steps inside summon_full_params, "
                "compute with a changed copy in forward, or leave the module out of sharding (ignored_modules)."
            )

    def reset(self, *, frees: bool, shows_unsharded: bool) -> None:
        """Drop gradients and kept shards after an exception, show the sharded parameters, and free the buffer."""
        self.kept_shards = None
        self.restore_unsharded_params()
        if self._unsharded.gather_target is not None:
            self._unsharded.gather_target.drop_staging()
        if frees:
            self.free()
        if shows_unsharded:
            self.show_sharded()
        self.drop_grads()

    # -- changes of the shard ----------------------------------------------------------------------------------------

    def weights_epoch(self) -> int:
        """Return a number that increases when sharded values change, and never falls."""
        versions = tuple(map(VERSION_OF, self._versioned))
        if versions != self._versions:
            self._versions = versions
            self._weights_epoch += 1
        return self._weights_epoch

    def raise_weights_epoch(self) -> None:
        """Record a change of this rank's shard values that raises no version counter: a load, an assignment."""
        self._weights_epoch += 1

    def note_update(self) -> None:
        """Record that shards of any rank may have other values from now on; call this on all ranks."""
        self.num_updates += 1

    def note_step(self) -> None:
        """Record that the step of an optimizer that holds parameters of this handle has ended."""
        self.note_update()

    def adopt_changes(self) -> None:
        """Adopt tensors that the user assigned to sharded parameters or to the flat parameter's data."""
        if not self._is_current(self.flat_param.data):
            self.convert(lambda tensor: tensor)
        # A load that began at a plain module, not at a wrapper, and raised has not called hide_names.
        if self.shows_names:
            self.hide_names()
        changed = self.changed()
        if not changed:
            return
        self._adopt(changed)
        if not self._is_current(self.flat_param.data):
            if not all(each.buffer.owns_memory for each in self._by_dtype.values()):
                self._rebuild(self.flat_param.data)
            else:
                self._shard_place = self._place_of(self.flat_param)

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` (of ``Module.to`` and similar methods) to the shard, and rebuild everything derived from it."""
        was_exposed = self.hide_unreduced_grads()
        if self.is_changed_by(fn):
            self._check_convertible()
        converted = fn(self.flat_param.data)
        spec = self.spec
        # Offloaded shards are pinned, once they have left the meta device.
        if spec.device.type != "cpu" and spec.device != spec.shard_device and converted.device.type == "cpu":
            converted = converted.pin_memory()
        grad, self.flat_param.grad = self.flat_param.grad, None
        replace_shard(self.flat_param, converted)
        if grad is not None:
            set_grad(self.flat_param, fn(grad))
        if not self._is_current(converted):
            self._rebuild(converted)
        if was_exposed:
            self.show_unreduced_grads()

    def _rebuild(self, converted: torch.Tensor) -> None:
        self.storage_epoch += 1
        self._use_dtypes(converted.dtype, converted.dtype)
        moved = converted.device != self.spec.shard_device and self.spec.device == self.spec.shard_device
        device = converted.device if moved else self.spec.device
        self.spec = replace(self.spec, shard_device=converted.device, device=device)
        self._by_dtype.clear()
        self._switch_unsharded()
        self._bind_shard(rebuilt=True)

    def is_changed_by(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Return whether ``fn`` changes the dtype or device of tensors."""
        probe = fn(self.flat_param.data[:0])
        return probe.dtype != self.orig_dtype or probe.device != self.spec.shard_device

    def _is_current(self, shard: torch.Tensor) -> bool:
        return (
            self._place_of(shard) == self._shard_place
            and shard.dtype == self.orig_dtype
            and shard.device == self.spec.shard_device
        )

    def _shard_of(self, params: Sequence[ManagedParam]) -> torch.Tensor:
        rank, device = self.spec.rank, self.spec.shard_device
        is_offloaded = device.type == "cpu" and self.spec.device.type != "cpu"
        shard = torch.empty(self.layout.shard_numel, dtype=self.orig_dtype, device=device, pin_memory=is_offloaded)
        clear_padding(shard, self.layout, rank)
        for local_shard in self.layout.local_shards(rank):
            param = params[local_shard.index].param.detach()
            shard[local_shard.in_shard.to_slice()].copy_(local_part(self.layout, local_shard.index, rank, param))
        return shard

    # -- single parameters, and those of the optimizer ---------------------------------------------------------------

    def local(self, index: int) -> torch.Tensor:
        """Return this rank's local shard of parameter ``index`` (1-D, a view); call :meth:`adopt_changes` first."""
        return self.flat_param.data[self.local_shards[index].in_shard.to_slice()]

    def unflatten(self, whole: torch.Tensor) -> None:
        """Register ordinary Parameters with the values of ``whole`` (1-D, ``layout.numel``) permanently."""
        self.show_full_params([view.clone() for view in views_of(whole, self.layout)])
        self._saved_grads = None
        for entry in self.params:
            for name in ("_fsdp_flat_owner", "_fsdp_flattened"):
                entry.param.__dict__.pop(name, None)

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

    def visible_params(self) -> list[nn.Parameter]:
        """Return the parameters of this handle that an optimizer holds."""
        return list(self._visible_params)

    def describe_with_shape(self, index: int) -> str:
        """Return the FQN, the unsharded shape and the unit of a parameter, for error texts."""
        shape = tuple(self.unsharded_params[index].shape)
        return f"{self.layout.param_infos[index].fqn!r} {shape} of unit {self.spec.unit_name!r}"

    def _describe_one_of(self, module: nn.Module) -> str:
        own = (index for index, site in self._sites if site.module is module)
        return self.describe_with_shape(next(own, 0))  # no site: a copy of a module, which has the hook too, was called
