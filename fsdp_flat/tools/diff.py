"""Compares two checkpoints, of any formats, tensor by tensor: the command ``diff``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fsdp_flat.errors import counted
from fsdp_flat.tools.checkpoint_readers import open_checkpoint
from fsdp_flat.tools.command_output import TextTable, show
from fsdp_flat.tools.stored_checkpoint import StoredCheckpoint, TensorInFiles, dotted_name
from fsdp_flat.tools.text import shortened

# Bytes of the rows of a tensor that are compared at a time.
_BUFFER_NBYTES = 1 << 20


def show_differences(
    path_a: Path, path_b: Path, *, key: str | None, atol: float, rtol: float, allow_pickle: bool, as_json: bool
) -> int:
    """Show how two checkpoints differ, but for values within a tolerance; return 1 if they do."""
    opened = [open_checkpoint(path, allow_pickle=allow_pickle) for path in (path_a, path_b)]
    a, b = compared_parts(opened[0], opened[1], key)
    found = list(differences(a, b, atol, rtol))
    rows = [
        [
            each.name,
            each.what,
            shortened(each.in_a) if each.index is None else f"{each.in_a} at {each.index}",
            shortened(each.in_b),
            *("" if number is None else f"{number:.6g}" for number in (each.norm_a, each.norm_b, each.largest)),
        ]
        for each in found
    ]
    table = TextTable(("name", "differs in", "A", "B", "norm of A>", "norm of B>", "largest difference>"), rows)
    how = f"but for at most {atol:g} + {rtol:g} times the value in B" if atol or rtol else "bit by bit"
    last = f"{counted(len(a.tensors), 'tensors')} and {counted(len(a.values), 'values')} are equal, {how}"
    if found:
        num_all = len({dotted_name(keys) for each in (a, b) for keys in (*each.tensors, *each.values)})
        last = f"{len({each.name for each in found})} of {num_all} entries differ"
        # A difference that is NaN is the largest.
        by_size = [(math.isnan(each.largest), each.largest, each.name) for each in found if each.largest is not None]
        if by_size:
            _, largest, name = max(by_size)
            last += f", values by at most {largest:.6g}, in {name}"
    data = {"a": str(path_a), "b": str(path_b), "num_compared": len(a.tensors), "differences": list(map(asdict, found))}
    show(data, table, last, as_json=as_json)
    return int(bool(found))


@dataclass(frozen=True, slots=True)
class EntryDifference:
    """Describes how one entry differs.

    Attributes:
        name: its dotted name.
        what: "only in A", "only in B", "shape", "dtype", "values" or "value" (of what is no tensor).
        in_a, in_b: what is there, as text: of values the first that differs.
        index: the index of the first value that differs.
        norm_a, norm_b: 2-norms of all values.
        largest: the largest absolute difference.
    """

    name: str
    what: str
    in_a: str = ""
    in_b: str = ""
    index: tuple[int, ...] | None = None
    norm_a: float | None = None
    norm_b: float | None = None
    largest: float | None = None


def compared_parts(a: StoredCheckpoint, b: StoredCheckpoint, key: str | None) -> tuple[StoredCheckpoint, ...]:
    """Return what to compare: all, or the models alone if only one has other things or ``key`` names them."""
    named = [frozenset(map(dotted_name, each.tensors)) for each in (a, b)]
    if key is None and (named[0] & named[1] or not all(named)):
        return a, b
    models = []
    for checkpoint, names in zip((a, b), named, strict=True):
        has_key = any(name.startswith(f"{key}.") for name in names)
        models.append(checkpoint.below(checkpoint.model_keys(key if has_key else None)))
    return tuple(models)


def differences(
    a: StoredCheckpoint, b: StoredCheckpoint, atol: float = 0.0, rtol: float = 0.0
) -> Iterator[EntryDifference]:
    """Yield every difference, in the order of names; some rows of a tensor are in memory at a time.

    Values of tensors that differ by at most ``atol + rtol * abs(b)`` are taken for equal.
    """
    in_a, in_b = ({dotted_name(keys): tensor for keys, tensor in each.tensors.items()} for each in (a, b))
    for name in sorted({*in_a, *in_b}):
        if name not in in_b:
            yield EntryDifference(name, "only in A", in_a=_kind(in_a[name]))
        elif name not in in_a:
            yield EntryDifference(name, "only in B", in_b=_kind(in_b[name]))
        else:
            yield from _of_tensors(name, in_a[name], in_b[name], atol, rtol)
    values_a, values_b = ({dotted_name(keys): value for keys, value in each.values.items()} for each in (a, b))
    for name in sorted({*values_a, *values_b}):
        texts = [repr(values[name]) if name in values else "" for values in (values_a, values_b)]
        if texts[0] != texts[1]:
            what = "value" if all(texts) else "only in A" if texts[0] else "only in B"
            yield EntryDifference(name, what, texts[0], texts[1])


def _kind(tensor: TensorInFiles) -> str:
    return f"{tensor.dtype} {tensor.shape}".removeprefix("torch.")


def _of_tensors(name: str, a: TensorInFiles, b: TensorInFiles, atol: float, rtol: float) -> Iterator[EntryDifference]:
    if a.shape != b.shape:
        yield EntryDifference(name, "shape", str(a.shape), str(b.shape))
        return
    if a.dtype != b.dtype:
        yield EntryDifference(name, "dtype", str(a.dtype), str(b.dtype))
    first: tuple[int, str, str] | None = None
    for start, left, right in _blocks(a, b):
        unequal = _unequal(left, right)
        if atol or rtol:
            wide_a, wide_b = _exact(left, right)
            unequal &= ~((wide_a - wide_b).abs() <= atol + rtol * wide_b.abs())
        if bool(unequal.any()):
            at = int(unequal.nonzero()[0])
            first = start + at, str(left[at].item()), str(right[at].item())
            break
    if first is None:
        return
    squares_a = squares_b = largest = 0.0
    for _, left, right in _blocks(a, b):
        wide_a, wide_b = _exact(left, right)
        squares_a += float(wide_a.abs().square().sum())
        squares_b += float(wide_b.abs().square().sum())
        largest = max(largest, float((wide_a - wide_b).abs().max()))
    index = tuple(int(at) for at in torch.unravel_index(torch.tensor(first[0]), a.shape)) if a.shape else ()
    yield EntryDifference(name, "values", first[1], first[2], index, squares_a**0.5, squares_b**0.5, largest)


def _blocks(a: TensorInFiles, b: TensorInFiles) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the elements of two tensors of one shape, some rows at a time: the position of the first, and both 1-D."""
    if not a.numel:
        return
    row = a.numel // a.num_rows
    step = max(1, _BUFFER_NBYTES // (row * max(a.dtype.itemsize, b.dtype.itemsize)))
    for start in range(0, a.num_rows, step):
        stop = min(start + step, a.num_rows)
        yield start * row, a.rows(start, stop).reshape(-1), b.rows(start, stop).reshape(-1)


def _exact(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    return left.to(exact), right.to(exact)


def _unequal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return which elements differ; in their bits if the dtypes agree, so NaN equals itself and 0.0 is not -0.0."""
    if left.dtype != right.dtype:
        return torch.ne(*_exact(left, right))
    bits_a, bits_b = (each.view(torch.uint8).view(len(each), -1) for each in (left, right))
    return bits_a.ne(bits_b).any(-1)
