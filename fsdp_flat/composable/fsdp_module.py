"""Defines the class that ``fully_shard`` adds to a module's bases, and its state-dict hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fsdp_flat import core, runtime
from fsdp_flat.composable.fsdp_state import state_of
from fsdp_flat.core import DTensorPlan, MemoryEvent, MemoryState, ParamGroup, Phase, Unit
from fsdp_flat.core.quantized import quant_state_of
from fsdp_flat.runtime import ShardedModule, unit_record
from fsdp_flat.state import is_own_save, with_advice
from fsdp_flat.user_warnings import warn_user


class FSDPModule(ShardedModule):
    """Shards the parameters of a module that :func:`fully_shard` was called on; its class inherits from this one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a module of the original class, for containers that create others of their own class (slices)."""
        return cls.__bases__[1](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its parameters unsharded. Every rank of the mesh must call this."""
        return runtime.run_module(self, args, kwargs, super().__call__)

    _get_fsdp_state = state_of

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`, the name that replaced this one."""
        warn_user(
            "set_reduce_scatter_divide_factor is deprecated; call set_gradient_divide_factor.", DeprecationWarning
        )
        self.set_gradient_divide_factor(factor)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load as the module's own class; the error for other names says what to load instead, if that shows."""
        if not isinstance(state_dict, Mapping):
            return super().load_state_dict(state_dict, *args, **kwargs)
        with with_advice(self, state_dict):
            return super().load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert the shards instead of the visible parameters (``.to``, ``.float``, ``.cuda``, ``to_empty``)."""
        convert: Callable[[], object] = partial(super()._apply, fn, recurse)
        for unit in reversed(core.units_of(self, recurse=False)):
            convert = partial(runtime.convert_unit, unit, fn, convert)
        convert()
        return self


# Modules of one class get one class, as code that compares or pickles classes expects.
_classes: WeakKeyDictionary[type[nn.Module], type[nn.Module]] = WeakKeyDictionary()


def sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``kind`` and :class:`FSDPModule` for sharded modules of class ``kind``."""
    if kind not in _classes:
        _classes[kind] = cast("type[nn.Module]", type(f"FSDP{kind.__name__}", (FSDPModule, kind), {}))
    return _classes[kind]


_PreHook: TypeAlias = Callable[[nn.Module, str, bool], None]


def hook_state_dicts(unit: Unit) -> None:
    """Have the state dicts of a unit's modules show sharded parameters."""
    undo = unit_record(unit).undo
    for param_group in unit.param_groups:
        indices: dict[nn.Module, dict[str, int]] = {}
        for index, entry in enumerate(param_group.params):
            for site in entry.sites:
                indices.setdefault(site.module, {})[site.name] = index
        for module, by_name in indices.items():
            if any(quant_state_of(param_group.params[index].param) is not None for index in by_name.values()):
                undo.append(module.register_state_dict_post_hook(_leave_out_constants))
            show_shards = _shows_shards(unit, param_group, module)
            undo.append(module.register_state_dict_pre_hook(show_shards))
            undo.append(
                module.register_load_state_dict_pre_hook(
                    partial(_prepare_load, show_shards, _dtensors_of(param_group), by_name)
                )
            )


def _leave_out_constants(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Take the constants of quantized parameters out of a state dict of torch's, in which FSDP2 has none.

    torch's set_model_state_dict fails on names that are of no parameter and no buffer, if it broadcasts and offloads.
    """
    quantized = [name for name, param in module._parameters.items() if quant_state_of(param) is not None]  # type: ignore[arg-type]
    below = tuple(f"{prefix}{name}." for name in quantized)
    for name in [] if is_own_save() else [name for name in state_dict if name.startswith(below)]:
        del state_dict[name]


def _dtensors_of(param_group: ParamGroup) -> DTensorPlan:
    assert param_group.dtensors is not None
    return param_group.dtensors


def _shows_shards(unit: Unit, param_group: ParamGroup, module: nn.Module) -> _PreHook:
    """Create the hook that reshards a unit before a module's state dict is taken, and adopts assigned parameters."""
    held, parameters = _dtensors_of(param_group).held_by(module), module._parameters
    idle, sharded = Phase.IDLE, MemoryState.SHARDED

    def show_shards(_module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        # It runs for every module of a state dict: nothing here is slower than torch's hook, which does not look.
        if unit.phase is idle and unit.state is sharded and unit.step.end.unread is None:
            for name, param, local in held:
                if parameters.get(name) is not param or param._local_tensor is not local:  # type: ignore[attr-defined]
                    break
            else:
                return
        unit.check_idle("state_dict or load_state_dict")
        if unit.state is MemoryState.RETAINED_POST_BACKWARD:
            unit.reshard()
        # What a forward has left for its backward stays: one rank alone may take a state dict in between.
        unit.retain(MemoryEvent.RETAIN_POST_FORWARD)
        param_group.adopt_changes()

    return show_shards


def _prepare_load(
    show_shards: _PreHook,
    dtensors: DTensorPlan,
    indices: dict[str, int],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    """Reshard a unit before a state dict is loaded, and replace full tensors by DTensors of this rank's parts."""
    show_shards(module, prefix, False)
    dtensors.takes_assigned = True
    for name, index in indices.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and dtensors.can_distribute(index, value):
            state_dict[prefix + name] = dtensors.distribute(index, dtensors.in_class(index, value))
