"""The test kit itself: a comparison that cannot fail, or a pool that hangs, would hide everything else."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support import RankFailure, Ranks, assert_close, assert_equal, on_ranks
from tests.support.pool import WarmPools

GetRanks = Callable[..., Ranks]


# --- comparisons ---

TREE = {"weight": torch.arange(6.0).reshape(2, 3), "steps": [1, 2.0], "name": "adam"}


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy of TREE with one place changed."""
    tree = copy.deepcopy(TREE)
    place: Any = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return tree


def test_equal_structures_compare_as_equal() -> None:
    assert_equal(copy.deepcopy(TREE), TREE)
    assert_close(copy.deepcopy(TREE), TREE, rtol=0.0, atol=0.0)
    assert_equal(nn.Parameter(torch.ones(2)), torch.ones(2))
    assert_equal(OrderedDict(a=1), {"a": 1})
    assert_equal(torch.empty(0, 3), torch.empty(0, 3))
    assert_equal(torch.ones(3, 2).t(), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("weight",), torch.zeros(2, 3), r"tree\['weight'\]: 5 of 6 elements differ .* difference 5 at \[1, 2\]"),
        (("weight",), torch.zeros(3, 2), r"tree\['weight'\]: shape differs: got .*3, 2.* expected .*2, 3"),
        (("weight",), torch.zeros(2, 3).double(), r"tree\['weight'\]: dtype differs: got torch.float64"),
        (("weight",), [0.0], r"tree\['weight'\]: type differs: got <class 'list'>"),
        (("steps", 0), 3, r"tree\['steps'\]\[0\]: got 3, expected 1"),
        (("steps", 0), 1.0, r"tree\['steps'\]\[0\]: type differs"),
        (("steps", 1), 3.0, r"tree\['steps'\]\[1\]: got 3.0, expected 2.0, difference 1"),
        (("steps", 1), float("nan"), r"tree\['steps'\]\[1\]: got nan"),
        (("steps",), [1], r"tree\['steps'\]: length differs: got 1, expected 2"),
        (("steps",), (1, 2.0), r"tree\['steps'\]: type differs"),
        (("name",), "sgd", r"tree\['name'\]: got 'sgd', expected 'adam'"),
        (("extra",), 1, r"tree: keys differ: missing \[\], unexpected \['extra'\]"),
    ],
)
def test_both_comparisons_fail_on_a_difference_and_name_its_place(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close(changed(path, value), TREE, rtol=1e-3, atol=1e-3, what="tree")
    with pytest.raises(AssertionError, match=message):
        assert_equal(changed(path, value), TREE, what="tree")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(AssertionError, match=r"keys differ: missing \['b'\]"):
        assert_equal({"a": 1}, {"a": 1, "b": 2})


def test_assert_close_allows_its_tolerance_and_no_more() -> None:
    expected = torch.tensor([1.0, 100.0])
    assert_close(expected + torch.tensor([0.0, 0.9]), expected, rtol=1e-2, atol=0.0)
    assert_close(expected + torch.tensor([0.4, 0.4]), expected, rtol=0.0, atol=0.5)
    with pytest.raises(AssertionError, match="1 of 2 elements differ"):
        assert_close(expected + torch.tensor([0.0, 1.1]), expected, rtol=1e-2, atol=0.0)
    with pytest.raises(AssertionError, match="2 of 2 elements differ"):
        assert_close(expected + 0.6, expected, rtol=0.0, atol=0.5)


def test_assert_close_takes_a_nan_for_a_nan_only() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_close(nan.clone(), nan, rtol=0.0, atol=0.0)
    with pytest.raises(AssertionError, match=r"largest difference inf at \[0\]: got nan, expected 1.0"):
        assert_close(nan, torch.ones(2), rtol=1.0, atol=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64])
def test_assert_equal_sees_the_smallest_difference(dtype: torch.dtype) -> None:
    expected = torch.ones(4, dtype=dtype)
    actual = expected.clone()
    actual.view(torch.uint8)[0] ^= 1
    assert_equal(expected.clone(), expected)
    with pytest.raises(AssertionError, match=r"1 of 4 elements differ \(bitwise\)"):
        assert_equal(actual, expected)


def test_assert_equal_tells_minus_zero_from_zero() -> None:
    with pytest.raises(AssertionError, match="bitwise"):
        assert_equal(torch.tensor(-0.0), torch.tensor(0.0))
    with pytest.raises(AssertionError, match=r"got -0\.0"):
        assert_equal(-0.0, 0.0)


def test_booleans_and_empty_differences_are_reported() -> None:
    with pytest.raises(AssertionError, match="1 of 2 elements differ"):
        assert_equal(torch.tensor([True, False]), torch.tensor([True, True]))


# --- the pool: results ---


def sum_over_ranks(value: float, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    total = torch.tensor([value * scale + dist.get_rank()])
    dist.all_reduce(total)
    return {"total": total, "view": torch.arange(4.0)[1:3]}


def where_am_i() -> tuple[int, int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid(), torch.get_num_threads()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not like this")
    dist.barrier()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_rank_returns_its_result_as_a_copy(ranks: GetRanks, num_ranks: int) -> None:
    results = ranks(num_ranks).run(sum_over_ranks, 2.0, scale=3.0)
    total = 6.0 * num_ranks + sum(range(num_ranks))
    assert_equal(results, [{"total": torch.tensor([total]), "view": torch.tensor([1.0, 2.0])}] * num_ranks)
    assert not results[0]["total"].is_shared()


# --- the pool: every task starts from the same state ---

_KEPT: list[weakref.ref[Any]] = []


class Cycle:
    """An object that only the cycle collector frees."""

    def __init__(self) -> None:
        self.me = self


def make_a_mess() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    hashed = dist.new_group(list(range(dist.get_world_size())), use_local_synchronization=True)
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        # Ranks that made different numbers of groups must agree again in the next task.
        dist.new_group([0], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=mesh.get_group())
    dist.all_reduce(torch.ones(1), group=hashed)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)
    _KEPT.append(weakref.ref(Cycle()))


def state() -> dict[str, Any]:
    return {
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "random": (torch.rand(1).item(), random.random(), np.random.rand()),
        "environ": "LEFT_BEHIND" in os.environ,
        "directory": os.getcwd(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "cycles": [kept() for kept in _KEPT],
        "collecting": gc.isenabled(),
    }


def test_a_task_leaves_nothing_to_the_next(ranks: GetRanks) -> None:
    before = ranks(2).run(state)
    for _ in range(3):
        ranks(2).run(make_a_mess)
    after = ranks(2).run(state)
    assert after[0].pop("cycles") == [None] * 3
    assert after[1].pop("cycles") == [None] * 3
    for result in before:
        result.pop("cycles")
    assert after == before
    assert before[0]["groups"] == 1
    assert before[0] == before[1]


# --- the pool: failures ---


def test_a_failing_rank_is_reported_with_its_traceback_and_all_ranks_states(
    warm_pools: WarmPools, ranks: GetRanks
) -> None:
    before = warm_pools.pool(2).pids
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(raise_on, 1)
    text = str(failure.value)
    assert "tests.test_support.raise_on failed on 2 ranks" in text
    assert "rank 1: raised ValueError: rank 1 does not like this   <-- first" in text
    assert 'raise ValueError(f"rank {rank} does not like this")' in text
    assert "rank 0: still running" in text
    # The stack of the rank that waits, with its source.
    assert "in raise_on" in text
    assert "dist.barrier()" in text
    assert "watch_parent" not in text
    # The pool was made anew, for a rank of the old one is stuck.
    assert ranks(2).run(sum_over_ranks, 1.0)[0]["total"].item() == 3.0
    assert not set(before) & set(warm_pools.pool(2).pids)


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def test_a_hang_is_reported_with_the_stacks(ranks: GetRanks) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(2, timeout=1.0).run(sleep_on, 0)
    text = str(failure.value)
    assert "sleep_on did not end within 1 s on 2 ranks" in text
    assert "rank 0: still running" in text
    assert "rank 1: returned" in text
    assert "time.sleep(600)" in text
    assert ranks(2).run(where_am_i)[1][:2] == (1, 2)


def exit_on(rank: int, exit_code: int) -> None:
    dist.barrier()
    if dist.get_rank() == rank:
        print("going away")
        os._exit(exit_code)
    dist.all_reduce(torch.ones(1))


def test_a_dead_rank_is_reported_with_its_exit_code(ranks: GetRanks) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(2).run(exit_on, 1, 17)
    text = str(failure.value)
    # Rank 0's collective fails too, because of it; that must not hide the cause.
    assert "rank 1: died with exit code 17   <-- first" in text
    assert "going away" in text
    assert ranks(2).run(where_am_i)[0][:2] == (0, 2)


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def warning_is_raised() -> None:
    with pytest.raises(UserWarning, match="careful"):
        warn()


def drop_a_file(directory: Path) -> None:
    """Leaves an open file to the collector, which warns where nothing can be raised."""
    open(directory / f"file{dist.get_rank()}", "w")  # noqa: SIM115


def test_a_warning_on_a_rank_is_an_error(ranks: GetRanks) -> None:
    ranks(2).run(warning_is_raised)


@pytest.mark.filterwarnings("ignore:careful:UserWarning")
def test_a_warning_that_the_test_ignores_is_ignored_on_its_ranks(ranks: GetRanks) -> None:
    ranks(2).run(warn)


def test_an_error_that_python_can_only_print_fails_the_test(ranks: GetRanks, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"(?s)drop_a_file returned, but left errors behind.*ResourceWarning"):
        ranks(1).run(drop_a_file, tmp_path)


def a_plain_assert_shows_its_values() -> None:
    left, right = 3, 4
    with pytest.raises(AssertionError, match=r"assert \(3 \+ 1\) == \(4 \+ 1\)"):
        assert left + 1 == right + 1


def test_a_plain_assert_on_a_rank_shows_its_values(ranks: GetRanks) -> None:
    ranks(2).run(a_plain_assert_shows_its_values)


def skip_everywhere() -> None:
    pytest.skip("not here")


def test_a_skip_on_every_rank_skips_the_test(ranks: GetRanks) -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        ranks(2).run(skip_everywhere)


# --- on_ranks ---


@on_ranks(2, 4)
@pytest.mark.parametrize("value", [1.0, 2.0])
def test_a_body_runs_on_every_rank_with_its_arguments(rank: int, num_ranks: int, value: float, tmp_path: Path) -> None:
    assert (rank, num_ranks) == (dist.get_rank(), dist.get_world_size())
    total = torch.tensor(value)
    dist.all_reduce(total)
    assert total.item() == value * num_ranks
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == num_ranks


@pytest.mark.xfail(raises=RankFailure, strict=True)
@on_ranks(2)
def test_a_body_that_fails_on_one_rank_fails_the_test(rank: int) -> None:
    assert rank == 0


# --- other people's plugins and extras ---

NOISY_PLUGIN = """
import warnings

import pytest


def warn(*_args, **_kwargs):
    warnings.warn(pytest.PytestWarning("a plugin says something about itself"), stacklevel=1)


pytest_configure = pytest_sessionstart = pytest_sessionfinish = pytest_terminal_summary = pytest_unconfigure = warn
"""
TESTS_THAT_WARN = """
import warnings

import pytest


def test_nothing_is_wrong():
    pass


@pytest.mark.parametrize("category", [UserWarning, DeprecationWarning, pytest.PytestWarning])
def test_a_warning(category):
    warnings.warn("told by a test", category, stacklevel=1)


@pytest.mark.filterwarnings("ignore:told by a test")
def test_an_ignored_warning():
    warnings.warn("told by a test", stacklevel=1)


def test_a_warning_of_the_list_of_all_tests():
    warnings.warn("Sparse invariant checks are implicitly disabled. Memory errors", UserWarning, stacklevel=1)
"""


def run_pytest(folder: Path, *options: str, **environ: str) -> tuple[int, str]:
    """Run pytest on a folder with this project's configuration and conftest; return its status and output."""
    root = Path(__file__).parents[1]
    words = [sys.executable, "-m", "pytest", "-q", "-c", f"{root}/pyproject.toml", "-p", "tests.conftest", *options]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{root}", "OMP_NUM_THREADS": "1", **environ}
    # Without what pytest-xdist tells its workers, of which this process may be one.
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([*words, str(folder)], cwd=folder, env=environment, text=True, capture_output=True)
    return done.returncode, done.stdout + done.stderr


def test_part_7_what_plugins_warn_about_is_no_error_and_what_tests_warn_about_is(tmp_path: Path) -> None:
    (tmp_path / "noisy_plugin.py").write_text(NOISY_PLUGIN)
    (tmp_path / "test_that_warns.py").write_text(TESTS_THAT_WARN)
    status, output = run_pytest(tmp_path, "-p", "noisy_plugin")
    assert "INTERNALERROR" not in output
    assert "3 failed, 3 passed" in output, output
    assert output.count("To run this test alone: ") == 3
    assert status == 1
    (tmp_path / "test_that_warns.py").write_text("import warnings\nwarnings.warn('told by a module', stacklevel=1)\n")
    _, output = run_pytest(tmp_path, "-p", "noisy_plugin")
    assert "1 error" in output, "a warning where a module of tests is imported"
    assert "UserWarning: told by a module" in output


WITHOUT_EXTRAS = """
from importlib.machinery import PathFinder

NAMES = {"libcst", "safetensors", "matplotlib", "mkdocs", "griffe", "tqdm", "accelerate", "transformers"}
find_spec = PathFinder.find_spec


def find_others(name, path=None, target=None):
    return None if name.split(".")[0] in NAMES else find_spec(name, path, target)


PathFinder.find_spec = find_others
"""


def test_part_7_every_test_is_collected_without_the_packages_of_extras(tmp_path: Path) -> None:
    (tmp_path / "without_extras.py").write_text(WITHOUT_EXTRAS)
    root = Path(__file__).parents[1]
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "without_extras", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=root, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
