"""Floor 3: model state dicts, made of layout and shard."""

from fsdp_flat.state_dict.boxed import BoxedTensor, boxed_values, boxes_to_shard
from fsdp_flat.state_dict.chunks import chunks_to_shard, shard_to_chunks
from fsdp_flat.state_dict.common import LoadReport, refuse_split
from fsdp_flat.state_dict.forms import FORMS, Form
from fsdp_flat.state_dict.settings import DEFAULT_SETTINGS, settings_for
from fsdp_flat.state_dict.torch_types import chunked, dtype_of, local_chunk, shape_of

__all__ = [
    "DEFAULT_SETTINGS",
    "FORMS",
    "BoxedTensor",
    "Form",
    "LoadReport",
    "boxed_values",
    "boxes_to_shard",
    "chunked",
    "chunks_to_shard",
    "dtype_of",
    "local_chunk",
    "refuse_split",
    "settings_for",
    "shape_of",
    "shard_to_chunks",
]
