"""8-bit states of torchao and 4-bit weights of bitsandbytes: their values in checkpoints and in full state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType, fully_shard, load_checkpoint, save_checkpoint
from tests.support import assert_equal, on_ranks

SIDES = pytest.mark.parametrize("side", ["originals", "flat", "fully_shard"])
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the packages' own, of what they do not find on a CPU
]


def sharded(side: str, model: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)) if model is None else model
    if side != "fully_shard":
        return FSDP(model, use_orig_params=side == "originals")
    fully_shard(model)
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        torch.manual_seed(seed + 10 * dist.get_rank())
        model(torch.randn(4, 128)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def torchao_optimizer(model: nn.Module, patched: pytest.MonkeyPatch) -> torch.optim.Optimizer:
    adam = pytest.importorskip("torchao.optim.adam", reason="torchao is not installed")
    # The update runs as it is: compiling it takes minutes on a CPU and changes no state's form.
    patched.setattr(adam.torch, "compile", lambda function, **_: function)
    made: torch.optim.Optimizer = adam.AdamW8bit(model.parameters(), lr=1e-2, block_size=64)
    return made


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_torchaos_8_bit_adamw_gets_its_states_from_a_checkpoint_in_its_own_class(side: str, tmp_path: Path) -> None:
    """The checkpoint was complete, and nothing could read it.

    torchao rounds a signed block again where its largest element is negative, so ``exp_avg`` is rounded twice.
    """
    with pytest.MonkeyPatch.context() as patched:
        model = sharded(side, nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)))
        optimizer = torchao_optimizer(model, patched)
        steps(model, optimizer, 1, 2)
        assert "OptimState8bit" in {type(local(row["exp_avg"])).__name__ for row in optimizer.state.values()}
        save_checkpoint(tmp_path, model, optimizer)
        again = sharded(side, nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)))
        loaded = torchao_optimizer(again, patched)
        load_checkpoint(tmp_path, again, loaded)
        found, saved = (
            {name: local(value).detach() for name, value in each.named_parameters()} for each in (again, model)
        )
        assert_equal(found, saved)
        for row, old in zip(loaded.state.values(), optimizer.state.values(), strict=True):
            assert row["step"] == old["step"]
            for name in ("exp_avg", "exp_avg_sq"):
                state, before = local(row[name]), local(old[name])
                assert type(state) is type(before)
                if type(before) is torch.Tensor:
                    assert_equal({name: state}, {name: before})
                    continue
                twice = type(before).zeros(before.shape, before.signed, before.block_size)
                twice.copy_(before.dequantize() if name == "exp_avg" else before)
                assert_equal({name: state.dequantize()}, {name: twice.dequantize()})
        steps(again, loaded, 3)


@SIDES
@on_ranks(2)
def test_states_of_torchaos_8_bit_adamw_are_full_tensors_in_a_full_state_dict(side: str) -> None:
    """With flat parameters a ZeroDivisionError, with fully_shard an error of dispatch."""
    with pytest.MonkeyPatch.context() as patched:
        model = sharded(side)
        optimizer = torchao_optimizer(model, patched)
        steps(model, optimizer, 1)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            states = FSDP.optim_state_dict(model, optimizer)["state"]
        assert {type(row["exp_avg"]) for row in states.values()} == {torch.Tensor}
        assert states["0.weight"]["exp_avg"].shape == (128, 128)


def quantized(seed: int = 0) -> nn.Module:
    modules = pytest.importorskip("bitsandbytes.nn", reason="bitsandbytes is not installed")
    torch.manual_seed(seed)
    first = modules.Linear4bit(128, 64, quant_type="nf4", compute_dtype=torch.float32, quant_storage=torch.float32)
    return nn.Sequential(first, nn.Linear(64, 8)).to("cpu")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_a_model_of_4_bit_weights_is_saved_and_loaded_to_the_bit(side: str, background: bool, tmp_path: Path) -> None:
    """With fully_shard the same model refused what it had saved ("Unexpected key(s) ... absmax")."""
    model = sharded(side, quantized())
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    steps(model, optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer, background=background).wait()
    again = sharded(side, quantized())
    loaded = torch.optim.AdamW([param for param in again.parameters() if param.requires_grad])
    load_checkpoint(tmp_path, again, loaded)
    for each, its in ((model, optimizer), (again, loaded)):
        steps(each, its, 2)
    batch = torch.randn(3, 128)
    assert_equal({"output": again(batch)}, {"output": model(batch)})


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
@on_ranks(2)
def test_a_model_quantized_from_other_weights_gets_the_saved_ones(side: str, tmp_path: Path) -> None:
    """Codes with other constants are other weights, so a load brings both; bitsandbytes' layers take codes alone."""
    model = sharded(side, quantized())
    save_checkpoint(tmp_path, model)
    again = sharded(side, quantized(seed=1))
    load_checkpoint(tmp_path, again)
    batch = torch.randn(3, 128)
    assert_equal({"output": again(batch)}, {"output": model(batch)})
