"""Shows results of commands: as JSON, with colors on a terminal, and as plain aligned text anywhere else."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdp_flat.extras.describe import aligned


@dataclass(frozen=True, slots=True)
class TextTable:
    """Holds a table of texts; cells of columns whose name ends in ">" are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def show(data: Mapping[str, Any] | Sequence[Any], *blocks: str | TextTable, as_json: bool) -> None:
    """Print a result: ``data`` as JSON, or lines and tables for people."""
    if as_json:
        # JSON has no infinity and no NaN: texts stand for them.
        finite = json.loads(json.dumps(data, default=str), parse_constant=str)
        print(json.dumps(finite, indent=2))
        return
    console = Console(highlight=False) if sys.stdout.isatty() else None
    for block in blocks:
        if isinstance(block, str):
            print(block) if console is None else console.print(escape(block))
        elif not block.rows:
            continue
        elif console is None:
            print("\n".join(plain_lines(block)))
        else:
            console.print(_rich_table(block))


def plain_lines(table: TextTable) -> list[str]:
    """Return a table as aligned lines, in full width."""
    heads = [column.removesuffix(">") for column in table.columns]
    left = {at for at, column in enumerate(table.columns) if not column.endswith(">")}
    return aligned([heads, *table.rows], left=left)


def _rich_table(table: TextTable) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in table.columns:
        shown.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(escape, row))
    return shown
