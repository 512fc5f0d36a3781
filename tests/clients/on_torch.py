"""Runs a script of a client on torch's own FSDP on CPUs: ``torchrun -m tests.clients.on_torch script.py args...``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_flat.compat import client_gates
from tests.support.peer import mend_peer


def main() -> None:
    """Mend what torch's FSDP1 lacks on CPUs, lift the clients' checks, and run the script."""
    mend_peer()
    made = FullyShardedDataParallel.__init__

    def init(self, *args, device_id=None, sync_module_states=False, **kwargs) -> None:  # type: ignore[no-untyped-def]
        # It needs a device without an accelerator, and one without an index; it synchronizes no states on CPUs.
        made(self, *args, device_id=torch.device("cpu"), **kwargs)

    FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign, assignment]
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    client_gates.lift(fully_shard=True)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    # After torch's fully_shard, the threads of gloo may abort an ordinary exit.
    os._exit(0)


if __name__ == "__main__":
    main()
