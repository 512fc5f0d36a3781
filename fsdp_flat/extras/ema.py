"""Keeps an exponential moving average of a sharded model, on its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.core import assign, check_module, copy_of, seeded_alike, units_of
from fsdp_flat.core.quantized import quant_state_of
from fsdp_flat.errors import LoadError, OptionError, OptionTypeError
from fsdp_flat.state import ParamIndex
from fsdp_flat.state.plain_states import full_precision, is_wrapper, values_of


@dataclass(frozen=True, slots=True)
class _Averaged:
    """Holds one parameter, its average, and an identity that is equal if two of them hold the same elements.

    A parameter of integers, of 4-bit codes in any dtype, or frozen and made of several tensors is copied in place of an
    average. The average of a trained one that is made of others is of its values, if its class makes them.
    """

    param: nn.Parameter
    shadow: torch.Tensor
    identity: dict[str, Any]
    is_copied: bool


class ShardedEMA:
    """Keeps an exponential moving average of a model's parameters.

    An update is ``average += (1 - decay) * (parameter - average)``. Each rank averages its own shards, element by
    element, so nothing is communicated or unsharded; the average costs one more shard. Buffers are not averaged: inside
    :meth:`swap` the model has its own.

    Args:
        model: a wrapped model, or any module that holds wrappers; parameters that no unit manages are averaged too.
        decay: weight of the old average, in [0, 1).
        dtype: dtype of the average; by default that of the parameters, or float32 if that is shorter than 4 bytes,
            since an average in bfloat16 would lose most updates. Integers, 4-bit weights and frozen
            weights of other classes of tensors are copied.

    Attributes:
        decay: may be changed at any time.
        num_updates: number of calls of :meth:`update`.

    Raises:
        OptionError: ``decay`` is out of range, or the model has no parameters.
        OptionTypeError: ``decay`` is no number, or ``model`` no module.
    """

    def __init__(self, model: nn.Module, decay: float, *, dtype: torch.dtype | None = None) -> None:
        check_module(model)
        try:
            is_in_range = 0.0 <= decay < 1.0
        except TypeError:
            raise OptionTypeError(f"decay must be a number; got a {type(decay).__name__}.") from None
        if not is_in_range:
            raise OptionError(f"decay must be at least 0 and below 1; got {decay!r}.")
        self.decay = decay
        self.num_updates = 0
        self._model = model
        self._entries = _averages_of(model, dtype)
        if not self._entries:
            raise OptionError(f"{type(model).__name__} has no parameters to average.")

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the model's current parameters; call it after ``optimizer.step()``.

        Raises:
            PhaseError: inside forward, backward or ``summon_full_params``.
        """
        self._check_idle("ShardedEMA.update")
        for entry in self._entries.values():
            shadow = entry.shadow
            if entry.is_copied:
                assign(shadow, entry.param)
            else:
                shadow.lerp_(_values_of(entry.param).to(shadow.device, shadow.dtype), 1.0 - self.decay)
        self.num_updates += 1

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Give the model the averaged parameters inside the block, to evaluate it or to save its ``state_dict``.

        Every rank must enter it. The model's own parameters are restored at the end, also after an exception. One
        unit's shard at a time is held twice.

        Raises:
            PhaseError: inside forward, backward or ``summon_full_params``.
        """
        self._check_idle("ShardedEMA.swap")
        kept = self._exchange({})
        try:
            yield
        finally:
            self._exchange(kept)

    @torch.no_grad()
    def _exchange(self, exact: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Swap the model's values and the average.

        ``exact`` holds the values that the average's dtype could not hold; the result holds those of this call.
        """
        kept: dict[str, torch.Tensor] = {}
        for name, entry in self._entries.items():
            shadow, param = entry.shadow, entry.param
            own = copy_of(param)
            with seeded_alike(param.device) if is_wrapper(param) else nullcontext():
                assign(param, exact.get(name, shadow))
            if name not in exact:
                if (shadow.dtype, is_wrapper(shadow)) == (param.dtype, is_wrapper(param)):
                    assign(shadow, own)
                else:
                    kept[name] = own
        for unit in units_of(self._model):
            # Parameters still unsharded from an earlier forward hold the other values.
            unit.reshard()
            for group in unit.param_groups:
                group.raise_weights_epoch()
        return kept

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the average, with the layout that identifies it.

        It fits a model with the same sharding, on the same rank. For a checkpoint that fits any number of ranks, save
        ``model.state_dict()`` inside :meth:`swap`, and make a new average from a model that has loaded it.

        Returns:
            ``{"decay", "num_updates", "averages": {name: tensor}, "layout": {name: numbers}}``; the tensors are
            those of the average itself.
        """
        return {
            "decay": self.decay,
            "num_updates": self.num_updates,
            "averages": {name: entry.shadow for name, entry in self._entries.items()},
            "layout": {name: dict(entry.identity) for name, entry in self._entries.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            LoadError: a key is missing, or the model is sharded differently.
        """
        if not isinstance(state_dict, Mapping):
            raise OptionTypeError(
                f"state_dict must be a dict, from ShardedEMA.state_dict; got {type(state_dict).__name__}."
            )
        missing = [key for key in ("decay", "num_updates", "averages", "layout") if key not in state_dict]
        if missing:
            raise LoadError(f"The state of a ShardedEMA needs the keys {', '.join(missing)} too.")
        given = state_dict["layout"]
        for name, entry in self._entries.items():
            if given.get(name) != entry.identity:
                raise LoadError(
                    f"The saved average of {name!r} has the layout {given.get(name)}; this model's is "
                    f"{entry.identity}. A ShardedEMA's own state fits the same sharding and rank only; save "
                    "model.state_dict() inside swap() to change them."
                )
        extra = sorted(set(given) - set(self._entries))
        if extra:
            raise LoadError(f"The saved average holds {extra[0]!r}, which this model does not have.")
        for name, entry in self._entries.items():
            assign(entry.shadow, state_dict["averages"][name])
        self.decay, self.num_updates = state_dict["decay"], state_dict["num_updates"]

    def _check_idle(self, what: str) -> None:
        for unit in units_of(self._model):
            unit.check_idle(what)
            unit.adopt_assigned()


def _averages_of(model: nn.Module, dtype: torch.dtype | None) -> dict[str, _Averaged]:
    """Begin an average of each flat parameter, under its first name, and of each parameter outside of them."""
    index = ParamIndex(model)
    found: dict[str, _Averaged] = {}
    for first in [param for param in index.params if param.index == 0]:
        layout, param = first.param_group.layout, first.param_group.flat_param
        has_codes = any(quant_state_of(entry.param) is not None for entry in first.param_group.params)
        identity = {"fqns": list(layout.fqns), "numel": layout.numel, "world_size": layout.world_size}
        identity["rank"] = first.param_group.spec.rank
        found[first.fqn] = _averaged(param, dtype, identity, has_codes=has_codes)
    for other, name in index.others.items():
        identity = {"shape": list(other.shape)}
        if isinstance(other, DTensor):
            mesh = other.device_mesh
            identity |= {"placements": [str(each) for each in other.placements]}
            identity |= {"rank": list(mesh.get_coordinate() or ()), "mesh": list(mesh.shape)}
        found[name] = _averaged(other, dtype, identity, has_codes=quant_state_of(other) is not None)
    return found


def _averaged(
    param: nn.Parameter, dtype: torch.dtype | None, identity: dict[str, Any], *, has_codes: bool
) -> _Averaged:
    is_copied = has_codes or not (param.is_floating_point() or param.is_complex())
    is_copied = is_copied or (is_wrapper(param) and not param.requires_grad)
    if is_copied or param.is_complex():
        return _Averaged(param, copy_of(param), identity, is_copied)
    wide = torch.float32 if param.itemsize < 4 else param.dtype
    return _Averaged(param, _values_of(param).to(dtype or wide, copy=True), identity, is_copied)


def _values_of(param: nn.Parameter) -> torch.Tensor:
    """Return the values of a parameter as a plain tensor; as one of its class if that makes none."""
    if not is_wrapper(param):
        return param.detach()
    values: torch.Tensor = values_of(param)
    made = full_precision(param) if values is param else values
    return (param if made is None else made).detach()
