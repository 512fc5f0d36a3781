"""Layer 3: saves and loads state dicts of models and optimizers."""

from fsdp_flat.state.apart import SplitParams
from fsdp_flat.state.codecs import BOXES, CODECS, BoxedTensor, CodecRow, settings_for
from fsdp_flat.state.model_load import (
    ModelLoad,
    all_or_nothing,
    end_load,
    load_unit,
    with_advice,
    with_wrapper_versions,
)
from fsdp_flat.state.model_save import (
    TEMPLATE,
    boxed_state_dict,
    get_state_dict_type,
    is_own_save,
    save_model,
    set_state_dict_type,
    state_dict_settings,
    state_dict_type,
)
from fsdp_flat.state.optim_dicts import (
    OptimInput,
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    load_full_or_sharded,
    optim_state_dict,
    optim_state_dict_to_load,
    register_optim_state_handler,
    rekey_optim_state_dict,
    save_full_or_sharded,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
    warn_of_older_form,
    warn_of_optim_input,
)
from fsdp_flat.state.optim_load import load_optim_state, states_in_files
from fsdp_flat.state.optim_save import encoded_states, merged_states, named_groups, rows_of
from fsdp_flat.state.optim_states import OptimStates, are_equal, contents_of
from fsdp_flat.state.shards import (
    IndexedParam,
    OptimContents,
    ParamIndex,
    PendingWrites,
    StateDictCodec,
    StateShard,
    held_by,
    rank_groups_of,
)
from fsdp_flat.state.state_settings import own_settings
from fsdp_flat.state.torch_state import distributed_param, full_tensor
