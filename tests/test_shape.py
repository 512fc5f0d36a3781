"""Who knows what kind of tensors a parameter group shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import fsdp_flat

PACKAGE = Path(fsdp_flat.__file__).parent
# Files that know what kind of tensors a group shows: the kinds themselves, and the front that shows DTensors.
KNOW_KINDS = (
    *("core/shown", "core/param_group.py", "core/layout.py", "core/gather_targets.py", "core/__init__.py"),
    *("composable/", "state/torch_state.py"),
)
_KIND = re.compile(r"\b(DTensorShown|FlatShown|OriginalsShown|PerParamLayout)\b")


def lines_with(pattern: re.Pattern[str], sources: Mapping[str, str]) -> list[str]:
    return [
        f"{path}: {line.strip()}"
        for path, source in sources.items()
        if not path.startswith(KNOW_KINDS)
        for line in source.splitlines()
        if pattern.search(line)
    ]


def test_a_step_and_what_is_around_it_do_not_ask_what_kind_of_tensors_a_group_shows() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert lines_with(_KIND, sources) == []
