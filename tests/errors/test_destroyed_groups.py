"""Calls after ``dist.destroy_process_group()``: one error that says so, in processes of their own."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType, load_checkpoint, save_checkpoint, save_full, unshard_for
from fsdp_flat.errors import UsageError
from tests.support.kit import square_loss
from tests.support.pool import spawn
from tests.support.wrapper_models import batch, seeded, shard, train

Call = Callable[[], object]


def saves(model: Any, optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Call]:
    """Calls that need other ranks, by name."""

    def in_form(kind: StateDictType, call: Call) -> Call:
        def run() -> None:
            with FSDP.state_dict_type(model, kind):
                call()

        return run

    found: dict[str, Call] = {}
    for kind in StateDictType:
        if "LOCAL" not in kind.name:
            found[f"optim_state_dict {kind.name}"] = in_form(kind, lambda: FSDP.optim_state_dict(model, optimizer))
        found[f"state_dict {kind.name}"] = in_form(kind, model.state_dict)
    return {
        **found,
        "save_checkpoint": lambda: save_checkpoint(path, model, optimizer),
        "save_checkpoint in the background": lambda: save_checkpoint(path, model, optimizer, background=True),
        "load_checkpoint": lambda: load_checkpoint(path, model, optimizer),
        "save_full": lambda: save_full(model, path),
    }


def enter(block: Any) -> None:
    with block:
        pass


def steps(model: Any, rank: int) -> dict[str, Call]:
    return {
        "forward": lambda: model(batch(rank)),
        "unshard_for": lambda: enter(unshard_for(model)),
        "summon_full_params": lambda: enter(FSDP.summon_full_params(model)),
    }


def on_rank(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    calls: dict[str, Call] = {}
    for shared_memory in (True, False):
        # Ranks that exchange tensors through memory of their own can go on with steps.
        os.environ["FSDP_FLAT_SHARED_MEMORY"] = "1" if shared_memory else "0"
        for is_used in (False, True):
            group = dist.new_group()
            model = shard(seeded(), use_orig_params=shared_memory, process_group=group)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            found = {**saves(model, optimizer, path), **({} if shared_memory and is_used else steps(model, rank))}
            if is_used:
                train(model, optimizer, rank, range(1))
                with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                    sharded, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)

                def load(model: Any = model, sharded: Any = sharded) -> None:
                    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                        model.load_state_dict(sharded)

                found["load_state_dict"] = load
                found["optim_state_dict_to_load"] = lambda m=model, o=optimizer, s=states: (
                    FSDP.optim_state_dict_to_load(m, o, s)
                )
                if not shared_memory:
                    found = {"backward": square_loss(model, batch(rank)).backward, **found}
            where = f"{'shared memory' if shared_memory else 'gloo'}, {'used' if is_used else 'unused'}"
            calls.update({f"{name} ({where})": call for name, call in found.items()})
    dist.barrier()
    dist.destroy_process_group()
    problems = []
    for name, call in calls.items():
        try:
            call()
            problems.append(f"{name} raised nothing")
        except UsageError as error:
            if f"in which this is rank {rank}, was destroyed" not in str(error):
                problems.append(f"{name} raised {error}")
        except Exception:
            problems.append(f"{name} raised {traceback.format_exc()}")
    # The process ends with its model still in use.
    (path / f"rank-{rank}").write_text("\n".join([f"{len(calls)} calls", *problems]))


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
def test_every_call_that_needs_other_ranks_says_that_the_group_was_destroyed(tmp_path: Path) -> None:
    spawn(on_rank, tmp_path, num_ranks=2)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["50 calls"] * 2
