"""What the forms of state dicts share: names, reports, and making room in the wrapped modules' own loading."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_flat.errors import UnsupportedError
from fsdp_flat.flat import PLAIN, FlatParamHandle
from fsdp_flat.layout import FLAT_PARAM, FSDP_PREFIX, clean_fqn
from fsdp_flat.runtime import Unit

__all__ = ["LoadReport", "copy_whole", "finish_load", "prepare_load", "put", "refuse_split", "restore_buffers"]


@dataclass(slots=True)
class LoadReport:
    """What a load finds wrong, in the lists that ``nn.Module.load_state_dict`` turns into its error.

    Attributes:
        strict: names that are missing are an error.
        missing: names that are missing.
        errors: one line per value that does not fit.
    """

    strict: bool
    missing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def mismatch(self, name: str, got: Any, expected: Any) -> None:
        """Note a wrong shape, in torch's words."""
        self.errors.append(
            f"size mismatch for {name}: copying a param with shape {torch.Size(got)} from checkpoint, "
            f"the shape in current model is {torch.Size(expected)}."
        )


def put(destination: dict[str, Any], handle: FlatParamHandle, index: int, prefix: str, value: Any) -> None:
    """Set every name of a parameter that the wrapped modules left in ``destination``; None deletes them."""
    for site in handle.views.params[index].sites:
        name = prefix + site.fqn
        if name in destination:
            if value is None:
                del destination[name]
            else:
                destination[name] = value


def refuse_split(unit: Unit, what: str) -> None:
    """Raise if tensor parallelism has split a parameter of ``unit``; chunks of such parts have no form yet.

    Raises:
        UnsupportedError: it has.
    """
    for handle in unit.handles:
        for entry in handle.views.params:
            if entry.guise is not PLAIN:
                raise UnsupportedError(
                    f"{what} of unit {unit.name!r} holds {entry.fqn!r}, a DTensor of tensor parallelism. This version "
                    "saves and loads such parameters in full state dicts only; use FULL_STATE_DICT."
                )


def restore_buffers(unit: Unit, destination: dict[str, Any], prefix: str) -> None:
    """Bring buffers that compute in another dtype to the one they were registered with."""
    for path, dtype in unit.buffers.originals().items():
        if prefix + path in destination:
            destination[prefix + path] = destination[prefix + path].to(dtype)


def prepare_load(
    unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport
) -> dict[FlatParamHandle, list[Any]]:
    """Take this unit's entries out of ``state_dict`` and rename the rest for the wrapped module.

    Returns:
        By handle, for each slot the value found under any of its names, or None.
    """
    unit.reshard()
    for handle in unit.handles:
        # What the user assigned to sharded parameters before the load must not come after it.
        handle.adopt_changes()
        handle.views.rewritten()
    unit.show_shard()
    inner = prefix + FSDP_PREFIX
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(inner):
            name = key[len(prefix) :]
            # Wrapper words are no part of names here; FSDP1 leaves that of torch.compile in what it saves.
            state_dict[inner + (clean_fqn(name) if "_orig_mod." in name else name)] = state_dict.pop(key)
    taken: dict[FlatParamHandle, list[Any]] = {}
    for handle in unit.handles:
        values = []
        # torch.distributed.checkpoint fills in for a missing name what named_parameters gives: nothing to load.
        own = {id(param) for param in handle.views.visible_params()}
        for entry in handle.views.params:
            given = [(site, state_dict.pop(inner + site.fqn, None)) for site in entry.sites]
            if report.strict:
                report.missing.extend(prefix + site.fqn for site, value in given if value is None)
            values.append(next((value for _, value in given if value is not None and id(value) not in own), None))
        taken[handle] = values
    return taken


def copy_whole(unit: Unit, handle: FlatParamHandle, index: int, value: Any, prefix: str, report: LoadReport) -> None:
    """Copy this rank's piece out of a whole tensor."""
    slot = handle.layout.slots[index]
    name = prefix + slot.fqn
    if not isinstance(value, torch.Tensor):
        report.errors.append(f'While copying the parameter named "{name}", expected a tensor, but got {type(value)}.')
        return
    guise = handle.views.params[index].guise
    shape = guise.whole_shape(slot.shape)
    if tuple(value.shape) != shape and not (value.numel() == 1 and math.prod(shape) == 1):
        report.mismatch(name, value.shape, shape)
        return
    piece = handle.layout.piece(index, unit.options.groups.shard.rank)
    if not piece.is_empty:
        with torch.no_grad():
            source = guise.part(value.detach().reshape(shape)).reshape(-1)[piece.in_param.to_slice()]
            handle.flat_param.data[piece.in_shard.to_slice()].copy_(source)


def finish_load(unit: Unit, state_dict: dict[str, Any], inner: str) -> None:
    """Give the wrapped modules' own loading something to find: each visible parameter itself."""
    for handle in unit.handles:
        for entry in handle.views.params:
            for site in entry.sites:
                param = site.module._parameters.get(site.name)
                if param is not None:
                    state_dict[inner + site.fqn] = param
    flat = unit.module._parameters.get(FLAT_PARAM)
    if flat is not None:
        state_dict[inner + FLAT_PARAM] = flat
