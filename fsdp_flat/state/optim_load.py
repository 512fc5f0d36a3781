"""Implements ``optim_state_dict_to_load``: converts states under parameter names to this rank's optimizer state dict.

Everything is checked before anything is written. Each rank loads full tensors without communication. Before chunks or
rank 0's tensors are sent, ranks agree that everything fits.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import ShardedOptimStateDictConfig
from fsdp_flat.comm import agree, barrier, exchange_bytes
from fsdp_flat.errors import LoadError, OptionError, PeerFailureError, UnsupportedError, UsageError
from fsdp_flat.flat import PLAIN, clear_padding
from fsdp_flat.layout import Partition, ReplicatedPartition
from fsdp_flat.runtime import Unit, units_of
from fsdp_flat.state.codecs import BOXES, FULL, decoder_of
from fsdp_flat.state.model_load import LOADING
from fsdp_flat.state.shards import (
    IndexedParam,
    LoadPlan,
    OptimContents,
    ParamIndex,
    StateShard,
    TensorTransfer,
    copied_state,
    is_scalar,
    refuse_split,
    shape_of,
)
from fsdp_flat.state.torch_state import dtensor_from, empty_dtensor, local_from
from fsdp_flat.user_warnings import warn_user

_LIVE_BOXES = ShardedOptimStateDictConfig(offload_to_cpu=False, boxes=True)


def load_optim_state(
    model: nn.Module,
    contents: OptimContents,
    given: Mapping[str, Any] | None,
    *,
    named: bool = False,
    from_rank_zero: bool = False,
    expects_chunks: bool = False,
) -> dict[str, Any]:
    """Convert ``given``, which is keyed by names, to the state dict that an optimizer loads.

    Values may be of any codec's kind. With ``from_rank_zero``, or if decoding any value takes an exchange (DTensors
    and ShardedTensors do), every rank must call this; then an error of any rank stops all.

    Args:
        model: the model that the optimizer was built from.
        contents: the optimizer's parameters; its groups, if they are known, must be those of ``given``.
        given: ``{"state": {name: {...}}, "param_groups": [...]}``; without ``param_groups`` the result has none.
        named: keys of the result are the names of ``model.named_parameters()``, as in torch's named optimizer.
        from_rank_zero: only the first rank of the model's groups has ``given``, as full tensors.
        expects_chunks: if ``given`` is no optimizer state dict, other ranks were given chunks.
    """
    index = ParamIndex(model)
    if from_rank_zero and index.units:
        # The groups of some units may be smaller: those of experts.
        widest = max(units_of(model), key=lambda unit: unit.options.groups.num_ranks)
        given = _shared_from_rank_zero(widest, given)
    loading = _OptimLoad(index, contents)
    result: dict[str, Any] = {}
    error: Exception | None = None
    try:
        result = loading.planned(given, named=named)
        if contents.groups and not named and given and given.get("param_groups"):
            contents.check_groups(index, given["param_groups"])
    except Exception as found:
        error = found
    if index.units and (from_rank_zero or _takes_exchange(given, otherwise=expects_chunks)):
        for rank_group in index.rank_groups:
            barrier("optim_state_dict_to_load", rank_group)
        agree(loading.plan.lines, error, index.rank_groups, index.device, LOADING)
    elif error is not None:
        raise error
    loading.plan.commit()
    return result


def _is_state_dict(given: Any) -> bool:
    return isinstance(given, Mapping) and isinstance(given.get("state"), Mapping)


def _takes_exchange(given: Any, *, otherwise: bool) -> bool:
    """Return whether decoding any value takes an exchange; ``otherwise`` if ``given`` is no optimizer state dict."""
    if not _is_state_dict(given):
        return otherwise
    rows = [row for row in given["state"].values() if isinstance(row, Mapping)]
    return any(decoder_of(value).exchanges for row in rows for value in row.values())


class _OptimLoad:
    """Plans the load of one optimizer state dict; ``plan`` fills the tensors of the result."""

    def __init__(self, index: ParamIndex, contents: OptimContents) -> None:
        self.plan = LoadPlan()
        self._index = index
        self._contents = contents
        self._elementwise: set[str] = set()

    def planned(self, given: Mapping[str, Any] | None, *, named: bool) -> dict[str, Any]:
        """Return the state dict that the optimizer loads.

        If it is ``named`` every parameter needs a state; others have none for an empty shard.
        """
        index, params = self._index, self._contents.params
        keys = [index.shown_names[param] if named else position for position, param in enumerate(params)]
        by_name = _checked_states(given)
        self._elementwise = {key for row in by_name.values() for key, value in row.items() if not is_scalar(value)}
        positions = {fqn: at for at, param in enumerate(params) for fqn in index.fqns_of(param)}
        # An optimizer may be built from only the parameters that its rank has elements of; all ranks exchange them.
        held = {param.handle for param in index.params if param.fqn in positions}
        state: dict[Any, dict[str, Any]] = {}
        for visible, entries in index.managed.items():
            first, rows = entries[0], [by_name.get(entry.fqn) for entry in entries]
            if first.handle not in held or not any(row is not None for row in rows):
                continue
            owner = self._contents.owners.get(visible)
            row = self._managed_row(visible, entries, rows, owner)
            is_here = named or not first.is_on_other_ranks if owner is None else owner == first.rank_group.rank
            if is_here and first.fqn in positions:
                state[keys[positions[first.fqn]]] = row
        for param, name in index.others.items():
            if name in by_name and name in positions:
                row = {key: self._unmanaged_state(key, value, param) for key, value in by_name[name].items()}
                state[keys[positions[name]]] = row
        _warn_left_out(index, positions, by_name)
        groups = None if given is None else given.get("param_groups")
        return {"state": state, **({} if groups is None else {"param_groups": _groups(positions, keys, groups)})}

    def _managed_row(
        self,
        visible: nn.Parameter,
        params: Sequence[IndexedParam],
        rows: Sequence[Mapping[str, Any] | None],
        owner: int | None,
    ) -> dict[str, Any]:
        """Return the states of a parameter of the optimizer, put together from those of the parameters in it.

        The states of a parameter that one rank of the shard group owns have any shape; other ranks' are empty.
        """
        first, found = params[0], dict[str, Any]()
        if not first.is_original:
            _check_uniform(params, rows)
        device, layout = first.handle.flat_param.device, first.handle.layout

        def empty(value: Any, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.empty(shape, dtype=decoder_of(value).decoded_dtype(value), device=device)

        # Sorted, because every rank must exchange in the same order.
        for key in sorted(rows[0] or ()):
            values = [row[key] for row in rows if row is not None]
            value = values[0]
            if owner is None and key in first.unit.optim_state_handlers:
                self._split(first, key, value, found)
            elif is_scalar(value) and not (owner is None and first.shape == () and self._is_zero_dim_state(key, value)):
                found[key] = copied_state(value)
            elif owner is not None:
                shape = shape_of(value)
                found[key] = empty(value, shape if owner == first.rank_group.rank else (0,))
                self._fill(StateShard(first, found[key].view(-1), shape, key, owner), value)
            else:
                shard = empty(value, (first.local_shard.numel if first.is_original else layout.shard_numel,))
                found[key] = shard if visible.dim() == 1 else shard.view(visible.shape)
                if not first.is_original:
                    # The padding is zero; everything else will be written.
                    clear_padding(shard, layout, first.rank_group.rank)
                for param, each in zip(params, values, strict=True):
                    self._fill(StateShard(param, param.part_of(shard), param.shape, key), each)
        return found

    def _is_zero_dim_state(self, key: str, value: Any) -> bool:
        """Return whether a state of a parameter of shape () has one value per element: the number of dims says nothing.

        The states of the other parameters decide, or else the name "step", torch's name of the step count.
        """
        if not isinstance(value, (torch.Tensor, PendingTensor, *decoder_of(value).kinds)):
            return False
        return key in self._elementwise if self._elementwise else key != "step"

    def _fill(self, target: StateShard, value: Any) -> None:
        """Plan the copy or transfer that fills this rank's part of a state."""
        if shape_of(value) != target.full_shape:
            raise LoadError(
                f"{target.label} has shape {shape_of(value)}; expected {target.full_shape}, that of the parameter, on "
                f"rank {target.param.rank_group.rank} of the shard group. Is it the state dict of another model?"
            )
        if isinstance(value, PendingTensor):
            value.plan_shard(target, self.plan)
        else:
            decoder_of(value).decode(value, target, self.plan)

    def _split(self, param: IndexedParam, key: str, value: Any, result: dict[str, Any]) -> None:
        """Split this rank's part of a state off with its handler, now or as part of the plan."""
        refuse_split(param, key)
        run, device = param.local_shard.in_param, param.handle.flat_param.device
        handler = param.unit.optim_state_handlers[key]

        def put(full: torch.Tensor) -> None:
            result[key] = handler.split(full.detach().to(device), torch.Size(param.shape), run.start, run.stop)

        if isinstance(value, PendingTensor):
            value.plan_full(device, self.plan, put)
        elif isinstance(value, torch.Tensor) and decoder_of(value) is FULL:
            put(value)
        else:
            raise LoadError(
                f"State {key!r} of {param.fqn!r} has a handler, which takes the full tensor that was saved; got a "
                f"{type(value).__name__}."
            )

    def _unmanaged_state(self, key: str, value: Any, param: nn.Parameter) -> Any:
        """Return a state of a parameter that no unit manages."""
        shown = None if is_scalar(value) else self._index.dtensors.get(param)
        label = f"State {key!r} of {shown.fqn!r}" if shown is not None else ""
        if not isinstance(value, FromRankZero):
            return copied_state(value) if shown is None else dtensor_from(shown, value, label)
        if shown is None:
            return value.plan_full(param.device, self.plan)
        sharded = empty_dtensor(shown, value.dtype, shown.handle.flat_param.device)
        if value.shape != sharded.shape:
            raise LoadError(f"{label} has shape {tuple(value.shape)}; expected {tuple(sharded.shape)}.")
        device, local = shown.unit.options.device, sharded.to_local()
        value.plan_full(device, self.plan, lambda full: local.copy_(local_from(shown, full)))
        return sharded


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """Describes a full tensor that this rank gets when a load is committed."""

    shape: torch.Size
    dtype: torch.dtype

    def plan_full(self, device: torch.device, plan: LoadPlan, then: Callable[[torch.Tensor], object]) -> object:
        """Plan a call of ``then`` with the full tensor."""
        raise NotImplementedError

    def plan_shard(self, target: StateShard, plan: LoadPlan) -> None:
        """Plan how ``target`` gets its elements."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class DeferredState(PendingTensor):
    """Describes a state that is read only when it is needed, so that no rank holds all of them at once."""

    read: Callable[[], torch.Tensor]

    def plan_full(self, device: torch.device, plan: LoadPlan, then: Callable[[torch.Tensor], object]) -> None:
        plan.call(lambda: then(self.read()))

    def plan_shard(self, target: StateShard, plan: LoadPlan) -> None:
        if not target.run.is_empty:
            plan.call(lambda: target.local.copy_(self.read().reshape(-1)))


@dataclass(frozen=True, slots=True)
class FromRankZero(PendingTensor):
    """Describes a tensor that only the first rank of a model's shard and replicate groups holds; None elsewhere."""

    tensor: torch.Tensor | None
    unit: Unit

    def plan_full(
        self, device: torch.device, plan: LoadPlan, then: Callable[[torch.Tensor], object] | None = None
    ) -> torch.Tensor:
        """Plan how every rank gets the full tensor, which is returned, and a call of ``then`` once it is there."""
        full = torch.empty(self.shape, dtype=self.dtype, device=device)
        wanted = ReplicatedPartition(full.numel(), None, self.unit.options.groups.shard.size)
        self._plan_transfer(wanted, full.view(-1), plan)
        if then is not None:
            plan.call(partial(then, full), last=True)
        return full

    def plan_shard(self, target: StateShard, plan: LoadPlan) -> None:
        local, adapter, run = target.local, target.param.adapter, target.run.to_slice()
        if adapter is PLAIN and target.param.unit.options.groups.rank_groups == self.unit.options.groups.rank_groups:
            self._plan_transfer(target.held, local, plan)
        else:
            self.plan_full(local.device, plan, lambda full: local.copy_(adapter.local_slice(full).reshape(-1)[run]))

    def _plan_transfer(self, wanted: Partition, target: torch.Tensor, plan: LoadPlan) -> None:
        groups, device, numel = self.unit.options.groups, self.unit.options.device, self.shape.numel()
        shard, replicate, first, second = groups.shard, groups.replicate, None, None
        if replicate.rank == 0:
            source = None if self.tensor is None else self.tensor.detach().reshape(-1)
            held, nbytes = ReplicatedPartition(numel, 0, shard.size), numel * self.dtype.itemsize
            first = TensorTransfer(shard, held, wanted, source, target, device, nbytes)
        if replicate.size > 1:
            # Each rank of the first shard group has its part now; send them to the other replicas.
            held, wanted = (ReplicatedPartition(target.numel(), dst, replicate.size) for dst in (0, None))
            source, received = (None, target) if replicate.rank else (target, None)
            second = TensorTransfer(replicate, held, wanted, source, received, device, target.nbytes)
        plan.transfer(first, second)


def _shared_from_rank_zero(unit: Unit, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Broadcast rank 0's ``given`` over the groups of ``unit``, with :class:`FromRankZero` in place of its tensors.

    Every rank must call this; an error of rank 0 is raised on all.
    """
    groups, device = unit.options.groups, unit.options.device
    if groups.num_ranks == 1:
        return dict(given or {})
    is_first = not any(rank_group.rank for rank_group in groups.rank_groups)
    error: Exception | None = None
    payload = b""
    try:
        payload = _serialized(_described(given)) if is_first else b""
    except Exception as raised:
        error = raised
        payload = _serialized({"error": f"{type(raised).__name__}: {raised}"})
    for rank_group in groups.rank_groups:
        if rank_group.group is not None:
            payload = exchange_bytes(payload, rank_group.group, device)[0]
    if error is not None:
        raise error
    described = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    if "error" in described:
        raise PeerFailureError(f"Rank 0 of the group cannot share its optimizer state dict: {described['error']}")
    own = given["state"] if given and is_first else None
    for name, row in described["state"].items():
        for key, value in row.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                row[key] = FromRankZero(value.shape, value.dtype, own[name][key] if own else None, unit)
    return dict(described)


def _serialized(value: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _described(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a state dict with a tensor on the meta device in place of each state that has dims."""
    if not given or "state" not in given:
        has = "nothing" if not given else sorted(map(str, given))
        raise UsageError(f"An optimizer state dict has 'state' and mostly 'param_groups'; rank 0 has {has}.")
    state: dict[str, dict[str, Any]] = {}
    for name, row in given["state"].items():
        state[name] = {}
        for key, value in row.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name][key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            else:
                state[name][key] = _checked(value, f"State {key!r} of {name!r}")
    described: dict[str, Any] = {"state": state}
    if given.get("param_groups") is not None:
        described["param_groups"] = [
            {key: _checked(value, f"Setting {key!r} of a parameter group") for key, value in group.items()}
            for group in given["param_groups"]
        ]
    return described


def _checked(value: Any, what: str) -> Any:
    """Return a plain value, of exactly its plain type, which ``weights_only`` accepts; raise for others."""
    if isinstance(value, (list, tuple)):
        entries = [_checked(entry, what) for entry in value]
        return entries if isinstance(value, list) else tuple(entries)
    if isinstance(value, torch.Tensor) and not value.dim():
        # A clone, since all of a view's storage would be sent.
        return value.detach().cpu().clone()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UnsupportedError(
        f"{what} is a {type(value).__name__}, which cannot be sent to other ranks. Load the dict on every rank and use "
        "rank0_only=False."
    )


def _checked_states(given: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
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
    return by_name


def _warn_left_out(index: ParamIndex, positions: Mapping[str, int], by_name: Mapping[str, Any]) -> None:
    """Warn of states that are not loaded: of parameters that the optimizer, or the model, does not have."""
    # Only of parameters that this rank has elements of: its optimizer may be built from these alone.
    found = [
        param.fqn
        for param in index.params
        if param.fqn in by_name and param.fqn not in positions and param.local_shard.numel
    ]
    known = {*(param.fqn for param in index.params), *index.others.values()}
    unknown = [name for name in by_name if name not in known]
    for names, told in (
        (found, f"states of {len(found)} parameter(s) that this optimizer does not hold"),
        (unknown, f"{len(unknown)} name(s) that this model does not have"),
    ):
        if names:
            text = f"The optimizer state dict has {told}, {names[0]!r} the first; they are left out."
            warn_user(text, stacklevel=5)


def _groups(positions: Mapping[str, int], keys: Sequence[Any], given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = []
    for group in given:
        # The optimizer keeps the names that it was built with; the file's names cover the parameters of all ranks.
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        known = {positions[fqn] for fqn in group.get("params", []) if fqn in positions}
        groups.append({**settings, "params": [keys[position] for position in sorted(known)]})
    return groups


def _check_uniform(params: Sequence[IndexedParam], rows: Sequence[Mapping[str, Any] | None]) -> None:
    have = {param.fqn: sorted(row) for param, row in zip(params, rows, strict=True) if row is not None}
    kinds = {tuple(keys) for keys in have.values()}
    lacking = [param.fqn for param in params if param.fqn not in have]
    if len(kinds) > 1 or (lacking and have):
        raise OptionError(
            f"With use_orig_params=False the parameters of unit {params[0].unit.name!r} share one state, so each needs "
            f"the same entries; got {have}{', nothing for ' + repr(lacking[0]) if lacking else ''}. Pass "
            "use_orig_params=True."
        )


def template_states(
    model: nn.Module,
    wanted: Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
    read: Callable[[str, str, torch.Size, torch.dtype], torch.Tensor],
    *,
    owners: Mapping[nn.Parameter, int],
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, DeferredState]]]:
    """Create zero tensors for optimizer states on the CPU; those of managed parameters are boxes of this rank's shards.

    ``wanted`` has shapes and dtypes by the names of parameter and state, and ``owners`` is that of the optimizer's
    contents. States that have a handler or an owner, which are full tensors, are returned apart, to be read later.
    """
    index = ParamIndex(model)
    others = {name: tuple(param.shape) for param, name in index.others.items()}
    found: dict[str, dict[str, torch.Tensor]] = {}
    deferred: dict[str, dict[str, DeferredState]] = {}
    for fqn, states in wanted.items():
        param = index.by_name.get(fqn)
        if param is None and fqn not in others:
            raise LoadError(
                f"The optimizer state of {fqn!r} belongs to no parameter of this model. Nothing was loaded."
            )
        for name, (shape, dtype) in states.items():
            if param is not None and (param.shown in owners or name in param.unit.optim_state_handlers):
                # Saved as a full tensor, in a shape that only the handler or the optimizer defines.
                size = torch.Size(shape)
                deferred.setdefault(fqn, {})[name] = DeferredState(size, dtype, partial(read, fqn, name, size, dtype))
                continue
            expected = others[fqn] if param is None else param.full_shape
            if shape != expected:
                raise LoadError(
                    f"State {name!r} of {fqn!r} has shape {shape}; expected {expected}, that of the parameter. If a "
                    f"handler made it, register that first: fsdp_flat.register_optim_state_handler(model, {name!r}, "
                    "merge=..., split=...). Nothing was loaded."
                )
            value: torch.Tensor
            if param is not None:
                local = torch.zeros(param.local_shard.numel, dtype=dtype)
                (value,) = BOXES.encode([StateShard(param, local, param.shape)], _LIVE_BOXES)
            elif fqn in index.dtensors_by_name and shape:
                value = empty_dtensor(index.dtensors_by_name[fqn], dtype, torch.device("cpu"))
            else:
                value = torch.zeros(shape, dtype=dtype)
            found.setdefault(fqn, {})[name] = value
    return found, deferred
