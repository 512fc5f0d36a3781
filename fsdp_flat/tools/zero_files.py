"""Reads checkpoints of DeepSpeed ZeRO-3: :func:`open_zero3`.

Source of the format: DeepSpeed's script zero_to_fp32. Each rank saves ``*_model_states.pt``, with the names and shapes
of the parameters, and ``*_optim_states.pt``, with its part of all of them in fp32, one after the other: of each
parameter as many elements as on every rank, of which the last are padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from fsdp_flat.errors import LoadError, counted
from fsdp_flat.tools.stored_checkpoint import Keys, Part, StoredCheckpoint, TensorInFiles, flattened
from fsdp_flat.tools.torch_archives import StoredTensor, damaged_record, read_archive

_OPTIM = "_optim_states.pt"
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")


def zero_files(path: Path) -> list[Path]:
    """Return the files of the ranks, by rank; for a folder with DeepSpeed's file ``latest`` those of that step."""
    if not path.is_dir():
        return []
    latest = path / "latest"
    folder = path / latest.read_text().strip() if latest.is_file() else path
    found = [each for each in folder.glob(f"*{_OPTIM}") if _RANK.search(each.name)]
    return sorted(found, key=_rank_of)


def _rank_of(file: Path) -> int:
    match = _RANK.search(file.name)
    assert match is not None
    return int(match[1])


def open_zero3(path: Path, allow_pickle: bool) -> StoredCheckpoint:
    """Open a checkpoint of ZeRO-3: the parameters in fp32, the buffers, and the optimizer's states of parameters.

    Raises:
        LoadError: it is of another stage, or of a model that is sharded in other ways too.
    """
    files = zero_files(path)
    if any(match[2] != "00" for file in files if (match := _RANK.search(file.name))):
        raise LoadError(f"{path} is of a model that tensor parallelism shards too, which is not read.")
    model_files = [file.with_name(file.name.replace(_OPTIM, "_model_states.pt").replace("bf16_", "")) for file in files]
    missing = [file for file in model_files if not file.exists()]
    if missing:
        raise LoadError(f"{missing[0]} does not exist.")
    models = [read_archive(file, allow_pickle=allow_pickle) for file in model_files]
    model = models[0]
    shards = [read_archive(file, allow_pickle=allow_pickle)["optimizer_state_dict"] for file in files]
    stages = {int(shard.get("zero_stage", 0)) for shard in shards}
    num_ranks = shards[0]["partition_count"]
    num_ranks = max(num_ranks) if isinstance(num_ranks, (list, tuple)) else num_ranks
    if stages != {3} or num_ranks != len(files):
        raise LoadError(
            f"{path} is of ZeRO stage {sorted(stages)} on {counted(num_ranks, 'ranks')}, with files of {len(files)}; "
            "stage 3 is read, with the files of all ranks."
        )
    tensors: dict[Keys, TensorInFiles] = {}
    shapes = {name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()}
    at = 0
    for name, shape in shapes.items():
        keys = ("module", name)
        tensors[keys], at = _sharded(keys, shape, [shard["fp32_flat_groups"] for shard in shards], at, files)
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        fragments = [[each["frozen_param_fragments"][name]] for each in models]
        keys = ("module", name)
        tensors[keys], _ = _sharded(keys, tuple(shape), fragments, 0, files)
    states = [shard.get("optimizer_state_dict", {}).get("state", {}) for shard in shards]
    for state_name in [name for name, value in next(iter(states[0].values()), {}).items() if _is_flat(value)]:
        groups = [[row[state_name] for _, row in sorted(state.items())] for state in states]
        at = 0
        for name, shape in shapes.items():
            state_keys = ("optimizer", "state", name, state_name)
            tensors[state_keys], at = _sharded(state_keys, shape, groups, at, files)
    buffers = set(model.get("buffer_names", ()))
    for keys, value in flattened(model["module"], ("module",)):
        if isinstance(value, StoredTensor) and keys[1] in buffers:
            part = Part((0,) * len(value.shape), value.shape, partial(_same, value), value.file)
            tensors[keys] = TensorInFiles(keys, value.shape, value.dtype, (part,))
    for alias, name in model.get("shared_params", {}).items():
        if ("module", name) in tensors:
            first = replace(tensors["module", name], same_as=("zero3", name))
            tensors["module", name] = first
            tensors["module", alias] = replace(first, keys=("module", alias))
    others = {keys: value for keys, value in flattened(model) if keys and keys[0] in ("global_steps", "ds_version")}
    return StoredCheckpoint(
        path=path,
        kind="zero3",
        writer=f"DeepSpeed {model.get('ds_version', '')}".strip(),
        num_ranks=num_ranks,
        tensors=tensors,
        values=others,
        files=(*files, *model_files),
        problems=partial(_problems, [*files, *model_files]),
    )


def _is_flat(value: object) -> bool:
    return isinstance(value, StoredTensor) and len(value.shape) == 1


def _same(value: StoredTensor) -> StoredTensor:
    return value


def _sharded(
    keys: Keys, shape: tuple[int, ...], flat_groups: list[list[StoredTensor]], at: int, files: list[Path]
) -> tuple[TensorInFiles, int]:
    """Return the parameter whose part begins at an element of each rank's flat tensors, and where the next begins."""
    numel, num_ranks = prod(shape), len(files)
    most = -(-numel // num_ranks)
    parts = []
    for rank, (groups, file) in enumerate(zip(flat_groups, files, strict=True)):
        offset = min(rank * most, numel)
        left, position = min(most, numel - offset), at
        for group in groups:
            size = prod(group.shape)
            if position < size and left > 0:
                num = min(left, size - position)
                start = group.start + position * group.dtype.itemsize
                piece = StoredTensor(group.file, start, group.dtype, (num,), (1,), (group.file, start))
                parts.append(Part((offset,), (num,), partial(_same, piece), file, rank))
                offset, left, position = offset + num, left - num, position + num
            position -= size
            if position < 0:
                break
    dtype = parts[0].find().dtype if parts else torch.float32
    return TensorInFiles(keys, shape, dtype, tuple(parts), has_flat_parts=True), at + most


def _problems(files: list[Path]) -> Iterator[str]:
    for file in files:
        if (bad := damaged_record(file)) is not None:
            yield f"{file.name}: {bad} is damaged"
