"""Floor 3: model state dicts, made of layout and shard."""

from fsdp_flat.state_dict.boxed import BoxedTensor, boxed_value, boxes_of, boxes_to_shard, check_boxes
from fsdp_flat.state_dict.chunks import (
    ChunkForm,
    Row,
    chunk_form,
    chunks_of,
    fitting_chunk,
    whole_moves,
    write_chunks,
)
from fsdp_flat.state_dict.common import LOADING, LoadReport, axes_of, failed_anywhere, own_piece
from fsdp_flat.state_dict.forms import FORMS, Form
from fsdp_flat.state_dict.settings import DEFAULT_SETTINGS, settings_for
from fsdp_flat.state_dict.torch_types import dtype_of, is_chunked, shape_of

__all__ = [
    "DEFAULT_SETTINGS",
    "FORMS",
    "LOADING",
    "BoxedTensor",
    "ChunkForm",
    "Form",
    "LoadReport",
    "Row",
    "axes_of",
    "boxed_value",
    "boxes_of",
    "boxes_to_shard",
    "check_boxes",
    "chunk_form",
    "chunks_of",
    "dtype_of",
    "failed_anywhere",
    "fitting_chunk",
    "is_chunked",
    "own_piece",
    "settings_for",
    "shape_of",
    "whole_moves",
    "write_chunks",
]
