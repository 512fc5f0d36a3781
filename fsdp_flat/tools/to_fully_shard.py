"""Rewrites wrapper code to ``fully_shard``: the calls of the wrapper, and what is done with the models that they make.

Either all code of a model is rewritten or none of it, over all files. What may be of a model, but is not sure to be, is
reported and stays.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst

from fsdp_flat.tools.client_settings import is_trainer_arguments, rewrite_yaml, trainer_arguments
from fsdp_flat.tools.migrate_layout import split_import_from
from fsdp_flat.tools.migrate_source import migrate_source, parsed
from fsdp_flat.tools.rewriting import Finding, Migrated
from fsdp_flat.tools.text import shortened
from fsdp_flat.tools.wrapped_models import WRAPPER, Source, Wraps, nodes_below
from fsdp_flat.tools.wrapper_arguments import OUTERMOST, Left, Sharding, sharding_of
from fsdp_flat.tools.wrapper_uses import (
    KEPT,
    METHODS,
    STATE_METHODS,
    TYPE_SETTERS,
    Edits,
    StateType,
    alone,
    state_type,
    statements_of,
    text_of,
)

# Parsing is far slower than reading, so a text search skips most files.
_OF_INTEREST = re.compile(rb"FullyShardedDataParallel|no_sync|clip_grad_norm_|load_state_dict|state_dict\(|fsdp_config")
# Methods that a model may have that is no wrapper, too, or an object of another kind.
_PLAIN_METHODS = ("no_sync", "clip_grad_norm_", "state_dict", "load_state_dict")
# The last name of what is asked for a state dict, or clips, and is no model.
_NO_MODELS = re.compile(
    r"(\w*_)?(optim|optimizer|opt|sched|scheduler|scaler|sampler|loader|dataloader|ema|tokenizer|accelerator|fabric|metrics?)"
    r"|torch|utils"
)
# Calls inside a block of state_dict_type that take no state dict of a model out of sight.
# fmt: off
_HARMLESS = {
    "state_dict", "load_state_dict", "print", "len", "dict", "list", "int", "str", "float", "isinstance", "open",
    "info", "debug", "warning", "items", "keys", "values", "get", "join", "format", "append", "update", "mkdir",
    "exists", "makedirs", "pop", "barrier", "get_rank", "item", "to", "cpu", "clone",
}
# fmt: on
# What a name may be assigned that is removed once nothing reads it: nothing else happens.
# fmt: off
_CONSTRUCTORS = {
    "partial", "MixedPrecision", "CPUOffload", "ModuleWrapPolicy", "CustomPolicy", "FullStateDictConfig",
    "ShardedStateDictConfig", "FullOptimStateDictConfig", "ShardedOptimStateDictConfig", "LocalStateDictConfig",
    "set",
}
# fmt: on


@dataclass(slots=True)
class ModelUse:
    """Describes code that belongs to models, and what replaces it."""

    line: int
    path: Path
    wraps: Wraps
    what: str  # the code, as the report names it
    edits: Edits
    reason: str = ""  # why it stays, or nothing


@dataclass(slots=True)
class _File:
    path: Path
    data: bytes
    source: Source
    uses: list[ModelUse] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def stem(self) -> bytes:
        """The name by which other files import this one."""
        return (self.path.parent.name if self.path.stem == "__init__" else self.path.stem).encode()


def rewrite_files(files: Mapping[Path, bytes]) -> dict[Path, Migrated]:
    """Rewrite the wrapper code of a codebase.

    Args:
        files: the bytes of each file.

    Returns:
        For each file its new bytes and the report. A file that cannot be parsed is returned unchanged, with an error.
    """
    done: dict[Path, Migrated] = {}
    sources: list[_File] = []
    for path, data in files.items():
        if path.suffix in (".yaml", ".yml"):
            done[path] = rewrite_yaml(data)
            continue
        module = parsed(data) if _OF_INTEREST.search(data) else None
        if isinstance(module, cst.Module):
            sources.append(_File(path, data, Source(module)))
        else:
            done[path] = Migrated(data, [] if module is None else [module])
    wraps = frozenset(call for file in sources for call in file.source.wraps)
    setters = _type_setters(sources, wraps)
    has_models = any(_names_wrapper(file.source) for file in sources)
    for file in sources:
        _Uses(file, wraps, setters).collect(has_models=has_models)
    every = [use for file in sources for use in file.uses]
    stays = _left(every)
    for file in sources:
        elsewhere = [data for path, data in files.items() if path != file.path and file.stem in data]
        done[file.path] = _rewritten(file, stays, b" ".join(elsewhere).decode(errors="replace"))
    return {path: done[path] for path in files}


def _names_wrapper(source: Source) -> bool:
    return any(isinstance(node, (cst.Name, cst.Attribute)) and source.name_of(node) == WRAPPER for node in source.nodes)


def _left(uses: list[ModelUse]) -> set[cst.Call]:
    """Return the wrapper calls that stay: those of a use that stays, and those that share a use with them."""
    stays = {wrap for use in uses if use.reason for wrap in use.wraps}
    grown = True
    while grown:
        more = {wrap for use in uses if not stays.isdisjoint(use.wraps) for wrap in use.wraps} - stays
        stays |= more
        grown = bool(more)
    return stays


# -- uses -------------------------------------------------------------------------------------------------------------


def _type_setters(files: list[_File], wraps: Wraps) -> dict[cst.Call, tuple[Source, list[cst.Call]]]:
    """Return for each wrapper call the calls of ``set_state_dict_type`` for its model."""
    found: dict[cst.Call, tuple[Source, list[cst.Call]]] = {}
    for file in files:
        for node in file.source.nodes:
            if isinstance(node, cst.Call) and file.source.name_of(node.func) == TYPE_SETTERS[1] and node.args:
                for wrap in file.source.wraps_of(node.args[0].value) or wraps:
                    found.setdefault(wrap, (file.source, []))[1].append(node)
    return found


class _Uses:
    """Collects the uses of wrapped models in one file."""

    def __init__(self, file: _File, wraps: Wraps, setters: Mapping[cst.Call, tuple[Source, list[cst.Call]]]) -> None:
        self.file, self.source = file, file.source
        self.every, self.setters = wraps, setters

    def collect(self, *, has_models: bool) -> None:
        """Find every use; those that cannot be rewritten have the reason."""
        for node in self.source.nodes:
            if isinstance(node, cst.Call):
                if node in self.source.wraps:
                    self._try(node, frozenset([node]), self._wrap)
                    continue
                if is_trainer_arguments(self.source, node):
                    self._try(node, frozenset(), lambda call, edits: trainer_arguments(self.source, call, edits))
                name = self.source.name_of(node.func)
                if name.startswith(f"{WRAPPER}."):
                    of = self.source.wraps_of(node.args[0].value) if node.args else None
                    # The class's own methods take wrapped models only.
                    self._try(node, of or self.every, self._class_method)
                elif isinstance(node.func, cst.Attribute) and node.func.attr.value in _PLAIN_METHODS:
                    self._method(node, node.func, has_models)
                elif name.endswith(("FullyShardedDataParallelPlugin", "FSDPStrategy")):
                    text = f"{_short(self.source.code(node))}: change it by hand, or its settings in a file"
                    self.file.findings.append(Finding(self.source.line(node), "left", text))
            elif isinstance(node, (cst.Name, cst.Attribute)) and self.source.name_of(node) == WRAPPER:
                self._class_itself(node)
            elif isinstance(node, cst.Attribute) and self._is_taken(node):
                of = self.source.wraps_of(node.value)
                if of:
                    self._try(node, of, self._inner if node.attr.value == "module" else _no_method)

    def _is_taken(self, node: cst.Attribute) -> bool:
        """Return whether an attribute is of wrappers alone, or a method with a rule that is not called at once."""
        parent = self.source.parent(node)
        is_called = isinstance(parent, cst.Call) and parent.func is node
        return node.attr.value in _own_methods() or (not is_called and node.attr.value in {*METHODS, *STATE_METHODS})

    def _try(self, node: Any, wraps: Wraps, rule: Any) -> None:
        edits = Edits(self.source)
        use = ModelUse(self.source.line(node), self.file.path, wraps, _short(self.source.code(node)), edits)
        self.file.uses.append(use)
        try:
            rule(node, edits)
            for name in sorted(edits.imports):
                if self.source.has_other(name):
                    raise Left(f"the name {name.rpartition('.')[2]} means something else here")
        except Left as left:
            use.reason = str(left)

    # -- rules ---------------------------------------------------------------------------------------------------

    def _wrap(self, call: cst.Call, edits: Edits) -> None:
        sharding = sharding_of(self.source, call, is_outermost=len(self.every) == 1)
        edits.imports |= sharding.imports | ({"large_modules"} if sharding.by_size is not None else set())
        edits.differs += sharding.differs
        if not (sharding.chosen or sharding.by_size is not None or sharding.first):
            given = "".join(f", {name}={text}" for name, text in sharding.arguments.items())
            edits.call(call, lambda updated: f"fully_shard({text_of(_module_of(updated))}{given})")
            return
        line = alone(self.source, call)
        (small,) = line.body
        if isinstance(small, cst.Assign) and small.value is call and len(small.targets) == 1:
            target = self.source.code(small.targets[0].target)
        elif isinstance(small, cst.AnnAssign) and small.value is call:
            target = self.source.code(small.target)
        elif isinstance(small, cst.Return) and small.value is call:
            module = _module_of(call)
            target = self.source.code(module) if isinstance(module, cst.Name) else self._fresh("model", "sharded")
        else:
            raise Left("a model with a policy inside a larger expression; give it a name first")
        unit = self._fresh("module", "submodule", "unit")
        comments = [f"{self.source.code(node)}\n" for node in nodes_below(call) if isinstance(node, cst.Comment)]

        def text(updated: Any) -> str:
            given = updated.body[0].value
            module = text_of(_module_of(given))
            typed = self.source.code(small.annotation) if isinstance(small, cst.AnnAssign) else ""
            lines = [*comments, *([] if module == target else [f"{target}{typed} = {module}\n"])]
            lines += [f"{each.format(model=target)}\n" for each in sharding.first]
            lines.append(_loop(sharding, target, unit))
            if isinstance(small, cst.Return):
                lines.append(f"return {target}\n")
            return "".join(lines)

        edits.statement(line, text)

    def _fresh(self, *names: str) -> str:
        for name in names:
            if not self.source.bound(name):
                return name
        raise Left(f"the names {', '.join(names)} are taken; the loop over modules needs one")

    def _class_method(self, call: cst.Call, edits: Edits) -> None:
        name = self.source.name_of(call.func)
        if name in KEPT:
            return
        if name in STATE_METHODS:
            STATE_METHODS[name](
                self.source, call, self._type_at(call, self.file.uses[-1].wraps, call.args[0].value), edits
            )
        elif name in TYPE_SETTERS:
            self._set_type(call, edits, is_block=name == TYPE_SETTERS[0])
        else:
            raise Left(f"{name.rpartition('.')[2]} has no counterpart")

    def _set_type(self, call: cst.Call, edits: Edits, *, is_block: bool) -> None:
        state_type(self.source, call)
        if not is_block:
            if not isinstance(self.source.parent(call), cst.Expr):
                raise Left("the settings that set_state_dict_type returns get a name")
            edits.statement(alone(self.source, call), None)
            return
        item = self.source.parent(call)
        block = self.source.parent(item) if isinstance(item, cst.WithItem) else None
        if not isinstance(block, cst.With) or len(block.items) > 1 or not isinstance(block.body, cst.IndentedBlock):
            raise Left("state_dict_type outside of a `with` statement of its own")
        if block.body.footer:
            raise Left("comments at the end of its block; move them into it")
        if item.asname is not None:  # type: ignore[union-attr]
            raise Left("state_dict_type whose settings get a name")
        model = self.source.code(call.args[0].value)
        for node in nodes_below(block.body):
            if isinstance(node, cst.Call) and self._runs_own_code(node, model):
                raise Left(f"its block calls {self.source.code(node.func)}, whose state dicts it may change too")

        def replaced(updated: Any) -> Any:
            first, *others = updated.body.body
            return cst.FlattenSentinel(
                [first.with_changes(leading_lines=(*updated.leading_lines, *first.leading_lines)), *others]
            )

        edits.by_node[block] = replaced

    def _runs_own_code(self, call: cst.Call, model: str) -> bool:
        """Return whether a call may take a state dict of a model out of sight."""
        name = self.source.name_of(call.func)
        if name.startswith(f"{WRAPPER}."):
            return False
        nodes = [node for arg in call.args for node in (arg.value, *nodes_below(arg.value))]
        if any(isinstance(node, (cst.Name, cst.Attribute)) and self._is_passed(node, model) for node in nodes):
            return True
        if name.startswith("torch."):
            return False
        func = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
        is_own = isinstance(call.func, cst.Name) and isinstance(
            self.source.definition(call.func), (cst.FunctionDef, cst.ImportAlias)
        )
        return is_own or not isinstance(func, cst.Name) or func.value not in _HARMLESS

    def _is_passed(self, node: cst.CSTNode, model: str) -> bool:
        """Return whether a node is a model itself, and not one of whose attributes something is read."""
        parent = self.source.parent(node)
        is_read = isinstance(parent, cst.Attribute) and parent.value is node
        is_ours = isinstance(parent, cst.Arg) and self.source.name_of(
            getattr(self.source.parent(parent), "func", parent)
        ).startswith(f"{WRAPPER}.")
        return self.source.code(node) == model and not is_read and not is_ours

    def _method(self, call: cst.Call, func: cst.Attribute, has_models: bool) -> None:
        name, wraps = func.attr.value, self.source.wraps_of(func.value)
        around = self._type_block(call, func.value)
        if wraps is None and around is not None:
            wraps = self.source.wraps_of(around.args[0].value) or self.every
        if wraps:
            if name in METHODS:
                self._try(call, wraps, lambda node, edits: METHODS[name](self.source, node, edits))
            else:
                of = wraps
                rule = STATE_METHODS[name]
                self._try(
                    call, of, lambda node, edits: rule(self.source, node, self._type_at(node, of, func.value), edits)
                )
        elif has_models and not _NO_MODELS.fullmatch(self.source.code(func.value).lower().rpartition(".")[2]):
            text = f"{_short(self.source.code(call))}: whether this is a wrapped model is not sure"
            self.file.findings.append(Finding(self.source.line(call), "left", text))

    def _type_block(self, node: cst.CSTNode, model: cst.BaseExpression) -> cst.Call | None:
        """Return the call of ``state_dict_type`` for a model in a ``with`` statement around a node."""
        for above in self.source.around(node):
            for item in above.items if isinstance(above, cst.With) else ():
                call = item.item
                if not isinstance(call, cst.Call) or self.source.name_of(call.func) != TYPE_SETTERS[0]:
                    continue
                if self.source.code(call.args[0].value) == self.source.code(model):
                    return call
            if isinstance(above, cst.FunctionDef):
                return None
        return None

    def _type_at(self, node: cst.CSTNode, wraps: Wraps, model: cst.BaseExpression) -> StateType:
        block = self._type_block(node, model)
        if block is not None:
            return state_type(self.source, block)
        kinds = {self._type_of(wrap, node) for wrap in wraps}
        if len(kinds) != 1:
            raise Left("models with state dicts of several types")
        return kinds.pop()

    def _type_of(self, wrap: cst.Call, node: cst.CSTNode) -> StateType:
        if wrap not in self.setters:
            return StateType()
        source, calls = self.setters[wrap]
        if len(calls) > 1 or wrap not in source.wraps or source.block(calls[0]) is not source.block(wrap):
            raise Left("set_state_dict_type is called elsewhere than once, beside the wrapping; use state_dict_type")
        if source is self.source and source.line(node) < source.line(calls[0]):
            raise Left("a state dict before set_state_dict_type; use state_dict_type")
        return state_type(source, calls[0])

    def _inner(self, node: cst.Attribute, edits: Edits) -> None:
        parent = self.source.parent(node)
        if isinstance(parent, cst.AssignTarget) or (
            isinstance(parent, cst.Attribute) and parent.attr.value in _PLAIN_METHODS
        ):
            raise Left("the inner module is assigned, or asked for its own state dict")
        edits.by_node[node] = lambda updated: updated.value

    def _class_itself(self, node: cst.Name | cst.Attribute) -> None:
        parent = self.source.parent(node)
        if isinstance(parent, (cst.ImportAlias, cst.AsName)) or self._is_target(node, parent):
            return
        if node in (getattr(parent, "func", None), parent.value if isinstance(parent, cst.Attribute) else None):
            return  # looked at as a whole
        holder = self.source.parent(parent) if isinstance(parent, (cst.Arg, cst.Element)) else None
        is_test = isinstance(holder, cst.Call) and self.source.code(holder.func) in ("isinstance", "issubclass")
        is_alias = isinstance(parent, cst.Assign)
        if is_alias:
            return  # FSDP = module.FullyShardedDataParallel, whose uses are looked at
        self._try(
            node, self.every, self._class_for_test if is_test or isinstance(parent, cst.Annotation) else _no_class
        )

    def _is_target(self, node: cst.CSTNode, parent: cst.CSTNode | None) -> bool:
        return isinstance(parent, cst.AssignTarget) or any(
            isinstance(above, (cst.Import, cst.ImportFrom)) for above in self.source.around(node)
        )

    def _class_for_test(self, node: Any, edits: Edits) -> None:
        edits.imports.add("fsdp_flat.FSDPModule")
        edits.by_node[node] = lambda _: cst.Name("FSDPModule")


def _no_class(node: Any, edits: Edits) -> None:
    raise Left("the wrapper class is used as a value")


def _no_method(node: Any, edits: Edits) -> None:
    raise Left(f"{node.attr.value} of the wrapper has no counterpart, or does something else")


@functools.cache
def _own_methods() -> frozenset[str]:
    """Return the names that the wrapper has and a module of ``fully_shard`` has not, without those with a rule."""
    from fsdp_flat import FSDPModule, FullyShardedDataParallel

    own = {*dir(FullyShardedDataParallel)} - {*dir(FSDPModule), *METHODS}
    return frozenset({*(name for name in own if not name.startswith("__")), "apply", "module"})


def _module_of(call: cst.Call) -> cst.BaseExpression:
    named = [arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == "module"]
    return named[0] if named else call.args[0].value


def _loop(sharding: Sharding, model: str, unit: str) -> str:
    """Return the statements that make the units of a model, inner ones first."""
    given = [f"{name}={text.replace(OUTERMOST, f'{unit} is {model}')}" for name, text in sharding.arguments.items()]
    if sharding.by_size is not None:
        modules = f"large_modules({model}{', ' if sharding.by_size else ''}{sharding.by_size})"
        return f"for {unit} in [*{modules}, {model}]:\n{_call([unit, *given], 4)}"
    if sharding.chosen is None:
        return _call([model, *given], 0)
    chosen = sharding.chosen.format(module=unit)
    return (
        f"for {unit} in reversed([*{model}.modules()]):\n"
        f"    if {unit} is {model} or {chosen}:\n{_call([unit, *given], 8)}"
    )


def _call(arguments: list[str], indent: int) -> str:
    """Return the statement that calls ``fully_shard``, in one line if it is short enough."""
    space, text = " " * indent, f"fully_shard({', '.join(arguments)})"
    if len(text) > 80:
        text = f"fully_shard(\n{''.join(f'{space}    {each},{chr(10)}' for each in arguments)}{space})"
    return f"{space}{text}\n"


_LARGE_MODULES = '''\
def large_modules(model, min_num_params=int(1e8)):
    """List the modules that size_based_auto_wrap_policy chooses in a model, inner ones first."""
    chosen, taken = [], {}

    def visit(module):
        if module not in taken:
            size = sum(parameter.numel() for parameter in module.parameters())
            inner = 0
            if size >= min_num_params and not isinstance(module, torch.nn.MultiheadAttention):
                inner = sum(visit(child) for child in module.children())
                is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
                if module is not model and not is_list and size - inner >= min_num_params:
                    chosen.append(module)
                    inner = size
            taken[module] = inner
        return taken[module]

    visit(model)
    return chosen


'''


def _short(code: str) -> str:
    return shortened(" ".join(code.split()), 60)


# -- the new text -----------------------------------------------------------------------------------------------------


def _rewritten(file: _File, stays: set[cst.Call], elsewhere: str) -> Migrated:
    """Apply the edits of the models that do not stay, and report on the file.

    Args:
        file: the file.
        stays: wrapper calls that stay.
        elsewhere: the text of files that may import names from this one.
    """
    findings = list(file.findings)
    edits: dict[cst.CSTNode, Any] = {}
    imports: set[str] = set()
    for use in file.uses:
        if use.reason:
            findings.append(Finding(use.line, "left", f"{use.what}: {use.reason}"))
        elif not stays.isdisjoint(use.wraps):
            findings.append(Finding(use.line, "left", f"{use.what}: other code of this model stays"))
        elif use.edits.by_node:
            edits |= use.edits.by_node
            imports |= use.edits.imports
            findings.append(Finding(use.line, "changed", use.what))
            findings += [Finding(use.line, "differs", text) for text in use.edits.differs]
    findings = sorted(set(findings))
    if not edits:
        return Migrated(file.data, findings)
    module = file.source.module.visit(_Editor(edits))
    module = _without_unused(file.source.module, _with_imports(file.source, module, imports), elsewhere)
    first, *others = module.body
    if others and not file.source.module.body[0].leading_lines:
        module = module.with_changes(body=[first.with_changes(leading_lines=_text_lines(first)), *others])
    # Other names of torch's FSDP1 that the file uses move to fsdp_flat.
    return Migrated(migrate_source(module.bytes).data, findings)


def _text_lines(statement: Any) -> list[cst.EmptyLine]:
    """Return the comments above a statement, without the empty lines above them."""
    lines = list(statement.leading_lines)
    while lines and lines[0].comment is None:
        del lines[0]
    return lines


class _Editor(cst.CSTTransformer):
    def __init__(self, edits: Mapping[cst.CSTNode, Any]) -> None:
        self._edits = edits

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        edit = self._edits.get(original_node)
        return super().on_leave(original_node, updated_node) if edit is None else edit(updated_node)


def _without_unused(before: cst.Module, module: cst.Module, elsewhere: str) -> cst.Module:
    """Remove assignments and imports of names that the edits have left without a reader."""
    read_before = _read(before)
    while True:
        unread = read_before - _read(module)
        # Names of ``__all__`` are strings.
        gone = {name for name in unread if not re.search(rf"\b{name}\b", elsewhere) and not _is_quoted(name, module)}
        edits: dict[cst.CSTNode, Any] = {}
        for line in nodes_below(module):
            small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
            if isinstance(small, (cst.Import, cst.ImportFrom)) and not isinstance(small.names, cst.ImportStar):
                kept = [at for at, alias in enumerate(small.names) if _bound_by(alias) not in gone]
                if not kept:
                    edits[line] = lambda _: cst.RemoveFromParent()
                elif len(kept) < len(small.names) and isinstance(small, cst.ImportFrom):
                    edits[small] = lambda updated, kept=kept: split_import_from(updated, {None: kept})[0]
            elif isinstance(small, cst.Assign) and _can_go(small, gone):
                edits[line] = lambda _: cst.RemoveFromParent()
        if not edits:
            return module
        module = module.visit(_Editor(edits))


def _is_quoted(name: str, module: cst.Module) -> bool:
    return re.search(rf"""['"]{name}['"]""", module.code) is not None


def _can_go(line: cst.Assign, gone: set[str]) -> bool:
    """Return whether nothing reads what a line assigns, and nothing else happens where that is computed."""
    if not gone.issuperset(text_of(each.target) for each in line.targets):
        return False
    calls = [
        node for node in (line.value, *nodes_below(line.value)) if isinstance(node, (cst.Call, cst.Await, cst.Yield))
    ]
    return all(isinstance(each, cst.Call) and text_of(each.func).rpartition(".")[2] in _CONSTRUCTORS for each in calls)


def _bound_by(alias: cst.ImportAlias) -> str:
    return alias.evaluated_alias or alias.evaluated_name.partition(".")[0]


class _Readers(cst.CSTVisitor):
    """Collects the names that a module reads."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        return not isinstance(node.target, cst.Name)

    def visit_Name(self, node: cst.Name) -> None:
        self.names.add(node.value)


def _read(module: cst.Module) -> set[str]:
    readers = _Readers()
    module.visit(readers)
    return readers.names


def _with_imports(source: Source, module: cst.Module, needed: set[str]) -> cst.Module:
    """Add the imports that new text needs after the first import of FSDP, and ``large_modules`` after all imports."""
    needs_large_modules = "large_modules" in needed
    needed = needed - {"large_modules"}
    present = {source.name_of(node) for node in source.nodes if isinstance(node, cst.Name)}
    lines = []
    by_module: dict[str, list[str]] = {}
    for name in sorted(needed | ({"torch"} if needs_large_modules else set())):
        home, _, last = name.rpartition(".")
        if name in ("torch", "torch.distributed", "torch.distributed.checkpoint"):
            if not _imports(module, name):
                lines.append(f"import {name}\n")
        elif last not in present and name not in present:
            by_module.setdefault(home, []).append(last)
    for home, names in by_module.items():
        line = f"from {home} import {', '.join(names)}\n"
        several = "".join(f"    {name},\n" for name in names)
        lines.append(line if len(line) <= 100 else f"from {home} import (\n{several})\n")
    body = list(module.body)
    end = max(
        (index + 1 for index, line in enumerate(body) if _is_import(line)), default=int(bool(module.get_docstring()))
    )
    at = next((index + 1 for index, line in enumerate(body) if _is_import(line) and "fsdp" in text_of(line)), end)
    imports = statements_of("".join(lines))
    added = []
    if needs_large_modules:
        blank = cst.EmptyLine(indent=False)
        added += [each.with_changes(leading_lines=(blank, blank)) for each in statements_of(_LARGE_MODULES)]
    return module.with_changes(body=[*body[:at], *imports, *body[at:end], *added, *body[end:]])


def _is_import(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and all(
        isinstance(part, (cst.Import, cst.ImportFrom)) for part in line.body
    )


def _imports(module: cst.Module, name: str) -> bool:
    """Return whether a module has ``import name``, or of something below it, at its top."""
    parts = [part for line in module.body if isinstance(line, cst.SimpleStatementLine) for part in line.body]
    found = [alias for part in parts if isinstance(part, cst.Import) for alias in part.names]
    plain = [alias.evaluated_name for alias in found if alias.asname is None]
    if name.partition(".")[0] in plain:
        # `import torch` binds the name, and `import torch.distributed as dist` has made the attribute.
        plain += [alias.evaluated_name for alias in found]
    return any(each == name or each.startswith(f"{name}.") for each in plain)
