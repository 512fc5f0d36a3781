"""Shows one parameter of a unit as FSDP2's ``FSDPParam``, which programs read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_flat import core
from fsdp_flat.compat.torch_fsdp import mesh_info, module_info, sharded_state
from fsdp_flat.compat.views import View, derived
from fsdp_flat.core import ManagedParam, ParamGroup, PerParamLayout, PerParamSharding, Unit, UnitOptions
from fsdp_flat.errors import UsageError
from fsdp_flat.layout import join_fqn


class FSDPParam(View):
    """Shows one parameter of a unit as FSDP2's; the unit, the handle and a position in it are what it is made of."""

    _viewed: tuple[Unit, ParamGroup, int]

    # -- where it is -------------------------------------------------------------------------------------------------

    @property
    def _entry(self) -> ManagedParam:
        _, param_group, index = self._viewed
        return param_group.params[index]

    @property
    def _layout(self) -> PerParamLayout:
        layout = self._viewed[1].layout
        assert isinstance(layout, PerParamLayout)
        return layout

    @property
    def _rows(self) -> PerParamSharding:
        rows = self._viewed[1].spec.per_param
        assert rows is not None
        return rows

    @property
    def _param_fqn(self) -> str:
        unit = self._viewed[0]
        return join_fqn("" if len(unit.members) > 1 else module_fqn(unit), self._entry.fqn)

    @property
    def _module_info(self) -> Any:
        """FSDP2's description of the modules and names under which the parameter is registered."""
        return module_info(self._entry.sites)

    @property
    def mesh_info(self) -> Any:
        return mesh_info(self._rows.mesh)

    @property
    def post_forward_mesh_info(self) -> Any:
        """FSDP2's description of the mesh that keeps the parameter between forward and backward; or None."""
        unit, param_group, _ = self._viewed
        return post_forward_mesh_info(unit, param_group.comm.options)

    _shard_mesh = derived("_rows.shard_mesh")
    shard_mesh = shard_mesh_from_root = _shard_mesh

    @property
    def device(self) -> torch.device:
        return self._viewed[1].spec.device

    offload_to_cpu = derived("_rows.offloads")
    # The host memory of offloaded shards is always pinned where that exists.
    pin_memory = offload_to_cpu

    # The host waits for copies of gradients at the end of a backward.
    grad_offload_event = None

    # -- the sharded parameter ---------------------------------------------------------------------------------------

    # The parameter that optimizers hold, a DTensor.
    sharded_param = derived("_entry.param")
    _sharded_local_tensor = derived("sharded_param._local_tensor")
    # The shape of this rank's part.
    sharded_size = derived("_sharded_local_tensor.shape")
    _spmd_mesh = derived("sharded_param.device_mesh")
    _spmd_placements = derived("sharded_param.placements")
    _sharding_spec = derived("sharded_param._spec")

    @property
    def _sharded_param_data(self) -> torch.Tensor:
        """The memory of the local tensor with padding (1-D): a part of the unit's shard, which all-gathers read."""
        _, param_group, index = self._viewed
        if param_group.storage.flat_param is None:  # parameters of other classes of tensors keep their own memory
            return self._sharded_local_tensor.view(-1)
        return param_group.flat_shard()[self._layout.chunks[index].to_slice()]

    @property
    def fsdp_placement(self) -> Shard:
        """Placement on the mesh of the unit."""
        return Shard(self._layout.dims[self._viewed[2]])

    @property
    def contiguous_sharded_stride(self) -> tuple[int, ...]:
        return _strides(self.sharded_size)

    @property
    def padded_sharded_param_size(self) -> torch.Size:
        """Shape of the largest rank's part, which each rank's memory has room for."""
        return torch.Size(self._layout.chunk_shapes[self._viewed[2]])

    @property
    def sharded_state(self) -> Any:
        return sharded_state(self._viewed[0].state)

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this rank's part (``sharded_size``) as a DTensor placed as the parameter."""
        _, param_group, index = self._viewed
        assert param_group.dtensors is not None
        return param_group.dtensors.with_local(index, tensor)

    def reset_sharded_param(self) -> None:
        """Adopt a parameter or a local tensor that the caller has assigned."""
        unit, param_group, _ = self._viewed
        unit.check_idle("reset_sharded_param")
        unit.reshard()
        param_group.adopt_changes()

    # -- the unsharded parameter and its gradient --------------------------------------------------------------------

    @property
    def _unsharded_param(self) -> nn.Parameter:
        """The parameter that modules hold in compute."""
        _, param_group, index = self._viewed
        return param_group.output.params[index]

    # It has values while the unit is unsharded.
    unsharded_param = _unsharded_param

    @property
    def is_dtensor(self) -> bool:
        """True if tensor parallelism has sharded the parameter too."""
        return self._entry.adapter is not core.PLAIN

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size(self._layout.param_infos[self._viewed[2]].shape)

    @property
    def _contiguous_orig_stride(self) -> tuple[int, ...]:
        return _strides(self._orig_size)

    @property
    def unsharded_accumulated_grad(self) -> torch.Tensor | None:
        """This rank's gradient (the unsharded shape) that waits to be reduced; None drops it when assigned.

        In torch it is there only if gradients are reduced in another dtype; else ``unsharded_param.grad`` is.
        """
        _, param_group, index = self._viewed
        return param_group.grads.waiting_grad(index)

    @unsharded_accumulated_grad.setter
    def unsharded_accumulated_grad(self, grad: torch.Tensor | None) -> None:
        if grad is not None:
            raise UsageError(
                f"A gradient was assigned to unsharded_accumulated_grad of parameter {self._param_fqn!r}, which takes "
                "None alone. Run backward on (param * grad).sum() inside fsdp_flat.unshard_for(module) to add one."
            )
        self._viewed[0].clear_hidden_gradients({self.sharded_param}, set_to_none=True)

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Do nothing: the unit takes ``.grad`` of unsharded parameters itself when its backward ends."""

    def to_accumulated_grad_if_needed(self) -> None:
        """Do nothing, as :meth:`accumulate_unsharded_grad_if_needed`."""

    # -- dtypes ------------------------------------------------------------------------------------------------------

    @property
    def mp_policy(self) -> Any:
        """The dtypes of the unit; the attributes are those of ``MixedPrecisionPolicy``."""
        return self._viewed[0].options.precision

    @property
    def orig_dtype(self) -> torch.dtype:
        return self._viewed[1].orig_dtype

    @property
    def param_dtype(self) -> torch.dtype | None:
        """Dtype of compute; None for the original one."""
        dtype = self.mp_policy.param_dtype
        return None if dtype == self.orig_dtype or not self.orig_dtype.is_floating_point else dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients are reduced; None for that of compute."""
        precision = self.mp_policy
        return None if precision.reduce_dtype == precision.param_dtype else precision.reduce_dtype


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def module_fqn(unit: Unit) -> str:
    """Return the path of the unit's module from the outermost one, which has none."""
    return "" if core.outermost_of(unit) is unit else unit.name


def post_forward_mesh_info(unit: Unit, options: UnitOptions) -> Any:
    """Return FSDP2's description of the mesh whose ranks keep all parameters between forward and backward; or None.

    It is None if each rank keeps all of them, and the mesh of the unit if none does.
    """
    rows, wanted = options.per_param, unit.control.reshard_after_forward
    assert rows is not None
    if wanted is False or (wanted is None and core.outermost_of(unit) is unit):
        return None
    kept = next((each.comm.smaller_group for each in unit.param_groups if each.comm.options is options), None)
    if kept is None:
        return mesh_info(rows.mesh)
    with core.outside_fake_mode():
        return mesh_info(DeviceMesh.from_group(kept.rank_group.process_group, rows.mesh.device_type))
