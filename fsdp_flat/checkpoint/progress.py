"""Shows a progress bar by tqdm if requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from fsdp_flat.errors import UsageError

ProgressBar = Callable[[int], AbstractContextManager[Callable[[int], object]]]


def progress_bar(label: str, *, asked: bool, here: bool) -> ProgressBar:
    """Return a function that shows a bar for a number of bytes: ``with show(num_bytes) as update: update(1024)``.

    Args:
        label: text before the bar.
        asked: the caller wants a bar; the same on every rank.
        here: this rank shows it.

    Raises:
        UsageError: tqdm is not installed.
    """
    if asked:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise UsageError('progress=True needs tqdm: pip install "fsdp-flat[progress]".') from error

    @contextmanager
    def show(num_bytes: int) -> Iterator[Callable[[int], object]]:
        if not (asked and here):
            yield lambda num_bytes: None
            return
        with tqdm(desc=label, total=num_bytes, unit="B", unit_scale=True) as bar:
            yield bar.update

    return show
