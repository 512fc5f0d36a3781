"""A progress bar, where tqdm is installed and one is asked for."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fsdp_flat.errors import UsageError

__all__ = ["progress_bar"]


class _NoBar:
    def update(self, num_bytes: int) -> None:
        pass

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


def progress_bar(what: str, num_bytes: int, *, asked: bool, here: bool) -> Any:
    """A context manager with ``update(num_bytes)``.

    Args:
        what: words beside the bar.
        num_bytes: the total.
        asked: the caller wants a bar; the same on every rank.
        here: this rank is the one to show it.

    Raises:
        UsageError: tqdm is not installed.
    """
    if not asked:
        return _NoBar()
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise UsageError('progress=True needs tqdm: pip install "fsdp-flat[progress]".') from error
    return tqdm(desc=what, total=num_bytes, unit="B", unit_scale=True) if here else _NoBar()
