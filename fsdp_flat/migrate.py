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

import sys
from collections.abc import Callable, Sequence

from fsdp_flat.tools.rewriting import Migrated, run_migrate

NAME = "python -m fsdp_flat.migrate"


def main(arguments: Sequence[str] | None = None, name: str = NAME) -> int:
    """Run the command line.

    Args:
        arguments: the arguments without the program's name; by default those of the process.
        name: the program's name.

    Returns:
        The exit status.
    """
    return run_migrate(name, _load, arguments)


def _load() -> Callable[[bytes], Migrated]:
    from fsdp_flat.tools.migrate_source import migrate_source

    return migrate_source


if __name__ == "__main__":
    sys.exit(main())
