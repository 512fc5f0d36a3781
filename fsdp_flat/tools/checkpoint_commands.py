"""Answers what is in checkpoints: the functions behind ``ls``, ``show``, ``verify`` and ``diff``, without typer."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_flat.checkpoint.progress import progress_bar
from fsdp_flat.errors import FsdpFlatError, OptionError, counted
from fsdp_flat.tools.checkpoint_diff import compared_parts, differences
from fsdp_flat.tools.checkpoint_readers import (
    has_steps,
    is_checkpoint,
    looks_like_checkpoint,
    open_checkpoint,
    problems_of,
)
from fsdp_flat.tools.checkpoint_writers import WriteOptions, write_checkpoint
from fsdp_flat.tools.command_output import TextTable, show
from fsdp_flat.tools.stored_checkpoint import StoredCheckpoint, TensorInFiles, dotted_name
from fsdp_flat.tools.text import size_text


def show_folder(folder: Path, *, allow_pickle: bool, as_json: bool) -> int:
    """Show the checkpoints in a folder, and those that cannot be read; return 1 if there are such."""
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder; show one checkpoint by: fsdp-flat show {folder}")
    found: list[dict[str, Any]] = []
    inside = sorted(folder.iterdir())
    # A folder with a model's files may have folders of checkpoints beside them, as the Trainer's has.
    is_one = is_checkpoint(folder) and not any(
        path.is_dir() and (looks_like_checkpoint(path) or has_steps(path)) for path in inside
    )
    for path in [folder] if is_one else inside:
        if path.suffix in (".writing", ".removing", ".replaced"):
            found.append({"name": path.name, "problem": "unfinished"})
        elif looks_like_checkpoint(path) or has_steps(path):
            found.append({"name": path.name or path.resolve().name, **_summary_or_problem(path, allow_pickle)})
    rows = [
        [
            each["name"],
            each.get("kind") or each["problem"],
            *(["", "", ""] if "problem" in each else _cells(each["num_tensors"], each["nbytes"], each["num_ranks"])),
        ]
        for each in found
    ]
    table = TextTable(("name", "kind", "tensors>", "size>", "ranks>"), rows)
    show(found, table if rows else f"{folder} has no checkpoints.", as_json=as_json)
    return int(any("problem" in each for each in found))


def _summary_or_problem(path: Path, allow_pickle: bool) -> dict[str, Any]:
    try:
        return _summary(open_checkpoint(path, allow_pickle=allow_pickle))
    except FsdpFlatError as error:
        return {"problem": str(error)}


def _summary(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "writer": checkpoint.writer.strip(),
        "step": checkpoint.step,
        "num_ranks": checkpoint.num_ranks,
        "num_files": len(checkpoint.files),
        "num_tensors": len(checkpoint.tensors),
        "nbytes": checkpoint.nbytes,
    }


def _cells(num_tensors: int, nbytes: int, num_ranks: int | None) -> list[str]:
    return [str(num_tensors), size_text(nbytes), "" if num_ranks is None else str(num_ranks)]


def show_checkpoint(path: Path, *, allow_pickle: bool, as_json: bool) -> int:
    """Show what a checkpoint holds: names, shapes, dtypes, bytes and ranks of its tensors, and its other values."""
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    about = _summary(checkpoint)
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
    others = TextTable(("value", "is"), [[name, _short(text)] for name, text in sorted(values.items())])
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


def _short(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def show_problems(path: Path, *, allow_pickle: bool, as_json: bool) -> int:
    """Show what is wrong with a checkpoint; return 1 if something is."""
    try:
        checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
        num, problems = len(checkpoint.tensors), list(problems_of(checkpoint))
    except OptionError:
        raise
    except FsdpFlatError as error:
        num, problems = 0, [str(error)]
    data = {"path": str(path), "num_tensors": num, "problems": problems}
    good = f"{path}: {counted(num, 'tensors')} complete and undamaged"
    show(data, *(problems or [good]), as_json=as_json)
    return int(bool(problems))


def show_differences(path_a: Path, path_b: Path, *, key: str | None, allow_pickle: bool, as_json: bool) -> int:
    """Show how two checkpoints differ; return 1 if they do."""
    opened = [open_checkpoint(path, allow_pickle=allow_pickle) for path in (path_a, path_b)]
    a, b = compared_parts(opened[0], opened[1], key)
    found = list(differences(a, b))
    rows = [
        [
            each.name,
            each.what,
            _short(each.in_a) if each.index is None else f"{each.in_a} at {each.index}",
            _short(each.in_b),
            *("" if number is None else f"{number:.6g}" for number in (each.norm_a, each.norm_b, each.largest)),
        ]
        for each in found
    ]
    table = TextTable(("name", "differs in", "A", "B", "norm of A>", "norm of B>", "largest difference>"), rows)
    equal = f"{counted(len(a.tensors), 'tensors')} and {counted(len(a.values), 'values')} are equal, bit by bit"
    data = {"a": str(path_a), "b": str(path_b), "num_compared": len(a.tensors), "differences": list(map(asdict, found))}
    show(data, table if found else equal, as_json=as_json)
    return int(bool(found))


_NO_CONFIG = (
    "There is no config.json beside these files, so from_pretrained will not know the model: "
    "convert --to safetensors writes one into a folder, with --config FILE."
)


def convert_checkpoint(
    source: Path, target: Path, kind: str | None, options: WriteOptions, *, allow_pickle: bool, as_json: bool
) -> int:
    """Write a checkpoint as one of another kind (None: of the same, or torch's), and show what was written."""
    checkpoint = open_checkpoint(source, allow_pickle=allow_pickle)
    kind = kind or ("sharded" if checkpoint.kind == "fsdp_flat" else "dcp")
    bar = progress_bar(f"Writing {target.name}", asked=sys.stderr.isatty() and not as_json, here=True)
    with bar(checkpoint.nbytes) as update:
        write_checkpoint(checkpoint, target, kind, options, update)
    made = open_checkpoint(target, allow_pickle=allow_pickle)
    text = f"{target}: {made.kind}, {counted(len(made.tensors), 'tensors')}, {size_text(made.nbytes)} in "
    text += counted(len(made.files), "files")
    config = kind == "safetensors" and target.is_dir() and (target / "config.json").exists()
    unknown = "" if kind != "safetensors" or config else _NO_CONFIG
    show({**_summary(made), "has_config": bool(config)}, text, *([unknown] if unknown else []), as_json=as_json)
    return 0
