"""Maps each state-dict type to its codec and options, and checks the settings of ``set_state_dict_type``.

A new state-dict type is a member of ``api.StateDictType``, two config classes, a subclass of ``StateDictCodec`` (of
``FullCodec`` for full tensors in another form), and a row of ``CODECS``; docs/architecture.md has the recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch

from fsdp_flat.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    member_of,
)
from fsdp_flat.errors import UsageError
from fsdp_flat.state.boxed import BoxCodec
from fsdp_flat.state.chunks import ChunkCodec, FlatCodec
from fsdp_flat.state.full import FullCodec
from fsdp_flat.state.shards import StateDictCodec

FULL, BOXES, _CHUNKS, _FLAT = FullCodec(), BoxCodec(), ChunkCodec(), FlatCodec()


@dataclass(frozen=True, slots=True)
class CodecRow:
    """Holds the codecs and options of one state-dict type.

    Attributes:
        model: codec of model state dicts.
        optim: codec of optimizer state dicts.
        model_config: class of the options for model state dicts.
        optim_config: class of the options for optimizer state dicts.
        boxed: codec of both with the option ``boxes=True``.
    """

    model: StateDictCodec
    optim: StateDictCodec
    model_config: type[StateDictConfig]
    optim_config: type[OptimStateDictConfig]
    boxed: StateDictCodec | None = None


CODECS = MappingProxyType(
    {
        StateDictType.FULL_STATE_DICT: CodecRow(FULL, FULL, FullStateDictConfig, FullOptimStateDictConfig),
        StateDictType.LOCAL_STATE_DICT: CodecRow(_FLAT, _CHUNKS, LocalStateDictConfig, LocalOptimStateDictConfig),
        StateDictType.SHARDED_STATE_DICT: CodecRow(
            _CHUNKS, _CHUNKS, ShardedStateDictConfig, ShardedOptimStateDictConfig, boxed=BOXES
        ),
    }
)


def codec_of(kind: StateDictType, config: StateDictConfig | OptimStateDictConfig) -> StateDictCodec:
    """Return the codec of a state-dict type for models or optimizers, whichever ``config`` is for."""
    row = CODECS[kind]
    if row.boxed is not None and getattr(config, "boxes", False):
        return row.boxed
    return row.optim if isinstance(config, OptimStateDictConfig) else row.model


def decoder_of(value: Any) -> StateDictCodec:
    """Return the codec that reads ``value``: the one of its own kind, else that of full tensors."""
    if type(value) is torch.Tensor:
        return FULL
    for row in CODECS.values():
        for codec in (row.boxed, row.model, row.optim):
            if codec is not None and codec.reads(value):
                return codec
    return FULL


def settings_for(
    state_dict_type: object,
    state_dict_config: StateDictConfig | None,
    optim_state_dict_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Build the settings from the arguments of ``set_state_dict_type``.

    Raises:
        UsageError: a config does not belong to the type, or there is no such type.
    """
    kind = member_of(StateDictType, state_dict_type, "state_dict_type", error=UsageError)
    row = CODECS[kind]
    for given, expected in ((state_dict_config, row.model_config), (optim_state_dict_config, row.optim_config)):
        if given is not None and type(given).__name__ != expected.__name__:
            raise UsageError(f"{kind} takes a {expected.__name__}; got a {type(given).__name__}.")
    return StateDictSettings(
        kind, _ours(state_dict_config, row.model_config), _ours(optim_state_dict_config, row.optim_config)
    )


def _ours(given: Any, expected: type[Any]) -> Any:
    """Return ``given``, converted to this library's config class if it is another library's class of that name."""
    if given is None or isinstance(given, expected):
        return expected() if given is None else given
    return expected(
        **{field.name: getattr(given, field.name) for field in fields(expected) if hasattr(given, field.name)}
    )


DEFAULT_SETTINGS = settings_for(StateDictType.FULL_STATE_DICT, None, None)
