"""Serializes the values of a checkpoint that are no tensors, so that they can be read back without running code."""

from __future__ import annotations

import io
from typing import Any

import torch

from fsdp_flat.errors import OptionError
from fsdp_flat.state import OptimContents, ParamIndex


def serialized(value: Any) -> bytes:
    """Serialize ``value`` by ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the value that :func:`serialized` has serialized."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def packed(value: Any, source: str, path: str = "") -> bytes:
    """Serialize ``value``; raise an OptionError if it cannot be read back with ``weights_only``.

    Args:
        value: any value.
        source: its description, for the error.
        path: the expression with which the error's path to an entry begins.
    """
    try:
        data = serialized(value)
        unpacked(data)
    except Exception as error:
        where, kind = _refused(value, path)
        raise OptionError(
            f"{source} holds something that torch.load(weights_only=True) refuses to read back, for safety: "
            f"{where or 'the value'} is of type {kind.__module__}.{kind.__qualname__}. Save tensors, numbers, strings, "
            "None, or lists, tuples and dicts of them in its place: of a numpy array torch.from_numpy(array), of a "
            "numpy scalar value.item(), of another object its state_dict()."
        ) from error
    return data


def check_optim(contents: OptimContents, index: ParamIndex) -> None:
    """Raise if an optimizer's settings, or its states that are no tensors, cannot be read back; see :func:`packed`."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in contents.groups or ()]
    states: dict[Any, dict[str, Any]] = {}
    for position, (param, row) in enumerate(contents.state.items()):
        # An optimizer may keep states that are of no parameter of the model.
        is_known = param in index.managed or param in index.others
        name = index.fqns_of(param)[0] if is_known else position
        states[name] = {key: value for key, value in row.items() if not isinstance(value, torch.Tensor)}
    packed({"param_groups": groups, "state": states}, "The optimizer")


def _refused(value: Any, path: str) -> tuple[str, type]:
    """Return the path and the type of the innermost entry that cannot be read back, of a value that cannot."""
    entries: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        entries = [(f"{path}[{key!r}]", each) for key, each in value.items()]
        entries += [(f"a key of {path or 'the dict'}", key) for key in value]
    elif isinstance(value, (list, tuple)):
        entries = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    for inner, each in entries:
        try:
            unpacked(serialized(each))
        except Exception:
            return _refused(each, inner)
    return path, type(value)
