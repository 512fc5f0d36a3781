"""Layer 3: saves and loads state dicts of models and optimizers."""

from fsdp_flat.state.boxed import BoxedTensor, boxed_value, boxes_of, boxes_to_shard, check_boxes
from fsdp_flat.state.chunk_specs import (
    ChunkSpec,
    ShardWithSpec,
    chunk_spec,
    chunks_of,
    fitting_chunk,
    plan_full_transfer,
    write_chunks,
)
from fsdp_flat.state.codecs import CODECS, StateDictCodec
from fsdp_flat.state.common import LOADING, LoadReport, failed_anywhere, local_shard_of, rank_groups_of
from fsdp_flat.state.handle_states import Peers
from fsdp_flat.state.handlers import OptimStateHandler, StatePart, register_optim_state_handler
from fsdp_flat.state.keys import rekey
from fsdp_flat.state.load_states import load_optim_state
from fsdp_flat.state.optim_params import Managed, OptimContents, ParamNames, contents_of, names_of, ordered_params
from fsdp_flat.state.save_states import save_optim_state
from fsdp_flat.state.settings import DEFAULT_SETTINGS, TypedStateDict, settings_for
from fsdp_flat.state.templates import template_states
from fsdp_flat.state.torch_types import dtype_of, is_chunked, shape_of

__all__ = [
    "CODECS",
    "DEFAULT_SETTINGS",
    "LOADING",
    "BoxedTensor",
    "ChunkSpec",
    "LoadReport",
    "Managed",
    "OptimContents",
    "OptimStateHandler",
    "ParamNames",
    "Peers",
    "ShardWithSpec",
    "StateDictCodec",
    "StatePart",
    "TypedStateDict",
    "boxed_value",
    "boxes_of",
    "boxes_to_shard",
    "check_boxes",
    "chunk_spec",
    "chunks_of",
    "contents_of",
    "dtype_of",
    "failed_anywhere",
    "fitting_chunk",
    "is_chunked",
    "load_optim_state",
    "local_shard_of",
    "names_of",
    "ordered_params",
    "plan_full_transfer",
    "rank_groups_of",
    "register_optim_state_handler",
    "rekey",
    "save_optim_state",
    "settings_for",
    "shape_of",
    "template_states",
    "write_chunks",
]
