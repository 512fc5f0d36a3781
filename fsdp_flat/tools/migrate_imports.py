"""Finds the imports and uses of torch's FSDP1 in a module, and rewrites them.

:class:`Reached` collects the imports of ``torch.distributed.fsdp`` and the expressions that use them.
:func:`plan_imports` decides for each import and each use. :class:`Rewriter` applies the plan. All code outside the
plan keeps every byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import metadata as meta

from fsdp_flat.compat.torch_names import counterpart, is_fsdp2, is_inside, is_installed_only, is_module, symbol_of
from fsdp_flat.tools.migrate_layout import dotted, split_import_from

Statement = cst.Import | cst.ImportFrom


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """Describes one line of the report, which is about a line of the original file.

    Attributes:
        line: its number, 0 for the whole file.
        kind: "changed", "differs" (behaves differently), "check" (cannot be judged) or "error".
    """

    line: int
    kind: str
    text: str


@dataclass(slots=True, eq=False)
class Use:
    """Describes an expression that refers to an object in ``torch.distributed.fsdp`` through a module."""

    node: cst.BaseExpression
    root: cst.Name  # its first name
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
        self.bindings.append(Binding(statement, alias, full, local, self.line(statement), is_plain))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self._look_at(node)

    def visit_Name(self, node: cst.Name) -> None:
        if self.get_metadata(meta.ExpressionContextProvider, node, None) is meta.ExpressionContext.LOAD:
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
        self.uses.append(Use(node, root, name, self.line(node), is_sure=len(names) == 1))

    def leave_Module(self, original_node: cst.Module) -> None:
        """Assign uses to the imports that may bind their first names."""
        for use in self.uses:
            name, scope = use.root.value, self.get_metadata(meta.ScopeProvider, use.root, None)
            assigned = {id(getattr(each, "node", None)) for each in scope[name]} if scope is not None else set()
            for binding in self.bindings:
                if binding.local == name and id(binding.statement) in assigned:
                    binding.uses.append(use)


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

    modules: dict[cst.ImportAlias, str] = field(default_factory=dict)  # to import the same name from
    renamed: dict[cst.ImportAlias, str] = field(default_factory=dict)  # modules, by the names of ours
    dropped: set[cst.ImportAlias] = field(default_factory=set)
    # ``import`` statements to add after a statement, each a dotted name and the name of its ``as`` clause or None.
    added: dict[Statement, list[tuple[str, str | None]]] = field(default_factory=dict)
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

    @property
    def changes(self) -> bool:
        """True if anything changes."""
        return bool(self.modules or self.renamed or self.dropped or self.rewritten)

    def report(self) -> list[Finding]:
        """Return all findings in the order of lines."""
        moved = [
            Finding(line, "changed", f"{', '.join(names)}: from {new} instead of {old}")
            for (line, old, new), names in self.moved.items()
        ]
        return sorted({*moved, *self.findings})

    def check(self, line: int, text: str) -> None:
        """Record a finding for a person to judge."""
        self.findings.append(Finding(line, "check", text))


def plan_imports(reached: Reached) -> Plan:
    """Plan the replacement of every import of, and every dotted path into, ``torch.distributed.fsdp``."""
    plan = Plan()
    for line, module in reached.stars:
        plan.check(line, f"`from {module} import *` does not say which names are used; name them")
    handled: set[int] = set()  # uses that are rewritten, or mean ours as they are
    for binding in reached.bindings:
        is_reached = is_inside(binding.full)
        ours = counterpart(binding.full) if is_reached else None
        if is_reached and not binding.is_plain and not is_module(binding.full):
            if ours is None:
                _report_left(plan, binding.line, binding.full)
            else:
                plan.modules[binding.alias] = ours.rpartition(".")[0]
                plan.move(binding.line, binding.full, ours)
        elif is_reached and not binding.is_plain and not binding.uses and ours is None:
            _report_left(plan, binding.line, binding.full)
        elif ours is not None and not binding.is_plain and _fits(binding, ours):
            _replace_module(plan, binding, ours)
            handled.update(map(id, binding.uses))
        else:
            handled.update(map(id, _rewrite_uses(plan, binding, reached.bindings)))
            if is_reached and binding.uses and all(use.ours is not None for use in binding.uses):
                if binding.is_plain:
                    plan.renamed[binding.alias] = "torch.distributed"  # the name ``torch`` stays bound
                else:
                    plan.dropped.add(binding.alias)
    for use in {id(use): use for binding in reached.bindings for use in binding.uses}.values():
        if id(use) not in handled:
            _report_left(plan, use.line, use.name, is_sure=use.is_sure)
    _report_mixture(plan, reached)
    return plan


def _fits(binding: Binding, ours: str) -> bool:
    """Return whether all uses of a module's name may stay as they are once the name means our module."""
    return all(
        counterpart(use.name) == ours + use.name.removeprefix(binding.full) and not is_module(use.name)
        for use in binding.uses
    )


def _replace_module(plan: Plan, binding: Binding, ours: str) -> None:
    """Bind a name to our module instead."""
    package = ours.rpartition(".")[0]
    if isinstance(binding.statement, cst.Import):
        plan.renamed[binding.alias] = ours
    elif package:
        plan.modules[binding.alias] = package
    else:
        plan.dropped.add(binding.alias)
        plan.added.setdefault(binding.statement, []).append((ours, None if binding.local == ours else binding.local))
    plan.findings.append(Finding(binding.line, "changed", f"module {binding.full} is now {ours}"))


def _rewrite_uses(plan: Plan, binding: Binding, bindings: Sequence[Binding]) -> list[Use]:
    """Rewrite uses of a name to our full dotted names, and add the imports that these need; return those uses."""
    rewritten = []
    for use in binding.uses:
        ours = use.ours
        if ours is None:
            continue
        nearest = max(
            (b for b in bindings if use in b.uses), key=lambda b: len(b.full) if is_inside(use.name, b.full) else 0
        )
        if nearest is binding:
            rewritten.append(use)
            plan.rewritten[use.node] = ours
            plan.move(use.line, use.name, ours)
            plan.added.setdefault(binding.statement, []).append((ours.rpartition(".")[0], None))
    return rewritten


def _report_left(plan: Plan, line: int, name: str, *, is_sure: bool = True) -> None:
    if is_fsdp2(name):
        return  # reported once for the file, where FSDP1 is used beside it
    if not is_sure:
        plan.check(line, f"{name} may come from another import too; it is left as it is")
    elif counterpart(name) is not None and is_module(name):
        plan.check(line, f"the module {name} is used as a value; it is left as it is")
    elif is_installed_only(name):
        plan.check(line, f"{name} stays torch's; it takes fsdp_flat's wrappers after fsdp_flat.install()")
    else:
        plan.check(line, f"{name} has no counterpart in fsdp_flat; it is left as it is")


def _report_mixture(plan: Plan, reached: Reached) -> None:
    """Report the names of FSDP2, which stay in torch, in a file that also uses FSDP1."""
    if not plan.changes:
        return
    found = [(binding.line, binding.full) for binding in reached.bindings if is_inside(binding.full)]
    found += [(use.line, use.name) for use in reached.uses]
    for line, name in sorted({(line, name) for line, name in found if is_fsdp2(name)}):
        last = name.rpartition(".")[2]
        plan.check(line, f"{last} is FSDP2 and stays in torch; it does not act on what fsdp_flat wraps")


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
        renamed = self.plan.renamed
        kept = [
            alias.with_changes(name=dotted(renamed[alias])) if alias in renamed else alias
            for alias in original_node.names
            if alias not in self.plan.dropped
        ]
        if not kept:
            return self._with_added(original_node, [])
        if len(kept) < len(original_node.names):
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return self._with_added(original_node, [updated_node.with_changes(names=kept)])

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.FlattenSentinel[Statement] | Statement:
        if isinstance(original_node.names, cst.ImportStar):
            return updated_node
        groups: dict[str | None, list[int]] = {}
        for index, alias in enumerate(original_node.names):
            if alias not in self.plan.dropped:
                groups.setdefault(self.plan.modules.get(alias), []).append(index)
        return self._with_added(original_node, split_import_from(original_node, groups))

    def _with_added(
        self, original: Statement, replacements: Sequence[Statement]
    ) -> cst.FlattenSentinel[Statement] | Statement:
        """Return the statements that replace one, with the imports that rewritten uses need."""
        statements = list(replacements)
        added = list(dict.fromkeys(self.plan.added.get(original, ())))
        plain = [name for name, local in added if local is None]
        for name, local in added:
            if local is None and any(other != name and is_inside(other, name) for other in plain):
                continue  # `import a.b` binds `a` as well
            asname = None if local is None else cst.AsName(cst.Name(local))
            statements.append(cst.Import([cst.ImportAlias(dotted(name), asname)]))
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
