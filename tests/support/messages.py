"""Defines the messages between the pool and its worker ranks: pickled records over a pipe."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

# The variable of the environment in which pytest says which test runs, and in what part of it.
RUNNING = "PYTEST_CURRENT_TEST"


@dataclass(frozen=True, slots=True)
class Task:
    """Describes one function call, and of the test that requests it its name and the active warning filters."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    warning_filters: list[Any]
    test: str


@dataclass(frozen=True, slots=True)
class RunTask:
    """Carries a pickled :class:`Task`: unpickling it imports the test's module, whose errors belong to the task."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """Requests the reset of the process to its initial state, after every rank has finished the task."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Reports that the worker is in its initial state.

    Attributes:
        ignored: the errors that Python only printed since.
        spins: a thread of gloo runs all the time, so that the process should be replaced.
    """

    ignored: str = ""
    spins: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """Reports that the function returned; ``payload`` is its pickled result."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """Reports that the function raised. ``when`` is comparable between ranks (one machine's monotonic clock)."""

    summary: str
    traceback: str
    is_skip: bool
    is_follow_up: bool
    when: float


def send(connection: Connection, message: object) -> None:
    """Send by plain pickle: ``Connection.send`` would pass tensors as shared-memory handles, not as copies."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receive a message of :func:`send`; raises ``EOFError`` if the other side has closed."""
    return pickle.loads(connection.recv_bytes())
