"""Writes the outputs of ``examples/plan_and_record.py`` into docs/planning.md: ``python -m benchmarks.planning``."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.runner import ROOT, where
from benchmarks.tables import machine

PAGE = ROOT / "docs" / "planning.md"
EXAMPLE = ROOT / "examples" / "plan_and_record.py"
# A name of a file that the example writes, and the text between it and the end of the block below.
OUTPUT = re.compile(r"(<!-- (\w+\.txt) -->\n```text\n)(.*?)(```\n)", re.DOTALL)


def with_outputs(page: str, folder: Path) -> str:
    """Return the page with the texts of ``folder`` in the blocks that are marked with their names."""
    return OUTPUT.sub(lambda block: block[1] + (folder / block[2]).read_text() + block[4], page)


def outputs_of(page: str) -> dict[str, str]:
    """Return the text in each marked block of a page, by the name of its file."""
    return {block[2]: block[3] for block in OUTPUT.finditer(page)}


def main(argv: list[str] | None = None) -> None:
    """Run the example, and replace the texts and pictures of the page, and the line on the machine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    folder = args.page.parent / args.page.stem
    subprocess.run([sys.executable, EXAMPLE, "--out", folder], check=True)
    (folder / "machine.txt").write_text(machine({"where": where()}))
    args.page.write_text(with_outputs(args.page.read_text(), folder))
    for path in [*folder.glob("*.txt"), *folder.glob("*.json")]:
        path.unlink()


if __name__ == "__main__":
    main()
