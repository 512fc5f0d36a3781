"""Pictures of docs/performance.md show the numbers of the tables above them, and a new run replaces both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.pictures import digest_in, digest_of, draw, rows_of
from benchmarks.runner import where
from benchmarks.spec import IMPLEMENTATIONS, OVER_HOSTS, Setting
from benchmarks.tables import step_table, write_picture

DOCS = report.ROOT / "docs"
PAGE = (DOCS / "performance.md").read_text()
WITH_PICTURE = {heading: body for heading, body in report.sections_of(PAGE).items() if report.PICTURE.search(body)}


def results(step: float) -> dict[str, object]:
    row = {"step": step, "forward": 0.3, "backward": 0.5, "optimizer": 0.1, "cpu": 1.0, "rss": 9e8, "wrap": 0.1}
    return {
        "setting": Setting().__dict__,
        "where": where(),
        "states": [],
        "rounds": [{"local": row, "flat-full-orig": row}],
        "counts": {"flat-full-orig": {"sent": 1.5e8, "alive": 1.6e8, "shared": 0}},
    }


@pytest.mark.parametrize("heading", WITH_PICTURE)
def test_a_picture_was_drawn_from_the_table_above_it(heading: str) -> None:
    body = WITH_PICTURE[heading]
    found = report.PICTURE.search(body)
    assert found is not None
    assert digest_in(DOCS / found[1]) == digest_of(body), "draw it again: python -m benchmarks.report"


def test_every_picture_is_on_the_page() -> None:
    assert len(WITH_PICTURE) == 4
    assert {path.name for path in DOCS.glob("*.png")} == set(report.PICTURE.findall(PAGE))


def test_another_number_in_a_table_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = "| implementation | step ms | forward | backward | optimizer | MB counted | MB RSS |\n|---|---|\n"
    rows = ["| one | 9.0 | 2.0 | 6.0 | 1.0 | 174.0 | 900 |", "| two | 8.0 | 2.0 | 5.0 | 1.0 |  | 800 |"]
    before = table + "\n".join(rows)
    draw(before, tmp_path / "a.png", title="a", note="b")
    assert rows_of(before)[1]["MB counted"] == ""
    assert digest_in(tmp_path / "a.png") == digest_of(before)
    assert digest_of(before) != digest_of(before.replace("174.0", "284.0"))


def test_a_new_run_replaces_its_section_and_picture_and_no_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, measured = tmp_path / "docs" / "performance.md", tmp_path / "results"
    measured.mkdir()
    page.parent.mkdir()
    page.write_text(PAGE)
    (measured / "communication.json").write_text(json.dumps(results(step=1.234)))
    report.main(["--results", str(measured), "--out", str(page)])
    before, after = report.sections_of(PAGE), report.sections_of(page.read_text())
    changed = {heading for heading in before if before[heading] != after[heading]}
    assert changed == {"Communication-heavy, fp32"}
    assert list(after) == list(before)
    assert "| no communication | 1234.0 | 300.0 |" in after["Communication-heavy, fp32"]
    for body in after.values():
        for name in report.PICTURE.findall(body):
            assert digest_in(page.parent / name) == digest_of(body)


def test_a_page_without_new_results_stays_as_it_is(tmp_path: Path) -> None:
    assert report.page(tmp_path, old=PAGE) == PAGE


def test_a_run_draws_the_numbers_of_its_own_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = results(step=1.0)
    write_picture(run, tmp_path / "a.png")
    assert digest_in(tmp_path / "a.png") == digest_of(step_table(run))


def test_the_page_names_no_commit_and_only_names_that_it_defines() -> None:
    assert re.findall(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b", PAGE) == []
    titles = {row["implementation"] for body in WITH_PICTURE.values() for row in rows_of(body)}
    assert titles <= {*IMPLEMENTATIONS.values(), *OVER_HOSTS.values()}
