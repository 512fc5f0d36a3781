"""Finds the parameters that a unit is to manage, and where modules hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from fsdp_flat.core.options import Ignored
from fsdp_flat.core.params import PLAIN, ManagedParam, Site, adapter_of, is_managed, owner_of
from fsdp_flat.core.unit import Unit
from fsdp_flat.errors import TiedParameterError
from fsdp_flat.layout import CHECKPOINT_WRAPPED_MODULE, COMPILED_MODULE, FLAT_PARAM, clean_fqn, join_fqn


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers for activation checkpoints, offload and compilation, or ``module`` itself.

    These wrappers move names in state dicts one level down when they load, so a flat parameter is registered inside.
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


def managed_sites(units: Iterable[Unit]) -> set[tuple[nn.Module, str]]:
    """Return module and name of every registration of a parameter that ``units`` manage."""
    params = [entry for unit in units for param_group in unit.param_groups for entry in param_group.params]
    return {(site.module, site.name) for entry in params for site in entry.sites}


def unit_params(
    root: nn.Module,
    unit_name: str,
    ignored: Ignored,
    owners: Mapping[nn.Parameter, nn.Module],
    nested: Sequence[Unit],
) -> list[ManagedParam]:
    """Return the parameters that a unit of ``root`` is to manage, in FSDP1's order: no ``nested`` one manages them.

    ``owners`` are the modules whose units manage parameters that are shared between units.

    Raises:
        TiedParameterError: if a parameter that another unit has flattened is registered here as well.
    """
    below = managed_sites(nested)
    below.update((param_group.spec.module, FLAT_PARAM) for unit in nested for param_group in unit.param_groups)
    # By FQN and not by module: a module registered twice contributes both names of its parameters to state dicts.
    found: dict[nn.Parameter, dict[str, Site]] = {}
    for site, param in named_sites(root):
        if (site.module, site.name) in below or ignored.has(param) or (owners and owners.get(param, root) is not root):
            continue
        if is_managed(param):
            owner = owner_of(param)
            where = "another unit" if owner is None else owner.describe()
            raise TiedParameterError(
                f"{site.fqn!r} of unit {unit_name!r} is the same parameter as {where}, which was wrapped before. "
                "Sharding it in two units would cut the tie. Wrap the module that holds both places in one call with "
                "an auto_wrap_policy (the parameter then moves up to a common unit), or make both places one unit "
                "(fully_shard takes a list of modules)."
            )
        found.setdefault(param, {}).setdefault(site.fqn, site)
    return [ManagedParam(param, tuple(sites.values()), kind=_kind_of(param)) for param, sites in found.items()]


def _kind_of(param: nn.Parameter) -> type[nn.Parameter]:
    """Return the class of a Parameter; tensors of FakeTensorMode and DTensors keep theirs."""
    return type(param) if issubclass(type(param), nn.Parameter) else nn.Parameter


def to_local_param(entry: ManagedParam, *, takes_subclasses: bool) -> ManagedParam:
    """Replace a DTensor parameter in its modules by a Parameter of its local tensor; return a plain one unchanged.

    Raises an UnsupportedError for other classes of tensors, unless it ``takes_subclasses``.
    """
    shown = entry.param
    adapter = adapter_of(shown, entry.fqn, takes_subclasses=takes_subclasses)
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
