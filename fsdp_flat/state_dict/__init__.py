"""Floor 3: model state dicts, made of layout and shard."""

from fsdp_flat.state_dict.chunks import chunks_to_shard, shard_to_chunks
from fsdp_flat.state_dict.common import LoadReport, refuse_split
from fsdp_flat.state_dict.forms import FORMS, Form
from fsdp_flat.state_dict.settings import DEFAULT_SETTINGS, settings_for
from fsdp_flat.state_dict.torch_types import chunked, local_chunk

__all__ = [
    "DEFAULT_SETTINGS",
    "FORMS",
    "Form",
    "LoadReport",
    "chunked",
    "chunks_to_shard",
    "local_chunk",
    "refuse_split",
    "settings_for",
    "shard_to_chunks",
]
