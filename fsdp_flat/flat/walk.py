"""Finding the parameters that a unit manages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from fsdp_flat.errors import TiedParameterError
from fsdp_flat.flat.tensor_adapter import PLAIN, TensorAdapter, adapter_of
from fsdp_flat.layout import CHECKPOINT_WRAPPED_MODULE, COMPILED_MODULE, clean_fqn, join_fqn

__all__ = [
    "ManagedParam",
    "Site",
    "collect_params",
    "held_locally",
    "inside_wrappers",
    "modules_of",
    "named_sites",
    "unsharded_shape",
]


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One place where a parameter is registered: ``module._parameters[name]``."""

    module: nn.Module
    name: str
    fqn: str


@dataclass(frozen=True, slots=True, eq=False)
class ManagedParam:
    """A parameter and every place in its unit that holds it; the first place gives it its name.

    Attributes:
        param: a plain Parameter, once the unit has taken it.
        sites: the places.
        adapter: what the places show when the parameter is there.
        replaced: the user's own Parameter if ``param`` stands in for it.
    """

    param: nn.Parameter
    sites: tuple[Site, ...]
    adapter: TensorAdapter = PLAIN
    replaced: Callable[[], nn.Parameter | None] | None = None

    @property
    def fqn(self) -> str:
        """Name relative to the unit's module, without wrapper components."""
        return self.sites[0].fqn

    def mark(self, owner: FlattenedBy) -> None:
        """Have the parameter say which unit took it."""
        replaced = self.replaced() if self.replaced is not None else None
        for param in (self.param, replaced):
            if param is not None:
                param._fsdp_flattened = owner  # type: ignore[attr-defined]

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.param.shape


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    """What ``root.modules()`` gives, without a generator for every level of nesting and without names."""
    seen: set[nn.Module] = set()
    ahead = [root]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            yield module
            ahead.extend(child for child in reversed(module._modules.values()) if child is not None)


def inside_wrappers(module: nn.Module) -> nn.Module:
    """The module inside wrappers for activation checkpoints, offload and compilation; ``module`` if it is none.

    These wrappers move the names in state dicts one level down when they load, so a name of the unit itself has to be
    registered where its parameters are.
    """
    for word in (CHECKPOINT_WRAPPED_MODULE, COMPILED_MODULE):
        inner = module._modules.get(word)
        if inner is not None:
            return inside_wrappers(inner)
    return module


def named_sites(root: nn.Module) -> Iterator[tuple[Site, nn.Parameter]]:
    """Every registration of every parameter below ``root``, duplicates included, in registration order."""
    for prefix, module in root.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is not None:
                yield Site(module, name, clean_fqn(join_fqn(prefix, name))), param


def collect_params(
    root: nn.Module,
    *,
    unit_name: str,
    skip: Callable[[nn.Parameter], bool],
    is_managed_below: Callable[[nn.Module, str], bool],
) -> list[ManagedParam]:
    """The parameters of ``root`` that no nested unit manages, in FSDP1's order.

    Args:
        root: the unit's module.
        unit_name: what error texts call the unit.
        skip: true for parameters that this unit leaves alone (ignored, or owned by an outer unit).
        is_managed_below: true for a registration that a nested unit manages.

    Raises:
        TiedParameterError: a parameter that some unit already flattened is registered here as well.
    """
    # By name and not by module: a module registered at two places has every name of its parameters in state dicts.
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
                "an auto_wrap_policy (the parameter then moves up to a common unit), or wrap both places in one unit."
            )
        found.setdefault(param, {}).setdefault(site.fqn, site)
    return [ManagedParam(param, tuple(sites.values())) for param, sites in found.items()]


def held_locally(entry: ManagedParam) -> ManagedParam:
    """``entry`` as a plain Parameter: itself, or in place of a DTensor one of the local tensor, put in the modules."""
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
    """What ``_fsdp_flattened`` is set to on a parameter that a unit took: true, and it says who."""

    fqn: str
    unit_name: str
    shape: tuple[int, ...]

    def __bool__(self) -> bool:
        return True

    def describe(self) -> str:
        """Name, shape and unit, for error texts."""
        return f"{self.fqn!r} {tuple(self.shape)} of unit {self.unit_name!r}"


def unsharded_shape(param: torch.Tensor) -> torch.Size | None:
    """Return the shape that a unit's parameter has where it is unsharded; None for any other tensor."""
    owner = getattr(param, "_fsdp_flattened", None)
    return torch.Size(owner.shape) if isinstance(owner, FlattenedBy) else None
