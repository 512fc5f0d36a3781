"""Floor 3: model state dicts, made of layout and shard."""

from fsdp_flat.state_dict.full import load_full, save_full
from fsdp_flat.state_dict.settings import DEFAULT_SETTINGS, settings_for

__all__ = ["DEFAULT_SETTINGS", "load_full", "save_full", "settings_for"]
