"""Records the order in which the units of a tree run, and decides by it.

It decides what is all-gathered early, which units a memory budget keeps for backward, and what becomes of a unit's
unsharded parameters after its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import torch
from torch import nn

from fsdp_flat.api import BackwardPrefetch
from fsdp_flat.core.backward import Backward, Event, ForwardRecord, Iteration, PendingIterations
from fsdp_flat.core.events import LOGGER
from fsdp_flat.core.memory import MemoryState
from fsdp_flat.core.options import AfterForward, Phase
from fsdp_flat.core.torch_core import is_in_function, next_node_number
from fsdp_flat.core.unit import Unit, unit_of
from fsdp_flat.errors import OptionError
from fsdp_flat.sizes import size_text
from fsdp_flat.user_warnings import warn_user

_OWNS_MEMORY = attrgetter("output.owns_memory")
# In these states an all-gather has nothing to do.
_IN_USE = (MemoryState.GATHERING, MemoryState.UNSHARDED)


class Order:
    """Holds the order of one tree's forwards, and what follows from it.

    Args:
        units: all units of the tree, the outermost first; empty before the tree's first use.
        on_accelerator: there are streams, which overlap all-gathers with compute.

    Attributes:
        iteration: the running iteration; None outside of a forward.
        pending: the iterations that a backward may go through.
        last_order: by the unit that began a forward, the units that ran in the last such forward, in order.
        prefetched: units whose all-gathers began early, and that have yet to run.
        retained: the last unit that ran forward, after those that ran last inside it, while their buffers stay; with
            the position of the forward's end, and the event after the buffers' last use.
        unfinished_forwards: for units of several modules: the forward under way, and the modules that have yet to run.
        kept_for_backward: the units that the memory budget keeps unsharded from forward to backward.
    """

    def __init__(self, units: Sequence[Unit], *, on_accelerator: bool) -> None:
        self._units, self._root = units, next(iter(units), None)
        self._on_accelerator = on_accelerator
        self._unspent_nbytes = _budget_of(units)  # the memory budget, until units are chosen
        self._position = 0
        self.last_order: dict[Unit, list[Unit]] = {}
        self.kept_for_backward: frozenset[Unit] = frozenset()
        self.pending = PendingIterations()
        self.forget_forward()

    def forget_forward(self) -> None:
        """Forget the forward under way."""
        self.iteration: Iteration | None = None
        self.prefetched: dict[Unit, None] = {}
        self.retained: dict[Unit, tuple[int, Any]] = {}
        self.unfinished_forwards: dict[Unit, tuple[Any, set[nn.Module]]] = {}

    def forget(self) -> None:
        """Forget the forward under way, and all that a backward could go through."""
        self.forget_forward()
        self.pending = PendingIterations()

    def adopt(self, other: Order, *, pending: bool) -> None:
        """Go on from another tree whose units are in this one now, with its ``pending`` iterations too."""
        self._position = max(self._position, other._position)
        if pending:
            self.pending.adopt(other.pending)

    # -- forward -------------------------------------------------------------------------------------------------

    def begin_iteration(self, iteration: Iteration) -> None:
        """Begin an outermost forward."""
        self.iteration = iteration
        if iteration.trains:
            self.pending.add(iteration)

    def begin_forward(self, unit: Unit) -> ForwardRecord:
        """Record the begin of a unit's forward in the running iteration."""
        iteration = self.iteration
        assert iteration is not None
        iteration.order.append(unit)
        return ForwardRecord(unit, iteration, self._note(iteration, unit, in_function=is_in_function()))

    def _note(
        self, iteration: Iteration, unit: Unit, *, in_function: bool, is_end: bool = False, weights: Any = None
    ) -> int:
        """Record an event, and return its position."""
        self._position += 1
        is_reached, number = in_function or torch.is_grad_enabled(), -1 if in_function else next_node_number()
        iteration.events.append(Event(self._position, unit, not is_end, is_reached, number, weights))
        return self._position

    def end_forward(
        self, record: ForwardRecord, iteration: Iteration, *, expects_backward: bool, is_open_ended: bool
    ) -> None:
        """Record the end of a forward; see :meth:`Step.end_forward`."""
        unit = record.unit
        in_function = is_in_function()
        recomputed = in_function and iteration.trains and unit.is_trainable
        is_hooked = expects_backward and not is_open_ended
        weights = record.weights if is_hooked or recomputed else None
        iteration.expects_backward |= is_hooked
        iteration.is_open_ended |= is_open_ended
        record.end = self._note(iteration, unit, in_function=in_function, is_end=True, weights=weights)

    def end_iteration(self, replicated: Sequence[Unit]) -> None:
        """End the outermost forward; free what no backward needs, of its units and of ``replicated`` ones."""
        iteration, root = self.iteration, self._root
        assert iteration is not None
        assert root is not None
        expected, is_open_ended = iteration.expects_backward, iteration.is_open_ended
        self.last_order[iteration.order[0]] = iteration.order
        kept = [*self.retained, root]
        ran = dict.fromkeys(() if expected else (*replicated, *iteration.order))
        if not expected:
            self.pending.remove([iteration])
        for unit in dict.fromkeys((*kept, *ran)):
            after = self.after_forward(
                unit, iteration, expects_backward=expected, is_open_ended=is_open_ended, is_over=True
            )
            if after is AfterForward.RESHARD:
                _, last_use = self.retained.pop(unit, (0, None))
                unit.free_retained(last_use)
                if unit in ran:  # others, the root perhaps, may be unsharded for the backward of an earlier forward
                    unit.reshard()
        self.iteration = None
        self.drop_prefetched()

    def after_forward(
        self,
        unit: Unit,
        iteration: Iteration | None,
        *,
        expects_backward: bool,
        is_open_ended: bool,
        is_over: bool = False,
    ) -> AfterForward:
        """Decide what becomes of a unit's unsharded parameters at the end of its forward.

        It is decided again when the iteration ``is_over``, with what is known of all its forwards then.
        """
        # A forward inside another one of the unit: a method that calls the module goes on with the parameters. In a
        # recomputation the backward of the unit follows. And the graph of an earlier backward may need the buffers.
        if unit.phase is not Phase.IDLE or unit.holds_graph:
            return AfterForward.STAY_UNSHARDED
        if is_over and unit.state is MemoryState.RETAINED_POST_FORWARD:
            # No unit follows. The last one to run is the first of the backward, and needs no second all-gather.
            is_first = expects_backward and unit is not self._root and unit.control.keeps_last
            return AfterForward.RETAIN if is_first else AfterForward.RESHARD
        if is_over:
            # Units of a method under no_grad may have kept buffers, as if in a re-entrant checkpoint.
            is_used = expects_backward or (is_open_ended and unit.needs_all_gather)
            reshards = unit.control.reshards_evaluations and not is_used
            return AfterForward.RESHARD if reshards else AfterForward.STAY_UNSHARDED
        wanted = unit.control.reshard_after_forward
        if wanted is None:  # the backward of the outermost unit comes first, so it would all-gather again at once
            wanted = unit is not self._root and unit not in self.kept_for_backward
        # In a re-entrant checkpoint units run without gradients, but the iteration began with gradients enabled.
        may_follow = expects_backward or (iteration is not None and iteration.trains and unit.is_trainable)
        # Without a hooked output nothing may unshard the unit in backward.
        if may_follow and (is_open_ended or iteration is None or not wanted):
            return AfterForward.STAY_UNSHARDED
        if not unit.control.reshards_evaluations:
            return AfterForward.STAY_UNSHARDED
        # A reshard frees nothing if every buffer is a shard.
        if may_follow and not any(map(_OWNS_MEMORY, unit.param_groups)):
            return AfterForward.STAY_UNSHARDED
        # The modules show sharded parameters, and the buffers stay until the next unit's all-gather has taken memory,
        # or for the backward, of which the last unit of a forward is the first.
        if iteration is not None and unit.needs_all_gather and unit.control.unshard_in_backward and not is_open_ended:
            return AfterForward.RETAIN
        return AfterForward.RESHARD

    def retain(self, record: ForwardRecord, last_use: Any) -> None:
        """Note a unit that has run, whose buffers stay, and the event after their last use.

        Units that ran inside it stay too, since a backward begins with them. Those that ran before are freed.
        """
        if record.unit is not self._root:
            self.retained.pop(record.unit, None)
            for unit, (end, its_last_use) in tuple(self.retained.items()):
                if end < record.begin:
                    del self.retained[unit]
                    unit.free_retained(its_last_use)
            self.retained[record.unit] = record.end, last_use

    def free_retained(self, *, before: Unit | None = None, last_use_is_known: bool = False) -> None:
        """Free the buffers of the last units that ran, which their forwards have kept for the backward.

        ``before`` is the unit whose backward is next: nothing is freed if it is one of them, or needs no memory.
        ``last_use_is_known`` unless a backward may have computed with the buffers.
        """
        if before is not None and self.retained.pop(before, None) is not None:
            return
        if before is not None and (not before.needs_all_gather or before.state in _IN_USE or before is self._root):
            return
        retained, self.retained = self.retained, {}
        for unit, (_, last_use) in retained.items():
            unit.free_retained(last_use if last_use_is_known else None)

    def leaves_units_out(self) -> bool:
        """Return whether other ranks may run units that this rank leaves out by an exception in a forward now."""
        iteration = self.iteration
        if iteration is None:
            return False
        begun = {*iteration.order, *self.prefetched}
        expected = self.last_order.get(iteration.order[0], self._units)
        # A backward follows on the others, or the units that ran after this one the last time.
        return iteration.trains or any(unit.needs_all_gather and unit not in begun for unit in expected)

    def fail(self) -> None:
        """Forget a forward that raised."""
        iteration = self.iteration
        # Ranks that did not raise hold this forward for a backward if they have come to the same units.
        has_begun = iteration and any(unit is not self._root or unit.needs_all_gather for unit in iteration.order)
        if iteration and (not has_begun or iteration.is_alone):
            self.pending.remove([iteration])
        self.forget_forward()

    # -- the memory budget ---------------------------------------------------------------------------------------

    def spend_budget(self, any_rank_of_replica: Callable[[Sequence[bool]], list[bool]]) -> None:
        """Choose the units that stay unsharded from forward to backward: the last to run, as far as the budget goes.

        The order is that of the root's last forward, so nothing is chosen before the second one. The ranks of a replica
        keep what all of them have chosen, since a failed forward may have ended on some:
        ``any_rank_of_replica`` returns for each flag whether it is true on any of them.
        """
        nbytes = self._unspent_nbytes
        if nbytes is None:
            return
        assert self._root is not None
        order, chosen = self.last_order.get(self._root, []), set()
        left_nbytes = nbytes
        candidates = [
            unit
            for unit in dict.fromkeys(reversed(order))
            if unit is not self._root and unit.control.reshard_after_forward is None and unit.needs_all_gather
        ]
        for unit in candidates:
            if unit.buffer_nbytes <= left_nbytes:
                left_nbytes -= unit.buffer_nbytes
                chosen.add(unit)
        is_unknown, *freed = any_rank_of_replica([not order, *[unit not in chosen for unit in self._units]])
        if not is_unknown:
            self._unspent_nbytes = None
            self.kept_for_backward = frozenset(compress(self._units, map(not_, freed)))
            _report_kept([unit for unit in self._units if unit in self.kept_for_backward], candidates, nbytes)

    # -- prefetch ------------------------------------------------------------------------------------------------

    def prefetch_forward(self, unit: Unit) -> None:
        """Begin early all-gathers: of the caller's list, else of the unit that ran next in the last iteration."""
        for module in unit.control.forward_prefetch:
            self._begin_early(unit_of(module), "forward_prefetch")
        if self.prefetched or unit.control.forward_prefetch:
            return
        # On CPUs (no streams) only an early all-gather overlaps compute, so forward prefetch is always on.
        if self._on_accelerator and not unit.options.forward_prefetch:
            return
        assert self.iteration is not None
        running = self.iteration.order
        order, here = self.last_order.get(running[0]), len(running) - 1
        if order is not None and here < len(order) and order[here] is unit:
            for following in order[here + 1 :]:
                if following.needs_all_gather:
                    self._begin_early(following, "forward_prefetch")
                    return

    def prefetch_backward(self, unit: Unit, mode: BackwardPrefetch, backward: Backward) -> None:
        """Begin early all-gathers: of the caller's list, else of the unit that is next in the backward."""
        given = unit.control.backward_prefetch
        if given:
            for module in given if mode is BackwardPrefetch.BACKWARD_PRE else ():
                self._begin_early(unit_of(module), "backward_prefetch")
        elif unit.needs_all_gather and unit.options.backward_prefetch is mode and not self.prefetched:
            # Before the first reshard of a backward no buffer is being freed, and there is memory for one more unit.
            is_first = self._on_accelerator and mode is BackwardPrefetch.BACKWARD_PRE and unit is not self._root
            num = 2 if is_first and not backward.has_resharded else 1
            for following in backward.next_all_gathers(unit, num):
                self._begin_early(following, "backward_prefetch")

    def _begin_early(self, unit: Unit | None, event: str) -> None:
        # A unit of another tree, or of two, follows the order of that.
        if unit is not None and unit.needs_all_gather and unit.state not in _IN_USE and unit.step.order is self:
            unit.log_event(event)
            self.prefetched[unit] = None
            unit.gather()

    def drop_prefetched(self) -> None:
        """Free what was all-gathered early for units that have not run."""
        units, self.prefetched = self.prefetched, {}
        for unit in units:
            unit.reshard()


def _budget_of(units: Sequence[Unit]) -> int | None:
    """Return the bytes of unsharded parameters that a tree keeps for backward by its budget; None without a budget.

    Raises an OptionError if ``units`` have several budgets.
    """
    budgets: dict[int, str] = {}
    for unit in units:
        strategy = unit.options.strategy
        if strategy.budget_nbytes is not None:
            budgets.setdefault(strategy.budget_nbytes, f"{strategy.budget} in unit {unit.name!r}")
    if len(budgets) > 1:
        raise OptionError(f"The units of a tree share one memory budget; got {'; '.join(budgets.values())}.")
    return next(iter(budgets), None)


def _report_kept(kept: Sequence[Unit], candidates: Sequence[Unit], nbytes: int) -> None:
    """Log the units that a memory budget keeps for backward; warn if it is too small for any of ``candidates``."""
    names = ", ".join(repr(unit.name) for unit in kept) or "none"
    stay = "unit stays" if len(kept) == 1 else "units stay"
    budget = size_text(nbytes)
    LOGGER.info("memory budget of %s: %d %s unsharded from forward to backward: %s", budget, len(kept), stay, names)
    if nbytes and candidates and not kept:
        smallest = min(candidates, key=lambda unit: unit.buffer_nbytes)
        warn_user(
            f"The memory budget of {budget} keeps no unit unsharded for backward: unit {smallest.name!r}, the "
            f"smallest, takes {size_text(smallest.buffer_nbytes)}. Give a larger budget, or leave it out."
        )
