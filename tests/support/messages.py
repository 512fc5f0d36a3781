"""What the pool and its worker ranks say to each other: pickled records over a pipe."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One function call, and the warning filters that are active in the test that asks for it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    warning_filters: list[Any]


@dataclass(frozen=True, slots=True)
class RunTask:
    """A pickled :class:`Task`: unpickling it imports the test's module, whose errors belong to the task."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """Every rank has ended the task: put the process back into its first state."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is in its first state. ``ignored`` is what Python could only print since the task began."""

    ignored: str = ""


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned; ``payload`` is its pickled result."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised. ``when`` is comparable over ranks (one machine's monotonic clock)."""

    summary: str
    traceback: str
    is_skip: bool
    is_follow_up: bool
    when: float


def send(connection: Connection, message: object) -> None:
    """Send by plain pickle: ``Connection.send`` would pass tensors as shared-memory handles, not as copies."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receive what :func:`send` sent; raises ``EOFError`` when the other side is gone."""
    return pickle.loads(connection.recv_bytes())
