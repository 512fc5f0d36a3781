"""README's programs run as written, its links lead somewhere, and the pages behind it name what there is."""

from __future__ import annotations

import builtins
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_flat
from fsdp_flat import errors
from tests.site.pages import blocks_in, shown_code
from tests.support import on_ranks
from tests.support.scripts import printed_losses, run_program

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as hosts of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: str, text: str) -> list[str]:
    """The links of a page, relative to its folder, that lead nowhere."""
    broken = []
    for link in LINK.findall(text):
        name, _, anchor = link.partition("#")
        target = (ROOT / path).parent / name if name else ROOT / path
        is_there = target.exists() and (not anchor or anchor in anchors_of(target.read_text()))
        if not link.startswith(("http://", "https://")) and not is_there:
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(path: str) -> None:
    assert broken_links(path, (ROOT / path).read_text()) == []


def with_fully_shard(program: str, block: str) -> str:
    """The program with the line that wraps the model replaced, as README says."""
    start = program.index("model = FSDP(")
    lines = program[start:].partition("\n")[2]
    return program[:start] + block + lines


@pytest.mark.from_size("cover", "trains a whole program")
@pytest.mark.parametrize("front", ["FSDP", "fully_shard"])
def test_the_program_trains_on_two_ranks_with_either_front(front: str, tmp_path: Path) -> None:
    program, block, _ = (found.code for found in blocks_in(README, ROOT / "README.md"))
    (tmp_path / "program.py").write_text(program if front == "FSDP" else with_fully_shard(program, block))
    losses = printed_losses(run_program(2, tmp_path, tmp_path / "program.py"))
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]


@on_ranks(2)
def test_the_budget_and_the_offload_of_the_first_page_run() -> None:
    program, _, budget = (found.code for found in blocks_in(README, ROOT / "README.md"))
    exec(program[: program.index("if torch.accelerator")] + budget, names := {"__name__": "readme"})
    assert names["loss"].isfinite()
    assert all(param.grad is not None for param in names["model"].parameters())


def test_the_commands_of_the_first_page_are_there() -> None:
    modules = re.findall(r"-m (fsdp_flat\.\w+)", README)
    assert set(modules) == {"fsdp_flat.run", "fsdp_flat.migrate"}
    targets = re.findall(r"make ([\w-]+)", README + (ROOT / "CONTRIBUTING.md").read_text())
    rules = set(" ".join(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)).split())
    assert {"demo", "check", "test"} <= set(targets) <= rules


@pytest.mark.parametrize("path", ["README.md", "docs/differences.md", "docs/checkpoints.md"])
def test_functions_that_a_page_names_are_there(path: str) -> None:
    text = (ROOT / path).read_text()
    for name in re.findall(r"`(?:with )?fsdp_flat\.([\w.]+)\(", text):
        found: object = fsdp_flat
        for part in name.split("."):
            found = getattr(found, part)
    for name in re.findall(r"`(\w+Error)`", text):
        assert hasattr(errors, name) or hasattr(builtins, name), name


@on_ranks(2)
def test_the_page_of_checkpoints_runs_from_the_first_run_to_the_next(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # One is of a client's model: tests/clients/test_hugging_face.py. One uploads: tests/checkpoint/test_streaming.py.
    blocks = [block for block in shown_code("checkpoints.md") if not re.search("LlamaForCausalLM|HfApi", block)]
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        for block in (shown_code("getting_started.md")[0], *blocks[:1], *blocks):
            exec(compile(block, "docs/checkpoints.md", "exec"), names)
    finally:
        os.chdir(here)
    assert names["start"] == 3  # of the second run
    assert names["step"] == 5
