"""Locates the parameters of models and optimizers, and describes tensors of which each rank holds a part.

A model's parameters and an optimizer's states are both such tensors: a codec (:class:`StateDictCodec`) turns them into
the values of one state-dict type, and back.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from fsdp_flat.api import OptimStateDictConfig, StateDictConfig
from fsdp_flat.comm import P2PChannels, RankGroup
from fsdp_flat.core import PLAIN, ParamGroup, Unit, check_module, unit_of
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.layout import EvenPartition, Interval, Partition, ReplicatedPartition, clean_fqn, plan_transfer
from fsdp_flat.runtime import param_groups_of

Config = StateDictConfig | OptimStateDictConfig


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the full shape of a tensor of any type; ``()`` for a value that is not a tensor."""
    # Every tensor attribute of a ShardedTensor warns that the class is deprecated; its own metadata do not.
    if type(value) is torch.Tensor:
        return tuple(value.shape)
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else getattr(value, "shape", ()))


def is_scalar(value: Any) -> bool:
    """Return whether a state is a scalar or not a tensor, so is the same for every shard of a parameter."""
    return value.dim() == 0 if type(value) is torch.Tensor else not shape_of(value)


def dtype_of(value: Any) -> torch.dtype:
    """Return the dtype of a tensor of any type."""
    dtype: torch.dtype = (value.metadata().tensor_properties if isinstance(value, ShardedTensor) else value).dtype
    return dtype


class IndexedParam:
    """Locates one parameter that a unit manages: the parameter ``index`` of a group.

    Attributes:
        fqns: its names, relative to a model and without wrapper components; a tied parameter has several.
        fqn: the first of them, under which optimizer states are saved.
        rank_group: the shard group.
        adapter: that of the tensor that its modules hold.
        shape: its unsharded shape; that of this rank's part if tensor parallelism has split it.
        full_shape: its shape in state dicts of full tensors.
        local_shard: the elements of this rank.
        numel: the number of them.
        sharded_param: the tensor that its modules hold outside of compute.
        is_original: optimizers hold it itself, and not a flat parameter.
    """

    def __init__(self, unit: Unit, param_group: ParamGroup, index: int, fqns: tuple[str, ...]) -> None:
        self.unit, self.param_group, self.index = unit, param_group, index
        entry, self.shape = param_group.params[index], param_group.layout.param_infos[index].shape
        self.fqns, self.fqn, self.adapter, self.sharded_param = fqns, fqns[0], entry.adapter, entry.param
        self.full_shape = self.shape if self.adapter is PLAIN else self.adapter.full_shape(self.shape)
        self.rank_group, self.local_shard = param_group.comm.options.groups.shard, param_group.local_shards[index]
        self.numel = self.local_shard.numel
        self.is_original = param_group.spec.use_orig_params

    def trains(self) -> bool:
        """Return whether the parameter requires a gradient."""
        return self.param_group.slots.requires_grad()[self.index]

    @property
    def local(self) -> torch.Tensor:
        """This rank's local shard (1-D), a view of the flat shard; see ``ParamGroup.local``."""
        return self.param_group.local(self.index)

    def part_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return its elements in a tensor shaped like what this rank's optimizer holds, flattened."""
        return shard if self.is_original else shard[self.local_shard.in_shard.to_slice()]

    @property
    def partition(self) -> EvenPartition:
        """Partition of the flattened parameter over the shard group."""
        return self.param_group.layout.partition(self.index)

    def has_states(self, owner: int | None) -> bool:
        """Return whether an optimizer has states of it on this rank; those of an owned one are on rank ``owner``.

        An original parameter without elements here has no gradient, so no states.
        """
        if owner is not None:
            return owner == self.rank_group.rank
        return not self.is_original or self.numel > 0 or math.prod(self.shape) == 0

    @property
    def is_split(self) -> bool:
        """Return whether an optimizer holds something else than the whole parameter: a part, or a flat parameter."""
        return not self.is_original or self.rank_group.size > 1 or bool(self.adapter.groups)

    def __deepcopy__(self, _memo: Any) -> IndexedParam:
        return self  # a copy of a value is of the same parameter

    def __str__(self) -> str:
        return f"{self.fqn!r} of unit {self.unit.name!r}"


def refuse_split(param: IndexedParam, name: str) -> None:
    """Raise an UnsupportedError if tensor parallelism has split the parameter of a state that has a handler."""
    if param.adapter.groups:
        raise UnsupportedError(
            f"State {name!r} of {param.fqn!r} (unit {param.unit.name!r}) has a handler, which is given local shards of "
            "a full parameter; tensor parallelism has split this one first. Leave the parameter out of tensor "
            "parallelism, or out of the optimizer that keeps such states."
        )


def params_of(unit: Unit, *prefixes: str) -> list[IndexedParam]:
    """Return the parameters of one unit in the order of its groups; prefixes (with dots) precede their names."""
    found: list[IndexedParam] = []
    for param_group in unit.param_groups:
        for index, entry in enumerate(param_group.params):
            fqns = [prefix + site.fqn for prefix in prefixes for site in entry.sites]
            found.append(IndexedParam(unit, param_group, index, tuple(fqns)))
    return found


class ParamIndex:
    """Maps the parameters of a model, which is a wrapper, holds wrappers, or is a plain module.

    Attributes:
        params: all parameters that units manage, in the model's order.
        managed: by parameter that an optimizer holds, the parameters in it: one with original parameters, else all of
            its group.
        others: by parameter that no unit manages in state dicts, its name: those outside of units, and DTensors.
        dtensors: by DTensor that a unit of ``fully_shard`` shows, where it is. Its values in state dicts are DTensors
            too, so torch can save and load them.
        shown_names: by parameter, its first name in ``model.named_parameters()``, wrapper components included.
    """

    def __init__(self, model: nn.Module) -> None:
        check_module(model)
        self.params: list[IndexedParam] = []
        self.managed: dict[nn.Parameter, tuple[IndexedParam, ...]] = {}
        # By DTensor that modules hold, where it is.
        places: dict[nn.Parameter, tuple[Unit, ParamGroup, int]] = {}
        # By parameter that modules hold while their unit is unsharded, the one that an optimizer holds; or None.
        unsharded: dict[nn.Parameter, nn.Parameter | None] = {}
        prefixes: dict[Unit, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            unit = unit_of(module)
            if unit is not None:
                prefixes.setdefault(unit, []).append(clean_fqn(path + ".").lstrip("."))
        for unit, found_prefixes in prefixes.items():
            if not unit.options.api.has_wrapper:
                for param_group in unit.param_groups:
                    for index, entry in enumerate(param_group.params):
                        places[entry.param] = unit, param_group, index
                        unsharded[param_group.output.params[index]] = entry.param
                continue
            # Of a unit that is registered under several names FSDP1 saves states under the last, if it is flat.
            is_flat = not unit.options.use_orig_params
            ordered = [found_prefixes[-1], *found_prefixes[:-1]] if is_flat else found_prefixes
            found = params_of(unit, *ordered)
            self.params += found
            for param_group in unit.param_groups:
                own, found = tuple(found[: len(param_group.params)]), found[len(param_group.params) :]
                unsharded.update(dict.fromkeys(param_group.output.params))
                if param_group.spec.use_orig_params:
                    self.managed.update(zip(param_group.slots.visible_params, zip(own), strict=True))
                else:
                    self.managed[param_group.flat_param] = own
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            kept = unsharded.get(param)
            names.setdefault(param if kept is None else kept, []).append(name)
        self.shown_names: dict[nn.Parameter, str] = {}
        self.others: dict[nn.Parameter, str] = {}
        self.dtensors: dict[nn.Parameter, IndexedParam] = {}
        self._further_names: dict[str, str] = {}
        for param, each_name in names.items():
            self.shown_names[param], first = each_name[0], clean_fqn(each_name[0])
            if param in self.managed:
                continue
            if param not in unsharded:
                self.others[param] = first
            for name in each_name[1:]:
                self._further_names[clean_fqn(name)] = first
            if param in places:
                # A unit of several modules does not know their names.
                self.dtensors[param] = IndexedParam(*places[param], tuple(map(clean_fqn, each_name)))

    @cached_property
    def by_name(self) -> dict[str, IndexedParam]:
        """Managed parameters under all their names."""
        return {fqn: param for param in self.params for fqn in param.fqns}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """By each further name of a parameter, the first one, under which its optimizer states are saved."""
        return {**self._further_names, **{name: param.fqn for param in self.params for name in param.fqns[1:]}}

    @cached_property
    def dtensors_by_name(self) -> dict[str, IndexedParam]:
        """DTensors of ``fully_shard`` under all their names."""
        return {fqn: param for param in self.dtensors.values() for fqn in param.fqns}

    @cached_property
    def units(self) -> list[Unit]:
        """Units that have parameters, each once, in the model's order."""
        return list(dict.fromkeys(param.unit for param in (*self.params, *self.dtensors.values())))

    @cached_property
    def rank_groups(self) -> list[RankGroup]:
        """Groups over which the units' ranks must agree."""
        return rank_groups_of(self.units)

    def has(self, param: nn.Parameter) -> bool:
        """Return whether a parameter of an optimizer is the model's."""
        return param in self.managed or param in self.others

    def fqns_of(self, param: nn.Parameter) -> tuple[str, ...]:
        """Return the first names of the parameters that a parameter of an optimizer holds."""
        if param in self.managed:
            return tuple([each.fqn for each in self.managed[param]])
        if param in self.others:
            return (self.others[param],)
        raise OptionError(
            f"The optimizer holds a parameter of shape {tuple(param.shape)} that is none of this model's. Pass "
            "the model that the optimizer was built from, and build optimizers after wrapping."
        )


def rank_groups_of(units: Sequence[Unit], *, of_replicas: bool = True) -> list[RankGroup]:
    """Return every group over which the units' ranks must agree: their own, and those of tensor parallelism.

    Without those ``of_replicas`` they are the groups over which parameters are sharded.
    """
    found: dict[RankGroup, None] = {}
    for unit in units:
        for options, _ in unit.by_mesh():
            found.update(dict.fromkeys(options.groups.rank_groups if of_replicas else [options.groups.shard]))
        for param_group in unit.param_groups:
            for entry in param_group.params:
                found.update(dict.fromkeys(map(RankGroup.of, entry.adapter.groups)))
    return [rank_group for rank_group in found if rank_group.size > 1]


@dataclass(frozen=True, slots=True)
class OptimContents:
    """Holds the parameters, states and parameter groups of an optimizer, or None for groups that are not known.

    ``owners`` has the rank of the shard group that has the full states of a parameter, if one rank has them all.
    ``kind`` is the optimizer's class, of the inner one if a client's optimizer shows the groups of another one.
    """

    params: tuple[nn.Parameter, ...]
    state: Mapping[nn.Parameter, Mapping[str, Any]] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] | None = None
    owners: Mapping[nn.Parameter, int] = field(default_factory=dict)
    kind: type | None = None


def held_by(optim: Any) -> OptimContents:
    """Return the parameters and groups of an optimizer, with its present states if it shows them."""
    groups = param_groups_of(optim)
    params = tuple(param for group in groups for param in group["params"])
    state = getattr(optim, "state", None)
    state = state if isinstance(state, Mapping) else {}
    inner = getattr(optim, "optimizer", None)
    kind = type(inner if getattr(inner, "param_groups", None) is groups else optim)
    return OptimContents(params, state, tuple(groups), getattr(optim, "state_owners", {}), kind)


def check_states(given: Any) -> Mapping[str, Any]:
    """Return ``given`` if it is an optimizer state dict; raise otherwise."""
    if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping):
        found = sorted(map(str, given)) if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise OptionError(f"An optimizer state dict has 'state', a dict, and mostly 'param_groups'; got {found}.")
    return given


def check_rows(rows: Mapping[Any, Any]) -> None:
    """Raise unless each value is a dict of the states of one parameter, by their names."""
    for key, row in rows.items():
        if isinstance(row, Mapping) and all(isinstance(name, str) for name in row):
            continue
        whose = f"a parameter of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
        found = f"names {list(row)}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise OptionError(
            f"The optimizer's states of {whose} must be a dict of values under strings, the names of the states; got "
            f"{found}."
        )


def copied_state(value: Any, device: torch.device | str | None = None) -> Any:
    """Return a copy of an optimizer's state on ``device`` (None: its own), detached if it is a tensor."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    return value.clone() if device is None else value.to(device, copy=True)


def serialized(value: Any) -> bytes:
    """Serialize ``value`` by ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value that :func:`serialized` has serialized."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


@dataclass(slots=True, eq=False)
class StateShard:
    """Holds this rank's part of one tensor: of a parameter, of an optimizer state of one, or of a flat parameter.

    ``local`` has its elements (1-D), the source of a save or the target of a load; ``shape`` is the tensor's, under
    tensor parallelism that of this rank's part. If ``owner`` is given, that rank of the shard group has all elements;
    else they are sharded as the parameter is.
    """

    param: IndexedParam
    local: torch.Tensor
    shape: tuple[int, ...]
    state: str | None = None
    owner: int | None = None

    @property
    def label(self) -> str:
        """Name of the tensor in error texts."""
        return self.param.fqn if self.state is None else f"State {self.state!r} of {self.param.fqn!r}"

    @property
    def held(self) -> Partition:
        """Partition of the flattened tensor over the shard group."""
        if self.owner is None:
            return self.param.partition
        return ReplicatedPartition(math.prod(self.shape), self.owner, self.param.rank_group.size)

    @property
    def interval(self) -> Interval:
        """Elements of this rank."""
        return self.param.local_shard.in_param if self.owner is None else self.held[self.param.rank_group.rank]

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the full tensor in a state dict."""
        return self.param.adapter.full_shape(self.shape)

    def send(self, dst: int | None, target: torch.Tensor | None, channels: P2PChannels) -> None:
        """Begin to send the tensor to ``target`` on rank ``dst`` of the shard group; None for every rank."""
        rank_group, device = self.param.rank_group, self.param.unit.options.device
        numel, target = math.prod(self.shape), None if target is None else target.view(-1)
        wanted, nbytes = ReplicatedPartition(numel, dst, rank_group.size), numel * self.local.itemsize
        plan = plan_transfer(self.held, wanted, rank_group.rank)
        channels.add(plan, self.local, target, rank_group=rank_group, device=device, nbytes=nbytes)


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """Describes the transfer of one tensor between two partitions, ``held`` and ``wanted``, over the ranks of a group.

    ``source`` and ``target`` are this rank's elements before and after (1-D), None if it has none. ``nbytes``, of the
    full tensor, is equal on every rank.
    """

    rank_group: RankGroup
    held: Partition
    wanted: Partition
    source: torch.Tensor | None
    target: torch.Tensor | None
    device: torch.device
    nbytes: int

    def reversed(self) -> TensorTransfer:
        """Return the transfer from the target to the source."""
        return replace(self, held=self.wanted, wanted=self.held, source=self.target, target=self.source)


def redistribute(transfers: Iterable[TensorTransfer]) -> None:
    """Transfer tensors, each rank's elements directly from their source to their target.

    Every rank of the groups must call this with the same tensors in the same order.
    """
    channels = P2PChannels()
    for each in transfers:
        group, plan = each.rank_group, plan_transfer(each.held, each.wanted, each.rank_group.rank)
        channels.add(plan, each.source, each.target, rank_group=group, device=each.device, nbytes=each.nbytes)
    channels.wait()


class PendingWrites:
    """Collects the calls, copies and transfers of one load, to run once every value fits."""

    def __init__(self) -> None:
        self._lines: dict[Unit, list[str]] = {}
        self._calls: tuple[list[Callable[[], object]], ...] = ([], [])
        self._stages: tuple[list[TensorTransfer], ...] = ([], [])

    def describe(self, target: StateShard, text: str) -> None:
        """Describe how ``target`` is loaded, with the same ``text`` on every rank of its unit."""
        self._lines.setdefault(target.param.unit, []).append(f"{target.label}: {text}")

    def lines_of(self, rank_group: RankGroup) -> list[str]:
        """Return the descriptions of tensors that the ranks of a group must load alike, those of units on the group."""
        units = [unit for unit in self._lines if rank_group in rank_groups_of([unit])]
        return [line for unit in units for line in self._lines[unit]]

    def call(self, function: Callable[[], object], *, last: bool = False) -> None:
        """Plan a call, before all transfers or after them (``last``)."""
        self._calls[last].append(function)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Plan the copy of a tensor on this rank."""
        self.call(partial(target.copy_, source))

    def transfer(self, *transfers: TensorTransfer | None) -> None:
        """Plan transfers in up to two groups; the second begins when all first ones have ended."""
        for stage, each in zip(self._stages, transfers, strict=False):
            if each is not None:
                stage.append(each)

    @torch.no_grad()
    def commit(self) -> None:
        """Run all of them; every rank that has planned transfers must call this."""
        for function in self._calls[False]:
            function()
        for stage in self._stages:
            redistribute(stage)
        for function in self._calls[True]:
            function()


class StateDictCodec:
    """Defines the values of one state-dict type; base of all codecs.

    Attributes:
        communicates: encoding takes every rank of the shard groups.
        exchanges: decoding takes every rank of the shard groups.
        is_flat: model state dicts have one value for each flat parameter, not for each parameter.
        kinds: classes that this codec decodes, under any type but those of full and flat tensors; values of no codec's
            kinds are full tensors.
    """

    communicates = True
    exchanges = False
    is_flat = False
    kinds: tuple[type, ...] = ()

    def encode(self, shards: Sequence[StateShard], config: Config) -> list[Any]:
        """Return the values of a state dict, one per shard; None: the state dict of this rank has no such value.

        Like tensors, values have ``shape`` (of the full tensor) and ``dtype`` (of what they are decoded into). If
        ``communicates``, every rank of the shard groups must call this with the same tensors.
        """
        raise NotImplementedError

    def gather(self, shards: Iterable[StateShard], config: Config) -> Sequence[Any]:
        """Return what a model's save exchanges before its modules' hooks run: the values."""
        with torch.no_grad():
            return self.encode(list(shards), config)

    def of_dtensor(self, value: Any, config: Config) -> Any:
        """Return the value of a parameter, or a state of one, that ``fully_shard`` has sharded: by default itself."""
        return value

    def fits(self, value: Any, target: StateShard) -> bool:
        """Return whether a model's load decodes a value of this shape; else its error is torch's."""
        return shape_of(value) == target.full_shape

    def decode(self, value: Any, target: StateShard, writes: PendingWrites) -> None:
        """Plan how ``target`` gets its elements of ``value``, which has its full shape.

        If ``exchanges``, every rank of the shard group must call this with the same tensor. The target has the dtype
        of the model's parameter, or for an optimizer state that of the value. A value that does not fit raises a
        LoadError.
        """
        raise NotImplementedError
