"""Finds tensors that left the meta device and were never written, before a model computes with them."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_flat.comm import ErrorTexts, agree
from fsdp_flat.core import Iteration, Step, Unit
from fsdp_flat.errors import UsageError, counted, some_of
from fsdp_flat.guards.once_a_tree import OnceATree
from fsdp_flat.runtime import unit_record
from fsdp_flat.user_warnings import warn_user

_WRITTEN = ErrorTexts("checking weights that left the meta device")


class MetaTensors(OnceATree):
    """Refuses parameters without values, on all ranks, and warns of buffers, before the first forward of a tree."""

    def tree_built(self, step: Step, iteration: Iteration) -> None:
        """Raise a UsageError if a parameter that left the meta device has no values, here or on another rank.

        Ranks of a shard group exchange their errors: one replica may run alone.
        """
        if step in self.seen:
            return
        # Units of fully_shard leave it by to_empty, perhaps on some ranks only, and a caller may know that nothing
        # reads a parameter.
        left = _unwritten([unit for unit in step.units if unit.options.api.stays_on_meta], params=True)
        if left:
            warn_user(
                f"{counted(len(left), 'parameters')} left the meta device by to_empty, never written and so NaN: "
                f"{some_of(left, 4)}. Call the model's init_weights() or each module's reset_parameters(), or load a "
                "state dict, between to_empty and the first forward."
            )
        moved = [each for each in step.units if unit_record(each).unwritten is not None]
        left_meta = [each for each in moved if not each.options.api.stays_on_meta]
        if left_meta:
            shard_groups = dict.fromkeys(unit.options.groups.shard for unit in (step.root, *left_meta))
            agree((), _unwritten_error(left_meta), list(shard_groups), _WRITTEN)
        for unit in step.units:
            unit_record(unit).unwritten = None
        self.seen.add(step)  # after an error the next forward looks again


def _unwritten(units: Iterable[Unit], *, params: bool) -> list[str]:
    """Return names of parameters, or of buffers, that left the meta device and still have no values."""
    return [
        f"{entry.fqn!r} of unit {unit.name!r}"
        for unit in units
        for entry in unit_record(unit).unwritten or ()
        if entry.is_param is params and entry.is_still
    ]


def _unwritten_error(units: Iterable[Unit]) -> UsageError | None:
    """Return an error that lists the parameters without values, or None; warn of buffers."""
    buffers, params = _unwritten(units, params=False), _unwritten(units, params=True)
    if buffers:
        warn_user(
            f"Buffers left the meta device and were never written, so their values are undefined: {', '.join(buffers)}"
            ". A state dict holds persistent buffers only; compute the others in reset_parameters() or param_init_fn."
        )
    if not params:
        return None
    return UsageError(
        f"Parameters left the meta device and were never written, so their values are undefined: "
        f"{', '.join(params)}. Initialise them in reset_parameters() or param_init_fn, or load them."
    )
