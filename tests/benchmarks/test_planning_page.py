"""docs/planning.md shows what its example writes, and its blocks of code run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import planning
from benchmarks.model import GPT, Block, loss_of
from benchmarks.spec import Setting
from fsdp_flat.tools.step_plan import StepPlan
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.site.pages import shown_code
from tests.support import on_ranks
from tests.support.kit import wrapped

NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]\d+)?")
PAGE = planning.PAGE.read_text()


def numbers_in(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@pytest.mark.from_size("all", "records steps of several settings; the blocks of the page run in the cover")
def test_the_page_shows_the_plans_that_its_example_makes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the example draws pictures")
    page = tmp_path / "planning.md"
    shutil.copy(planning.PAGE, page)
    planning.main(["--page", str(page)])
    before, after = planning.outputs_of(PAGE), planning.outputs_of(page.read_text())
    assert list(before) == list(after) == ["plan.txt", "fit.txt", "batch.txt", "summary.txt", "machine.txt"]
    for name in ("plan.txt", "fit.txt", "batch.txt"):  # without transformers the last stays as it is
        assert NUMBER.sub("", before[name]) == NUMBER.sub("", after[name]), f"{name}: python -m benchmarks.planning"
        # Other versions of torch may run other operators.
        assert numbers_in(before[name]) == pytest.approx(numbers_in(after[name]), rel=0.03)
    assert re.fullmatch(r"\d+ cores \(.*\), .*, Python .*, torch .*\.\n", before["machine.txt"])
    assert re.findall(r"^\w.*:?$", after["summary.txt"], re.MULTILINE)[0].startswith("2 backwards in ")
    rest = planning.OUTPUT.sub("", PAGE)
    assert planning.OUTPUT.sub("", page.read_text()) == rest, "only the outputs are replaced"
    pictures = re.findall(r"\]\((planning/[\w.]+)\)", rest)
    assert sorted(pictures) == ["planning/plan.png", "planning/step.png"]
    for picture in pictures:
        assert (planning.PAGE.parent / picture).exists()
    assert sorted(path.name for path in (tmp_path / "planning").iterdir()) == ["plan.png", "step.png"]


@pytest.mark.from_size("cover", "starts ranks, which import torch")
@pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")
def test_a_row_of_the_memory_page_is_measured_and_planned() -> None:
    small = Setting(layers=2, width=16, heads=2, vocab=32, seq=8, batch=4, steps=1, warmup=1)
    (row,) = (row for row in planning.ROWS if row.title == "`FULL_SHARD`, bf16 compute")
    title, counted, planned, host, milliseconds = planning.memory_row(row, small)
    assert title == row.title
    assert min(map(float, (counted, planned, milliseconds))) >= 0
    assert host == ""
    shown = planning.TABLE.search(planning.MEMORY_PAGE.read_text())
    assert shown is not None
    assert all(each.title in shown[2] for each in planning.ROWS)


def test_readme_quotes_a_plan_of_the_page() -> None:
    quoted = re.search(r"```text\n(.*?)```", (planning.ROOT / "README.md").read_text(), re.DOTALL)
    assert quoted is not None
    assert set(quoted[1].splitlines()) <= set(planning.outputs_of(PAGE)["fit.txt"].splitlines())


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
