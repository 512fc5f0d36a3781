"""Buffers that differ between ranks, as statistics of batches do, are named in a warning by every collective save."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, StateDictType, fully_shard, load_checkpoint, save_checkpoint
from tests.support import assert_equal, on_ranks
from tests.support.kit import mesh, no_shard_allowed

NAMES = "'1.num_batches_tracked', '1.running_mean'"
WARNING = rf"Buffers differ between ranks, and a state dict holds rank 0's: {NAMES}. .*model.average_buffers"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def by_state_dict(kind: StateDictType) -> Callable[[Any, Path], Any]:
    def save(model: Any, folder: Path) -> Any:
        with FSDP.state_dict_type(model, kind):
            return model.state_dict()

    return save


SAVES: dict[str, Callable[[Any, Path], Any]] = {
    "full": by_state_dict(StateDictType.FULL_STATE_DICT),
    "sharded": by_state_dict(StateDictType.SHARDED_STATE_DICT),
    "save_checkpoint": lambda model, folder: save_checkpoint(folder, model),
    "in the background": lambda model, folder: save_checkpoint(folder, model, background=True).wait(),
    "save_full": lambda model, folder: fsdp_flat.save_full(model, folder),
}
FRONTS: dict[str, Callable[[nn.Module], Any]] = {
    "flat": lambda model: FSDP(model),
    "originals": lambda model: FSDP(model, use_orig_params=True),
    "fully_shard": lambda model: fully_shard(model),
}


def drift(model: Any, rank: int) -> None:
    """Change statistics without a backward, which compares buffers too."""
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    with torch.no_grad():
        norm.running_mean.add_(rank)
        norm.num_batches_tracked.add_(rank)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("kind", SAVES)
@on_ranks(2)
def test_a_save_names_the_buffers_that_differ_once(kind: str, front: str, rank: int, tmp_path: Path) -> None:
    if front == "fully_shard" and kind in ("full", "sharded"):
        return  # torch's own state dict, which asks no other rank
    model, save = FRONTS[front](network()), SAVES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(model, tmp_path / "equal")
    drift(model, rank)
    if rank == 0:
        with pytest.warns(UserWarning, match=WARNING) as caught:
            save(model, tmp_path / "differing")
        assert caught[0].filename == __file__
    else:
        save(model, tmp_path / "differing")
    save(model, tmp_path / "again")


@on_ranks(2)
def test_what_is_saved_is_rank_zeros_and_averaging_ends_the_warning(rank: int, tmp_path: Path) -> None:
    model = FSDP(network())
    drift(model, rank)
    if rank == 0:
        with pytest.warns(UserWarning, match=WARNING):
            save_checkpoint(tmp_path, model)
    else:
        save_checkpoint(tmp_path, model)
    before = dict(network().named_buffers())
    load_checkpoint(tmp_path, model)
    assert_equal({name.removeprefix("_fsdp_wrapped_module."): each for name, each in model.named_buffers()}, before)
    other = FSDP(network())
    drift(other, rank)
    other.average_buffers()
    other.state_dict()


@on_ranks(2)
def test_a_warning_that_raises_on_the_first_rank_leaves_the_other_waiting_for_nothing(
    rank: int, tmp_path: Path
) -> None:
    for save in SAVES.values():
        model = FSDP(network())
        drift(model, rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if rank == 0:
                with pytest.raises(UserWarning, match="Buffers differ"):
                    save(model, tmp_path)
            else:
                save(model, tmp_path)


@on_ranks(4)
def test_a_save_by_one_replica_alone_compares_the_ranks_that_share_its_parameters(rank: int) -> None:
    model = FSDP(network(), device_mesh=mesh(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    drift(model, rank)
    if rank == 0:
        with pytest.warns(UserWarning, match=WARNING):
            model.state_dict()
    elif rank == 1:
        model.state_dict()


@on_ranks(2)
def test_a_save_that_communicates_nothing_may_be_on_one_rank_and_does_not_compare(rank: int) -> None:
    with no_shard_allowed():
        model = FSDP(network(), sharding_strategy=ShardingStrategy.NO_SHARD)
    drift(model, rank)
    if rank == 0:
        model.state_dict()
