"""Shows a progress bar by tqdm if requested."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fsdp_flat.errors import UsageError

__all__ = ["progress_bar"]


class _Bar:
    """Wraps a tqdm bar, or does nothing without one."""

    def __init__(self, shown: Any = None) -> None:
        self._shown = shown
        self.is_shown = shown is not None

    def update(self, num_bytes: int) -> None:
        if self._shown is not None:
            self._shown.update(num_bytes)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._shown is not None:
            self._shown.close()


def progress_bar(what: str, num_bytes: int, *, asked: bool, here: bool) -> _Bar:
    """Return a context manager with ``update(num_bytes)``.

    Args:
        what: label of the bar.
        num_bytes: the total.
        asked: the caller wants a bar; the same on every rank.
        here: this rank shows it.

    Raises:
        UsageError: tqdm is not installed.
    """
    if not asked:
        return _Bar()
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise UsageError('progress=True needs tqdm: pip install "fsdp-flat[progress]".') from error
    return _Bar(tqdm(desc=what, total=num_bytes or None, unit="B", unit_scale=True)) if here else _Bar()
