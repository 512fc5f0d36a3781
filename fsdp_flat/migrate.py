"""Moves a codebase from torch's FSDP1 to fsdp_flat: ``python -m fsdp_flat.migrate PATH...``.

See :mod:`fsdp_flat.tools.migrate` for its behaviour, options and exit status.
"""

from __future__ import annotations

import sys

from fsdp_flat.tools.migrate import main

if __name__ == "__main__":
    sys.exit(main())
