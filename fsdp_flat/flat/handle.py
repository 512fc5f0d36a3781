"""Defines the handle, which owns a flat parameter: its shard, its unsharded buffer, its views and its gradients.

A handle never communicates: others all-gather into its buffer, and reduce its flat gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch
from torch import nn

from fsdp_flat.errors import UsageError
from fsdp_flat.flat.arrangement import (
    BufferRows,
    GroupedRows,
    RowTarget,
    clear_padding,
    local_part,
    rows_of,
    shard_of,
    views_of,
)
from fsdp_flat.flat.dtensor_views import DTensorViews, RowSharding
from fsdp_flat.flat.guards import as_flat_parameter, replace_shard, set_grad
from fsdp_flat.flat.optimizers import watch_steps_on
from fsdp_flat.flat.params import PLAIN, FlattenedBy, ManagedParam
from fsdp_flat.flat.storage import FlatBuffer, HandleGradients, MemoryPool
from fsdp_flat.flat.torch_flat import VERSION_OF, is_alias, set_versions
from fsdp_flat.flat.views import FlatViews, OrigViews, Views
from fsdp_flat.layout import FlatLayout, RowLayout, alignment_numel


class ShardState(Enum):
    """Enumerates the states of a handle's parameters."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


@dataclass(frozen=True, slots=True)
class HandleSpec:
    """Configures a handle.

    Attributes:
        module: the unit's module, inside wrappers for checkpoints and compilation; it registers the flat parameter.
        rank, world_size: this rank in the shard group, and its size.
        num_ranks: ranks over which gradients are averaged; the tail of an unsharded layout is padded to a multiple.
        shard_device: device of the shard and its gradient; in host memory it is pinned for another compute device.
        compute_dtype, master_dtype: dtypes of the unsharded parameters and of the shard; None keeps the original one.
        reduce_dtype: dtype in which gradients are reduced; None follows ``compute_dtype``.
        keep_reduce_dtype: sharded gradients stay in ``reduce_dtype``.
        rows: shards each parameter by itself and shows DTensors; None for a flat layout.
    """

    unit_name: str
    module: nn.Module
    rank: int
    world_size: int
    num_ranks: int
    use_orig_params: bool
    device: torch.device
    shard_device: torch.device
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    keep_reduce_dtype: bool = False
    rows: RowSharding | None = None

    def layout_of(self, params: Sequence[ManagedParam], compute_dtype: torch.dtype) -> FlatLayout:
        """Lay out the parameters of a handle."""
        named = [(entry.fqn, tuple(entry.shape)) for entry in params]
        if self.rows is not None:
            return RowLayout.of_rows(named, self.rows.dims_of(params), world_size=self.world_size)
        return FlatLayout.build(
            named,
            world_size=self.world_size,
            align_numel=alignment_numel(compute_dtype.itemsize, use_orig_params=self.use_orig_params),
            tail_multiple=self.num_ranks if self.use_orig_params and self.world_size == 1 else None,
        )


# Added to version counters while parameters are freed, so that autograd refuses what it saved.
# docs/limitations.md names the number.
_EXPIRED = 10**9


class UnshardedParams:
    """Holds the unsharded parameters of one compute dtype, and the buffer that they view.

    While the buffer does not hold their values, the parameters are marked as changed: autograd, which compares versions
    whenever it unpacks a saved tensor, then raises. A backward unshards a unit when it reaches one of the outputs that
    were found. A tensor that a module stored elsewhere may be reached earlier, and would read freed memory.

    Args:
        shard: the handle's shard, which becomes the buffer if it holds the same values.
        dtype: compute dtype.

    Attributes:
        params: one Parameter per managed one, which modules see in compute; each has a version counter of its own.
        rows: places shards of ranks in the buffer, for a row layout over several ranks; else None.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        layout: FlatLayout,
        spec: HandleSpec,
        *,
        shard: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        is_shard = layout.world_size == 1 and dtype == shard.dtype and spec.device == shard.device
        flat = shard if is_shard else torch.empty(layout.numel, dtype=dtype, device=spec.device)
        self.buffer = FlatBuffer(flat, owns_memory=not is_shard)
        self.rows = BufferRows(flat, layout) if isinstance(layout, RowLayout) and layout.world_size > 1 else None
        self._own_slice = flat[layout.shard(spec.rank).to_slice()]
        params = []
        for entry, view in zip(managed, views_of(flat, layout), strict=True):
            # ``.data`` gives the parameter a separate version counter, which refills of the buffer do not change.
            param = nn.Parameter(entry.adapter.from_local(view.data), requires_grad=False)
            # Attributes that a forward reads from parameters (weight decay flags, parallel dims) stay readable.
            param.__dict__.update(entry.param.__dict__)
            params.append(param)
        self.params = tuple(params)
        self._plain = [param for param, entry in zip(params, managed, strict=True) if entry.adapter is PLAIN]
        self._is_in_buffer = partial(is_alias, flat)
        self._versions: tuple[int, ...] | None = None
        self._filled: tuple[int, ...] | None = None
        self.free(MemoryPool())

    def load(self, shard: torch.Tensor, pool: MemoryPool) -> tuple[torch.Tensor, RowTarget | None]:
        """Allocate the buffer, and return the input of its all-gather.

        It is the buffer, with the rank's shard in place, and None; or the shard in the compute dtype, and the target
        of the shards of all ranks.
        """
        buffer = self.buffer
        buffer.alloc(pool)
        if shard.device != buffer.tensor.device:
            # Copy in the shard's dtype first: a converting copy between devices would block the host.
            shard = shard.to(buffer.tensor.device, non_blocking=True)
        if self.rows is not None:
            dtype = buffer.tensor.dtype
            return shard if shard.dtype == dtype else shard.to(dtype), self.rows
        if buffer.owns_memory:
            self._own_slice.copy_(shard)
        return buffer.tensor, None

    def free(self, pool: MemoryPool) -> None:
        """Return the memory to ``pool``; from now on autograd refuses what it saved of the parameters."""
        # Where nothing is freed, nothing can be used too late.
        if self._versions is None and self.buffer.owns_memory:
            self._versions = tuple(map(VERSION_OF, self.params))
            set_versions(self.params, tuple([version + _EXPIRED for version in self._versions]))
        self.buffer.free(pool)

    def mark_filled(self) -> None:
        """Have autograd accept the parameters again: the buffer has their values."""
        if self._versions is not None:
            set_versions(self.params, self._versions)
            self._versions = None
        if self.buffer.owns_memory:
            self._filled = tuple(map(VERSION_OF, self.params))

    def written(self) -> list[int]:
        """Return the parameters that were written since the buffer was filled; none if the buffer is the shard."""
        filled = self._filled
        if filled is None or filled == tuple(map(VERSION_OF, self.params)):
            return []
        return [index for index, param in enumerate(self.params) if param._version != filled[index]]

    @property
    def are_moved(self) -> bool:
        """True if parameters were given other memory than the buffer's, by an assignment to ``.data``."""
        return not all(map(self._is_in_buffer, self._plain))


def _have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; NaN equals NaN."""
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return False
    return torch.equal(*[each.reshape(-1).contiguous().view(torch.uint8) for each in (first, second)])


class FlatParamHandle:
    """Owns one flat parameter.

    Args:
        params: at least one parameter, all of one dtype (and one ``requires_grad`` with ``use_orig_params=True``).

    Attributes:
        flat_param: the rank's shard, 1-D, ``layout.shard_numel`` elements, in ``orig_dtype``.
        state: shard state of the parameters; only this class sets it.
        buffer: the unsharded buffer of the compute dtype; a reshard frees it, unless it is the shard itself.
        pool: memory pool of the buffers; the units of a tree share one.
        rows: while sharded, the shards of several ranks that :meth:`keep_rows` has kept, in the compute dtype; or None.
        storage_epoch: number of times the shard was replaced; graphs recorded before that cannot be run backward.
    """

    views: Views

    def __init__(self, params: Sequence[ManagedParam], spec: HandleSpec) -> None:
        self.spec = spec
        first = params[0].param
        trainable = first.dtype.is_floating_point and first.requires_grad
        self._use_dtypes((spec.master_dtype if trainable else None) or first.dtype, first.dtype)
        self.layout = spec.layout_of(params, self.compute_dtype)
        self.flat_param = as_flat_parameter(nn.Parameter(self._shard_of(params), first.requires_grad))
        self.storage_epoch = 0
        self._attach(params)
        self._mark_params()

    def _use_dtypes(self, stored: torch.dtype, given: torch.dtype) -> None:
        """Set the shard's dtype to ``stored``, and the compute dtype to the spec's (floats only) or else ``given``."""
        spec, floating = self.spec, given.is_floating_point
        self.orig_dtype = stored
        self.compute_dtype = self._low_dtype = (spec.compute_dtype if floating else None) or given
        self._reduce_dtype = (spec.reduce_dtype if floating else None) or self._low_dtype

    def _shard_of(self, params: Sequence[ManagedParam]) -> torch.Tensor:
        rank, device = self.spec.rank, self.spec.shard_device
        is_offloaded = device.type == "cpu" and self.spec.device.type != "cpu"
        shard = torch.empty(self.layout.shard_numel, dtype=self.orig_dtype, device=device, pin_memory=is_offloaded)
        clear_padding(shard, self.layout, rank)
        for local_shard in self.layout.local_shards(rank):
            param = params[local_shard.index].param.detach()
            shard[local_shard.in_shard.to_slice()].copy_(local_part(self.layout, local_shard.index, rank, param))
        return shard

    def _attach(self, params: Sequence[ManagedParam]) -> None:
        """Create buffers, views and gradients around the shard."""
        spec = self.spec
        self.pool = MemoryPool()
        self.state = ShardState.SHARDED
        self.rows: torch.Tensor | None = None
        self._by_dtype: dict[torch.dtype, UnshardedParams] = {}
        unsharded_params = self._use_compute_dtype(params)
        make: Callable[..., Views] = OrigViews if spec.use_orig_params else FlatViews
        if spec.rows is not None:
            make = partial(DTensorViews, rows=spec.rows)
        self.views = make(
            params,
            unsharded_params,
            self.layout,
            rank=spec.rank,
            flat_param=self.flat_param,
            module=spec.module,
            unit_name=spec.unit_name,
        )
        watch_steps_on(self.views)
        self.grads = HandleGradients(params, self.views)
        self._prepare_grads()

    def rename(self, unit_name: str) -> None:
        """Rename the unit, once the tree that it belongs to is known."""
        self.spec = replace(self.spec, unit_name=unit_name)
        self.views.unit_name = unit_name
        self._mark_params()

    def _mark_params(self) -> None:
        for entry, param_info in zip(self.views.params, self.layout.param_infos, strict=True):
            entry.mark(FlattenedBy(entry.fqn, self.spec.unit_name, param_info.shape))

    # -- compute dtype -------------------------------------------------------------------------------------------

    def dtype_in(self, full: bool) -> torch.dtype:
        """Return the dtype of compute in full precision, that of the shard, or else the low-precision dtype."""
        return self.orig_dtype if full else self._low_dtype

    @property
    def is_trainable(self) -> bool:
        """Return whether any parameter of the handle requires a gradient."""
        return self.grads.num_trainable > 0

    def use_full_precision(self, full: bool) -> None:
        """Switch compute to the shard's dtype from the next unshard on, or back to the low-precision dtype."""
        wanted = self.dtype_in(full)
        if wanted != self.compute_dtype:
            assert self.state is ShardState.SHARDED
            # The views are rebuilt, which would lose tensors that the user has assigned.
            self.adopt_changes()
            self.compute_dtype = wanted
            self._switch_unsharded_params()

    def _use_compute_dtype(self, params: Sequence[ManagedParam]) -> tuple[nn.Parameter, ...]:
        """Select the buffer and the unsharded parameters of the compute dtype; they are created on first use."""
        dtype = self.compute_dtype
        if dtype not in self._by_dtype:
            shard = self.flat_param.data
            self._by_dtype[dtype] = UnshardedParams(params, self.layout, self.spec, shard=shard, dtype=dtype)
            self._shard_pointer = shard.data_ptr()
        self._unsharded = self._by_dtype[dtype]
        self.buffer = self._unsharded.buffer
        return self._unsharded.params

    def all_unsharded_params(self) -> list[tuple[nn.Parameter, ...]]:
        """Return the unsharded parameters of each compute dtype that was in use."""
        return [unsharded.params for unsharded in self._by_dtype.values()]

    def _switch_unsharded_params(self) -> None:
        self.views.use_unsharded_params(self._use_compute_dtype(self.views.params))
        self.views.use_sharded_views()
        self._prepare_grads()

    def _prepare_grads(self) -> None:
        reduce_dtype = self._reduce_dtype if self.compute_dtype == self._low_dtype else self.compute_dtype
        self.grads.use_dtypes(self.compute_dtype, reduce_dtype, self.spec.device)

    # -- shard state ---------------------------------------------------------------------------------------------

    def begin_unshard(self) -> tuple[torch.Tensor, RowTarget | None]:
        """Allocate the buffer, and return the input of its all-gather, as :meth:`UnshardedParams.load`."""
        self.views.check_materialized()
        self.views.is_stepped = False
        assert self.state is ShardState.SHARDED
        self.state = ShardState.UNSHARDING
        return self._unsharded.load(self.flat_param.data, self.pool)

    def keep_rows(self, ranks: range) -> None:
        """Copy the shards of some ranks from the unsharded buffer, for :meth:`begin_unshard_of_rows`."""
        assert isinstance(self.layout, RowLayout)
        self.rows = rows_of(self.buffer.tensor, self.layout, ranks)

    def begin_unshard_of_rows(self) -> tuple[torch.Tensor, RowTarget]:
        """Allocate the buffer, and return the input of an all-gather over a smaller group, as :meth:`begin_unshard`."""
        assert self.state is ShardState.SHARDED
        self.state = ShardState.UNSHARDING
        self.buffer.alloc(self.pool)
        rows, self.rows = self.rows, None
        target = self._unsharded.rows
        assert rows is not None
        assert target is not None
        return rows, GroupedRows(target, rows.numel() // self.layout.shard_numel)

    def finish_unshard(self) -> None:
        """Mark the buffer as filled."""
        assert self.state is ShardState.UNSHARDING
        self.state = ShardState.UNSHARDED
        self._unsharded.mark_filled()

    def use_unsharded_views(self) -> None:
        """Point the modules at the unsharded parameters, with the ``requires_grad`` that the user set."""
        self.grads.sync_requires_grad()
        self.views.use_unsharded_views()

    def restore_unsharded_params(self) -> list[int]:
        """Undo assignments to the ``.data`` of unsharded parameters; return those whose values were changed by them."""
        self.views.restore_places()
        unsharded, flat = self._unsharded, self.buffer.tensor
        if not unsharded.are_moved:
            return []
        changed: list[int] = []
        places = zip(unsharded.params, self.views.params, views_of(flat, self.layout), strict=True)
        for index, (param, entry, place) in enumerate(places):
            if entry.adapter is PLAIN and not is_alias(param, flat):
                if self.state is ShardState.UNSHARDED and not _have_same_bits(param.detach(), place):
                    changed.append(index)
                param.data = place
        return changed

    def check_after_compute(self) -> None:
        """Raise a UsageError if a forward has changed parameters, which a reshard would lose.

        A module may put other values in the place of its weights while it computes (quantized ones, for example), by
        an assignment to ``.data``, and put the weights back. Writes through ``.data`` are not seen.
        """
        written = self._unsharded.written()
        changed = self.restore_unsharded_params()
        if written and not changed:
            with torch.no_grad():
                own = shard_of(self.layout, self.spec.rank, self.buffer.tensor)
                if not _have_same_bits(own, self.flat_param.data.to(own.device, own.dtype)):
                    changed = written
        if changed:
            raise UsageError(
                f"Parameter {self.views.describe(changed[0])} was changed in forward, or while it was unsharded by "
                f"hand, on rank {self.spec.rank} of the shard group. It is a copy there, all-gathered or in the dtype "
                "of compute, so the change would be lost. Change weights between steps inside summon_full_params, "
                "compute with a changed copy in forward, or leave the module out of sharding (ignored_modules)."
            )

    def reshard(self) -> None:
        """Mark the parameters as sharded; :meth:`free` or :meth:`undo_reshard` must follow."""
        assert self.state is ShardState.UNSHARDED
        self.state = ShardState.SHARDED

    def free(self) -> None:
        """Free the buffer after :meth:`reshard`."""
        assert self.state is ShardState.SHARDED
        self._unsharded.free(self.pool)

    def undo_reshard(self) -> None:
        """Mark the parameters as unsharded again; the buffer was not freed yet."""
        assert self.state is ShardState.SHARDED
        self.state = ShardState.UNSHARDED

    def reset(self, *, frees: bool) -> None:
        """Reset to the sharded state from any state after an exception, drop all gradients, and free the buffer."""
        self.state = ShardState.SHARDED
        self.rows = None
        self.restore_unsharded_params()
        if self._unsharded.rows is not None:
            self._unsharded.rows.drop_staging()
        if frees:
            self.free()
        self.views.hide_unsharded()
        self.grads.drop()

    def expose_unreduced_grads(self) -> None:
        """Set ``.grad`` to the waiting, unreduced gradient (unsharded shapes) between backwards inside ``no_sync``."""
        self.grads.expose_unreduced(self.pool)

    # -- changes of the whole module -----------------------------------------------------------------------------

    def adopt_changes(self) -> None:
        """Adopt tensors that the user assigned to sharded parameters or to the flat parameter's data."""
        if isinstance(self.views, DTensorViews) and self.flat_param.is_meta:
            loaded = self.views.loaded()
            if loaded is None:
                return
            like = loaded[0]
            self.convert(lambda tensor: torch.empty_like(tensor, device=like.device, dtype=like.dtype))
            self.views.fill(loaded)
        if not self._is_current(self.flat_param.data):
            self.convert(lambda tensor: tensor)
        # An exception may have ended a load below a plain module, where nothing restores the parameters.
        if self.views.shows_names:
            self.views.hide_names()
        if self.views.adopt_changes() and not self._is_current(self.flat_param.data):
            if not all(each.buffer.owns_memory for each in self._by_dtype.values()):
                self._rebuild(self.flat_param.data)
            else:
                self._shard_pointer = self.flat_param.data_ptr()

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` (of ``Module.to`` and similar methods) to the shard, and rebuild everything derived from it."""
        was_exposed = self.grads.hide_unreduced()
        if isinstance(self.views, DTensorViews) and self.is_changed_by(fn):
            self.views.check_convertible()
        converted = fn(self.flat_param.data)
        spec = self.spec
        # Offloaded shards may be on the meta device still.
        if spec.device.type != "cpu" and spec.device != spec.shard_device and converted.device.type == "cpu":
            converted = converted.pin_memory()
        grad, self.flat_param.grad = self.flat_param.grad, None
        replace_shard(self.flat_param, converted)
        if grad is not None:
            set_grad(self.flat_param, fn(grad))
        if not self._is_current(converted):
            self._rebuild(converted)
        if was_exposed:
            self.expose_unreduced_grads()

    def _rebuild(self, converted: torch.Tensor) -> None:
        self.storage_epoch += 1
        self._use_dtypes(converted.dtype, converted.dtype)
        moved = converted.device != self.spec.shard_device and self.spec.device == self.spec.shard_device
        device = converted.device if moved else self.spec.device
        self.spec = replace(self.spec, shard_device=converted.device, device=device)
        self._by_dtype.clear()
        self._switch_unsharded_params()
        self.views.bind_shard(rebuilt=True)

    def is_changed_by(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Return whether ``fn`` changes the dtype or device of tensors."""
        probe = fn(self.flat_param.data[:0])
        return probe.dtype != self.orig_dtype or probe.device != self.spec.shard_device

    def _is_current(self, shard: torch.Tensor) -> bool:
        return (
            shard.data_ptr() == self._shard_pointer
            and shard.dtype == self.orig_dtype
            and shard.device == self.spec.shard_device
        )
