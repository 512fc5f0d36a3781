"""Implements the steps that all state-dict types share: key names, load reports, preparing the modules' own load."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.overrides import is_tensor_like

from fsdp_flat.comm import RankGroup, barrier
from fsdp_flat.errors import FsdpFlatError, LoadError, PeerFailureError, RankMismatchError
from fsdp_flat.flat import FlatParamHandle
from fsdp_flat.layout import FLAT_PARAM, FSDP_PREFIX, clean_fqn
from fsdp_flat.runtime import ErrorTexts, Unit, agree
from fsdp_flat.state.chunk_specs import ShardWithSpec, write_chunks
from fsdp_flat.state.torch_types import shape_of

__all__ = [
    "LOADING",
    "LoadReport",
    "copy_full",
    "failed_anywhere",
    "finish_load",
    "local_shard_of",
    "local_shards_of",
    "prepare_load",
    "put",
    "rank_groups_of",
    "restore_buffers",
]

_FLAT_NAME = re.compile(rf"{FLAT_PARAM}(_\d+)?")

LOADING = ErrorTexts(
    "loading a state dict",
    "Ranks were given state dicts with different entries, so nothing was loaded.",
    "Load the same checkpoint on every rank.",
)


@dataclass(slots=True)
class LoadReport:
    """Collects the errors of one load and the writes to run if there are none.

    Attributes:
        missing: missing names; ``nn.Module.load_state_dict`` builds its error from this list.
        errors: one line per value that does not fit; used likewise.
        writes: run if everything fits.
        chunks: this rank's chunks to send to every rank's local shards, with their names.
        units: units that accept chunks as well as full tensors.
        has_chunks: some value for ``units`` is a chunk.
        has_own: some value for ``units`` can be loaded without another rank.
    """

    missing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    writes: list[Callable[[], object]] = field(default_factory=list)
    chunks: list[tuple[str, ShardWithSpec, torch.Tensor]] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    has_chunks: bool = False
    has_own: bool = False

    @property
    def exchanging_units(self) -> list[Unit]:
        """Units whose ranks exchange chunks; none if all values are full tensors, which need no communication."""
        if self.has_chunks:
            return self.units
        # This rank was given no value; other ranks may have been given chunks, and then all of them communicate.
        is_sharded = any(unit.options.groups.shard.size > 1 for unit in self.units)
        return self.units if is_sharded and not self.has_own else []

    def mismatch(self, name: str, got: Any, expected: Any) -> None:
        """Record a wrong shape, in the wording of torch."""
        self.errors.append(
            f"size mismatch for {name}: copying a param with shape {torch.Size(got)} from checkpoint, "
            f"the shape in current model is {torch.Size(expected)}."
        )

    def commit(self, *, refused: bool) -> None:
        """Run all writes, or none on any error. Where chunks are exchanged, an error on one rank stops every rank.

        Args:
            refused: the caller has found an error, which it reports itself.
        """
        error: FsdpFlatError | None = LoadError("; ".join(self.errors[:3])) if self.errors else None
        if refused and error is None:
            error = LoadError("keys are missing or unexpected")
        lines = [f"{name}: {'x'.join(map(str, row.spec.shape))}" for name, row, _ in self.chunks]
        elsewhere = failed_anywhere(self.exchanging_units, error, lines)
        self.errors.extend(elsewhere)
        if error is not None or elsewhere:
            return
        with torch.no_grad():
            for write in self.writes:
                write()
            write_chunks([(row, chunk) for _, row, chunk in self.chunks])


def failed_anywhere(exchanging_units: list[Unit], error: FsdpFlatError | None, lines: Sequence[str] = ()) -> list[str]:
    """Exchange errors with the other ranks; return theirs in one line, or an empty list.

    Every rank of the units' groups must call this.

    Args:
        exchanging_units: units whose ranks all call this; without any, nothing is communicated.
        error: the error of this rank.
        lines: lines that must be equal on every rank.
    """
    if exchanging_units:
        rank_groups = rank_groups_of(exchanging_units)
        for rank_group in rank_groups:
            barrier("load_state_dict", rank_group)
        try:
            agree(lines, error, rank_groups, exchanging_units[0].options.device, LOADING)
        except (PeerFailureError, RankMismatchError) as found:
            return [str(found)]
        except LoadError:
            pass
    return []


def rank_groups_of(units: list[Unit]) -> list[RankGroup]:
    """Return every group over which the units' ranks must agree: their own, and those of tensor parallelism."""
    found: dict[RankGroup, None] = {}
    for unit in units:
        found.update(dict.fromkeys(unit.options.groups.rank_groups))
        for handle in unit.handles:
            for entry in handle.views.params:
                found.update(dict.fromkeys(RankGroup.of(group) for group in entry.adapter.groups))
    return [rank_group for rank_group in found if rank_group.size > 1]


def put(destination: dict[str, Any], handle: FlatParamHandle, index: int, prefix: str, value: Any) -> None:
    """Set every name of a parameter that is present in ``destination`` to ``value``; None deletes them."""
    for site in handle.views.params[index].sites:
        name = prefix + site.fqn
        if name in destination:
            if value is None:
                del destination[name]
            else:
                destination[name] = value


def local_shards_of(unit: Unit, handle: FlatParamHandle) -> list[torch.Tensor]:
    """Return this rank's local shard of each parameter (1-D), a view of the current flat shard."""
    if unit.is_sharded:
        # While the unit is unsharded the modules hold unsharded parameters, so the user cannot assign sharded ones.
        handle.adopt_changes()
    return [local_shard_of(handle, index) for index in range(len(handle.layout.param_infos))]


def local_shard_of(handle: FlatParamHandle, index: int) -> torch.Tensor:
    """Return this rank's local shard of one parameter (1-D), a view of the flat shard.

    Call ``handle.adopt_changes`` first: the shard holds assigned parameters only after that.
    """
    return handle.flat_param.data[handle.views.local_shards[index].in_shard.to_slice()]


def restore_buffers(unit: Unit, destination: dict[str, Any], prefix: str) -> None:
    """Cast the unit's buffers in ``destination`` from the compute dtype to the dtype they were registered with."""
    unit.buffers.restore(destination, prefix)


def prepare_load(
    unit: Unit, state_dict: dict[str, Any], prefix: str, report: LoadReport, *, loads_flats: bool = False
) -> dict[FlatParamHandle, list[Any]]:
    """Remove this unit's entries from ``state_dict`` and rename the rest for the wrapped module.

    Args:
        unit: the unit.
        state_dict: the state dict to load; changed in place.
        prefix: prefix of the unit's names in it.
        report: receives missing names and errors.
        loads_flats: the caller loads flat parameters; otherwise they are an error.

    Returns:
        By handle, for each parameter the value found under any of its names, or None.
    """
    unit.reshard()
    for handle in unit.handles:
        # Adopt assignments made before the load now, so that they do not overwrite the loaded values later.
        handle.adopt_changes()
        report.writes.append(handle.views.bump_version)
    unit.use_sharded_views()
    inner = prefix + FSDP_PREFIX
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(inner):
            name = key[len(prefix) :]
            # Names here are without wrapper prefixes; FSDP1 leaves torch.compile's "_orig_mod." in its state dicts.
            state_dict[inner + (clean_fqn(name) if "_orig_mod." in name else name)] = state_dict.pop(key)
    flats = [key for key in state_dict if _FLAT_NAME.fullmatch(key, len(inner)) and key.startswith(inner)]
    if flats and unit.handles and not loads_flats:
        for key in flats:
            del state_dict[key]
        flat = prefix + flats[0].removeprefix(inner)
        report.errors.append(
            f"{flat}: an entry of a LOCAL_STATE_DICT, which is loaded as it was saved: inside "
            "FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT), with the wrapping and number of ranks that "
            f"wrote it. This load of unit {unit.name!r} expects entries by parameter names, "
            f"{prefix + unit.handles[0].layout.param_infos[0].fqn!r} the first."
        )
    report.writes.extend(unit.buffers.remember(state_dict, inner))
    taken: dict[FlatParamHandle, list[Any]] = {}
    for handle in unit.handles:
        values = []
        # For a missing name torch.distributed.checkpoint inserts the model's own parameter: nothing to load.
        own = {id(param) for param in handle.views.visible_params()}
        for entry in handle.views.params:
            given = [(site, state_dict.pop(inner + site.fqn, None)) for site in entry.sites]
            if not flats:
                report.missing.extend(prefix + site.fqn for site, value in given if value is None)
            values.append(next((value for _, value in given if value is not None and id(value) not in own), None))
        taken[handle] = values
    return taken


def copy_full(unit: Unit, handle: FlatParamHandle, index: int, value: Any, prefix: str, report: LoadReport) -> None:
    """Add to ``report`` the copy of this rank's local shard out of a full tensor, or an error if it does not fit."""
    param_info = handle.layout.param_infos[index]
    name = prefix + param_info.fqn
    if not is_tensor_like(value):
        report.errors.append(f'While copying the parameter named "{name}", expected a tensor, but got {type(value)}.')
        return
    if isinstance(value, ShardedTensor):
        report.errors.append(
            f"{name}: a sharded tensor, where this load of unit {unit.name!r} expects a whole one. Load a "
            "SHARDED_STATE_DICT inside FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)."
        )
        return
    adapter = handle.views.params[index].adapter
    shape = adapter.full_shape(param_info.shape)
    if shape_of(value) != shape and not (math.prod(shape_of(value)) == 1 and math.prod(shape) == 1):
        report.mismatch(name, shape_of(value), shape)
        return
    local_shard = handle.layout.local_shard(index, unit.options.groups.shard.rank)
    if not local_shard.is_empty:
        # Slicing a DTensor may communicate, so every rank does it now; plain tensors are only viewed.
        is_read = isinstance(value, torch.Tensor)
        whole = value if is_read else torch.empty(shape_of(value), dtype=value.dtype).copy_(value)
        source = adapter.local_slice(whole.detach().reshape(shape)).reshape(-1)[local_shard.in_param.to_slice()]
        # A proxy of a tensor in a file (Lightning's lazy loading) is read here; only the local shard is kept.
        source = source if is_read else source.clone()
        report.writes.append(lambda: handle.flat_param.data[local_shard.in_shard.to_slice()].copy_(source))


def finish_load(unit: Unit, state_dict: dict[str, Any], inner: str) -> None:
    """Insert each visible parameter itself into ``state_dict``, so that the modules' own load finds every name."""
    for handle in unit.handles:
        for entry in handle.views.params:
            for site in entry.sites:
                param = site.module._parameters.get(site.name)
                if param is not None:
                    state_dict[inner + site.fqn] = param
        flat = handle.spec.module._parameters.get(FLAT_PARAM)
        if flat is not None:
            state_dict[inner + FLAT_PARAM] = flat
