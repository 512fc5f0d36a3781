"""One module's source from torch's FSDP1 to fsdp_flat."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
from libcst import metadata as meta

from fsdp_flat.tools.migrate_imports import Finding, Reached, Rewriter, plan_imports
from fsdp_flat.tools.migrate_notes import Notes

__all__ = ["Migrated", "migrate_source"]


@dataclass(frozen=True, slots=True)
class Migrated:
    """What became of one module.

    Attributes:
        data: the source; the same object as was given where nothing changes.
        findings: in the order of lines.
    """

    data: bytes
    findings: list[Finding]


def migrate_source(data: bytes) -> Migrated:
    """Rewrite a module's imports of ``torch.distributed.fsdp``.

    Encoding, line ends and all bytes that are not part of such imports, or of paths into that module, stay.

    Args:
        data: the source as it is in the file.

    Returns:
        The new source and the report. Source that cannot be parsed comes back as it is, with an ``error`` finding.
    """
    try:
        module = cst.parse_module(data)
    except cst.ParserSyntaxError as error:
        return Migrated(data, [Finding(error.raw_line, "error", "libcst cannot parse it; it is left as it is")])
    except (UnicodeDecodeError, LookupError, SyntaxError) as error:
        return Migrated(data, [Finding(1, "error", f"cannot be decoded ({error}); it is left as it is")])
    if module.bytes != data:
        return Migrated(data, [Finding(1, "error", "its layout would not survive; it is left as it is")])
    wrapper = meta.MetadataWrapper(module, unsafe_skip_copy=True)
    reached, notes = Reached(), Notes()
    wrapper.visit(reached)
    wrapper.visit(notes)
    plan = plan_imports(reached)
    findings = sorted([*plan.report(), *notes.report()])
    if not plan.targets and not plan.rewritten:
        return Migrated(data, findings)
    return Migrated(wrapper.module.visit(Rewriter(plan)).bytes, findings)
