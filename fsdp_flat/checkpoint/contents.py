"""Collects and restores the contents of a checkpoint: tensors as boxes, and each rank's non-tensor values."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from fsdp_flat.checkpoint import directory as disk
from fsdp_flat.errors import LoadError, OptionError
from fsdp_flat.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime import check_idle, units_of
from fsdp_flat.state import BoxedTensor, OptimContents, codec_of, save_optim_state

__all__ = [
    "NonTensorState",
    "add_optim",
    "collected",
    "model_template",
    "name_of",
    "optim_state_of",
    "packed",
    "wanted_of_optim",
]

_OPTIM_PREFIX = "optim.state."


def name_of(rank: int) -> str:
    """Return the file name of a rank's non-tensor values."""
    return f"rank-{rank:05d}.pt"


def packed(value: Any) -> bytes:
    """Serialize ``value`` by ``torch.save``, and check that it can be read back with ``weights_only``.

    Raises:
        OptionError: it cannot.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise OptionError(
            "extra (or the optimizer's settings) holds something that torch.load(weights_only=True) refuses to read "
            f"back, for safety: {str(error).splitlines()[0]}. Keep to tensors, numbers, strings and containers of them."
        ) from error
    return buffer.getvalue()


def collected(model: nn.Module, *, copy: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's tensors for the files, as boxes, and its non-tensor values."""
    for unit in units_of(model):
        check_idle(unit, "save_checkpoint")
    # The state dict of a compiled model has torch.compile's prefix in its names.
    values = {clean_fqn(name): value for name, value in _boxed_model(model, copy=copy).items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    plain: dict[str, Any] = {"model": {name: value for name, value in values.items() if name not in tensors}}
    if copy:
        # Boxes are copies already; buffers are the live ones.
        tensors = {name: _copied(value) for name, value in tensors.items()}
    return {"model": tensors}, plain


def add_optim(
    state: dict[str, Any], plain: dict[str, Any], model: nn.Module, contents: OptimContents, *, copy: bool
) -> None:
    """Add the optimizer's states to ``state`` and ``plain``.

    Every rank must call this: each state that has a handler is merged on one rank.
    """
    config = ShardedOptimStateDictConfig(offload_to_cpu=copy, boxes=True)
    codec = codec_of(StateDictType.SHARDED_STATE_DICT, config)
    found = save_optim_state(model, contents, codec, config, merge_on_one_rank=True)
    rows = found["state"]
    # Merged states are on one rank each, so they are saved as tensors whatever their shape.
    merged = {name for unit in units_of(model) for name in unit.optim_state_handlers}
    arrays = {
        fqn: {k: v for k, v in row.items() if _is_array(v) or (k in merged and isinstance(v, torch.Tensor))}
        for fqn, row in rows.items()
    }
    state["optim"] = {"state": arrays}
    plain["optim"] = {
        "state": {fqn: {k: v for k, v in row.items() if k not in arrays[fqn]} for fqn, row in rows.items()},
        "param_groups": found["param_groups"],
    }


def _copied(value: torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, BoxedTensor) else value.detach().to("cpu", copy=True)


def _is_array(value: Any) -> bool:
    # A 0-dim parameter is a BoxedTensor too.
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or isinstance(value, BoxedTensor))


def _boxed_model(model: nn.Module, *, copy: bool) -> dict[str, Any]:
    config = ShardedStateDictConfig(boxes=True, offload_to_cpu=copy)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        return model.state_dict()


class NonTensorState:
    """Reads the non-tensor values that ranks saved, on demand.

    Attributes:
        num_ranks: number of ranks that saved the checkpoint.
    """

    def __init__(self, found: disk.Commit) -> None:
        self._path = found.path
        self.num_ranks = sum(record.name.startswith("rank-") for record in found.files)
        self._read: dict[int, dict[str, Any]] = {}

    def of(self, rank: int) -> dict[str, Any]:
        """Return the values that ``rank`` saved."""
        if rank not in self._read:
            path = self._path / name_of(rank)
            self._read[rank] = torch.load(path, map_location="cpu", weights_only=True)
        return self._read[rank]

    def optim_row(self, fqn: str) -> dict[str, Any]:
        """Return a parameter's non-tensor states from the first rank that has any; an empty shard may have none."""
        ranks = (self.of(rank)["optim"]["state"] for rank in range(self.num_ranks))
        return next((state[fqn] for state in ranks if fqn in state), {})


def model_template(
    model: nn.Module, metadata: Mapping[str, Any], path: Path
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Create tensors to read the model's files into, and check the files' names and shapes against the model.

    Returns:
        The tensors by the files' names; and the names in the model's own state dict by the files' names.

    Raises:
        LoadError: a name is missing or unexpected, or a shape differs.
    """
    values = _boxed_model(model, copy=True)
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
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise LoadError(f"{path} does not fit the model: {'; '.join(problems[:5])}{more}. Nothing was loaded.")
    return template, own


def wanted_of_optim(
    metadata: Mapping[str, Any], plain: NonTensorState, path: Path
) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Return shape and dtype of the saved optimizer states, by parameter and state name.

    Raises:
        LoadError: the checkpoint has no optimizer.
    """
    if "optim" not in plain.of(0):
        raise LoadError(f"{path} was saved without an optimizer; load it with optim=None. Nothing was loaded.")
    wanted: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for key, entry in metadata.items():
        if key.startswith(_OPTIM_PREFIX):
            fqn, _, name = key.removeprefix(_OPTIM_PREFIX).rpartition(".")
            wanted.setdefault(fqn, {})[name] = (tuple(entry.size), entry.properties.dtype)
    return wanted


def optim_state_of(given: Sequence[Mapping[str, Mapping[str, Any]]], plain: NonTensorState) -> dict[str, Any]:
    """Merge tensor and non-tensor states into one optimizer state dict, keyed by names."""
    names = dict.fromkeys([*plain.of(0)["optim"]["state"], *(fqn for part in given for fqn in part)])
    state: dict[str, dict[str, Any]] = {fqn: dict(plain.optim_row(fqn)) for fqn in names}
    for part in given:
        for fqn, row in part.items():
            state[fqn].update(row)
    return {"state": state, "param_groups": plain.of(0)["optim"]["param_groups"]}
