"""accelerate's FSDP plugin, version 1: prepare, accumulate, clip, save_state and load_state, full and sharded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

import fsdp_flat
from tests.clients.accelerate_on_cpus import fsdp_on_cpus
from tests.clients.kit import Tiny, on_both, rank_environment, tokens
from tests.support import assert_close, on_ranks


def new(accelerator: Accelerator, seed: int) -> tuple[Any, Any, Any, Any]:
    """A prepared model with optimizer, data and schedule."""
    torch.manual_seed(seed)
    model = accelerator.prepare(Tiny())  # as FSDP1 asks, before the optimizer is built
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, *accelerator.prepare(optimizer, DataLoader(tokens(), batch_size=4), schedule)


def train(accelerator: Accelerator, model: Any, optimizer: Any, data: Any, schedule: Any, steps: int) -> list[Any]:
    told = []
    for _, ids in zip(range(2 * steps), data):
        with accelerator.accumulate(model):
            loss = model(ids)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        told.append([loss.item(), None if norm is None else norm.item()])
    return told


def run(state_dict_type: str, use_orig_params: bool, mixed_precision: str, folder: Path) -> dict[str, Any]:
    """Train, save, go on, load into the same and into new objects, go on from there."""
    with fsdp_on_cpus():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1,
            reshard_after_forward="FULL_SHARD",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["TinyLayer"],
            state_dict_type=state_dict_type,
            use_orig_params=use_orig_params,
            sync_module_states=False,
            cpu_ram_efficient_loading=False,
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
        if state_dict_type == "SHARDED_STATE_DICT":
            # accelerate reads a sharded optimizer state into the entries that the optimizer has: it needs a step.
            train(accelerator, *fresh, steps=1)
        accelerator.load_state(str(folder))
        told["loaded_anew"] = train(accelerator, *fresh, steps=2)
        told["plain"] = type(accelerator.unwrap_model(fresh[0])).__name__
        return told


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_ranks(2)
def test_accelerate_trains_saves_and_loads_as_on_the_peer(
    state_dict_type: str, use_orig_params: bool, mixed_precision: str, tmp_path: Path
) -> None:
    theirs, ours = on_both(
        run,
        state_dict_type=state_dict_type,
        use_orig_params=use_orig_params,
        mixed_precision=mixed_precision,
        folder=tmp_path,
    )
    assert ours.result["loaded"] == ours.result["loaded_anew"] == ours.result["after"]
    tolerance = 1e-5 if mixed_precision == "no" else 2e-2
    if state_dict_type == "FULL_STATE_DICT" and use_orig_params:
        # What the peer saves of the optimizer here is wrong, so it does not go on where it was.
        for told in (ours.result, theirs.result):
            del told["loaded"], told["loaded_anew"]
    assert_close(ours.result, theirs.result, rtol=tolerance, atol=tolerance)


def load_into_a_new_optimizer(folder: Path) -> None:
    with fsdp_on_cpus():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1,
            state_dict_type="SHARDED_STATE_DICT",
            sync_module_states=False,
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        train(accelerator, *(objects := new(accelerator, 0)), steps=1)
        accelerator.save_state(str(folder))
        accelerator.free_memory()
        del objects
        new(accelerator, 5)
        accelerator.load_state(str(folder))


@on_ranks(2)
def test_a_sharded_load_that_reads_no_optimizer_state_says_so(tmp_path: Path) -> None:
    with warnings.catch_warnings(), rank_environment(), fsdp_flat.installed():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "The optimizer state dict to load has no state")
        with pytest.raises(UserWarning, match="take a step"):
            load_into_a_new_optimizer(tmp_path)
