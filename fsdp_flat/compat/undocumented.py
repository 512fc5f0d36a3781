"""Provides the undocumented and the older members of FSDP1's wrapper, as the base class of ours.

``torch.testing._internal.common_fsdp``, MMEngine and vendored copies of FSDP1's own code use them. Members hold no
state: they read the unit or call the functions of the packages below.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import flat
from fsdp_flat.compat.semi_private import (
    HYBRID_SHARDING_STRATEGIES,
    TRAINING_STATES,
    FlatParamHandle,
    GroupMember,
    TrainingState,
    derived,
)
from fsdp_flat.errors import OptionError, PhaseError, UsageError
from fsdp_flat.extras.clipping import local_norm
from fsdp_flat.layout import FSDP_WRAPPED_MODULE, clean_fqn, flat_param_name
from fsdp_flat.runtime import Schedule, ShardedModule, Unit, UnshardHandle, reset_schedule, units_of
from fsdp_flat.state import CODECS, OptimInput, load_full_or_sharded, save_full_or_sharded
from fsdp_flat.user_warnings import warn_user

_state_dict_type_to_config: Mapping[Any, type] = MappingProxyType(
    {kind: codec.model_config for kind, codec in CODECS.items()}
)
_optim_state_dict_type_to_config: Mapping[Any, type] = MappingProxyType(
    {kind: codec.optim_config for kind, codec in CODECS.items()}
)
_ARGUMENT = "The constructor's argument."
_ARGUMENT_OR_DEFAULTS = "The constructor's argument; without one, the defaults."


class _UnknownWrapper(dict[str, str]):
    """Replaces a wrapper's mapping of renamed children, to detect callers that do not support wrappers."""

    def get(self, name: str, default: Any = None) -> Any:
        """Raise for the wrapped module; return ``default`` for other names.

        Raises:
            UsageError: always, for that name.
        """
        if name == FSDP_WRAPPED_MODULE:
            raise UsageError(
                "torch.distributed.checkpoint.state_dict does not know fsdp_flat's wrapper here, so it would take this "
                "rank's local shards for full tensors. Call fsdp_flat.install() first (or use fsdp_flat.installed()), "
                "or call the wrapper's own methods: model.state_dict(), FSDP.optim_state_dict(model, optim) and their "
                "counterparts for loading, or fsdp_flat.save_checkpoint."
            )
        return super().get(name, default)


class UndocumentedMembers(GroupMember, ShardedModule):
    """Provides members of FSDP1's wrapper that are not documented, or older forms of others; ours inherits them."""

    _unit: Unit

    sharding_strategy = derived("_unit.options.strategy.member", "The strategy in force.")
    compute_device = derived("_unit.options.device", "The device on which forward and backward run.")
    mixed_precision = derived("_unit.options.mixed_precision", _ARGUMENT_OR_DEFAULTS)
    cpu_offload = derived("_unit.options.cpu_offload", _ARGUMENT_OR_DEFAULTS)
    limit_all_gathers = derived("_unit.options.limit_all_gathers", _ARGUMENT)
    backward_prefetch = derived("_unit.options.backward_prefetch", _ARGUMENT)
    forward_prefetch = derived("_unit.options.forward_prefetch", _ARGUMENT)
    _use_orig_params = derived("_unit.options.use_orig_params")
    _use_full_prec_in_eval = derived("_unit.options.precision.full_in_eval")
    _device_mesh = derived("_unit.options.groups.mesh")
    _sync_gradients = derived("_unit.control.sync_gradients")
    _comm_hook = derived("_unit.policy.hook")
    _comm_hook_state = derived("_unit.policy.hook_state")
    _state_dict_type = derived("_unit.state_dict_settings.state_dict_type")
    _state_dict_config = derived("_unit.state_dict_settings.state_dict_config")
    _optim_state_dict_config = derived("_unit.state_dict_settings.optim_state_dict_config")

    @property
    def training_state(self) -> TrainingState:
        """The state of the unit."""
        return TRAINING_STATES[self._unit.phase][0]

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.handles)

    @property
    def _ignored_modules(self) -> set[nn.Module]:
        return set(self._unit.ignored.modules)

    @property
    def _ignored_params(self) -> set[nn.Parameter]:
        return set(self._unit.ignored.params)

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup | None:
        if self.sharding_strategy not in HYBRID_SHARDING_STRATEGIES:
            raise AttributeError("_inter_node_pg is there with hybrid strategies only.")
        return self._unit.options.groups.replicate.group

    # -- handles -------------------------------------------------------------------------------------------------

    def _named_handles(self) -> list[FlatParamHandle]:
        known = self.__dict__.setdefault("_handle_names", {})
        for handle in self._unit.handles:
            if handle not in known:
                known[handle] = FlatParamHandle(self._unit, handle)
        return [known[handle] for handle in self._unit.handles]

    @property
    def _handle(self) -> FlatParamHandle | None:
        handles = self._named_handles()
        return handles[0] if handles else None

    @property
    def _flat_param(self) -> flat.FlatParameter | None:
        handle = self._handle
        return None if handle is None else handle.flat_param  # type: ignore[return-value]

    @property
    def params(self) -> list[nn.Parameter]:
        """The unit's flat parameters."""
        return [handle.flat_param for handle in self._named_handles()]

    @property
    def _fully_sharded_module_to_handle(self) -> dict[nn.Module, FlatParamHandle]:
        handle = self._handle
        return {} if handle is None else {self._unit.module: handle}

    # -- the tree ------------------------------------------------------------------------------------------------

    def _of_root(self, name: str) -> list[UndocumentedMembers]:
        if not self._is_root:
            raise AttributeError(f"{name} is there on the outermost wrapper only, after its first use.")
        return [child for child in self.modules() if isinstance(child, UndocumentedMembers)]

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        return [handle for wrapper in self._of_root("_all_handles") for handle in wrapper._named_handles()]

    @property
    def _all_fsdp_states(self) -> list[UndocumentedMembers]:
        return self._of_root("_all_fsdp_states")

    @property
    def _is_root(self) -> bool | None:
        """True for a root; None before the first use. Assigning False or None drops a root's schedule."""
        context = self._unit.context
        return context.root is self._unit if isinstance(context, Schedule) else None

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        if not value and self._is_root:
            self._reset_lazy_init()

    def _reset_lazy_init(self) -> None:
        if isinstance(self._unit.context, Schedule):
            reset_schedule(self._unit.context.units)

    # -- methods -------------------------------------------------------------------------------------------------

    def _assert_state(self, state: Any) -> None:
        """Raise unless :attr:`training_state` is ``state``, or one of several; members of FSDP1's enum match by name.

        Raises:
            OptionError: (a ValueError) it is not.
        """
        states = state if isinstance(state, Sequence) else [state]
        if self.training_state.name not in [member.name for member in states]:
            raise OptionError(
                f"Unit {self._unit.name!r} was expected to be in {' or '.join(member.name for member in states)}; it "
                f"is in {self.training_state.name}."
            )

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the children that ``torch.distributed.checkpoint.state_dict`` renames: none.

        Its functions look up the wrapped module here only if they treat the wrapper as an ordinary module.
        """
        return _UnknownWrapper()

    def _low_precision_hook_enabled(self) -> bool:
        """Return whether one of torch's hooks that reduce in a lower precision is registered."""
        return self._unit.policy.dtype is not None

    def _mixed_precision_enabled_for_buffers(self) -> bool:
        """Return whether buffers compute in another dtype."""
        return self.mixed_precision.buffer_dtype is not None

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Do as :meth:`unshard`, the name of this method in FSDP2."""
        return self.unshard(async_op)

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Order later all-gathers after the work issued so far, as after an optimizer's step."""
        self._unit.context.streams.shards_written()

    @contextmanager
    def _deregister_orig_params_ctx(self) -> Generator[None, None, None]:
        """Register flat parameters on the modules inside the block, as with ``use_orig_params=False``, here and below.

        Raises:
            PhaseError: (an AssertionError) a unit was made without original parameters, or in the middle of a step.
        """
        units = units_of(self)
        for unit in units:
            unit.check_idle("_deregister_orig_params_ctx")
            if not unit.options.use_orig_params:
                raise PhaseError(f"Unit {unit.name!r} was made with use_orig_params=False: it shows flat parameters.")
        for unit in units:
            unit.reshard()
            unit.adopt_changes()
            for position, handle in enumerate(unit.handles):
                handle.views.remove()
                for site in [site for entry in handle.views.params for site in entry.sites]:
                    site.module._parameters[site.name] = None
                unit.module._parameters[flat_param_name(position)] = handle.flat_param
        try:
            yield
        finally:
            for unit in units:
                for position, handle in enumerate(unit.handles):
                    unit.module._parameters.pop(flat_param_name(position), None)
                    handle.views.use_sharded_views()
                    # The caller may have set ``.data`` of the flat parameter, or changed it in place past its version
                    # counter.
                    handle.views.bump_version()
                    handle.adopt_changes()

    # -- older forms of the methods for optimizer state -----------------------------------------------------------

    _optim_state_dict_impl = staticmethod(save_full_or_sharded)
    _optim_state_dict_to_load_impl = staticmethod(load_full_or_sharded)

    @staticmethod
    def _is_using_optim_input(optim_input: OptimInput, optim: torch.optim.Optimizer | None) -> bool:
        """Return whether ``optim_input``, or in its absence ``model.parameters()``, gives the order of parameters."""
        return optim_input is not None or optim is None

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return the state as full tensors on the CPU; older form of ``optim_state_dict``. Every rank must call this.

        Result, errors and other arguments are those of ``optim_state_dict``.

        Args:
            optim_input: accepted as in FSDP1; ``optim`` gives the order of parameters.
            rank0_only: ranks other than 0 (of all ranks, also with hybrid strategies) send their shards and return an
                empty dict.
        """
        _warn_legacy("full_optim_state_dict", "optim_state_dict")
        return save_full_or_sharded(model, optim, None, optim_input, rank0_only)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return the state as dim-0 chunks; older form of ``optim_state_dict``. Every rank must call this.

        Arguments, result and errors are those of ``optim_state_dict``.
        """
        _warn_legacy("sharded_optim_state_dict", "optim_state_dict")
        return save_full_or_sharded(model, optim, None, rank0_only=False, full_state_dict=False, cpu_offload=False)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert full tensors that every rank has for loading; older form of ``optim_state_dict_to_load``.

        Result, errors and other arguments are those of ``optim_state_dict_to_load``.

        Args:
            full_optim_state_dict: full tensors under names.
            optim_input: input of the optimizer's constructor, if there is no ``optim``.
            optim: gives the order of parameters; without both it is ``model.parameters()``.
        """
        _warn_legacy("shard_full_optim_state_dict", "optim_state_dict_to_load")
        return load_full_or_sharded(full_optim_state_dict, model, optim_input, optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Convert dim-0 chunks for loading; older form of ``optim_state_dict_to_load``. Every rank must call this.

        Result, errors and other arguments are those of ``optim_state_dict_to_load``.

        Args:
            sharded_optim_state_dict: from :meth:`sharded_optim_state_dict` at the same number of ranks.
        """
        _warn_legacy("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return load_full_or_sharded(sharded_optim_state_dict, model, None, optim, full_state_dict=False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any | None = None,
    ) -> dict[str, Any]:
        """Convert full tensors that rank 0 alone has for loading; older form of ``optim_state_dict_to_load``.

        Every rank must call this. Other arguments are those of :meth:`shard_full_optim_state_dict`.

        Args:
            full_optim_state_dict: full tensors under names on rank 0; ignored on other ranks.
        """
        _warn_legacy("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        return load_full_or_sharded(full_optim_state_dict, model, optim_input, optim, rank0_only=True)


def _warn_legacy(name: str, instead: str) -> None:
    warn_user(f"{name} is an older form of {instead}; use that.", FutureWarning, stacklevel=3)


def _get_grad_norm(
    params: Iterable[nn.Parameter], norm_type: float, zero: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Return the fp32 norm of this rank's gradients of some parameters, as one vector, on ``device``; else ``zero``."""
    grads = [param.grad for param in params if param.grad is not None]
    return local_norm(grads, norm_type, device, torch.float32) if grads else zero


def _get_param_to_fqn(model: nn.Module) -> dict[nn.Parameter, str]:
    """Map each parameter of a model without flat parameters to its first name, without wrapper components.

    Raises:
        OptionError: (a ValueError) a flat parameter, which stands for several.
    """
    found: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters():
        if getattr(param, "_is_flat_param", False):
            raise OptionError(f"{name!r} is a flat parameter, which has the names of several; its _fqns lists them.")
        found.setdefault(param, clean_fqn(name))
    return found


def _get_fqn_to_param(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the inverse of :func:`_get_param_to_fqn`."""
    return {name: param for param, name in _get_param_to_fqn(model).items()}
