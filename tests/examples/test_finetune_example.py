"""The fine-tuning example runs under torchrun, learns, and saves what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.from_size("cover", "starts torchrun, whose ranks import torch")
def test_the_example_trains_adapters_on_two_ranks_and_saves_them_alone(tmp_path: Path) -> None:
    environ = dict(os.environ, OMP_NUM_THREADS="1", ADAPTERS=str(tmp_path / "adapters.pt"))
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    if sys.platform == "linux":
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "finetune_adapters.py")],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    held = re.findall(r"rank (\d): ([\d,]+) bytes frozen in bf16, ([\d,]+) bytes trainable in fp32", done.stdout)
    assert [rank for rank, _, _ in held] == ["0", "1"]
    frozen, trainable = (sum(int(row[column].replace(",", "")) for row in held) for column in (1, 2))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] - 0.4

    saved = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert len(saved) == 16
    assert all(".adapter_" in name for name in saved)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert sum(value.nbytes for value in saved.values()) == trainable
    assert frozen > 5 * trainable
    assert any(value.abs().max() > 0 for name, value in saved.items() if name.endswith("adapter_up"))
