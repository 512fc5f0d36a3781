"""Fixtures of the tests of commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_flat.tools.command import main
from tests.support.pool import Ranks, WarmPools
from tests.tools.peer_files import write_peer_files

Run = Callable[..., "tuple[int, str, str]"]
RunJson = Callable[..., "tuple[int, Any]"]


@pytest.fixture(scope="session")
def peer_files(warm_pools: WarmPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints of one trained model, which two ranks have written; no test changes them."""
    folder = tmp_path_factory.mktemp("peers")
    Ranks(warm_pools, 2, 120).run(write_peer_files, folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return its exit status, its output, and what it says on the error stream."""

    def run_and_read(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run_and_read


@pytest.fixture
def run_json(run: Run) -> RunJson:
    """Run a command with ``--json``; return its exit status and its result."""

    def run_and_parse(*arguments: object) -> tuple[int, Any]:
        status, text, errors = run(*arguments, "--json")
        assert errors == ""
        return status, json.loads(text)

    return run_and_parse
