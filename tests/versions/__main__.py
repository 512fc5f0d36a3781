"""Runs a selection of the tests on several releases of torch with the Python that runs this, each in an environment.

``python -m tests.versions --versions 2.8,2.13,newest`` needs no torch of its own, but a package index that pip
reaches and 5 GB of disk a version (with ``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`` less than 1 GB).
It ends non-zero if a version fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .selection import FULL, SHORT

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-versions"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = "2.8,2.11,2.13,newest"
# An environment with the CUDA libraries, and the archives beside it while pip unpacks them.
NEEDED_BYTES = 12e9
LIMIT_S = 3600.0


class Unavailable(Exception):
    """A version that cannot be installed here."""


def main(arguments: Sequence[str]) -> int:
    """Test each version, print a line each, and return the exit status: 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--versions", default=VERSIONS, help=f"comma-separated (default: {VERSIONS})")
    parser.add_argument("--short", action="store_true", help="the short selection")
    parser.add_argument("--remove", action="store_true", help="remove each environment after its tests")
    parser.add_argument(
        "--if-possible", action="store_true", help="a version that cannot be installed is said, not a failure"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for an installation, and for the tests")
    options = parser.parse_args(arguments)
    lines, failed = [], False
    for version in options.versions.split(","):
        started = time.monotonic()
        try:
            ok, text = try_version(version, SHORT if options.short else FULL, options.limit, remove=options.remove)
        except Unavailable as error:
            ok, text = options.if_possible, f"NOT TESTED: {error}"
        failed |= not ok
        lines.append(f"torch {version}, {PYTHON}: {text} ({time.monotonic() - started:.0f} s)")
    print("", *lines, sep="\n", flush=True)
    return int(failed)


def try_version(version: str, selection: Sequence[str], limit: float, *, remove: bool) -> tuple[bool, str]:
    """Whether the selected tests pass on a version, and the outcome in words.

    Raises:
        Unavailable: it cannot be installed.
    """
    if version == "newest":
        version = newest_torch()
        if version == pinned_torch():
            return True, f"the newest that pip finds is {version}, which constraints.txt pins and `make test` tests"
    folder = ENVIRONMENTS / f"{version}-{PYTHON}"
    try:
        install(version, folder, limit, cache=not remove)
        print(f"--- torch {version}, {PYTHON} ---", flush=True)
        command = [str(folder / "bin/python"), "-m", "pytest", "-q", "--size", "all", *selection]
        try:
            status = subprocess.run(
                command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return False, f"FAILED, {version}: not done after {limit:.0f} s"
        return status == 0, f"{'passed' if status == 0 else f'FAILED with status {status}'}, {version}"
    finally:
        if remove:
            shutil.rmtree(folder, ignore_errors=True)


def install(version: str, folder: Path, limit: float, *, cache: bool) -> None:
    """Make the environment, unless it is there.

    Raises:
        Unavailable: pip could not, or the disk is too full.
    """
    done = folder / ".installed"
    if done.exists():
        return
    ENVIRONMENTS.mkdir(exist_ok=True)
    free = shutil.disk_usage(ENVIRONMENTS).free
    if free < NEEDED_BYTES:
        raise Unavailable(f"{free / 1e9:.0f} GB are free, and an environment may take {NEEDED_BYTES / 1e9:.0f} GB")
    print(f"--- installing torch {version} into {folder.relative_to(ROOT)} ---", flush=True)
    constraints = ENVIRONMENTS / f"constraints-{folder.name}.txt"
    constraints.write_text(other_constraints())
    torch = f"torch=={version}" if version.count(".") > 1 else f"torch=={version}.*"
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", *([] if cache else ["--no-cache-dir"])]
    run([*pip, "-c", str(constraints), torch, "-e", ".[test]"], limit)
    done.touch()


def other_constraints() -> str:
    """The same tools as everywhere, with another torch; it names the setuptools that it works with (2.11: < 82)."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith(("torch==", "setuptools=="))) + "\n"


def run(command: Sequence[str], limit: float = 120.0) -> str:
    """What a command prints.

    Raises:
        Unavailable: it failed or took too long; the text has the end of its output.
    """
    try:
        result = subprocess.run(command, cwd=ROOT, timeout=limit, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"not done after {limit:.0f} s: {' '.join(command)}") from None
    if result.returncode != 0:
        last = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()][-1:]
        raise Unavailable(f"failed: {' '.join(command)}: {''.join(last)}")
    return result.stdout


def newest_torch() -> str:
    """The newest release that pip finds, such as "2.15.0".

    Raises:
        Unavailable: pip finds none.
    """
    printed = run([sys.executable, "-m", "pip", "index", "versions", "torch"])
    found = re.match(r"torch \((\d+(?:\.\d+)+)", printed)
    if found is None:
        raise Unavailable(f"pip names no release of torch: {printed[:200]!r}")
    return found[1]


def pinned_torch() -> str:
    """The release that constraints.txt names."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None, "constraints.txt pins torch"
    return found[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
