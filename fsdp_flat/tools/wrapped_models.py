"""Finds the expressions of a module that are models in FSDP1's wrapper, by following names through its code.

A name counts where its last assignment before the use is sure to be the one that holds: it stands in a block around the
use, and no other one follows in a loop around both. Parameters of functions count if every call in the file passes such
a model, and calls if every ``return`` does. Everything else is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst
from libcst import metadata as meta

WRAPPER = "FullyShardedDataParallel"
_FSDP_MODULES = ("torch.distributed.fsdp", "fsdp_flat")
_PARTS_LEFT_OUT = ("fully_sharded_data_parallel", "api")
_PROVIDERS = (meta.QualifiedNameProvider, meta.ScopeProvider, meta.ParentNodeProvider, meta.PositionProvider)

# The wrapper calls that an expression may come from.
Wraps = frozenset[cst.Call]


class Source:
    """Holds the syntax tree of one module and answers what its names stand for."""

    def __init__(self, module: cst.Module) -> None:
        self.module = module
        found: Any = meta.MetadataWrapper(module, unsafe_skip_copy=True).resolve_many(_PROVIDERS)
        self._names, self._scopes, self._parents, self._positions = (found[each] for each in _PROVIDERS)
        self.nodes = list(nodes_below(module))
        self.wraps = [node for node in self.nodes if isinstance(node, cst.Call) and self.name_of(node.func) == WRAPPER]
        self._in_progress: set[cst.CSTNode] = set()

    # -- places --------------------------------------------------------------------------------------------------

    def code(self, node: cst.CSTNode) -> str:
        """Return the text of a node."""
        return self.module.code_for_node(node).strip()

    def line(self, node: cst.CSTNode) -> int:
        """Return the line that a node begins on."""
        return int(self._positions[node].start.line)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node that holds another."""
        return self._parents.get(node)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around another, from the inside."""
        found = self.parent(node)
        while found is not None:
            yield found
            found = self.parent(found)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the statement of a block, or of the module, that a node is in."""
        for above in (node, *self.around(node)):
            if isinstance(self.parent(above), (cst.IndentedBlock, cst.Module)):
                return above
        return self.module

    def block(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the block of the statement that a node is in."""
        return self.parent(self.statement(node))

    def _at(self, node: cst.CSTNode) -> tuple[int, int]:
        start = self._positions[node].start
        return start.line, start.column

    # -- names ---------------------------------------------------------------------------------------------------

    def name_of(self, node: cst.CSTNode) -> str:
        """Return the dotted name of an imported object, without the FSDP package that it is imported from, or ""."""
        found = self._names.get(node, ())
        found = found() if callable(found) else found
        imported = [each.name for each in found if each.source is meta.QualifiedNameSource.IMPORT]
        for name in imported:
            for package in _FSDP_MODULES:
                if name.startswith(f"{package}."):
                    parts = name.removeprefix(f"{package}.").split(".")
                    return ".".join(part for part in parts if part not in _PARTS_LEFT_OUT)
        if imported:
            return str(imported[0])
        # FSDP = module.FullyShardedDataParallel
        if isinstance(node, cst.Attribute) and self.name_of(node.value) == WRAPPER:
            return f"{WRAPPER}.{node.attr.value}"
        if isinstance(node, cst.Name):
            value = self.value_of(node)
            is_path = value is not node and isinstance(value, (cst.Name, cst.Attribute))
            if is_path and self.name_of(value) == WRAPPER:
                return WRAPPER
        return ""

    def has_other(self, full: str) -> bool:
        """Return whether the last part of a dotted name is bound to something else than an import of the whole."""
        name = full.rpartition(".")[2]
        return any(each.name != full for scope in self._all_scopes() for each in scope.get_qualified_names_for(name))

    def _all_scopes(self) -> set[meta.Scope]:
        return {scope for scope in self._scopes.values() if scope is not None}

    def bound(self, name: str) -> bool:
        """Return whether the module gives a name a meaning anywhere."""
        return any(isinstance(node, cst.Name) and node.value == name for node in self.nodes)

    def references(self, node: cst.FunctionDef | cst.Name) -> list[cst.CSTNode]:
        """Return the places that read what a function definition or an assignment to a name binds."""
        name = node.name if isinstance(node, cst.FunctionDef) else node
        scope = self._scopes[node]
        return [
            access.node
            for assigned in scope[name.value]
            if getattr(assigned, "node", None) is node
            for access in assigned.references
        ]

    def is_bound_once(self, name: str) -> bool:
        """Return whether a name has the same meaning in all of the file: at most one place binds it."""
        bound = {id(each) for scope in self._all_scopes() for each in scope[name] if hasattr(each, "node")}
        return len(bound) < 2

    def definition(self, name: cst.Name) -> cst.CSTNode | None:
        """Return what binds a name at a place: a name in an assignment, a parameter, a function; None if unknown."""
        scope = self._scopes.get(name)
        found = [] if scope is None else list(scope[name.value])
        nodes = [each.node for each in found if hasattr(each, "node")]
        if not nodes or len(nodes) < len(found):
            return None
        around = set(self.around(name))
        while isinstance(scope, meta.ComprehensionScope):
            scope = scope.parent
        if any(each.scope is not scope for each in found):
            return nodes[0] if len(nodes) == 1 else None
        own = self.statement(name)
        before = [node for node in nodes if self._at(node) < self._at(name) and self.statement(node) is not own]
        if not before:
            return None
        last = max(before, key=self._at)
        loops = {each for each in around if isinstance(each, (cst.For, cst.While))}
        others = [node for node in nodes if self._at(node) > self._at(last)]
        if any(loops.intersection(self.around(node)) for node in others):
            return None
        return last if isinstance(last, cst.Param) or self.block(last) in around else None

    def value_of(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """Return the expression that a name was assigned, through several names; any other expression as it is."""
        for _ in range(8):
            found = self._assigned(self.definition(node)) if isinstance(node, cst.Name) else None
            if found is None or found[1] is not None:
                return node
            node = found[0]
        return node

    def _assigned(self, target: cst.CSTNode | None) -> tuple[cst.BaseExpression, int | None] | None:
        """Return the value of an assignment to a target, and the target's index if it is one of several."""
        parent, index = self.parent(target) if target is not None else None, None
        if isinstance(parent, cst.Element):
            several = self.parent(parent)
            if not isinstance(several, cst.Tuple):
                return None
            index, parent = several.elements.index(parent), self.parent(several)
        holder = self.parent(parent) if isinstance(parent, cst.AssignTarget) else parent
        if isinstance(holder, cst.Assign) and len(holder.targets) == 1:
            return holder.value, index
        if isinstance(holder, cst.AnnAssign) and holder.target is target and holder.value is not None:
            return holder.value, index
        return None

    # -- models --------------------------------------------------------------------------------------------------

    def wraps_of(self, node: cst.BaseExpression, index: int | None = None) -> Wraps | None:
        """Return the wrapper calls that an expression (or its element at an index) comes from; None if unknown."""
        if node in self._in_progress:
            return None
        self._in_progress.add(node)
        try:
            return self._wraps_of(node, index)
        finally:
            self._in_progress.discard(node)

    def _wraps_of(self, node: cst.BaseExpression, index: int | None) -> Wraps | None:
        if index is not None and isinstance(node, cst.Tuple):
            return self.wraps_of(node.elements[index].value) if index < len(node.elements) else None
        if isinstance(node, cst.Call):
            if node in self.wraps:
                return frozenset([node])
            function = self.definition(node.func) if isinstance(node.func, cst.Name) else None
            if not isinstance(function, cst.FunctionDef):
                return None
            given = [each.value for each in nodes_below(function) if isinstance(each, cst.Return)]
            return self._all_of([(value, index) for value in given])
        if index is not None:
            return None
        if isinstance(node, cst.Attribute):
            return self._all_of([(value, None) for value in self._attribute_values(node)], most=1)
        defined = self.definition(node) if isinstance(node, cst.Name) else None
        if isinstance(defined, cst.Param):
            return self._all_of([(value, None) for value in self._passed_as(defined)])
        found = self._assigned(defined)
        return None if found is None else self.wraps_of(*found)

    def _all_of(self, values: list[tuple[cst.BaseExpression | None, int | None]], most: int = 100) -> Wraps | None:
        found = [None if value is None else self.wraps_of(value, index) for value, index in values]
        known = [wraps for wraps in found if wraps is not None]
        return frozenset().union(*known) if known and len(known) == len(found) <= most else None

    def _attribute_values(self, node: cst.Attribute) -> list[cst.BaseExpression | None]:
        """Return all values that ``self.x`` is given in the class that a place is in."""
        owner = next((each for each in self.around(node) if isinstance(each, cst.ClassDef)), None)
        if owner is None or self.code(node.value) != "self":
            return []
        targets = [
            each
            for each in nodes_below(owner)
            if isinstance(each, cst.Attribute) and each.attr.value == node.attr.value
        ]
        values: list[cst.BaseExpression | None] = []
        for target in targets:
            if isinstance(self.parent(target), (cst.AssignTarget, cst.AnnAssign)) and self.code(target.value) == "self":
                found = self._assigned(target)
                values.append(None if found is None else found[0])
        return values

    def _passed_as(self, param: cst.Param) -> list[cst.BaseExpression | None]:
        """Return what the calls of a function of the module pass for a parameter; [None] if that is unknown."""
        parameters = self.parent(param)
        function = self.parent(parameters) if isinstance(parameters, cst.Parameters) else None
        if not isinstance(function, cst.FunctionDef) or self.parent(function) is not self.module:
            return [None]
        assert isinstance(parameters, cst.Parameters)
        at = parameters.params.index(param) if param in parameters.params else None
        values: list[cst.BaseExpression | None] = []
        for place in self.references(function):
            call = self.parent(place)
            if not isinstance(call, cst.Call) or call.func is not place:
                return [None]
            values.append(argument_of(call, param.name.value, at))
        return values


def argument_of(call: cst.Call, name: str, position: int | None) -> cst.BaseExpression | None:
    """Return what a call passes for a parameter, or None, also where a star may pass it."""
    if any(arg.star for arg in call.args):
        return None
    named = [arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == name]
    plain = [arg.value for arg in call.args if arg.keyword is None]
    if named:
        return named[0]
    return plain[position] if position is not None and position < len(plain) else None


def nodes_below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield all nodes in a node, each before those in it."""
    for child in node.children:
        yield child
        yield from nodes_below(child)
