"""Runs ``fsdp-flat to-fully-shard``: moves a codebase from the wrapper to ``fully_shard``, where that is sure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp_flat.tools.rewriting import Rewrite, Tool, run_tool

NAME = "fsdp-flat to-fully-shard"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status, as :func:`fsdp_flat.migrate.main` does."""
    description = "Move wrapper code to fully_shard where that is sure, and list what is left."
    suffixes = (".py", ".ipynb", ".yaml", ".yml")
    return run_tool(Tool(NAME, description, f"{NAME} src/", suffixes, _load, _loss_check), arguments)


def _load() -> Rewrite:
    from fsdp_flat.tools.to_fully_shard import rewrite_files

    return rewrite_files


def _loss_check(paths: Sequence[Path]) -> str:
    """Return how to see that the changed programs compute the same."""
    scripts = [path for path in paths if path.suffix == ".py"]
    started = [path for path in scripts if "__main__" in path.read_text(errors="replace")] or scripts
    script = started[0] if started else "train.py"
    option = "" if scripts else "--fully-shard "
    return (
        "Compare the losses of a few steps, with the same seed and data, before and after the change:\n"
        f"  torchrun --nproc-per-node 2 -m fsdp_flat.run {option}{script}\n"
    )
