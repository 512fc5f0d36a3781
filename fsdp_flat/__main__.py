"""Runs the command line ``fsdp-flat``, which is ``python -m fsdp_flat`` too: ``run``, ``migrate``, ``--version``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fsdp_flat import migrate, run
from fsdp_flat.version import __version__

_USAGE = """\
usage: fsdp-flat run script.py [arguments ...]      run an unmodified FSDP1 script (fsdp-flat run --help)
       fsdp-flat migrate [--write] PATH [PATH ...]  rewrite the imports of a codebase (fsdp-flat migrate --help)
       fsdp-flat --version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the command line.

    Args:
        arguments: the command and its arguments; by default those of the process.

    Returns:
        The exit status.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command == "run":
        if not getattr(sys.flags, "safe_path", False):
            # As under ``python -m``, for ``run -m``: an installed command has its own folder there.
            sys.path[0] = os.getcwd()
        run.main(rest)
        return 0
    if command == "migrate":
        return migrate.main(rest)
    if command in ("-V", "--version"):
        print(f"fsdp-flat {__version__}")
        return 0
    is_help = command in ("-h", "--help")
    print(_USAGE, end="", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main())
