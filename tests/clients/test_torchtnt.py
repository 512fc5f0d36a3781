"""torchtnt's AutoUnit with its FSDPStrategy: accumulation and clipping. It has no check that refuses CPUs."""

from __future__ import annotations

from tests.clients.sides import OURS, THEIRS, run
from tests.support import assert_close


def test_a_script_with_auto_unit_trains_as_on_torch() -> None:
    ours = run(OURS, "torchtnt_train.py")
    assert_close(ours, run(THEIRS, "torchtnt_train.py"), rtol=1e-5, atol=1e-5)
    assert len([name for name in ours if name.startswith("train")]) == 8
