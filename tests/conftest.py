"""Fixtures that every test can use."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.support.pool import TASK_TIMEOUT_S, Ranks, WarmPools
from tests.support.rank_tests import chosen_guards
from tests.support.selection import MARKS, SIZE, SIZES, select
from tests.support.transport import TRANSPORTS

# No deadline: on a busy machine the time of one example says nothing.
settings.register_profile("fsdp_flat", deadline=None, print_blob=True)
settings.load_profile("fsdp_flat")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--size",
        choices=SIZES,
        default="cover",
        help="how many combinations of a test's parameters run: one, every value at least once, or all",
    )
    parser.addoption("--listed", help="a file of tests' ids, one a line: of those that would run, only these do")
    parser.addoption(
        "--transport",
        choices=TRANSPORTS,
        default="gloo",
        help="group of worker ranks: gloo, whose ranks compute on the CPU, or nccl, whose ranks share one GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make warnings errors from here on: in the modules of tests and in tests, not where plugins are configured."""
    if config.getoption("--transport") == "nccl" and not torch.cuda.is_available():
        raise pytest.UsageError("--transport nccl needs a CUDA device, and there is none here.")
    os.environ[SIZE] = config.getoption("--size")
    for line in MARKS:
        config.addinivalue_line("markers", line)
    exceptions = list(config.getini("filterwarnings"))
    for line in ("error", *exceptions):
        config.addinivalue_line("filterwarnings", line)


# First, so that other plugins may warn when they end.
@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    warnings.simplefilter("default")


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary() -> None:
    warnings.simplefilter("default")


class RunAlone:
    """Prints how to run a failed test alone, and then its failure.

    Attributes:
        reprcrash: of the failure, if it has one: pytest takes the text of its summary from there.
    """

    def __init__(self, nodeid: str, failure: Any, size: str) -> None:
        # A test that is named runs in every size but where it is of a larger one.
        option = " --size all" if size == "all" else ""
        self.command = f"OMP_NUM_THREADS=1 {sys.executable} -m pytest{option} {shlex.quote(nodeid)}"
        self.reprcrash = getattr(failure, "reprcrash", None)
        self._failure = failure

    def toterminal(self, terminal: Any) -> None:
        terminal.line(f"To run this test alone: {self.command}")
        if hasattr(self._failure, "toterminal"):
            self._failure.toterminal(terminal)
        else:
            terminal.line(str(self._failure))

    def __str__(self) -> str:
        return f"To run this test alone: {self.command}\n{self._failure}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.longrepr = RunAlone(report.nodeid, report.longrepr, item.config.getoption("--size"))
    return report


# Last, so that it selects among the tests that -k and -m have left.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config, items)


@pytest.fixture(scope="session")
def warm_pools(pytestconfig: pytest.Config) -> Iterator[WarmPools]:
    """The session's worker ranks."""
    pools = WarmPools(TRANSPORTS[pytestconfig.getoption("--transport")])
    yield pools
    pools.close()


@pytest.fixture
def ranks(warm_pools: WarmPools) -> Callable[..., Ranks]:
    """Warm worker ranks: ``ranks(2).run(function, ...)``, or ``ranks(2, timeout=5)`` for another limit in seconds."""

    def of_size(num_ranks: int, *, timeout: float = TASK_TIMEOUT_S) -> Ranks:
        return Ranks(warm_pools, num_ranks, timeout)

    return of_size


@pytest.fixture(autouse=True)
def excepthook_kept() -> Iterator[None]:
    """``torch.distributed`` puts a hook of its own around ``sys.excepthook`` at each initialisation."""
    before = sys.excepthook
    yield
    sys.excepthook = before


@pytest.fixture(autouse=True)
def guards() -> Iterator[None]:
    """Tests of one process run without guards where those on worker ranks do."""
    with chosen_guards():
        yield


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Tests of one process start from the same random numbers, as those on worker ranks do."""
    torch.manual_seed(0)
