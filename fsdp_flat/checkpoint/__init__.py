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
from fsdp_flat.checkpoint.full_load import load_full
from fsdp_flat.checkpoint.full_save import iter_full_state_dict, save_full
