"""Shows a unit as FSDP2's state, parameter group and parameters, which programs read and end backwards through.

torch's pipelining, trainers that compute a loss in chunks, TransformerEngine and VeOmni are among them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdp_flat import core
from fsdp_flat.compat.torch_fsdp import mesh_info, training_state
from fsdp_flat.compat.views import View
from fsdp_flat.core import (
    DTensorShown,
    MemoryState,
    ParamGroup,
    PerParamSharding,
    Phase,
    Unit,
    UnitOptions,
    step_of,
    unit_of,
)
from fsdp_flat.errors import UsageError
from fsdp_flat.layout import join_fqn


class FSDPParam(View):
    """Shows one parameter of a unit as FSDP2's; the unit, the handle and a position in it are what it is made of."""

    _viewed: tuple[Unit, ParamGroup, int]
    _INSTEAD: ClassVar = {
        "_sharded_param_data": "read sharded_param.to_local(); the shards of a unit share one memory",
        "all_gather_inputs": "call unshard() of the module",
    }

    @property
    def sharded_param(self) -> nn.Parameter:
        """The parameter that optimizers hold, a DTensor."""
        _, param_group, index = self._viewed
        return param_group.params[index].param

    @property
    def _unsharded_param(self) -> nn.Parameter:
        _, param_group, index = self._viewed
        return param_group.buffer.params[index]

    @property
    def unsharded_param(self) -> nn.Parameter:
        """The parameter that modules hold in compute; it has values while the unit is unsharded."""
        return self._unsharded_param

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        return self.sharded_param._local_tensor  # type: ignore[attr-defined]

    @property
    def _param_fqn(self) -> str:
        unit, param_group, index = self._viewed
        return join_fqn("" if len(unit.members) > 1 else unit.name, param_group.params[index].fqn)

    @property
    def _orig_size(self) -> torch.Size:
        _, param_group, index = self._viewed
        return torch.Size(param_group.layout.param_infos[index].shape)

    @property
    def sharded_size(self) -> torch.Size:
        """Shape of this rank's part."""
        return self._sharded_local_tensor.shape

    @property
    def fsdp_placement(self) -> Shard:
        """Placement on the mesh of the unit."""
        _, param_group, index = self._viewed
        assert isinstance(param_group.shown, DTensorShown)
        return Shard(param_group.shown.layout.dims[index])

    @property
    def _rows(self) -> PerParamSharding:
        rows = self._viewed[1].spec.per_param
        assert rows is not None
        return rows

    @property
    def mesh_info(self) -> Any:
        return mesh_info(self._rows.mesh)

    @property
    def device(self) -> torch.device:
        return self._viewed[1].spec.device

    @property
    def orig_dtype(self) -> torch.dtype:
        return self._viewed[1].orig_dtype

    @property
    def param_dtype(self) -> torch.dtype | None:
        """Dtype of compute; None for the original one."""
        dtype = self._viewed[0].options.precision.param_dtype
        return None if dtype == self.orig_dtype else dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients are reduced; None for that of compute."""
        precision = self._viewed[0].options.precision
        return None if precision.reduce_dtype == precision.param_dtype else precision.reduce_dtype

    @property
    def offload_to_cpu(self) -> bool:
        return self._rows.offloads

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Do nothing: the handle collects each gradient as autograd produces it."""

    def to_accumulated_grad_if_needed(self) -> None:
        """Do nothing: the handle collects each gradient as autograd produces it."""


class FSDPParamGroup(View):
    """Shows the parameters of a unit on one mesh as FSDP2's parameter group, made of the unit and its options."""

    _viewed: tuple[Unit, UnitOptions]
    _INSTEAD: ClassVar = {
        "post_forward_mesh_info": "call set_reshard_after_forward of the module",
        "comm_ctx": "call fsdp_flat.share_comm_ctx(modules)",
    }

    @property
    def unit(self) -> Unit:
        return self._viewed[0]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.unit.members

    @property
    def fsdp_params(self) -> list[FSDPParam]:
        """The parameters, in the order of registration in each handle."""
        unit, options = self._viewed
        param_groups = [param_group for param_group in unit.param_groups if param_group.comm.options is options]
        return [
            FSDPParam(unit, param_group, index)
            for param_group in param_groups
            for index in range(len(param_group.params))
        ]

    @property
    def mesh_info(self) -> Any:
        """FSDP2's description of the mesh."""
        rows = self._viewed[1].per_param
        assert rows is not None
        return mesh_info(rows.mesh)

    @property
    def device(self) -> torch.device:
        return self.unit.options.device

    @property
    def mp_policy(self) -> Any:
        """The dtypes of the unit; the attributes are those of ``MixedPrecisionPolicy``."""
        return self.unit.options.precision

    @property
    def _module_fqn(self) -> str:
        return self.unit.name

    @property
    def _orig_dtype(self) -> torch.dtype | None:
        return next((param.orig_dtype for param in self.fsdp_params if param.sharded_param.requires_grad), None)

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        policy = self.mp_policy
        return None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype

    @property
    def _training_state(self) -> Any:
        """FSDP2's state. Assigning IDLE resets a unit that a failed step has left in another one."""
        return training_state(self.unit.phase)

    @_training_state.setter
    def _training_state(self, state: Any) -> None:
        _set_idle(self.unit, state)

    @property
    def _reshard_after_forward(self) -> bool:
        wanted, root = self.unit.control.reshard_after_forward, core.outermost_of(self.unit)
        return root is not self.unit if wanted is None else wanted

    @property
    def is_sharded(self) -> bool:
        return self.unit.is_sharded and self.unit.state is not MemoryState.SHARDED_POST_FORWARD

    @property
    def is_sharded_post_forward(self) -> bool:
        return self.unit.state is MemoryState.SHARDED_POST_FORWARD

    @property
    def is_unsharded(self) -> bool:
        return not self.unit.is_sharded

    @property
    def reduce_grads(self) -> bool:
        """True if backwards reduce gradients; may be assigned, as by ``set_requires_gradient_sync``."""
        return self.unit.control.sync_gradients

    @reduce_grads.setter
    def reduce_grads(self, reduces: bool) -> None:
        self.unit.control.sync_gradients = bool(reduces)

    @property
    def all_reduce_grads(self) -> bool:
        """True if reductions sum over replicas too; may be assigned, as by ``set_requires_all_reduce``."""
        return self.unit.policy.all_reduce

    @all_reduce_grads.setter
    def all_reduce_grads(self, reduces: bool) -> None:
        self.unit.policy.all_reduce = bool(reduces)

    @property
    def reshard_after_backward(self) -> bool:
        """True if a backward frees the parameters; may be assigned, as by ``set_reshard_after_backward``."""
        return self.unit.control.reshard_after_backward is not False

    @reshard_after_backward.setter
    def reshard_after_backward(self, reshards: bool) -> None:
        self.unit.control.reshard_after_backward = bool(reshards)

    @property
    def unshard_in_backward(self) -> bool:
        """True if a backward unshards the parameters; may be assigned, as by ``set_unshard_in_backward``."""
        return self.unit.control.unshard_in_backward

    @unshard_in_backward.setter
    def unshard_in_backward(self, unshards: bool) -> None:
        self.unit.control.unshard_in_backward = bool(unshards)

    def lazy_init(self) -> None:
        """Make the tree's outermost unit the root; nothing after its first use."""
        step_of(self.unit.module, self.unit)

    def unshard(self, async_op: bool = False) -> None:
        """Begin to all-gather the parameters. Every rank of the shard group must call this."""
        self.unit.step.recover()
        self.unit.gather()

    def wait_for_unshard(self) -> None:
        """Wait for :meth:`unshard`, and point the modules at the unsharded parameters."""
        if not self.unit.is_sharded:
            self.unit.step.recover()
            self.unit.unshard()

    def reshard(self) -> None:
        """Free the unsharded parameters."""
        self.unit.reshard()

    def post_backward(self, *_: object) -> None:
        """Reshard the parameters after backwards without gradient synchronization, unless the caller keeps them.

        The gradients are reduced by the next backward with synchronization, or by
        ``_root_post_backward_final_callback``. Inside a step nothing is done.
        """
        if self.unit.phase is Phase.IDLE:
            self.unit.post_backward(keeps_graph=False)


class FSDPState(View):
    """Shows the unit of a module that ``fully_shard`` was called on as FSDP2's state; it is made of the two."""

    _viewed: tuple[nn.Module, Unit]
    _INSTEAD: ClassVar = {
        "_pre_forward": "call the module; fsdp_flat.unshard_for(module) unshards for a block of code",
        "_post_forward": "call the module; fsdp_flat.unshard_for(module) unshards for a block of code",
        "_root_pre_forward": "call the module; _lazy_init() of this object does the set-up of the first forward",
        "_pre_backward": "call unshard() of the module",
        "_states_to_forward_prefetch": "call set_modules_to_forward_prefetch of the module",
        "_states_to_backward_prefetch": "call set_modules_to_backward_prefetch of the module",
    }

    @property
    def module(self) -> nn.Module:
        return self._viewed[0]

    @property
    def unit(self) -> Unit:
        return self._viewed[1]

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return self.unit.members

    def _lazy_init(self) -> None:
        """Make the tree's outermost unit the root; nothing after its first use."""
        step_of(self.module, self.unit)

    @property
    def _is_root(self) -> bool | None:
        root = core.outermost_of(self.unit)
        return None if root is None else root is self.unit

    @property
    def _training_state(self) -> Any:
        """FSDP2's state. Assigning IDLE resets a unit that a failed step has left in another one."""
        return training_state(self.unit.phase)

    @_training_state.setter
    def _training_state(self, state: Any) -> None:
        _set_idle(self.unit, state)

    @property
    def _mp_policy(self) -> Any:
        return self.unit.options.precision

    @property
    def _device(self) -> torch.device:
        return self.unit.options.device

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self.unit.control.reshard_after_forward is None

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        return [FSDPParamGroup(self.unit, options) for options, param_groups in self.unit.by_mesh() if param_groups]

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _state_ctx(self) -> SimpleNamespace:
        """Return FSDP2's state context, with a state for each module or list of modules, the outermost first."""
        units = step_of(self.module, self.unit).units
        return SimpleNamespace(all_states=[FSDPState(unit.module, unit) for unit in units])

    @property
    def _comm_ctx(self) -> object:
        """Return the object that units with shared streams and memory have in common, which pipelines compare."""
        return self.unit.step.streams

    def _reset_iter_state(self) -> None:
        """Reset the tree after an exception in a step, as ``reset_iter_state`` of the outermost module."""
        step_of(self.module, self.unit).abort()

    def _root_post_backward_final_callback(self) -> None:
        """Reduce and set the gradients that backwards have left. Every rank must call this."""
        step_of(self.module, self.unit).complete_accumulation()


def _set_idle(unit: Unit, state: Any) -> None:
    """Reset a unit that a step which raised has left in a state; the caller assigns IDLE."""
    if getattr(state, "name", None) != "IDLE":
        raise UsageError(
            f"The training state of unit {unit.name!r} was set to {state!r}. The library sets it itself; IDLE, which "
            "resets the unit after a step that raised, is the only state that may be assigned."
        )
    unit.check_idle("assigning the training state")


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of a module that ``fully_shard`` was called on; None for any other module."""
    unit = unit_of(module)
    return None if unit is None or unit.options.front.has_wrapper else FSDPState(module, unit)
