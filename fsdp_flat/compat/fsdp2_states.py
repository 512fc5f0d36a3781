"""Presents units of ``fully_shard`` under undocumented names of FSDP2 that callers read.

torch's pipelining, and trainers that compute a loss in chunks, end a backward by hand through them. They hold no state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_flat.runtime import Phase, Schedule, Unit, schedule_of, unit_of


@dataclass(frozen=True, slots=True)
class FSDPParamGroup:
    """Presents the parameters of a unit as FSDP2's parameter group.

    Attributes:
        unit: the unit.
    """

    unit: Unit

    def post_backward(self, *_: object) -> None:
        """Reshard the parameters after backwards without gradient synchronization, unless the caller keeps them.

        The gradients are reduced by the next backward with synchronization, or by
        ``_root_post_backward_final_callback``. Inside a step nothing is done.
        """
        if self.unit.phase is Phase.IDLE:
            self.unit.end_backward(keeps_graph=False)


@dataclass(frozen=True, slots=True)
class FSDPStateContext:
    """Presents the units of a tree as FSDP2's state context.

    Attributes:
        all_states: one state for each module or list of modules, the outermost first.
    """

    all_states: list[FSDPState]


@dataclass(frozen=True, slots=True)
class FSDPState:
    """Presents the units of a module as FSDP2's state of it; two of one unit are equal.

    Attributes:
        module: the module that ``fully_shard`` was called on.
        unit: its unit, the outer one of several.
    """

    module: nn.Module
    unit: Unit

    def _lazy_init(self) -> None:
        """Make the tree's outermost unit the root; nothing after its first use."""
        schedule_of(self.module, self.unit)

    @property
    def _is_root(self) -> bool | None:
        context = self.unit.context
        return context.root is self.unit if isinstance(context, Schedule) else None

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        return [FSDPParamGroup(unit) for unit in self.unit.with_inner if unit.handles]

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        groups = self._fsdp_param_groups
        return groups[0] if groups else None

    @property
    def _state_ctx(self) -> FSDPStateContext:
        units = schedule_of(self.module, self.unit).units
        inner = {each for unit in units for each in unit.inner}
        return FSDPStateContext([FSDPState(unit.module, unit) for unit in units if unit not in inner])

    @property
    def _comm_ctx(self) -> object:
        """Return the object that units with shared streams and memory have in common, which pipelines compare."""
        return self.unit.context.streams

    def _root_post_backward_final_callback(self) -> None:
        """Reduce and set the gradients that backwards have left. Every rank must call this."""
        schedule_of(self.module, self.unit).complete_accumulation()


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of a module that ``fully_shard`` was called on; None for any other module."""
    unit = unit_of(module)
    return None if unit is None or not unit.shows_dtensors else FSDPState(module, unit)
