"""``python -m fsdp_flat.run``: unmodified FSDP1 scripts, and what python itself would do with them."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_flat
from fsdp_flat.run import main
from tests.support.peer import mend_peer
from tests.support.scripts import SCRIPTS, assert_equal_losses, command, printed_losses, run_script, torchrun

OUR_CLASS = "fsdp_flat.fully_sharded_data_parallel.FullyShardedDataParallel"


@contextmanager
def interpreter_kept() -> Iterator[None]:
    """Puts back what running a program as ``__main__`` leaves changed."""
    before = sys.argv, sys.path[:], sys.excepthook, sys.modules["__main__"]
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.excepthook, sys.modules["__main__"] = before
        fsdp_flat.uninstall()


def run(*arguments: object) -> None:
    with interpreter_kept():
        main([str(argument) for argument in arguments])


def written(tmp_path: Path, source: str, name: str = "script.py") -> Path:
    path = tmp_path / name
    path.write_text(source)
    return path


# --------------------------------------------------------------------------------------------- as python would


def test_the_script_is_main_with_its_arguments_and_its_directory_first_on_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "word = 'beside'", "beside_the_script.py")
    source = (
        "import json, sys, pickle, beside_the_script\n"
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "class Here: pass\n"
        "assert isinstance(pickle.loads(pickle.dumps(Here())), Here)\n"
        "assert sys.modules['__main__'].Here is Here and __spec__ is None\n"
        "print(json.dumps([__name__, __file__, sys.argv, sys.path[0], FSDP.__module__]))\n"
    )
    path = written(tmp_path, source)
    link = tmp_path / "elsewhere"
    link.mkdir()
    (link / "linked.py").symlink_to(path)
    run(link / "linked.py", "-x", "--help", "y")
    linked = str(link / "linked.py")
    expected = ["__main__", linked, [linked, "-x", "--help", "y"], os.path.realpath(tmp_path), OUR_CLASS[:-25]]
    assert json.loads(capsys.readouterr().out) == expected


def test_a_relative_path_is_shown_as_given_and_made_absolute_for_the_file_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "import sys; print(sys.argv[0], __file__)")
    monkeypatch.chdir(tmp_path)
    run("script.py")
    assert capsys.readouterr().out.split() == ["script.py", str(tmp_path / "script.py")]


def test_a_module_runs_as_with_python_m(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    written(package, "", "__init__.py")
    written(package, "number = 5", "sibling.py")
    main_source = "import sys; from .sibling import number; print(__name__, __spec__.name, number, sys.argv)"
    path = written(package, main_source, "__main__.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    run("-m", "some_package", "a")
    assert capsys.readouterr().out == f"__main__ some_package.__main__ 5 {[str(path), 'a']}\n"


@pytest.mark.parametrize(
    ("source", "code"), [("import sys; sys.exit(7)", 7), ("exit('told')", "told"), ("raise SystemExit", None)]
)
def test_exit_codes_are_the_scripts(tmp_path: Path, source: str, code: object) -> None:
    with pytest.raises(SystemExit) as caught:
        run(written(tmp_path, source))
    assert caught.value.code == code


def test_a_traceback_begins_in_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process group made before this test, in this process, prefixes the lines with its rank.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    path = written(tmp_path, "def inner():\n    raise KeyError('which')\ninner()\n")
    with interpreter_kept():
        try:
            main([str(path)])
        except KeyError:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{path}", line 3, in <module>']
    assert lines[-1] == "KeyError: 'which'"
    assert "fsdp_flat" not in "\n".join(lines)


def test_a_syntax_error_names_the_script(tmp_path: Path) -> None:
    path = written(tmp_path, "x = (\n")
    with pytest.raises(SyntaxError) as caught:
        run(path)
    assert (caught.value.filename, caught.value.lineno) == (str(path), 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no script given"),
        (["-m"], "no module named after -m"),
        (["--fast", "script.py"], "unknown option --fast"),
        (["nowhere.py"], "can't open file 'nowhere.py': [Errno 2] No such file or directory"),
    ],
)
def test_a_wrong_command_line_says_so_and_exits_with_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert told in errors
    assert errors.count("\n") == 1


def test_help_shows_the_three_ways_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("script.py", "-m module", "torchrun"))


def test_verbose_lists_the_names_on_stderr_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--verbose", written(tmp_path, "print('done')"))
    output = capsys.readouterr()
    assert output.out == "done\n"
    assert "torch.distributed.fsdp: " in output.err


def test_json_lists_them_as_pairs_of_module_and_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--json", written(tmp_path, "print('done')"))
    output = capsys.readouterr()
    assert output.out == "done\n"
    assert ["torch.distributed.fsdp", "FullyShardedDataParallel"] in json.loads(output.err)


def test_fsdp2s_names_are_the_librarys_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "from torch.distributed.fsdp import fully_shard; print(fully_shard.__module__)")
    for options, module in ((["--fully-shard"], "fsdp_flat.composable"), ([], "torch.distributed.fsdp")):
        run(*options, path)
        assert capsys.readouterr().out.startswith(module)


# ------------------------------------------------------------------------------- scripts, and the same on the peer


def train_the_tutorial_on_the_peer(folder: Path) -> list[float]:
    script = SCRIPTS / "train_tutorial.py"
    mend_peer()
    args = runpy.run_path(str(script))["parse"](["--save", str(folder / "theirs.pt")])
    return run_script(script, "train", dist.get_rank(), dist.get_world_size(), args)


@pytest.mark.from_size("cover", "starts several programs that import torch")
def test_a_script_that_spawns_its_ranks_uses_the_library_in_all_of_them(ranks: Any, tmp_path: Path) -> None:
    script = SCRIPTS / "train_tutorial.py"
    options = ["--save", tmp_path / "ours.pt", "--init-method", f"file://{tmp_path}/store"]
    output = command("-m", "fsdp_flat.run", script, *options)
    assert "model of fsdp_flat" in output
    assert_equal_losses(printed_losses(output), ranks(2).run(train_the_tutorial_on_the_peer, tmp_path)[0])
    ours, theirs = torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "theirs.pt")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.from_size("cover", "starts several programs that import torch")
def test_torchrun_runs_a_script_through_it(ranks: Any) -> None:
    script = SCRIPTS / "train_manual_wrap.py"
    output = torchrun(2, "-m", "fsdp_flat.run", script)
    assert "model of fsdp_flat" in output
    assert_equal_losses(printed_losses(output), ranks(2).run(run_script, script, "train")[0])
