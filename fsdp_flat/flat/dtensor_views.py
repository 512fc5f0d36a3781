"""Shows each sharded parameter as a DTensor, as FSDP2 does: the views of a row layout.

Outside of compute ``module.weight`` is an ``nn.Parameter`` that is a DTensor, under its own name, whose local tensor is
a view of this rank's shard. State dicts, optimizers and gradient clipping are therefore those of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
import torch.utils
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_flat.errors import ShardingError, UsageError, some_of
from fsdp_flat.flat.arrangement import VisibleParam, clear_padding, local_part, split_alone
from fsdp_flat.flat.params import PLAIN, DataParallelDims, FlattenedBy, ManagedParam, check_adapter, check_extensions
from fsdp_flat.flat.torch_flat import dtensor_of, dtensor_parameter, is_in_a_graph, local_of
from fsdp_flat.flat.views import Views
from fsdp_flat.layout import FlatLayout, RowLayout

_specs: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakValueDictionary[tuple[Any, ...], Any]]
_specs = weakref.WeakKeyDictionary()
"""torch's descriptions of DTensors that exist, by shard group, shape, dim and dtype: to make one takes long.

A mesh may equal one whose groups are destroyed, so only one that has the same group counts as the same.
"""


@dataclass(frozen=True, slots=True)
class RowSharding:
    """Configures the DTensors of a handle.

    Attributes:
        mesh: the data-parallel mesh; its last dim shards, another one replicates.
        offloads: shards have to be in host memory.
        data_dims: the dims of the parameters' own mesh that ``mesh`` has; None if their mesh has none of them.
        suffix: names the mesh after the path of its unit's modules, which have another unit too; else empty.
        hooks: handles of hooks of the unit's modules and of other changes; ``remove()`` undoes each with the unit.
    """

    mesh: DeviceMesh
    offloads: bool = False
    data_dims: DataParallelDims | None = None
    suffix: str = ""
    hooks: list[Any] = field(default_factory=list, compare=False)

    def adapted(self, entry: ManagedParam, groups: list[dist.ProcessGroup]) -> ManagedParam:
        """Return a parameter with the adapter by which it is sharded over ``groups``, or raise an OptionError."""
        if self.data_dims is not None:
            return replace(entry, adapter=self.data_dims.adapted(entry.adapter, entry.fqn))
        check_adapter(entry.adapter, entry.fqn, groups)
        return entry

    def dims_of(self, params: Sequence[ManagedParam]) -> list[int]:
        """Return the sharded dim of each parameter, non-negative; raise a ShardingError if one has no such dim."""
        dims = []
        for entry in params:
            dims.append(entry.dim + entry.param.dim() if entry.dim < 0 else entry.dim)
            if not 0 <= dims[-1] < max(1, entry.param.dim()):
                raise ShardingError(
                    f"Parameter {entry.fqn!r} of shape {tuple(entry.shape)} has no dim {entry.dim} to shard; "
                    "shard_placement_fn returned it."
                )
        return dims

    def template(self, entry: ManagedParam, dim: int, local: torch.Tensor) -> DTensor:
        """Create the DTensor of a parameter whose part on this rank is ``local``, on any device."""
        key = entry.shape, dim, local.dtype
        known = _specs.setdefault(self.mesh.get_group(self.mesh.ndim - 1), weakref.WeakValueDictionary())
        spec = known.get(key) if entry.adapter is PLAIN else None
        # The replicate group of another mesh may be another one.
        if spec is None or (spec.mesh is not self.mesh and (self.mesh.ndim > 1 or spec.mesh != self.mesh)):
            shape = entry.adapter.full_shape(tuple(entry.shape))
            mesh, placements = entry.adapter.sharded_over(self.mesh, dim)
            stride = torch.empty(shape, device="meta").stride()
            made = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
            # One object for all of a shape: DTensor's dispatch finds it faster than an equal one. That of a detached
            # tensor would be of an equal mesh that torch remembers.
            spec = made._spec
            if entry.adapter is PLAIN:
                known[key] = spec
        return dtensor_of(local, spec)


class DTensorViews(Views):
    """Implements :class:`Views` with DTensors, which replace the managed parameters in their modules."""

    exposes_unreduced = False
    layout: RowLayout

    def __init__(
        self,
        params: Sequence[ManagedParam],
        unsharded_params: Sequence[nn.Parameter],
        layout: FlatLayout,
        *,
        rows: RowSharding,
        rank: int,
        flat_param: nn.Parameter,
        **kwargs: Any,
    ) -> None:
        assert isinstance(layout, RowLayout)
        self._rows = rows
        self._local_parts = [
            (layout.local_shard(index, rank).in_shard, layout.local_shape(index, rank)) for index in range(len(params))
        ]
        entries = [
            entry.replaced_by(dtensor_parameter(rows.template(entry, dim, local), like=entry.param))
            for entry, dim, local in zip(
                params, layout.dims, split_alone(flat_param.data, self._local_parts), strict=True
            )
        ]
        super().__init__(entries, unsharded_params, layout, rank=rank, flat_param=flat_param, **kwargs)
        self._held: dict[nn.Module, list[tuple[str, nn.Parameter, torch.Tensor]]] = {}
        self._show(self.params)

    def _guarded_hooks(self) -> list[dict[Any, Any]]:
        return []  # operations on DTensors are defined, and mixing them with plain tensors raises

    def _show(self, params: Sequence[ManagedParam]) -> None:
        """Use these parameters, whose local tensors are views of the shard, from now on."""
        self.params = tuple(params)
        parts = zip(self.params, self._local_parts, strict=True)
        self.visible = tuple(
            VisibleParam(entry.param, range(index, index + 1), in_shard.to_slice(), shape)
            for index, (entry, (in_shard, shape)) in enumerate(parts)
        )
        self._shown = shown = [cast(DTensor, entry.param) for entry in self.params]
        # A change of either raises its own version counter.
        self._versioned = (self.flat_param, *shown, *[param._local_tensor for param in shown])
        self._pointers = [param._local_tensor.data_ptr() for param in shown]
        for held in self._held.values():
            held.clear()
        for entry, param_info in zip(self.params, self.layout.param_infos, strict=True):
            # Conversions of an inner module swap the attributes of its parameters away.
            entry.mark(FlattenedBy(entry.fqn, self.unit_name, param_info.shape))
        for index, site in self._sites:
            held = self._held.setdefault(site.module, [])
            held.append((site.name, self.params[index].param, shown[index]._local_tensor))
        self._bindings = self._bind()
        self.use_sharded_views()

    def grads(self) -> list[torch.Tensor | None]:
        found = [each.param.grad for each in self.visible]
        return [None if grad is None else local_of(grad) for grad in found]

    def reduced_grads(self, shard_grad: torch.Tensor) -> list[torch.Tensor]:
        parts = split_alone(shard_grad, self._local_parts)
        return [dtensor_of(part, param._spec) for param, part in zip(self._shown, parts, strict=True)]

    def note_step(self) -> None:
        super().note_step()
        # Foreach operations change DTensors without raising a version counter.
        self.raise_weights_epoch()

    def distribute(self, index: int, full: torch.Tensor) -> DTensor:
        """Return a DTensor of a full tensor like parameter ``index``, without communication.

        Its local tensor, which may be a view of ``full``, is on the device of shards, or on meta if ``full`` is.
        """
        entry = self.params[index]
        inner = entry.adapter.local_slice(full.detach())
        local = local_part(self.layout, index, self.rank, inner).view(self.layout.local_shape(index, self.rank))
        device_type = "cpu" if self._rows.offloads else self._rows.mesh.device_type
        return self.with_local(index, local if local.is_meta else local.to(device_type))

    def with_local(self, index: int, local: torch.Tensor) -> DTensor:
        """Return a DTensor with the mesh and placements of parameter ``index`` and the given local tensor."""
        return self._rows.template(self.params[index], self.layout.dims[index], local)

    # -- changes ---------------------------------------------------------------------------------------------------

    def bind_shard(self, *, rebuilt: bool = False) -> None:
        locals_ = split_alone(self.flat_param.data, self._local_parts)
        for index, (entry, local) in enumerate(zip(self.params, locals_, strict=True)):
            param = entry.param
            if (local.dtype, local.device) == (param.dtype, param.device):
                param._local_tensor = local  # type: ignore[attr-defined]
            else:
                # A DTensor cannot change its dtype or device; an optimizer keeps the Parameter, which gets another one.
                template = self._rows.template(entry, self.layout.dims[index], local)
                other = dtensor_parameter(template, like=param)
                if param.grad is not None:
                    other.grad = dtensor_of(local_of(param.grad).to(local.device, local.dtype), template._spec)
                torch.utils.swap_tensors(param, other)
        self._show(self.params)

    def check_convertible(self) -> None:
        """Raise a UsageError if a parameter cannot change its dtype or device in place."""
        for index, entry in enumerate(self.params):
            if is_in_a_graph(entry.param) or weakref.getweakrefs(entry.param):
                raise UsageError(
                    f"Parameter {self.describe(index)} cannot change its dtype or device: an autograd graph (of "
                    "param.full_tensor(), for example) or a weak reference (of torch.compile, for example) uses it. "
                    "Convert the model before, or drop these first."
                )

    def _assigned(self, index: int) -> nn.Parameter:
        """Return the tensor that the modules hold in place of parameter ``index``, or the parameter itself."""
        entry = self.params[index]
        held = [site.module._parameters.get(site.name) for site in entry.sites]
        return next((each for each in held if each is not None and each is not entry.param), entry.param)

    def loaded(self) -> list[torch.Tensor] | None:
        """Keep what was assigned to parameters on the meta device; return their local tensors once none is left there.

        The parameters are views of a shard on the meta device until then; :meth:`fill` follows once it has memory.
        """
        params = []
        for index, entry in enumerate(self.params):
            current = self._assigned(index)
            if current is not entry.param:
                self._check_assigned(index, current)
            params.append(replace(entry, param=current))
        self._show(params)
        left = any(entry.param.is_meta for entry in params)
        return None if left else [local_of(entry.param) for entry in params]

    def fill(self, values: Sequence[torch.Tensor]) -> None:
        """Copy local tensors to the parameters."""
        with torch.no_grad():
            for entry, value in zip(self.params, values, strict=True):
                local_of(entry.param).copy_(value)
        clear_padding(self.flat_param.data, self.layout, self.rank)
        self.raise_weights_epoch()

    def held_by(self, module: nn.Module) -> list[tuple[str, nn.Parameter, torch.Tensor]]:
        """Return the name, the parameter and its local tensor for each parameter of ``module``.

        The list is updated when the parameters change; a state dict compares it with the module in every hook.
        """
        return self._held[module]

    def changed(self) -> list[int]:
        pointers = [param._local_tensor.data_ptr() for param in self._shown]
        if self._pointers == pointers and self._hold_sharded():
            return []
        found = [(self._assigned(index), entry.param) for index, entry in enumerate(self.params)]
        return [
            index
            for index, (current, param) in enumerate(found)
            if current is not param or local_of(current).data_ptr() != self._pointers[index]
        ]

    def adopt_changes(self) -> bool:
        changed = self.changed()
        if not changed:
            return False
        params = list(self.params)
        assigned = {index: self._assigned(index) for index in changed}
        for index, current in assigned.items():
            before = params[index].param
            if before is not current:
                # The caller may put it back, or has put it elsewhere: it keeps its values in memory of its own.
                before._local_tensor = local_of(before).clone()  # type: ignore[attr-defined]
        for index, current in assigned.items():
            params[index] = replace(params[index], param=self._adopted(index, current))
        self._show(params)
        return True

    def _adopted(self, index: int, current: nn.Parameter) -> nn.Parameter:
        """Copy the values of an assigned parameter to the shard, and make it a view of the shard."""
        self._check_assigned(index, current)
        self.raise_weights_epoch()
        (local,) = split_alone(self.flat_param.data, [self._local_parts[index]])
        with torch.no_grad():
            local.copy_(local_of(current))
        if (local.dtype, local.device) != (current.dtype, current.device):
            old = self.params[index]
            template = self._rows.template(old, self.layout.dims[index], local)
            return nn.Parameter(template, requires_grad=current.requires_grad)
        current._local_tensor = local  # type: ignore[attr-defined]
        return current

    def _check_assigned(self, index: int, current: nn.Parameter) -> None:
        shape = self.layout.local_shape(index, self.rank)
        if not isinstance(current, DTensor) or tuple(current._local_tensor.shape) != shape:
            held = f"a {type(current.data).__name__} of shape {tuple(local_of(current).shape)}"
            raise UsageError(
                f"Parameter {self.describe(index)} was replaced by {held} on rank {self.rank}; expected a DTensor with "
                f"the local shape {shape}. Convert full tensors by torch.distributed.tensor.distribute_tensor(tensor, "
                "param.device_mesh, param.placements)."
            )
        if self._rows.offloads and current.device.type not in ("cpu", "meta"):
            self._raise_not_on_cpu([index], current.device)

    def check_materialized(self) -> None:
        """Raise a UsageError if parameters are on the meta device, or offloaded ones elsewhere than in host memory."""
        if self.flat_param.is_meta:
            meta = [self.describe(index) for index, entry in enumerate(self.params) if entry.param.is_meta]
            raise UsageError(
                f"{len(meta)} parameters are on the meta device: {some_of(meta, 4)}. Call model.to_empty(device=...) "
                "and initialise them, or load a state dict with assign=True, before the first forward."
            )
        if self._rows.offloads and not self.flat_param.is_cpu:
            self._raise_not_on_cpu(range(len(self.params)), self.flat_param.device)

    def check_plain(self) -> None:
        """Raise an UnsupportedError if a local tensor has FSDP2's all-gather extensions, which would not be called."""
        for index, entry in enumerate(self.params):
            check_extensions(local_of(entry.param), self.describe(index))

    def _raise_not_on_cpu(self, indices: Iterable[int], device: torch.device) -> NoReturn:
        raise UsageError(
            f"With CPUOffloadPolicy sharded parameters are in host memory, but these are on {device}: "
            f"{some_of([self.describe(index) for index in indices], 4)}. Load a state dict of CPU tensors, or call "
            'model.to_empty(device="cpu").'
        )
