"""Compares two checkpoints, of any formats, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fsdp_flat.tools.stored_checkpoint import StoredCheckpoint, TensorInFiles, dotted_name


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
    return tuple(each.below(each.model_keys(key if _has(each, key) else None)) for each in (a, b))


def _has(checkpoint: StoredCheckpoint, key: str | None) -> bool:
    return key is not None and any(dotted_name(keys).startswith(f"{key}.") for keys in checkpoint.tensors)


def differences(a: StoredCheckpoint, b: StoredCheckpoint) -> Iterator[EntryDifference]:
    """Yield every difference, in the order of names; memory for a tensor of each is needed."""
    in_a, in_b = ({dotted_name(keys): tensor for keys, tensor in each.tensors.items()} for each in (a, b))
    for name in sorted({*in_a, *in_b}):
        if name not in in_b:
            yield EntryDifference(name, "only in A", in_a=_kind(in_a[name]))
        elif name not in in_a:
            yield EntryDifference(name, "only in B", in_b=_kind(in_b[name]))
        else:
            yield from _of_tensors(name, in_a[name], in_b[name])
    values_a, values_b = ({dotted_name(keys): value for keys, value in each.values.items()} for each in (a, b))
    for name in sorted({*values_a, *values_b}):
        texts = [repr(values[name]) if name in values else "" for values in (values_a, values_b)]
        if texts[0] != texts[1]:
            what = "value" if all(texts) else "only in A" if texts[0] else "only in B"
            yield EntryDifference(name, what, texts[0], texts[1])


def _kind(tensor: TensorInFiles) -> str:
    return f"{tensor.dtype} {tensor.shape}".removeprefix("torch.")


def _of_tensors(name: str, a: TensorInFiles, b: TensorInFiles) -> Iterator[EntryDifference]:
    if a.shape != b.shape:
        yield EntryDifference(name, "shape", str(a.shape), str(b.shape))
        return
    if a.dtype != b.dtype:
        yield EntryDifference(name, "dtype", str(a.dtype), str(b.dtype))
    left, right = a.full(), b.full()
    # NaN equals NaN of the same bits, and 0.0 does not equal -0.0: the comparison is of bits where dtypes agree.
    if a.dtype == b.dtype and torch.equal(_bits(left), _bits(right)):
        return
    exact = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    wide = [each.reshape(-1).to(exact) for each in (left, right)]
    unequal = _bits(left).ne(_bits(right)).any(-1) if a.dtype == b.dtype else wide[0].ne(wide[1])
    if not bool(unequal.any()):
        return
    first = int(unequal.nonzero()[0])
    norms = [float(torch.linalg.vector_norm(each)) for each in wide]
    index = tuple(int(at) for at in torch.unravel_index(torch.tensor(first), a.shape)) if a.shape else ()
    in_a, in_b = (str(each.reshape(-1)[first].item()) for each in (left, right))
    largest = float((wide[0] - wide[1]).abs().max())
    yield EntryDifference(name, "values", in_a, in_b, index, norms[0], norms[1], largest)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements, of shape (elements, bytes of one)."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).view(tensor.numel(), tensor.dtype.itemsize)
