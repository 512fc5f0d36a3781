"""Floor 4: optimizer states, made of layout and shards."""

from fsdp_flat.optim_state.blank import blank_states
from fsdp_flat.optim_state.handlers import OptimStateHandler, StatePart, register_optim_state_handler
from fsdp_flat.optim_state.keys import rekey
from fsdp_flat.optim_state.load import load_optim_state
from fsdp_flat.optim_state.names import OptimContents, contents_of, ordered_params
from fsdp_flat.optim_state.save import save_optim_state

__all__ = [
    "OptimContents",
    "OptimStateHandler",
    "StatePart",
    "blank_states",
    "contents_of",
    "load_optim_state",
    "ordered_params",
    "register_optim_state_handler",
    "rekey",
    "save_optim_state",
]
