"""The examples for clients run as their first lines say, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.scripts import torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("client", ["accelerate", "lightning"])
def test_the_example_of_a_client_learns_sharded_by_fsdp_flat(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = torchrun(2, "-m", "fsdp_flat.run", EXAMPLES / f"{client}_fsdp.py")
    assert "<class 'fsdp_flat.fully_sharded_data_parallel.FullyShardedDataParallel'>" in output
    losses = [float(text) for text in re.findall(r"^epoch \d+  loss (\d\.\d+)$", output, re.MULTILINE)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 3
    if client == "accelerate":
        weights = torch.load(tmp_path / "accelerate_fsdp.pt")
    else:
        weights = torch.load(tmp_path / "lightning_fsdp.ckpt")["state_dict"]
    assert sum(value.numel() for value in weights.values()) == 4 * (8 * 32 + 32 + 32 * 8 + 8)
