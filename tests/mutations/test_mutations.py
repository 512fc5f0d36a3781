"""Mutants are programs that differ from their file in one place, and a seed draws the same ones again."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.__main__ import ROOT, TESTS, main
from tests.mutations.mutants import drawn, mutants_of

SOURCE = b'''"""Text == 1."""

def f(a: "int | 3", b=True):
    """Says 1 + 1."""
    if not a and (b) or a < 2:
        g(a)
    return a + 1, [x for x in b if x is not None], f"{a == 1}"
'''
FOLDERS = [f"fsdp_flat/{package}" for package in TESTS]
SMALLEST = sorted(FOLDERS, key=lambda folder: sum(file.stat().st_size for file in (ROOT / folder).rglob("*.py")))[:2]


def test_each_kind_of_change_is_made_and_texts_and_annotations_stay() -> None:
    changes = [each.describe(SOURCE).partition(": ")[2] for each in mutants_of(Path("a.py"), SOURCE)]
    assert changes == [
        "'True' -> 'False'",
        "'not a' -> 'bool(a)'",
        "'and' -> 'or'",
        "'or' -> 'and'",
        "'<' -> '<='",
        "'2' -> '3'",
        "'g(a)' -> 'pass'",
        "'+' -> '-'",
        "'1' -> '2'",
        "'is not' -> 'is'",
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_mutant_of_a_package_is_a_program_of_its_own(folder: str) -> None:
    for file in sorted((ROOT / folder).rglob("*.py")):
        source = file.read_bytes()
        before = ast.dump(ast.parse(source))
        # Two of each file stand for all, of which there are thousands.
        found = mutants_of(file, source)
        for mutant in found[len(found) // 3 :: max(1, len(found) // 2)]:
            assert ast.dump(ast.parse(mutant.apply(source))) != before, mutant.describe(source)


def test_a_seed_draws_the_same_mutants_again_and_another_seed_others() -> None:
    first = drawn(ROOT, SMALLEST, 20, seed=1)
    assert first == drawn(ROOT, SMALLEST, 20, seed=1)
    assert first != drawn(ROOT, SMALLEST, 20, seed=2)
    assert {mutant.path.parts[1] for mutant in first} == {Path(folder).name for folder in SMALLEST}


def test_the_draw_is_listed_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "3", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_folders_of_each_package_are_there() -> None:
    assert all((ROOT / "tests" / folder).is_dir() for folders in TESTS.values() for folder in folders)
