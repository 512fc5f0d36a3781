"""Provides real text that every machine has: the source of the Python standard library, as bytes."""

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
VALIDATION_SEQUENCES = 48


@dataclass(frozen=True, slots=True)
class Text:
    """A text of bytes, (numel,) uint8, in two parts without a common file."""

    train: Tensor
    validation: Tensor


def load_text(max_bytes: int = 6_000_000) -> Text:
    """Reads the standard library's .py files; every tenth file is validation text.

    Args:
        max_bytes: stop reading files after this many bytes.

    Returns:
        The same text on every machine with the same Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_source_files(root))
    random.Random(0).shuffle(files)  # the size limit should select a sample of the library, not its first letters
    parts = {"train": bytearray(), "validation": bytearray()}
    for index, path in enumerate(files):
        if sum(map(len, parts.values())) >= max_bytes:
            break
        parts["train" if index % 10 else "validation"] += path.read_bytes()
    if min(map(len, parts.values())) < 10_000:
        raise FileNotFoundError(f"found too few .py files under {root} to train on: is the library in a zip file?")
    return Text(**{name: torch.frombuffer(content, dtype=torch.uint8) for name, content in parts.items()})


def _source_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and path.name not in SKIPPED_FOLDERS:
            yield from _source_files(path)
        elif path.suffix == ".py" and path.is_file():
            yield path


def training_batch(
    text: Tensor, *, seed: int, step: int, batch_size: int, seq_len: int, rank: int, num_ranks: int
) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of the global batch of a step.

    The global batch depends on the seed and the step alone, so any number of ranks trains on the same data, and a
    checkpoint must hold only the step number to resume at the same position in the data.

    Args:
        text: bytes, (numel,) uint8.
        seed: seed of the run.
        step: counted from the very first step, across resumes.
        batch_size: sequences of the global batch, divisible by `num_ranks`.
        seq_len: tokens per sequence.
        rank: rank whose part to return.
        num_ranks: number of parts.

    Returns:
        Inputs and targets, both (batch_size / num_ranks, seq_len) int64.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - seq_len, (batch_size,), generator=generator)
    return _windows(text, starts.chunk(num_ranks)[rank], seq_len)


def validation_batches(
    text: Tensor, *, seq_len: int, rank: int, num_ranks: int, batch_size: int = 8
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields this rank's part of the validation sequences: inputs, targets and weights.

    Each rank gets the same number of batches, since each forward runs collectives. Padding sequences in a rank's last
    batch have weight 0, so the loss covers the same sequences at any number of ranks.
    """
    per_rank = -(-VALIDATION_SEQUENCES // num_ranks)
    indices = torch.arange(rank * per_rank, (rank + 1) * per_rank)
    starts = torch.linspace(0, len(text) - seq_len - 1, VALIDATION_SEQUENCES).long()
    for part in indices.split(batch_size):
        inputs, targets = _windows(text, starts[part % VALIDATION_SEQUENCES], seq_len)
        yield inputs, targets, (part < VALIDATION_SEQUENCES).double()


def _windows(text: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(seq_len + 1)].long()
    return windows[:, :-1], windows[:, 1:]
