"""Layer 3: saves and loads state dicts of models and optimizers."""

from fsdp_flat.state._torch import full_tensor
from fsdp_flat.state.boxed import BoxedTensor
from fsdp_flat.state.codecs import CODECS, CodecRow, codec_of, settings_for
from fsdp_flat.state.dtensors import local_from
from fsdp_flat.state.handlers import OptimStateHandler, StatePart, register_optim_state_handler
from fsdp_flat.state.load_states import load_optim_state, template_states
from fsdp_flat.state.model_dicts import (
    get_state_dict_type,
    save_model,
    set_state_dict_type,
    state_dict_in,
    state_dict_type,
    with_wrapper_versions,
)
from fsdp_flat.state.model_state import LoadReport, load_unit
from fsdp_flat.state.optim_contents import OptimContents, contents_of
from fsdp_flat.state.optim_dicts import (
    OptimInput,
    load_full_or_sharded,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    save_full_or_sharded,
)
from fsdp_flat.state.param_index import IndexedParam, ParamIndex, rank_groups_of
from fsdp_flat.state.param_states import Peers
from fsdp_flat.state.save_states import save_optim_state
from fsdp_flat.state.shards import LoadPlan, StateDictCodec, StateShard, redistribute
