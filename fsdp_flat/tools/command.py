"""Chooses the command that ``fsdp-flat`` runs; those that run and rewrite code work without the extra ``cli``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fsdp_flat import migrate, run
from fsdp_flat.version import __version__

_WITHOUT_EXTRA = """\
usage: fsdp-flat run script.py [arguments ...]      run an unmodified FSDP1 script (fsdp-flat run --help)
       fsdp-flat migrate [--write] PATH [PATH ...]  rewrite the imports of a codebase (fsdp-flat migrate --help)
       fsdp-flat --version
All other commands need typer and rich: pip install typer rich tqdm safetensors
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the command line.

    Args:
        arguments: the command and its arguments; by default those of the process.

    Returns:
        The exit status: 0 for success, 1 if what was asked is not so (files differ or are damaged, changes are
        pending), 2 if the command cannot do what it was told to.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, *rest = given or [""]
    if command == "run":
        if not getattr(sys.flags, "safe_path", False):
            # As under ``python -m``, for ``run -m``: an installed command has its own folder there.
            sys.path[0] = os.getcwd()
        run.main(rest)
        return 0
    if command == "migrate":
        return migrate.main(rest, "fsdp-flat migrate")
    if given in (["-V"], ["--version"]):
        print(f"fsdp-flat {__version__}")
        return 0
    try:
        from fsdp_flat.tools.commands import run_command
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in ("typer", "rich"):
            raise
        is_help = command in ("-h", "--help")
        print(_WITHOUT_EXTRA, end="", file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    return run_command(given)
