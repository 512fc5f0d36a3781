"""Defines the wrapper class. Each method calls a function of a package below, which does the work."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_flat.guards  # noqa: F401 (turns the guards on)
from fsdp_flat import api, core, runtime, state
from fsdp_flat.api import *  # noqa: F403
from fsdp_flat.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_flat.compat import semi_private
from fsdp_flat.compat.semi_private import *  # noqa: F403
from fsdp_flat.compat.semi_private import add_undocumented_members, describe_flat_params, forget_tensors
from fsdp_flat.compat.torch_names import ABSENT_ATTRIBUTES, INSTEAD_OF_ASSIGNING, no_attribute, not_assignable
from fsdp_flat.composable.fully_sharding import shard_for_wrapper
from fsdp_flat.core import LOW_PRECISION_HOOKS, FlatParameter, Phase, Step, Unit, modules_of
from fsdp_flat.errors import OptionError, OptionTypeError, UsageError, counted
from fsdp_flat.guards.torch_functions import replace_at_first_unit
from fsdp_flat.layout import CHECKPOINT_WRAPPED_MODULE, FLAT_PARAM, FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_fqn
from fsdp_flat.runtime import Arguments, ShardedModule, check_gradients_set, clip_grads, unit_record
from fsdp_flat.user_warnings import entered, warn_user
from fsdp_flat.wrap import CustomPolicy, ModuleWrapPolicy

# Besides the class, the names that FSDP1 users import from the module of this name.
__all__ = [
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "LOW_PRECISION_HOOKS",
    "CustomPolicy",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
]
__all__ += api.__all__
__all__ += semi_private.__all__


class FullyShardedDataParallel(ShardedModule):
    """Shards a module's parameters, gradients and optimizer state over ranks.

    The parameters of ``module`` that no nested wrapper manages are flattened and sharded over the ranks of the
    process group. Forward and backward all-gather them and free them again; backward leaves each rank with its shard
    of the mean gradient. Build the optimizer after wrapping.

    Every rank of the group must construct the same wrappers in the same order, and run them in the same order.

    Args:
        module: the module to wrap, on any device, the meta device included.
        process_group: the group to shard over (default: the default group), or ``(shard_group, replicate_group)`` for
            hybrid strategies.
        sharding_strategy: see :class:`ShardingStrategy`; ``FULL_SHARD`` by default. ``"FULL_SHARD:40GB"`` has a memory
            budget.
        cpu_offload: whether shards live on the CPU.
        auto_wrap_policy: selects the submodules that become separate units; see :mod:`fsdp_flat.wrap`.
        backward_prefetch: when backward begins the next all-gather: before or after the current unit's gradients are
            computed, or never (None).
        mixed_precision: dtypes of compute and reduction.
        ignored_modules: modules whose parameters and buffers are not managed. Their gradients are not reduced.
        param_init_fn: initialises modules that are on the meta device; by default ``reset_parameters``.
        device_id: the compute device: an index or a device, to which CPU parameters move. By default a unit computes
            where its parameters are. If the process group moves no CPU tensors, as NCCL's, CPU parameters move to the
            current accelerator. Parameters on the meta device, and offloaded ones, follow the group.
        sync_module_states: True broadcasts parameters and buffers from rank 0; ``"auto"`` does so only if ranks differ,
            ``"raise"`` raises then, and False warns.
        forward_prefetch: begin the next unit's all-gather before the current unit runs (on the CPU always).
        limit_all_gathers: accepted; the number of unsharded units is bounded in any case.
        use_orig_params: keep the original parameters visible, as this rank's 1-D slices.
        ignored_states: parameters, or modules, that are not managed.
        device_mesh: a 1-D mesh to shard over, or a 2-D one (dim 0 replicates, dim 1 shards) for hybrid strategies.

    Raises:
        OptionError: (a ValueError) arguments or a model that cannot be used.
        OptionTypeError: (a TypeError) an argument of the wrong type.
        UsageError: (a RuntimeError) no process group, or tensors on several devices.
    """

    _unit: Unit
    # The load in which the wrapper takes part.
    _load: state.ModelLoad | None = None

    @runtime.with_known_arguments
    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        sharding_strategy: ShardingStrategy | str | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., bool] | ModuleWrapPolicy | CustomPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool | Literal["auto", "raise"] = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        arguments = Arguments(
            process_group=process_group,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            auto_wrap_policy=auto_wrap_policy,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            ignored_modules=ignored_modules,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=ignored_states,
            device_mesh=device_mesh,
        )
        self._hold(runtime.construct(module, arguments, FullyShardedDataParallel._around, shard_for_wrapper))

    @staticmethod
    def _around(unit: Unit) -> FullyShardedDataParallel:
        # As in FSDP1, children of a subclass are of the base class.
        wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
        nn.Module.__init__(wrapper)
        wrapper._hold(unit)
        return wrapper

    def _hold(self, unit: Unit) -> None:
        self.__dict__["_unit"] = unit
        replace_at_first_unit()
        describe_flat_params(unit)
        setattr(self, FSDP_WRAPPED_MODULE, unit.module)
        self.register_load_state_dict_post_hook(state.end_load)
        unit_record(unit).undo.append(self.module.register_state_dict_post_hook(_warn_of_parts))

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without an activation-checkpoint wrapper around it."""
        inner = self._wrapped_module._modules.get(CHECKPOINT_WRAPPED_MODULE)
        return self._wrapped_module if inner is None else inner

    @property
    def _wrapped_module(self) -> nn.Module:
        return cast(nn.Module, self._modules[FSDP_WRAPPED_MODULE])

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as any module does; a compiled wrapped module keeps plain names in state dicts."""
        if name in INSTEAD_OF_ASSIGNING:
            raise not_assignable(self, name)
        super().__setattr__(name, value)
        if name == FSDP_WRAPPED_MODULE and isinstance(value, nn.Module):
            runtime.hide_compiled_name(value)
        elif name == "_is_fsdp_managed_module":
            # torch's fully_shard sets it on each module whose parameters it has replaced: raise if it has.
            self._unit.adopt_assigned()

    def __getattr__(self, name: str) -> Any:
        """Forward unknown attributes to the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_unit":
                raise UsageError(core.NOT_IN_USE) from None
            if name == FSDP_WRAPPED_MODULE or FSDP_WRAPPED_MODULE not in self.__dict__.get("_modules", {}):
                raise
            wrapped = self._modules[FSDP_WRAPPED_MODULE]
            if name in ABSENT_ATTRIBUTES and not hasattr(wrapped, name):
                raise no_attribute(self, name) from None
            return getattr(wrapped, name)

    def __getitem__(self, key: Any) -> Any:
        """Forward indexing to the wrapped module, which may be an ``nn.Sequential``."""
        return self.module.__getitem__(key)  # type: ignore[operator]

    # -- running -------------------------------------------------------------------------------------------------

    forward = core.forward

    def _fsdp_step(self) -> Step:
        return core.step_of(self, self._unit)

    def check_is_root(self) -> bool:
        """Return whether this is the outermost wrapper; set up the state that the tree shares if that is missing."""
        return self._fsdp_step().root is self._unit

    def _require_root(self, what: str) -> Step:
        step = self._fsdp_step()
        runtime.require_root(self._unit, what)
        return step

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return every wrapper at or below ``module``, or only the outermost ones.

        Args:
            module: any module.
            root_only: leave nested wrappers out.

        Returns:
            The wrappers, in the order of ``module.modules()``.
        """
        wrappers = [child for child in modules_of(module) if isinstance(child, FullyShardedDataParallel)]
        # The outermost ones come first, and know those inside after their own call.
        return [wrapper for wrapper in wrappers if not root_only or wrapper.check_is_root()]

    @entered
    @contextmanager
    def no_sync(self, mode: Literal["local", "sharded"] = "local") -> Generator[None, None, None]:
        """Accumulate gradients over several backwards; only on the root. Backward must be inside too.

        With SHARD_GRAD_OP a backward inside keeps unsharded parameters for the next forward; see
        :meth:`set_reshard_after_backward`. ``fully_shard`` has ``set_requires_gradient_sync`` for it.

        Args:
            mode: ``"local"`` reduces nothing and keeps each rank's unreduced local gradient, which takes the memory of
                all trainable parameters. ``"sharded"`` reduces after each backward, as outside of ``no_sync``, and
                keeps a shard: more communication in place of that memory.

        Raises:
            OptionError: (a ValueError) another mode.
            UsageError: not the root.
            PhaseError: inside ``no_sync`` in its ``"local"`` mode.
        """
        with runtime.without_reduction(self._require_root("no_sync").units, mode):
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``.

        ``torch.nn.utils.clip_grad_norm_`` does the same for some parameters. Every rank must call this.

        Args:
            max_norm: bound of the norm.
            norm_type: order of the norm; ``float("inf")`` for the largest element.

        Returns:
            The norm before scaling, a scalar in the gradients' dtype, the same on every rank.

        Raises:
            OptionTypeError: an argument is no number.
            UsageError: not the root, or a backward has left its gradients to a later one.
        """
        step = self._require_root("clip_grad_norm_")
        step.read_exchange()
        check_gradients_set(step, "clip_grad_norm_")
        return clip_grads(step.units, core.unmanaged_params(self, step.units).values(), max_norm, norm_type)

    def average_ignored_gradients(self, average: bool = True) -> None:
        """Average gradients of trainable parameters that no unit manages over ranks from now on, or leave them.

        These are ignored parameters, and those of modules added after wrapping. They are averaged at the end of each
        backward that reduces the units' gradients; one that only some ranks have becomes the mean with zeros, a sparse
        one becomes dense. Every rank must call this, before a step. See ``docs/communication.md``.

        Args:
            average: False leaves each rank its own, without the warning that there is until either is chosen.

        Raises:
            UsageError: not the root.
        """
        for unit in self._require_root("average_ignored_gradients").units:
            unit.averages_ignored = average

    def average_buffers(self) -> None:
        """Replace the buffers that a state dict holds by their means over ranks, integers by the largest.

        Statistics of batches (``nn.BatchNorm``) are each rank's own otherwise, and a state dict has rank 0's. Boolean
        buffers stay as they are. Every rank must call this, between steps.

        Raises:
            UsageError: not the root.
            RankMismatchError: (a ValueError) ranks have different buffers.
        """
        runtime.average_buffers(self, self._require_root("average_buffers").root.options.groups)

    register_comm_hook = runtime.register_comm_hook
    set_gradient_divide_factor = runtime.set_divide_factor_of_tree

    summon_full_params = staticmethod(runtime.summon_full_params)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to every submodule, with full parameters; changes are kept.

        Every rank must call this.

        Args:
            fn: takes a module and may write to its parameters in place, as an initialisation does.

        Returns:
            This wrapper.

        Raises:
            OptionError: inside ``summon_full_params``, forward or backward.
        """
        self._unit.step.recover()
        if self._unit.phase is not Phase.IDLE:
            raise OptionError(f"apply was called while unit {self._unit.name!r} is {self._unit.phase.value}.")
        with runtime.summon_full_params(self, recurse=False, writeback=True):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield as :meth:`nn.Module.named_parameters`; names have no wrapper components inside ``summon_full_params``.

        Outside of forward and backward these are the parameters that an optimizer must hold, also while a unit is
        still unsharded after a forward that no backward followed.
        """
        kept = {shown: param for unit in core.units_of(self) for shown, param in unit.optimizer_params().items()}
        for name, param in super().named_parameters(*args, **kwargs):
            yield name, kept.get(param, param)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield as :meth:`nn.Module.named_modules`; names have no wrapper components inside ``summon_full_params``.

        Then a wrapper and its module have the same name, also if the call is on a plain module around them.
        """
        found = super().named_modules(memo, prefix, remove_duplicate)
        if self._unit.phase is not Phase.SUMMONED:
            return found
        return ((clean_fqn(name), module) for name, module in found)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield as :meth:`nn.Module.named_buffers`; names have no wrapper components inside ``summon_full_params``."""
        return super().named_buffers(*args, **kwargs)  # defined for FSDP1's signature

    # -- state dicts ---------------------------------------------------------------------------------------------

    set_state_dict_type = staticmethod(state.set_state_dict_type)
    get_state_dict_type = staticmethod(state.get_state_dict_type)
    state_dict_type = staticmethod(state.state_dict_type)
    optim_state_dict = staticmethod(state.optim_state_dict)
    optim_state_dict_to_load = staticmethod(state.optim_state_dict_to_load)
    rekey_optim_state_dict = staticmethod(state.rekey_optim_state_dict)

    # Older forms of the two methods above.
    full_optim_state_dict = staticmethod(state.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(state.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(state.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(state.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(state.scatter_full_optim_state_dict)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state dict in the type that is set, under the names of the unwrapped model.

        Every rank must call this, except if nothing is all-gathered: with the LOCAL type, NO_SHARD, or inside
        ``summon_full_params``.

        Arguments are those of :meth:`nn.Module.state_dict`.

        Returns:
            Names and tensors; with ``rank0_only`` of the FULL type, other ranks get unmanaged tensors only.

        Raises:
            PhaseError: (an AssertionError) called inside a step or with parameters summoned for another type.
            UsageError: (a RuntimeError) other ranks of the group did not call it.
        """
        return state.save_model(self, self._wrapped_module, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as :meth:`nn.Module.load_state_dict`, under the names of the unwrapped model.

        Everything is checked before anything is written: after an error the model is as it was before. Modules get the
        version that they were saved with, whether by a wrapped model or a plain one.

        FULL and LOCAL state dicts need no communication, nor do SHARDED ones whose values are all full tensors: a rank
        may load those by itself, and a value that does not fit is its own error. With chunks every rank must call this;
        a SHARDED load without any value (``strict=False``) waits for the other ranks too, which may have chunks.

        Args:
            state_dict: in the type that is set; SHARDED accepts full tensors as well.
            strict: missing or unexpected names are an error.
            assign: as in torch, for tensors that are not sharded.

        Returns:
            The missing and the unexpected names, as torch's.

        Raises:
            RuntimeError: names or shapes that do not fit, on this rank, or with chunks on any rank.
        """
        if not isinstance(state_dict, Mapping):
            raise OptionTypeError(f"state_dict must be a mapping of names to tensors; got {type(state_dict).__name__}.")
        loads = state.all_or_nothing(self, state_dict, strict=strict, assign=assign)
        with state.with_advice(self, state_dict), loads:
            return super().load_state_dict(state.with_wrapper_versions(self, state_dict), strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state.load_unit(self, state_dict, prefix, local_metadata, missing_keys, error_msgs)
        lists = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    # -- conversions -------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        """Convert the shards instead of the visible parameters (``.to``, ``.float``, ``.cuda``, ``share_memory``)."""
        apply_to_others = super()._apply
        if runtime.convert_unit(self._unit, fn, lambda: apply_to_others(fn, recurse)):
            forget_tensors(self._unit)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled (``torch.save(model)``, ``copy.copy``): this process holds one rank's shard only.

        Raises:
            OptionTypeError: (a TypeError) always.
        """
        raise OptionTypeError(
            "A wrapped model cannot be pickled, since each rank holds a part of it. Save model.state_dict(), or get "
            "the plain module back with fsdp_flat.unwrap(model)."
        )


# Units of which a warning has said that the state dict of their module has this rank's parts.
_TOLD_OF: WeakSet[Unit] = WeakSet()


def _warn_of_parts(module: nn.Module, *_: object) -> None:
    """Warn once of a state dict of the module inside a wrapper, unless it is part of the wrapper's or has no parts."""
    if state.is_own_save():
        return
    for unit in core.units_holding(module.parameters()):
        is_here = module is unit.module or module is unit.module._modules.get(CHECKPOINT_WRAPPED_MODULE)
        if is_here and unit.needs_all_gather and unit_record(unit).full is None and unit not in _TOLD_OF:
            _TOLD_OF.add(unit)
            num = sum(len(param_group.params) for param_group in unit.param_groups)
            warn_user(
                f"state_dict() of the {type(module).__name__} inside a wrapper (unit {unit.name!r}) has this rank's "
                f"part of {counted(num, 'parameters')}, and a file of it lacks the rest. Call model.state_dict() of "
                "the wrapper on every rank, and pass it on, as in save_pretrained(folder, state_dict=state) or "
                "accelerator.get_state_dict(model); or call fsdp_flat.save_full(model, path). Inside "
                "FullyShardedDataParallel.summon_full_params(model) the module has full parameters."
            )


add_undocumented_members(FullyShardedDataParallel)
