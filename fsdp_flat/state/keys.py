"""Converts the keys of optimizer state dicts between names and positions in the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from fsdp_flat.api import OptimStateKeyType
from fsdp_flat.errors import OptionError, PhaseError
from fsdp_flat.state.optim_params import ParamNames, names_of

__all__ = ["rekey"]


def rekey(
    given: dict[str, Any],
    key_type: Any,
    model: nn.Module,
    params: Sequence[nn.Parameter],
    *,
    any_shape: Collection[nn.Parameter] = (),
) -> dict[str, Any]:
    """Return ``given`` with its keys converted to names or positions.

    Args:
        given: an optimizer state dict.
        key_type: the type of keys to return.
        model: the model that has the names.
        params: the optimizer's parameters in order.
        any_shape: parameters of ``params`` whose states may have any shape.

    Raises:
        OptionError: keys of both types, a key that belongs to no parameter of the model, or a state that does not fit
            the parameter at its position.
        PhaseError: ``key_type`` is not an ``OptimStateKeyType``.
    """
    member = getattr(key_type, "name", None)
    if type(key_type).__name__ != "OptimStateKeyType" or member not in OptimStateKeyType.__members__:
        raise PhaseError(f"optim_state_key_type must be an OptimStateKeyType; got {key_type!r}.")
    kinds = {type(key) for key in given["state"]}
    if len(kinds) > 1:
        raise OptionError(
            f"An optimizer state dict must be keyed by names or by positions, not both; got {list(given['state'])}."
        )
    names = names_of(model)
    order = [names.fqns_of(param)[0] for param in params]
    to_names = member == "PARAM_NAME"
    free = {position for position, param in enumerate(params) if param in any_shape}
    _check_shapes({key: row for key, row in given["state"].items() if key not in free}, names, params, order)
    if kinds and (str in kinds) == to_names:
        return given
    table: dict[Any, Any] = dict(enumerate(order)) if to_names else {name: i for i, name in enumerate(order)}
    try:
        state = {table[key]: value for key, value in given["state"].items()}
        groups = [{**group, "params": sorted(table[key] for key in group["params"])} for group in given["param_groups"]]
    except KeyError as error:
        raise OptionError(f"Key {error} of the optimizer state dict belongs to no parameter of this model.") from None
    return {"state": state, "param_groups": groups}


def _check_shapes(
    state: dict[Any, Any], names: ParamNames, params: Sequence[nn.Parameter], order: Sequence[str]
) -> None:
    """Raise if a state and the parameter at its position differ in shape, so that it belongs to another parameter."""
    shapes = {_shape_at(names, param) for param in params}
    # States of other shapes (Adafactor's factors) do not reveal the order.
    unlike = {
        name
        for row in state.values()
        for name, value in row.items()
        if (shape := tuple(getattr(value, "shape", ()))) and shape not in shapes
    }
    for key, row in state.items():
        if not isinstance(key, int) or key >= len(params):
            continue
        managed = names.managed.get(params[key])
        expected = _shape_at(names, params[key])
        for name, value in row.items():
            shape = tuple(getattr(value, "shape", ()))
            if shape and shape != expected and name not in unlike and (managed is None or len(managed.indices) == 1):
                raise OptionError(
                    f"State {name!r} at position {key} has shape {shape}, but the parameter there, {order[key]!r}, has "
                    f"{expected}. The optimizer state was saved with another order of parameters."
                )


def _shape_at(names: ParamNames, param: nn.Parameter) -> tuple[int, ...]:
    managed = names.managed.get(param)
    return tuple(param.shape) if managed is None else managed.handle.layout.param_infos[managed.indices[0]].shape
