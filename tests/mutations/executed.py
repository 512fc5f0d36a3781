"""Records which statements of ``fsdp_flat`` each test executes, in pytest's process, warm ranks and subprocesses.

Before each statement in a function of the library stands one more, ``__executed__[number] = 1``, from when its file is
compiled on. ``__executed__`` is the memory of a file, one a test, which all processes share, so that nothing is lost
where one ends at once. The number is the statement's line, counted over all files of the library.

Statements outside of functions run at an import, before any test or in whichever comes first: those in functions of the
same class, or of the same file, stand for them.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import mmap
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The variable of the environment in which pytest says which test runs, and in what part of it. Ranks of the pool set it
# too (tests/support, which cannot be imported here: it imports the library).
RUNNING = "PYTEST_CURRENT_TEST"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Record:
    """What each test of the cover has executed: a file for each, of a byte for each line, and the test's id.

    Args:
        folder: where the files are.
        root: the project.
    """

    def __init__(self, folder: Path = ROOT / ".mutations", root: Path = ROOT) -> None:
        self.folder, self._root = folder, root
        self._first: dict[str, int] = {}
        digest = hashlib.sha1()
        self._num_lines = 0
        for file in sorted(root.glob("fsdp_flat/**/*.py")):
            source = file.read_bytes()
            digest.update(source)
            self._first[str(file)] = self._num_lines
            self._num_lines += source.count(b"\n") + 1
        self._of_sources = folder / digest.hexdigest()

    def make(self) -> int:
        """Run the cover, and return its status."""
        self._of_sources.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "at_start"), str(self._root)])
        # Compiled files with the statements that record are for processes that do.
        environment["PYTHONPYCACHEPREFIX"] = str(self.folder / "compiled")
        command = [sys.executable, "-m", "tests", "--size", "cover"]
        return subprocess.run(command, cwd=self._root, env=environment).returncode

    def tests(self, path: Path, line: int) -> list[str]:
        """Return the ids of the tests that execute a line of a file, whose path is relative to the project.

        Raises:
            SystemExit: there is no record of the library as it is.
        """
        if not self._of_sources.exists():
            raise SystemExit("Nothing says which tests execute what of the library as it is: pass --record once.")
        file = self._root / path
        numbers = [self._first[str(file)] + number for number in lines_of(file.read_bytes(), line)]
        return sorted(
            content[self._num_lines :].decode()
            for content in map(Path.read_bytes, self._of_sources.iterdir())
            if any(content[number] for number in numbers)
        )

    def start(self) -> None:
        """Have this process record from now on."""
        compiled = SourceFileLoader.source_to_code
        builtins.__executed__ = of_no_test = bytearray(self._num_lines)  # type: ignore[attr-defined]

        def source_to_code(loader: Any, data: Any, path: Any, **options: Any) -> Any:
            return compiled(loader, marked(data, self._first[path]) if path in self._first else data, path, **options)

        def heard(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "os.putenv" and arguments[0] == RUNNING.encode():
                self._switch_to(arguments[1].decode())
            elif event == "os.unsetenv" and arguments[0] == RUNNING.encode():
                builtins.__executed__ = of_no_test  # type: ignore[attr-defined]

        SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign, assignment]
        sys.addaudithook(heard)
        if RUNNING in os.environ:
            self._switch_to(os.environ[RUNNING])

    def _switch_to(self, test_and_part: str) -> None:
        test = test_and_part.rpartition(" ")[0].encode()
        with open(self._of_sources / hashlib.sha1(test).hexdigest(), "a+b") as file:
            # pytest's process is the first one.
            if file.tell() == 0:
                file.write(bytes(self._num_lines) + test)
                file.flush()
            builtins.__executed__ = mmap.mmap(file.fileno(), self._num_lines)  # type: ignore[attr-defined]


def marked(source: bytes, first: int) -> ast.Module:
    """Parse a file and put before each statement in a function one that notes its line.

    Args:
        source: of the file.
        first: what is added to the number of a line.
    """
    tree = ast.parse(source)
    for block in blocks(tree):
        for index in reversed(range(len(block))):
            statement = block[index]
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                note = ast.parse(f"__executed__[{first + statement.lineno}] = 1").body[0]
                for node in ast.walk(note):
                    ast.copy_location(node, statement)
                block.insert(index, note)
    return tree


def lines_of(source: bytes, line: int) -> list[int]:
    """Return the lines of the statements in functions that stand for a line of a file: most often of its own one."""
    tree = ast.parse(source)

    def around(nodes: list[Any]) -> list[Any]:
        return sorted((each for each in nodes if each.lineno <= line <= each.end_lineno), key=lambda each: each.lineno)

    statements = around([statement for block in blocks(tree) for statement in block])
    if statements:
        return [statements[-1].lineno]
    definitions = around([node for node in ast.walk(tree) if isinstance(node, DEFINITIONS) and blocks(node)])
    return [statement.lineno for block in blocks([tree, *definitions][-1]) for statement in block]


def blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the lists of statements in all functions below a node."""
    return list(
        {
            id(value): value
            for function in ast.walk(node)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for each in ast.walk(function)
            for _, value in ast.iter_fields(each)
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt)
        }.values()
    )
