"""From a seed to a case: the same on every rank, since nothing else is looked at."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.support.gradient_edits import EDITS

from .actions import ACTIONS
from .case import FRONTS, Action, Case, Node, Optimizer, Options, Rows, Wrapping, nodes_of
from .features import same_on_every_rank, without
from .session import State

LEAVES = {
    "linear": 3,
    "mlp": 6,
    "tied": 2,
    "scalar": 1.5,
    "empty": 1.5,
    "norm": 1,
    "ints": 1,
    "mixed": 1,
    "unused": 1.5,
    "rankpart": 1.5,
    "counter": 1.5,
    "edited": 1.5,
    "alias": 2,
}
CONTAINERS = {"seq": 4, "twice": 1.5, "residual": 1.5, "recompute": 4, "branch": 2}


def case_from(seed: int, num_ranks: int, front: str = "") -> Case:
    """Make the case of a seed for a number of ranks, and for a front of ``case.FRONTS``; either by default."""
    front = front or random.Random(f"front/{seed}/{num_ranks}").choice(FRONTS)
    rng = random.Random(f"{seed}/{num_ranks}")
    width = rng.randint(3, 9)
    model = ModelMaker(rng, num_ranks).root()
    options = random_options(rng, num_ranks)
    wrapping = random_wrapping(rng, model, options)
    optimizer = Optimizer(
        kind=rng.choice(["sgd", "adamw"]),
        foreach=rng.random() < 0.5,
        num_groups=2 if options.use_orig_params and rng.random() < 0.3 else 1,
    )
    case = Case(
        seed=seed,
        num_ranks=num_ranks,
        width=width,
        model=model,
        wrapping=wrapping,
        options=options,
        optimizer=optimizer,
        actions=(),
        compares_by=rng.choice(["summon", "slices", "slices"]),
    )
    if front == "fully_shard":
        rows = random_rows(rng, model, with_wrappers=rng.random() < 0.15)
        case = replace(
            case,
            model=without(case, ["part-scalar"]).model,
            wrapping=Wrapping(),
            options=random_row_options(rng, num_ranks),
            optimizer=replace(optimizer, foreach=optimizer.foreach and not (rows.wrapped or rows.wrapper_root)),
            rows=rows,
        )
    case = replace(case, actions=random_actions(rng, case))
    return same_on_every_rank(case) if _limits_ranks(case) else case


def _limits_ranks(case: Case) -> bool:
    """Return whether ranks must use the same parts: docs/differences.md, checkpoints and frozen units."""
    frozen = any(action.kind == "toggle" for action in case.actions)
    return frozen or any(node.reentrant or node.frozen or _may_recompute_units(node) for node in nodes_of(case.model))


def _may_recompute_units(node: Node) -> bool:
    """Return whether a part is a checkpoint around what may be several units."""
    if node.kind != "recompute":
        return False
    inside = node.children[0]
    return bool(inside.children) or inside.kind in ("mlp", "alias", "unused")


def pick(rng: random.Random, weights: dict[str, float]) -> str:
    """Choose a key, each as likely as its weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def some_ranks(rng: random.Random, num_ranks: int) -> tuple[int, ...]:
    """Choose some of the ranks; none and all are possible."""
    return tuple(rank for rank in range(num_ranks) if rng.random() < 0.5)


class ModelMaker:
    """Makes random trees of nodes."""

    def __init__(self, rng: random.Random, num_ranks: int) -> None:
        self.rng = rng
        self.num_ranks = num_ranks
        self.num_nodes = 0
        self.done: list[Node] = []
        # Many cases are to have none of a feature at all, so that features do not hide each other's defects.
        self.unsharded_params = {
            kind: weight for kind, weight in LEAVES.items() if kind in ("mlp", "linear") or rng.random() < 0.4
        }
        self.containers = {kind: weight for kind, weight in CONTAINERS.items() if kind == "seq" or rng.random() < 0.5}
        self.freezes = rng.random() < 0.3
        self.hooks = rng.random() < 0.2

    def root(self) -> Node:
        number = self.next_id()
        body = self.node("seq", 0)
        sides = [self.anything(2) for _ in range(self.rng.choice([0, 0, 1, 1, 2, 3]))]
        return Node(kind="root", id=number, children=(body, *sides))

    def next_id(self) -> int:
        self.num_nodes += 1
        return self.num_nodes - 1

    def anything(self, depth: int) -> Node:
        if depth < 4 and self.num_nodes < 14 and self.rng.random() < 0.45:
            return self.node(pick(self.rng, self.containers), depth)
        return self.leaf()

    def node(self, kind: str, depth: int) -> Node:
        number = self.next_id()
        count = self.rng.randint(1, 4) if kind == "seq" else 1
        children = tuple(self.anything(depth + 1) for _ in range(count))
        return self.finished(
            Node(
                kind=kind,
                id=number,
                children=children,
                reentrant=kind == "recompute" and self.rng.random() < 0.5,
                ranks=some_ranks(self.rng, self.num_ranks) if kind == "branch" else (),
                hook="forward" if self.hooks and self.rng.random() < 0.2 else "",
            )
        )

    def leaf(self) -> Node:
        rng = self.rng
        kind = pick(rng, self.unsharded_params)
        if kind == "alias" and self.done:
            return Node(kind="alias", id=self.next_id(), refers=rng.choice(self.done).id)
        mlps = [node.id for node in self.done if node.kind == "mlp"]
        if kind == "alias" or (kind == "tied" and not mlps):
            kind = "mlp"
        frozen = rng.choice(["all", "all", "some"]) if self.freezes and rng.random() < 0.4 else ""
        hook = rng.choice(["forward", "parameter"]) if self.hooks and rng.random() < 0.3 else ""
        return self.finished(
            Node(
                kind=kind,
                id=self.next_id(),
                size=rng.randint(1, 9),
                frozen="" if kind == "tied" else frozen,
                refers=rng.choice(mlps) if kind == "tied" else -1,
                ranks=some_ranks(rng, self.num_ranks) if kind == "rankpart" else (),
                hook=hook,
                edit=rng.choice(list(EDITS)) if kind == "edited" else "",
            )
        )

    def finished(self, node: Node) -> Node:
        self.done.append(node)
        return node


def random_options(rng: random.Random, num_ranks: int) -> Options:
    """Choose arguments of the wrapper."""
    strategy = pick(
        rng,
        {"FULL_SHARD": 5, "SHARD_GRAD_OP": 3, "NO_SHARD": 1, "HYBRID_SHARD": 1, "_HYBRID_SHARD_ZERO2": 1},
    )
    mesh: tuple[int, ...] = ()
    if "HYBRID" in strategy:
        replicas = rng.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
        mesh = (replicas, num_ranks // replicas)
    elif rng.random() < 0.15:
        mesh = (num_ranks,)
    return Options(
        strategy=strategy,
        mesh=mesh,
        use_orig_params=rng.random() < 0.6,
        backward_prefetch=rng.choice(["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", ""]),
        forward_prefetch=rng.random() < 0.3,
        limit_all_gathers=rng.random() < 0.7,
        cpu_offload=rng.random() < 0.15,
        sync_module_states=rng.random() < 0.2,
    )


def random_wrapping(rng: random.Random, model: Node, options: Options) -> Wrapping:
    """Choose the modules that become units."""
    policy = pick(
        rng,
        {"none": 1, "module": 3, "transformer": 1.5, "lambda": 2, "custom": 2, "size": 1.5, "always": 1, "hand": 3},
    )
    nodes = [node for node in nodes_of(model) if node.kind not in ("alias", "root")]
    share = rng.choice([0.25, 0.5, 0.8])
    ids = tuple(node.id for node in nodes if rng.random() < share)
    kinds = tuple(sorted({node.kind for node in nodes if rng.random() < share}))
    strategies: tuple[tuple[int, str], ...] = ()
    if policy in ("custom", "hand") and options.strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and rng.random() < 0.3:
        names = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
        strategies = tuple((id, rng.choice(names)) for id in ids if rng.random() < 0.5)
    if policy == "hand" and not all(node.refers in ids for node in nodes_of(model) if node.kind == "alias"):
        # A module that is in a unit and also outside of it: refused when it runs outside.
        policy = "custom"
    return Wrapping(policy=policy, kinds=kinds, ids=ids, strategies=strategies, min_size=rng.choice([1, 10, 40, 100]))


def random_row_options(rng: random.Random, num_ranks: int) -> Options:
    """Choose the options that count for ``fully_shard``."""
    mesh: tuple[int, ...] = ()
    if rng.random() < 0.3:
        replicas = rng.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
        mesh = (replicas, num_ranks // replicas)
    return Options(use_orig_params=True, mesh=mesh, cpu_offload=rng.random() < 0.1)


def random_rows(rng: random.Random, model: Node, *, with_wrappers: bool) -> Rows:
    """Choose the units of ``fully_shard``, some of several modules, and among them some of the wrapper."""
    share = rng.choice([0.25, 0.5, 0.8])
    grouped: set[int] = set()
    units: list[tuple[int, ...]] = []
    for node in nodes_of(model):
        places = [child.id for child in node.children if child.kind != "alias"]
        if node.kind == "seq" and len(places) > 1 and rng.random() < 0.3:
            start = rng.randrange(len(places) - 1)
            units.append(tuple(places[start : start + rng.choice([2, 2, 3])]))
            grouped.update(units[-1])
    single = [node.id for node in nodes_of(model) if node.kind not in ("alias", "root") and node.id not in grouped]
    single = [id for id in single if rng.random() < share]
    wrapped = tuple(id for id in single if with_wrappers and rng.random() < 0.4)
    units += [(id,) for id in single if id not in wrapped]
    kinds = {unit[0]: rng.choice(["none", "none", "keep", "free"]) for unit in [(model.id,), *units]}
    return Rows(
        units=tuple(units),
        wrapped=wrapped,
        keeps=tuple(id for id, kind in kinds.items() if kind == "keep"),
        frees=tuple(id for id, kind in kinds.items() if kind == "free"),
        last_dim=rng.random() < 0.25,
        wrapper_root=with_wrappers and rng.random() < 0.3,
    )


def random_actions(rng: random.Random, case: Case) -> tuple[Action, ...]:
    """Choose a program."""
    state, actions = State(), []
    weights = {kind: action.weight for kind, action in ACTIONS.items() if action.applies(case)}
    # As with features of the model: each program has some kinds of actions only.
    kept = {kind: w for kind, w in weights.items() if ACTIONS[kind].is_basic or rng.random() < 0.35}
    for kind in ("snapshot", "row_snapshot"):
        if kind in kept:
            kept[kind.replace("snapshot", "restore")] = weights[kind.replace("snapshot", "restore")]
    for _ in range(rng.randint(4, 12)):
        legal = {kind: weight for kind, weight in kept.items() if ACTIONS[kind].is_legal(state, case)}
        kind = pick(rng, legal)
        action = Action(kind=kind, seed=rng.randrange(10**6), args=ACTIONS[kind].arguments(rng, case))
        ACTIONS[kind].advance(state, action)
        actions.append(action)
    return tuple(actions)
