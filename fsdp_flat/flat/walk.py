"""Finds the parameters that a unit manages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from fsdp_flat.errors import TiedParameterError
from fsdp_flat.flat.tensor_adapter import PLAIN, TensorAdapter, adapter_of
from fsdp_flat.layout import CHECKPOINT_WRAPPED_MODULE, COMPILED_MODULE, clean_fqn, join_fqn


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Locates one registration of a parameter: ``module._parameters[name]``."""

    module: nn.Module
    name: str
    fqn: str


@dataclass(frozen=True, slots=True, eq=False)
class ManagedParam:
    """Lists all sites of a parameter in its unit; the first site gives its FQN.

    Attributes:
        param: the parameter, a plain one once the unit manages it.
        sites: its registrations.
        adapter: converts between ``param`` and the tensor that the sites show.
        replaced: returns the user's Parameter if ``param`` replaces it.
    """

    param: nn.Parameter
    sites: tuple[Site, ...]
    adapter: TensorAdapter = PLAIN
    replaced: Callable[[], nn.Parameter | None] | None = None

    @property
    def fqn(self) -> str:
        """FQN relative to the unit's module, without wrapper components."""
        return self.sites[0].fqn

    @property
    def original(self) -> nn.Parameter:
        """The user's Parameter, or one like it if the user does not hold it any more."""
        found = self.replaced() if self.replaced is not None else self.param
        return nn.Parameter(self.adapter.from_local(self.param.detach()), False) if found is None else found

    def mark(self, owner: FlattenedBy) -> None:
        """Mark the parameter as flattened by a unit, and the one that it replaces."""
        replaced = self.replaced() if self.replaced is not None else None
        self.param._fsdp_flattened = owner  # type: ignore[attr-defined]
        if replaced is not None:
            gone = FlattenedBy(owner.fqn, owner.unit_name, owner.shape, is_replaced=True)
            replaced._fsdp_flattened = gone  # type: ignore[attr-defined]

    @property
    def shape(self) -> torch.Size:
        """Unsharded shape of the parameter."""
        return self.param.shape


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    """Iterate over ``root.modules()`` without names and without one generator per level of nesting."""
    seen: set[nn.Module] = set()
    ahead = [root]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            yield module
            ahead.extend(child for child in reversed(module._modules.values()) if child is not None)


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers for activation checkpoints, offload and compilation, or ``module`` itself.

    These wrappers move the names in state dicts one level down when they load, so the unit's flat parameter has to be
    registered on the module that holds its parameters.
    """
    for word in (CHECKPOINT_WRAPPED_MODULE, COMPILED_MODULE):
        inner = module._modules.get(word)
        if inner is not None:
            return inside_wrappers(inner)
    return module


def named_sites(root: nn.Module) -> Iterator[tuple[Site, nn.Parameter]]:
    """Iterate over all registrations of parameters below ``root``, duplicates included, in registration order."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        path = clean_fqn(prefix) if module._parameters else ""
        for name, param in module._parameters.items():
            if param is not None:
                yield Site(module, name, join_fqn(path, name)), param


def collect_params(
    root: nn.Module,
    *,
    unit_name: str,
    skip: Callable[[nn.Parameter], bool],
    is_managed_below: Callable[[nn.Module, str], bool],
) -> list[ManagedParam]:
    """Collect the parameters of ``root`` that no nested unit manages, in FSDP1's order.

    Args:
        root: the unit's module.
        unit_name: name of the unit, for error texts.
        skip: true for parameters that this unit does not manage (ignored, or owned by an outer unit).
        is_managed_below: true for a registration that a nested unit manages.

    Raises:
        TiedParameterError: if a parameter that another unit has flattened is registered here as well.
    """
    # By FQN and not by module: a module registered twice contributes both names of its parameters to state dicts.
    found: dict[nn.Parameter, dict[str, Site]] = {}
    for site, param in named_sites(root):
        if is_managed_below(site.module, site.name) or skip(param):
            continue
        owner = getattr(param, "_fsdp_flattened", None)
        if owner:
            where = owner.describe() if isinstance(owner, FlattenedBy) else "another unit"
            raise TiedParameterError(
                f"{site.fqn!r} of unit {unit_name!r} is the same parameter as {where}, which was wrapped before. "
                "Sharding it in two units would cut the tie. Wrap the module that holds both places in one call with "
                "an auto_wrap_policy (the parameter then moves up to a common unit), or make both places one unit "
                "(fully_shard takes a list of modules)."
            )
        found.setdefault(param, {}).setdefault(site.fqn, site)
    return [ManagedParam(param, tuple(sites.values())) for param, sites in found.items()]


def to_local_param(entry: ManagedParam) -> ManagedParam:
    """Replace a DTensor parameter in its modules by a Parameter of its local tensor; return a plain one unchanged."""
    shown = entry.param
    adapter = adapter_of(shown, entry.fqn)
    if adapter is PLAIN:
        return entry
    with torch.no_grad():
        param = nn.Parameter(adapter.to_local(shown.detach()), requires_grad=shown.requires_grad)
    param.__dict__.update({key: value for key, value in shown.__dict__.items() if key != "_is_param"})
    param._backward_hooks = shown._backward_hooks
    param._post_accumulate_grad_hooks = shown._post_accumulate_grad_hooks
    for site in entry.sites:
        site.module._parameters[site.name] = param
    return replace(entry, param=param, adapter=adapter, replaced=TensorWeakRef(shown))


@dataclass(frozen=True, slots=True)
class FlattenedBy:
    """Identifies the unit that flattened a parameter; the always true value of its ``_fsdp_flattened``.

    Attributes:
        fqn: FQN of the parameter relative to the unit's module.
        unit_name: name of the unit.
        shape: unsharded shape.
        is_replaced: the model holds another tensor in its place, so updates of the marked one change nothing.
    """

    fqn: str
    unit_name: str
    shape: tuple[int, ...]
    is_replaced: bool = False

    def __bool__(self) -> bool:
        return True

    def describe(self) -> str:
        """Return FQN, shape and unit, for error texts."""
        return f"{self.fqn!r} {tuple(self.shape)} of unit {self.unit_name!r}"


def unsharded_shape(param: torch.Tensor) -> torch.Size | None:
    """Return the unsharded shape of a unit's parameter; None for any other tensor."""
    owner = getattr(param, "_fsdp_flattened", None)
    return torch.Size(owner.shape) if isinstance(owner, FlattenedBy) else None
