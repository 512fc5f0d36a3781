"""Runs scripts of clients under torchrun, as users start them, on fsdp_flat and on torch's FSDP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.support.scripts import torchrun

SCRIPTS = Path(__file__).parent / "scripts"
OURS = ("-m", "fsdp_flat.run", "--fully-shard")
THEIRS = ("-m", "tests.clients.on_torch")

Told = dict[str, list[float]]


def run(side: Sequence[str], script: str, *words: object) -> Told:
    """Run a script on two ranks, and check that each unit is of the side that is asked for.

    Args:
        side: ``OURS`` or ``THEIRS``.
        script: its name in ``scripts``.
        words: its arguments.

    Returns:
        The numbers that the script printed, by the words before them.
    """
    output = torchrun(2, *side, SCRIPTS / script, *words)
    assert_units(output, "fsdp_flat" if side is OURS else "torch")
    return numbers(output)


def assert_units(output: str, package: str) -> None:
    """Assert that a script says that its model has nested units, all of the package."""
    __tracebackhide__ = True
    units = re.findall(r"^units (\d+) of (\w+)$", output, re.MULTILINE)
    assert units, output
    assert all(int(count) > 1 and of == package for count, of in units), units


def numbers(output: str) -> Told:
    """Return the numbers of lines like ``train 3 2.5 0.1``, by their first two words."""
    told: Told = {}
    for line in output.splitlines():
        match = re.fullmatch(r"(train|valid|weights) (\S+)((?: \S+)+)", line)
        if match:
            told[f"{match[1]} {match[2]}"] = [float(word) for word in match[3].split()]
    return told


def assert_goes_on(resumed: Told, straight: Told) -> None:
    """Assert that a resumed run told a part of the straight run's steps, and exactly the same."""
    __tracebackhide__ = True
    steps = [[name for name in told if name.startswith("train")] for told in (resumed, straight)]
    assert 2 <= len(steps[0]) < len(steps[1]), steps
    assert any(name.startswith("valid") for name in resumed)
    assert any(name.startswith("weights") for name in resumed)
    assert resumed == {name: straight[name] for name in resumed}
