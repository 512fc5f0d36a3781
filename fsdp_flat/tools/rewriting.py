"""Runs ``migrate`` over files: prints a patch and a report, or changes the files."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from fsdp_flat.errors import counted

_SKIPPED = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}
_SUFFIXES = (".py", ".pyi", ".ipynb")
_TO_CHECK = ("check", "error")
_NEXT = "Imports are all that changes. docs/migrating.md shows how to move a model from the wrapper to fully_shard."


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """Describes one line of the report, which is about a line of the original file.

    Attributes:
        line: its number, 0 for the whole file.
        kind: "changed", "differs" (behaves differently), "check" (cannot be judged) or "error".
    """

    line: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Migrated:
    """Holds the new source of one file, and the findings in the order of lines."""

    data: bytes
    findings: list[Finding]


def run_migrate(name: str, load: Callable[[], Callable[[bytes], Migrated]], arguments: Sequence[str] | None) -> int:
    """Run the command line of ``migrate``.

    Args:
        name: what the command is called by.
        load: returns the function that rewrites the source of one file, which needs libcst.
        arguments: the arguments without the program's name; by default those of the process.

    Returns:
        0 if nothing is left to do, 1 if changes are pending, 2 for findings to check and for errors.
    """
    options = _parser(name).parse_args(arguments)
    try:
        rewrite = load()
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "libcst":
            raise
        print(f"{name} needs libcst, which is not installed: pip install libcst", file=sys.stderr)
        return 2
    files, findings = _files(options.paths)
    sources: dict[Path, bytes] = {}
    for path in files:
        try:
            sources[path] = path.read_bytes()
        except OSError as error:
            findings.append((path, Finding(0, "error", f"cannot be read: {error.strerror}")))
    notebooks = {path: sources.pop(path) for path in list(sources) if path.suffix == ".ipynb"}
    for path, data in notebooks.items():
        if b"torch.distributed.fsdp" in data:
            text = "notebooks are not rewritten; this one names torch.distributed.fsdp"
            findings.append((path, Finding(1, "check", text)))
    done = {path: rewrite(data) for path, data in sources.items()}
    changed = {path: done[path].data for path in sources if done[path].data != sources[path]}
    findings += [(path, found) for path in sources for found in done[path].findings]
    patch = b"".join(_patch(path, sources[path], data) for path, data in changed.items())
    if options.write:
        for path, data in changed.items():
            path.write_bytes(data)
    num_unsure = sum(found.kind in _TO_CHECK for _, found in findings)
    if options.json:
        _show_json(files, changed, findings, patch, written=options.write)
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


def _show_json(
    files: Collection[Path],
    changed: Collection[Path],
    findings: Sequence[tuple[Path, Finding]],
    patch: bytes,
    *,
    written: bool,
) -> None:
    result = {
        "num_files": len(files),
        "changed": [str(path) for path in changed],
        "written": written,
        "findings": [{"path": str(path), **asdict(found)} for path, found in findings],
        "patch": patch.decode(errors="replace"),
        "next": _NEXT,
    }
    print(json.dumps(result, indent=2))


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


def _files(paths: Sequence[Path]) -> tuple[list[Path], list[tuple[Path, Finding]]]:
    """Find files at and below ``paths``; return them and an error for each missing path."""
    files: dict[Path, None] = {}
    errors = []
    for path in paths:
        if path.is_dir():
            files.update(dict.fromkeys(_below(path)))
        elif path.exists():
            files[path] = None
        else:
            errors.append((path, Finding(0, "error", "there is no such file or folder")))
    return list(files), errors


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
