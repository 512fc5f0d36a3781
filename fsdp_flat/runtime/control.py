"""Defines the switches of one unit, which its strategy fills and a caller may change between steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_flat.runtime.smaller_group import SmallerGroup


@dataclass(slots=True)
class UnitControl:
    """Holds the switches of one unit. The step reads them; nothing else decides what they decide.

    Attributes:
        reshard_after_forward: free the unsharded parameters after forward; None: unless the unit is the outermost.
        smaller_group: holds all parameters between forward and backward, if they are freed; None: the shard group does.
        reshard_after_backward: free them after backward; None: where gradients are reduced or
            ``reshard_after_forward`` is not False.
        sync_gradients: reduce gradients at the end of the unit's backward; False accumulates unreduced ones.
        unshard_in_backward: unshard the parameters for backward; False where backward does not read them.
        is_last_backward: at a root: the end of a backward waits for reductions and sets gradients.
        finalizes_by_hand: at a root: no backward does so; ``finalize_backward`` does.
        keeps_unsharded_storage: a reshard leaves the memory of the unsharded parameters, so that it stays in place.
        keeps_last: as the last unit of a forward, keep the buffers for the backward that follows.
        forward_prefetch: modules whose units' all-gathers begin once this unit is unsharded in forward; empty: the next
            one of the last forward.
        backward_prefetch: the same in backward; empty: the next one, by the unit's option.
    """

    reshard_after_forward: bool | None
    smaller_group: SmallerGroup | None = None
    reshard_after_backward: bool | None = None
    sync_gradients: bool = True
    unshard_in_backward: bool = True
    is_last_backward: bool = True
    finalizes_by_hand: bool = False
    keeps_unsharded_storage: bool = False
    keeps_last: bool = True
    forward_prefetch: tuple[nn.Module, ...] = ()
    backward_prefetch: tuple[nn.Module, ...] = ()
