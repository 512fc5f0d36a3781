"""Implements ``optim_state_dict_to_load``: converts states under parameter names to this rank's optimizer state dict.

Everything is checked before anything is written. Each rank loads full tensors without communication. Before chunks or
rank 0's tensors are sent, ranks agree that everything fits.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_flat.comm import P2PChannels, barrier
from fsdp_flat.errors import LoadError, OptionError
from fsdp_flat.flat import PLAIN, FlatParamHandle
from fsdp_flat.layout import Interval, Partition, ReplicatedPartition, boxes, plan_transfer
from fsdp_flat.runtime import Unit, agree
from fsdp_flat.state.boxed import BoxedTensor, boxes_to_shard, check_boxes
from fsdp_flat.state.chunk_specs import ShardWithSpec, chunk_spec, fitting_chunk, write_chunks
from fsdp_flat.state.common import LOADING, rank_groups_of
from fsdp_flat.state.handlers import DeferredState, OptimStateHandler, refuse_split
from fsdp_flat.state.optim_params import ParamNames, current_names, is_on_other_ranks, is_scalar, names_of
from fsdp_flat.state.owned import Owners, owners_by_slot
from fsdp_flat.state.param_groups import check_groups
from fsdp_flat.state.rank_zero import FromRankZero, shared_from_rank_zero
from fsdp_flat.state.torch_types import dtype_of, is_chunked, shape_of

__all__ = ["load_optim_state"]


def load_optim_state(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    given: Mapping[str, Any] | None,
    *,
    own_groups: Sequence[Mapping[str, Any]] | None = None,
    named: bool = False,
    from_rank_zero: bool = False,
    expects_chunks: bool = False,
    owners: Mapping[nn.Parameter, int] | None = None,
) -> dict[str, Any]:
    """Convert ``given``, which is keyed by names, to the state dict that an optimizer over ``params`` loads.

    Values may be full tensors, DTensors or ShardedTensors. With ``from_rank_zero``, or if any value is a DTensor or
    ShardedTensor, every rank must call this.

    Args:
        model: the model that the optimizer was built from.
        params: the optimizer's parameters in order.
        given: ``{"state": {name: {...}}, "param_groups": [...]}``; without ``param_groups`` the result has none.
        own_groups: the optimizer's groups, to be compared with those of ``given``; None if they are not known.
        named: keys of the result are the names of ``model.named_parameters()``, as in torch's named optimizer.
        from_rank_zero: only the first rank of the model's groups has ``given``, as full tensors.
        expects_chunks: if ``given`` is no optimizer state dict, other ranks were given chunks.
        owners: by parameter whose states one rank of the shard group has in full, that rank; the result has them only
            there, as full tensors.

    Raises:
        OptionError: (a ValueError) ``given`` has no ``state``, is keyed by positions, or has other parameter groups.
        LoadError: (a RuntimeError) a value does not fit its parameter.
        PeerFailureError: (a RuntimeError) another rank raised one of these; only where every rank must call this.
        UsageError: (a RuntimeError) other ranks did not call this; likewise.
    """
    names = names_of(model)
    if from_rank_zero and names.handles:
        given = shared_from_rank_zero(names, given)
    units = names.units
    plan = _Plan(units[0].options.device if units else torch.device("cpu"))
    result: dict[str, Any] = {}
    error: Exception | None = None
    try:
        shown = current_names(model) if named else {}
        keys: list[Any] = [shown[param] if named else position for position, param in enumerate(params)]
        owned = owners_by_slot(names, owners or {})
        result = _planned(names, params, given, plan, keys, owned=owned, named=named)
        if own_groups and result.get("param_groups"):
            assert given is not None
            check_groups(names, own_groups, given["param_groups"])
    except Exception as found:
        error = found
    unknown = expects_chunks and not _is_state_dict(given)
    if units and (from_rank_zero or unknown or _has_chunks(given)):
        rank_groups = rank_groups_of(units)
        for rank_group in rank_groups:
            barrier("optim_state_dict_to_load", rank_group)
        agree(plan.lines, error, rank_groups, units[0].options.device, LOADING)
    elif error is not None:
        raise error
    with torch.no_grad():
        plan.commit()
    return result


def _is_state_dict(given: Any) -> bool:
    return isinstance(given, Mapping) and isinstance(given.get("state"), Mapping)


def _has_chunks(given: Any) -> bool:
    """Return whether any state is a DTensor or ShardedTensor, so that ranks must exchange chunks."""
    rows = given["state"].values() if _is_state_dict(given) else ()
    return any(is_chunked(value) for row in rows if isinstance(row, Mapping) for value in row.values())


class _Plan:
    """Collects the copies and transfers to run once everything fits; they fill the tensors of the result.

    Args:
        device: the compute device.

    Attributes:
        lines: one line per tensor that ranks exchange.
        copies: the copies without communication.
    """

    def __init__(self, device: torch.device) -> None:
        self.lines: list[str] = []
        self._device = device
        self.copies: list[Callable[[], object]] = []
        self._chunks: list[tuple[ShardWithSpec, torch.Tensor]] = []
        self._scattered: list[tuple[FromRankZero, Partition, torch.Tensor]] = []
        self._afterwards: list[Callable[[], object]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Plan the copy of this rank's local shard out of a tensor on this rank."""
        self.copies.append(lambda: target.copy_(source))

    def write_chunk(self, name: str, row: ShardWithSpec, chunk: torch.Tensor) -> None:
        """Plan the exchange of chunks for local shards."""
        self.lines.append(f"{name}: {row.spec.shape} {row.local_shard.dtype} in chunks")
        self._chunks.append((row, chunk))

    def scatter(self, value: FromRankZero, wanted: Partition, target: torch.Tensor) -> None:
        """Plan the transfer of this rank's local shard of a tensor from rank 0."""
        self._scattered.append((value, wanted, target))

    def receive(self, value: FromRankZero, device: torch.device, then: Callable[[torch.Tensor], object]) -> None:
        """Plan the transfer of a full tensor from rank 0; ``then`` is called with it."""
        whole = torch.empty(value.shape, dtype=value.dtype, device=device)
        self.scatter(value, ReplicatedPartition(whole.numel(), None, value.groups.shard.size), whole.view(-1))
        self._afterwards.append(lambda: then(whole))

    def commit(self) -> None:
        """Run all copies and transfers."""
        for copied in self.copies:
            copied()
        write_chunks(self._chunks)
        channels = P2PChannels()
        for value, wanted, target in self._scattered:
            shard, numel = value.groups.shard, value.shape.numel()
            if value.groups.replicate.rank == 0:
                source = None if value.tensor is None else value.tensor.detach().reshape(-1)
                transfer_plan = plan_transfer(ReplicatedPartition(numel, 0, shard.size), wanted, shard.rank)
                channels.add(shard, self._device, transfer_plan, source, target, nbytes=numel * value.dtype.itemsize)
        channels.wait()
        # Each rank of the first shard group has its local shards now; send them to the other replicas.
        for value, _, target in self._scattered:
            replicate, numel = value.groups.replicate, target.numel()
            if replicate.size > 1:
                held, wanted = (
                    ReplicatedPartition(numel, 0, replicate.size),
                    ReplicatedPartition(numel, None, replicate.size),
                )
                ends = (None, target) if replicate.rank else (target, None)
                transfer_plan = plan_transfer(held, wanted, replicate.rank)
                channels.add(replicate, self._device, transfer_plan, *ends, nbytes=target.nbytes)
        channels.wait()
        for then in self._afterwards:
            then()


def _planned(
    names: ParamNames,
    params: Sequence[nn.Parameter],
    given: Mapping[str, Any] | None,
    plan: _Plan,
    keys: list[Any],
    *,
    owned: Owners,
    named: bool,
) -> dict[str, Any]:
    if not _is_state_dict(given):
        raise OptionError(
            "An optimizer state dict has 'state' and mostly 'param_groups'; got "
            f"{sorted(map(str, given)) if isinstance(given, Mapping) else given!r}."
        )
    assert given is not None
    by_name: dict[str, dict[str, Any]] = given["state"]
    positions = [key for key in by_name if not isinstance(key, str)]
    if positions:
        raise OptionError(
            f"The optimizer state dict is keyed by positions, {positions[0]!r} the first; expected names. Turn it by "
            "FSDP.rekey_optim_state_dict(state_dict, OptimStateKeyType.PARAM_NAME, model)."
        )
    ids = names.ids(params)
    elementwise = {key for row in by_name.values() for key, value in row.items() if not is_scalar(value)}
    state: dict[Any, dict[str, Any]] = {}
    seen: set[str] = set()
    for unit, handle, fqns in names.handles:
        seen.update(fqns)
        if any(fqn in by_name for fqn in fqns) and any(fqn in ids for fqn in fqns):
            visible = handle.views.visible_params()
            for index, values in _for_handle(unit, handle, fqns, by_name, elementwise, plan, owned).items():
                if (handle, index) in owned:
                    is_here = owned[handle, index] == handle.spec.rank
                else:
                    # torch's named optimizer requires every state; others have none for an empty local shard.
                    is_here = named or not is_on_other_ranks(visible[index], handle)
                if fqns[index] in ids and is_here:
                    state[keys[ids[fqns[index]]]] = values
    for param, name in names.others.items():
        seen.add(name)
        if name in by_name and name in ids:
            row = {key: _unmanaged_state(value, param, plan) for key, value in by_name[name].items()}
            state[keys[ids[name]]] = row
    _warn_left_out(names, ids, by_name)
    unknown = [name for name in by_name if name not in seen]
    if unknown:
        warnings.warn(
            f"The optimizer state dict has {len(unknown)} name(s) that this model does not have, {unknown[0]!r} "
            "the first; they are left out.",
            stacklevel=5,
        )
    groups = given.get("param_groups")
    return {"state": state} if groups is None else {"state": state, "param_groups": _groups(ids, keys, groups)}


def _warn_left_out(names: ParamNames, ids: dict[str, int], by_name: Mapping[str, Any]) -> None:
    """Warn of states that are not loaded: this rank has elements of their parameters, but its optimizer has none."""
    found = [
        fqn
        for _, handle, fqns in names.handles
        for fqn, local_shard in zip(fqns, handle.views.local_shards, strict=True)
        if fqn in by_name and fqn not in ids and local_shard.numel
    ]
    if found:
        warnings.warn(
            f"The optimizer state dict has states of {len(found)} parameter(s) that this optimizer does not hold, "
            f"{found[0]!r} the first; they are left out.",
            stacklevel=6,
        )


def _groups(ids: dict[str, int], keys: list[Any], given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = []
    for group in given:
        # The optimizer keeps the names that it was built with; the file's names cover the parameters of all ranks.
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        known = [fqn for fqn in group.get("params", []) if fqn in ids]
        groups.append({**settings, "params": [keys[position] for position in sorted({ids[fqn] for fqn in known})]})
    return groups


def _is_elementwise(key: str, value: Any, shape: tuple[int, ...], elementwise: set[str]) -> bool:
    """Return whether a state has one value per element of its parameter.

    For a parameter of shape () the number of dims does not decide: the states of the other parameters do, or else the
    name "step", torch's name of the step count.
    """
    if not is_scalar(value):
        return True
    if shape or not isinstance(value, (torch.Tensor, FromRankZero)):
        return False
    return key in elementwise if elementwise else key != "step"


def _for_handle(
    unit: Unit,
    handle: FlatParamHandle,
    fqns: tuple[str, ...],
    by_name: dict[str, dict[str, Any]],
    elementwise: set[str],
    plan: _Plan,
    owned: Owners,
) -> dict[int, dict[str, Any]]:
    """Return the states of this rank's visible parameters, by index (0 without original parameters)."""
    rows = [by_name.get(fqn) for fqn in fqns]
    visible = handle.views.visible_params()
    local_shards = handle.views.local_shards
    if not (len(visible) == 1 and visible[0] is handle.flat_param):
        found: dict[int, dict[str, Any]] = {}
        for index, row in enumerate(rows):
            if row is None:
                continue
            found[index] = {}
            if (handle, index) in owned:
                found[index] = _for_owner(unit, handle, index, fqns[index], row, plan, owned[handle, index])
                continue
            # Sorted, because every rank must exchange in the same order.
            for key in sorted(row):
                value = row[key]
                if key in unit.optim_state_handlers:
                    _split(unit, handle, index, key, value, found[index], plan)
                elif not _is_elementwise(key, value, handle.layout.param_infos[index].shape, elementwise):
                    found[index][key] = _plain(value)
                else:
                    flat = _new_local_shard(value, local_shards[index].numel, handle)
                    found[index][key] = flat.view(visible[index].shape)
                    _fill(unit, handle, index, f"State {key!r} of {fqns[index]!r}", value, flat, plan)
        return found
    _check_uniform(unit, fqns, rows)
    first = next(row for row in rows if row is not None)
    result: dict[str, Any] = {}
    for key in sorted(first):
        if key in unit.optim_state_handlers:
            _split(unit, handle, 0, key, first[key], result, plan)
        elif key not in elementwise and is_scalar(first[key]):
            result[key] = _plain(first[key])
        else:
            shard = result[key] = _new_shard(first[key], handle)
            for index, row in enumerate(rows):
                local_shard = shard[local_shards[index].in_shard.to_slice()]
                value = row[key] if row else None
                _fill(unit, handle, index, f"State {key!r} of {fqns[index]!r}", value, local_shard, plan)
    return {0: result}


def _for_owner(
    unit: Unit, handle: FlatParamHandle, index: int, fqn: str, row: dict[str, Any], plan: _Plan, owner: int
) -> dict[str, Any]:
    """Return the states of a parameter that one rank owns: full tensors there, of any shape."""
    rank_group, found = unit.options.groups.shard, {}
    is_owner = rank_group.rank == owner
    for key in sorted(row):
        value = row[key]
        if is_scalar(value):
            found[key] = _plain(value)
            continue
        shape = shape_of(value)
        target = _new_local_shard(value, math.prod(shape) if is_owner else 0, handle)
        if is_owner:
            found[key] = target.view(shape)
        _fill_owned(unit, handle, index, f"State {key!r} of {fqn!r}", value, target, plan, owner)
    return found


def _fill_owned(
    unit: Unit,
    handle: FlatParamHandle,
    index: int,
    what: str,
    value: Any,
    target: torch.Tensor,
    plan: _Plan,
    owner: int,
) -> None:
    """Plan how the owner of a state gets all of it (1-D); ``target`` is empty on other ranks."""
    rank_group, shape = unit.options.groups.shard, shape_of(value)
    is_owner, wanted = rank_group.rank == owner, ReplicatedPartition(math.prod(shape), owner, rank_group.size)
    if isinstance(value, FromRankZero):
        plan.scatter(value, wanted, target)
    elif is_chunked(value):
        spec = chunk_spec(unit, handle, index).as_given(value)
        chunk, problem = fitting_chunk(spec, value)
        if chunk is None or shape != spec.shape:
            raise LoadError(f"{what}: {problem or f'a tensor of shape {shape} in chunks; expected {spec.shape}.'}")
        plan.write_chunk(what, ShardWithSpec(replace(spec, local_shards=wanted), target), chunk)
    elif isinstance(value, BoxedTensor):
        if is_owner and value.boxes != boxes(shape, Interval(0, target.numel())):
            raise LoadError(
                f"{what}: {value!r} is not whole on rank {rank_group.rank} of the shard group, which owns the "
                "parameter. Boxes fit the optimizer that they were made for: load the checkpoint into this optimizer's "
                "own state dict with torch.distributed.checkpoint, which reshards."
            )
        if is_owner:
            plan.copy(target, value.parts[0].reshape(-1))
    elif isinstance(value, DeferredState):
        if is_owner:
            plan.copies.append(lambda: target.copy_(value.read().reshape(-1)))
    elif is_owner:
        plan.copy(target, value.detach().reshape(-1))


def _new_local_shard(value: Any, numel: int, handle: FlatParamHandle) -> torch.Tensor:
    """Allocate a local shard, all of which will be written."""
    return torch.empty(numel, dtype=dtype_of(value), device=handle.flat_param.device)


def _new_shard(value: Any, handle: FlatParamHandle) -> torch.Tensor:
    """Allocate a flat shard with zeroed padding; everything else will be written."""
    shard, own = _new_local_shard(value, handle.layout.shard_numel, handle), handle.layout.shard(handle.spec.rank)
    for padding in handle.layout.paddings():
        shard[own.intersect(padding).shift(-own.start).to_slice()].zero_()
    return shard


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _check_uniform(unit: Unit, fqns: tuple[str, ...], rows: list[dict[str, Any] | None]) -> None:
    have = {fqn: sorted(row) for fqn, row in zip(fqns, rows, strict=True) if row is not None}
    kinds = {tuple(keys) for keys in have.values()}
    lacking = [fqn for fqn in fqns if fqn not in have]
    if len(kinds) > 1 or (lacking and have):
        raise OptionError(
            f"With use_orig_params=False the parameters of unit {unit.name!r} share one state, so each needs the same "
            f"entries; got {have}{', nothing for ' + repr(lacking[0]) if lacking else ''}. Pass use_orig_params=True."
        )


def _split(
    unit: Unit, handle: FlatParamHandle, index: int, key: str, value: Any, result: dict[str, Any], plan: _Plan
) -> None:
    """Split this rank's part of a state off with its handler, now or as part of ``plan``."""
    refuse_split(handle, index, key)
    handler = unit.optim_state_handlers[key]
    assert isinstance(handler, OptimStateHandler)
    split, param_info = handler.split, handle.layout.param_infos[index]
    run = handle.views.local_shards[index].in_param

    def put(whole: torch.Tensor) -> None:
        result[key] = split(
            whole.detach().to(handle.flat_param.device), torch.Size(param_info.shape), run.start, run.stop
        )

    if isinstance(value, FromRankZero):
        plan.receive(value, handle.flat_param.device, put)
    elif isinstance(value, DeferredState):
        plan.copies.append(lambda: put(value.read()))
    elif isinstance(value, torch.Tensor) and not is_chunked(value):
        put(value)
    else:
        raise LoadError(
            f"State {key!r} of {param_info.fqn!r} has a handler, which takes the whole tensor that was saved; got a "
            f"{type(value).__name__}."
        )


def _fill(
    unit: Unit, handle: FlatParamHandle, index: int, what: str, value: Any, local_shard: torch.Tensor, plan: _Plan
) -> None:
    """Plan the copy or transfer that fills this rank's local shard of a state (1-D)."""
    rank_group, param_info = unit.options.groups.shard, handle.layout.param_infos[index]
    adapter = handle.views.params[index].adapter
    run = handle.views.local_shards[index].in_param.to_slice()
    shape = adapter.full_shape(param_info.shape)
    if shape_of(value) != shape:
        raise LoadError(
            f"{what} has shape {shape_of(value)}; expected {shape}, that of the parameter, on rank "
            f"{rank_group.rank} of the shard group. Is it the state dict of another model?"
        )
    if isinstance(value, FromRankZero):
        if adapter is not PLAIN:
            plan.receive(
                value, local_shard.device, lambda whole: local_shard.copy_(adapter.local_slice(whole).reshape(-1)[run])
            )
        else:
            plan.scatter(value, handle.layout.partition(index), local_shard)
    elif isinstance(value, BoxedTensor):
        check_boxes(value, handle, index)
        own = value
        plan.copies.append(lambda: boxes_to_shard(own, handle, index, local_shard))
    elif is_chunked(value):
        spec = chunk_spec(unit, handle, index).as_given(value)
        chunk, problem = fitting_chunk(spec, value)
        if chunk is None:
            raise LoadError(f"{what}: {problem}")
        plan.write_chunk(what, ShardWithSpec(spec, local_shard), chunk)
    else:
        plan.copy(local_shard, adapter.local_slice(value.detach()).reshape(-1)[run])


def _unmanaged_state(value: Any, param: nn.Parameter, plan: _Plan) -> Any:
    """Return a state of a parameter that no unit manages."""
    if isinstance(value, FromRankZero):
        target = torch.empty(value.shape.numel(), dtype=value.dtype, device=param.device)
        plan.scatter(value, ReplicatedPartition(target.numel(), None, value.groups.shard.size), target)
        return target.view(value.shape)
    return _plain(value)
