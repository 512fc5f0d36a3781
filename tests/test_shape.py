"""How much a newcomer has to read: tokens of the package, and functions that one unit's step enters.

The numbers are ceilings. A change that needs fewer lowers them; one that needs more says in its message what for.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_flat
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.runtime.kit import batch
from tests.support import on_ranks
from tests.support.kit import Block, wrapped

PACKAGE = Path(fsdp_flat.__file__).parent
# Tokens without comments and docstrings. The folder `tools` and the migration are no part of the library at run time.
MOST_TOKENS = {
    "": 5808,
    "checkpoint": 17756,
    "comm": 21181,
    "compat": 9701,
    "composable": 3668,
    "extras": 9455,
    "flat": 21416,
    "layout": 3673,
    "runtime": 35438,
    "state": 31570,
    "wrap": 3860,
}
# Distinct functions of the package, lower layers included, in a steady forward and backward of a middle unit. Counted
# were 118 to 122, since ranks wait for each other in different functions.
MOST_FUNCTIONS = {"flat": 124, "originals": 124}
_NO_TOKENS = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def num_tokens(source: str) -> int:
    """Return the number of tokens of a file, without comments and docstrings."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add((first.lineno, first.col_offset))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in _NO_TOKENS and token.start not in docstrings for token in tokens)


def tokens_by_package() -> Counter[str]:
    """Return the tokens of each folder of the package, and of the files beside them under an empty name."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else ""
        if folder != "tools" and path.name != "migrate.py":
            found[folder] += num_tokens(path.read_text())
    return found


def test_no_package_has_more_tokens_than_before() -> None:
    found = tokens_by_package()
    assert found.keys() == MOST_TOKENS.keys()
    assert {name: number for name, number in found.items() if number > MOST_TOKENS[name]} == {}


def test_tokens_are_those_that_a_reader_reads() -> None:
    assert num_tokens('"""Module."""\n\n# comment\ndef f(x):  # why\n    """Say."""\n    return x + 1\n') == 10


# Files that know which kind of handle they have: the kinds themselves, the front that shows DTensors, and the plan of
# units for either front.
KNOW_KINDS = ("flat/", "layout/", "composable/", "state/torch_state.py", "tools/planned_units.py")
_KIND = re.compile(r"\b(DTensorHandle|FlatHandle|OriginalsHandle|RowLayout)\b")


def lines_with(pattern: re.Pattern[str], sources: Mapping[str, str]) -> list[str]:
    return [
        f"{path}: {line.strip()}"
        for path, source in sources.items()
        if not path.startswith(KNOW_KINDS)
        for line in source.splitlines()
        if pattern.search(line)
    ]


def test_a_step_and_what_is_around_it_do_not_ask_for_the_kind_of_a_handle() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert lines_with(_KIND, sources) == []


def test_the_search_for_kinds_finds_one() -> None:
    found = lines_with(_KIND, {"runtime/a.py": "if isinstance(handle, DTensorHandle):", "flat/b.py": "DTensorHandle()"})
    assert found == ["runtime/a.py: if isinstance(handle, DTensorHandle):"]


class Entered:
    """The functions of the package that run while it is on."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            self.functions.add(code)

    def on(self, *_: Any) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def off(self, *_: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


class Watched(nn.Module):
    """Three blocks; ``entered`` is on while the middle one runs forward, and while its backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), Block(), Block()
        self.entered = Entered()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * 1
        x.register_hook(self.entered.off)
        self.entered.on()
        x = self.middle(x)
        self.entered.off()
        x = x * 1
        x.register_hook(self.entered.on)
        return self.last(x)


@pytest.mark.parametrize("front", MOST_FUNCTIONS)
@on_ranks(2)
def test_a_steady_step_of_a_unit_enters_no_more_functions_than_before(front: str, rank: int) -> None:
    policy = ModuleWrapPolicy({Block})
    model = wrapped(Watched(), auto_wrap_policy=policy, use_orig_params=front == "originals")
    entered = model.module.entered
    for step in range(3):
        entered.functions.clear()
        try:
            model(batch(rank, step)).sum().backward()
        finally:
            entered.off()
        model.zero_grad()
    names = sorted(f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}" for code in entered.functions)
    assert any(name.startswith("backward.py") for name in names), "the record was off in backward"
    assert len(names) <= MOST_FUNCTIONS[front], "\n".join(names)


def test_the_record_sees_functions_of_the_package_only_while_it_is_on() -> None:
    entered = Entered()
    fsdp_flat.layout.clean_fqn("a")
    assert not entered.functions
    entered.on()
    fsdp_flat.layout.clean_fqn("a")
    entered.off()
    assert {code.co_name for code in entered.functions} >= {"clean_fqn"}
