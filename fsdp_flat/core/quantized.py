"""Keeps together the codes of a quantized parameter and its constants, by which codes become numbers.

bitsandbytes' ``Params4bit`` has its constants in an object, ``quant_state``: the largest magnitude of each block, and
the map of codes. Modules save them under names below that of the parameter, ``weight.absmax`` for example. The object
is the same on every rank and is not sharded. A sharded parameter, its unsharded counterpart and what stands in for it
in a state dict share it, so a load changes its tensors in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import LoadError, some_of
from fsdp_flat.layout import clean_fqn


def quant_state_of(param: torch.Tensor) -> Any:
    """Return the object with the constants of a quantized parameter; None for any other parameter."""
    return _constants_in(getattr(param, "quant_state", None))


def _constants_in(state: Any) -> Any:
    # Other attributes of this name are the caller's own.
    return state if hasattr(state, "absmax") and hasattr(state, "as_dict") else None


def constants_of(param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors among the constants of a parameter, the live ones, by their names in its ``quant_state``."""
    return _tensors_in(quant_state_of(param))


def _tensors_in(state: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    ahead = [("", state)]
    for prefix, each in ahead:
        for name, value in getattr(each, "__dict__", {}).items():
            if isinstance(value, torch.Tensor):
                found[prefix + name] = value
            elif type(value) is type(state):  # the largest magnitudes are quantized too
                ahead.append((f"{prefix}{name}.", value))
    return found


def find_constants(modules: Iterable[nn.Module]) -> None:
    """Give each weight that has lost its constants those that its module keeps, as bitsandbytes' modules do in forward.

    A weight that leaves the meta device, or is converted, becomes a plain parameter.
    """
    for module in modules:
        weight, state = module._parameters.get("weight"), _constants_in(module.__dict__.get("quant_state"))
        if weight is not None and state is not None and quant_state_of(weight) is None:
            weight.quant_state = state  # type: ignore[attr-defined]


def move_constants(params: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move the constants of parameters to the device on which modules compute with these."""
    for state in filter(None, map(quant_state_of, params)):
        state.to(device)


def load_constants(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, *lists: list[str]
) -> None:
    """Load the constants of a module's quantized parameters, as a hook before it loads: it saves them alone.

    They are taken out of the state dict. An error is added to the last of the ``lists``, that of torch's load.
    """
    for name, param in module._parameters.items():
        own, below = quant_state_of(param), f"{prefix}{name}."  # type: ignore[arg-type]
        names = [] if own is None else [each for each in state_dict if each.startswith(below)]
        if names:
            values = {each.removeprefix(below): state_dict.pop(each) for each in names}
            codes = state_dict.get(prefix + name)
            try:
                if isinstance(codes, torch.Tensor) and codes.dtype != param.dtype:  # type: ignore[union-attr]
                    raise LoadError(
                        f"The codes of quantized parameter {clean_fqn(prefix + name)!r} are stored in {codes.dtype} "
                        f"there and in {param.dtype} in the model, which no cast keeps."  # type: ignore[union-attr]
                    )
                _copy_constants(own, values, clean_fqn(prefix + name))
            except LoadError as error:
                lists[-1].append(str(error))


def _copy_constants(own: Any, values: dict[str, torch.Tensor], fqn: str) -> None:
    try:
        given = type(own).from_dict(values, device=own.absmax.device)
    except Exception as error:
        raise LoadError(f"The constants of quantized parameter {fqn!r} cannot be read: {error!r}.") from error
    there, here = _way_of(given), _way_of(own)
    if there != here:
        names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
        told = [f"{name} is {there.get(name)} there and {here.get(name)} in the model" for name in names]
        raise LoadError(
            f"Parameter {fqn!r} is quantized in another way in the state dict than in the model: {some_of(told, 4)}. "
            "Quantize the model as the saved one was (with the same quantization_config)."
        )
    sources = _tensors_in(given)
    for name, target in _tensors_in(own).items():
        target.copy_(sources[name])


def quantization_of(param: torch.Tensor) -> dict[str, Any] | None:
    """Return how a parameter is quantized, with the shapes of its constants; None for any other parameter."""
    state = quant_state_of(param)
    return None if state is None else _way_of(state)


def _way_of(state: Any) -> dict[str, Any]:
    settings = {name: getattr(state, name) for name in ("quant_type", "blocksize", "shape", "dtype")}
    return settings | {f"shape of {name}": tuple(each.shape) for name, each in _tensors_in(state).items()}
