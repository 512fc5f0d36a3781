"""Shows a unit as FSDP2's state and parameter group, which programs read and end backwards through.

torch's pipelining, trainers that compute a loss in chunks, TransformerEngine and VeOmni are among them. The table of
their attributes is ``compat/inner_names.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_flat import core
from fsdp_flat.comm import Streams
from fsdp_flat.compat.torch_fsdp import mesh_info, sharded_state, training_state
from fsdp_flat.compat.views import View, assignable, derived
from fsdp_flat.composable.fsdp_param import FSDPParam, module_fqn, post_forward_mesh_info
from fsdp_flat.composable.offload_policies import CPUOffloadPolicy, OffloadPolicy
from fsdp_flat.core import MemoryState, PerParamSharding, Phase, SmallerGroup, Unit, UnitOptions, step_of, unit_of
from fsdp_flat.errors import OptionError, UsageError
from fsdp_flat.runtime import ForwardHooks


class _Replaced(dict[Any, Any]):
    """Holds the functions and handles that programs have put in the place of a unit's own, by what they replace."""


class _InBackward:
    """Is a method that a program may replace, whose function then runs in each backward of the unit.

    There the method itself, which that function calls, does what the unit does without a replacement.

    Args:
        method: the method, of the name of the unit's; elsewhere than in such a backward it runs.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method, self._name = method, method.__name__
        # FSDP2 says whether to prefetch.
        self._arguments = (True,) if self._name == "pre_backward" else ()
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    def __get__(self, group: FSDPParamGroup | None, owner: Any = None) -> Any:
        return self if group is None else group.unit.attached(_Replaced).get(self) or MethodType(self._run, group)

    def __set__(self, group: FSDPParamGroup, function: Callable[..., Any]) -> None:
        unit = group.unit
        if getattr(function, "__func__", None) == self._run:
            unit.attached(_Replaced).pop(self, None)
            unit.__dict__.pop(self._name, None)
            return
        unit.attached(_Replaced)[self] = function
        unit.__dict__[self._name] = functools.partial(self._replaced, unit)

    def _replaced(self, unit: Unit, *args: Any, **kwargs: Any) -> None:
        found = unit.attached(_Replaced)
        found[self, "own"] = functools.partial(getattr(type(unit), self._name), unit, *args, **kwargs)
        found[self](*self._arguments)
        found.pop((self, "own"), None)

    def _run(self, group: FSDPParamGroup, *args: Any) -> Any:
        own = group.unit.attached(_Replaced).pop((self, "own"), None)
        return self._method(group, *args) if own is None else own()


class AllGatherResult(View):
    """Stands for FSDP2's result of an all-gather that has begun; it is made of the unit."""


class FSDPCommContext(View):
    """Shows the streams of a tree as FSDP2's communication context, made of a reference to them and the device.

    All all-gathers run on one stream, and all reductions on another. On the CPU they run in the order of calls.
    """

    _viewed: tuple[ReferenceType[Streams], torch.device]

    @property
    def device_handle(self) -> Any:
        """The module of torch for the device's type."""
        return torch.get_device_module(self._viewed[1])

    def _stream_in(self, name: str) -> Any:
        streams = self._viewed[0]()
        context: AbstractContextManager[Any] = getattr(streams, name)
        with context:
            return self.device_handle.current_stream()

    @property
    def all_gather_stream(self) -> Any:
        return self._stream_in("ends_of_all_gathers")

    all_gather_copy_in_stream = all_gather_stream

    @property
    def reduce_scatter_stream(self) -> Any:
        return self._stream_in("reduce_scatters")

    all_reduce_stream = reduce_scatter_stream


# Programs compare contexts by identity.
_CONTEXTS: WeakKeyDictionary[Streams, FSDPCommContext] = WeakKeyDictionary()


def _comm_ctx(unit: Unit) -> FSDPCommContext:
    """Return the object that units with shared streams and memory have in common."""
    streams = unit.step.streams
    return _CONTEXTS.setdefault(streams, FSDPCommContext(ref(streams), unit.options.device))


class FSDPStateContext(View):
    """Shows the step of a tree as FSDP2's state context; before the first use of the tree, that of one unit."""

    _viewed: tuple[Unit]

    @property
    def all_states(self) -> list[FSDPState]:
        """A state for each module or list of modules, the outermost first; none before the first use of the tree."""
        step = self._viewed[0].step
        return [FSDPState(unit.module, unit) for unit in step.units] if step.is_built else []

    @property
    def iter_forward_root(self) -> FSDPState | None:
        """The state whose module's forward is under way and in no other's."""
        iteration = self._viewed[0].step.order.iteration
        return None if iteration is None else FSDPState(iteration.order[0].module, iteration.order[0])

    @property
    def post_backward_final_callback_queued(self) -> bool:
        """True while a backward runs."""
        return self._viewed[0].step.backward is not None

    @property
    def _root(self) -> Unit:
        unit = self._viewed[0]
        return core.outermost_of(unit) or unit

    # Whether a backward sets gradients at its end, as by ``set_is_last_backward``.
    is_last_backward = assignable("_root.control.is_last_backward", bool)


def _set_idle(view: Any, state: Any) -> None:
    """Reset a unit that a step which raised has left in a state; the caller assigns IDLE."""
    unit: Unit = view.unit
    if getattr(state, "name", None) != "IDLE":
        raise UsageError(
            f"The training state of unit {unit.name!r} was set to {state!r}. The library sets it itself; IDLE, which "
            "resets the unit after a step that raised, is the only state that may be assigned."
        )
    unit.check_idle("assigning the training state")


# FSDP2's state of a unit.
_TRAINING_STATE = property(lambda view: training_state(view.unit.phase), _set_idle)


class FSDPParamGroup(View):
    """Shows the parameters of a unit on one mesh as FSDP2's parameter group, made of the unit and its options."""

    _viewed: tuple[Unit, UnitOptions]

    @property
    def unit(self) -> Unit:
        return self._viewed[0]

    modules = derived("unit.members")
    device = derived("unit.options.device")
    # The dtypes of the unit; the attributes are those of ``MixedPrecisionPolicy``.
    mp_policy = derived("unit.options.precision")
    _training_state = _TRAINING_STATE
    # As by ``set_requires_gradient_sync``, ``set_requires_all_reduce``, and ``set_unshard_in_backward``.
    reduce_grads = assignable("unit.control.sync_gradients", bool)
    all_reduce_grads = assignable("unit.policy.all_reduce", bool)
    unshard_in_backward = assignable("unit.control.unshard_in_backward", bool)
    # Whether trainable parameters that no rank has used get gradients of zeros.
    reduce_scatter_unused_params = assignable("unit.policy.zeros_for_unused", bool)
    # The stream that is current in :attr:`_all_reduce_hook`.
    _all_reduce_hook_stream = assignable("unit.policy.all_reduce_hook_stream")
    force_sum_reduction_for_comms = assignable("unit.policy.sums_only", bool)
    # All-gathers are always asynchronous; assigning is accepted.
    unshard_async_op = property(lambda self: True, lambda self, value: None)

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
    def _rows(self) -> PerParamSharding:
        rows = self._viewed[1].per_param
        assert rows is not None
        return rows

    @property
    def mesh_info(self) -> Any:
        """FSDP2's description of the mesh."""
        return mesh_info(self._rows.mesh)

    @property
    def post_forward_mesh_info(self) -> Any:
        """FSDP2's description of the mesh whose ranks keep the parameters between forward and backward; or None.

        May be assigned, for all parameters of the unit: None keeps them on each rank, also after a forward without
        gradients; :attr:`mesh_info` frees them after forward; a description of fewer ranks keeps them there, and every
        rank must assign it. They are freed after a forward of the outermost module too then.
        """
        return post_forward_mesh_info(*self._viewed)

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        unit, options = self._viewed
        shard, size = options.groups.shard, getattr(info, "shard_mesh_size", None)
        if info is not None and (not isinstance(size, int) or size < 1 or shard.size % size):
            raise OptionError(
                f"post_forward_mesh_info of unit {unit.name!r} was set to {info!r}. Expected None, mesh_info of the "
                f"unit, or an FSDPMeshInfo over a number of ranks that divides the {shard.size} that shard."
            )
        module: Any = unit.module
        module.set_reshard_after_forward(info is not None, recurse=False)
        unit.control.reshards_evaluations = info is not None
        if size is not None and 1 < size < shard.size:
            smaller_group = SmallerGroup(shard, size)
            for param_group in unit.param_groups:
                if param_group.comm.options is options:
                    param_group.comm.use_smaller_group(smaller_group)

    @property
    def _use_post_forward_mesh(self) -> bool:
        return self.post_forward_mesh_info not in (None, self.mesh_info)

    @property
    def _is_hsdp(self) -> bool:
        return self._rows.mesh.ndim > 1

    @property
    def _all_gather_process_group(self) -> Any:
        """The process group of the next all-gather."""
        kept = self.post_forward_mesh_info if self.is_sharded_post_forward else None
        return (kept or self.mesh_info).shard_process_group

    @property
    def _reduce_scatter_process_group(self) -> Any:
        groups = [each.comm.choice.reduce_group for each in self.unit.param_groups]
        own = next(filter(None, groups), None)
        return self.mesh_info.shard_process_group if own is None else own.group

    @property
    def _all_reduce_process_group(self) -> Any:
        """The process group of the replicas, on a hybrid mesh."""
        return self.mesh_info.replicate_process_group

    @property
    def _group_options(self) -> list[UnitOptions]:
        return [options for options, param_groups in self.unit.by_mesh() if param_groups]

    @property
    def _num_param_groups(self) -> int:
        return len(self._group_options)

    @property
    def _param_group_index(self) -> int:
        return [options is self._viewed[1] for options in self._group_options].index(True)

    @property
    def device_handle(self) -> Any:
        """The module of torch for the device's type."""
        return torch.get_device_module(self.device)

    @property
    def comm_ctx(self) -> FSDPCommContext:
        return _comm_ctx(self.unit)

    @property
    def offload_policy(self) -> OffloadPolicy:
        return CPUOffloadPolicy() if self._rows.offloads else OffloadPolicy()

    @property
    def _module_fqn(self) -> str:
        return module_fqn(self.unit)

    @property
    def _orig_dtype(self) -> torch.dtype | None:
        return next((param.orig_dtype for param in self.fsdp_params if param.sharded_param.requires_grad), None)

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        policy = self.mp_policy
        return None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype

    @property
    def _reshard_after_forward(self) -> bool:
        wanted, root = self.unit.control.reshard_after_forward, core.outermost_of(self.unit)
        return root is not self.unit if wanted is None else wanted

    @property
    def _sharded_state(self) -> Any:
        """FSDP2's state of the memory. An all-gather in flight is SHARDED; see :attr:`is_unsharded`."""
        return sharded_state(self.unit.state)

    @property
    def is_sharded(self) -> bool:
        return self._sharded_state.name == "SHARDED"

    @property
    def is_sharded_post_forward(self) -> bool:
        return self._sharded_state.name == "SHARDED_POST_FORWARD"

    @property
    def is_unsharded(self) -> bool:
        """True if all parameters are in memory, for a step or because a backward has kept them for the next one.

        In the second case modules hold the sharded parameters.
        """
        return self._sharded_state.name == "UNSHARDED"

    @property
    def _all_gather_result(self) -> AllGatherResult | None:
        """An object while an all-gather is in flight; else None."""
        return AllGatherResult(self.unit) if self.unit.state is MemoryState.GATHERING else None

    @property
    def reshard_after_backward(self) -> bool:
        """True if a backward frees the parameters; may be assigned, as by ``set_reshard_after_backward``."""
        return self.unit.control.reshard_after_backward is not False

    @reshard_after_backward.setter
    def reshard_after_backward(self, reshards: bool) -> None:
        self.unit.control.reshard_after_backward = bool(reshards)

    @property
    def reduce_scatter_max_input_buffers(self) -> int:
        """Number of reductions that may be in flight; may be assigned, as by the module's method."""
        return self.unit.policy.max_in_flight or (2 if self.unit.step.streams.is_accelerator else 1)

    @reduce_scatter_max_input_buffers.setter
    def reduce_scatter_max_input_buffers(self, num: int) -> None:
        module: Any = self.unit.module
        module.set_reduce_scatter_max_input_buffers(num, recurse=False)

    @property
    def gradient_divide_factor(self) -> float | torch.Tensor | None:
        """Divides sums of gradients, None by the number of ranks; may be assigned."""
        return self.unit.policy.divide_factor

    @gradient_divide_factor.setter
    def gradient_divide_factor(self, factor: float | None) -> None:
        module: Any = self.unit.module
        module.set_gradient_divide_factor(factor)

    @property
    def _all_reduce_hook(self) -> Callable[[torch.Tensor], object] | None:
        """Called with each reduced gradient; may be assigned, as by ``set_all_reduce_hook``."""
        return self.unit.policy.all_reduce_hook

    @_all_reduce_hook.setter
    def _all_reduce_hook(self, hook: Callable[[torch.Tensor], object] | None) -> None:
        if hook is None:
            self.unit.policy.all_reduce_hook = None
        else:
            module: Any = self.unit.module
            module.set_all_reduce_hook(hook, stream=self._all_reduce_hook_stream)

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

    @_InBackward
    def pre_backward(self, *_: object) -> None:
        """Unshard the parameters; may be assigned, and then runs at the begin of the unit's backwards."""
        self.unshard()
        self.wait_for_unshard()

    @_InBackward
    def post_backward(self, *_: object) -> None:
        """Reshard the parameters after backwards without gradient synchronization, unless the caller keeps them.

        With synchronization switched on again, the gradients that these backwards have left, or that the program has
        set on unsharded parameters since, are reduced and set. Every rank of the mesh that has some must call this.
        Inside a step nothing is done.
        """
        unit, options = self._viewed
        step = step_of(unit.module, unit)
        step.recover()
        if unit.phase is not Phase.IDLE:
            return
        unit.post_backward(keeps_graph=False)
        if unit.control.sync_gradients and step.backward is None:
            param_groups = [param_group for param_group in unit.param_groups if param_group.comm.options is options]
            step.end.reduce_by_hand(unit, param_groups)


class _OwnHook(View):
    """Stands for the handle of one of torch's two forward hooks; it is made of the unit and torch's function."""

    _viewed: tuple[Unit, str]

    def remove(self) -> None:
        """Leave the unit's forwards to hooks that the caller registers, until it registers torch's own again."""
        unit = self._viewed[0]
        if len(unit.members) == 1 and unit.forward_hooks is None:
            unit.forward_hooks = ForwardHooks(unit)


def _prefetched(direction: str) -> Any:
    """Return a property for the states of the units to prefetch; assigning calls the module's method."""

    def assign(self: FSDPState, states: list[FSDPState]) -> None:
        set_modules = getattr(self.module, f"set_modules_to_{direction}_prefetch")
        set_modules([state.module for state in states])

    return property(lambda self: tuple(map(state_of, getattr(self.unit.control, f"{direction}_prefetch"))), assign)


def _hook_handle(name: str) -> Any:
    """Return a property for the handle of a hook of torch's; a program may assign that of its own."""
    return property(lambda self: self._handle(name), lambda self, handle: self._set_handle(name, handle))


class FSDPState(View):
    """Shows the unit of a module that ``fully_shard`` was called on as FSDP2's state; it is made of the two."""

    _viewed: tuple[nn.Module, Unit]
    _state_name = "FSDP"

    @property
    def module(self) -> nn.Module:
        return self._viewed[0]

    @property
    def unit(self) -> Unit:
        return self._viewed[1]

    _modules = derived("unit.members")
    _device = derived("unit.options.device")
    _mp_policy = derived("unit.options.precision")
    _training_state = _TRAINING_STATE

    def _lazy_init(self) -> None:
        """Make the tree's outermost unit the root; nothing after its first use."""
        step_of(self.module, self.unit)

    @property
    def _is_root(self) -> bool | None:
        root = core.outermost_of(self.unit)
        return None if root is None else root is self.unit

    @property
    def _device_handle(self) -> Any:
        """The module of torch for the device's type."""
        return torch.get_device_module(self._device)

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
    def _state_ctx(self) -> FSDPStateContext:
        return FSDPStateContext(self.unit)

    @property
    def _comm_ctx(self) -> FSDPCommContext:
        """The object that units with shared streams and memory have in common, which pipelines compare."""
        return _comm_ctx(self.unit)

    @staticmethod
    def _get_state_for_module(module: nn.Module) -> FSDPState | None:
        return state_of(module)

    @property
    def _modules_to_run_forward(self) -> set[nn.Module]:
        """Those of several modules of the unit that have yet to run in the forward that is under way."""
        unfinished = self.unit.step.order.unfinished_forwards.get(self.unit)
        return set() if unfinished is None else set(unfinished[1])

    # -- prefetch ----------------------------------------------------------------------------------------------------

    _states_to_forward_prefetch = _prefetched("forward")
    _states_to_backward_prefetch = _prefetched("backward")

    # -- a forward by hooks ------------------------------------------------------------------------------------------

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Make the tree's outermost unit the root, and return the inputs; the forward moves and casts them."""
        self._lazy_init()
        return args, kwargs

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin a forward of the unit, in a hook that a program registers in the place of torch's.

        Raises:
            UsageError: the handle of torch's hook was not removed: the module's own call begins the forward.
        """
        if self._takes_no_hooks:
            return args, kwargs
        return self._hooks("_pre_forward").enter(module, args, kwargs)

    def _post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        """End the forward that :meth:`_pre_forward` has begun, and return the outputs."""
        return output if self._takes_no_hooks else self._hooks("_post_forward").leave(output)

    @property
    def _takes_no_hooks(self) -> bool:
        """True for several modules of one unit, whose forward is that of all of them."""
        return len(self.unit.members) > 1

    def _hooks(self, name: str) -> ForwardHooks:
        hooks: ForwardHooks | None = self.unit.forward_hooks
        if hooks is None:
            raise UsageError(
                f"{name} of unit {self.unit.name!r} was called, but the module's own call unshards the unit. Call the "
                "module; fsdp_flat.unshard_for(module) unshards for a block of code. To run the forward by hooks, "
                "remove _pre_forward_hook_handle and _post_forward_hook_handle first."
            )
        return hooks

    # They have ``remove()``, for programs that register hooks around these two and assign their handles.
    _pre_forward_hook_handle = _hook_handle("_pre_forward")
    _post_forward_hook_handle = _hook_handle("_post_forward")

    def _handle(self, name: str) -> Any:
        return self.unit.attached(_Replaced).get(("handle", self.module, name)) or _OwnHook(self.unit, name)

    def _set_handle(self, name: str, handle: RemovableHandle) -> None:
        hook = (handle.hooks_dict_ref() or {}).get(handle.id)
        key = "handle", self.module, name
        if getattr(hook, "__self__", None) != self:
            self.unit.attached(_Replaced)[key] = handle
            return
        # A program that is done registers torch's own hooks again; the module's own call does this without hooks.
        handle.remove()
        self.unit.attached(_Replaced).pop(key, None)
        self.unit.forward_hooks = None

    def _reset_iter_state(self) -> None:
        """Reset the tree after an exception in a step, as ``reset_iter_state`` of the outermost module."""
        step_of(self.module, self.unit).abort()

    def _root_post_backward_final_callback(self) -> None:
        """Reduce and set the gradients that backwards have left. Every rank must call this."""
        step_of(self.module, self.unit).complete_accumulation()


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of a module that ``fully_shard`` was called on; None for any other module."""
    unit = unit_of(module)
    return None if unit is None or unit.options.api.has_wrapper else FSDPState(module, unit)
