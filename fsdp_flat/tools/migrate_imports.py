"""Finds the imports and uses of torch's FSDP1 in a module, and rewrites them.

:class:`Reached` collects the imports of ``torch.distributed.fsdp`` and the expressions that use them.
:func:`plan_imports` decides for each import and each use. :class:`Rewriter` applies the plan. All code outside the
plan keeps every byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import metadata as meta

from fsdp_flat.compat.torch_names import counterpart, is_fsdp2, is_inside, is_installed_only, is_module, symbol_of
from fsdp_flat.tools.migrate_layout import dotted, split_import_from
from fsdp_flat.tools.rewriting import Finding

Statement = cst.Import | cst.ImportFrom


@dataclass(slots=True, eq=False)
class Use:
    """Describes an expression that refers to an object in ``torch.distributed.fsdp`` through a module."""

    node: cst.BaseExpression
    name: str  # the object's, dotted
    line: int
    is_sure: bool  # no other import may give the same expression another meaning

    @property
    def ours(self) -> str | None:
        """Replacement, or None if unknown: a module used as a value may be used for any name in it."""
        return counterpart(self.name) if self.is_sure and not is_module(self.name) else None


@dataclass(slots=True, eq=False)
class Binding:
    """Describes one name of an import statement."""

    statement: Statement
    alias: cst.ImportAlias  # the part of the statement for this name
    full: str  # the imported object's name, dotted
    local: str  # the name that it binds
    line: int
    is_plain: bool  # ``import a.b``, which binds ``a``
    uses: list[Use] = field(default_factory=list)
    num_loads: int = 0
    scope: meta.Scope | None = None


class Reached(cst.CSTVisitor):
    """Collects the imports and uses of a module."""

    METADATA_DEPENDENCIES = (
        meta.QualifiedNameProvider,
        meta.ScopeProvider,
        meta.ParentNodeProvider,
        meta.PositionProvider,
        meta.ExpressionContextProvider,
    )

    def __init__(self) -> None:
        self.bindings: list[Binding] = []
        self.stars: list[tuple[int, str]] = []
        self.uses: list[Use] = []
        self._roots: list[tuple[Use, cst.Name]] = []
        self._loads: list[cst.Name] = []

    def line(self, node: cst.CSTNode) -> int:
        """Return the line that a node begins on."""
        return int(self.get_metadata(meta.PositionProvider, node).start.line)

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            full = alias.evaluated_name
            local = alias.evaluated_alias or full.partition(".")[0]
            self._bind(node, alias, full, local, is_plain=alias.asname is None)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        module = cst.helpers.get_full_name_for_node(node.module) if node.module is not None else None
        if node.relative or module is None:
            return False
        if isinstance(node.names, cst.ImportStar):
            if is_inside(module):
                self.stars.append((self.line(node), module))
            return False
        for alias in node.names:
            name = alias.evaluated_name
            self._bind(node, alias, f"{module}.{name}", alias.evaluated_alias or name, is_plain=False)
        return False

    def _bind(self, statement: Statement, alias: cst.ImportAlias, full: str, local: str, *, is_plain: bool) -> None:
        binding = Binding(statement, alias, full, local, self.line(statement), is_plain)
        binding.scope = self.get_metadata(meta.ScopeProvider, statement, None)
        self.bindings.append(binding)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self._look_at(node)

    def visit_Name(self, node: cst.Name) -> None:
        if self.get_metadata(meta.ExpressionContextProvider, node, None) is meta.ExpressionContext.LOAD:
            self._loads.append(node)
            self._look_at(node)

    def _look_at(self, node: cst.Name | cst.Attribute) -> None:
        names = imported_names(self, node)
        peer = [name for name in names if is_inside(name) and symbol_of(name) == name]
        root = root_of(node)
        if not peer or root is None:
            return
        name = peer[0]
        parent = self.get_metadata(meta.ParentNodeProvider, node)
        if is_module(name) and isinstance(parent, cst.Attribute) and parent.value is node:
            return  # the dotted name continues; the whole expression is visited separately
        if isinstance(node, cst.Name) and not is_module(name):
            return  # the name itself was imported: its import changes, the use stays
        use = Use(node, name, self.line(node), is_sure=len(names) == 1)
        self.uses.append(use)
        self._roots.append((use, root))

    def leave_Module(self, original_node: cst.Module) -> None:
        """Assign uses and reads to the imports that bind their names."""
        for use, root in self._roots:
            for binding in self._through(root):
                binding.uses.append(use)
        counted = {binding.local for binding in self.bindings if binding.is_plain and is_inside(binding.full)}
        for name in self._loads:
            if name.value in counted:
                for binding in self._through(name):
                    binding.num_loads += 1

    def _through(self, name: cst.Name) -> list[Binding]:
        """Return the imports that may bind a name."""
        scope = self.get_metadata(meta.ScopeProvider, name, None)
        assigned = {id(getattr(found, "node", None)) for found in scope[name.value]} if scope is not None else set()
        return [b for b in self.bindings if b.local == name.value and id(b.statement) in assigned]


def imported_names(visitor: cst.CSTVisitor, node: cst.CSTNode) -> list[str]:
    """Return the dotted names of imported objects that an expression may refer to."""
    found = visitor.get_metadata(meta.QualifiedNameProvider, node, frozenset())
    return sorted({name.name for name in found if name.source is meta.QualifiedNameSource.IMPORT})


def root_of(node: cst.BaseExpression) -> cst.Name | None:
    """Return the first name of ``a.b.c``; None for any other expression."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None


@dataclass(slots=True)
class Plan:
    """Holds the changes planned for a module."""

    targets: dict[cst.ImportAlias, Target] = field(default_factory=dict)  # replacements of parts of imports
    added: dict[Statement, list[str]] = field(default_factory=dict)  # imports to add after a statement
    rewritten: dict[cst.BaseExpression, str] = field(default_factory=dict)  # new dotted names
    # By ``(line, old module, new module)``, the names that move between these modules.
    moved: dict[tuple[int, str, str], list[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # other ones

    def move(self, line: int, old: str, new: str) -> None:
        """Record that a name moved; both names are dotted."""
        (old_module, _, _), (new_module, _, name) = old.rpartition("."), new.rpartition(".")
        names = self.moved.setdefault((line, old_module, new_module), [])
        if name not in names:
            names.append(name)

    def report(self) -> list[Finding]:
        """Return all findings in the order of lines."""
        moved = [
            Finding(line, "changed", f"{', '.join(names)}: from {new} instead of {old}")
            for (line, old, new), names in self.moved.items()
        ]
        return sorted({*moved, *self.findings})

    def add(self, line: int, kind: str, text: str) -> None:
        """Record a finding."""
        self.findings.append(Finding(line, kind, text))


@dataclass(frozen=True, slots=True)
class Target:
    """Describes the replacement of one part of an import: one of these."""

    module: str | None = None  # the module to import the same name from
    # ``import`` statements, each a dotted name and the name of its ``as`` clause or None.
    imports: tuple[tuple[str, str | None], ...] = ()


def plan_imports(reached: Reached) -> Plan:
    """Plan the replacement of every import of, and every dotted path into, ``torch.distributed.fsdp``."""
    plan = Plan()
    for line, module in reached.stars:
        plan.add(line, "check", f"`from {module} import *` does not say which names are used; name them")
    for binding in reached.bindings:
        if is_inside(binding.full):
            if binding.is_plain or is_module(binding.full):
                _plan_module(plan, binding, reached.bindings)
            else:
                _plan_symbol(plan, binding)
        else:
            _rewrite_uses(plan, binding, reached.bindings)
    replaced = [binding for binding in reached.bindings if binding.alias in plan.targets and not binding.is_plain]
    moved = {id(use) for binding in replaced for use in binding.uses}
    for use in {id(use): use for binding in reached.bindings for use in binding.uses}.values():
        if use.node not in plan.rewritten and id(use) not in moved:
            _report_left(plan, use.line, use.name, is_sure=use.is_sure)
    _report_mixture(plan, reached)
    return plan


def _plan_symbol(plan: Plan, binding: Binding) -> None:
    ours = counterpart(binding.full)
    if ours is None:
        _report_left(plan, binding.line, binding.full)
        return
    plan.targets[binding.alias] = Target(module=ours.rpartition(".")[0])
    plan.move(binding.line, binding.full, ours)


def _plan_module(plan: Plan, binding: Binding, bindings: Sequence[Binding]) -> None:
    ours = counterpart(binding.full)
    # All uses of its name may stay as they are.
    fits = ours is not None and all(
        counterpart(use.name) == ours + use.name.removeprefix(binding.full) and not is_module(use.name)
        for use in binding.uses
    )
    if not binding.is_plain and ours is not None and fits:
        module = ours.rpartition(".")[0]
        if isinstance(binding.statement, cst.ImportFrom) and module:
            plan.targets[binding.alias] = Target(module=module)
        else:
            plan.targets[binding.alias] = Target(imports=((ours, None if binding.local == ours else binding.local),))
        plan.add(binding.line, "changed", f"module {binding.full} is now {ours}")
        return
    if not binding.is_plain and not binding.uses:
        _report_left(plan, binding.line, binding.full)
        return
    _rewrite_uses(plan, binding, bindings)
    if not binding.uses or any(use.ours is None for use in binding.uses):
        return
    imports: list[tuple[str, str | None]] = []
    if binding.is_plain:
        # The first of the imports that bind the name in its scope keeps it bound, if it is still read.
        others = [b for b in bindings if b is not binding and (b.local, b.scope) == (binding.local, binding.scope)]
        is_first = all(is_inside(other.full) and other.line >= binding.line for other in others)
        if is_first and binding.num_loads > len(binding.uses):
            imports.append(("torch.distributed", None))
        if ours is not None:
            imports.append((ours, None))
    plan.targets[binding.alias] = Target(imports=tuple(imports))


def _rewrite_uses(plan: Plan, binding: Binding, bindings: Sequence[Binding]) -> None:
    """Rewrite the uses of a name to our full dotted names, and add the imports that these need."""
    for use in binding.uses:
        ours = use.ours
        if ours is None:
            continue
        nearest = max(
            (b for b in bindings if use in b.uses), key=lambda b: len(b.full) if is_inside(use.name, b.full) else 0
        )
        if nearest is binding:
            plan.rewritten[use.node] = ours
            plan.move(use.line, use.name, ours)
            needed = plan.added.setdefault(binding.statement, [])
            module = ours.rpartition(".")[0]
            if module not in needed:
                needed.append(module)


def _report_left(plan: Plan, line: int, name: str, *, is_sure: bool = True) -> None:
    if is_fsdp2(name):
        return  # reported once for the file, where FSDP1 is used beside it
    if not is_sure:
        plan.add(line, "check", f"{name} may come from another import too; it is left as it is")
    elif counterpart(name) is not None and is_module(name):
        plan.add(line, "check", f"the module {name} is used as a value; it is left as it is")
    elif is_installed_only(name):
        plan.add(line, "check", f"{name} stays torch's; it takes fsdp_flat's wrappers after fsdp_flat.install()")
    else:
        plan.add(line, "check", f"{name} has no counterpart in fsdp_flat; it is left as it is")


def _report_mixture(plan: Plan, reached: Reached) -> None:
    """Report the names of FSDP2, which stay in torch, in a file that also uses FSDP1."""
    if not plan.targets and not plan.rewritten:
        return
    found = [(binding.line, binding.full) for binding in reached.bindings if is_inside(binding.full)]
    found += [(use.line, use.name) for use in reached.uses]
    for line, name in sorted({(line, name) for line, name in found if is_fsdp2(name)}):
        last = name.rpartition(".")[2]
        plan.add(line, "check", f"{last} is FSDP2 and stays in torch; it does not act on what fsdp_flat wraps")


class Rewriter(cst.CSTTransformer):
    """Applies a plan to a module."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def visit_Import(self, node: Any) -> bool:
        return False

    visit_ImportFrom = visit_Import

    def leave_Name(self, original_node: Any, updated_node: Any) -> cst.BaseExpression:
        ours = self.plan.rewritten.get(original_node)
        if ours is None:
            return updated_node
        return cst.parse_expression(ours).with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)

    leave_Attribute = leave_Name

    def leave_Import(
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.FlattenSentinel[Statement] | Statement:
        kept: list[cst.ImportAlias] = []
        imports: list[tuple[str, str | None]] = []
        present: set[str] = set()
        for alias in original_node.names:
            target = self.plan.targets.get(alias)
            if target is None:
                kept.append(alias)
            elif len(target.imports) == 1:
                (name, _) = target.imports[0]
                kept.append(alias.with_changes(name=dotted(name)))
                if alias.asname is None:
                    present.add(name)
            else:
                imports += target.imports
        statements: list[Statement] = []
        if kept:
            if len(kept) < len(original_node.names):
                kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            statements.append(updated_node.with_changes(names=kept))
        return self._with_imports(original_node, statements, imports, present)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.FlattenSentinel[Statement] | Statement:
        if isinstance(original_node.names, cst.ImportStar):
            return updated_node
        groups: dict[str | None, list[int]] = {}
        imports: list[tuple[str, str | None]] = []
        for index, alias in enumerate(original_node.names):
            target = self.plan.targets.get(alias)
            if target is not None and target.module is None:
                imports += target.imports
            else:
                groups.setdefault(None if target is None else target.module, []).append(index)
        statements: list[Statement] = list(split_import_from(original_node, groups))
        return self._with_imports(original_node, statements, imports)

    def _with_imports(
        self,
        original: Statement,
        statements: list[Statement],
        imports: Iterable[tuple[str, str | None]],
        present: Collection[str] = (),
    ) -> cst.FlattenSentinel[Statement] | Statement:
        """Return the statements that replace one, with the imports that rewritten uses need.

        Args:
            original: the statement.
            statements: the statements that keep the rest of its names.
            imports: further imports that replace it.
            present: modules that ``statements`` import by their own names.
        """
        added = (name for name in self.plan.added.get(original, ()) if name not in present)
        wanted = list(dict.fromkeys([*imports, *((name, None) for name in added)]))
        plain = [name for name, local in wanted if local is None]
        for name, local in wanted:
            if local is None and any(other != name and is_inside(other, name) for other in plain):
                continue  # `import a.b` binds `a` as well
            statements.append(_import(name, local))
        return statements[0] if len(statements) == 1 else cst.FlattenSentinel(statements)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.FlattenSentinel[cst.SimpleStatementLine] | cst.SimpleStatementLine:
        if len(original_node.body) != 1 or len(updated_node.body) < 2:
            return updated_node
        first, *others = updated_node.body
        comment = updated_node.trailing_whitespace.comment
        # A directive to a linter or type checker applies to every part of the import.
        goes_on = comment is not None and comment.value.lstrip("# ").startswith(("noqa", "type:", "pylint", "isort"))
        newline = cst.TrailingWhitespace(newline=updated_node.trailing_whitespace.newline)
        trailing = updated_node.trailing_whitespace if goes_on else newline
        return cst.FlattenSentinel(
            [
                updated_node.with_changes(body=[first]),
                *(cst.SimpleStatementLine([other], trailing_whitespace=trailing) for other in others),
            ]
        )


def _import(name: str, local: str | None) -> cst.Import:
    asname = None if local is None else cst.AsName(cst.Name(local))
    return cst.Import([cst.ImportAlias(dotted(name), asname)])
