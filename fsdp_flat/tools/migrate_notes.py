"""Finds code in a migrated module that behaves differently, or that only its author can judge.

docs/differences.md has the full list.
"""

from __future__ import annotations

import re

import libcst as cst
from libcst import metadata as meta

from fsdp_flat.compat.torch_names import ABSENT_ATTRIBUTES, FSDP2_NAMES, PEER, is_fsdp2, is_inside
from fsdp_flat.tools.migrate_imports import Finding, imported_names, root_of

WRAPPER = "FullyShardedDataParallel"

_HYBRID = (
    "hybrid sharding averages gradients on (N, 1) meshes too; with a policy alone, on CPUs, it shards over the ranks "
    "of a node that the launcher names"
)
_NO_MATCH = "a policy whose classes match no module warns"
_NAMES = {
    "ShardingStrategy.NO_SHARD": "NO_SHARD warns with another text than FSDP1's",
    "ShardingStrategy.HYBRID_SHARD": _HYBRID,
    "ShardingStrategy._HYBRID_SHARD_ZERO2": _HYBRID,
    "FullyShardedDataParallel.state_dict_type": "state_dict_type gives no FutureWarning, and the previous type comes "
    "back also after an exception",
    "FullyShardedDataParallel.set_state_dict_type": "set_state_dict_type gives no FutureWarning",
    "wrap.ModuleWrapPolicy": _NO_MATCH,
    "wrap.transformer_auto_wrap_policy": _NO_MATCH,
    "wrap.wrap": "a parameter shared by two units made by hand raises TiedParameterError (a ValueError); FSDP1 cuts "
    "the tie or fails in forward",
}
"""Names whose behavior differs, each with its text."""

_STATE_DICT_FUNCTIONS = "torch.distributed.checkpoint.state_dict"
_INSTALL = "fsdp_flat.install"
_NEEDS_INSTALL = "needs install"
CLIENTS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "trl")
"""Packages that wrap models by themselves."""

_PEER_PATH = re.compile(rf"{re.escape(PEER)}(\.\w+)*")


class Notes(cst.CSTVisitor):
    """Visits a module and collects findings; :meth:`report` returns them."""

    METADATA_DEPENDENCIES = (meta.QualifiedNameProvider, meta.PositionProvider, meta.ExpressionContextProvider)

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], list[int]] = {}
        self._used: set[str] = set()

    def report(self) -> list[Finding]:
        """Return one finding for each rule that applies, at the first line where it applies."""
        is_fsdp2_alone = bool(self._used) and self._used.issubset(FSDP2_NAMES)
        found = []
        for (kind, text), lines in self._lines.items():
            if kind == _NEEDS_INSTALL:
                if is_fsdp2_alone or _INSTALL in self._used:
                    continue
                kind, text = "check", f"{text}, unless {_INSTALL}() is called (it may be called in this file too)"
            first, *others = sorted(set(lines))
            also = f" (also line{'s' if len(others) > 1 else ''} {', '.join(map(str, others))})" if others else ""
            found.append(Finding(first, kind, text + also))
        return found

    def _note(self, node: cst.CSTNode, kind: str, text: str) -> None:
        line = self.get_metadata(meta.PositionProvider, node).start.line
        self._lines.setdefault((kind, text), []).append(line)

    # -- names ---------------------------------------------------------------------------------------------------

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        module = cst.helpers.get_full_name_for_node(node.module) if node.module is not None else None
        if node.relative or module is None or isinstance(node.names, cst.ImportStar):
            return False
        names = [alias.evaluated_name for alias in node.names]
        if is_inside(module):
            self._used.update(names)
        if module == _STATE_DICT_FUNCTIONS or f"{module}.{names[0]}" == _STATE_DICT_FUNCTIONS:
            self._note(node, _NEEDS_INSTALL, f"{_STATE_DICT_FUNCTIONS} knows torch's class only")
        if module.partition(".")[0] in CLIENTS:
            for name in names:
                if "FSDP" in name or "FullySharded" in name:
                    self._note(node, _NEEDS_INSTALL, f"{name} of {module} goes by torch's class")
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_Name(self, node: cst.Name) -> None:
        if self.get_metadata(meta.ExpressionContextProvider, node, None) is meta.ExpressionContext.LOAD:
            self._look_at(node)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if node.attr.value in ABSENT_ATTRIBUTES:
            self._note(node, "check", f"the attribute {node.attr.value} of FSDP1 has no counterpart in fsdp_flat")
        if root_of(node) is not None:
            self._look_at(node)

    def _look_at(self, node: cst.Name | cst.Attribute) -> None:
        name = self._public_name(node)
        if name is not None:
            self._used.add(name)
        elif _INSTALL in imported_names(self, node):
            self._used.add(_INSTALL)
        if name in _NAMES:
            self._note(node, "differs", _NAMES[name])

    def _public_name(self, node: cst.BaseExpression) -> str | None:
        """Return the name in ``torch.distributed.fsdp`` that an expression refers to, without that prefix, or None."""
        for name in imported_names(self, node):
            if is_inside(name):
                tail = name.removeprefix(PEER).removeprefix(".")
                return tail.removeprefix("fully_sharded_data_parallel.").removeprefix("api.")
        return None

    # -- constructions -------------------------------------------------------------------------------------------

    def visit_Call(self, node: cst.Call) -> None:
        arguments = {arg.keyword.value: arg.value for arg in node.args if arg.keyword is not None}
        positional = [arg.value for arg in node.args if arg.keyword is None and not arg.star]
        called = self._public_name(node.func)
        if called == WRAPPER:
            num_positional = len(positional)
        elif called == "wrap.enable_wrap" or (
            "functools.partial" in imported_names(self, node.func)
            and positional
            and self._public_name(positional[0]) == WRAPPER
        ):
            num_positional = 0  # the wrapper class is passed as an argument, with keyword arguments for it
        else:
            return
        self._look_at_wrapping(node, arguments, num_positional, is_open=any(arg.star for arg in node.args))

    def _look_at_wrapping(
        self, node: cst.Call, arguments: dict[str, cst.BaseExpression], num_positional: int, *, is_open: bool
    ) -> None:
        def given(name: str, position: int) -> bool:
            return name in arguments or num_positional > position or is_open

        sync = arguments.get("sync_module_states")
        if not given("sync_module_states", 10) or (isinstance(sync, cst.Name) and sync.value == "False"):
            self._note(
                node, "differs", "ranks that start from different weights warn; sync_module_states=True mends it"
            )
        if not given("device_id", 9):
            self._note(node, "differs", "without device_id and without an accelerator it runs on the CPU; FSDP1 raises")
        original = arguments.get("use_orig_params")
        if isinstance(original, cst.Name) and original.value == "True":
            text = "a trainable parameter that no rank used keeps .grad None (FSDP1: zeros); any mix of dtypes and of "
            self._note(node, "differs", text + "requires_grad may share a unit")
        if given("auto_wrap_policy", 4) and not is_open:
            text = "a parameter shared by two wrapped modules stays tied, in the unit that holds both"
            self._note(node, "differs", text)

    # -- text ----------------------------------------------------------------------------------------------------

    def visit_Expr(self, node: cst.Expr) -> bool:
        return not isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString))  # docstrings may name anything

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        text = node.evaluated_value
        if isinstance(text, str) and _PEER_PATH.fullmatch(text) and not is_fsdp2(text):
            self._note(node, "check", f'the string "{text}" is left as it is')
