"""Floor 6: whole models streamed to and from files, and checkpoints that survive a crash."""

from fsdp_flat.checkpoint.full_files import load_full, save_full
from fsdp_flat.checkpoint.streaming import iter_full_state_dict

__all__ = ["iter_full_state_dict", "load_full", "save_full"]
