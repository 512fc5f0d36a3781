"""Runs a rewriter over files: prints a patch and a report, or changes the files; ``migrate`` and ``to-fully-shard``."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from fsdp_flat.errors import counted

_SKIPPED = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}
_TO_CHECK = ("check", "left", "error")


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """Describes one line of the report, which is about a line of the original file.

    Attributes:
        line: its number, 0 for the whole file.
        kind: "changed", "differs" (behaves differently), "check" (cannot be judged), "left" (stays) or "error".
    """

    line: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Migrated:
    """Holds the new source of one file, and the findings in the order of lines."""

    data: bytes
    findings: list[Finding]


Rewrite = Callable[[Mapping[Path, bytes]], Mapping[Path, Migrated]]


@dataclass(frozen=True, slots=True)
class Tool:
    """Describes a command that rewrites files.

    Attributes:
        name: what it is called by, for its errors.
        description: what it does, for its help.
        example: a call of it.
        suffixes: endings of the files that it looks for in folders.
        load: returns the function that rewrites files, which needs libcst.
        what_next: returns what to do once files have changed, given their paths.
    """

    name: str
    description: str
    example: str
    suffixes: tuple[str, ...]
    load: Callable[[], Rewrite]
    what_next: Callable[[Sequence[Path]], str] = lambda paths: ""


def run_tool(tool: Tool, arguments: Sequence[str] | None) -> int:
    """Run the command line of a tool.

    Args:
        tool: the tool.
        arguments: the arguments without the program's name; by default those of the process.

    Returns:
        0 if nothing is left to do, 1 if changes are pending, 2 for findings to check and for errors.
    """
    options = _parser(tool).parse_args(arguments)
    try:
        rewrite = tool.load()
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "libcst":
            raise
        print(f"{tool.name} needs libcst, which is not installed: pip install libcst", file=sys.stderr)
        return 2
    files, findings = _files(options.paths, tool.suffixes)
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
    done = rewrite(sources)
    changed = {path: done[path].data for path in sources if done[path].data != sources[path]}
    findings += [(path, found) for path in sources for found in done[path].findings]
    patch = b"".join(_patch(path, sources[path], data) for path, data in changed.items())
    if options.write:
        for path, data in changed.items():
            path.write_bytes(data)
    num_unsure = sum(found.kind in _TO_CHECK for _, found in findings)
    after = tool.what_next([*changed]) if changed else ""
    if options.json:
        _show_json(files, changed, findings, patch, after, written=options.write)
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
        print(after, end="", file=sys.stderr)
    if num_unsure:
        return 2
    return 1 if changed and not options.write else 0


def _show_json(
    files: Collection[Path],
    changed: Collection[Path],
    findings: Sequence[tuple[Path, Finding]],
    patch: bytes,
    after: str,
    *,
    written: bool,
) -> None:
    result = {
        "num_files": len(files),
        "changed": [str(path) for path in changed],
        "written": written,
        "findings": [{"path": str(path), **asdict(found)} for path, found in findings],
        "patch": patch.decode(errors="replace"),
        "next": after,
    }
    print(json.dumps(result, indent=2))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser(tool: Tool) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=tool.name,
        description=tool.description,
        epilog=f"Example: {tool.example}. Exit status: 0, nothing is left to do; 1, changes are pending; "
        "2, something to check, or an error.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder to look through")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--diff", action="store_true", help="print a patch and change nothing (the default)")
    mode.add_argument("--write", action="store_true", help="change the files")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _files(paths: Sequence[Path], suffixes: tuple[str, ...]) -> tuple[list[Path], list[tuple[Path, Finding]]]:
    """Find files at and below ``paths``; return them and an error for each missing path."""
    files: dict[Path, None] = {}
    errors = []
    for path in paths:
        if path.is_dir():
            files.update(dict.fromkeys(_below(path, suffixes)))
        elif path.exists():
            files[path] = None
        else:
            errors.append((path, Finding(0, "error", "there is no such file or folder")))
    return list(files), errors


def _below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        for name in sorted(names):
            if name.endswith(suffixes):
                yield Path(parent, name)


def _patch(path: Path, before: bytes, after: bytes) -> bytes:
    name = os.path.relpath(path).encode()
    lines = difflib.diff_bytes(difflib.unified_diff, _lines(before), _lines(after), b"a/" + name, b"b/" + name)
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines)


def _lines(data: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", data)
