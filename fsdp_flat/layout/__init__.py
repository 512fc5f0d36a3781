"""Floor 0: which element of which parameter lies where in a flat buffer, and on which rank.

Integers and strings only; nothing here imports torch. Unless a name says otherwise, every number counts elements.
"""

from __future__ import annotations

from fsdp_flat.layout.boxes import Box, boxes
from fsdp_flat.layout.chunks import Moves, chunk_cut, chunk_rows, chunk_shape, moves_between
from fsdp_flat.layout.flat_layout import FlatLayout, ParamSlot, SlotShard, alignment_numel
from fsdp_flat.layout.fqn import (
    CHECKPOINT_WRAPPED_MODULE,
    COMPILED_MODULE,
    FLAT_PARAM,
    FSDP_PREFIX,
    FSDP_WRAPPED_MODULE,
    clean_fqn,
    clean_text,
    join_fqn,
)
from fsdp_flat.layout.interval import Interval
from fsdp_flat.layout.spread import Cut, Runs, Spread, Whole

__all__ = [
    "CHECKPOINT_WRAPPED_MODULE",
    "COMPILED_MODULE",
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "Box",
    "Cut",
    "FlatLayout",
    "Interval",
    "Moves",
    "ParamSlot",
    "Runs",
    "SlotShard",
    "Spread",
    "Whole",
    "alignment_numel",
    "boxes",
    "chunk_cut",
    "chunk_rows",
    "chunk_shape",
    "clean_fqn",
    "clean_text",
    "join_fqn",
    "moves_between",
]
