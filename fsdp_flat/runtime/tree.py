"""What the units of one root share: order, prefetch, the end of backward, and recovery.

A tree is made at the first forward of its root. If a unit is called before its root, it is the root
of a small tree until the real root's first forward takes it over.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from fsdp_flat.api import BackwardPrefetch
from fsdp_flat.comm import Streams
from fsdp_flat.errors import OptionError, UsageError
from fsdp_flat.flat import FlatParamHandle, MemoryPool, in_backward, look_at_operations, untraced
from fsdp_flat.layout import clean_fqn
from fsdp_flat.runtime.compiled import is_compiled
from fsdp_flat.runtime.reduction import ReductionPolicy, Reductions
from fsdp_flat.runtime.unit import Unit, unit_of
from fsdp_flat.runtime.use import Use
from fsdp_flat.runtime.used import UsedExchange

__all__ = ["Pass", "Tree", "reset_tree", "tree_of"]


class Pass:
    """One forward of an outermost unit: the order in which units began, and in which their outputs were hooked.

    Attributes:
        trains: gradients were enabled where it began, so a backward may come.
    """

    __slots__ = ("begun", "hooked", "trains")

    def __init__(self) -> None:
        self.begun: list[Unit] = []
        self.hooked: list[Use] = []
        self.trains = torch.is_grad_enabled()


class Tree:
    """The units at and below one root.

    Args:
        root_module: the wrapper that is the root.

    Attributes:
        root: the outermost unit; its parameters stay gathered between forward and backward.
        units: every unit, parents before children.
        policy: how gradients are combined over ranks.
        reductions: those of the running backward pass.
        pool: where the units' buffers take memory from while a step runs; between steps it is empty.
        trace: None, or a list to which ``(event, unit name)`` is appended: begin_unshard, finish_unshard,
            reshard, pre_backward, begin_reduce, pre_forward, post_forward, end_of_backward.
    """

    def __init__(self, root_module: nn.Module) -> None:
        self.units: list[Unit] = []
        for name, module in root_module.named_modules():
            unit = unit_of(module)
            if unit is not None:
                unit.rename(clean_fqn(name) or type(unit.module).__name__)
                self.units.append(unit)
        self.root = self.units[0]
        self.policy = ReductionPolicy()
        self.trace: list[tuple[str, str]] | None = None
        self.pool = MemoryPool()
        self._pass: Pass | None = None
        self._last_order: dict[Unit, list[Unit]] = {}
        self._prefetched: Unit | None = None
        self._last_run: Unit | None = None
        self._callback_queued = False
        self._checked_first_backward = False
        self._used = UsedExchange()
        self._streams: Streams = self.root.streams
        # Without streams one is enough to keep the network busy, and it takes the least memory.
        self.reductions = Reductions(2 if self._streams.is_accelerator else 1)
        _check_homogeneous(self.units)
        _check_optimizers_in_backward(self.units)
        for unit in self.units:
            if unit.tree is not None and unit.tree is not self:
                self.trace = self.trace if self.trace is not None else unit.tree.trace
                self.policy = unit.tree.policy
            unit.tree = self
            for handle in unit.handles:
                handle.pool = self.pool
        self._looked_for_compiled = False
        self._warned_uncompiled = False
        self._buffers_full: bool | None = None
        self._cast_buffers()

    def _cast_buffers(self) -> None:
        """Bring buffers to the dtype in which the next forward computes."""
        full = self.root.wants_full_precision
        if full != self._buffers_full:
            self._buffers_full = full
            for unit in self.units:
                unit.buffers.cast(full=full)

    def casts_inputs_of(self, unit: Unit) -> bool:
        """Whether a unit's floating-point inputs are cast to its compute dtype."""
        precision = unit.options.precision
        return precision.cast_forward_inputs or (unit is self.root and precision.cast_root_forward_inputs)

    def check_compiles(self, unit: Unit, compiler: Any) -> None:
        """A unit without original parameters runs: say so, once, if torch.compile is to compile it.

        Args:
            unit: the unit.
            compiler: what compiles the code that calls the unit, if anything does.
        """
        modules = [unit.module] if self._looked_for_compiled else list(unit.module.modules())
        self._looked_for_compiled = True
        if self._warned_uncompiled or not (compiler or any(map(is_compiled, modules))):
            return
        self._warned_uncompiled = True
        warnings.warn(
            f"torch.compile leaves modules of unit {unit.name!r}, and of every other unit below "
            f"{self.root.name!r}, as they are: it compiles modules of units with use_orig_params=True only. Training "
            "goes on without compilation; pass use_orig_params=True to have it.",
            stacklevel=5,
        )

    def note(self, event: str, unit: Unit) -> None:
        """Append to the trace, if there is one."""
        if self.trace is not None:
            self.trace.append((event, unit.name))

    # -- forward -------------------------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit) -> bool:
        """A unit's forward begins outside of backward. Returns whether it is the outermost one of this call."""
        outermost = self._pass is None
        if self._pass is None:
            self.recover()
            look_at_operations()
            self._pass = Pass()
            self._streams.optimizer_ran()
            self._cast_buffers()
        self._pass.begun.append(unit)
        if unit.handles:
            self._drop_kept()
        return outermost

    def note_kept(self, unit: Unit) -> None:
        """A unit's forward is over and it has kept its memory for backward; it is freed when another unit runs.

        The last unit of a forward is the first of its backward, so it is not gathered anew in between.
        """
        self._drop_kept()
        self._last_run = unit

    def _drop_kept(self) -> None:
        unit, self._last_run = self._last_run, None
        if unit is not None:
            unit.drop_kept()

    def end_forward(self) -> None:
        """The outermost forward is over."""
        assert self._pass is not None
        self._last_order[self._pass.begun[0]] = self._pass.begun
        if not self._pass.hooked:
            self._drop_kept()
        self._pass = None
        self._drop_prefetched()
        self.pool.clear()

    def recover(self) -> None:
        """Drop a step whose backward raised, if there is one: a queued end of backward that never ran tells."""
        if self._callback_queued and in_backward() == -1:
            self.abort()

    def abort(self) -> None:
        """An exception ended a step: every unit back to sharded and idle, gradients of that step dropped."""
        self._pass = None
        self._prefetched = None
        self._last_run = None
        self._callback_queued = False
        self.reductions.finish()
        for unit in self.units:
            unit.abort()
        self.pool.clear()

    @property
    def current_pass(self) -> Pass | None:
        """The pass that is running, if a forward is running."""
        return self._pass

    @property
    def pass_trains(self) -> bool:
        """Whether a forward is running that a backward may follow."""
        return self._pass is not None and self._pass.trains

    def record(self, use: Use) -> None:
        """The outputs of ``use`` were hooked."""
        if use.record is not None:
            use.position = len(use.record.hooked)
            use.record.hooked.append(use)

    # -- prefetch ------------------------------------------------------------------------------------------------

    def arrived(self, unit: Unit) -> None:
        """A unit's parameters are there and in use, so it is no prefetch any more."""
        if self._prefetched is unit:
            self._prefetched = None

    def _begin_early(self, unit: Unit) -> None:
        if self._prefetched is None and unit.gathers and unit.is_sharded:
            self._prefetched = unit
            unit.begin_unshard()

    def _drop_prefetched(self) -> None:
        unit, self._prefetched = self._prefetched, None
        if unit is not None:
            unit.reshard()

    def prefetch_forward(self, unit: Unit) -> None:
        """Begin the gather of the unit that followed ``unit`` in the last pass of the same outermost unit."""
        assert self._pass is not None
        # Without streams nothing overlaps unless it is begun early, so there it is always on.
        if self._streams.is_accelerator and not unit.options.forward_prefetch:
            return
        order = self._last_order.get(self._pass.begun[0])
        here = len(self._pass.begun) - 1
        if order is not None and here < len(order) and order[here] is unit:
            for following in order[here + 1 :]:
                if following.gathers:
                    self._begin_early(following)
                    return

    def prefetch_backward(self, use: Use) -> None:
        """Begin the gather of the unit whose outputs were hooked before those of ``use`` and not yet reached."""
        if use.record is None:
            return
        for earlier in reversed(use.record.hooked[: use.position]):
            if earlier.unit.gathers and earlier.unit is not use.unit and earlier.task != use.task:
                self._begin_early(earlier.unit)
                return

    # -- backward ------------------------------------------------------------------------------------------------

    def pre_backward(self, use: Use) -> None:
        """Backward has reached an output of ``use``."""
        task = in_backward()
        if use.task == task:
            return
        use.task = task
        self.queue_end_of_backward()
        unit = use.unit
        if unit is self._last_run:
            self._last_run = None
        elif unit.is_sharded:
            self._drop_kept()
        unit.activate(use)
        unit.last_use = use
        if unit.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self.prefetch_backward(use)

    def gradients_are_complete(self, unit: Unit) -> None:
        """A unit's gradients of this pass are there and on their way."""
        use, unit.last_use = unit.last_use, None
        if use is not None and unit.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self.prefetch_backward(use)

    def queue_end_of_backward(self) -> None:
        """Have :meth:`end_of_backward` called when the running backward pass is over."""
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self.end_of_backward)

    @untraced
    def end_of_backward(self) -> None:
        """Close what is open, wait for the reductions, publish the sharded gradients, free everything."""
        self._last_run = None
        self._prefetched, prefetched = None, self._prefetched
        if prefetched is not None:
            prefetched.reshard()
        # Reversed registration order: the same on every rank, and about that of backward.
        for unit in reversed(self.units):
            unit.close_backward()
        for unit in self.units:
            unit.settle()
        if not self._checked_first_backward:
            self._check_first_backward()
        used = {handle: flags for unit in self.units for handle, flags in unit.take_used().items()}
        if not self.reductions.is_empty:
            self._publish(used)
        self._callback_queued = False
        self.pool.clear()
        self.note("end_of_backward", self.root)

    def _check_first_backward(self) -> None:
        """Once, when the first gradients are there: what would otherwise go wrong in silence."""
        self._checked_first_backward = True
        for unit in self.units:
            for handle in unit.handles:
                stale = handle.views.originals_in_optimizers()
                if stale:
                    raise UsageError(
                        f"An optimizer holds {stale[0]!r} of unit {unit.name!r}, which wrapping replaced by a flat "
                        "parameter or by a part of its own, so its steps change nothing. Build the optimizer after "
                        "wrapping, from model.parameters(); parameters that are plain tensors stay what they are with "
                        "use_orig_params=True."
                    )
        short = next((h for u in self.units for h in u.handles if h.is_trainable and h.orig_dtype.itemsize < 4), None)
        if short is not None:
            warnings.warn(
                f"{short.layout.slots[0].fqn!r} of unit {short.spec.unit_name!r} is sharded in {short.orig_dtype}, so "
                "an optimizer keeps its state and makes its updates in it too, where small updates are lost. Pass "
                "MixedPrecision(master_dtype=torch.float32), or convert the model before wrapping.",
                stacklevel=2,
            )

    def _publish(self, used: dict[FlatParamHandle, bytes]) -> None:
        owners = {handle: unit for unit in self.units for handle in unit.handles}
        everywhere = self._used.begin(used, {handle: owners[handle].options.groups for handle in used})
        shards = self.reductions.finish()
        self._streams.reduced()
        for handle, shard in shards.items():
            flags = everywhere(handle)
            handle.views.publish(shard, flags)
        self._used.finish()


def _check_homogeneous(units: list[Unit]) -> None:
    for what in ("use_orig_params", "limit_all_gathers"):
        first: dict[Any, str] = {}
        for unit in units:
            if unit.handles or what == "limit_all_gathers":
                first.setdefault(getattr(unit.options, what), unit.name)
        if len(first) > 1:
            described = "; ".join(f"{what}={value} in unit {name!r}" for value, name in first.items())
            raise OptionError(f"Every unit under one root must have the same {what}; got {described}.")


def _check_optimizers_in_backward(units: list[Unit]) -> None:
    for unit in units:
        for handle in unit.handles if not unit.options.use_orig_params else ():
            if any(hasattr(p, "_in_backward_optimizers") for p in (handle.flat_param, *handle.views.leaves)):
                raise UsageError(
                    f"Unit {unit.name!r} has use_orig_params=False and parameters with an optimizer that runs in "
                    "backward (_apply_optimizer_in_backward), which needs use_orig_params=True."
                )


def tree_of(module: nn.Module, unit: Unit) -> Tree:
    """The tree of a wrapper, made now if it has none."""
    if unit.tree is None:
        Tree(module)
    assert unit.tree is not None
    return unit.tree


def reset_tree(units: list[Unit]) -> None:
    """Forget the tree of ``units``, so that the next use makes a new one."""
    for unit in units:
        unit.tree = None
