"""Maps the parameters of an optimizer to names relative to a model, for managed and other parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import clean_fqn, join_fqn
from fsdp_flat.runtime import Unit, unit_of
from fsdp_flat.state.torch_types import shape_of

__all__ = [
    "Managed",
    "OptimContents",
    "ParamNames",
    "contents_of",
    "current_names",
    "is_on_other_ranks",
    "is_scalar",
    "names_of",
    "ordered_params",
]


@dataclass(frozen=True, slots=True)
class Managed:
    """Describes one visible parameter of a handle.

    Attributes:
        unit: its unit.
        handle: its handle.
        indices: indices of the parameters that it holds: one with original parameters, else all.
        fqns: names of these parameters relative to the model.
    """

    unit: Unit
    handle: FlatParamHandle
    indices: tuple[int, ...]
    fqns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParamNames:
    """Maps the parameters that an optimizer may hold to their names.

    Attributes:
        managed: by visible parameter, its description.
        others: by parameter that no unit manages, its name.
        handles: every handle with the names of all its parameters, in the model's order.
    """

    managed: dict[nn.Parameter, Managed]
    others: dict[nn.Parameter, str]
    handles: tuple[tuple[Unit, FlatParamHandle, tuple[str, ...]], ...]

    @property
    def units(self) -> list[Unit]:
        """Units that have handles, each once, in the model's order."""
        return list(dict.fromkeys(unit for unit, _, _ in self.handles))

    def fqns_of(self, param: nn.Parameter) -> tuple[str, ...]:
        """Return the names of the parameters that a parameter of an optimizer holds.

        Raises:
            OptionError: it is no parameter of this model.
        """
        if param in self.managed:
            return self.managed[param].fqns
        if param in self.others:
            return (self.others[param],)
        raise OptionError(
            f"The optimizer holds a parameter of shape {tuple(param.shape)} that is none of this model's. Pass "
            "the model that the optimizer was built from, and build optimizers after wrapping."
        )

    def ids(self, params: Sequence[nn.Parameter]) -> dict[str, int]:
        """Return for every name the position of its parameter in ``params``, as in an optimizer's state dict."""
        return {fqn: position for position, param in enumerate(params) for fqn in self.fqns_of(param)}


@dataclass(frozen=True, slots=True)
class OptimContents:
    """Holds the parameters, states and parameter groups of an optimizer.

    Attributes:
        params: its parameters, in the order in which its state dict numbers them.
        state: by parameter, its states.
        groups: its groups, with parameters; None for a state dict without ``param_groups``.
        owners: by parameter whose states one rank of the shard group has in full, that rank.
    """

    params: tuple[nn.Parameter, ...]
    state: Mapping[nn.Parameter, Mapping[str, Any]]
    groups: tuple[dict[str, Any], ...] | None
    owners: Mapping[nn.Parameter, int] = field(default_factory=dict)


def contents_of(
    optim: Any, state_dict: Mapping[str, Any] | None = None, model: nn.Module | None = None
) -> OptimContents:
    """Return the contents of an optimizer, or of any object with ``param_groups`` and ``state``.

    Args:
        optim: the optimizer.
        state_dict: replaces the optimizer's own state and settings; keyed by position, or by the names of
            ``model.named_parameters()``, as in torch's named optimizer.
        model: the model that these names belong to.

    Raises:
        OptionError: a key is neither a position nor such a name.
    """
    params = tuple(param for group in optim.param_groups for param in group["params"])
    owners = getattr(optim, "state_owners", {})
    if state_dict is None:
        return OptimContents(params, optim.state, tuple(optim.param_groups), owners)
    by_name = {} if model is None else {clean_fqn(name): param for param, name in current_names(model).items()}

    def of(key: Any) -> nn.Parameter:
        found = params[key] if isinstance(key, int) else by_name.get(clean_fqn(str(key)))
        if found is None:
            raise OptionError(f"An optimizer state dict has the key {key!r}, which is no parameter of this model.")
        return found

    state = {of(key): value for key, value in state_dict["state"].items()}
    given = state_dict.get("param_groups")
    groups = None if given is None else tuple({**g, "params": [of(key) for key in g["params"]]} for g in given)
    return OptimContents(params, state, groups, owners)


def current_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the first name of each of ``model``'s current parameters, wrapper prefixes included."""
    found: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters():
        found.setdefault(param, name)
    return found


def ordered_params(model: nn.Module, optim: Any, optim_input: Any) -> tuple[nn.Parameter, ...]:
    """Return the parameters of ``optim``; without it those of ``optim_input``, the arguments it was built from.

    Raises:
        OptionTypeError: ``optim_input`` is neither parameters nor groups.
        OptionError: ``optim_input`` is empty.
    """
    if optim is not None:
        return contents_of(optim).params
    if optim_input is None:
        return tuple(model.parameters())
    if isinstance(optim_input, (torch.Tensor, dict, str)):
        raise OptionTypeError(f"optim_input must be parameters or parameter groups; got {type(optim_input).__name__}.")
    entries = list(optim_input)
    if not entries:
        raise OptionError("optim_input is empty; pass what the optimizer was built from, or the optimizer.")
    if all(isinstance(entry, dict) for entry in entries):
        return tuple(param for group in entries for param in group["params"])
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return tuple(entries)
    raise OptionTypeError("optim_input must hold parameters only, or parameter groups only.")


def names_of(model: nn.Module) -> ParamNames:
    """Return the parameter names of ``model``, which is a wrapper, holds wrappers, or is a plain module."""
    managed: dict[nn.Parameter, Managed] = {}
    handles: list[tuple[Unit, FlatParamHandle, tuple[str, ...]]] = []
    for path, module in model.named_modules():
        unit = unit_of(module)
        if unit is None:
            continue
        prefix = clean_fqn(path)
        for handle in unit.handles:
            fqns = tuple(join_fqn(prefix, param_info.fqn) for param_info in handle.layout.param_infos)
            handles.append((unit, handle, fqns))
            visible = handle.views.visible_params()
            if len(visible) == 1 and visible[0] is handle.flat_param:
                managed[visible[0]] = Managed(unit, handle, tuple(range(len(fqns))), fqns)
            else:
                for index, param in enumerate(visible):
                    managed[param] = Managed(unit, handle, (index,), (fqns[index],))
    others: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters():
        if param not in managed:
            others.setdefault(param, clean_fqn(name))
    return ParamNames(managed, others, tuple(handles))


def is_on_other_ranks(param: nn.Parameter, handle: FlatParamHandle) -> bool:
    """Return whether other ranks hold all elements of a visible parameter: here it has no gradient and no state."""
    if param.numel() > 0:
        return False
    index = next(index for index, visible in enumerate(handle.views.visible_params()) if visible is param)
    return handle.layout.param_infos[index].numel > 0


def is_scalar(value: Any) -> bool:
    """Return whether a state is a scalar or not a tensor, so is the same for every shard of a parameter."""
    return len(shape_of(value)) == 0
