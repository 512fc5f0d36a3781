"""Running a case on warm ranks: what every rank does, and the outcome as the parent sees it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support.pool import RankFailure, WarmPools

from .actions import ACTIONS, close_session
from .case import Case, from_json, to_json
from .models import CURRENT
from .row_session import RowSession
from .session import Mismatch, NotLegal, Session, expected_warnings_ignored

# How long a rank that failed waits for the others to fail too.
VERDICT_TIMEOUT = timedelta(seconds=3)
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a case failed. Shrinking keeps the ``kind``."""

    kind: str
    text: str


@dataclass(slots=True)
class Report:
    """What a rank found."""

    failure: Failure | None = None
    actions: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


_verdict_groups: list[Any] = []


def verdict_group() -> Any:
    """Return a group of this process's own, which no collective of the library can come between."""
    if not _verdict_groups:
        default: Any = dist.group.WORLD
        _, store = distributed_c10d._world.pg_map[default]
        store = dist.PrefixStore("fuzz", store)
        group = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), VERDICT_TIMEOUT)
        _verdict_groups.append(group)
    return _verdict_groups[0]


def failed_ranks(failed: bool) -> list[int]:
    """Exchange whether the last action failed. Every rank must call this."""
    mine = torch.tensor([int(failed)], dtype=torch.int64)
    everyone = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    verdict_group().allgather([everyone], [mine]).wait()
    return [rank for rank, one in enumerate(everyone) if int(one)]


def run_here(case_text: str, directory: str, environ: dict[str, str], plant: str = "") -> Report:
    """Run a case on this rank. Every rank must call this.

    Args:
        case_text: the case as JSON.
        directory: for checkpoints.
        environ: set in this process, until the pool puts it back.
        plant: the name of a defect to plant, of ``planted.DEFECTS``.
    """
    os.environ.update(environ)
    if plant:
        from .planted import planted

        with planted(plant):
            return run_here(case_text, directory, environ)
    case, report = from_json(case_text), Report()
    torch.set_default_dtype(torch.float64)
    CURRENT.trouble = (-1, "")
    verdict_group()
    sessions: list[Session] = []

    def start() -> None:
        sessions.append(Session(case, directory) if case.rows is None else RowSession(case, directory))
        session = sessions[0]
        if session.case.options != case.options:
            report.refused["use_orig_params=False"] += 1
        if session.case.wrapping != case.wrapping:
            report.refused["ties by hand"] += 1
        if session.case.rows != case.rows:
            report.refused["units that share parameters"] += 1
        session.compare_after_action()

    with expected_warnings_ignored():
        where = "wrapping"
        if guarded(start, report, where):
            return report
        session = sessions[0]
        for index, action in enumerate(case.actions):
            kind = ACTIONS[action.kind]
            if not (kind.applies(session.case) and kind.is_legal(session, session.case)):
                report.refused[f"{action.kind} not legal here"] += 1
                continue

            if not kind.is_basic:
                session.alone.clear()  # it may need units without graphs

            def act(kind: Any = kind, action: Any = action) -> None:
                try:
                    kind.run(session, action)
                except NotLegal as reason:
                    report.refused[f"{action.kind}: {reason}"] += 1
                else:
                    report.actions[action.kind] += 1
                session.compare_after_action()

            where = f"action {index} ({action.kind})"
            if guarded(act, report, where):
                return report
        guarded(lambda: close_session(session), report, "the end")
    return report


def guarded(step: Callable[[], None], report: Report, where: str) -> bool:
    """Do a step and agree with the other ranks on whether it failed; a failure goes into the report."""
    error: BaseException | None = None
    try:
        step()
    except Exception as raised:
        error = raised
    try:
        ranks = failed_ranks(error is not None)
    except Exception:
        if error is not None:
            # The others neither failed nor came to an end, so the pool has to find out about them.
            raise error from None
        raise
    if error is not None:
        text = "".join(traceback.format_exception(error))
        report.failure = Failure(kind_of(error), f"rank {dist.get_rank()} at {where}: {error}\n{text}")
    elif ranks:
        report.failure = Failure("", f"at {where}: ranks {ranks} failed, rank {dist.get_rank()} did not")
    return bool(ranks)


def kind_of(error: BaseException) -> str:
    """Say in a few words what failed, without numbers and names that depend on the case."""
    if isinstance(error, Mismatch):
        return f"different {error.what}"
    return plain_words(f"{type(error).__name__}: {error}")


def plain_words(text: str) -> str:
    """Cut a message to the words that do not depend on the case."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[\w.]*\d[\w.]*", "_", " ".join(text.split("\n")[:2]))
    return " ".join(words.split())[:120]


class Fuzzer:
    """Runs cases on one pool of warm ranks.

    Args:
        num_ranks: ranks of the pool.
        shared_memory: let the library use the memory that ranks share.
        timeout_s: how long a case may take before it counts as a hang.
        plant: a defect to plant on the ranks, of ``planted.DEFECTS``.
        pools: the pool to use; by default one of the fuzzer's own.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        shared_memory: bool = True,
        timeout_s: float = TIMEOUT_S,
        plant: str = "",
        pools: WarmPools | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.shared_memory = shared_memory
        self.timeout_s = timeout_s
        self.plant = plant
        self.actions: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.pools = WarmPools() if pools is None else pools
        self.is_own = pools is None
        self.directory = Path(tempfile.mkdtemp(prefix="fsdp_flat_fuzz_"))

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_own:
            self.pools.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, case: Case, *, timeout_s: float | None = None) -> Failure | None:
        """Run a case; a failure closes the pool, and the next case gets a new one."""
        environ = {} if self.shared_memory else {"FSDP_FLAT_SHARED_MEMORY": "0"}
        arguments = (to_json(case), str(self.directory), environ, self.plant)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            # What ranks print is printed by the pool, and says nothing that the report does not.
            with contextlib.redirect_stdout(io.StringIO()):
                reports = self.pools.run(self.num_ranks, run_here, arguments, {}, limit_s)
        except RankFailure as failure:
            return from_pool(str(failure))
        finally:
            for leftover in self.directory.iterdir():
                shutil.rmtree(leftover, ignore_errors=True)
        self.actions.update(reports[0].actions)
        self.refused.update(reports[0].refused)
        failures = [report.failure for report in reports if report.failure is not None]
        if not failures:
            return None
        self.pools.pool(self.num_ranks).close()
        first = next((failure for failure in failures if failure.kind), failures[0])
        return Failure(first.kind, "\n".join(failure.text for failure in failures))


def from_pool(text: str) -> Failure:
    """Classify what the pool reports: a hang, a death, or ranks of which only some raised."""
    first = re.search(r"rank \d+: (.*?)   <-- first", text)
    if first is None:
        return Failure("hang", text)
    return Failure(plain_words(f"some ranks {first[1]}"), text)
