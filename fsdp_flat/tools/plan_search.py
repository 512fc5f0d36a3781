"""Searches for the plan that fits into the memory of a rank at the least cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from fsdp_flat.api import CPUOffload, ShardingStrategy
from fsdp_flat.comm import STRATEGIES, strategy_from
from fsdp_flat.errors import UnsupportedError
from fsdp_flat.sizes import scale_of
from fsdp_flat.tools.planned_step import Checkpointed, StepSettings, UnitArguments, planned_step
from fsdp_flat.tools.step_memory import StepPhase
from fsdp_flat.tools.step_plan import PlanChoice, StepPlan
from fsdp_flat.wrap import ModuleWrapPolicy

# The share of a model's parameters that modules of one class must have, for them to be tried as units.
_LEAST_SHARE = 0.1
# Memory budgets that are tried for the same units.
_MOST_BUDGETS = 3
# After so many plans of batches whose size is guessed from their peaks, the interval is halved.
_MOST_GUESSES = 6
_MOST_ROWS = 1 << 20

_Compared = tuple[PlanChoice, StepPlan]


def search(
    module: nn.Module,
    arguments: UnitArguments,
    step: StepSettings,
    limit_nbytes: int,
    checkpointed: Checkpointed,
    *,
    searches_offload: bool,
) -> StepPlan:
    """Compare plans of all strategies, wrappings and checkpointing that ``arguments`` leave open.

    Plans with offloading are compared too, if that is open and nothing fits without it; and plans with a memory budget,
    if parameters can be kept for backward in part.

    Returns:
        The best plan within ``limit_nbytes``, else the smallest one, with all that were compared.
    """
    compared = list(_compared(module, arguments, step, checkpointed, limit_nbytes))
    if searches_offload and arguments.is_accelerator:
        if not _any_fits(compared, limit_nbytes) and any(_without_states(plan) <= limit_nbytes for _, plan in compared):
            chosen = replace(arguments, offloads_optimizer=True)
            compared += _compared(module, chosen, step, checkpointed, limit_nbytes)
        if not _any_fits(compared, limit_nbytes):
            compared += _compared(module, replace(arguments, offloads=True), step, checkpointed, limit_nbytes)

    def order(pair: _Compared) -> tuple[Any, ...]:
        """Put what fits first, by its cost, and then what does not, by its peak."""
        choice, _ = pair
        return (0, choice.cost()) if choice.peak_nbytes <= limit_nbytes else (1, choice.peak_nbytes)

    ordered = sorted(compared, key=order)
    return replace(ordered[0][1], limit_nbytes=limit_nbytes, choices=tuple(choice for choice, _ in ordered))


def largest_batch(planned: Callable[[int], StepPlan], limit_nbytes: int) -> tuple[int, StepPlan]:
    """Return the largest number of rows whose plan fits ``limit_nbytes``, with that plan; one row if none fits.

    It is found by bisection. A peak grows almost in proportion to the rows, which says where to cut first.
    """
    plans = {1: planned(1)}
    first, low, high, guess = plans[1].peak_nbytes, 1, _MOST_ROWS + 1, 2
    while first <= limit_nbytes and high - low > 1:
        peak_nbytes = plans.setdefault(guess, planned(guess)).peak_nbytes
        low, high = (guess, high) if peak_nbytes <= limit_nbytes else (low, guess)
        guess = 1 + (limit_nbytes - first) * (guess - 1) // max(1, peak_nbytes - first)
        if len(plans) > _MOST_GUESSES and high <= _MOST_ROWS:
            guess = (low + high) // 2
        guess = max(low + 1, min(guess, high - 1, 16 * low))
    return low, replace(plans[low], limit_nbytes=limit_nbytes)


def _any_fits(compared: list[_Compared], limit_nbytes: int) -> bool:
    return any(choice.peak_nbytes <= limit_nbytes for choice, _ in compared)


def _without_states(plan: StepPlan) -> int:
    """Return the least that the peak of a plan can be if the optimizer's states are on the host between its steps."""
    return max(
        moment.nbytes.total - (0 if moment.phase is StepPhase.OPTIMIZER else moment.nbytes.optimizer)
        for moment in plan.phases
    )


def _compared(
    module: nn.Module, arguments: UnitArguments, step: StepSettings, checkpointed: Checkpointed, limit_nbytes: int
) -> Iterator[_Compared]:
    """Yield the plans of all strategies, wrappings and checkpointing that are open."""
    wrappings = list(_wrappings(module, arguments.auto_wrap_policy))
    if step.offloads_activations:  # it needs several units
        wrappings = [each for each in wrappings if not each[2]] or wrappings
    refused: UnsupportedError | None = None
    num_found = 0
    for wrapping, policy, is_whole in wrappings:
        for recomputed, some in _checkpointing(module, checkpointed, is_whole=is_whole):

            def planned(strategy: Any) -> _Compared:
                chosen = replace(arguments, sharding_strategy=strategy, auto_wrap_policy=policy)  # noqa: B023
                plan = planned_step(module, chosen, step, some)  # noqa: B023
                choice = PlanChoice(
                    strategy=strategy_from(strategy).name,
                    wrapping=wrapping,  # noqa: B023
                    checkpointing=recomputed,  # noqa: B023
                    offloads=arguments.offloads,
                    offloads_optimizer=arguments.offloads_optimizer,
                    arguments={
                        "sharding_strategy": strategy,
                        "auto_wrap_policy": policy,  # noqa: B023
                        "checkpointing": some,  # noqa: B023
                        "cpu_offload": CPUOffload(arguments.offloads, arguments.offloads_optimizer),
                    },
                    num_units=len(plan.units),
                    peak_nbytes=plan.peak_nbytes,
                    host_nbytes=plan.host_nbytes,
                    sent_nbytes=plan.sent_nbytes,
                    flops=plan.flops,
                    seconds=plan.seconds,
                )
                return choice, plan

            of_strategies = []
            for strategy in _strategies(arguments, is_whole=is_whole):
                try:
                    of_strategies.append(planned(strategy))
                except UnsupportedError as error:  # of weights that need units of their own, or a strategy that shards
                    refused = error
            num_found += len(of_strategies)
            yield from of_strategies
            yield from _with_budget(planned, of_strategies, limit_nbytes)
    if refused is not None and not num_found:
        raise refused


def _with_budget(
    planned: Callable[[Any], _Compared], compared: list[_Compared], limit_nbytes: int
) -> Iterator[_Compared]:
    """Yield plans that keep a part of the parameters for backward, until one fits, if all of them are too many.

    ``compared`` are the plans of all strategies for the same units.
    """
    rows = [(strategy_from(choice.arguments["sharding_strategy"]), choice, plan) for choice, plan in compared]
    freed = [choice for row, choice, _ in rows if row.reshard_after_forward and row.budget is None]
    kept = [(choice, plan) for row, choice, plan in rows if row.shards and not row.reshard_after_forward]
    if not (freed and kept and freed[0].peak_nbytes <= limit_nbytes < kept[0][0].peak_nbytes):
        return
    peak_nbytes, sizes = kept[0][0].peak_nbytes, [unit.gathered_nbytes for unit in kept[0][1].units[1:]]
    budget = sum(sizes)
    for _ in range(_MOST_BUDGETS):
        budget -= max(peak_nbytes - limit_nbytes, min(sizes, default=0))
        if budget < min(sizes, default=1):
            return
        divisor, unit = scale_of(budget)
        tried = planned(f"{freed[0].strategy}:{int(budget / divisor * 1000) / 1000:g}{unit}")
        yield tried
        peak_nbytes = tried[0].peak_nbytes
        if peak_nbytes <= limit_nbytes:
            return


def _strategies(arguments: UnitArguments, *, is_whole: bool) -> list[Any]:
    if arguments.sharding_strategy is not None:
        return [arguments.sharding_strategy]
    if arguments.num_ranks == 1:
        return [ShardingStrategy.NO_SHARD]
    strategies = [row for row in STRATEGIES.values() if row.is_hybrid is (arguments.num_replicas > 1)]
    # The outermost unit is not resharded after forward by any strategy.
    return [row.member for row in strategies if not (is_whole and row.reshard_after_forward)]


def _wrappings(module: nn.Module, policy: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield a name, a policy, and whether the model is one unit."""
    if policy is not None:
        yield "the given policy", policy, False
        return
    yield "one unit", None, True
    for cls in repeated_classes(module):
        yield f"units of {cls.__name__}", ModuleWrapPolicy({cls}), False


def _checkpointing(
    module: nn.Module, checkpointed: Checkpointed, *, is_whole: bool
) -> Iterator[tuple[str, Checkpointed]]:
    if checkpointed is not None:
        yield "as given" if checkpointed else "nothing", checkpointed
        return
    yield "nothing", False
    if not is_whole:
        yield "every unit", True
        return
    for cls in repeated_classes(module):
        yield f"every {cls.__name__}", (cls,)


def repeated_classes(module: nn.Module) -> list[type[nn.Module]]:
    """Return the classes of which a module holds several in a row, with much of its parameters, the largest first.

    Modules without modules inside, such as linear layers, count only if there are no others.
    """
    numels: Counter[type[nn.Module]] = Counter()
    for parent in module.modules():
        if isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            kinds = Counter(type(child) for child in parent.children())
            for child in parent.children():
                if kinds[type(child)] > 1:
                    numels[type(child)] += sum(param.numel() for param in child.parameters())
    least = _LEAST_SHARE * sum(param.numel() for param in module.parameters())
    large = [cls for cls, numel in numels.most_common() if numel >= least and numel]
    composite = {type(child) for child in module.modules() if any(True for _ in child.children())}
    return [cls for cls in large if cls in composite] or large
