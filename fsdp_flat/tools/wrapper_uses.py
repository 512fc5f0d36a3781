"""Says what replaces each use of a wrapped model: accumulation, clipping, state dicts, and tests of classes.

Each function adds edits to a :class:`Edits`, or raises :class:`Left` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from fsdp_flat.tools.wrapped_models import WRAPPER, Source, argument_of
from fsdp_flat.tools.wrapper_arguments import Left

STATE_DICTS = "torch.distributed.checkpoint.state_dict"
LOAD_SHARDED = "torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict"

# An edit gets the node with its own parts edited, and returns what stands in its place.
Edit = Callable[[Any], Any]


@dataclass(slots=True)
class Edits:
    """Collects the edits of a use, by node of the tree as it was, the names that they import, and what differs."""

    source: Source
    by_node: dict[cst.CSTNode, Edit] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    differs: list[str] = field(default_factory=list)

    def call(self, node: cst.Call, text: Callable[[cst.Call], str]) -> None:
        """Replace a call by the expression with a text, which is made from the edited call."""
        self.by_node[node] = lambda updated: cst.parse_expression(text(updated)).with_changes(
            lpar=updated.lpar, rpar=updated.rpar
        )

    def statement(self, node: cst.CSTNode, text: Callable[[Any], str] | None) -> None:
        """Replace a statement by those of a text, with its comments; None removes it."""

        def replaced(updated: Any) -> Any:
            return cst.RemoveFromParent() if text is None else with_comments(statements_of(text(updated)), updated)

        self.by_node[node] = replaced


def statements_of(text: str) -> list[Any]:
    """Parse statements."""
    return list(cst.parse_module(text).body)


def with_comments(statements: list[Any], updated: Any) -> cst.FlattenSentinel[Any]:
    """Give the first of some statements the comments of the one that they replace."""
    kept: dict[str, Any] = {"leading_lines": (*updated.leading_lines, *statements[0].leading_lines)}
    if isinstance(updated, cst.SimpleStatementLine) and isinstance(statements[0], cst.SimpleStatementLine):
        kept["trailing_whitespace"] = updated.trailing_whitespace
    return cst.FlattenSentinel([statements[0].with_changes(**kept), *statements[1:]])


def text_of(node: cst.CSTNode) -> str:
    """Return the text of an edited node."""
    return cst.Module([]).code_for_node(node).strip()


def alone(source: Source, node: cst.CSTNode) -> cst.SimpleStatementLine:
    """Return the statement that consists of a node alone; anything else is left."""
    statement = source.statement(node)
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        raise Left("it is a part of a larger statement; write it as one of its own")
    return statement


# -- accumulation and clipping ----------------------------------------------------------------------------------------


def no_sync(source: Source, call: cst.Call, edits: Edits) -> None:
    """Rewrite ``with model.no_sync():``, also by a condition."""
    assert isinstance(call.func, cst.Attribute)
    model, holder = source.code(call.func.value), source.parent(call)
    if call.args:
        raise Left("no_sync with arguments: sharded accumulation has no counterpart in fully_shard")
    condition = None
    whole: cst.CSTNode = call
    if isinstance(holder, cst.IfExp):
        other = holder.orelse if holder.body is call else holder.body
        name = source.name_of(other.func) if isinstance(other, cst.Call) and not other.args else ""
        if name != "contextlib.nullcontext" or holder.test is call:
            raise Left("no_sync beside something else than contextlib.nullcontext()")
        test = source.code(holder.test)
        condition = f"not ({test})" if holder.body is call else test
        if condition.startswith("not (") and isinstance(holder.test, (cst.Name, cst.Attribute)):
            condition = f"not {test}"
        whole, holder = holder, source.parent(holder)
    if isinstance(holder, cst.Assign):
        _through_a_name(source, holder, condition, model, edits)
        return
    block = source.parent(holder) if isinstance(holder, cst.WithItem) and holder.item is whole else None
    if not isinstance(block, cst.With):
        raise Left("no_sync outside of a `with` statement")
    _without_sync(block, condition, model, edits)


def _through_a_name(source: Source, assign: cst.Assign, condition: str | None, model: str, edits: Edits) -> None:
    """Rewrite ``context = model.no_sync() if ... else nullcontext()`` with ``with context:`` right after it."""
    item = source.parent(_only_reader(source, assign))
    block = source.parent(item) if isinstance(item, cst.WithItem) else None
    if not isinstance(block, cst.With):
        raise Left("no_sync is assigned to a name; write it into the `with` statement")
    edits.statement(alone(source, assign), None)
    _without_sync(block, condition, model, edits)


def _only_reader(source: Source, assign: cst.Assign) -> cst.CSTNode:
    """Return the only place that reads what an assignment binds; it must be in the next statement."""
    target, line = assign.targets[0].target, source.statement(assign)
    places = source.references(target) if isinstance(target, cst.Name) else []
    body = list(getattr(source.parent(line), "body", ()))
    if len(places) != 1 or body[body.index(line) + 1 : body.index(line) + 2] != [source.statement(places[0])]:
        raise Left(f"`{source.code(target)}` is read elsewhere than once, by the next statement")
    return places[0]


def _without_sync(block: cst.With, condition: str | None, model: str, edits: Edits) -> None:
    if len(block.items) > 1 or block.asynchronous is not None or block.items[0].asname is not None:
        raise Left("no_sync beside other contexts; give it a `with` statement of its own")

    def replaced(updated: cst.With) -> Any:
        off, guarded = statements_of(
            f"{model}.set_requires_gradient_sync({condition or False})\n"
            f"try:\n    pass\nfinally:\n    {model}.set_requires_gradient_sync(True)\n"
        )
        guarded = guarded.with_changes(body=updated.body)
        return cst.FlattenSentinel([off.with_changes(leading_lines=updated.leading_lines), guarded])

    edits.by_node[block] = replaced


def clip(source: Source, call: cst.Call, edits: Edits) -> None:
    """Rewrite ``model.clip_grad_norm_(...)``."""
    is_used = not isinstance(source.parent(call), cst.Expr)
    # The norm is a DTensor where parameters are.
    edits.imports.add("torch")

    def text(updated: cst.Call) -> str:
        assert isinstance(updated.func, cst.Attribute)
        given = ", ".join([f"{text_of(updated.func.value)}.parameters()", *(_argument(arg) for arg in updated.args)])
        return f"torch.nn.utils.clip_grad_norm_({given}){'.full_tensor()' if is_used else ''}"

    edits.call(call, text)


def _argument(arg: cst.Arg) -> str:
    return text_of(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT))


# -- state dicts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateType:
    """Says which state dicts hold at a place: whole tensors or shards, where, and on which ranks."""

    is_full: bool = True
    offloads: bool = False
    rank0_only: bool = False
    optim_offloads: bool = True
    optim_rank0_only: bool = False


def state_type(source: Source, call: cst.Call) -> StateType:
    """Return what a call of ``state_dict_type`` or ``set_state_dict_type`` asks for."""
    names = ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config")
    given = {name: argument_of(call, name, at) for at, name in enumerate(names)}
    kind = given["state_dict_type"]
    name = "" if kind is None else source.name_of(source.value_of(kind))
    if name not in ("StateDictType.FULL_STATE_DICT", "StateDictType.SHARDED_STATE_DICT"):
        raise Left(f"state dicts of type `{name.rpartition('.')[2] or '?'}`; fully_shard has whole and sharded ones")
    model = _config(source, given["state_dict_config"], default=False)
    optim = _config(source, given["optim_state_dict_config"], default=True)
    return StateType(name == "StateDictType.FULL_STATE_DICT", *model, *optim)


def _config(source: Source, value: cst.BaseExpression | None, *, default: bool) -> tuple[bool, bool]:
    """Return offload_to_cpu and rank0_only of a state-dict config."""
    value = None if value is None else source.value_of(value)
    if value is None or source.code(value) == "None":
        return default, False
    if not isinstance(value, cst.Call) or not source.name_of(value.func).endswith("StateDictConfig"):
        raise Left(f"the config `{source.code(value)}` is not known here")
    found = []
    for at, (name, otherwise) in enumerate((("offload_to_cpu", default), ("rank0_only", False))):
        # rank0_only comes first among positional arguments of no config, so only keywords are sure.
        given = argument_of(value, name, at if at == 0 else None)
        text = str(otherwise) if given is None else source.code(given)
        if text not in ("True", "False"):
            raise Left(f"{name} is `{text}`, neither True nor False")
        found.append(text == "True")
    if any(arg.keyword is None or arg.keyword.value not in ("offload_to_cpu", "rank0_only") for arg in value.args):
        raise Left(f"the config `{source.code(value)}` has other arguments than offload_to_cpu and rank0_only")
    return found[0], found[1]


def _options(edits: Edits, **given: str | bool) -> str:
    """Return the text of the argument for StateDictOptions, or nothing."""
    texts = [f"{name}={value}" for name, value in given.items() if value]
    if not texts:
        return ""
    edits.imports.add(f"{STATE_DICTS}.StateDictOptions")
    return f", options=StateDictOptions({', '.join(texts)})"


def _taken(edits: Edits, *, is_full: bool, offloads: bool, rank0_only: bool, what: str) -> str:
    """Return the options to take a state dict with; what torch has no option for is left or told."""
    if is_full and rank0_only and not offloads:
        raise Left("rank0_only without offload_to_cpu, which torch's functions do not have; set both")
    if is_full and offloads and not rank0_only:
        edits.differs.append(
            f"whole {what} states stay on their device on every rank (offload_to_cpu without rank0_only)"
        )
        offloads = False
    return _options(edits, full_state_dict=is_full, cpu_offload=offloads)


def model_state(source: Source, call: cst.Call, kind: StateType, edits: Edits) -> None:
    """Rewrite ``model.state_dict()``."""
    if call.args:
        raise Left("state_dict with arguments")
    given = _taken(edits, is_full=kind.is_full, offloads=kind.offloads, rank0_only=kind.rank0_only, what="model")
    edits.imports.add(f"{STATE_DICTS}.get_model_state_dict")

    def text(updated: cst.Call) -> str:
        assert isinstance(updated.func, cst.Attribute)
        return f"get_model_state_dict({text_of(updated.func.value)}{given})"

    edits.call(call, text)


def load_model(source: Source, call: cst.Call, kind: StateType, edits: Edits) -> None:
    """Rewrite ``model.load_state_dict(state)``."""
    strict = argument_of(call, "strict", 1)
    if argument_of(call, "state_dict", 0) is None or len(call.args) > 1 + (strict is not None):
        raise Left("load_state_dict with other arguments than the state dict and strict")
    as_said = "" if strict is None or source.code(strict) == "True" else source.code(strict)
    given = _options(edits, full_state_dict=kind.is_full, strict=as_said)
    edits.imports.add(f"{STATE_DICTS}.set_model_state_dict")

    def text(updated: cst.Call) -> str:
        assert isinstance(updated.func, cst.Attribute)
        state = argument_of(updated, "state_dict", 0)
        assert state is not None
        return f"set_model_state_dict({text_of(updated.func.value)}, {text_of(state)}{given})"

    edits.call(call, text)


def optim_state(source: Source, call: cst.Call, kind: StateType, edits: Edits) -> None:
    """Rewrite ``FSDP.optim_state_dict(model, optimizer)``."""
    model, optimizer = argument_of(call, "model", 0), argument_of(call, "optim", 1)
    if model is None or optimizer is None or len(call.args) > 2 or call.args[0].value is not model:
        raise Left("optim_state_dict with other arguments than the model and the optimizer")
    given = _taken(
        edits, is_full=kind.is_full, offloads=kind.optim_offloads, rank0_only=kind.optim_rank0_only, what="optimizer"
    )
    edits.imports.add(f"{STATE_DICTS}.get_optimizer_state_dict")

    def text(updated: cst.Call) -> str:
        of = ", ".join(_argument(arg.with_changes(keyword=None)) for arg in updated.args)
        return f"get_optimizer_state_dict({of}{given})"

    edits.call(call, text)


def load_optim(source: Source, call: cst.Call, kind: StateType, edits: Edits) -> None:
    """Rewrite ``optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))``, in one or two."""
    model, optimizer, state = (
        argument_of(call, name, at) for at, name in enumerate(("model", "optim", "optim_state_dict"))
    )
    if model is None or optimizer is None or state is None or len(call.args) > 3:
        raise Left("optim_state_dict_to_load with other arguments than model, optimizer and state, in this order")
    if kind.is_full and kind.optim_rank0_only:
        raise Left("optim_state_dict_to_load under rank0_only, which broadcasts from rank 0")
    given = _options(edits, full_state_dict=kind.is_full)
    edits.imports.add(f"{STATE_DICTS}.set_optimizer_state_dict")
    holder = source.parent(call)
    load = source.parent(holder) if isinstance(holder, cst.Arg) else None
    if isinstance(holder, cst.Assign):
        arg = source.parent(_only_reader(source, holder))
        load = source.parent(arg) if isinstance(arg, cst.Arg) else None
        edits.statement(alone(source, holder), None)
    wanted = f"{source.code(optimizer)}.load_state_dict"
    if not isinstance(load, cst.Call) or source.code(load.func) != wanted or len(load.args) != 1:
        raise Left(f"what optim_state_dict_to_load returns is not passed to {wanted}")
    _load_sharded(source, state, optimizer, model, edits)
    converted: list[cst.Call] = []  # the call with its own parts edited, which is visited before what loads it

    def convert(updated: cst.Call) -> cst.Call:
        converted.append(updated)
        return updated

    def text(_: cst.Call) -> str:
        texts = (argument_of(converted[-1], name, at) for at, name in enumerate(("model", "optim", "optim_state_dict")))
        return f"set_optimizer_state_dict({', '.join(text_of(each) for each in texts if each is not None)}{given})"

    edits.by_node[call] = convert
    edits.call(load, text)


def _load_sharded(
    source: Source, state: cst.BaseExpression, optimizer: cst.BaseExpression, model: cst.BaseExpression, edits: Edits
) -> None:
    """Rewrite the ``load_sharded_optimizer_state_dict`` that a state comes from, if it does."""
    if not isinstance(state, cst.Subscript) or not isinstance(state.value, cst.Name):
        return
    loaded = source.value_of(state.value)
    if not isinstance(loaded, cst.Call) or source.name_of(loaded.func) != LOAD_SHARDED:
        return
    key, reader = argument_of(loaded, "optimizer_key", 1), argument_of(loaded, "storage_reader", 2)
    line = alone(source, loaded)
    is_alike = key is not None and source.code(state.slice[0]) == source.code(key)
    if (
        key is None
        or reader is None
        or len(loaded.args) > 3
        or not is_alike
        or source.block(line) is not source.block(state)
    ):
        raise Left("load_sharded_optimizer_state_dict, which is not used as its documentation shows")
    name = source.code(state.value)
    edits.imports |= {"torch.distributed.checkpoint", f"{STATE_DICTS}.get_optimizer_state_dict"}
    text = (
        f"{name} = {{{source.code(key)}: get_optimizer_state_dict({source.code(model)}, {source.code(optimizer)})}}\n"
        f"torch.distributed.checkpoint.load({name}, storage_reader={source.code(reader)})\n"
    )
    edits.statement(line, lambda _: text)


METHODS: dict[str, Callable[[Source, cst.Call, Edits], None]] = {"no_sync": no_sync, "clip_grad_norm_": clip}
"""Methods of a wrapped model, each with its rule."""

STATE_METHODS: dict[str, Callable[[Source, cst.Call, StateType, Edits], None]] = {
    "state_dict": model_state,
    "load_state_dict": load_model,
    f"{WRAPPER}.optim_state_dict": optim_state,
    f"{WRAPPER}.optim_state_dict_to_load": load_optim,
}
"""Those that depend on the type of state dicts, and the class methods that do."""

TYPE_SETTERS = (f"{WRAPPER}.state_dict_type", f"{WRAPPER}.set_state_dict_type")
KEPT = (f"{WRAPPER}.summon_full_params",)
"""Class methods that take models of both fronts."""
