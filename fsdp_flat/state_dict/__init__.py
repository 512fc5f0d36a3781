"""Floor 3: model state dicts, made of layout and shard."""

from fsdp_flat.state_dict.common import LoadReport
from fsdp_flat.state_dict.forms import FORMS, Form
from fsdp_flat.state_dict.settings import DEFAULT_SETTINGS, settings_for

__all__ = ["DEFAULT_SETTINGS", "FORMS", "Form", "LoadReport", "settings_for"]
