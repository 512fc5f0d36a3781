"""Saves and loads model state dicts (layer 3)."""

from fsdp_flat.state_dict.boxed import BoxedTensor, boxed_value, boxes_of, boxes_to_shard, check_boxes
from fsdp_flat.state_dict.chunk_specs import (
    ChunkSpec,
    ShardWithSpec,
    chunk_spec,
    chunks_of,
    fitting_chunk,
    plan_full_transfer,
    write_chunks,
)
from fsdp_flat.state_dict.codecs import CODECS, StateDictCodec
from fsdp_flat.state_dict.common import LOADING, LoadReport, failed_anywhere, local_shard_of, rank_groups_of
from fsdp_flat.state_dict.model_dicts import (
    get_state_dict_type,
    save_model,
    set_state_dict_type,
    state_dict_type,
    with_wrapper_versions,
)
from fsdp_flat.state_dict.settings import DEFAULT_SETTINGS, settings_for
from fsdp_flat.state_dict.torch_types import dtype_of, is_chunked, shape_of

__all__ = [
    "CODECS",
    "DEFAULT_SETTINGS",
    "LOADING",
    "BoxedTensor",
    "ChunkSpec",
    "LoadReport",
    "ShardWithSpec",
    "StateDictCodec",
    "boxed_value",
    "boxes_of",
    "boxes_to_shard",
    "check_boxes",
    "chunk_spec",
    "chunks_of",
    "dtype_of",
    "failed_anywhere",
    "fitting_chunk",
    "get_state_dict_type",
    "is_chunked",
    "local_shard_of",
    "plan_full_transfer",
    "rank_groups_of",
    "save_model",
    "set_state_dict_type",
    "settings_for",
    "shape_of",
    "state_dict_type",
    "with_wrapper_versions",
    "write_chunks",
]
