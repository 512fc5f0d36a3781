"""The benchmark of collectives in fewer bits trains each way from the same weights, and its page says what it found."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import report, rounding


def test_losses_with_fewer_bits_are_beside_exact_ones_on_the_page(tmp_path: Path) -> None:
    words = ["--steps", "8", "--width", "32", "--layers", "1", "--ways", "both in bf16", "both in int8"]
    rounding.main([*words, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "rounding.json").read_text())["ways"]
    assert list(found) == ["exact", "both in bf16", "both in int8"]
    curves = [each["losses"] for each in found.values()]
    assert len({tuple(curve) for curve in curves}) == 3, "a way rounds nothing"
    assert all(abs(curve[0] - curves[0][0]) < 0.05 for curve in curves)
    assert all(curve[-1] < curve[0] for curve in curves)
    page = report.page(tmp_path)
    assert "## Collectives in fewer bits" in page
    assert "| both in int8 | 1.02 | 1.02 |" in page
