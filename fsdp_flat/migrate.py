"""Migrates a codebase from torch's FSDP1 to fsdp_flat: rewrites imports, and reports places to check.

::

    python -m fsdp_flat.migrate src/ train.py             # prints a patch; changes nothing
    python -m fsdp_flat.migrate --write src/ train.py     # changes the files

The patch goes to standard output, so that ``> fsdp.patch`` and ``git apply`` work; the report goes to standard error,
one line per finding, ``path:line: kind: text``. Kinds: ``changed``; ``differs``, for code that behaves differently
after the migration; ``check``, for code that cannot be judged from its source (private names, FSDP2 beside FSDP1,
``import *``, names in strings, libraries that wrap models themselves); ``error``, for files that cannot be read.

Exit status: 0, nothing is left to do; 1, changes are pending (never with ``--write``); 2, there are findings to check,
or errors. A second run on the result changes nothing.

Only imports and paths into ``torch.distributed.fsdp`` change; all other bytes stay. Needs libcst:
``pip install 'fsdp-flat[migrate]'``.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_flat.tools.migrate_source import Migrated

_SKIPPED = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the arguments without the program's name; by default those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(arguments)
    try:
        from fsdp_flat.tools.migrate_source import migrate_source
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "libcst":
            raise
        print(
            "fsdp_flat.migrate needs libcst, which is not installed: pip install 'fsdp-flat[migrate]'", file=sys.stderr
        )
        return 2
    num_changed = 0
    files, findings = _files(options.paths)
    for path in files:
        try:
            before = path.read_bytes()
        except OSError as error:
            findings.append(f"{path}: error: cannot be read: {error.strerror}")
            continue
        if path.suffix == ".ipynb":
            if b"torch.distributed.fsdp" in before:
                findings.append(f"{path}:1: check: notebooks are not rewritten; this one names torch.distributed.fsdp")
            continue
        result = migrate_source(before)
        findings += [f"{path}:{found.line}: {found.kind}: {found.text}" for found in result.findings]
        if result.data != before:
            num_changed += 1
            _deliver(path, before, result, write=options.write)
    for line in findings:
        print(line, file=sys.stderr)
    num_checks = sum(": check: " in line or ": error: " in line for line in findings)
    done = "changed" if options.write else "to change"
    print(f"{num_changed} of {len(files)} files {done}, {num_checks} findings to check", file=sys.stderr)
    if num_checks:
        return 2
    return 1 if num_changed and not options.write else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_flat.migrate",
        description="Move a codebase from torch's FSDP1 to fsdp_flat.",
        epilog="Exit status: 0, nothing is left to do; 1, changes are pending; 2, something to check, or an error.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder to look through")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--diff", action="store_true", help="print a patch and change nothing (the default)")
    mode.add_argument("--write", action="store_true", help="change the files")
    return parser


def _files(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Find Python files and notebooks at and below ``paths``; return them and an error line per missing path."""
    files: dict[Path, None] = {}
    errors = []
    for path in paths:
        if path.is_dir():
            files.update(dict.fromkeys(_below(path)))
        elif path.exists():
            files[path] = None
        else:
            errors.append(f"{path}: error: there is no such file or folder")
    return list(files), errors


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        for name in sorted(names):
            if name.endswith((".py", ".pyi", ".ipynb")):
                yield Path(parent, name)


def _deliver(path: Path, before: bytes, result: Migrated, *, write: bool) -> None:
    if write:
        path.write_bytes(result.data)
        return
    sys.stdout.flush()
    name = os.path.relpath(path).encode()
    lines = difflib.diff_bytes(difflib.unified_diff, _lines(before), _lines(result.data), b"a/" + name, b"b/" + name)
    for line in lines:
        sys.stdout.buffer.write(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    sys.stdout.buffer.flush()


def _lines(data: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


if __name__ == "__main__":
    sys.exit(main())
