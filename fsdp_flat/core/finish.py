"""Ends a backward: ranks exchange a few bytes, late gradients are reduced, and ``.grad`` is set.

:meth:`EndOfBackward.begin` says whether ranks meet, :meth:`EndOfBackward.meet` returns what they have exchanged, and
:meth:`EndOfBackward.set_grads` reduces and sets by it. A rank that needs no answer does not wait for one in
:meth:`~EndOfBackward.meet`: :meth:`EndOfBackward.read` does later, before the next forward or a save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import nn

from fsdp_flat.comm import CollectiveLog, profiler_is_on
from fsdp_flat.core.averages import average_gradients, averaged_lines, unreduced_params
from fsdp_flat.core.backward import Backward
from fsdp_flat.core.differences import log_unread_difference
from fsdp_flat.core.events import LOGGER
from fsdp_flat.core.exchange import BackwardExchange, Outcome
from fsdp_flat.core.optimizer_grads import add_reduced
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.reduction import Reductions
from fsdp_flat.core.unit import Unit


@dataclass(frozen=True, slots=True)
class Answers:
    """Holds what ranks have exchanged at the end of a backward.

    Attributes:
        backward: the backward.
        unmanaged: parameters outside of units whose gradients are averaged, by name.
        averaged: what ranks have compared of them, a line for each.
        calls: the last calls that have clipped gradients, and the number of loads, which ranks have compared too.
        used: for each parameter group one byte per parameter: 1 if any rank has used it; without ``outcome``, this one.
        unreduced: parameter groups whose gradients all ranks have to reduce yet.
        outcome: what all ranks have said; None while this rank has not waited for them.
        is_late: ranks have set gradients without waiting, and these may be wrong.
    """

    backward: Backward
    unmanaged: Mapping[str, nn.Parameter]
    averaged: Sequence[str]
    calls: Sequence[str]
    used: Mapping[ParamGroup, bytes]
    unreduced: Collection[ParamGroup]
    outcome: Outcome | None = None
    is_late: bool = False


class EndOfBackward:
    """Ends the backwards of one tree.

    Args:
        units: all units of the tree, the outermost first; empty before the tree's first use.
        root_module: returns the module of the outermost unit, or None if it is gone.
        reductions: those of the tree.
        collective_log: the order of the collectives that units issued since ranks last compared it.

    Attributes:
        exchange: exchanges bytes between ranks.
        unread: what :meth:`read` has yet to read of the last backward's exchange on this rank, or None.
        shows_unreduced: the last backward has left gradients unreduced, and ``.grad`` shows this rank's own.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        root_module: Callable[[], nn.Module | None],
        reductions: Reductions,
        collective_log: CollectiveLog,
    ) -> None:
        self._units, self._root_module, self._reductions = units, root_module, reductions
        self._param_groups = [param_group for unit in units for param_group in unit.param_groups]
        self.exchange = BackwardExchange(units, collective_log)
        self._collective_log = collective_log
        self.forget()

    def forget(self) -> None:
        """Forget the backwards so far; the next exchange waits for other ranks."""
        self.unread: Answers | None = None
        self.shows_unreduced = False
        self._waits_for_ranks = True

    def abort(self) -> None:
        """Drop the reductions and the exchange of a backward that is aborted."""
        self.forget()
        self._reductions.drop(self._param_groups)
        self.exchange.abort()

    def begin(self, backward: Backward) -> bool:
        """Show unreduced gradients of units that leave them so; return whether ranks exchange anything and set others.

        All ranks return the same: it depends on the model alone, not on what this rank has used.
        """
        waiting = [unit for unit in self._units if not unit.control.sync_gradients]
        self.shows_unreduced = bool(waiting)
        for param_group in [param_group for unit in waiting for param_group in unit.param_groups]:
            param_group.grads.show_unreduced()
        if len(waiting) == len(self._units) or (waiting and self._leaves_all_unreduced(backward)):
            return False
        return any(unit.is_trainable for unit in self._units) or bool(self._unmanaged_params())

    def _leaves_all_unreduced(self, backward: Backward) -> bool:
        """Return whether the backward went through units alone that leave gradients unreduced, and no others have any.

        Ranks may run other numbers of such backwards, so these exchange nothing.
        """
        units = backward.units
        is_reduced = self._reductions.has_any(self._param_groups) or any(
            any(flags) for flags in self._reductions.used.values()
        )
        return bool(units) and not (
            is_reduced
            or any(unit.reduces_gradients for unit in units)
            or any(
                param_group.grads.has_waiting
                for unit in self._units
                if unit.reduces_gradients
                for param_group in unit.param_groups
            )
        )

    def _unmanaged_params(self) -> dict[str, nn.Parameter]:
        """Return by name the parameters whose gradients are averaged, or, in a tree that trains none, that could be."""
        if self._units[0].averages_ignored or not any(unit.is_trainable for unit in self._units):
            return unreduced_params(self._root_module(), self._units)
        return {}

    def meet(self, backward: Backward) -> Answers:
        """Exchange what ranks have to know of each other, and wait for it if this rank needs it.

        Every rank must call this where :meth:`begin` has returned True.
        """
        reductions, exchange, reduced = self._reductions, self.exchange, self._reduced_units()
        unreduced = {
            param_group
            for unit in reduced
            for param_group in unit.param_groups
            if param_group.grads.collect() and reductions.note_used(param_group)
        }
        used, reductions.used = reductions.used, {}
        unmanaged = self._unmanaged_params()
        averaged = averaged_lines(unmanaged, averages=bool(self._units[0].averages_ignored))
        is_needed = bool(unreduced) or self._needs_other_ranks(backward, reduced, used)
        # A collective of gloo that ends while torch's profiler stops makes torch write to freed memory.
        waits = is_needed or self._waits_for_ranks or not exchange.can_be_read_later or profiler_is_on()
        loads = f"{sum([unit.num_loads for unit in self._units])} loads of units from full state dicts"
        calls = [*dict.fromkeys([unit.clipped for unit in self._units if unit.clipped]), loads]
        same, retains = "\n".join([*averaged, *calls]).encode(), backward.retains_graph
        exchange.begin(used, unreduced, same=same, retains_graph=retains, is_needed=is_needed, waits=waits)
        reductions.finish()
        answers = Answers(backward, unmanaged, averaged, calls, used, unreduced)
        if waits:
            answers = self._wait_for(answers)
        else:
            every = chain.from_iterable(exchange.param_groups.values())
            unused = {each: bytes(len(each.layout.param_infos)) for each in every if each not in used}
            answers = replace(answers, used=used | unused)
        # Ranks that have gone on raise what is late when they read it, and so does this one.
        self.unread = answers if answers.outcome is None or answers.is_late else None
        return answers

    def _needs_other_ranks(self, backward: Backward, reduced: list[Unit], used: Mapping[ParamGroup, bytes]) -> bool:
        """Return whether what follows depends on what other ranks have used, on their graphs, or on their settings."""
        root = self._units[0]
        if backward.keeps_iterations or backward.retains_graph or root.control.finalizes_by_hand:
            return True
        if root.averages_ignored:
            return True
        return any(
            param_group.slots.num_trainable and used.get(param_group, b"").count(1) < param_group.slots.num_trainable
            for unit in reduced
            if not unit.policy.zeros_for_unused
            for param_group in unit.param_groups
        )

    def _wait_for(self, answers: Answers) -> Answers:
        """Wait until every rank has ended the backward, and return their answers."""
        outcome = self.exchange.finish()
        self._waits_for_ranks = outcome.is_needed
        return replace(
            answers,
            used={**answers.used, **outcome.used},
            unreduced={*answers.unreduced, *outcome.unreduced},
            outcome=outcome,
            is_late=outcome.went_on and (outcome.differing is not None or bool(outcome.unreduced)),
        )

    def read(self) -> Answers | None:
        """Return what ranks have said in the last backward, if this rank has yet to read it; wait for all of them."""
        unread, self.unread = self.unread, None
        if unread is None:
            return None
        return replace(unread if unread.outcome is not None else self._wait_for(unread), is_late=True)

    def log_unread(self, until: float) -> None:
        """Log how ranks differed in the last backward if no call has read it; wait for them until ``until``.

        That is a time of ``time.monotonic``.
        """
        if self.unread is None:
            return
        root, outcome = self._units[0], self.unread.outcome or self.exchange.finish_by(until)
        if outcome is None:
            LOGGER.warning(
                "Rank %d of the shard group ends before other ranks have ended the last backward of unit %r, so it is "
                "not known whether all ranks ran the same in it.",
                root.options.groups.shard.rank,
                root.name,
            )
        elif outcome.differing is not None or outcome.unreduced:
            log_unread_difference(root, self._collective_log, outcome.differing, outcome.unreduced)

    def set_grads(self, answers: Answers) -> None:
        """Reduce what is not reduced yet; set the gradients of this backward and of earlier ones that are not set."""
        unreduced = () if answers.is_late else answers.unreduced
        for unit in self._reduced_units():
            for param_group in unit.param_groups:
                if param_group in unreduced or (unit.policy.all_reduce and param_group.grads.partial.shard is not None):
                    self._reductions.begin(unit, param_group)
        self._set_reduced(answers.used)
        root = self._units[0]
        if root.averages_ignored and self.unread is None:
            any_rank = partial(self.exchange.any_rank, over=root.options.groups)
            average_gradients(answers.unmanaged, root, any_rank)

    def _reduced_units(self) -> list[Unit]:
        return [unit for unit in self._units if unit.control.sync_gradients]

    def _set_reduced(self, used: Mapping[ParamGroup, bytes]) -> None:
        """Wait for all reductions, and add the results to ``.grad`` of the parameters that an optimizer holds.

        ``used`` holds for each parameter group one byte per parameter: 1 if any rank has used it.
        """
        self._reductions.wait()
        for param_group, flags in used.items():
            partial_sum, reduced = param_group.grads.partial, param_group.grads.reduced
            param_group.grads.reduced = []
            if reduced:
                for grad in reduced:
                    grad.divide(by_tensor=True)
                    if grad is not reduced[0]:
                        reduced[0].shard.add_(grad.shard)
                all_flags = flags if partial_sum.used is None else partial_sum.add_used(flags)
                if partial_sum.shard is None:
                    partial_sum.used = None
                if reduced[0].policy.zeros_for_unused:
                    all_flags = bytes(param_group.slots.requires_grad())
                add_reduced(param_group, reduced[0].shard, all_flags)
            if partial_sum.shard is not None:
                partial_sum.add_used(flags)

    def reduce_by_hand(self, unit: Unit, param_groups: Sequence[ParamGroup]) -> None:
        """Reduce and set the gradients that backwards have left with parameter groups of one mesh, between backwards.

        Nothing happens on a rank where they have left none. Every other rank of the mesh must call this.
        """
        trained = [param_group for param_group in param_groups if param_group.slots.num_trainable]
        if not any(any(param_group.grads.ready()) for param_group in trained):
            return
        for param_group in trained:
            self._reductions.note_used(param_group)
        # Ranks may have used other parameters.
        own = [self._reductions.used.pop(param_group) for param_group in trained]
        flags = iter(self.exchange.any_rank(list(map(bool, b"".join(own))), over=trained[0].comm.options.groups))
        with torch.no_grad():
            for param_group in trained:
                self._reductions.begin(unit, param_group)
            self._set_reduced(
                {param_group: bytes(map(next, [flags] * len(each))) for param_group, each in zip(trained, own)}
            )
        trained[0].pool.clear()
