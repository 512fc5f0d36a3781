"""Shows what a checkpoint holds: the command ``show``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdp_flat.errors import counted
from fsdp_flat.sizes import size_text
from fsdp_flat.tools.checkpoint_readers import open_checkpoint
from fsdp_flat.tools.command_output import TextTable, show
from fsdp_flat.tools.stored_checkpoint import TensorInFiles, dotted_name
from fsdp_flat.tools.text import shortened


def show_checkpoint(path: Path, *, allow_pickle: bool, as_json: bool) -> int:
    """Show what a checkpoint holds: names, shapes, dtypes, bytes and ranks of its tensors, and its other values."""
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    about = checkpoint.summary()
    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: _sort_key(tensor.name))
    values = {dotted_name(keys): repr(value) for keys, value in checkpoint.values.items()}
    data = {**about, "tensors": [_described(tensor) for tensor in tensors], "values": values}
    head = (
        f"{checkpoint.path}: {about['kind']}, written by {about['writer']}"
        + ("" if checkpoint.num_ranks is None else f", {counted(checkpoint.num_ranks, 'ranks')}")
        + f"; {counted(len(tensors), 'tensors')}, {size_text(checkpoint.nbytes)} in "
        + counted(len(checkpoint.files), "files")
    )
    rows = [
        [
            tensor.name,
            str(tensor.dtype).removeprefix("torch."),
            "x".join(map(str, tensor.shape)) or "1 element",
            size_text(tensor.nbytes),
            str(len(tensor.distinct_parts)),
            _ranks_text(tensor),
        ]
        for tensor in tensors
    ]
    table = TextTable(("name", "dtype", "shape>", "size>", "parts>", "ranks"), rows)
    others = TextTable(("value", "is"), [[name, shortened(text)] for name, text in sorted(values.items())])
    show(data, head, table, others, as_json=as_json)
    return 0


def _sort_key(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _described(tensor: TensorInFiles) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "nbytes": tensor.nbytes,
        "parts": [
            {"offsets": list(part.offsets), "sizes": list(part.sizes), "file": part.file.name, "rank": part.rank}
            for part in tensor.distinct_parts
        ],
    }


def _ranks_text(tensor: TensorInFiles) -> str:
    ranks = sorted({part.rank for part in tensor.distinct_parts if part.rank is not None})
    if len(ranks) > 3 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
