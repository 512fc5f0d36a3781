"""accelerate's FSDP plugin, version 2: prepare, accumulate, clip, save_state and load_state, full and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from tests.clients.accelerate_on_cpus import fsdp_on_cpus
from tests.clients.kit import Tiny, on_both, tokens
from tests.clients.test_accelerate import train
from tests.support import assert_close, on_ranks


def new(accelerator: Accelerator, seed: int) -> tuple[Any, Any, Any, Any]:
    """A prepared model with optimizer, data and schedule."""
    torch.manual_seed(seed)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    # As FSDP2 asks: together, so that accelerate gives the sharded parameters to the optimizer.
    return tuple(accelerator.prepare(model, optimizer, DataLoader(tokens(), batch_size=4), schedule))


def run(state_dict_type: str, reshard: bool, mixed_precision: str, efficient: bool, folder: Path) -> dict[str, Any]:
    """Train, save, go on, load into the same and into new objects, go on from there."""
    with fsdp_on_cpus():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=reshard,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["TinyLayer"],
            state_dict_type=state_dict_type,
            cpu_ram_efficient_loading=efficient,
            activation_checkpointing=not reshard,
        )
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2, mixed_precision=mixed_precision
        )
        objects = new(accelerator, 0)
        told = {"before": train(accelerator, *objects, steps=2)}
        accelerator.save_state(str(folder))
        told["after"] = train(accelerator, *objects, steps=2)
        told["whole"] = accelerator.get_state_dict(objects[0])
        accelerator.load_state(str(folder))
        told["loaded"] = train(accelerator, *objects, steps=2)
        accelerator.free_memory()
        fresh = new(accelerator, 5)
        accelerator.load_state(str(folder))
        told["loaded_anew"] = train(accelerator, *fresh, steps=2)
        told["plain"] = type(accelerator.unwrap_model(fresh[0])).__name__
        return told


@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_ranks(2)
def test_accelerate_trains_saves_and_loads_as_on_fsdp2(
    state_dict_type: str, reshard: bool, mixed_precision: str, efficient: bool, tmp_path: Path
) -> None:
    theirs, ours = on_both(
        run,
        fully_shard=True,
        state_dict_type=state_dict_type,
        reshard=reshard,
        mixed_precision=mixed_precision,
        efficient=efficient,
        folder=tmp_path,
    )
    assert ours.result["loaded"] == ours.result["loaded_anew"] == ours.result["after"]
    tolerance = 1e-5 if mixed_precision == "no" else 2e-2
    assert_close(ours.result, theirs.result, rtol=tolerance, atol=tolerance)
