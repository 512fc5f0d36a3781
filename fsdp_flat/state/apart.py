"""Takes parameters that are made of several tensors apart, for checkpoints of plain tensors, and joins them again.

A quantized parameter ``fc.weight`` is saved as ``fc.weight.codes`` and ``fc.weight.scales``, say, in the names of its
class. Those of which each rank has a part are boxes of the whole, so that any number of ranks reads them; the others
are the same on every rank. Nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_flat.core import PLAIN, inner_tensors, is_plain, local_of, made_like
from fsdp_flat.layout import Box, Interval, chunk_rows, clean_fqn
from fsdp_flat.state.codecs import BoxedTensor
from fsdp_flat.state.plain_states import is_wrapper
from fsdp_flat.state.shards import IndexedParam, ParamIndex
from fsdp_flat.state.torch_state import dtensors_of


@dataclass(frozen=True, slots=True)
class InnerPart:
    """Holds this rank's part of one of the tensors that a parameter is made of.

    Attributes:
        tensor: the part, of any shape and dtype.
        shape: the shape of the whole.
        offsets: where the part begins in the whole; None if every rank has the whole.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None


class SplitParams:
    """Takes parameters of ``model`` apart that are made of several tensors.

    Attributes:
        names: the names of the tensors, without ``torch.compile``'s prefix, each with its parameter.
        constants: those that every rank has, by these names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: dict[str, IndexedParam] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self._params: dict[str, IndexedParam] = {}

    def take(self, state: dict[str, Any], *, copy: bool) -> dict[str, Any]:
        """Return a state dict with such parameters taken apart, those of which the class tells enough.

        With ``copy`` the parts are copies on the CPU, else views of the live ones.
        """
        by_name, found = ParamIndex(self._model).dtensors_by_name, dict[str, Any]()
        for key, value in state.items():
            name, parts = clean_fqn(key), None
            param = by_name.get(name) if is_wrapper(value) else None
            if param is not None:
                parts = _inner_parts(param, local_of(value))
            if param is None or parts is None:
                found[key] = value
                continue
            self._params[key] = param
            for inner, part in parts.items():
                tensor = part.tensor.detach().to("cpu", copy=True) if copy else part.tensor.detach()
                self.names[f"{name}.{inner}"] = param
                if part.offsets is None:
                    self.constants[f"{name}.{inner}"] = found[f"{key}.{inner}"] = tensor
                else:
                    found[f"{key}.{inner}"] = _boxed(param, part, tensor)
        return found

    def join(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict of the names and parts of :meth:`take` with the parameters joined, as DTensors."""
        found = dict(state)
        for key, param in self._params.items():
            local, inner = local_of(param.sharded_param).detach(), dict[str, torch.Tensor]()
            for each, own in inner_tensors(local).items():
                value = found.pop(f"{key}.{each}")
                if isinstance(value, BoxedTensor):
                    value = value.parts[0] if value.parts else torch.empty_like(own)
                inner[each] = value.to(own.device)
            found[key] = dtensors_of(param).with_local(param.index, made_like(local, inner))
        return found


def _inner_parts(param: IndexedParam, local: torch.Tensor) -> dict[str, InnerPart] | None:
    """Return this rank's part of each of the plain tensors that a parameter is made of, by name.

    ``local`` is the local tensor or one like it. None if there is one such tensor when it is sharded, or if these
    cannot be known as parts of a whole.
    """
    whole, own, spec = dtensors_of(param).wholes[param.index], inner_tensors(local), param.param_group.spec
    wholes = {} if whole is None else inner_tensors(whole)
    if len(own) < 2 or own.keys() != wholes.keys() or param.adapter is not PLAIN:
        return None
    found: dict[str, InnerPart] = {}
    for name, part in own.items():
        shape = tuple(wholes[name].shape)
        dims = [dim for dim in range(len(shape)) if part.dim() == len(shape) and part.size(dim) != shape[dim]]
        offsets: tuple[int, ...] | None = None
        if not is_plain(part) or part.dim() != len(shape) or len(dims) > 1:
            return None
        for dim in dims:
            rows = chunk_rows(shape[dim], spec.world_size, spec.rank)
            if rows.numel != part.size(dim):
                return None
            offsets = tuple(rows.start if each == dim else 0 for each in range(len(shape)))
        found[name] = InnerPart(part, shape, offsets)
    return found


def _boxed(param: IndexedParam, part: InnerPart, tensor: torch.Tensor) -> BoxedTensor:
    assert part.offsets is not None
    box = Box(part.offsets, tuple(tensor.shape), Interval(0, tensor.numel()))
    boxes, parts = ([box], [tensor]) if tensor.numel() else ([], [])
    return BoxedTensor(part.shape, boxes, parts, tensor, param)
