"""Shows progress of files that are written or read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

ProgressBar = Callable[[int], AbstractContextManager[Callable[[int], object]]]


def progress_bar(label: str, *, asked: bool | None, here: bool) -> ProgressBar:
    """Return a function that shows a bar for a number of bytes: ``with show(num_bytes) as update: update(1024)``.

    If ``asked`` is None, only a terminal gets one, after two seconds. Without tqdm there is none.
    """

    @contextmanager
    def show(num_bytes: int) -> Iterator[Callable[[int], object]]:
        try:
            from tqdm import tqdm
        except ImportError:
            yield lambda nbytes: None
            return
        # tqdm takes None for a choice by whether the output is a terminal.
        is_off = None if here and asked is None else not (here and asked)
        delay = 2 if asked is None else 0
        with tqdm(desc=label, total=num_bytes, unit="B", unit_scale=True, delay=delay, disable=is_off) as bar:
            yield bar.update

    return show
