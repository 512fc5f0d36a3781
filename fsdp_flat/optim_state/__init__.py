"""Saves and loads optimizer state dicts (layer 4)."""

from fsdp_flat.optim_state.handlers import OptimStateHandler, StatePart, register_optim_state_handler
from fsdp_flat.optim_state.keys import rekey
from fsdp_flat.optim_state.load_states import load_optim_state
from fsdp_flat.optim_state.optim_dicts import (
    OptimInput,
    load_full_or_sharded,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    save_full_or_sharded,
)
from fsdp_flat.optim_state.optim_params import Managed, OptimContents, ParamNames, contents_of, names_of, ordered_params
from fsdp_flat.optim_state.save_states import save_optim_state
from fsdp_flat.optim_state.templates import template_states

__all__ = [
    "Managed",
    "OptimContents",
    "OptimInput",
    "OptimStateHandler",
    "ParamNames",
    "StatePart",
    "contents_of",
    "load_full_or_sharded",
    "load_optim_state",
    "names_of",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "ordered_params",
    "register_optim_state_handler",
    "rekey",
    "rekey_optim_state_dict",
    "save_full_or_sharded",
    "save_optim_state",
    "template_states",
]
