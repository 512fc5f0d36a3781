"""Maps each state-dict type to its codec: the functions that save and load one unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fsdp_flat.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)
from fsdp_flat.runtime import Unit
from fsdp_flat.state.common import LoadReport
from fsdp_flat.state.full import decode_full, encode_full, prefetch_full
from fsdp_flat.state.local import decode_local, encode_local
from fsdp_flat.state.sharded import decode_sharded, encode_sharded, prefetch_sharded

__all__ = ["CODECS", "StateDictCodec"]


@dataclass(frozen=True, slots=True)
class StateDictCodec:
    """Holds the save and load functions of one state-dict type.

    Attributes:
        gather: communicates for all units of a save at once: ``gather(units, config)``; None if the type needs no
            communication. Units missing from its result communicate in ``save``.
        save: adds a unit's entries: ``save(unit, config, prefix, inner, gathered)``.
        load: removes and loads a unit's entries: ``load(unit, state_dict, prefix, report)``.
        model_config: class of the options for model state dicts.
        optim_config: class of the options for optimizer state dicts.
    """

    gather: Callable[[Sequence[Unit], StateDictConfig], Mapping[Unit, Any]] | None
    save: Callable[[Unit, StateDictConfig, str, Callable[[], dict[str, Any]], Any], dict[str, Any]]
    load: Callable[[Unit, dict[str, Any], str, LoadReport], None]
    model_config: type[StateDictConfig]
    optim_config: type[OptimStateDictConfig]


CODECS = MappingProxyType(
    {
        StateDictType.FULL_STATE_DICT: StateDictCodec(
            prefetch_full, encode_full, decode_full, FullStateDictConfig, FullOptimStateDictConfig
        ),
        StateDictType.LOCAL_STATE_DICT: StateDictCodec(
            None, encode_local, decode_local, LocalStateDictConfig, LocalOptimStateDictConfig
        ),
        StateDictType.SHARDED_STATE_DICT: StateDictCodec(
            prefetch_sharded, encode_sharded, decode_sharded, ShardedStateDictConfig, ShardedOptimStateDictConfig
        ),
    }
)
