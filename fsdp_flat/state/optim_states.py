"""Reads an optimizer's states by parameter, compares them between ranks and completes those of empty local shards."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.comm import (
    ErrorTexts,
    RankGroup,
    UntilRanksMeet,
    agree,
    barrier,
    digest_of,
    dtype_from_name,
    exchange_bytes,
    fingerprint,
    global_ranks,
)
from fsdp_flat.errors import OptionError, PhaseError, UnsupportedError, UsageError, counted, some_of
from fsdp_flat.layout import clean_fqn
from fsdp_flat.state.codecs import contained_tensors, holds_tensors
from fsdp_flat.state.plain_states import plain_states, without_hidden
from fsdp_flat.state.shards import (
    IndexedParam,
    OptimContents,
    ParamIndex,
    StateShard,
    check_rows,
    check_states,
    copied_state,
    held_by,
    is_scalar,
    rank_groups_of,
    refuse_split,
)
from fsdp_flat.state.state_settings import own_settings
from fsdp_flat.user_warnings import warn_user

# A plain state, or a digest of it, as a pair of JSON, by name.
PlainRow = dict[str, list[Any]]
# The kind of a described container of tensors.
_WHOLE = "whole"
_SAVING = ErrorTexts(
    "saving an optimizer's state", "Ranks save different optimizer states.", "Save the same on every rank."
)
_COMPARED = (int, float, complex, str, bytes, type(None))


def _plain_to_json(value: Any) -> list[Any]:
    """Encode a non-tensor state, equal on every rank for equal values; pickled if JSON lacks the type.

    A container of tensors, which only ranks keep that have the whole parameter, is described and cannot be decoded.
    """
    if isinstance(value, torch.Tensor):
        number = value.item()
        return [str(value.dtype), [number.real, number.imag] if value.is_complex() else number]
    if type(value) in (int, float, str, bool, type(None)):
        return ["", value]
    if holds_tensors(value):
        return [_WHOLE, type(value).__name__]
    return ["pickle", base64.b64encode(pickle.dumps(value)).decode()]


def _plain_from_json(kind: str, value: Any) -> Any:
    """Decode a value that :func:`_plain_to_json` encoded on a rank of the same job."""
    if kind == "pickle":
        return pickle.loads(base64.b64decode(value))
    value = complex(*value) if isinstance(value, list) else value
    return torch.tensor(value, dtype=dtype_from_name(kind)) if kind else value


@dataclass(slots=True)
class ParamState:
    """Holds the optimizer states of one parameter, by name: tensors of several elements, those with handlers, others.

    ``owner`` is the rank of the shard group that has them all; ``is_held``: this rank's optimizer holds the parameter.
    A state with a handler is None if only other ranks have it. ``numel`` is the number of elements that this rank must
    have states of; owners have all states of their parameters.
    """

    param: IndexedParam
    owner: int | None
    is_held: bool
    numel: int
    tensors: dict[str, StateShard] = field(default_factory=dict)
    handled: dict[str, torch.Tensor | None] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    def names(self) -> set[str]:
        """Return the names of the states."""
        return {*self.tensors, *self.handled, *self.plain}

    def describe(self) -> list[Any]:
        """Describe the states as JSON, equal on every rank that has the same ones: tensors by name and dtype."""
        tensors = {
            name: [str(shard.local.dtype), [] if self.owner is None else shard.shape]
            for name, shard in sorted(self.tensors.items())
        }
        plain = {name: _plain_to_json(value) for name, value in sorted(self.plain.items())}
        return [tensors, sorted(self.handled), plain, self.is_held]

    def complete(self, tensors: dict[str, Any], handled: list[str], plain: dict[str, Any], _is_held: bool) -> None:
        """Add the states that another rank has described."""
        for name, (dtype_name, shape) in tensors.items():
            if name not in self.tensors:
                shape, numel = (self.param.shape, self.param.numel) if self.owner is None else (shape, 0)
                device = self.param.param_group.spec.shard_device
                local = torch.zeros(numel, dtype=dtype_from_name(dtype_name), device=device)
                self.tensors[name] = StateShard(self.param, local, tuple(shape), name, self.owner)
            elif str(self.tensors[name].local.dtype) != dtype_name:
                raise OptionError(
                    f"State {name!r} of {self.param.fqn!r} (unit {self.param.unit.name!r}) is "
                    f"{self.tensors[name].local.dtype} on rank {self.param.rank_group.rank} of the shard group and "
                    f"{dtype_name} on another."
                )
        for name in handled:
            self.handled.setdefault(name, None)
        for name, encoded in plain.items():
            if name not in self.plain and encoded[0] != _WHOLE:
                self.plain[name] = _plain_from_json(*encoded)


def contents_of(optim: Any, index: ParamIndex, state_dict: Any = None) -> OptimContents:
    """Return the contents of ``state_dict``, or else of ``optim.state_dict()``.

    Keys are positions, or as in torch's named optimizer the names of ``model.named_parameters()``, which ``index`` has.
    """
    held = held_by(optim)
    if state_dict is None and _has_plain_state_dict(optim):
        # Torch's own method fails if a parameter was taken out of its group while its states are still there.
        rows, groups = optim.state, held.groups
    else:
        given = check_states(optim.state_dict() if state_dict is None else state_dict)
        by_name = {clean_fqn(name): param for param, name in index.shown_names.items()}

        def of(key: Any) -> nn.Parameter:
            is_position = isinstance(key, int) and 0 <= key < len(held.params)
            found = held.params[key] if is_position else by_name.get(clean_fqn(str(key)))
            if found is None:
                raise OptionError(f"An optimizer state dict has the key {key!r}, which is no parameter of this model.")
            return found

        is_own = state_dict is None
        rows = {
            key if is_own and isinstance(key, str) and clean_fqn(key) not in by_name else of(key): row
            for key, row in given["state"].items()
        }
        groups = given.get("param_groups")
        groups = groups and tuple({**group, "params": [of(key) for key in group["params"]]} for group in groups)
    # A subclass may keep states of the whole optimizer under names of its own.
    alone = [str(key) for key in rows if not isinstance(key, torch.Tensor)]
    if alone:
        warn_user(
            f"{type(optim).__name__} has states that belong to no parameter, {some_of(alone, 6)}; they are left out of "
            "the state dict. Save them beside it."
        )
        rows = {key: row for key, row in rows.items() if isinstance(key, torch.Tensor)}
    check_rows(rows)
    return replace(held, state={param: without_hidden(row) for param, row in rows.items()}, groups=groups)


def _has_plain_state_dict(optim: Any) -> bool:
    """Return whether ``optim.state_dict()`` has what ``optim.state`` has: nothing overrides it, and it has no hooks."""
    method = getattr(optim, "state_dict", None)
    pre = getattr(optim, "_optimizer_state_dict_pre_hooks", None)
    hooks = pre or getattr(optim, "_optimizer_state_dict_post_hooks", None)
    return method is None or (getattr(method, "__func__", None) is torch.optim.Optimizer.state_dict and not hooks)


@dataclass(slots=True)
class OptimStates:
    """Holds an optimizer's states on this rank, and what its ranks have to have alike.

    Attributes:
        contents: what the optimizer holds, without tensors made of others.
        names: names of its parameters in its order, then of those in each group.
        states: those of the parameters that units manage, in the model's order; shards are views of its tensors.
        whole: described as JSON, the states of parameters of ``fully_shard`` that every rank has whole.
    """

    index: ParamIndex
    contents: OptimContents
    names: list[list[str]]
    states: list[ParamState]
    whole: dict[IndexedParam, PlainRow]

    @classmethod
    def read(
        cls, index: ParamIndex, contents: OptimContents, *, compares: bool, keeps_dtensors: bool, in_boxes: bool = False
    ) -> OptimStates:
        """Read this rank's states of every parameter.

        Args:
            index: that of the model.
            contents: the optimizer's.
            compares: ranks compare their states, so those that each has whole are described.
            keeps_dtensors: containers hold DTensors as they are; else they are refused, as each rank has other parts.
            in_boxes: tensors made of others are read as a checkpoint has them.
        """
        contents = replace(contents, state=plain_states(contents.state, index, in_boxes=in_boxes))
        names, held = _names(index, contents), set(contents.params)
        found: dict[IndexedParam, ParamState] = {}
        for visible, params in index.managed.items():
            owner, states = contents.owners.get(visible), list[ParamState]()
            for param in params:
                found[param] = state = ParamState(param, owner, visible in held, param.numel if owner is None else 0)
                states.append(state)
            # States of empty local shards are never updated (a step count, for one): use those of other ranks.
            if visible in held and visible in contents.state and params[0].has_states(owner):
                _read(states, visible, contents.state[visible])
        whole: dict[IndexedParam, PlainRow] = {}
        for visible, param in index.dtensors.items() if compares else ():
            whole[param] = _read_whole(param, contents.state.get(visible, {}), keeps_dtensors=keeps_dtensors)
        return cls(index, contents, names, [found[param] for param in index.params], whole)

    def digests(self) -> list[int]:
        """Return integers that a rank compares with others: of what all have, and of the states of each parameter.

        Those of a parameter are 0 without its states and elements of it: a rank may lack the states of no elements.
        """
        found = [digest_of(json.dumps([self.names, list(self.whole.values())]).encode())]
        for state in self.states:
            has_any = state.numel or state.tensors or state.handled or state.plain
            found.append(digest_of(json.dumps(state.describe()).encode()) if has_any else 0)
        return found

    def described(self) -> list[Any]:
        """Describe all of it as JSON: names, states, and states that every rank has whole, alike on all ranks."""
        return [self.names, [state.describe() for state in self.states], list(self.whole.values())]

    def numels(self) -> list[int]:
        """Return the number of elements of each parameter that this rank must have states of."""
        return [*(state.numel for state in self.states), *(param.numel for param in self.whole)]

    def over(self, rank_group: RankGroup) -> OptimStates:
        """Return those that the ranks of a group have alike, of the units on the group; names are shared."""
        units = {unit for unit in self.index.units if rank_group in rank_groups_of([unit])}
        states = [state for state in self.states if state.param.unit in units]
        whole = {param: row for param, row in self.whole.items() if param.unit in units}
        return replace(self, states=states, whole=whole)

    def complete(self, ranks: Sequence[int], everyone: Sequence[Sequence[Any]]) -> None:
        """Complete states and names from what each of ``ranks`` has :meth:`described`, with its :meth:`numels`.

        Raises if a rank lacks a state of elements that it has, or has another value of a state that is one for all
        ranks.
        """
        each_names, each_states, each_whole, each_numels, *_ = zip(*everyone, strict=True)
        lacking: dict[tuple[int, str], list[str]] = {}
        for at, state in enumerate(self.states):
            kept = [
                {*tensors, *handled, *plain, *(["a place in a parameter group"] if is_held else ())}
                for tensors, handled, plain, is_held in (described[at] for described in each_states)
            ]
            anywhere = set().union(*kept)
            for rank, here, numels in zip(ranks, kept, each_numels, strict=True):
                if anywhere - here and numels[at]:
                    lacking.setdefault((rank, ", ".join(sorted(anywhere - here))), []).append(str(state.param))
        if lacking:
            told = "; ".join(
                f"rank {rank} lacks {keys} of {some_of(fqns, 12)}" for (rank, keys), fqns in lacking.items()
            )
            raise UsageError(
                f"Optimizer states that other ranks have are missing, so nothing was saved: {told}. A rank may lack "
                "the states of parameters that it has no elements of, and no others: build the optimizer from the "
                "same parameters on every rank, and step it on every rank or on none."
            )
        rows = [
            [*(plain for _, _, plain, _ in described), *whole]
            for described, whole in zip(each_states, each_whole, strict=True)
        ]
        _check_equal([*(state.param for state in self.states), *self.whole], rows, each_numels, ranks)
        for at, state in enumerate(self.states):
            for described in each_states:
                state.complete(*described[at])
        if each_names.count(self.names) < len(each_names):
            _merge_names(self.index, self.names, each_names)


def _names(index: ParamIndex, contents: OptimContents) -> list[list[str]]:
    """Return the names of an optimizer's parameters in its order, then those in each of its groups.

    FSDP1 saves flat parameters in that order; if all parameters are original, which are sorted, none are first.
    """
    names = [[fqn for param in group["params"] for fqn in index.fqns_of(param)] for group in contents.groups or ()]
    if all(unit.options.use_orig_params for unit in index.units):
        return [[], *names]
    # An optimizer may show groups that its state dict lacks, of tensors that the model has not (mmengine's wrapper).
    order = [fqn for each in names for fqn in each]
    return [order if contents.groups else [fqn for param in contents.params for fqn in index.fqns_of(param)], *names]


def _read(states: Sequence[ParamState], visible: nn.Parameter, values: Mapping[str, Any]) -> None:
    """Read the states of a parameter of the optimizer, which may hold several parameters of the model."""
    first, is_owned = states[0].param, states[0].owner is not None
    where = f"{first.fqn!r} (unit {first.unit.name!r})"
    for name, value in values.items():
        if name in own_settings(first.unit).optim_handlers and not is_owned:
            if len(states) > 1:
                raise UnsupportedError(
                    f"State {name!r} of unit {first.unit.name!r} has a handler, but belongs to a flat parameter of "
                    f"{counted(len(states), 'parameters')}, {first.fqn!r} the first. Pass use_orig_params=True."
                )
            if not isinstance(value, torch.Tensor):
                raise UnsupportedError(
                    f"State {name!r} of {where} has a handler, which merges tensors; the optimizer keeps a "
                    f"{type(value).__name__} there. Register the handler for tensors only."
                )
            refuse_split(first, name)
            states[0].handled[name] = value
        elif is_scalar(value):
            has_tensors = not isinstance(value, torch.Tensor) and holds_tensors(value, min_dim=0 if is_owned else 1)
            if has_tensors and (is_owned or first.is_split):
                raise _container_error(name, where, value)
            for state in states:
                state.plain[name] = copied_state(value, "cpu")
        elif value.shape != visible.shape and not is_owned:
            raise UnsupportedError(
                f"State {name!r} of {where} has shape {tuple(value.shape)} on rank {first.rank_group.rank} of the "
                "shard group; it is neither a scalar nor shaped like the rank's part of the parameter, "
                f"{tuple(visible.shape)}. Say how it is put together by fsdp_flat.register_optim_state_handler"
                f"(model, {name!r}, merge=..., split=...)."
            )
        else:
            for state in states:
                shape = tuple(value.shape) if is_owned else state.param.shape
                local = state.param.part_of(value.detach().reshape(-1))
                state.tensors[name] = StateShard(state.param, local, shape, name, state.owner)


def _read_whole(param: IndexedParam, values: Mapping[str, Any], *, keeps_dtensors: bool) -> PlainRow:
    """Describe as JSON the states of a parameter of ``fully_shard`` that are no DTensors: every rank has each whole."""
    row: PlainRow = {}
    for name, value in sorted(values.items()):
        if not isinstance(value, torch.Tensor):
            if holds_tensors(value) and param.is_split:
                others = [each for each in contained_tensors(value) if each.dim() and not isinstance(each, DTensor)]
                if others or not keeps_dtensors:
                    raise _container_error(name, str(param), value)
                continue
            row[name] = _plain_to_json(value)
        elif not isinstance(value, DTensor):
            kind = f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
            is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
            row[name] = _plain_to_json(value) if not value.dim() else [kind, fingerprint(value) if is_plain else 0]
    return row


def are_equal(digests: Sequence[Sequence[int]]) -> bool:
    """Return whether all ranks have said the same in their :meth:`OptimStates.digests`, given by position."""
    return len({*digests[0]}) == 1 and all(len({*each} - {0}) <= 1 for each in digests[1:])


def complete_over_groups(
    index: ParamIndex, own: OptimStates | None, until_met: UntilRanksMeet, *, rank0_only: bool
) -> bool:
    """Complete the states and names of this rank from those of the others, group by group.

    Every rank must call this, even one that could not read its states, which ``until_met`` says: then all raise. If all
    ranks have the same states they meet once, and exchange nothing. Returns whether all have said ``rank0_only``.
    """
    rank_groups, lines = index.rank_groups, list[str]()
    for visible, param in index.dtensors.items():
        for key, value in sorted(own.contents.state.get(visible, {}).items()) if own is not None else ():
            if isinstance(value, DTensor):
                lines.append(f"state {key!r} of {param.fqn!r}")
    # Over groups that are the lines of one grid, what ranks of one find differing is told to all on the way.
    is_grid = all(rank_groups_of([unit]) == rank_groups for unit in index.units)
    must_agree = not is_grid
    for rank_group in rank_groups:
        here = None if own is None or until_met.error is not None else own if is_grid else own.over(rank_group)
        described = None if here is None else here.described()
        told = json.dumps([must_agree, lines, described, rank0_only])
        if barrier("optim_state_dict", rank_group, told, error=until_met.error):
            continue
        payload = None if here is None or described is None else [*described, here.numels(), rank0_only, lines]
        everyone = list(map(json.loads, exchange_bytes(json.dumps(payload).encode(), rank_group)))
        must_agree = must_agree or len(rank_groups) > 1 or None in everyone
        if here is not None and None not in everyone:
            must_agree = must_agree or any(of_rank != lines for *_, of_rank in everyone)
            rank0_only = all(said for *_, said, _ in everyone)
            with until_met:
                here.complete(global_ranks(rank_group.process_group), everyone)
    if must_agree:
        agree(lines, until_met.error, rank_groups, _SAVING)
    if until_met.error is not None:
        raise until_met.error
    return rank0_only


def _container_error(name: str, where: str, value: Any) -> UnsupportedError:
    return UnsupportedError(
        f"State {name!r} of {where} is a {type(value).__name__} of tensors; state dicts hold tensors, numbers and "
        "other plain values. Save the optimizer's own state_dict() rank by rank, which fits the same number of ranks "
        "only, or use an optimizer that keeps each tensor under a name."
    )


def _check_equal(
    params: Sequence[IndexedParam],
    rows: Sequence[Sequence[PlainRow]],
    numels: Sequence[Sequence[int]],
    ranks: Sequence[int],
) -> None:
    """Raise if ranks with elements of a parameter have different values of a state that is one for all of it.

    ``rows`` and ``numels`` are by rank, then by parameter.
    """
    told = []
    for at, param in enumerate(params):
        here = [(rank, row[at]) for rank, row, numel in zip(ranks, rows, numels, strict=True) if numel[at]]
        if all(row == here[0][1] for _, row in here):
            continue
        for name in sorted({name for _, row in here for name in row}):
            found = [(rank, row[name]) for rank, row in here if name in row]
            if not all(_is_same(_decoded(found[0][1]), _decoded(each)) for _, each in found):
                values = [f"{_shown(*each)} on rank {rank}" for rank, each in found]
                told.append(f"{name!r} of {param} is {some_of(values, 8)}")
    if told:
        raise PhaseError(
            f"Optimizer states that are one value for a whole parameter differ between ranks, so nothing was saved: "
            f"{some_of(told, 6, '; ')}. A state dict has one value for all ranks. An optimizer that computes such a "
            "state from this rank's part of a gradient must reduce it over the ranks; fsdp_flat.MatrixOptimizer gives "
            "an optimizer full parameters and gradients."
        )


def _shown(kind: str, value: Any) -> str:
    return f"{kind} with digest {value:x}" if kind.startswith("a tensor") else repr(_decoded([kind, value]))


def _decoded(encoded: list[Any]) -> Any:
    """Return the value by which an encoded one is compared and shown."""
    kind, value = encoded
    return _plain_from_json(kind, value) if kind == "pickle" else value


def _is_same(first: Any, other: Any) -> bool:
    """Return whether values are equal. NaN equals itself; objects that are not plain need the same type alone."""
    first, other = (each.item() if is_scalar(each) and hasattr(each, "item") else each for each in (first, other))
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        return first.keys() == other.keys() and all(_is_same(first[key], other[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(first) == len(other) and all(map(_is_same, first, other))
    if isinstance(first, _COMPARED) and isinstance(other, _COMPARED):
        return bool(first == other or (first != first and other != other))
    return type(first) is type(other)


def _merge_names(index: ParamIndex, names: list[list[str]], everyone: Sequence[list[list[str]]]) -> None:
    """Add the names that other ranks hold: rank 0's in its order, then others in the order of the model.

    An optimizer may be built from only the parameters that its rank has elements of; a saved group names those of all.
    """
    if any(len(theirs) != len(names) for theirs in everyone):
        return
    places = {param.fqn: place for place, param in enumerate(index.params)}
    for at, of_ranks in enumerate(zip(*everyone, strict=True)):
        lacking = {fqn for each in of_ranks for fqn in each}.difference(of_ranks[0])
        names[at] = [*of_ranks[0], *sorted(lacking, key=lambda fqn: (places.get(fqn, len(places)), fqn))]
