"""Streams full models to and from files, and saves checkpoints that survive a crash (layer 6)."""

from fsdp_flat.checkpoint.checkpoints import CheckpointSave, LoadedCheckpoint, load_checkpoint, save_checkpoint
from fsdp_flat.checkpoint.full_files import iter_full_state_dict, load_full, save_full
