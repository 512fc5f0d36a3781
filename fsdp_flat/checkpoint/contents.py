"""Collects and restores the contents of a checkpoint: tensors as boxes, and values that are no tensors."""

from __future__ import annotations

import base64
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.api import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from fsdp_flat.checkpoint import directory as disk
from fsdp_flat.checkpoint.consensus import Consensus
from fsdp_flat.errors import LoadError, OptionError, some_of
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime import check_idle, units_of
from fsdp_flat.state import (
    BoxedTensor,
    OptimContents,
    ParamIndex,
    Peers,
    codec_of,
    save_optim_state,
    settings_for,
    state_dict_in,
    template_states,
)

_OPTIM_PREFIX = "optim.state."


def boxed_state_dict(model: nn.Module, *, copy: bool = False) -> dict[str, Any]:
    """Return a model's state dict with the shards of this rank as boxes, without communication.

    Args:
        model: a wrapper, or a module that holds wrappers.
        copy: copy the shards to the CPU.
    """
    config = ShardedStateDictConfig(boxes=True, offload_to_cpu=copy)
    return state_dict_in(model, settings_for(StateDictType.SHARDED_STATE_DICT, config, None))


def serialized(value: Any) -> bytes:
    """Serialize ``value`` by ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def packed(value: Any, source: str) -> bytes:
    """Serialize ``value``, and check that it can be read back with ``weights_only``.

    Args:
        value: the value.
        source: names the value in the error.

    Raises:
        OptionError: it cannot.
    """
    data = serialized(value)
    try:
        unpacked(data)
    except Exception as error:
        raise OptionError(
            f"{source} holds something that torch.load(weights_only=True) refuses to read back, for safety: "
            f"{str(error).splitlines()[0]}. Keep to tensors, numbers, strings and containers of them."
        ) from error
    return data


def unpacked(data: bytes) -> Any:
    """Return the value that :func:`serialized` or :func:`packed` serialized."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def check_readable(contents: OptimContents) -> None:
    """Raise if an optimizer's settings, or its states that are no tensors, cannot be read back; see :func:`packed`."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in contents.groups or ()]
    states = [[each for each in row.values() if not isinstance(each, torch.Tensor)] for row in contents.state.values()]
    packed([groups, states], "The optimizer")


class CheckpointValues:
    """Holds the values of a checkpoint.

    Attributes:
        tensors: nested dicts of this rank's tensors.
        rows: by parameter, the optimizer states of this rank that are no tensors; serialized by :meth:`keep_share`.
        rows_text: the rows that this rank sends, as a text for :meth:`plain_of`; empty if there are none.
        plain: all other values that are no tensors; rank 0's are saved.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.rows_text = ""
        self.plain: dict[str, Any] = {}

    def add_model(self, model: nn.Module, *, copy: bool) -> None:
        """Add the model's tensors, as boxes, and its other values (results of ``get_extra_state``).

        Raises:
            OptionError: a value cannot be read back safely.
        """
        for unit in units_of(model):
            check_idle(unit, "save_checkpoint")
        # The state dict of a compiled model has torch.compile's prefix in its names.
        found = {clean_fqn(name): value for name, value in boxed_state_dict(model, copy=copy).items()}
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        # Boxes are copies already; buffers are the live ones.
        self.tensors["model"] = {name: _copied(value) if copy else value for name, value in tensors.items()}
        plain = {name: value for name, value in found.items() if name not in tensors}
        # A copy: a thread may write them while training changes the live ones.
        self.plain["model"] = unpacked(packed(plain, "The state dict's values that are no tensors (get_extra_state)"))

    def add_optim(self, index: ParamIndex, contents: OptimContents, peers: Peers, *, copy: bool) -> None:
        """Add the optimizer's states. Every rank must call this: a state that has a handler is merged on one rank."""
        config = ShardedOptimStateDictConfig(offload_to_cpu=copy, boxes=True)
        codec = codec_of(StateDictType.SHARDED_STATE_DICT, config)
        found = save_optim_state(index, contents, codec, config, peers=peers)
        # Merged states are on one rank each, so they are saved as tensors whatever their shape.
        merged = {name for unit in index.units for name in unit.optim_state_handlers}
        tensors: dict[str, dict[str, Any]] = {}
        for fqn, row in found["state"].items():
            tensors[fqn] = {
                k: v for k, v in row.items() if isinstance(v, torch.Tensor) and (k in merged or _is_array(v))
            }
            self.rows[fqn] = {k: v for k, v in row.items() if k not in tensors[fqn]}
        self.tensors["optim"] = {"state": tensors}
        self.plain["optim"] = {"param_groups": found["param_groups"]}

    def unmanaged_names(self, index: ParamIndex) -> list[str]:
        """Return the names of the model's tensors that no unit manages."""
        return [name for name in self.tensors["model"] if name not in index.by_name]

    def keep_share(self, index: ParamIndex, rank: int, *, is_alike: bool) -> None:
        """Drop the values that other ranks write: replicas take turns by name, and rank 0 writes what every rank has.

        Rows are serialized, so that training can change the live ones while a thread writes.

        Args:
            index: the model's parameters.
            rank: this rank among those of the model.
            is_alike: tensors that no unit manages have the same names on every rank.
        """
        by_name = {**index.by_name, **index.dtensors_by_name}

        def is_mine(name: str, value: Any) -> bool:
            param = by_name.get(name)
            if param is None:
                return rank == 0 or not is_alike or isinstance(value, (BoxedTensor, DTensor))
            if param.full_shape == param.shape and not param.adapter.is_first_of_mesh:
                return False
            replicas = param.unit.options.groups.replicate
            return zlib.crc32(name.encode()) % replicas.size == replicas.rank

        def has_own_rows(name: str) -> bool:
            # Ranks with elements of a parameter have the same row: the one with the first element sends it.
            param = by_name.get(name)
            if param is None:
                return True
            if name in index.dtensors_by_name:
                return param.rank_group.rank == 0
            run = param.local_shard.in_param
            return param.rank_group.rank == 0 if math.prod(param.shape) == 0 else run.start == 0 and not run.is_empty

        def mine(values: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if is_mine(name, value)}

        self.tensors["model"] = mine(self.tensors["model"])
        if "optim" in self.tensors:
            self.tensors["optim"]["state"] = mine(self.tensors["optim"]["state"])
        rows = mine({fqn: row for fqn, row in self.rows.items() if row and has_own_rows(fqn)})
        self.rows_text = base64.b64encode(serialized(rows)).decode() if rows else ""

    @property
    def nbytes(self) -> int:
        """Size of this rank's tensors in bytes."""
        states = self.tensors.get("optim", {"state": {}})["state"]
        tensors = [*self.tensors["model"].values(), *(value for row in states.values() for value in row.values())]
        return sum(part.nbytes for each in tensors for part in _parts(each))

    def plain_of(self, each_rows: Sequence[str]) -> bytes:
        """Serialize the plain values with the rows of all ranks, which :attr:`rows_text` holds."""
        if "optim" in self.plain:
            state: dict[str, dict[str, Any]] = {}
            for text in filter(None, each_rows):
                state = {**unpacked(base64.b64decode(text)), **state}
            self.plain["optim"]["state"] = state
        return serialized(self.plain)


def _parts(value: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return this rank's tensors of a value."""
    if isinstance(value, BoxedTensor):
        return value.parts
    return (value.to_local() if isinstance(value, DTensor) else value,)


def _copied(value: torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, BoxedTensor) else value.detach().to("cpu", copy=True)


def _is_array(value: torch.Tensor) -> bool:
    # A 0-dim parameter is a BoxedTensor too.
    return value.dim() > 0 or isinstance(value, BoxedTensor)


def saved_values(reader: Any, found: disk.Commit, together: Consensus) -> tuple[dict[str, Any], Any]:
    """Read the values of a checkpoint that are no tensors.

    Args:
        reader: reader of its directory.
        found: its record.
        together: the ranks that load it.

    Returns:
        The plain values; and this rank's ``extra``, rank 0's if another number of ranks saved it.
    """
    from fsdp_flat.checkpoint.dcp_files import read_value

    # Format 1: a file of each rank has its extra, and the rows of parameters of which it has elements.
    files = [found.path / record.name for record in found.files if record.name.startswith("rank-")]
    if not files:
        num_ranks = sum(name.startswith("extra.") for name in reader.read_metadata().state_dict_metadata)
        rank = together.rank if num_ranks == together.size else 0
        return read_value("plain", reader), read_value(f"extra.{rank}", reader)
    each = [unpacked(path.read_bytes()) for path in sorted(files)]
    plain = each[0]
    for other in each if "optim" in plain else ():
        plain["optim"]["state"] = {**other["optim"]["state"], **plain["optim"]["state"]}
    return plain, each[together.rank if len(each) == together.size else 0]["extra"]


def model_template(model: nn.Module, reader: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Create tensors to read the model's files into, and check the files' names and shapes against the model.

    Returns:
        The tensors by the files' names; and the names in the model's own state dict by the files' names.

    Raises:
        LoadError: a name is missing or unexpected, or a shape differs.
    """
    values = boxed_state_dict(model, copy=True)
    metadata = reader.read_metadata().state_dict_metadata
    own = {clean_fqn(name): name for name in values}
    template = {name: _copied(values[raw]) for name, raw in own.items() if isinstance(values[raw], torch.Tensor)}
    saved = {name.removeprefix("model."): entry for name, entry in metadata.items() if name.startswith("model.")}
    problems = [f"{name!r} is missing there" for name in template if name not in saved]
    problems += [f"{name!r} is not in the model" for name in saved if name not in template]
    problems += [
        f"{name!r} has shape {tuple(saved[name].size)} there and {tuple(value.shape)} in the model"
        for name, value in template.items()
        if name in saved and tuple(saved[name].size) != tuple(value.shape)
    ]
    if problems:
        raise LoadError(f"{reader.path} does not fit the model: {some_of(problems, 5, '; ')}. Nothing was loaded.")
    return template, own


def optim_template(
    model: nn.Module, contents: OptimContents, reader: Any, plain: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Create tensors to read the optimizer's files into.

    Returns:
        The tensors under ``"state"``; and the states that are full tensors, read on demand.

    Raises:
        LoadError: the checkpoint has no optimizer, or a name or shape does not fit the model.
    """
    from fsdp_flat.checkpoint.dcp_files import read_into

    if "optim" not in plain:
        raise LoadError(f"{reader.path} was saved without an optimizer; load it with optim=None. Nothing was loaded.")
    wanted: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(_OPTIM_PREFIX):
            fqn, _, name = key.removeprefix(_OPTIM_PREFIX).rpartition(".")
            wanted.setdefault(fqn, {})[name] = (tuple(entry.size), entry.properties.dtype)

    def read(fqn: str, name: str, into: torch.Tensor) -> torch.Tensor:
        read_into({"optim": {"state": {fqn: {name: into}}}}, reader)
        return into

    template, deferred = template_states(model, wanted, read, owners=contents.owners)
    return {"state": template}, deferred


def optim_state_of(plain: Mapping[str, Any], given: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Merge tensors and other values into one optimizer state dict, keyed by names."""
    state = {fqn: dict(row) for fqn, row in plain["optim"]["state"].items()}
    for part in given:
        for fqn, row in part.items():
            state.setdefault(fqn, {}).update(row)
    return {"state": state, "param_groups": plain["optim"]["param_groups"]}
