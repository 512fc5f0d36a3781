"""Provides undocumented FSDP1 methods and functions that torch's own helpers and clients call.

``torch.testing._internal.common_fsdp``, MMEngine and vendored copies of FSDP1's own code use them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import OptionError, PhaseError, UsageError
from fsdp_flat.extras.clipping import local_norm
from fsdp_flat.layout import FLAT_PARAM, FSDP_WRAPPED_MODULE, clean_fqn
from fsdp_flat.runtime import Unit, check_idle, units_of
from fsdp_flat.semi_private import SemiPrivateNames
from fsdp_flat.state import CODECS

__all__ = [
    "SemiPrivateMethods",
    "UnshardHandle",
    "_get_fqn_to_param",
    "_get_grad_norm",
    "_get_param_to_fqn",
    "_optim_state_dict_type_to_config",
    "_state_dict_type_to_config",
]

_state_dict_type_to_config: Mapping[Any, type] = MappingProxyType(
    {kind: form.model_config for kind, form in CODECS.items()}
)
_optim_state_dict_type_to_config: Mapping[Any, type] = MappingProxyType(
    {kind: form.optim_config for kind, form in CODECS.items()}
)


class UnshardHandle:
    """Waits for an all-gather that ``wrapper._unshard(async_op=True)`` has begun.

    Args:
        unit: the unit that is being unsharded.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are unsharded; a second call does nothing."""
        if not self._unit.is_sharded:
            self._unit.finish_unshard()


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
                "rank's slices for whole tensors. Call fsdp_flat.install() first (or use fsdp_flat.installed()), or "
                "call the wrapper's own methods: model.state_dict(), FSDP.optim_state_dict(model, optim) and their "
                "counterparts for loading, or fsdp_flat.save_checkpoint."
            )
        return super().get(name, default)


class SemiPrivateMethods(SemiPrivateNames):
    """Provides the wrapper's undocumented FSDP1 methods; the wrapper class inherits them."""

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
        """All-gather the unit's parameters before its forward, which then uses them. Every rank must call this.

        Args:
            async_op: return at once, with a handle to wait for the all-gather.
        """
        unit = self._unit
        unit.context.streams.shards_written()
        unit.begin_unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    @contextmanager
    def _deregister_orig_params_ctx(self) -> Generator[None, None, None]:
        """Register flat parameters on the modules inside the block, as with ``use_orig_params=False``, here and below.

        Raises:
            PhaseError: (an AssertionError) a unit was made without original parameters, or in the middle of a step.
        """
        units = units_of(self)
        for unit in units:
            check_idle(unit, "_deregister_orig_params_ctx")
            if not unit.options.use_orig_params:
                raise PhaseError(f"Unit {unit.name!r} was made with use_orig_params=False: it shows flat parameters.")
        for unit in units:
            unit.reshard()
            for number, handle in enumerate(unit.handles):
                handle.adopt_changes()
                handle.views.remove()
                for site in [site for entry in handle.views.params for site in entry.sites]:
                    site.module._parameters[site.name] = None
                unit.module._parameters[_flat_name(number)] = handle.flat_param
        try:
            yield
        finally:
            for unit in units:
                for number, handle in enumerate(unit.handles):
                    unit.module._parameters.pop(_flat_name(number), None)
                    handle.views.use_sharded_views()
                    # The caller may have set ``.data`` of the flat parameter, or changed it in place past its version
                    # counter.
                    handle.views.bump_version()
                    handle.adopt_changes()


def _flat_name(number: int) -> str:
    return FLAT_PARAM if number == 0 else f"{FLAT_PARAM}_{number}"


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
