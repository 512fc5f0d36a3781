"""Implements ``@on_ranks(2, 4)``, which runs the body of a test on every rank."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_flat.guards import guards_off

from .freed_memory import checked, is_checked
from .pool import TASK_TIMEOUT_S
from .selection import NO_GUARDS

# For tests in which batch statistics or ignored parameters drift apart between ranks, as in FSDP1.
OWN_STATISTICS = pytest.mark.filterwarnings("ignore:Buffers differ between ranks")
OWN_PARAMETERS = pytest.mark.filterwarnings("ignore:Trainable parameters that no unit manages")


def on_ranks(*sizes: int, timeout: float = TASK_TIMEOUT_S) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated top-level test on every rank, once for each number of ranks.

    The test may take ``rank`` and ``num_ranks`` as arguments. All others are pytest's as usual (parametrised values,
    fixtures such as ``tmp_path``) and are pickled for the ranks.

    Args:
        sizes: numbers of ranks; each becomes a separate test, ``test_name[2ranks]``.
        timeout: seconds until the test fails with every rank's stack.
    """
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"on_ranks takes numbers of ranks, as in @on_ranks(2, 4), got {sizes}")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        names = [name for name in inspect.signature(body).parameters if name != "rank"]
        if body.__qualname__ != body.__name__:
            raise TypeError(f"worker ranks find a test by its name, so it must be top-level: {body.__qualname__}")

        @functools.wraps(body)
        def test(ranks: Any, num_ranks: int, **arguments: Any) -> None:
            __tracebackhide__ = True
            if "num_ranks" in names:
                arguments["num_ranks"] = num_ranks
            ranks(num_ranks, timeout=timeout).run(run_body, body.__module__, body.__name__, arguments)

        asked = dict.fromkeys(["ranks", "num_ranks", *names])
        # pytest passes the arguments of this signature; without it, those of the body.
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked]
        )
        return pytest.mark.parametrize("num_ranks", sizes, ids=[f"{size}ranks" for size in sizes])(test)

    return decorate


def run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call the undecorated body of a test on a rank."""
    body = getattr(importlib.import_module(module), name).__wrapped__
    if "rank" in inspect.signature(body).parameters:
        arguments["rank"] = dist.get_rank()
    with chosen_guards(), checked() if is_checked(module) else nullcontext():
        body(**arguments)


def chosen_guards() -> AbstractContextManager[None]:
    """Return the context in which tests run: without guards, if the environment says so."""
    return guards_off() if os.environ.get(NO_GUARDS) else nullcontext()
