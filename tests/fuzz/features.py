"""Taking features out of cases, so that a known defect does not hide others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from .case import Case, Node


def _each_node(node: Node, change: Callable[[Node], Node]) -> Node:
    return change(replace(node, children=tuple(_each_node(child, change) for child in node.children)))


def same_on_every_rank(case: Case) -> Case:
    """Let every rank use the same outputs, branches and parameters."""

    def change(node: Node) -> Node:
        return replace(node, ranks=tuple(range(case.num_ranks))) if node.kind in ("branch", "rankpart") else node

    def same(value: Any) -> Any:
        if isinstance(value[0][0], list):
            return [same(one) for one in value]
        return [value[0]] * len(value)

    actions = tuple(
        replace(action, args={**action.args, "uses": same(action.args["uses"])}) if "uses" in action.args else action
        for action in case.actions
    )
    return replace(case, model=_each_node(case.model, change), actions=actions)


def _not_reentrant(case: Case) -> Case:
    return replace(case, model=_each_node(case.model, lambda node: replace(node, reentrant=False)))


def _without_kind(kind: str) -> Callable[[Case], Case]:
    def change(node: Node) -> Node:
        return Node(kind="mlp", id=node.id) if node.kind == kind else node

    return lambda case: replace(case, model=_each_node(case.model, change))


def _without_action(kind: str) -> Callable[[Case], Case]:
    return lambda case: replace(case, actions=tuple(action for action in case.actions if action.kind != kind))


FEATURES: dict[str, Callable[[Case], Case]] = {
    "rank-units": same_on_every_rank,
    "reentrant": _not_reentrant,
    **{
        f"part-{kind}": _without_kind(kind)
        for kind in ("alias", "tied", "mixed", "empty", "ints", "scalar", "unused", "rankpart", "edited")
    },
    **{
        f"action-{kind}": _without_action(kind)
        for kind in ("accumulate", "fail", "move", "elsewhere", "unit", "toggle", "input_gradient", "average")
    },
}


def without(case: Case, features: Iterable[str]) -> Case:
    """Take the named features out of a case."""
    for name in features:
        case = FEATURES[name](case)
    return case
