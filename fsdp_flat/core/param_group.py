"""Defines the parameter group: the parameters of a unit that are sharded together, as one flat tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any, cast

import torch
from torch import nn

from fsdp_flat.comm import Pending
from fsdp_flat.core.buffers import EXPIRED, AllGatherOutput, MemoryPool
from fsdp_flat.core.dtensor_plan import DTensorPlan
from fsdp_flat.core.extended_output import ExtendedOutput, has_extension
from fsdp_flat.core.flat_parameter import as_flat_parameter, replace_shard, set_grad
from fsdp_flat.core.gather_targets import GatherTarget, GroupedTarget, join_inputs
from fsdp_flat.core.gradients import Gradients
from fsdp_flat.core.group_collectives import GroupCollectives
from fsdp_flat.core.group_spec import ParamGroupSpec
from fsdp_flat.core.layout import FlatLayout, Layout, LocalShard, PerParamLayout, alignment_numel
from fsdp_flat.core.local_tensors import LocalTensors, LocalViews
from fsdp_flat.core.options import UnitOptions
from fsdp_flat.core.params import ManagedParam
from fsdp_flat.core.quantized import move_constants
from fsdp_flat.core.slot_plans import FlatPlan, OriginalsPlan
from fsdp_flat.core.slots import SlotPlan, Slots
from fsdp_flat.core.torch_core import (
    VERSION_OF,
    is_in_a_graph,
    local_of,
    place_function,
    set_versions,
)
from fsdp_flat.errors import counted

_BEGIN_GATHER = methodcaller("begin_gather")


class ParamGroup:
    """Owns the parameters of a unit that are sharded together: shard, unsharded buffers, versions, gradients.

    Args:
        params: at least one parameter, all of one dtype (and one ``requires_grad`` with ``use_orig_params=True``).

    Attributes:
        spec: how the group is sharded; its own copy.
        flat_param: the rank's shard, 1-D, ``layout.shard_numel`` elements, in ``orig_dtype``.
        params: the managed parameters, in layout order.
        shown: what modules and optimizers have of the parameters.
        dtensors: what the slots hold if the parameters are sharded one by one; else None.
        grads: the gradients of the unsharded parameters until they are reduced.
        buffer: the output of all-gathers (1-D, ``layout.numel``, compute dtype), with the unsharded parameters that
            view it; a reshard frees it, unless it is the shard.
        pool: memory pool of the buffers; the units of a tree share one.
        comm: the group's collectives, which its builder sets.
        kept_shards: consecutive ranks' shards (1-D, compute dtype), input of the next all-gather over a smaller group.
        storage_epoch: number of times the shard was replaced; graphs from before the last time cannot run backward.
        num_updates: number of events after which shards of any rank may have other values.
    """

    comm: GroupCollectives
    dtensors: DTensorPlan | None = None
    # Callers have set all-gather extensions on local tensors.
    _has_extensions = False

    def __init__(self, params: Sequence[ManagedParam], spec: ParamGroupSpec) -> None:
        self.spec = spec = replace(spec)
        first = params[0].param
        trainable = first.dtype.is_floating_point and first.requires_grad
        self._use_dtypes((spec.master_dtype if trainable else None) or first.dtype, first.dtype)
        self.layout = self._layout_of(params)
        self.flat_param = as_flat_parameter(nn.Parameter(self._shard_of(params), first.requires_grad))
        self.storage_epoch = self.num_updates = self._weights_epoch = 0
        self._versions: tuple[int, ...] = ()
        self.pool = MemoryPool()
        self.kept_shards: torch.Tensor | None = None
        self._by_dtype: dict[torch.dtype, AllGatherOutput] = {}
        self._select_buffer(params)
        self.shown = Slots(
            params, self._plan(params), spec=spec, layout=self.layout, flat_param=self.flat_param, buffer=self.buffer
        )
        self.params = self.shown.params
        self.grads = Gradients(self.shown, self.pool)
        self._use_grad_dtypes()
        self.shown.accept_grads_by(self.grads.accept_hook)

    def _plan(self, params: Sequence[ManagedParam]) -> SlotPlan:
        """Return what the slots hold while the parameters are sharded."""
        spec, layout = self.spec, self.layout
        if spec.per_param is None:
            return OriginalsPlan() if spec.use_orig_params else FlatPlan()
        assert isinstance(layout, PerParamLayout)
        self.dtensors = DTensorPlan(spec.per_param, layout, spec.rank, self._keep_locals(params, layout))
        return self.dtensors

    def _keep_locals(self, params: Sequence[ManagedParam], layout: PerParamLayout) -> LocalTensors:
        return LocalViews(self.spec, layout, self.flat_param)

    def rename(self, unit_name: str) -> None:
        """Rename the unit that the group belongs to."""
        self.spec.unit_name = unit_name
        self.shown.mark_params()

    def use_pool(self, pool: MemoryPool) -> None:
        """Take memory of buffers and gradients from ``pool`` from now on."""
        self.pool = self.grads.pool = pool

    def _layout_of(self, params: Sequence[ManagedParam]) -> Layout:
        spec, named = self.spec, [(entry.fqn, tuple(entry.shape)) for entry in params]
        if spec.per_param is not None:
            return PerParamLayout.build(named, spec.per_param.dims_of(params), world_size=spec.world_size)
        return FlatLayout.build(
            named,
            world_size=spec.world_size,
            align_numel=alignment_numel(self.compute_dtype.itemsize, use_orig_params=spec.use_orig_params),
            tail_multiple=spec.num_ranks if spec.use_orig_params and spec.world_size == 1 else None,
        )

    @functools.cached_property
    def local_shards(self) -> tuple[LocalShard, ...]:
        """This rank's local shard of each parameter."""
        return tuple(self.layout.local_shard(i, self.spec.rank) for i in range(len(self.layout.param_infos)))

    def flat_shard(self) -> torch.Tensor:
        """Return this rank's shard (1-D, ``layout.shard_numel``, ``orig_dtype``), which all-gathers send."""
        return self.flat_param.data

    @property
    def shard_nbytes(self) -> int:
        """Number of bytes of this rank's shard."""
        return self.layout.shard_numel * self.orig_dtype.itemsize

    @property
    def gathered_nbytes(self) -> int:
        """Number of bytes of the unsharded parameters; they are those of the shard if nothing is sharded."""
        if self.buffer.is_extended:
            return cast(ExtendedOutput, self.buffer).gathered_nbytes(self.shown.visible_params)
        return self.layout.numel * self.compute_dtype.itemsize

    def local(self, index: int) -> torch.Tensor:
        """Return this rank's local shard of parameter ``index`` (1-D, a view); call :meth:`adopt_changes` first."""
        return self.flat_param.data[self.local_shards[index].in_shard.to_slice()]

    @property
    def buffer_tensors(self) -> list[torch.Tensor]:
        """The unsharded buffers of all dtypes of compute so far, with or without memory."""
        return [tensor for buffer in self._by_dtype.values() for tensor in buffer.tensors]

    @property
    def is_in_a_graph(self) -> bool:
        """Return whether a caller holds an autograd graph that can still produce gradients."""
        return any(param.requires_grad and is_in_a_graph(param) for param in self.buffer.params)

    # -- dtypes, and the buffer of the compute dtype -----------------------------------------------------------------

    def _use_dtypes(self, stored: torch.dtype, given: torch.dtype) -> None:
        """Set the shard's dtype to ``stored``, and the compute dtype to the spec's (floats only) or else ``given``."""
        spec, floating = self.spec, given.is_floating_point
        self.orig_dtype = stored
        self.compute_dtype = self._low_dtype = (spec.compute_dtype if floating else None) or given
        self._reduce_dtype = (spec.reduce_dtype if floating else None) or self._low_dtype

    def _use_grad_dtypes(self) -> None:
        reduce_dtype = self._reduce_dtype if self.compute_dtype == self._low_dtype else self.compute_dtype
        self.grads.use_dtypes(self.compute_dtype, reduce_dtype)

    def dtype_in(self, full: bool) -> torch.dtype:
        """Return the dtype of compute: the shard's in ``full`` precision, else the low-precision dtype."""
        return self.orig_dtype if full else self._low_dtype

    def use_full_precision(self, full: bool) -> None:
        """Switch compute of a sharded group to the shard's dtype, or back to the low-precision dtype."""
        wanted = self.dtype_in(full)
        if wanted != self.compute_dtype:
            # The bindings are rebuilt, which would lose tensors that the user has assigned.
            self.adopt_changes()
            self.compute_dtype = wanted
            self._switch_buffer()

    def _select_buffer(self, params: Sequence[ManagedParam]) -> None:
        """Select the buffer with the unsharded parameters of the compute dtype; it is created on first use."""
        dtype = self.compute_dtype
        if dtype in self._by_dtype:
            self.buffer = self._by_dtype[dtype]
            return
        self.buffer = self._by_dtype[dtype] = self._new_buffer(params)
        self._shard_place = self.buffer.place_of(self.flat_param.data)
        self.free()

    def _new_buffer(self, params: Sequence[ManagedParam]) -> AllGatherOutput:
        shard, spec, dtype = self.flat_param.data, self.spec, self.compute_dtype
        if self._has_extensions:
            return self._new_extended(params, place_function(shard))
        return AllGatherOutput(params, self.layout, rank=spec.rank, device=spec.device, shard=shard, dtype=dtype)

    def _new_extended(self, params: Sequence[ManagedParam], place_of: Callable[[torch.Tensor], Any]) -> ExtendedOutput:
        layout = self.layout
        assert isinstance(layout, PerParamLayout)
        return ExtendedOutput(
            params,
            layout,
            chunk_shapes=layout.chunk_shapes,
            spec=self.spec,
            dtype=self.compute_dtype,
            place_of=place_of,
        )

    def find_extensions(self) -> None:
        """Have all-gathers call the extensions of local tensors from now on, where a caller has set some on them."""
        is_extended = self.dtensors is not None and any(has_extension(local_of(entry.param)) for entry in self.params)
        if is_extended and not self._has_extensions:
            self._has_extensions = True
            self._by_dtype.clear()
            self._switch_buffer()

    def _switch_buffer(self) -> None:
        self.grads.collect()  # from the parameters of the present buffer
        self._select_buffer(self.params)
        self._use_grad_dtypes()
        self.shown.use_buffer(self.buffer)

    # -- the unsharded parameters ------------------------------------------------------------------------------------

    def begin_gather(self) -> tuple[torch.Tensor, GatherTarget | None]:
        """Allocate the buffer, and return the arguments of its all-gather.

        In place: the buffer, which contains this rank's shard, and None. Else: this rank's shard (1-D, compute dtype),
        or the shards that this rank keeps for a smaller group, and the target that places the shards of all ranks.
        """
        buffer, shard, dtensors = self.buffer, self.flat_param.data, self.dtensors
        if dtensors is not None:
            if buffer.is_extended:
                return self._begin_extended(cast(ExtendedOutput, buffer), dtensors)
            kept = self.kept_shards
            if kept is not None:
                self.kept_shards = None
                buffer.alloc(self.pool)
                assert buffer.gather_target is not None
                return kept, GroupedTarget(buffer.gather_target, kept.numel() // self.layout.shard_numel)
            if shard.is_meta or (dtensors.sharding.offloads and not shard.is_cpu):
                dtensors.check_device()
            dtensors.takes_assigned = False
        buffer.alloc(self.pool)
        if shard.device != buffer.tensor.device:
            # Copy in the shard's dtype first: a converting copy between devices would block the host.
            shard = shard.to(buffer.tensor.device, non_blocking=True)
        if buffer.gather_target is not None:
            return shard.to(buffer.tensor.dtype), buffer.gather_target
        if buffer.owns_memory:
            buffer.own_slice.copy_(shard)
        return buffer.tensor, None

    def _begin_extended(self, output: ExtendedOutput, dtensors: DTensorPlan) -> tuple[torch.Tensor, GatherTarget]:
        """Return the arguments of an all-gather of what the extensions of local tensors send."""
        kept = self.kept_shards
        if kept is not None:
            self.kept_shards = None
            smaller_group = self.comm.smaller_group
            assert smaller_group is not None
            return output.begin_gather_again(kept, len(smaller_group.ranks), self.pool)
        dtensors.check_device()
        dtensors.takes_assigned = False
        return output.begin_gather(self.shown.visible_params, self.pool, self.comm.options.groups.rank_groups)

    def finish_gather(self) -> None:
        """Restore version counters, so that autograd accepts saved parameters again: the buffer is filled."""
        buffer = self.buffer
        if buffer.is_extended and cast(ExtendedOutput, buffer).fill(self.shown.visible_params):
            self.shown.use_buffer(buffer)
        if buffer.versions_before_free is not None:
            set_versions(buffer.params, buffer.versions_before_free)
            buffer.versions_before_free = None
        # What an extension computes of changed parameters cannot be compared with the shard.
        is_compared = buffer.owns_memory and not buffer.is_extended
        buffer.versions_when_filled = tuple(map(VERSION_OF, buffer.params)) if is_compared else None

    def free(self) -> None:
        """Free the buffer, and raise version counters, so that autograd refuses parameters that it saved."""
        buffer = self.buffer
        if not buffer.owns_memory:
            return  # a buffer that is the shard is never freed, so that saved parameters stay valid
        if buffer.versions_before_free is None:
            buffer.versions_before_free = tuple(map(VERSION_OF, buffer.params))
            set_versions(buffer.params, tuple(map(EXPIRED.__add__, buffer.versions_before_free)))
        if buffer.is_extended:
            cast(ExtendedOutput, buffer).free(self.pool)
            return
        self.pool.empty(buffer.tensor.untyped_storage())

    def keep_shards(self, ranks: range) -> None:
        """Copy the shards of ``ranks`` (consecutive) from the unsharded buffer into ``kept_shards``."""
        buffer = self.buffer
        if buffer.is_extended:
            self.kept_shards = cast(ExtendedOutput, buffer).rows_of(ranks)
            return
        self.kept_shards = self.layout.shards_of(ranks, buffer.tensor)

    def reset(self, *, frees: bool, shows_unsharded: bool) -> None:
        """Drop kept shards after an exception, show the sharded parameters, and free the buffer."""
        self.kept_shards = None
        if self.shown.shows_unsharded:
            self.shown.restore(self.shown.diff())
        if self.buffer.gather_target is not None:
            self.buffer.gather_target.drop_staging()
        if frees:
            self.free()
        if shows_unsharded:
            self.shown.show_sharded()

    # -- changes of the shard ----------------------------------------------------------------------------------------

    def weights_epoch(self) -> int:
        """Return a number that increases when sharded values change, and never falls."""
        versions = tuple(map(VERSION_OF, self.shown.versioned))
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
        """Record that the step of an optimizer that holds parameters of this group has ended."""
        self.num_updates += 1
        # Foreach operations change DTensors without raising a version counter; a step without gradients changes none.
        if self.spec.per_param is not None and any(param.grad is not None for param in self.shown.visible_params):
            self._weights_epoch += 1

    def adopt_changes(self) -> None:
        """Adopt tensors that the program assigned to sharded parameters or to the flat parameter's data."""
        changes = self.shown.diff()
        if changes.assigned or changes.data:
            self.adopt()

    def adopt(self) -> None:
        """Adopt what the program assigned, which the slots have found."""
        shown = self.shown
        if self.flat_param.is_meta and self.dtensors is not None and not self._take_loaded(self.dtensors):
            return
        if not self._is_current(self.flat_param.data):
            self.convert(lambda tensor: tensor)
        # A load that began at a plain module, not at a wrapper, and raised has not called hide_names.
        shown.hide_names()
        changes = shown.diff()
        if not changes.assigned and not changes.data:
            return
        if shown.plan.adopt(shown, changes):
            self._weights_epoch += 1
        if not self._is_current(self.flat_param.data):
            if not all(buffer.owns_memory for buffer in self._by_dtype.values()):
                self._rebuild(self.flat_param.data)
            else:
                self._shard_place = self.buffer.place_of(self.flat_param)

    def _take_loaded(self, dtensors: DTensorPlan) -> bool:
        """Fill a shard on the meta device with parameters that were assigned; return False while any is missing."""
        loaded = dtensors.take_loaded()
        if loaded is None:
            return False
        like = loaded[0]
        self.convert(lambda tensor: torch.empty_like(tensor, device=like.device, dtype=like.dtype))
        with torch.no_grad():
            for entry, value in zip(self.params, loaded, strict=True):
                local_of(entry.param).copy_(value)
        self.layout.clear_padding(self.flat_param.data, self.spec.rank)
        self._weights_epoch += 1
        return True

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` (of ``Module.to`` and similar methods) to the shard, and rebuild everything derived from it."""
        was_exposed = self.grads.hide_unreduced()
        if self.dtensors is not None and self.is_changed_by(fn):
            self.dtensors.check_convertible()
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
            self.grads.show_unreduced()

    def _rebuild(self, converted: torch.Tensor) -> None:
        self.storage_epoch += 1
        self._use_dtypes(converted.dtype, converted.dtype)
        spec = self.spec
        if converted.device != spec.shard_device and spec.device == spec.shard_device:
            spec.device = converted.device
        spec.shard_device = converted.device
        move_constants([entry.param for entry in self.params], spec.device)
        self._by_dtype.clear()
        self._switch_buffer()
        self.shown.bind_shard(rebuilt=True)

    def is_changed_by(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Return whether ``fn`` changes the dtype or device of tensors."""
        probe = fn(self.flat_param.data[:0])
        return probe.dtype != self.orig_dtype or probe.device != self.spec.shard_device

    def _is_current(self, shard: torch.Tensor) -> bool:
        return (
            self.buffer.place_of(shard) == self._shard_place
            and shard.dtype == self.orig_dtype
            and shard.device == self.spec.shard_device
        )

    def _shard_of(self, params: Sequence[ManagedParam]) -> torch.Tensor:
        rank, device = self.spec.rank, self.spec.shard_device
        is_offloaded = device.type == "cpu" and self.spec.device.type != "cpu"
        shard = torch.empty(self.layout.shard_numel, dtype=self.orig_dtype, device=device, pin_memory=is_offloaded)
        self.layout.clear_padding(shard, rank)
        for local_shard in self.layout.local_shards(rank):
            param = params[local_shard.index].param.detach()
            shard[local_shard.in_shard.to_slice()].copy_(self.layout.local_part(local_shard.index, rank, param))
        return shard


def begin_all_gathers(
    param_groups: Sequence[ParamGroup], trace: list[tuple[str, str]] | None, pendings: list[Pending]
) -> None:
    """Begin the all-gathers of parameter groups of one mesh, and append each to ``pendings`` once it has begun.

    All groups of DTensors with one compute dtype share an all-gather; each flat parameter has one of its own.
    """
    comm = param_groups[0].comm
    collectives = comm.of_steps if param_groups[0].kept_shards is None else comm.post_forward
    inputs = list(map(_BEGIN_GATHER, param_groups))
    if collectives is None:
        return
    for tensor, target in join_inputs(inputs) if len(inputs) > 1 else inputs:
        if trace is not None:
            trace.append(("all_gather", comm.name))
        comm.issued.append(("all-gather", comm))
        pendings.append(collectives.begin_all_gather(tensor, target))


def summary(options: UnitOptions, param_groups: Sequence[ParamGroup]) -> str:
    """Return strategy, numbers of ranks, dtypes, and bytes of this rank's shards of groups on one mesh, in one line."""
    shard, replicate = options.groups.shard.size, options.groups.replicate.size
    ranks = f"{shard} x {replicate} ranks (shard x replicate)" if replicate > 1 else counted(shard, "ranks")
    kinds = {(param_group.orig_dtype, param_group.compute_dtype): None for param_group in param_groups}
    dtypes = [f"{kind}" if kind is compute else f"{kind} computed in {compute}" for kind, compute in kinds]
    of_dtypes = f" of {' and '.join(dtypes)}".replace("torch.", "") if dtypes else ""
    num_params = sum(len(param_group.layout.param_infos) for param_group in param_groups)
    nbytes = sum(param_group.shard_nbytes for param_group in param_groups)
    name = options.strategy.name
    return f"{name} over {ranks}, {counted(num_params, 'parameters')}{of_dtypes}, {counted(nbytes, 'bytes')} a rank"
