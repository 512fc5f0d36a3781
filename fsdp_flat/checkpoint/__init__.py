"""Streams full models to and from files, and saves checkpoints that survive a crash (layer 6)."""

from fsdp_flat.checkpoint.checkpoints import (
    CheckpointInfo,
    CheckpointSave,
    LoadedCheckpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from fsdp_flat.checkpoint.full_files import iter_full_state_dict, load_full, save_full
