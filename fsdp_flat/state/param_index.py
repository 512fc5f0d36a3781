"""Maps a model's parameters to their names, units and handles, in one walk for all state dicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from fsdp_flat.comm import RankGroup
from fsdp_flat.errors import OptionError
from fsdp_flat.flat import FlatParamHandle, TensorAdapter
from fsdp_flat.layout import EvenPartition, LocalShard, clean_fqn
from fsdp_flat.runtime import Unit, unit_of


@dataclass(frozen=True, slots=True, eq=False)
class IndexedParam:
    """Locates one parameter that a unit manages.

    Attributes:
        unit: its unit.
        handle: the handle that holds it.
        index: its index in the handle.
        fqns: its names, relative to a model and without wrapper components; several for a tied parameter.
    """

    unit: Unit
    handle: FlatParamHandle
    index: int
    fqns: tuple[str, ...]

    @property
    def fqn(self) -> str:
        """First name, under which optimizer states are saved."""
        return self.fqns[0]

    @property
    def rank_group(self) -> RankGroup:
        """Shard group of its unit."""
        return self.unit.options.groups.shard

    @property
    def adapter(self) -> TensorAdapter:
        """Adapter of the tensor that its modules hold."""
        return self.handle.views.params[self.index].adapter

    @property
    def shape(self) -> tuple[int, ...]:
        """Unsharded shape; that of this rank's part if tensor parallelism has split the parameter."""
        return self.handle.layout.param_infos[self.index].shape

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape in state dicts of full tensors."""
        return self.adapter.full_shape(self.shape)

    @property
    def local_shard(self) -> LocalShard:
        """Elements of this rank."""
        return self.handle.views.local_shards[self.index]

    @property
    def local(self) -> torch.Tensor:
        """This rank's local shard (1-D), a view of the flat shard; see ``Views.local``."""
        return self.handle.views.local(self.index)

    @property
    def partition(self) -> EvenPartition:
        """Partition of the flattened parameter over the shard group."""
        return self.handle.layout.partition(self.index)

    @property
    def shown(self) -> nn.Parameter:
        """The tensor that its modules hold outside of compute."""
        return self.handle.views.params[self.index].param

    @property
    def is_original(self) -> bool:
        """Return whether optimizers hold it itself, and not a flat parameter."""
        return self.handle.spec.use_orig_params

    @property
    def is_on_other_ranks(self) -> bool:
        """Return whether it is an original parameter without elements on this rank: no gradient, no state."""
        if not self.is_original or not self.local_shard.is_empty:
            return False
        return self.handle.layout.param_infos[self.index].numel > 0

    def __str__(self) -> str:
        return f"{self.fqn!r} of unit {self.unit.name!r}"


def params_of(unit: Unit, prefix: str) -> list[IndexedParam]:
    """Return the parameters of one unit in the order of its handles; ``prefix`` goes before their names, with its dot.

    Every name of a tied parameter is included.
    """
    return [
        IndexedParam(unit, handle, index, tuple(prefix + site.fqn for site in entry.sites))
        for handle in unit.handles
        for index, entry in enumerate(handle.views.params)
    ]


class ParamIndex:
    """Maps the parameters of a model, which is a wrapper, holds wrappers, or is a plain module.

    Attributes:
        params: all parameters that units manage, in the model's order.
        managed: by parameter that an optimizer holds, the parameters in it: one with original parameters, else all of
            its handle.
        others: by parameter that no unit manages in state dicts, its name: those outside of units, and DTensors.
        dtensors: by DTensor that a unit of ``fully_shard`` shows, where it is. Its values in state dicts are DTensors
            too, so torch can save and load them.
        shown_names: by parameter, its first name in ``model.named_parameters()``, wrapper components included.
    """

    def __init__(self, model: nn.Module) -> None:
        self.params: list[IndexedParam] = []
        self.managed: dict[nn.Parameter, tuple[IndexedParam, ...]] = {}
        rows: dict[nn.Parameter, IndexedParam] = {}
        # By parameter that modules hold while their unit is unsharded, the one that an optimizer holds; or None.
        unsharded: dict[nn.Parameter, nn.Parameter | None] = {}
        for path, module in model.named_modules():
            unit = unit_of(module)
            if unit is None:
                continue
            if unit.shows_dtensors:
                rows.update((param.shown, param) for param in params_of(unit, ""))
                unsharded.update(
                    {param.handle.views.unsharded_params[param.index]: param.shown for param in rows.values()}
                )
                continue
            prefix = clean_fqn(path)
            found = params_of(unit, prefix + "." if prefix else "")
            self.params += found
            for handle in unit.handles:
                own = [(param,) for param in found if param.handle is handle]
                unsharded.update(dict.fromkeys(handle.views.unsharded_params))
                if handle.spec.use_orig_params:
                    self.managed.update(zip(handle.views.visible_params(), own, strict=True))
                else:
                    self.managed[handle.flat_param] = tuple(param for (param,) in own)
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            kept = unsharded.get(param)
            names.setdefault(param if kept is None else kept, []).append(name)
        self.shown_names = {param: found[0] for param, found in names.items()}
        self.others = {
            param: clean_fqn(name)
            for param, name in self.shown_names.items()
            if param not in self.managed and param not in unsharded
        }
        # A unit of several modules does not know their names.
        self.dtensors = {
            param: replace(rows[param], fqns=tuple(map(clean_fqn, found)))
            for param, found in names.items()
            if param in rows
        }

    @cached_property
    def by_name(self) -> dict[str, IndexedParam]:
        """Managed parameters under all their names."""
        return {fqn: param for param in self.params for fqn in param.fqns}

    @cached_property
    def dtensors_by_name(self) -> dict[str, IndexedParam]:
        """DTensors of ``fully_shard`` under all their names."""
        return {fqn: param for param in self.dtensors.values() for fqn in param.fqns}

    @cached_property
    def units(self) -> list[Unit]:
        """Units that have parameters, each once, in the model's order."""
        return list(dict.fromkeys(param.unit for param in (*self.params, *self.dtensors.values())))

    @property
    def device(self) -> torch.device:
        """Compute device of the units; the CPU if there are none."""
        return self.units[0].options.device if self.units else torch.device("cpu")

    @cached_property
    def rank_groups(self) -> list[RankGroup]:
        """Groups over which the units' ranks must agree."""
        return rank_groups_of(self.units)

    def fqns_of(self, param: nn.Parameter) -> tuple[str, ...]:
        """Return the first names of the parameters that a parameter of an optimizer holds.

        Raises:
            OptionError: it is no parameter of this model.
        """
        if param in self.managed:
            return tuple(each.fqn for each in self.managed[param])
        if param in self.others:
            return (self.others[param],)
        raise OptionError(
            f"The optimizer holds a parameter of shape {tuple(param.shape)} that is none of this model's. Pass "
            "the model that the optimizer was built from, and build optimizers after wrapping."
        )

    def positions(self, params: Sequence[nn.Parameter]) -> dict[str, int]:
        """Return for every name the position of its parameter in ``params``, as in an optimizer's state dict."""
        return {fqn: position for position, param in enumerate(params) for fqn in self.fqns_of(param)}


def rank_groups_of(units: Sequence[Unit]) -> list[RankGroup]:
    """Return every group over which the units' ranks must agree: their own, and those of tensor parallelism."""
    found: dict[RankGroup, None] = {}
    for unit in units:
        found.update(dict.fromkeys(unit.options.groups.rank_groups))
        for handle in unit.handles:
            for entry in handle.views.params:
                found.update(dict.fromkeys(RankGroup.of(group) for group in entry.adapter.groups))
    return [rank_group for rank_group in found if rank_group.size > 1]
