"""Lists what the full files of a model have: the entries of its state dict, with names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.core import ParamGroup, local_of, units_of
from fsdp_flat.errors import OptionError, OptionTypeError, UnsupportedError
from fsdp_flat.layout import clean_fqn, owners_of_constants
from fsdp_flat.state import TEMPLATE, BoxedTensor, IndexedParam, ParamIndex, boxed_state_dict, state_dict_settings
from fsdp_flat.state.plain_states import full_precision, is_wrapper, values_of

CHECKSUMS_NAME = "model.checksums.json"
ADAPTER_CHECKSUMS_NAME = "adapter_model.checksums.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes one entry of a model's state dict.

    Attributes:
        name: its name without ``torch.compile``'s prefix, which ``key``, that in the state dict, may have.
        value: a tensor that every rank has (a buffer, an ignored parameter, a tensor that a hook computes), or the
            DTensor of a parameter that ``fully_shard`` has sharded; None for any other managed parameter. It, or its
            local tensor, may be made of others that :func:`full_precision` turns into a plain one.
        template: a tensor on the meta device, of the full shape and the dtype to store.
        same_as: an earlier name of the same tied parameter.
    """

    name: str
    key: str
    value: torch.Tensor | None
    template: torch.Tensor
    param: IndexedParam | None
    same_as: str | None


def entries_of(
    model: nn.Module,
    keep: Callable[[str], bool] | None,
    *,
    dtype: torch.dtype | None = None,
    trainable_only: bool = False,
    loads: bool = False,
) -> list[Entry]:
    """List the entries of a model's state dict in its order, without communication; see :func:`save_full`.

    Those of a model that ``loads`` have names, shapes and dtypes alone.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionTypeError(f"dtype must be a floating-point torch.dtype or None; got {dtype!r}.")
    if dtype is not None and not dtype.is_floating_point:
        raise OptionError(f"dtype must be a floating-point torch.dtype or None; got {dtype!r}.")
    if keep is not None and not callable(keep):
        raise OptionTypeError(f"keep must be a function of a name, or None; got {keep!r}.")
    for unit in units_of(model):
        unit.check_idle("a full save or load")
    index = ParamIndex(model)
    by_name = index.dtensors_by_name
    params = model.named_parameters() if trainable_only else ()
    trainable = {clean_fqn(name) for name, param in params if param.requires_grad}
    handles = {param.param_group for param in (*index.params, *by_name.values())} if trainable_only else ()
    flags = {handle: handle.slots.requires_grad() for handle in handles}
    if loads:
        with state_dict_settings(model, TEMPLATE):
            state = {name: values_of(value) for name, value in model.state_dict().items()}
    else:
        state = boxed_state_dict(model)
    owners = owners_of_constants([clean_fqn(key) for key in state]) if dtype is not None else {}
    quantized = {*owners, *owners.values()}
    found: list[Entry] = []
    first: dict[tuple[ParamGroup, int], str] = {}
    for key, value in state.items():
        name = clean_fqn(key)
        # Hooks and modules put there in the place of a parameter may have renamed, or replaced, what has a known name.
        param = value.param if isinstance(value, BoxedTensor) else None
        param = by_name.get(name) if isinstance(value, DTensor) else param
        if trainable_only and not (name in trainable if param is None else flags[param.param_group][param.index]):
            continue
        if keep is not None and not keep(name):
            continue
        if not isinstance(value, torch.Tensor):
            raise no_values(name, value)
        # Each is tried before ranks meet, one at a time: the values of all at once would need much memory.
        if not loads and is_wrapper(value) and full_precision(value) is None:
            raise no_values(name, value)
        stored = value.dtype if param is None else param.param_group.orig_dtype
        if dtype is not None and stored.is_floating_point and name not in quantized:
            stored = dtype
        shape = value.shape if param is None else torch.Size(param.full_shape)
        earlier = name if param is None else first.setdefault((param.param_group, param.index), name)
        same_as = None if earlier == name else earlier
        plain = value.detach() if param is None or isinstance(value, DTensor) else None
        found.append(Entry(name, key, plain, torch.empty(shape, dtype=stored, device="meta"), param, same_as))
    return found


def no_values(name: str, value: Any) -> UnsupportedError:
    """Return the error of an entry that has no plain values."""
    return UnsupportedError(
        f"{name!r} of the state dict is a {type(local_of(value)).__name__}; only plain tensors can be streamed, and "
        "tensors that to(dtype) or dequantize() turns into such. Leave it out with keep=..., or trainable_only=True, "
        "and save it beside the tensors."
    )
