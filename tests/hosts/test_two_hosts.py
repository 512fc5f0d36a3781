"""Four ranks on two hosts, made on this machine (``benchmarks/network.py``): ``make test-hosts``."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks.network import NoNetworkError, TwoHosts, two_hosts
from tests.hosts.program import TIMEOUT_S

ROOT = Path(__file__).parents[2]
# For a program to end, on a busy machine.
LIMIT_S = 240


@pytest.fixture(params=[1, 10], ids=["1Gbit", "10Gbit"])
def hosts(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    with made(request.param) as made_hosts:
        yield made_hosts


@pytest.fixture
def slow_hosts() -> Iterator[TwoHosts]:
    with made(1) as made_hosts:
        yield made_hosts


@contextmanager
def made(gbit: float) -> Iterator[TwoHosts]:
    """Make hosts; skip the test where this machine cannot."""
    with ExitStack() as stack:
        try:
            made_hosts = stack.enter_context(two_hosts(gbit))
        except NoNetworkError as error:
            pytest.skip(str(error))
        yield made_hosts


def wait_until(is_so: Callable[[], bool], describe: Callable[[], str] = str, limit_s: float = LIMIT_S) -> None:
    """Wait until ``is_so``; fail with a description if it takes longer than ``limit_s`` seconds."""
    until = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until, describe()
        time.sleep(0.1)


class Run:
    """A program on both hosts."""

    def __init__(self, hosts: TwoHosts, folder: Path, *words: str) -> None:
        folder.mkdir(exist_ok=True)
        self._logs = [folder / f"host{host}.log" for host in (0, 1)]
        self._processes = hosts.start(2, ["-m", "tests.hosts.program", *words], self._logs, folder=ROOT)

    def wait_until(self, is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait until ``is_so``; fail with the output if it takes longer than ``limit_s`` seconds."""
        wait_until(is_so, lambda: "\n".join(self.outputs), limit_s)

    @property
    def outputs(self) -> list[str]:
        """The output of each host so far."""
        return [log.read_text() for log in self._logs]

    def finish(self) -> str:
        """Wait until both hosts have ended well, and return their output."""
        self.wait_until(lambda: all(process.poll() is not None for process in self._processes))
        output = "\n".join(self.outputs)
        assert [process.returncode for process in self._processes] == [0, 0], output
        return output


def lines_of(output: str, pattern: str) -> list[str]:
    """Return the parts of lines by ranks that match a pattern."""
    return re.findall(rf"^rank \d: .*?{pattern}", output, re.MULTILINE)


def test_every_strategy_and_both_fronts_train_as_a_plain_replica(hosts: TwoHosts, tmp_path: Path) -> None:
    output = Run(hosts, tmp_path, "train").finish()
    assert len(lines_of(output, "equals the replica")) == 4, output
    assert "tensors on the CPU move by shared memory within each of 2 hosts, and by gloo once between them" in output


def test_a_run_that_resumes_from_a_shared_folder_equals_an_undisturbed_one(hosts: TwoHosts, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    first = Run(hosts, tmp_path / "first", "checkpoints", str(folder)).finish()
    again = Run(hosts, tmp_path / "again", "checkpoints", str(folder)).finish()
    digests = [re.findall(r"^rank \d: from step (\d): (\w+)", output, re.MULTILINE) for output in (first, again)]
    assert [len(found) for found in digests] == [4, 4], first + again
    assert {start for start, _ in digests[0]} == {"0"}
    assert {start for start, _ in digests[1]} == {"3"}
    assert len({digest for found in digests for _, digest in found}) == 1, first + again


@pytest.fixture(params=["FULL_SHARD", "HYBRID_SHARD"])
def training(slow_hosts: TwoHosts, tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    """Ranks on two hosts that train."""
    run = Run(slow_hosts, tmp_path, "until_a_failure", request.param)
    run.wait_until(lambda: all(output.count(": trains") == 2 for output in run.outputs))
    return run


def test_ranks_learn_that_another_host_has_vanished(training: Run, slow_hosts: TwoHosts) -> None:
    slow_hosts.vanish(1)
    # All pauses of the rank that notices first, and of one that waits for its report.
    training.wait_until(lambda: training.outputs[0].count("PeerFailureError") == 2, limit_s=TIMEOUT_S + 30)
    assert len(lines_of(training.outputs[0], "PeerFailureError")) == 2


def test_ranks_of_both_hosts_learn_that_the_link_was_cut(training: Run, slow_hosts: TwoHosts) -> None:
    slow_hosts.cut()
    # Ranks of the second host cannot reach the store, which is on the first.
    training.wait_until(
        lambda: all(output.count("PeerFailureError") == 2 for output in training.outputs), limit_s=TIMEOUT_S + 30
    )


def test_a_benchmark_over_hosts_says_what_crosses_the_link(slow_hosts: TwoHosts, tmp_path: Path) -> None:
    sizes = [
        "--layers",
        "2",
        "--width",
        "256",
        "--heads",
        "2",
        "--vocab",
        "64",
        "--seq",
        "8",
        "--steps",
        "2",
        "--warmup",
        "1",
    ]
    names = ["fsdp1-full-orig", "flat-full-orig", "flat-hybrid"]
    path = bench.main([*sizes, "--rounds", "1", "--hosts", "2", "--only", *names, "--out", str(tmp_path)])
    results = json.loads(path.read_text())
    crossed = {name: row["crossed"] for name, row in results["rounds"][0].items()}
    assert 0 < crossed["flat-full-orig"] < 0.55 * crossed["fsdp1-full-orig"]
    assert "on 2 hosts joined by 1 Gbit/s each way" in path.with_suffix(".md").read_text()


def test_nothing_of_the_hosts_remains_after_the_block() -> None:
    with made(1) as hosts:
        processes = hosts.start(1, ["-m", "http.server"], [Path(os.devnull)] * 2, folder=ROOT)
        wait_until(lambda: all(hosts.pids_on(host) for host in (0, 1)))
    assert None not in [process.poll() for process in processes]
    assert not any(Path(f"/proc/{pid}").exists() for pid in hosts.pids)
