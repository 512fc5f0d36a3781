"""``torch.distributed.checkpoint.async_save`` of sharded state dicts, in processes of their own.

Its background thread communicates beside the training, and may outlive a test's body, so pooled ranks are no place.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from tests.support import assert_equal
from tests.support.pool import spawn
from tests.support.wrapper_models import seeded, shard, train, whole_state

BOXES = (ShardedStateDictConfig(boxes=True), ShardedOptimStateDictConfig(boxes=True))


def both(model: Any, optimizer: Any, *config: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *config):
        return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


def built(rank: int, seed: int, steps: range) -> tuple[Any, torch.optim.Optimizer]:
    model = shard(seeded(seed=seed), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, rank, steps)
    return model, optimizer


def saving(rank: int, path: Path) -> None:
    begin(rank, 2, path / "store-2")
    model, optimizer = built(rank, 0, range(2))
    expected = whole_state(model), FSDP.optim_state_dict(model, optimizer)["state"]
    found = both(model, optimizer, *BOXES)
    # A group of its own: collectives of the background thread and of training would else be mixed up.
    group = dist.new_group(backend="gloo")
    running = dcp.async_save(found, checkpoint_id=path / "boxes", process_group=group)
    # What is saved is of before, though boxes are views of what these steps write to.
    train(model, optimizer, rank, range(2, 6))
    running.result()
    assert any(not torch.equal(value, expected[0][name]) for name, value in whole_state(model).items())
    if rank == 0:
        torch.save(expected, path / "expected")
    chunks = both(model, optimizer)
    try:
        dcp.async_save(chunks, checkpoint_id=path / "chunks").result()
        told = "saved"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    (path / f"chunks-{rank}").write_text(told)
    dist.barrier()
    dist.destroy_process_group()


def loading(rank: int, num_ranks: int, path: Path) -> None:
    begin(rank, num_ranks, path / f"store-loading-{num_ranks}")
    expected = torch.load(path / "expected", weights_only=True)
    model, optimizer = built(rank, 1, range(1))
    found = both(model, optimizer, *BOXES)
    dcp.load(found, checkpoint_id=path / "boxes")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found["optim"]))
    assert_equal((whole_state(model), FSDP.optim_state_dict(model, optimizer)["state"]), expected)
    train(model, optimizer, rank, range(1))
    dist.barrier()
    dist.destroy_process_group()


def begin(rank: int, num_ranks: int, store: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)


def test_boxes_are_saved_beside_training_and_loaded_at_another_number_of_ranks(tmp_path: Path) -> None:
    spawn(saving, tmp_path, num_ranks=2)
    spawn(loading, 3, tmp_path, num_ranks=3)
    # torch's default stager cannot copy a ShardedTensor; docs/differences.md names the one that need not.
    for rank in range(2):
        assert "ShardedTensor" in (tmp_path / f"chunks-{rank}").read_text()
