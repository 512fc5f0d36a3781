"""Saves and loads optimizer state dicts in the state-dict type that is set: the wrapper's static methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.api import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateHandler,
    OptimStateKeyType,
    StateDictType,
    StatePart,
    member_of,
)
from fsdp_flat.comm import UntilRanksMeet
from fsdp_flat.core import check_module, units_of
from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError, counted
from fsdp_flat.layout import clean_fqn
from fsdp_flat.state.codecs import FullCodec, codec_of, settings_for
from fsdp_flat.state.model_save import get_state_dict_type
from fsdp_flat.state.optim_load import load_optim_state
from fsdp_flat.state.optim_save import save_optim_state
from fsdp_flat.state.shards import (
    OptimContents,
    ParamIndex,
    StateDictCodec,
    check_rows,
    check_states,
    held_by,
    shape_of,
)
from fsdp_flat.state.state_settings import own_settings
from fsdp_flat.user_warnings import warn_user

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the optimizer's state under parameter names, in the state-dict type that is set.

    FULL gives full tensors; SHARDED and LOCAL give torch's types with dim-0 chunks. Scalars are on the CPU. Every
    rank must call this.

    Args:
        model: the wrapped model, or a module that holds wrapped ones.
        optim: its optimizer, built after wrapping.
        optim_state_dict: used instead of ``optim.state_dict()``, keyed by position (or by name, as torch's named
            optimizer does).
        group: accepted as in FSDP1; each unit's own groups are used.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.

    Raises:
        OptionError: (a ValueError) the optimizer holds a parameter that is not the model's.
        UnsupportedError: a state fits neither its parameter's local shard nor a scalar.
        UsageError: (a RuntimeError) a rank lacks a state, which others have, of elements that it holds.
    """
    codec, config = _codec_for(model)
    return save_optim_state(model, optim, optim_state_dict, codec=codec, config=config)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Convert a state dict under parameter names to one for this rank's ``optim.load_state_dict``.

    Full tensors, ShardedTensors and DTensors are accepted, whatever type is set. With
    ``FullOptimStateDictConfig(rank0_only=True)`` only rank 0 (of all ranks, also with hybrid strategies) needs the
    dict.

    If all values are full tensors nothing is communicated, so ranks may load one after another, and a value
    that does not fit is an error of that rank alone. With chunks, or ``rank0_only``, every rank must call this.

    Args:
        model: the wrapped model, or a module that holds wrapped ones.
        optim: its optimizer, built after wrapping.
        optim_state_dict: from :func:`optim_state_dict`, FSDP1's, or a plain optimizer's under names.
        is_named_optimizer: keys of the result are names.
        load_directly: also load the result into ``optim``.
        group: accepted as in FSDP1; each unit's own groups are used.

    Returns:
        Input of ``optim.load_state_dict`` on this rank.

    Raises:
        OptionError: (a ValueError) not an optimizer state dict, or one that has parameters in other groups.
        LoadError: (a RuntimeError) a value does not fit its parameter.
    """
    if isinstance(model, Mapping):
        raise OptionTypeError(
            "optim_state_dict_to_load takes (model, optim, optim_state_dict); got a dict as the model. The order "
            "(optim_state_dict, model, optim) was that in torch 2.0: pass arguments by name, which fits both."
        )
    codec, config = _codec_for(model)
    held, until_met = OptimContents(()), UntilRanksMeet()
    with until_met:
        held = held_by(optim)
        if not isinstance(codec, FullCodec):
            _warn_if_empty(optim, optim_state_dict)
    loaded = load_optim_state(
        model,
        held,
        optim_state_dict,
        named=is_named_optimizer,
        from_rank_zero=config.rank0_only,
        expects_chunks=codec.exchanges,
        is_final=load_directly,
        error=until_met.error,
    )
    if load_directly:
        if "param_groups" not in loaded:
            raise OptionError(
                "The optimizer state dict has no 'param_groups', so load_directly=True cannot load it. Load the states "
                "alone by optim.load_state_dict({**optim.state_dict(), 'state': result['state']}), or pass a state "
                "dict with groups."
            )
        optim.load_state_dict(loaded)
    return loaded


def _codec_for(model: nn.Module) -> tuple[StateDictCodec, OptimStateDictConfig]:
    settings = get_state_dict_type(model) or settings_for(StateDictType.FULL_STATE_DICT, None, None)
    config = settings.optim_state_dict_config
    return codec_of(settings.state_dict_type, config), config


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Convert the keys of an optimizer state dict from positions to names, or the other way; for plain models too.

    Args:
        optim_state_dict: the state dict.
        optim_state_key_type: the type of the new keys.
        model: the model that has the names.
        optim_input: input of the optimizer's constructor, if there is no ``optim``.
        optim: gives the order of parameters; without both it is ``model.parameters()``, as in FSDP1. A state dict of
            an optimizer that was built from named parameters has its own order, by which it is converted to names.

    Returns:
        A state dict of the same values under the other keys.

    Raises:
        OptionError: (a ValueError) mixed or unknown keys, or states that do not fit the order.
        PhaseError: (an AssertionError) no such key type.
    """
    _check_form(optim_input)
    contents = _contents(model, optim, optim_input)
    wanted = member_of(OptimStateKeyType, optim_state_key_type, "optim_state_key_type", error=PhaseError)
    given = check_states(optim_state_dict)["state"]
    check_rows(given)
    kinds = {type(key) for key in given}
    if len(kinds) > 1:
        raise OptionError(
            f"An optimizer state dict must be keyed by names or by positions, not both; got {list(given)}."
        )
    index = ParamIndex(model)
    to_names = wanted is OptimStateKeyType.PARAM_NAME
    groups = optim_state_dict.get("param_groups") or ()
    of = {fqn: param for param in (*index.managed, *index.others) for fqn in index.fqns_of(param)}
    names = _saved_order(groups, of, index.aliases)
    if names:
        contents = OptimContents(tuple(of[name] for name in names), owners=contents.owners)
    # An optimizer may hold parameters outside of the model too; they have positions and no names.
    order = names or [index.fqns_of(param)[0] if index.has(param) else "" for param in contents.params]
    _check_shapes(given, index, contents, order)
    if kinds == {int} and to_names and groups and not names and optim is None and optim_input is None:
        num_saved = sum(len(group["params"]) for group in groups)
        if len(groups) > 1 or num_saved < len(order):
            warn_user(
                f"The optimizer state dict has {counted(num_saved, 'positions')} in "
                f"{counted(len(groups), 'parameter groups')} and no names for them, and the model has "
                f"{counted(len(order), 'parameters')}; as in FSDP1 they are taken to be in the order of "
                "model.parameters(). If the optimizer had its parameters in another order, pass it as optim=. "
                "States of an optimizer that is built from model.named_parameters() have names."
            )
    if kinds and (str in kinds) == to_names:
        return optim_state_dict
    positions = {name: at for at, name in enumerate(order) if name}
    positions |= {alias: positions[name] for alias, name in index.aliases.items() if name in positions}
    table: dict[Any, Any] = {at: name for at, name in enumerate(order) if name} if to_names else positions
    rekeyed: dict[str, Any] = {}
    try:
        rekeyed["state"] = {table[key]: value for key, value in given.items()}
        for group in groups:
            params = sorted(table[key] for key in group["params"])
            rekeyed.setdefault("param_groups", []).append({**group, "params": params})
            if "param_names" in group:
                rekeyed["param_groups"][-1]["param_names"] = params if to_names else [order[at] for at in params]
    except KeyError as error:
        raise OptionError(f"Key {error} of the optimizer state dict belongs to no parameter of this model.") from None
    return rekeyed


def save_full_or_sharded(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    full_state_dict: bool = True,
    group: dist.ProcessGroup | None = None,
    cpu_offload: bool = True,
    *,
    _stacklevel: int = 1,
) -> dict[str, Any]:
    """Save under the arguments of FSDP1's ``_optim_state_dict_impl``, which clients call. Every rank must call this."""
    _check_form(optim_input, rank0_only=rank0_only, full=full_state_dict)
    kind, config = StateDictType.SHARDED_STATE_DICT, OptimStateDictConfig(offload_to_cpu=cpu_offload)
    if full_state_dict:
        kind, config = StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(cpu_offload, rank0_only)
    return save_optim_state(model, optim, optim_state_dict, codec=codec_of(kind, config), config=config)


def load_full_or_sharded(
    optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
    full_state_dict: bool = True,
    rank0_only: bool = False,
    is_named_optimizer: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load under the arguments of FSDP1's ``_optim_state_dict_to_load_impl``, which clients call."""
    _check_form(optim_input, rank0_only=rank0_only, full=full_state_dict)
    return load_optim_state(
        model,
        _contents(model, optim, optim_input),
        optim_state_dict,
        named=is_named_optimizer,
        from_rank_zero=rank0_only,
        expects_chunks=not full_state_dict,
    )


def _warn_if_empty(optim: Any, given: Any) -> None:
    # SGD without momentum, the one optimizer of torch that keeps no state, has both settings.
    stateless = all(group.get("momentum") == 0 and "dampening" in group for group in optim.param_groups)
    if isinstance(given, dict) and "state" in given and not given["state"] and not stateless:
        warn_user(
            "The optimizer state dict to load has no state, so the optimizer begins anew. A sharded checkpoint is read "
            "into the entries that the state dict of the optimizer has, and a new optimizer has none: take a step "
            "before (and load the model's weights after it), or use the functions of "
            "torch.distributed.checkpoint.state_dict, which do."
        )


def _check_form(optim_input: OptimInput, *, rank0_only: bool = False, full: bool = True) -> None:
    if not full and (optim_input is not None or rank0_only):
        raise PhaseError("optim_input and rank0_only need full tensors (full_state_dict=True).")
    warn_of_optim_input(optim_input)


def warn_of_optim_input(optim_input: OptimInput) -> None:
    """Warn that ``optim_input`` is an older argument, if it was given."""
    if optim_input is not None:
        text = "optim_input is an older way to say the order of parameters; pass the optimizer as optim."
        warn_user(text, FutureWarning)


def _contents(model: nn.Module, optim: Any, optim_input: Any) -> OptimContents:
    """Return the parameters of ``optim``; without it the parameters of ``optim_input``, its constructor's input."""
    check_module(model)
    if optim is not None:
        return held_by(optim)
    if optim_input is None:
        return OptimContents(tuple(model.parameters()))
    if isinstance(optim_input, (torch.Tensor, dict, str)):
        raise OptionTypeError(f"optim_input must be parameters or parameter groups; got {type(optim_input).__name__}.")
    entries = list(optim_input)
    if not entries:
        raise OptionError("optim_input is empty; pass what the optimizer was built from, or the optimizer.")
    if all(isinstance(entry, dict) for entry in entries):
        if not all("params" in group for group in entries):
            raise PhaseError("Each parameter group in optim_input needs its parameters under 'params'.")
        return OptimContents(tuple(param for group in entries for param in group["params"]))
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return OptimContents(tuple(entries))
    raise OptionTypeError("optim_input must hold parameters only, or parameter groups only.")


def _saved_order(
    groups: Sequence[Mapping[str, Any]], of: Mapping[str, nn.Parameter], aliases: Mapping[str, str]
) -> list[str]:
    """Return the names by position in a state dict of named parameters; empty if they are not all in ``of``."""
    order: dict[Any, str] = {}
    for group in groups:
        names = [clean_fqn(name) for name in group.get("param_names", ())]
        if len(names) != len(group["params"]):
            return []
        order.update(zip(group["params"], (aliases.get(name, name) for name in names), strict=True))
    is_known = order.keys() == set(range(len(order))) and of.keys() >= {*order.values()}
    return [order[at] for at in range(len(order))] if is_known else []


def _check_shapes(given: dict[Any, Any], index: ParamIndex, contents: OptimContents, order: Sequence[str]) -> None:
    """Raise if the states of a name have the shapes of the parameters in another order than the parameters have.

    Other shapes do not reveal an order: those of Adafactor's factors may be some other parameter's by accident.
    """
    expected: dict[int, tuple[int, ...]] = {}
    for at, param in enumerate(contents.params):
        managed = index.managed.get(param, ())
        # States of an owned parameter may have any shape, and those of a flat one are of several.
        if at in given and param not in contents.owners and len(managed) <= 1:
            expected[at] = managed[0].shape if managed else tuple(param.shape)
    for name in dict.fromkeys(name for at in expected for name in given[at]):
        found = {at: shape_of(given[at][name]) for at in expected if name in given[at]}
        if sorted(found.values()) == sorted(expected[at] for at in found):
            for at, shape in found.items():
                if shape != expected[at]:
                    raise OptionError(
                        f"State {name!r} at position {at} has shape {shape}, but the parameter there, {order[at]!r}, "
                        f"has {expected[at]}. The optimizer state was saved with another order of parameters."
                    )


def register_optim_state_handler(
    model: nn.Module,
    name: str,
    *,
    merge: Callable[[Sequence[StatePart], torch.Size], torch.Tensor],
    split: Callable[[torch.Tensor, torch.Size, int, int], torch.Tensor],
) -> None:
    """Register how to save and load an optimizer state that is neither a scalar nor shaped like its parameter.

    Without a handler, saving such a state is an error. With one, every optimizer state dict of ``model`` holds the
    full merged tensor under the state's name. One handler serves all parameters that have a state of this name. Needs
    ``use_orig_params=True`` or units of one parameter: the state of a flat parameter belongs to no single one.

    Every rank must register the same handlers.

    Args:
        model: a wrapped model, or a module that holds wrapped ones.
        name: the state's name in ``optimizer.state[param]``.
        merge: see :class:`OptimStateHandler`; must be pure, so that every rank gets the same result.
        split: the inverse of ``merge``.

    Raises:
        OptionTypeError: (a TypeError) ``merge`` or ``split`` is not callable, or ``name`` is not a string.
        OptionError: (a ValueError) nothing at or below ``model`` is wrapped.
    """
    if not isinstance(name, str) or not callable(merge) or not callable(split):
        raise OptionTypeError(f"A handler has a name and two functions; got {name!r}, {merge!r} and {split!r}.")
    units = units_of(model)
    if not units:
        raise OptionError(
            "register_optim_state_handler takes a wrapped model; nothing at or below this one is wrapped."
        )
    handler = OptimStateHandler(merge, split)
    for unit in units:
        own_settings(unit).optim_handlers[name] = handler


# -- the older forms of FSDP1's methods, each with a FutureWarning -----------------------------------------------------


def warn_of_older_form(name: str, instead: str) -> None:
    """Warn that ``name`` is an older form of ``instead``."""
    warn_user(f"{name} is an older form of {instead}; use that.", FutureWarning)


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state as full tensors on the CPU; older form of ``optim_state_dict``. Every rank must call this.

    Result, errors and other arguments are those of ``optim_state_dict``.

    Args:
        optim_input: accepted as in FSDP1; ``optim`` gives the order of parameters.
        rank0_only: ranks other than 0 (of all ranks, also with hybrid strategies) send their shards and return an
            empty dict.
    """
    warn_of_older_form("full_optim_state_dict", "optim_state_dict")
    return save_full_or_sharded(model, optim, None, optim_input, rank0_only)


def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the state as dim-0 chunks; older form of ``optim_state_dict``, whose arguments and errors it has.

    Every rank must call this.
    """
    warn_of_older_form("sharded_optim_state_dict", "optim_state_dict")
    return save_full_or_sharded(model, optim, None, rank0_only=False, full_state_dict=False, cpu_offload=False)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Convert full tensors that every rank has for loading; older form of ``optim_state_dict_to_load``.

    Result and errors are those of ``optim_state_dict_to_load``. The order of parameters is that of ``optim``, else
    of ``optim_input`` (the input of the optimizer's constructor), else of ``model.parameters()``.
    """
    warn_of_older_form("shard_full_optim_state_dict", "optim_state_dict_to_load")
    return load_full_or_sharded(full_optim_state_dict, model, optim_input, optim)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert the result of :func:`sharded_optim_state_dict`, at the same number of ranks, for loading.

    It is an older form of ``optim_state_dict_to_load``, whose result and errors it has. Every rank must call this.
    """
    warn_of_older_form("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return load_full_or_sharded(sharded_optim_state_dict, model, None, optim, full_state_dict=False)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Convert full tensors that rank 0 alone has, as :func:`shard_full_optim_state_dict`; others' are ignored.

    Every rank must call this.
    """
    warn_of_older_form("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    return load_full_or_sharded(full_optim_state_dict, model, optim_input, optim, rank0_only=True)
