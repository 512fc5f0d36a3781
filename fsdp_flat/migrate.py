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

Only imports and paths into ``torch.distributed.fsdp`` change; all other bytes stay. With ``--json`` the result, the
patch included, is JSON. Needs libcst: ``pip install libcst``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from fsdp_flat.errors import counted

NAME = "python -m fsdp_flat.migrate"
_SKIPPED = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}
_SUFFIXES = (".py", ".pyi", ".ipynb")
_NEXT = "Imports are all that changes. docs/migrating.md shows how to move a model from the wrapper to fully_shard."


def main(arguments: Sequence[str] | None = None, name: str = NAME) -> int:
    """Run the command line.

    Args:
        arguments: the arguments without the program's name; by default those of the process.
        name: the program's name.

    Returns:
        The exit status.
    """
    options = _parser(name).parse_args(arguments)
    try:
        from fsdp_flat.tools.migrate_imports import Finding
        from fsdp_flat.tools.migrate_source import migrate_source
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "libcst":
            raise
        print(f"{name} needs libcst, which is not installed: pip install libcst", file=sys.stderr)
        return 2
    files: dict[Path, None] = {}
    findings: list[tuple[Path, Finding]] = []
    changed: dict[Path, bytes] = {}
    patch = b""
    for path in options.paths:
        if path.is_dir():
            files.update(dict.fromkeys(_below(path)))
        elif path.exists():
            files[path] = None
        else:
            findings.append((path, Finding(0, "error", "there is no such file or folder")))
    for path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            findings.append((path, Finding(0, "error", f"cannot be read: {error.strerror}")))
            continue
        if path.suffix == ".ipynb":
            if b"torch.distributed.fsdp" in data:
                text = "notebooks are not rewritten; this one names torch.distributed.fsdp"
                findings.append((path, Finding(1, "check", text)))
            continue
        done = migrate_source(data)
        findings += [(path, found) for found in done.findings]
        if done.data != data:
            changed[path] = done.data
            patch += _patch(path, data, done.data)
    if options.write:
        for path, data in changed.items():
            path.write_bytes(data)
    num_unsure = sum(found.kind in ("check", "error") for _, found in findings)
    if options.json:
        result = {
            "num_files": len(files),
            "changed": [str(path) for path in changed],
            "written": options.write,
            "findings": [{"path": str(path), **asdict(found)} for path, found in findings],
            "patch": patch.decode(errors="replace"),
            "next": _NEXT,
        }
        print(json.dumps(result, indent=2))
    else:
        if not options.write:
            sys.stdout.flush()
            sys.stdout.buffer.write(patch)
            sys.stdout.buffer.flush()
        for path, found in findings:
            place = f"{path}:{found.line}" if found.line else path
            print(f"{place}: {found.kind}: {found.text}", file=sys.stderr)
        is_done = "changed" if options.write else "to change"
        print(
            f"{len(changed)} of {counted(len(files), 'files')} {is_done}, {counted(num_unsure, 'findings')} to check",
            file=sys.stderr,
        )
        print(_NEXT, file=sys.stderr)
    if num_unsure:
        return 2
    return 1 if changed and not options.write else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser(name: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=name,
        description="Move a codebase from torch's FSDP1 to fsdp_flat.",
        epilog=f"Example: {name} src/. Exit status: 0, nothing is left to do; 1, changes are pending; "
        "2, something to check, or an error.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder to look through")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--diff", action="store_true", help="print a patch and change nothing (the default)")
    mode.add_argument("--write", action="store_true", help="change the files")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        for name in sorted(names):
            if name.endswith(_SUFFIXES):
                yield Path(parent, name)


def _patch(path: Path, before: bytes, after: bytes) -> bytes:
    name = os.path.relpath(path).encode()
    lines = difflib.diff_bytes(difflib.unified_diff, _lines(before), _lines(after), b"a/" + name, b"b/" + name)
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def _lines(data: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


if __name__ == "__main__":
    sys.exit(main())
