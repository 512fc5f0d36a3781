"""A case of the fuzzer as a plain value: what is built, how it is wrapped, and what is done with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

FRONTS = ("wrapper", "fully_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One module of the model.

    Attributes:
        kind: the key of its class in ``models.CLASSES``, or ``"alias"``: the module of another node once more.
        id: unique in the case; the module keeps it as ``node_id``.
        children: modules inside.
        size: its own size (hidden width).
        frozen: ``"all"`` or ``"some"`` of its own parameters need no gradient.
        refers: the node that an alias or a tie refers to.
        ranks: the ranks that use it, where use depends on the rank.
        reentrant: the kind of activation checkpointing.
        hook: ``"forward"`` (scales its output) or ``"parameter"`` (scales a gradient).
        edit: what its backward does to ``.grad`` of its parameters, a key of ``gradient_edits.EDITS``.
    """

    kind: str
    id: int
    children: tuple[Node, ...] = ()
    size: int = 3
    frozen: str = ""
    refers: int = -1
    ranks: tuple[int, ...] = ()
    reentrant: bool = False
    hook: str = ""
    edit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """Which modules become units.

    Attributes:
        policy: none, module, transformer, lambda, custom, size, always or hand.
        kinds: kinds of nodes, for the policies by class.
        ids: nodes, for the policies by function and by hand.
        strategies: strategies of single units (custom and hand), by node.
        min_size: for the policy by size.
    """

    policy: str = "none"
    kinds: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    strategies: tuple[tuple[int, str], ...] = ()
    min_size: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of the wrapper. ``mesh`` is (replicas, shards), or (shards,), or empty for none."""

    strategy: str = "FULL_SHARD"
    mesh: tuple[int, ...] = ()
    use_orig_params: bool = True
    backward_prefetch: str = "BACKWARD_PRE"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    cpu_offload: bool = False
    sync_module_states: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which modules ``fully_shard`` makes units of; the root is one in any case.

    Attributes:
        units: nodes; several of them are the modules of one unit.
        wrapped: nodes that the wrapper takes instead.
        keeps: nodes (the first of a unit) with ``reshard_after_forward=False``.
        frees: those with True; for the others it is None.
        last_dim: parameters are sharded along their last dim where the number of ranks divides it.
        wrapper_root: the wrapper takes the root.
    """

    units: tuple[tuple[int, ...], ...] = ()
    wrapped: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    last_dim: bool = False
    wrapper_root: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer of both models. ``num_groups`` is 1 or 2."""

    kind: str = "sgd"
    foreach: bool = False
    num_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action of the program: a key of ``actions.ACTIONS``, the seed of its random numbers, its arguments."""

    kind: str
    seed: int = 0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that a run depends on.

    Attributes:
        compares_by: summon, which gathers after each action, or slices, which leaves units as they are.
        rows: how ``fully_shard`` builds the model, in place of ``wrapping``; of the options only mesh and offloading
            count then.
    """

    seed: int
    num_ranks: int
    width: int
    model: Node
    wrapping: Wrapping
    options: Options
    optimizer: Optimizer
    actions: tuple[Action, ...]
    compares_by: str = "summon"
    rows: Rows | None = None

    @property
    def front(self) -> str:
        """The front that builds the model, of :data:`FRONTS`."""
        return "wrapper" if self.rows is None else "fully_shard"


def nodes_of(node: Node) -> Iterator[Node]:
    """Iterate over a node and all nodes below it, parents first."""
    yield node
    for child in node.children:
        yield from nodes_of(child)


def to_json(case: Case, *, indent: int | None = None) -> str:
    """Write a case as JSON; values that are the defaults are left out of nodes."""
    raw = asdict(case)
    raw["model"] = _compact(raw["model"])
    return json.dumps(raw, indent=indent)


def from_json(text: str) -> Case:
    """Read what :func:`to_json` wrote."""
    raw = json.loads(text)
    return Case(
        seed=raw["seed"],
        num_ranks=raw["num_ranks"],
        width=raw["width"],
        model=_node(raw["model"]),
        wrapping=wrapping_from(raw["wrapping"]),
        options=options_from(raw["options"]),
        optimizer=Optimizer(**raw["optimizer"]),
        actions=tuple(Action(**action) for action in raw["actions"]),
        compares_by=raw.get("compares_by", "summon"),
        rows=rows_from(raw["rows"]) if raw.get("rows") else None,
    )


def rows_from(raw: dict[str, Any]) -> Rows:
    """Make :class:`Rows` of what ``asdict`` or JSON has made of some."""
    rows = Rows(**raw)
    return replace(
        rows,
        units=tuple(tuple(unit) for unit in rows.units),
        wrapped=tuple(rows.wrapped),
        keeps=tuple(rows.keeps),
        frees=tuple(rows.frees),
    )


def wrapping_from(raw: dict[str, Any]) -> Wrapping:
    """Make a :class:`Wrapping` of what ``asdict`` or JSON has made of one."""
    wrapping = Wrapping(**raw)
    return replace(
        wrapping,
        kinds=tuple(wrapping.kinds),
        ids=tuple(wrapping.ids),
        strategies=tuple((id, strategy) for id, strategy in wrapping.strategies),
    )


def options_from(raw: dict[str, Any]) -> Options:
    """Make :class:`Options` of what ``asdict`` or JSON has made of some."""
    options = Options(**raw)
    return replace(options, mesh=tuple(options.mesh))


_DEFAULTS = asdict(Node(kind="", id=-1))


def _compact(raw: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in raw.items() if value != _DEFAULTS[key] and list(_as_list(value)) != []}
    kept["kind"], kept["id"] = raw["kind"], raw["id"]
    if raw["children"]:
        kept["children"] = [_compact(child) for child in raw["children"]]
    return kept


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _node(raw: dict[str, Any]) -> Node:
    fields = dict(raw)
    fields["children"] = tuple(_node(child) for child in raw.get("children", ()))
    fields["ranks"] = tuple(raw.get("ranks", ()))
    return Node(**fields)
