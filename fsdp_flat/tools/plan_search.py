"""Searches for the plan that fits into the memory of a rank at the least cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from fsdp_flat.api import CPUOffload, ShardingStrategy
from fsdp_flat.comm import STRATEGIES, strategy_from
from fsdp_flat.tools.planned_step import Checkpointed, StepSettings, UnitArguments, planned_step
from fsdp_flat.tools.step_plan import PlanChoice, StepPlan
from fsdp_flat.wrap import ModuleWrapPolicy

# The share of a model's parameters that modules of one class must have, for them to be tried as units.
_LEAST_SHARE = 0.1


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

    Plans with offloading are compared too, if that is open and nothing fits without it.

    Returns:
        The best plan within ``limit_nbytes``, else the smallest one, with all that were compared.
    """
    found: list[tuple[PlanChoice, StepPlan]] = []
    for offloads in [False, True] if searches_offload and arguments.is_accelerator else [arguments.offloads]:
        if not any(choice.peak_nbytes <= limit_nbytes for choice, _ in found):
            found += _compared(module, replace(arguments, offloads=offloads), step, checkpointed)
    fitting = sorted((each for each in found if each[0].peak_nbytes <= limit_nbytes), key=lambda each: each[0].cost())
    too_large = sorted((each for each in found if each not in fitting), key=lambda each: each[0].peak_nbytes)
    ordered = [*fitting, *too_large]
    return replace(ordered[0][1], limit_nbytes=limit_nbytes, choices=tuple(choice for choice, _ in ordered))


def _compared(
    module: nn.Module, arguments: UnitArguments, step: StepSettings, checkpointed: Checkpointed
) -> Iterator[tuple[PlanChoice, StepPlan]]:
    """Yield the plans of all strategies, wrappings and checkpointing that are open."""
    for wrapping, policy, is_whole in _wrappings(module, arguments.auto_wrap_policy):
        for recomputed, some in _checkpointing(module, checkpointed, is_whole=is_whole):
            for strategy in _strategies(arguments, is_whole=is_whole):
                plan = planned_step(
                    module, replace(arguments, sharding_strategy=strategy, auto_wrap_policy=policy), step, some
                )
                yield (
                    PlanChoice(
                        strategy=strategy_from(strategy).name,
                        wrapping=wrapping,
                        checkpointing=recomputed,
                        offloads=arguments.offloads,
                        arguments={
                            "sharding_strategy": strategy,
                            "auto_wrap_policy": policy,
                            "checkpointing": some,
                            "cpu_offload": CPUOffload(arguments.offloads),
                        },
                        num_units=len(plan.units),
                        peak_nbytes=plan.peak_nbytes,
                        host_nbytes=plan.host_nbytes,
                        sent_nbytes=plan.sent_nbytes,
                        flops=plan.flops,
                        seconds=plan.seconds,
                    ),
                    plan,
                )


def _strategies(arguments: UnitArguments, *, is_whole: bool) -> list[Any]:
    if arguments.sharding_strategy is not None:
        return [arguments.sharding_strategy]
    if arguments.num_ranks == 1:
        return [ShardingStrategy.NO_SHARD]
    rows = [row for row in STRATEGIES.values() if row.is_hybrid is (arguments.num_replicas > 1)]
    # The outermost unit is not resharded after forward by any strategy.
    return [row.member for row in rows if not (is_whole and row.reshard_after_forward)]


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
    found = [kind for kind, numel in numels.most_common() if numel >= least and numel]
    composite = {type(child) for child in module.modules() if any(True for _ in child.children())}
    return [kind for kind in found if kind in composite] or found
