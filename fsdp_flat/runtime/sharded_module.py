"""Defines the methods by which a caller controls one unit, which the wrapper class and ``fully_shard`` share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn

from fsdp_flat.core import graph_task_id
from fsdp_flat.core.memory import MemoryState
from fsdp_flat.core.options import Phase
from fsdp_flat.core.step import Step, outermost_of, step_of
from fsdp_flat.core.unit import Unit, own_unit, unit_of, units_of
from fsdp_flat.errors import OptionError, PhaseError, UsageError
from fsdp_flat.runtime.arguments import listed
from fsdp_flat.runtime.other_forwards import UnshardHandle
from fsdp_flat.runtime.unit_record import unit_record
from fsdp_flat.runtime.unit_settings import UnitSettings, replace_collectives


class GradientReductionHandle:
    """Stands for the gradients that ``finalize_backward(async_op=True)`` has set."""

    def wait(self) -> None:
        """Do nothing: the gradients are set in the order of the current stream once ``finalize_backward`` returns."""


class ShardedModule(UnitSettings):
    """Controls the unit of a module: parameters unsharded by hand, order and prefetch, and switches.

    Switches are read in later steps, and every rank must set the same ones. With ``recurse`` a switch is set for the
    units below the module too.
    """

    def extra_repr(self) -> str:
        """Return the module's own line of ``repr``, and one with the unit's strategy, ranks, dtypes and bytes."""
        unit = unit_of(self)
        return ", ".join(filter(None, [super().extra_repr(), "" if unit is None else unit.summary()]))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield as :meth:`nn.Module.named_modules`."""
        _note_outer_model(self, memo, prefix)
        return super().named_modules(memo, prefix, remove_duplicate)

    def __deepcopy__(self, _memo: dict[int, Any]) -> NoReturn:
        """Refuse to be copied: process groups cannot be, and FSDP1's and FSDP2's modules refuse it too.

        Raises:
            PhaseError: always.
        """
        name = "" if (unit := unit_of(self)) is None else f" (unit {unit.name!r})"
        raise PhaseError(
            f"A sharded {type(self).__name__}{name} cannot be copied. Copy the module before it is sharded; or build "
            "and shard a second one, and load this one's state dict. fsdp_flat.ShardedEMA(model, decay) keeps an "
            "average of the weights, and fsdp_flat.unwrap(model) gives the plain module back, which can be copied."
        )

    # -- sharded and unsharded state -------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather the parameters of this module. Every rank of their shard groups must call this.

        Args:
            async_op: return at once; the parameters are in place after ``wait`` of the result, or once the forward
                has begun.

        Returns:
            The handle with ``async_op``, else None.

        Raises:
            PhaseError: inside ``summon_full_params``.
            UsageError: parameters are on the meta device.
        """
        unit = _unit_for(self, "unshard")
        if unit.step.order.iteration is None and unit.step.backward is None:
            # No step runs, so the optimizer may have written the shards.
            unit.step.streams.shards_written()
        if not async_op:
            unit.unshard()
            return None
        unit.gather()
        return UnshardHandle(unit)

    def reshard(self) -> None:
        """Free the unsharded parameters of this module, which then holds the sharded ones.

        Raises:
            PhaseError: inside ``summon_full_params`` or the unit's forward.
            UsageError: unsharded parameters were changed, which would be lost.
        """
        unit = _unit_for(self, "reshard")
        if unit.phase is Phase.FORWARD:
            raise PhaseError(f"reshard was called inside the forward of unit {unit.name!r}, which uses the parameters.")
        try:
            for param_group in unit.param_groups if unit.is_unsharded else ():
                slots = param_group.slots
                slots.check_unchanged(slots.restore(slots.diff()))
        finally:
            unit.reshard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also between forward and backward, and those that are not reduced yet.

        Args:
            set_to_none: ``.grad`` becomes None; else it is filled with zeros.
        """
        super().zero_grad(set_to_none)
        # While parameters are unsharded, the modules do not hold those that have the gradients.
        for unit in units_of(self):
            unit.clear_hidden_gradients(set_to_none=set_to_none)
            for param_group in unit.param_groups:
                for param in param_group.slots.visible_params:
                    if set_to_none:
                        param.grad = None
                    elif param.grad is not None:
                        param.grad.detach().zero_()

    def reset_iter_state(self) -> None:
        """Reset the tree after an exception in a step: parameters are sharded, gradients of the step are dropped.

        The next forward does so by itself; this frees memory earlier. Gradients accumulated without reduction are
        dropped too.

        Raises:
            UsageError: not the outermost unit.
        """
        step = step_of(self, own_unit(self))
        _outermost(self, "reset_iter_state")
        step.abort()
        step.has_lost_gradients = False

    # -- resharding ------------------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free unsharded parameters after forward, or keep them for backward, also those of the outermost unit.

        It replaces a number of ranks or a memory budget that the module was given.

        Raises:
            OptionError: (a ValueError) not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise OptionError(f"reshard_after_forward must be True or False here; got {reshard_after_forward!r}.")
        for unit in units_of(self, recurse=recurse):
            unit.control.reshard_after_forward = reshard_after_forward
            unit.control.reshards_evaluations = True
            if unit.state is MemoryState.SHARDED_POST_FORWARD:
                unit.reshard()
            for param_group in unit.param_groups:
                param_group.comm.use_smaller_group(None)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free unsharded parameters after backward, or keep them for the next forward.

        Kept parameters are all-gathered again in that forward if an optimizer, a load or an in-place change by all
        ranks has changed the shards. Call ``reshard`` before changes that raise no version counter
        (``param.data.mul_(2)``), or that only some ranks make.
        """
        for unit in units_of(self, recurse=recurse):
            unit.control.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of unsharded parameters after a reshard, so that their addresses do not change.

        CUDA graphs need it. A unit is sharded all the same, and unsharding it all-gathers. After ``keep=False`` the
        next reshard frees the memory.
        """
        for unit in units_of(self, recurse=recurse):
            unit.control.keeps_unsharded_storage = keep

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Unshard this unit's parameters for backward, or leave them sharded because backward does not read them.

        An ``nn.Embedding`` does not. Where it does read them, autograd raises.
        """
        for unit in units_of(self, recurse=False):
            unit.control.unshard_in_backward = unshard_in_backward

    # -- order -----------------------------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Begin the all-gathers of these modules' units in forward, once this unit's parameters are there.

        A unit that does not run is resharded at the end of the forward.

        Args:
            modules: modules with units of their own, in this order; none for the library's choice.

        Raises:
            OptionError: (a ValueError) a module without a unit.
            OptionTypeError: (a TypeError) no modules.
        """
        own_unit(self).control.forward_prefetch = _with_units(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Begin the all-gathers of these modules' units in backward, once this unit's parameters are there.

        A unit that the backward does not reach is resharded at its end.

        Args:
            modules: modules with units of their own, in this order; none for the library's choice.

        Raises:
            OptionError: (a ValueError) a module without a unit.
            OptionTypeError: (a TypeError) no modules.
        """
        own_unit(self).control.backward_prefetch = _with_units(modules)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set gradients at the end of later backwards of the tree, or only at the end of the next last one.

        Until then each backward reduces as it goes (unless gradient synchronization is off) and keeps the results.
        """
        unit = own_unit(self)
        (outermost_of(unit) or unit).control.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Leave gradients to :meth:`finalize_backward` instead of setting them at the end of a backward.

        Backwards then reduce as they go, unless gradient synchronization is off, and keep the results. It supersedes
        :meth:`set_is_last_backward`.

        Raises:
            UsageError: (a RuntimeError) not the outermost unit, inside a backward, or after one that is not finalized.
        """
        unit, step = _outermost(self, "set_manual_backward_finalization")
        if enabled == unit.control.finalizes_by_hand:
            return
        if graph_task_id() != -1 or (step is not None and step.has_unfinalized_gradients):
            raise UsageError(
                f"set_manual_backward_finalization({enabled}) was called on unit {unit.name!r} inside a backward, "
                "or after one whose gradients are not set yet. Call finalize_backward first."
            )
        if step is not None:
            step.has_lost_gradients = False
        unit.control.finalizes_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that backwards have left, set them, and reshard, by the switches as they are now.

        Every rank must call this after all backwards of a step; before the first forward it does nothing. With several
        backwards, switch gradient synchronization off for them and on before this call, to reduce once.

        Args:
            async_op: return a handle, to be waited for before gradients are used.

        Returns:
            The handle with ``async_op``, else None.

        Raises:
            UsageError: (a RuntimeError) not the outermost unit, inside a backward, without
                ``set_manual_backward_finalization(True)``, or after a backward that raised. Ranks that wait for this
                one then raise a PeerFailureError.
        """
        unit, step = _outermost(self, "finalize_backward")
        if step is not None:
            if graph_task_id() != -1:
                raise UsageError(f"finalize_backward was called on unit {unit.name!r} inside a backward.")
            if not unit.control.finalizes_by_hand:
                raise UsageError(
                    f"finalize_backward was called on unit {unit.name!r} without "
                    "set_manual_backward_finalization(True), without which backwards set gradients at their ends. "
                    "Call that before the forward."
                )
            if step.has_lost_gradients:
                error = UsageError(
                    f"finalize_backward was called on unit {unit.name!r} after a backward that raised. The gradients "
                    "of the step were dropped, those of earlier backwards too. Call reset_iter_state and run all "
                    "backwards of the step again."
                )
                step.fail(error)
                raise error
            step.complete_accumulation()
        return GradientReductionHandle() if async_op else None

    def set_backend_collectives(self, enable: bool = True) -> None:
        """Issue the all-gathers and reduce-scatters that FSDP2 issues, in this unit and those below.

        Each is one call of the backend. By default the library uses cheaper ways where it has some (shared memory
        between ranks of one host), and the last unit of a forward keeps its parameters for the backward that follows,
        which saves an all-gather; ``enable=False`` restores this.
        """
        units = units_of(self)
        comms = [param_group.comm for unit in units for param_group in unit.param_groups]
        choices = {comm: replace(comm.choice, backend=enable) for comm in comms}
        replace_collectives(units, choices)
        for unit in units:
            unit.control.keeps_last = not enable


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Let several outermost units share streams and memory, as the stages of a pipeline in one process.

    Args:
        modules: modules with units of their own.

    Raises:
        OptionError: (a ValueError) a module without a unit.
        OptionTypeError: (a TypeError) no modules.
    """
    units = [own_unit(module) for module in _with_units(modules)]
    for unit in units[1:]:
        unit.step.use_memory(units[0].step.streams, units[0].step.pool)


def _unit_for(module: nn.Module, action: str) -> Unit:
    """Return the unit of a module, for an action between or inside steps."""
    unit = own_unit(module)
    unit.step.recover()
    if unit.phase is Phase.SUMMONED:
        raise PhaseError(f"{action} was called while unit {unit.name!r} is {unit.phase.value}. Leave that first.")
    return unit


def require_root(unit: Unit, action: str) -> None:
    """Raise a UsageError if a unit is nested in another one; before the first use of a tree every unit passes."""
    root = outermost_of(unit)
    if root is not None and root is not unit:
        raise UsageError(f"{action} must be called on the outermost unit; {unit.name!r} is nested in {root.name!r}.")


def _outermost(module: nn.Module, action: str) -> tuple[Unit, Step | None]:
    """Return the unit of a module, which must be the outermost one, and the step; None before the first use."""
    unit = own_unit(module)
    unit.step.recover()
    require_root(unit, action)
    return unit, unit.step if unit.step.is_built else None


def _with_units(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    found = tuple(listed("modules", modules, lambda module: isinstance(module, nn.Module), "modules"))
    for module in found:
        if unit_of(module) is None:
            raise OptionError(
                f"Every module must have a unit of its own, by fully_shard or FullyShardedDataParallel; "
                f"{type(module).__name__} has none."
            )
    return found


def _note_outer_model(module: nn.Module, walked: Iterable[nn.Module] | None, path: str) -> None:
    """Note the model around a unit: a walk over modules has come to the unit's module by ``path``.

    A module does not know what holds it. ``outer.parameters()``, with which callers make optimizers, is such a walk.

    Args:
        module: a wrapper, or a module of ``fully_shard``.
        walked: the modules that the walk has passed, its first one among them.
        path: the path from the first one to ``module``; the longest one counts.
    """
    unit = unit_of(module)
    if unit is None or len(path) <= len(unit_record(unit).path_from_outer):
        return
    for each in walked or ():
        inner: nn.Module | None = each
        for name in path.split("."):
            inner = None if inner is None else inner._modules.get(name)
        if inner is module:
            record = unit_record(unit)
            record.outer, record.path_from_outer = weakref.ref(each), path
            return
