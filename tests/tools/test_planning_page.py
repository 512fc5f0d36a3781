"""docs/planning.md shows what its example writes, and its blocks of code run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.model import GPT, Block, loss_of
from benchmarks.spec import Setting
from fsdp_flat.tools.step_plan import StepPlan
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.site.pages import shown_code
from tests.support import on_ranks
from tests.support.kit import wrapped

NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planning.md").read_text()
# The texts on the page, by the names of the files that its example writes.
OUTPUTS = dict(re.findall(r"<!-- (\w+\.txt) -->\n```text\n(.*?)```\n", PAGE, re.DOTALL))


def numbers_in(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def assert_shown(name: str, output: str) -> None:
    """Assert that the page shows an output, but for numbers: other versions of torch may run other operators."""
    assert NUMBER.sub("", OUTPUTS[name]) == NUMBER.sub("", output), f"copy {name} to docs/planning.md"
    assert numbers_in(OUTPUTS[name]) == pytest.approx(numbers_in(output), rel=0.03)


@pytest.mark.from_size("all", "records steps of several settings; the blocks of the page run in the cover")
def test_the_page_shows_the_plans_that_its_example_makes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the example draws pictures")
    subprocess.run([sys.executable, ROOT / "examples" / "plan_and_record.py", "--out", tmp_path], check=True)
    written = {path.name: path for path in tmp_path.iterdir()}
    assert sorted(written) == ["fit.txt", "plan.png", "plan.txt", "step.json", "step.png", "summary.txt"]
    for name in ("plan.txt", "fit.txt"):
        assert_shown(name, written[name].read_text())
    for text in (OUTPUTS["summary.txt"], written["summary.txt"].read_text()):
        assert text.startswith("2 backwards in ")
    pictures = re.findall(r"\]\(planning/([\w.]+)\)", PAGE)
    assert sorted(pictures) == ["plan.png", "step.png"]
    assert all((ROOT / "docs" / "planning" / picture).exists() for picture in pictures)


def test_readme_quotes_a_plan_of_the_page() -> None:
    quoted = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert quoted is not None
    assert set(quoted[1].splitlines()) <= set(OUTPUTS["fit.txt"].splitlines())


@on_ranks(2)
def test_the_blocks_of_code_on_the_page_run(rank: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the blocks draw pictures")
    folder = tmp_path / str(rank)
    folder.mkdir()
    setting = Setting(layers=2, width=16, heads=2, vocab=32, seq=4096, batch=2)
    tokens = torch.zeros(1, 9, dtype=torch.long)

    def train_step(model: torch.nn.Module) -> None:
        loss_of(model, tokens).backward()

    names: dict[str, Any] = {"torch": torch, "GPT": GPT, "Block": Block, "config": setting, "loss_of": loss_of}
    plans, fits, records = shown_code("planning.md")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in (plans, fits):
            exec(block, names)
            assert isinstance(names["planned"], StepPlan)
        assert names["planned"].fits
        names["model"] = wrapped(GPT(setting), auto_wrap_policy=ModuleWrapPolicy({Block}))
        names["train_step"] = train_step
        exec(records, names)
    assert sorted(path.name for path in folder.iterdir()) == ["plan.png", "step.json", "step.png"]
