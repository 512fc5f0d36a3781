"""Migrates one module's source from torch's FSDP1 to fsdp_flat."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst
from libcst import metadata as meta

from fsdp_flat.compat.torch_names import ABSENT_ATTRIBUTES
from fsdp_flat.tools.migrate_imports import Finding, Reached, Rewriter, plan_imports
from fsdp_flat.tools.migrate_notes import CLIENTS, Notes

# Parsing is far slower than reading, so a text search skips most files.
_REACHES_FSDP = re.compile(rb"\bdistributed\b.*\bfsdp\b|\bfsdp\b.*\bdistributed\b", re.DOTALL)
_NAMES_FSDP = re.compile(
    "|".join(
        (
            r"torch\.distributed\.checkpoint",
            rf"\b(?:{'|'.join(CLIENTS)})\b.+(?:FSDP|FullySharded)",
            rf"\b(?:{'|'.join(sorted(ABSENT_ATTRIBUTES))})\b",
        )
    ).encode(),
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Migrated:
    """Holds the new source of one file, and the findings in the order of lines."""

    data: bytes
    findings: list[Finding]


def migrate_source(data: bytes) -> Migrated:
    """Rewrite a module's imports of ``torch.distributed.fsdp``.

    Encoding, line endings and all bytes outside such imports, and outside paths into that module, are unchanged.

    Args:
        data: the bytes of the file.

    Returns:
        The new source and the report. Source that cannot be parsed is returned unchanged, with an ``error`` finding.
    """
    if not (_REACHES_FSDP.search(data) or (b"fsdp" in data.lower() and _NAMES_FSDP.search(data))):
        return Migrated(data, [])
    module = _parsed(data)
    if isinstance(module, Finding):
        return Migrated(data, [module])
    wrapper = meta.MetadataWrapper(module, unsafe_skip_copy=True)
    reached, notes = Reached(), Notes()
    wrapper.visit(reached)
    wrapper.visit(notes)
    plan = plan_imports(reached)
    findings = sorted([*plan.report(), *notes.report()])
    if not plan.changes:
        return Migrated(data, findings)
    return Migrated(wrapper.module.visit(Rewriter(plan)).bytes, findings)


def _parsed(data: bytes) -> cst.Module | Finding:
    """Parse a module whose text will survive, or return why it cannot be."""
    try:
        module = cst.parse_module(data)
    except cst.ParserSyntaxError as error:
        return Finding(error.raw_line, "error", "libcst cannot parse it; it is left as it is")
    except (UnicodeDecodeError, LookupError, SyntaxError) as error:
        return Finding(1, "error", f"cannot be decoded ({error}); it is left as it is")
    if module.bytes != data:
        return Finding(1, "error", "its layout would not survive; it is left as it is")
    return module
