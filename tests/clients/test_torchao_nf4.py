"""Frozen weights in torchao's NF4 train beside adapters on fully_shard (QLoRA, as torchtune has it)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torchao.quantization import NF4Tensor

from fsdp_flat import fully_shard, load_full, save_full
from fsdp_flat.composable import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp_flat.errors import UnsupportedError
from tests.support import assert_equal, on_ranks
from tests.support.extended_tensors import assert_alike
from tests.support.peer import peer_fully_shard

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, of what it does not find on a CPU
BOTH = (fully_shard, peer_fully_shard)
WIDTH = 64
# Blocks must not cross the parts of ranks.
BLOCKS = {"block_size": 32, "scaler_block_size": 4}
BASE = ("quantized_scalers", "quantization_factor", "quantized_data")


class Adapted(nn.Module):
    """A frozen linear in 4 bits, and an adapter that is trained."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        weight = nn.Linear(WIDTH, WIDTH, bias=False).weight.detach()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.weight = nn.Parameter(NF4Tensor.from_tensor(weight, **BLOCKS), requires_grad=False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[Adapted() for _ in range(3)])


def sharded(model: nn.Module, shard: Callable[..., Any] = fully_shard, **kwargs: Any) -> nn.Module:
    for child in model:  # type: ignore[attr-defined]
        shard(child, **kwargs)
    shard(model, **kwargs)
    return model


def inner_of(value: torch.Tensor) -> list[torch.Tensor]:
    local = value._local_tensor if isinstance(value, DTensor) else value
    inner = [getattr(local, name) for name in BASE] if isinstance(local, NF4Tensor) else [local.detach()]
    # torch leaves those of a full tensor as results of collectives that are still to be waited for.
    return [each.wait() if isinstance(each, AsyncCollectiveTensor) else each for each in inner]


def values_of(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    return {name: inner_of(param) for name, param in model.named_parameters()}


def trained(model: nn.Module, num_steps: int = 4, *, averages: bool = False, first: int = 0) -> list[float]:
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    losses = []
    for step in range(first, first + num_steps):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, WIDTH)).float().pow(2).mean()
        loss.backward()
        for param in params if averages else ():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2, 4)
def test_adapters_beside_nf4_weights_train_as_on_torch_and_without_sharding(reshard_after_forward: bool) -> None:
    ours, theirs = [sharded(model_of(), shard, reshard_after_forward=reshard_after_forward) for shard in BOTH]
    losses = trained(ours)
    assert_alike((losses, values_of(ours)), (trained(theirs), values_of(theirs)))
    plain = trained(model_of(), averages=True)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), atol=1e-6, rtol=1e-5)
    assert losses[0] == plain[0]
    for module in ours.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            assert isinstance(module.weight, DTensor)
            assert type(module.weight._local_tensor) is NF4Tensor


@on_ranks(2)
def test_adapters_compute_in_bfloat16_beside_nf4_weights() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, theirs = [sharded(model_of(), shard, mp_policy=policy) for shard in BOTH]
    assert trained(ours) == trained(theirs)


@on_ranks(2)
def test_nf4_weights_in_host_memory_train_alike() -> None:
    model = sharded(model_of(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert trained(model) == trained(sharded(model_of()))


@on_ranks(2, 4)
def test_full_state_dicts_of_adapters_and_base_equal_torchs_and_are_loaded() -> None:
    full = StateDictOptions(full_state_dict=True)
    ours, theirs = [sharded(model_of(), shard) for shard in BOTH]
    for model in (ours, theirs):
        trained(model, 2)
    states = [get_model_state_dict(model, options=full) for model in (ours, theirs)]
    assert list(states[0]) == list(states[1])
    plain = model_of().state_dict()
    for name, value in states[0].items():
        assert not isinstance(value, DTensor)
        assert type(value) is type(states[1][name])
        assert_alike(inner_of(value), inner_of(states[1][name]))
        if "base" in name:
            assert type(value) is NF4Tensor
            # The base is what was quantized before sharding.
            assert_equal(inner_of(value), inner_of(plain[name]))
    # Another model, whose base is another one, becomes the same.
    again = sharded(model_of(seed=1))
    adapters = {name: value for name, value in states[0].items() if "base" not in name}
    set_model_state_dict(again, adapters, options=StateDictOptions(full_state_dict=True, strict=False))
    again.load_state_dict({name: value for name, value in states[0].items() if "base" in name}, strict=False)
    assert_equal(values_of(again), values_of(ours))
    assert trained(again, 1, first=9) == trained(ours, 1, first=9)


@on_ranks(2)
def test_adapters_alone_are_saved_beside_nf4_weights(tmp_path: Path) -> None:
    model, again = sharded(model_of()), sharded(model_of())
    trained(model, 2)
    save_full(model, tmp_path / "adapters", trainable_only=True)
    load_full(again, tmp_path / "adapters", strict=False)
    assert trained(again, 1, first=9) == trained(model, 1, first=9)
    with pytest.raises(UnsupportedError, match=r"'0.base.weight'.*NF4Tensor"):
        save_full(model, tmp_path / "all")
