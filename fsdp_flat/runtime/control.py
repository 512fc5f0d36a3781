"""Defines the switches of one unit, which its strategy fills and a caller may change between steps."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UnitControl"]


@dataclass(slots=True)
class UnitControl:
    """Holds the switches of one unit. The step reads them; nothing else decides what they decide.

    Attributes:
        reshard_after_forward: free the unsharded parameters after forward; None: unless the unit is the outermost.
        reshard_after_backward: free them after backward; None: where gradients are reduced or
            ``reshard_after_forward`` is not False.
        sync_gradients: reduce gradients at the end of the unit's backward; False accumulates unreduced ones.
    """

    reshard_after_forward: bool | None
    reshard_after_backward: bool | None = None
    sync_gradients: bool = True
