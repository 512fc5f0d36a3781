"""A rank that fails in a save or a load before ranks meet tells the others, which raise in seconds; then all go on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_flat import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictType,
    fully_shard,
    installed,
    iter_full_state_dict,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import PeerFailureError
from tests.support import assert_equal, on_ranks
from tests.support.patience import SECONDS, alone_after
from tests.support.wrapper_models import seeded, shard, whole_state

PRINT = "fsdp_flat.guards.unmanaged_tensors._fingerprint"


def fail(*_: Any, **_options: Any) -> Any:
    raise MemoryError("no room")


def raised_in_seconds(rank: int, call: Callable[[], object], *, failing: int = 1) -> None:
    """Assert that ``call`` raises on all ranks, within seconds, with the text of the failing rank's error."""
    begun = time.monotonic()
    with pytest.raises(MemoryError if rank == failing else PeerFailureError, match="no room") as caught:
        call()
    assert time.monotonic() - begun < SECONDS
    if rank != failing:
        assert re.search(r"Rank \d of the group failed while", str(caught.value))


def sharded(model: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return dict(model.state_dict())


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
# What fails on one rank alone, and the call. The wrapper's own hook is the caller's.
SAVES: dict[str, tuple[str, Callable[[Any, Any, Path], object]]] = {
    "a fingerprint, save_checkpoint": (PRINT, lambda model, _, path: save_checkpoint(path, model)),
    "the index, save_checkpoint": (
        "fsdp_flat.checkpoint.checkpoints.ParamIndex",
        lambda model, optimizer, path: save_checkpoint(path, model, optimizer),
    ),
    "digests, save_checkpoint": (
        "fsdp_flat.state.optim_states.OptimStates.digests",
        lambda model, optimizer, path: save_checkpoint(path, model, optimizer, background=True),
    ),
    "a fingerprint, save_full": (PRINT, lambda model, _, path: save_full(model, path)),
    "a fingerprint, state_dict": (PRINT, lambda model, *_: model.state_dict()),
    "a hook, state_dict": ("hook", lambda model, *_: model.state_dict()),
    "a hook, SHARDED state_dict": ("hook", lambda model, *_: sharded(model)),
    "shards, state_dict": (
        "fsdp_flat.core.unit.Unit.adopt_assigned",
        lambda model, *_: model.state_dict(),
    ),
    "a fingerprint, get_model_state_dict": (PRINT, lambda model, *_: get_model_state_dict(model)),
    "a hook, full get_model_state_dict": ("hook", lambda model, *_: get_model_state_dict(model, options=FULL)),
    "contents, optim_state_dict": (
        "fsdp_flat.state.optim_save.contents_of",
        lambda model, optimizer, _: FSDP.optim_state_dict(model, optimizer),
    ),
    "contents, get_optimizer_state_dict": (
        "fsdp_flat.state.optim_save.contents_of",
        lambda model, optimizer, _: get_optimizer_state_dict(model, optimizer, options=FULL),
    ),
    "entries, iter_full_state_dict": (
        "fsdp_flat.checkpoint.full_entries.boxed_state_dict",
        lambda model, *_: list(iter_full_state_dict(model)),
    ),
}


@pytest.mark.parametrize("what", SAVES)
@on_ranks(2)
def test_a_rank_that_fails_before_a_save_meets_others_fails_the_save_on_all(
    what: str, tmp_path: Path, rank: int
) -> None:
    where, call = SAVES[what]
    model = shard(seeded(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = whole_state(model)
    with pytest.MonkeyPatch.context() as patch:
        hook = None
        if rank == 1 and where == "hook":
            hook = model.register_state_dict_pre_hook(fail)
        elif rank == 1:
            patch.setattr(where, fail)
        with installed() if "get_" in what else nullcontext():
            raised_in_seconds(rank, lambda: call(model, optimizer, tmp_path))
        if hook is not None:
            hook.remove()
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    # Ranks are at the same call again.
    assert_equal(whole_state(model), expected)
    assert_equal(dict(iter_full_state_dict(model, dst=None)), expected)


@pytest.mark.parametrize("failing", range(4))
@on_ranks(4)
def test_ranks_of_another_line_of_a_mesh_are_told_too(failing: int, rank: int) -> None:
    """Full tensors are gathered over both dims."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    parallelize_module(inner, mesh["tp"], {"0": ColwiseParallel()})
    model = FSDP(inner, device_mesh=mesh["dp"], use_orig_params=True)
    expected = whole_state(model)
    with pytest.MonkeyPatch.context() as patch:
        hook = model.register_state_dict_pre_hook(lambda *_: fail() if rank == failing else None)
        raised_in_seconds(rank, model.state_dict, failing=failing)
        hook.remove()
        if rank == failing:
            patch.setattr("fsdp_flat.checkpoint.full_entries.boxed_state_dict", fail)
        raised_in_seconds(rank, lambda: list(iter_full_state_dict(model)), failing=failing)
    assert_equal(whole_state(model), expected)


def load_of_shards(model: Any, state: Any) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    "where", ["hook", "fsdp_flat.state.model_load.copy_of", "fsdp_flat.state.chunks.ChunkCodec.decode"]
)
@on_ranks(2)
def test_a_rank_that_fails_before_a_load_of_chunks_meets_others_fails_it_on_all(where: str, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    expected, state = whole_state(model), sharded(shard(seeded(seed=1), use_orig_params=True))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and where == "hook":
            hook = model.register_load_state_dict_pre_hook(fail)
        elif rank == 1:
            patch.setattr(where, fail)
        begun = time.monotonic()
        with pytest.raises((MemoryError, RuntimeError), match="no room"):
            load_of_shards(model, state)
        assert time.monotonic() - begun < SECONDS
        if rank == 1 and where == "hook":
            hook.remove()
    assert_equal(whole_state(model), expected)
    load_of_shards(model, state)
    assert_equal(whole_state(model), whole_state(shard(seeded(seed=1))))


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@on_ranks(2)
def test_a_rank_that_fails_before_a_load_of_states_meets_others_fails_it_on_all(kind: str, rank: int) -> None:
    """Full states of rank 0, or chunks of every rank."""
    model = shard(seeded(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    config = FullOptimStateDictConfig(rank0_only=True) if kind == "FULL" else ShardedOptimStateDictConfig()
    with FSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"], None, config):
        state = FSDP.optim_state_dict(model, optimizer)
        for where in ("held_by", "ParamIndex"):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    module = "optim_dicts" if where == "held_by" else "optim_load"
                    patch.setattr(f"fsdp_flat.state.{module}.{where}", fail)
                raised_in_seconds(rank, lambda: FSDP.optim_state_dict_to_load(model, optimizer, state))
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, state)
    optimizer.load_state_dict(loaded)


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_rank_that_fails_alone_at_any_point_of_a_load_fails_it_on_all(
    failing: int, tmp_path: Path, rank: int
) -> None:
    """A module may refuse its values, and a warning of what was passed over may be an error."""
    model = shard(seeded())
    save_checkpoint(tmp_path / "run", model, step=1)
    save_full(model, tmp_path / "full")
    (tmp_path / "run" / "step-00000002").mkdir(exist_ok=True)
    dist.barrier()
    for where, call in (
        ("fsdp_flat.checkpoint.checkpoints.warn_user", lambda: load_checkpoint(tmp_path / "run", model)),
        ("torch.nn.Module.load_state_dict", lambda: load_checkpoint(tmp_path / "run", model, step=1)),
        ("torch.nn.Module.load_state_dict", lambda: load_full(model, tmp_path / "full")),
    ):
        if "warn" in where and failing == 1:
            continue
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(where, fail)
            raised_in_seconds(rank, call, failing=failing)
    with pytest.warns(UserWarning, match="passed over") if rank == 0 else nullcontext():
        assert load_checkpoint(tmp_path / "run", model) is not None


@on_ranks(2)
def test_a_rank_that_no_other_rank_meets_raises_its_own_error(tmp_path: Path, rank: int) -> None:
    """What it failed with says more than that it was alone."""
    model = fully_shard(seeded())
    if rank == 0:
        with alone_after(0.2), pytest.MonkeyPatch.context() as patch:
            patch.setattr(PRINT, fail)
            with pytest.raises(MemoryError, match="no room"):
                save_checkpoint(tmp_path, model)
    dist.barrier()
    assert save_checkpoint(tmp_path, model).path.is_dir()
