"""States that are tensors made of others, as of 8-bit optimizers: saved as values, and loaded into their own class."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import DTensor

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import (
    StateDictType,
    fully_shard,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from fsdp_flat.errors import LoadError, PeerFailureError, UnsupportedError
from tests.checkpoint.test_checkpoints import write_with_record
from tests.optim_state.quantized import Closed, Rounded, RoundingSGD
from tests.support import Ranks, assert_equal, on_ranks

RanksOf = Callable[..., Ranks]
SIDES = pytest.mark.parametrize("side", ["originals", "flat", "fully_shard"])
FAILED = (UnsupportedError, PeerFailureError)


def sharded(side: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    if side != "fully_shard":
        return FSDP(model, use_orig_params=side == "originals")
    fully_shard(model)
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        torch.manual_seed(seed + 10 * dist.get_rank())
        model(torch.randn(4, 6)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def kinds(optimizer: torch.optim.Optimizer) -> list[type]:
    found = [row["momentum"] for row in optimizer.state.values()]
    return [type(each._local_tensor if isinstance(each, DTensor) else each) for each in found]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [(each._local_tensor if isinstance(each, DTensor) else each).detach().clone() for each in model.parameters()]


@SIDES
@pytest.mark.parametrize("background", [False, True])
@on_ranks(2, 4)
def test_training_goes_on_to_the_bit_from_a_checkpoint_of_quantized_states(
    side: str, background: bool, tmp_path: Path
) -> None:
    """torchao's AdamW8bit wrote what nothing could read."""
    model = sharded(side)
    optimizer = RoundingSGD(model.parameters())
    steps(model, optimizer, 1, 2)
    before = kinds(optimizer)
    assert Rounded in before
    path = save_checkpoint(tmp_path, model, optimizer, background=background).wait()
    verify_checkpoint(path)
    steps(model, optimizer, 3, 4)

    again = sharded(side)
    loaded = RoundingSGD(again.parameters())
    load_checkpoint(tmp_path, again, loaded)
    assert kinds(loaded) == before
    steps(again, loaded, 3, 4)
    assert_equal(dict(enumerate(weights(again))), dict(enumerate(weights(model))))


def save_whole_numbers(path: Path, side: str) -> None:
    model = sharded(side)
    optimizer = RoundingSGD(model.parameters())
    steps(model, optimizer, 1)
    for row in optimizer.state.values():
        state = row["momentum"]._local_tensor if isinstance(row["momentum"], DTensor) else row["momentum"]
        state.copy_(torch.arange(state.numel()).remainder(5).view(state.shape).float())
    save_checkpoint(path, model, optimizer)
    torch.save(momenta(model, optimizer), path / f"momenta{dist.get_rank()}.pt")


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        states = FSDP.optim_state_dict(model, optimizer)["state"]
    return {name: row["momentum"] for name, row in states.items()}


def load_whole_numbers(path: Path, side: str) -> None:
    model = sharded(side)
    optimizer = RoundingSGD(model.parameters())
    load_checkpoint(path, model, optimizer)
    assert Rounded in kinds(optimizer)
    assert_equal(momenta(model, optimizer), torch.load(path / "momenta0.pt"))


@pytest.mark.parametrize("side", ["originals", "fully_shard"])
def test_quantized_states_are_loaded_at_another_number_of_ranks(ranks: RanksOf, side: str, tmp_path: Path) -> None:
    """Values that every block can hold are the same however ranks divide them."""
    ranks(4).run(save_whole_numbers, tmp_path, side)
    ranks(2).run(load_whole_numbers, tmp_path, side)


@SIDES
@on_ranks(2)
def test_states_of_a_full_state_dict_are_put_into_the_class_that_the_optimizer_has(side: str) -> None:
    """State dicts, which torch's FSDP1 cannot gather of such states either."""
    model = sharded(side)
    optimizer = RoundingSGD(model.parameters())
    steps(model, optimizer, 1)
    saved, before = momenta(model, optimizer), kinds(optimizer)
    assert {type(each) for each in saved.values()} == {torch.Tensor}
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizer)
        steps(model, optimizer, 2)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    assert kinds(optimizer) == before
    assert_equal(momenta(model, optimizer), saved)


@SIDES
@on_ranks(2)
def test_a_state_whose_values_cannot_be_read_is_refused_by_name_before_anything_is_written(
    side: str, tmp_path: Path
) -> None:
    """Else the checkpoint is listed as complete, and cannot be read."""
    model = sharded(side)
    optimizer = RoundingSGD(model.parameters(), kind=Closed)
    steps(model, optimizer, 1)
    with pytest.raises(FAILED, match=r"State 'momentum' of '[02]\.\w+' is a Closed, a tensor made of other"):
        save_checkpoint(tmp_path, model, optimizer)
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(tmp_path, model)
    assert [found.problem for found in list_checkpoints(tmp_path)] == [""]


@on_ranks(2)
def test_a_buffer_made_of_other_tensors_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    """The model's own tensors."""
    model = nn.Linear(4, 4)
    model.register_buffer("table", Rounded(torch.ones(4, dtype=torch.int8), torch.ones(())))
    wrapped = FSDP(model, use_orig_params=True, ignored_states=[])
    with pytest.raises(FAILED, match=r"made of other tensors.*'table', the first a Rounded"):
        save_checkpoint(tmp_path, wrapped)
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_the_model_is_loaded_from_a_checkpoint_whose_optimizer_states_are_not_whole(tmp_path: Path, rank: int) -> None:
    """The part of a checkpoint that is whole stays readable when another part is not."""
    model = sharded("originals")
    optimizer = torch.optim.Adam(model.parameters())
    steps(model, optimizer, 1)
    path, before = save_checkpoint(tmp_path, model, optimizer).wait(), weights(model)
    if rank == 0:
        found: Metadata = pickle.loads((path / ".metadata").read_bytes())
        lost = next(index for index in found.storage_data if index.fqn == "optim.state.0.weight.exp_avg")
        assert isinstance(lost, MetadataIndex)
        del found.storage_data[lost]
        write_with_record(path, ".metadata", pickle.dumps(found))
    dist.barrier()
    steps(model, optimizer, 2)
    load_checkpoint(tmp_path, model)
    assert_equal(dict(enumerate(weights(model))), dict(enumerate(before)))
    with pytest.raises((LoadError, PeerFailureError), match="exp_avg"):
        load_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(LoadError, match="exp_avg"):
        verify_checkpoint(path)
