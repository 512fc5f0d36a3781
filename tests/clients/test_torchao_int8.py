"""torchao's int8 training weights take full plain values, which they round at random."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization.quant_api import quantize_

from fsdp_flat import fully_shard, load_full, save_full
from tests.support import on_ranks
from tests.support.peer import peer_fully_shard

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, of what it does not find on a CPU


def int8(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Linear(16, 8, bias=False)
    quantize_(model, int8_weight_only_quantized_training())
    return model


def assert_has(model: nn.Module, expected: torch.Tensor) -> None:
    """Assert that the weights are as expected, up to one step of their integers."""
    step = expected.abs().amax(1) / 127
    assert ((model(torch.eye(16)).T - expected).abs() <= 1.01 * step[:, None]).all()


@pytest.mark.parametrize("way", ["set_model_state_dict", "load_full", "load_full of save_full"])
@on_ranks(2)
def test_int8_weights_take_full_plain_values(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(16, 8, bias=False)
    model = fully_shard(int8(1))
    model(torch.ones(2, 16)).sum().backward()
    if way == "set_model_state_dict":
        for each in (model, peer_fully_shard(int8(1))):
            set_model_state_dict(each, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
            assert_has(each, plain.weight)
        return
    if way == "load_full":
        if dist.get_rank() == 0:
            torch.save(plain.state_dict(), tmp_path / "full")
        dist.barrier()
    else:
        save_full(fully_shard(int8(0)), tmp_path / "full")
    load_full(model, tmp_path / "full")
    assert_has(model, plain.weight)
