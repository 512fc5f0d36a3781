"""Writes and reads tensor files of torch.distributed.checkpoint without exchanging pickled objects.

``dcp.save`` and ``dcp.load`` send plans between ranks as pickles. Here the same planner and writer run, and ranks
exchange the plans and the results (the rank that writes each box, and its location in the files) as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_flat.checkpoint.consensus import Consensus
from fsdp_flat.checkpoint.metadata import SafeReader
from fsdp_flat.comm import dtype_from_name

__all__ = ["read_tensors", "write_tensors"]


def write_tensors(state: dict[str, Any], path: Path, together: Consensus) -> None:
    """Write a checkpoint that ``dcp.load`` reads. Every rank must call this; an error on one rank is raised on all.

    Args:
        state: nested dicts of tensors; replicated tensors are the same on every rank.
        path: the directory.
        together: consensus of the ranks.
    """
    with warnings.catch_warnings():
        # torch itself uses names that it has deprecated.
        warnings.filterwarnings("ignore", module="torch")
        planner, writer = dcp.DefaultSavePlanner(), dcp.FileSystemWriter(path)
        is_first = together.rank == 0
        own = ""
        with together.propagate_errors():
            planner.set_up_planner(state, writer.storage_meta(), is_first)
            writer.set_up_storage_writer(is_first)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            own = _plan_text(plan)
        plans = together.gather_texts(own)
        answers: list[str] = []
        with together.propagate_errors():
            if is_first:
                given = [_plan_of(text) for text in plans]
                kept, metadata = planner.create_global_plan(_without_copies(given))
                answers = [_left_to_others(one, other) for one, other in zip(given, kept, strict=True)]
        left = set(json.loads(together.scatter_texts(answers)))
        written = ""
        with together.propagate_errors():
            items = [item for position, item in enumerate(plan.items) if position not in left]
            # The writer names files by the position of a plan in the list of all ranks' plans.
            mine = dataclasses.replace(plan, items=items)
            mine = writer.prepare_global_plan([mine] * (together.rank + 1))[together.rank]
            written = _results_text(writer.write_data(planner.finish_plan(mine), planner).wait())
        results = together.gather_texts(written)
        with together.propagate_errors():
            if is_first:
                writer.finish(metadata, [_results_of(text) for text in results])


def _without_copies(plans: list[SavePlan]) -> list[SavePlan]:
    """Assign every replicated tensor to the first rank that has it, so that all come from one rank if they differ."""
    seen: set[str] = set()
    found = []
    for plan in plans:
        items = [item for item in plan.items if item.type is not WriteItemType.TENSOR or item.index.fqn not in seen]
        seen.update(item.index.fqn for item in items if item.type is WriteItemType.TENSOR)
        found.append(dataclasses.replace(plan, items=items))
    return found


def _left_to_others(given: SavePlan, kept: SavePlan) -> str:
    """Return, as JSON, the positions of the items of a rank's plan that another rank writes."""
    indices = {item.index for item in kept.items}
    return json.dumps([position for position, item in enumerate(given.items) if item.index not in indices])


def read_tensors(state: dict[str, Any], reader: SafeReader) -> None:
    """Read this rank's part of a checkpoint into the tensors of ``state``, without communication.

    Args:
        state: nested dicts of tensors.
        reader: reader of the checkpoint's directory.
    """
    with warnings.catch_warnings():
        # Reading without communication is intended, and torch itself uses names that it has deprecated.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", module="torch")
        dcp.load(state, storage_reader=reader, no_dist=True)


def _place(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset)]


def _places(given: list[Any]) -> list[tuple[str, torch.Size | None]]:
    return [(name, None if offset is None else torch.Size(offset)) for name, offset in given]


def _plan_text(plan: SavePlan) -> str:
    items = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, f"{item.index.fqn} is no tensor"
        chunk = [list(data.chunk.offsets), list(data.chunk.sizes)]
        items.append([_place(item.index), item.type.name, chunk, str(data.properties.dtype), list(data.size)])
    # The planner's data: the nested keys of each flattened name.
    names = {item.index.fqn for item in plan.items}
    nested = [[name, list(keys)] for name, keys in (plan.planner_data or {}).items() if name in names]
    return json.dumps([items, nested])


def _plan_of(text: str) -> SavePlan:
    items, nested = json.loads(text)
    found = []
    for place, kind, (offsets, sizes), dtype, size in items:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype_from_name(dtype)), torch.Size(size))
        found.append(WriteItem(MetadataIndex(*_places([place])[0]), WriteItemType[kind], tensor_data=data))
    return SavePlan(found, planner_data={name: tuple(keys) for name, keys in nested})


def _results_text(results: list[WriteResult]) -> str:
    return json.dumps([[_place(each.index), each.size_in_bytes, vars(each.storage_data)] for each in results])


def _results_of(text: str) -> list[WriteResult]:
    return [
        WriteResult(MetadataIndex(*_places([place])[0]), nbytes, _StorageInfo(**where))
        for place, nbytes, where in json.loads(text)
    ]
