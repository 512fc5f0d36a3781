"""Saves and loads optimizer state dicts by the older forms of FSDP1's methods, each with a FutureWarning."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat.state.optim_dicts import OptimInput, load_full_or_sharded, save_full_or_sharded
from fsdp_flat.user_warnings import warn_user


def warn_of_older_form(name: str, instead: str) -> None:
    """Warn that ``name`` is an older form of ``instead``."""
    warn_user(f"{name} is an older form of {instead}; use that.", FutureWarning)


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state as full tensors on the CPU; older form of ``optim_state_dict``. Every rank must call this.

    Result, errors and other arguments are those of ``optim_state_dict``.

    Args:
        optim_input: accepted as in FSDP1; ``optim`` gives the order of parameters.
        rank0_only: ranks other than 0 (of all ranks, also with hybrid strategies) send their shards and return an
            empty dict.
    """
    warn_of_older_form("full_optim_state_dict", "optim_state_dict")
    return save_full_or_sharded(model, optim, None, optim_input, rank0_only)


def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the state as dim-0 chunks; older form of ``optim_state_dict``, whose arguments and errors it has.

    Every rank must call this.
    """
    warn_of_older_form("sharded_optim_state_dict", "optim_state_dict")
    return save_full_or_sharded(model, optim, None, rank0_only=False, full_state_dict=False, cpu_offload=False)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Convert full tensors that every rank has for loading; older form of ``optim_state_dict_to_load``.

    Result and errors are those of ``optim_state_dict_to_load``. The order of parameters is that of ``optim``, else
    of ``optim_input`` (the input of the optimizer's constructor), else of ``model.parameters()``.
    """
    warn_of_older_form("shard_full_optim_state_dict", "optim_state_dict_to_load")
    return load_full_or_sharded(full_optim_state_dict, model, optim_input, optim)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert the result of :func:`sharded_optim_state_dict`, at the same number of ranks, for loading.

    It is an older form of ``optim_state_dict_to_load``, whose result and errors it has. Every rank must call this.
    """
    warn_of_older_form("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return load_full_or_sharded(sharded_optim_state_dict, model, None, optim, full_state_dict=False)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
    group: Any | None = None,
) -> dict[str, Any]:
    """Convert full tensors that rank 0 alone has, as :func:`shard_full_optim_state_dict`; others' are ignored.

    Every rank must call this.
    """
    warn_of_older_form("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    return load_full_or_sharded(full_optim_state_dict, model, optim_input, optim, rank0_only=True)
