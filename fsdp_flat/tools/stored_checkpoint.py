"""Describes a checkpoint on disk: its tensors, each with the parts that files hold of it, and its other values."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from fsdp_flat.errors import LoadError, OptionError, some_of
from fsdp_flat.tools.torch_archives import DescribedTensor

# The names under which programs save a model or an optimizer beside other things.
_MODEL_NAMES = ("model", "state_dict", "model_state_dict", "module")
OPTIM_NAMES = ("optim", "optimizer", "optimizer_state_dict", "optim_state_dict", "optimizer_states", "optimizer_0")


class Position(int):
    """Stands for a key that is a position in a list; any other integer is a key of a dict."""


Keys = tuple[Any, ...]


def dotted_name(keys: Keys) -> str:
    """Return nested keys as a dotted name."""
    return ".".join(map(str, keys))


@dataclass(frozen=True, slots=True)
class Part:
    """Describes a box of a tensor in a file.

    Attributes:
        offsets: the index of its first element in the tensor.
        sizes: its size along each dim.
        read: returns its elements, which map the file or are read now.
        file: the file.
        rank: the rank that wrote it, if known.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    file: Path
    rank: int | None = None

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return prod(self.sizes)

    def elements(self) -> torch.Tensor:
        """Return its elements; raise a LoadError if the file holds another shape there."""
        found = self.read()
        if found.shape != self.sizes:
            raise LoadError(f"{self.file} has a part of shape {tuple(found.shape)} where one of {self.sizes} is due.")
        return found


@dataclass(frozen=True)
class TensorInFiles:
    """Describes a tensor in a checkpoint.

    Attributes:
        keys: its nested keys.
        parts: boxes that make it up; replicas may repeat some.
        shared: equal for tensors that share their elements, which then are one; None if nothing is known.
    """

    keys: Keys
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    shared: Any = None

    @property
    def name(self) -> str:
        """The keys as a dotted name."""
        return dotted_name(self.keys)

    @property
    def identity(self) -> Any:
        """Equal for tensors that share their elements, and for no others."""
        return self.keys if self.shared is None else self.shared

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def distinct_parts(self) -> tuple[Part, ...]:
        """The parts without repetitions and empty ones."""
        return tuple({(part.offsets, part.sizes): part for part in reversed(self.parts) if part.numel}.values())

    @property
    def num_rows(self) -> int:
        """Size of the first dim; 1 for a tensor without dims."""
        return self.shape[0] if self.shape else 1

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read some rows: a tensor of shape ``(stop - start, *shape[1:])``; of a tensor without dims its one element.

        Memory for the rows is needed, unless one part has them all and maps its file, and for one part. Elements of
        another dtype than ``self.dtype`` are cast.

        Raises:
            LoadError: the files do not hold all of them, or are cut off.
        """
        full = _empty((stop - start, *self.shape[1:]), self.dtype)
        num_read = 0
        for part in self.distinct_parts:
            offset, size = (part.offsets[0], part.sizes[0]) if part.sizes else (0, 1)
            first, last = max(start, offset), min(stop, offset + size)
            if first >= last:
                continue
            elements = part.elements()
            rows = elements[first - offset : last - offset] if part.sizes else elements.reshape(1)
            if rows.shape == full.shape and rows.dtype == full.dtype:
                return rows
            box = (slice(first - start, last - start), *map(_slice, part.offsets[1:], part.sizes[1:]))
            full[box] = rows
            num_read += rows.numel()
        if num_read != full.numel():
            raise LoadError(
                f"{self.name!r}, rows {start} to {stop}: the files hold {num_read:,} of {full.numel():,} elements."
            )
        return full

    def full(self) -> torch.Tensor:
        """Read the tensor; see :meth:`rows`."""
        return self.rows(0, self.num_rows).reshape(self.shape)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose memory goes back to the system with it: an allocator of small pieces would keep some."""
    nbytes = prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _slice(start: int, size: int) -> slice:
    return slice(start, start + size)


@dataclass(frozen=True)
class StoredCheckpoint:
    """Describes a checkpoint.

    Attributes:
        path: the file or the directory.
        kind: the format.
        writer: who wrote it, as far as the files say.
        num_ranks: the ranks that wrote it, if known.
        tensors: by nested keys.
        values: what is no tensor, by nested keys.
        files: all files.
        problems: what is wrong with the files themselves, found when it is called.
        step: the number of the checkpoint, if it has one.
        has_checksums: whether the files have checksums, which ``problems`` compares.
    """

    path: Path
    kind: str
    writer: str
    num_ranks: int | None
    tensors: Mapping[Keys, TensorInFiles]
    values: Mapping[Keys, Any]
    files: tuple[Path, ...]
    problems: Callable[[], Iterator[str]] = field(default=lambda: iter(()))
    step: int | None = None
    has_checksums: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors; those that share their elements count once."""
        return sum({tensor.identity: tensor.nbytes for tensor in self.tensors.values()}.values())

    def summary(self) -> dict[str, Any]:
        """Return what commands say of the whole checkpoint, as plain values."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "writer": self.writer.strip(),
            "step": self.step,
            "num_ranks": self.num_ranks,
            "num_files": len(self.files),
            "num_tensors": len(self.tensors),
            "nbytes": self.nbytes,
        }

    def below(self, keys: Keys) -> StoredCheckpoint:
        """Return what is below nested keys."""
        num = len(keys)
        tensors = {key[num:]: tensor for key, tensor in self.tensors.items() if key[:num] == keys and len(key) > num}
        return replace(
            self,
            tensors={key: replace(tensor, keys=key) for key, tensor in tensors.items()},
            values={key[num:]: value for key, value in self.values.items() if key[:num] == keys and len(key) > num},
        )

    def under(self, key: str) -> StoredCheckpoint:
        """Return all of it below a key."""
        return replace(
            self,
            tensors={(key, *keys): replace(tensor, keys=(key, *keys)) for keys, tensor in self.tensors.items()},
            values={(key, *keys): value for keys, value in self.values.items()},
        )

    def model_keys(self, key: str | None = None) -> Keys:
        """Return the keys of the model: none if everything is of it.

        Args:
            key: its dotted name; by default one that is common, also below one other key.

        Raises:
            OptionError: there is none of that name, or of a common one; or an optimizer is there too.
        """
        found = self._keys_of_model(key)
        num = len(found)
        if any("param_groups" in keys[num:] for keys in self.values if keys[:num] == found):
            what, inside = f" under {dotted_name(found)!r}" if found else "", (*found, "model")
            has_model = any(keys[: num + 1] == inside for keys in self.tensors)
            advice = f"--key {dotted_name(inside)}" if has_model else "--key"
            raise OptionError(
                f"{self.path} has an optimizer (param_groups){what}, so that is no model alone. "
                f"Name the model by {advice}."
            )
        return found

    def optim_keys(self, model_keys: Keys) -> Keys | None:
        """Return the keys of the optimizer beside the model, None if there is none.

        Raises:
            OptionError: there are several.
        """
        outer, num = model_keys[:-1], len(model_keys)
        entries = [keys for keys in (*self.tensors, *self.values) if keys[: num - 1] == outer and len(keys) > num]
        tops = list(dict.fromkeys(keys[:num] for keys in entries if model_keys and keys[:num] != model_keys))
        named = [keys for name in OPTIM_NAMES for keys in tops if keys[-1] == name][:1]
        found = named or [
            top for top in tops if any(keys[:num] == top and keys[num] == "param_groups" for keys in entries)
        ]
        # A list, as Lightning's.
        lists = {keys[: num + 1] for keys in entries if keys[:num] in found and isinstance(keys[num], Position)}
        found = sorted(lists) or found
        if len(found) > 1:
            raise OptionError(
                f"{self.path} has {len(found)} optimizers, {some_of(list(map(dotted_name, found)), 4)}, and a "
                "checkpoint of this library holds one. Pass --model-only, or --to dcp or torch, which hold all."
            )
        return found[0] if found else None

    def _keys_of_model(self, key: str | None) -> Keys:
        tops = list(dict.fromkeys(keys[0] for keys in (*self.tensors, *self.values) if keys))
        if key is not None:
            wanted = tuple(key.split("."))
            if not any(tuple(map(str, keys[: len(wanted)])) == wanted for keys in self.tensors):
                raise OptionError(
                    f"{self.path} has no tensors under {key!r}; it has {some_of(list(map(str, tops)), 9)}."
                )
            return wanted
        if all(len(keys) == 1 for keys in self.tensors):
            return ()
        for name in _MODEL_NAMES:
            if any(keys[0] == name for keys in self.tensors):
                return (name,)
        below = list(dict.fromkeys(keys[:2] for keys in self.tensors if len(keys) > 2 and keys[1] in _MODEL_NAMES))
        if len(below) == 1:
            return below[0]
        names = [f"--key {dotted_name(keys)}" for keys in below] or ["--key"]
        raise OptionError(
            f"{self.path} does not say what is the model: it has {some_of(list(map(str, tops)), 9)}. "
            f"Name it by {some_of(names, 4, ' or ')}."
        )


def flattened(obj: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield nested keys and what is there: tensors, and values without tensors or dicts inside."""
    if isinstance(obj, Mapping) and obj:
        for key, value in obj.items():
            yield from flattened(value, (*keys, key))
    elif isinstance(obj, (list, tuple)) and _holds_entries(obj):
        for index, value in enumerate(obj):
            yield from flattened(value, (*keys, Position(index)))
    else:
        yield keys, obj


def _holds_entries(obj: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether torch.distributed.checkpoint would save the entries of a list apart; of tuples too."""
    return any(
        isinstance(entry, (Mapping, torch.Tensor, DescribedTensor))
        or (isinstance(entry, (list, tuple)) and _holds_entries(entry))
        for entry in obj
    )


def nested(values: Mapping[Keys, Any]) -> Any:
    """Return the nested containers that :func:`flattened` has taken apart."""
    if set(values) == {()}:
        return values[()]
    below: dict[Any, dict[Keys, Any]] = {}
    for keys, value in values.items():
        below.setdefault(keys[0], {})[keys[1:]] = value
    made = {key: nested(inner) for key, inner in below.items()}
    if made and all(isinstance(key, Position) for key in made):
        return [made[key] for key in sorted(made)]
    return made
