"""From a failing case to a smaller one that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from typing import Any, Protocol

from .case import Case, Node, Optimizer, Options, Rows, Wrapping, nodes_of
from .running import Failure

HANG_TIMEOUT_S = 8.0


class Runner(Protocol):
    """Runs cases, as :class:`~tests.fuzz.running.Fuzzer` does."""

    def run(self, case: Case, *, timeout_s: float | None = None) -> Failure | None: ...


def shrink(case: Case, failure: Failure, runner: Runner, *, seconds: float = 60.0) -> tuple[Case, Failure]:
    """Take away what is not needed for the same kind of failure, until nothing is left to take or time is up."""
    end = time.monotonic() + seconds
    timeout_s = HANG_TIMEOUT_S if failure.kind == "hang" else None
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller_cases(case):
            if time.monotonic() > end:
                return case, failure
            found = runner.run(candidate, timeout_s=timeout_s)
            if found is not None and found.kind == failure.kind:
                case, failure, is_smaller = candidate, found, True
                break
    return case, failure


def smaller_cases(case: Case) -> Iterator[Case]:
    """Iterate over cases with less in them, the largest steps first."""
    yield from filter(is_legal, _all_smaller_cases(case))


def _all_smaller_cases(case: Case) -> Iterator[Case]:
    yield from _fewer_actions(case)
    for model in _smaller_models(case.model):
        yield replace(case, model=repaired(model))
    yield from _simpler_settings(case)
    yield from _simpler_arguments(case)


def is_legal(case: Case) -> bool:
    """Whether units made by hand hold each aliased module at all of its places."""
    aliased = {node.refers for node in nodes_of(case.model) if node.kind == "alias"}
    return case.wrapping.policy != "hand" or aliased <= set(case.wrapping.ids)


def _fewer_actions(case: Case) -> Iterator[Case]:
    actions, size = case.actions, len(case.actions)
    chunk = max(1, size // 2)
    while size:
        for start in range(0, size, chunk):
            yield replace(case, actions=actions[:start] + actions[start + chunk :])
        if chunk == 1:
            break
        chunk //= 2


def _smaller_models(root: Node) -> Iterator[Node]:
    for node in list(nodes_of(root)):
        for index, child in enumerate(node.children):
            if len(node.children) > 1 and not (node.kind == "root" and index == 0):
                yield _with(root, node.id, replace(node, children=node.children[:index] + node.children[index + 1 :]))
            if child.children:
                # The child's own children in its place.
                for grandchild in child.children:
                    yield _with(root, child.id, grandchild)
        if node.kind not in ("linear", "mlp", "root") and not node.children:
            yield _with(root, node.id, Node(kind="linear", id=node.id))
        if node.frozen:
            yield _with(root, node.id, replace(node, frozen=""))
        if node.hook:
            yield _with(root, node.id, replace(node, hook=""))


def _with(root: Node, id: int, new: Node) -> Node:
    """Replace the node of that id."""
    if root.id == id:
        return new
    return replace(root, children=tuple(_with(child, id, new) for child in root.children))


def repaired(root: Node) -> Node:
    """Turn aliases and ties to nodes that are gone, or not before them any more, into plain nodes."""
    seen: dict[int, str] = {}

    def visit(node: Node) -> Node:
        children = tuple(visit(child) for child in node.children)
        node = replace(node, children=children)
        if node.kind == "alias" and node.refers not in seen:
            node = Node(kind="linear", id=node.id)
        if node.kind == "tied" and seen.get(node.refers) != "mlp":
            node = Node(kind="linear", id=node.id)
        if node.kind != "alias":
            seen[node.id] = node.kind
        return node

    return visit(root)


def _simpler_settings(case: Case) -> Iterator[Case]:
    if case.compares_by != "summon":
        yield replace(case, compares_by="summon")
    if case.rows is not None:
        yield from (replace(case, rows=rows) for rows in _fewer_rows(case.rows))
    if case.width > 3:
        yield replace(case, width=3)
    if case.wrapping.policy != "none":
        yield replace(case, wrapping=Wrapping())
        ids = _ids(case)
        if case.wrapping.policy not in ("custom", "hand"):
            for id in ids:
                yield replace(case, wrapping=Wrapping(policy="custom", ids=(id,)))
            yield replace(case, wrapping=Wrapping(policy="custom", ids=ids))
        else:
            if case.wrapping.policy == "hand":
                yield replace(case, wrapping=replace(case.wrapping, policy="custom"))
            if case.wrapping.strategies:
                yield replace(case, wrapping=replace(case.wrapping, strategies=()))
            kept = tuple(id for id in case.wrapping.ids if id in ids)
            if kept != case.wrapping.ids:
                yield replace(case, wrapping=replace(case.wrapping, ids=kept))
            for index in range(len(kept)):
                yield replace(case, wrapping=replace(case.wrapping, ids=kept[:index] + kept[index + 1 :]))
    for options in _simpler(case.options, Options()):
        yield replace(case, options=options)
    for optimizer in _simpler(case.optimizer, Optimizer()):
        yield replace(case, optimizer=optimizer)


def _fewer_rows(rows: Rows) -> Iterator[Rows]:
    for field in fields(Rows):
        value = getattr(rows, field.name)
        if isinstance(value, tuple):
            if len(value) > 1:
                yield replace(rows, **{field.name: ()})
            for index in range(len(value)):
                yield replace(rows, **{field.name: value[:index] + value[index + 1 :]})
        elif value:
            yield replace(rows, **{field.name: False})
    for index, unit in enumerate(rows.units):
        if len(unit) > 1:
            yield replace(rows, units=(*rows.units[:index], unit[:1], *rows.units[index + 1 :]))


def _simpler(spec: Any, plain: Any) -> Iterator[Any]:
    """Iterate over copies of a spec with one field as in the plain one."""
    for field in fields(plain):
        if getattr(spec, field.name) == getattr(plain, field.name):
            continue
        changed = {field.name: getattr(plain, field.name)}
        if field.name == "strategy":
            changed["mesh"] = ()
        if field.name != "mesh" or "HYBRID" not in spec.strategy:
            yield replace(spec, **changed)


def _ids(case: Case) -> tuple[int, ...]:
    return tuple(node.id for node in nodes_of(case.model) if node.kind not in ("root", "alias"))


SIMPLE: dict[str, Callable[[Any], Any]] = {
    "retain": lambda value: False,
    "input_grad": lambda value: False,
    "all": lambda value: False,
    "which": lambda value: 0,
    "set_to_none": lambda value: True,
    "then_backward": lambda value: False,
    "optimizer": lambda value: False,
    "no_sync": lambda value: False,
    "rekey": lambda value: False,
}


def _simpler_arguments(case: Case) -> Iterator[Case]:
    everything = [[*range(len(case.model.children))]] * case.num_ranks
    for index, action in enumerate(case.actions):
        for name, value in action.args.items():
            simple = value
            if name in SIMPLE:
                simple = SIMPLE[name](value)
            elif name == "uses":
                many = bool(value) and bool(value[0]) and isinstance(value[0][0], list)
                simple = [everything] if many else everything
            elif name == "wrapping":
                simple = {**value, "policy": "none", "ids": (), "kinds": (), "strategies": ()}
            elif name == "rows":
                simple = asdict(Rows())
            if simple != value:
                changed = replace(action, args={**action.args, name: simple})
                yield replace(case, actions=(*case.actions[:index], changed, *case.actions[index + 1 :]))
