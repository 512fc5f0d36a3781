"""Defines the parameter group: the parameters of a unit that are sharded together, as one flat tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from fsdp_flat.comm import Pending
from fsdp_flat.core.buffers import MemoryPool
from fsdp_flat.core.dtensor_plan import DTensorPlan
from fsdp_flat.core.gather_targets import GatherTarget, join_inputs
from fsdp_flat.core.gradients import Gradients
from fsdp_flat.core.group_collectives import GroupCollectives
from fsdp_flat.core.group_spec import ParamGroupSpec
from fsdp_flat.core.layout import FlatLayout, Layout, LocalShard, PerParamLayout, alignment_numel
from fsdp_flat.core.options import UnitOptions
from fsdp_flat.core.params import ManagedParam, is_subclass
from fsdp_flat.core.quantized import move_constants
from fsdp_flat.core.slot_plans import FlatPlan, OriginalsPlan
from fsdp_flat.core.slots import SlotPlan, Slots
from fsdp_flat.core.storage import FlatStorage, Storage, TensorStorage
from fsdp_flat.core.tensor_output import has_extension
from fsdp_flat.core.torch_core import VERSION_OF, is_in_a_graph, local_of
from fsdp_flat.errors import UnsupportedError, counted


class ParamGroup:
    """Owns the parameters of a unit that are sharded together: storage, slots, gradients, collectives.

    Args:
        params: at least one parameter, all of one dtype (and one ``requires_grad`` with ``use_orig_params=True``), and
            all plain tensors or all of classes of their own.

    Attributes:
        spec: how the group is sharded; its own copy.
        params: the managed parameters, in layout order.
        storage: this rank's shards.
        slots: what modules and optimizers have of the parameters.
        dtensors: what the slots hold if the parameters are sharded one by one; else None.
        grads: the gradients of the unsharded parameters until they are reduced.
        output: the output of all-gathers to compute in ``compute_dtype``, with the unsharded parameters; a reshard
            frees it, unless it is the shard.
        pool: memory pool of the buffers; the units of a tree share one.
        comm: the group's collectives, which its builder sets.
        kept_shards: consecutive ranks' rows of an all-gather (1-D), input of the next one over a smaller group.
        storage_epoch: number of times the shard was replaced; graphs from before the last time cannot run backward.
        num_updates: number of events after which shards of any rank may have other values.
    """

    comm: GroupCollectives
    dtensors: DTensorPlan | None = None

    def __init__(self, params: Sequence[ManagedParam], spec: ParamGroupSpec) -> None:
        self.spec = spec = replace(spec)
        first = params[0].param
        self._use_compute_dtype(first.dtype)
        self.layout = layout = self._layout_of(params)
        self.params = list(params)
        self.storage, plan = self._stored(is_tensors=is_subclass(first.data))
        self.orig_dtype = self.storage.empty().dtype
        self.storage_epoch = self.num_updates = self._weights_epoch = 0
        self._versions: tuple[int, ...] = ()
        self.pool = MemoryPool()
        self.kept_shards: torch.Tensor | None = None
        self.output = self.storage.output(self.compute_dtype, self.pool)
        self.slots = Slots(self.params, plan, spec=spec, layout=layout, storage=self.storage, output=self.output)
        self.grads = Gradients(self.slots, self.pool)
        self._use_grad_dtypes()
        self.slots.accept_grads_by(self.grads.accept_hook)

    def _stored(self, *, is_tensors: bool) -> tuple[Storage, SlotPlan]:
        """Return where the shards are kept, and what the slots hold while the parameters are sharded."""
        spec, layout = self.spec, self.layout
        if spec.per_param is None:
            flat = FlatStorage(self.params, layout, spec)
            return flat, OriginalsPlan(flat) if spec.use_orig_params else FlatPlan(flat)
        assert isinstance(layout, PerParamLayout)
        storage = (TensorStorage if is_tensors else FlatStorage)(self.params, layout, spec)
        self.dtensors = DTensorPlan(spec.per_param, layout, spec.rank, storage)
        return storage, self.dtensors

    def rename(self, unit_name: str) -> None:
        """Rename the unit that the group belongs to."""
        self.spec.unit_name = unit_name
        self.slots.mark_params()

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

    @property
    def flat_param(self) -> nn.Parameter:
        """The flat parameter, whose data are this rank's shards (1-D, ``layout.shard_numel``, ``orig_dtype``).

        Raises:
            UnsupportedError: the shards have no common memory.
        """
        flat_param = self.storage.flat_param
        if flat_param is None:
            raise UnsupportedError(
                f"Parameter {self.slots.describe(0)} is a {type(self.storage.local(0)).__name__}, which has no full "
                "plain tensor. Save it by get_model_state_dict of torch.distributed.checkpoint.state_dict, or by "
                "torch.distributed.checkpoint."
            )
        return flat_param

    def flat_shard(self) -> torch.Tensor:
        """Return this rank's shard, which :attr:`flat_param` holds."""
        return self.flat_param.data

    def local(self, index: int) -> torch.Tensor:
        """Return this rank's local shard of parameter ``index``; call :meth:`adopt_changes` first.

        It is 1-D, a view; or, of a class of its own, in its shape.
        """
        return self.storage.local(index)

    @property
    def buffer_tensors(self) -> list[torch.Tensor]:
        """The unsharded buffers of all dtypes of compute so far, with or without memory."""
        return [tensor for output in self.storage.outputs.values() for tensor in output.tensors]

    @property
    def is_in_a_graph(self) -> bool:
        """Return whether a caller holds an autograd graph that can still produce gradients."""
        return any(param.requires_grad and is_in_a_graph(param) for param in self.output.params)

    # -- dtypes, and the output of the compute dtype -----------------------------------------------------------------

    def _use_compute_dtype(self, given: torch.dtype) -> None:
        """Compute in the spec's dtype (floats only), or else in ``given``, and reduce by the spec likewise."""
        spec, floating = self.spec, given.is_floating_point
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
            self._switch_output()

    def find_extensions(self) -> None:
        """Have all-gathers call the extensions of local tensors from now on, where a caller has set some on them."""
        storage = self.storage
        if self.dtensors is None or storage.calls_extensions:
            return
        if any(has_extension(local_of(entry.param)) for entry in self.params):
            storage.calls_extensions = True
            storage.outputs.clear()
            self._switch_output()

    def _switch_output(self) -> None:
        self.grads.collect()  # from the parameters of the present output
        self.output = self.storage.output(self.compute_dtype, self.pool)
        self._use_grad_dtypes()
        self.slots.use_output(self.output)

    # -- the unsharded parameters ------------------------------------------------------------------------------------

    def reset(self, *, frees: bool) -> None:
        """Drop kept shards after an exception, show the sharded parameters, and free the buffer."""
        self.kept_shards, slots = None, self.slots
        if shows_unsharded := slots.shows_unsharded:
            slots.restore(slots.diff())
        if self.output.target is not None:
            self.output.target.drop_staging()
        if frees:
            self.output.free(self.pool)
        if shows_unsharded:
            slots.show_sharded()

    # -- changes of the shard ----------------------------------------------------------------------------------------

    def weights_epoch(self) -> int:
        """Return a number that increases when sharded values change, and never falls."""
        versions = tuple(map(VERSION_OF, self.slots.versioned))
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
        if self.spec.per_param is not None and any(param.grad is not None for param in self.slots.visible_params):
            self._weights_epoch += 1

    def adopt_changes(self) -> None:
        """Adopt tensors that the program assigned to sharded parameters or to the flat parameter's data."""
        changes = self.slots.diff()
        if changes.assigned or changes.data:
            self.adopt()

    def adopt(self) -> None:
        """Adopt what the program assigned, which the slots have found."""
        slots, storage, dtensors = self.slots, self.storage, self.dtensors
        is_flat_meta = storage.flat_param is not None and storage.flat_param.is_meta
        if is_flat_meta and dtensors is not None and not self._take_loaded(dtensors):
            return
        if storage.state() != storage.outputs_made_for:
            self.convert(lambda tensor: tensor)
        # A load that began at a plain module, not at a wrapper, and raised has not called hide_names.
        slots.hide_names()
        changes = slots.diff()
        if not changes.assigned and not changes.data:
            return
        if slots.plan.adopt(slots, changes):
            self._weights_epoch += 1
        if storage.state() != storage.outputs_made_for:
            self._rebuild()

    def _take_loaded(self, dtensors: DTensorPlan) -> bool:
        """Fill a shard on the meta device with parameters that were assigned; return False while any is missing."""
        loaded = dtensors.take_loaded()
        if loaded is None:
            return False
        like = loaded[0]
        self.convert(lambda tensor: torch.empty_like(tensor, device=like.device, dtype=like.dtype))
        for index, value in enumerate(loaded):
            self.storage.take(index, value)
        self._weights_epoch += 1
        return True

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` (of ``Module.to`` and similar methods) to the shards, and rebuild what is derived from them."""
        was_exposed = self.grads.hide_unreduced()
        if self.dtensors is not None and self.is_changed_by(fn):
            self.dtensors.check_convertible()
        if self.storage.convert(fn):
            self._rebuild()
        if was_exposed:
            self.grads.show_unreduced()

    def _rebuild(self) -> None:
        self.storage_epoch += 1
        spec, shard = self.spec, self.storage.empty()
        if shard.dtype != self.orig_dtype:
            is_full, self.orig_dtype = self.compute_dtype != self._low_dtype, shard.dtype
            self._use_compute_dtype(shard.dtype)
            self.compute_dtype = self.dtype_in(is_full)
        if shard.device != spec.shard_device and spec.device == spec.shard_device:
            spec.device = shard.device
        spec.shard_device = shard.device
        move_constants([entry.param for entry in self.params], spec.device)
        self.storage.outputs.clear()
        self._switch_output()
        self.slots.bind_shard(rebuilt=True)

    def is_changed_by(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Return whether ``fn`` changes the dtype or device of tensors."""
        probe = fn(self.storage.empty())
        return probe.dtype != self.orig_dtype or probe.device != self.spec.shard_device


def begin_all_gathers(
    param_groups: Sequence[ParamGroup], trace: list[tuple[str, str]] | None, pendings: list[Pending]
) -> None:
    """Begin the all-gathers of parameter groups of one mesh, and append each to ``pendings`` once it has begun.

    All groups of DTensors with one compute dtype share an all-gather; each flat parameter has one of its own.
    """
    comm = param_groups[0].comm
    collectives = comm.step_collectives if param_groups[0].kept_shards is None else comm.post_forward
    inputs = list[tuple[torch.Tensor, GatherTarget | None]]()
    for param_group in param_groups:
        kept, output = param_group.kept_shards, param_group.output
        dtensors = param_group.dtensors
        if kept is not None:
            param_group.kept_shards = None
            inputs.append(output.send_kept(kept, param_group.pool))
            continue
        if dtensors is not None:
            flat_param = param_group.storage.flat_param
            if flat_param is None or flat_param.is_meta or (dtensors.sharding.offloads and not flat_param.is_cpu):
                dtensors.check_device()
            dtensors.takes_assigned = False
        inputs.append(output.send(param_group.pool, comm.gather_buffers))
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
    nbytes = sum(param_group.storage.nbytes for param_group in param_groups)
    name = options.strategy.name
    return f"{name} over {ranks}, {counted(num_params, 'parameters')}{of_dtypes}, {counted(nbytes, 'bytes')} a rank"
