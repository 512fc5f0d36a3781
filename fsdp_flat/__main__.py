"""Runs the command line ``fsdp-flat``, which is ``python -m fsdp_flat`` too."""

import sys

from fsdp_flat.tools.command import main

if __name__ == "__main__":
    sys.exit(main())
