"""The schedule on a simulated accelerator: operations take what its speeds say, in the order of streams."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import timeline
from benchmarks.timeline import FLOPS, IMPLEMENTATIONS, LATENCY, LAUNCH, MEMORY, ROWS, Schedule, measure
from tests.rehearsal.fake_device import DEVICE
from tests.rehearsal.kit import rehearsal

TINY = {"layers": 4, "width": 64, "hidden": 128, "kv": 64, "vocab": 32, "seq": 8, "batch": 1}


def test_an_operation_begins_when_its_stream_and_what_that_waited_for_have_ended() -> None:
    with rehearsal(with_library=False) as run:
        schedule = Schedule(run, ROWS["1.2B"])
        a = torch.empty(1024, 1024, device=DEVICE)
        product, copy = LAUNCH + 2 * 1024**3 / FLOPS, LAUNCH + 2 * a.nbytes / MEMORY
        before = schedule.end
        b = a @ a
        side = run.machine.new_stream(name="side")
        with side:
            a.clone()
        assert schedule.end - before == pytest.approx(product), "the copy runs beside it"
        side.wait_stream(run.machine.compute)
        with side:
            b.clone()
        assert schedule.end - before == pytest.approx(product + copy)


def test_a_collective_takes_the_time_of_its_bytes_on_its_link_and_memory_is_counted() -> None:
    row = replace(ROWS["hybrid"], gbps=2.0, replicate_gbps=1.0)
    with rehearsal(with_library=False) as run:
        schedule = Schedule(run, row)
        full = torch.empty(8000, dtype=torch.uint8, device=DEVICE)
        part = torch.empty(1000, dtype=torch.uint8, device=DEVICE)
        assert schedule.seconds("all_gather_single", [part], [full]) == pytest.approx(LATENCY + 7000 / 2e9)
        assert schedule.seconds("reduce_scatter_single", [full], [part]) == pytest.approx(LATENCY + 7000 / 2e9)
        assert schedule.seconds("all_reduce", [], [part]) == pytest.approx(LATENCY + 1500 / 1e9)
        assert schedule.peak == 9000
        full.untyped_storage().resize_(0)
        del part
        again = torch.empty(9500, dtype=torch.uint8, device=DEVICE)
        assert schedule.peak == again.nbytes


@pytest.mark.parametrize("key", ROWS)
def test_every_row_has_a_schedule_for_torchs_and_our_implementations(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, key, replace(ROWS[key], **TINY))  # type: ignore[arg-type]
    figures = {name: measure(name, ROWS[key]) for name in IMPLEMENTATIONS}
    assert all(each.seconds > 0 and each.nbytes > 0 for each in figures.values())
    assert figures["originals"].launches < figures["fsdp2"].launches
    (line,) = timeline.lines({key: figures})
    assert line[0] == ROWS[key].title
    assert line[1:] == [cell for cell in line[1:] if "/" in cell]


def test_the_command_prints_a_table_of_the_rows_that_were_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROWS, "memory", replace(ROWS["memory"], **TINY))  # type: ignore[arg-type]
    timeline.main(["--rows", "memory"])
    text = capsys.readouterr().out
    assert "simulated accelerator" in text.splitlines()[0]
    assert len(text.splitlines()) == 3
