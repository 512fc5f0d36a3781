"""``python -m fsdp_flat.migrate PATH...``: move a codebase from torch's FSDP1 to fsdp_flat.

See :mod:`fsdp_flat.tools.migrate` for what it does, its options and its exit status.
"""

from __future__ import annotations

import sys

from fsdp_flat.tools.migrate import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
