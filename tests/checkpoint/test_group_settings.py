"""Learning rates and other settings of parameter groups that differ between ranks are told, and not saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import check_replicas, fully_shard, load_checkpoint, save_checkpoint
from fsdp_flat.errors import OptionTypeError, RankMismatchError
from tests.support import on_ranks
from tests.support.wrapper_models import seeded, shard, train

FRONTS = pytest.mark.parametrize("front", ["flat", "originals", "fully_shard"])


def made(front: str) -> nn.Module:
    return fully_shard(seeded()) if front == "fully_shard" else shard(seeded(), use_orig_params=front == "originals")


@FRONTS
@on_ranks(2, 4)
def test_a_learning_rate_from_a_local_loss_is_not_saved_and_is_told(front: str, tmp_path: Path, rank: int) -> None:
    model = made(front)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    train(model, optimizer, rank, range(1))
    save_checkpoint(tmp_path, model, optimizer)
    for loss in (1.0, 0.5 + rank):
        scheduler.step(loss)
    others = ", 0.0625 on rank 2, 0.0625 on rank 3" if dist.get_world_size() == 4 else ""
    text = rf"nothing was saved: 'lr' is 0.125 on rank 0, 0.0625 on rank 1{others} \(of '[\w.]+'.*\)\. A checkpoint"
    with pytest.raises(RankMismatchError, match=text):
        save_checkpoint(tmp_path, model, optimizer)
    names = check_replicas(model, optimizer)
    assert names
    assert all(name.startswith("'lr' of '") for name in names)
    assert check_replicas(model) == []
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    load_checkpoint(tmp_path, model, optimizer)
    assert check_replicas(model, optimizer) == []
    save_checkpoint(tmp_path, model, optimizer)


@pytest.mark.parametrize(
    "name, values",
    [
        ("weight_decay", (0.0, 0.5)),
        ("betas", ((0.9, 0.99), (0.9, 0.98))),
        ("maximize", (False, True)),
        ("lr", (torch.tensor(0.5), torch.tensor(0.25))),
    ],
)
@on_ranks(2)
def test_every_setting_is_compared(name: str, values: tuple[object, object], tmp_path: Path, rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    optimizer.param_groups[0][name] = values[rank]
    with pytest.raises(RankMismatchError, match=rf"'{name}' is .* on rank 0, .* on rank 1 \(of 'blocks\."):
        save_checkpoint(tmp_path, model, optimizer)
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_ranks_may_have_other_groups_and_objects_as_settings(tmp_path: Path, rank: int) -> None:
    """One group a parameter of which the rank has elements, each with its own rate, and a function in every group."""
    model = shard(seeded(), use_orig_params=True)
    rates = {name: 0.25 if "bias" in name else 0.5 for name, _ in model.named_parameters()}
    groups = [
        {"params": [param], "lr": rates[name], "of": lambda: rank}
        for name, param in model.named_parameters()
        if param.numel()
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert check_replicas(model, optimizer) == []
    for group in optimizer.param_groups:
        del group["of"]
    save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(OptionTypeError, match="optim must be an optimizer, which has param_groups; got int"):
        check_replicas(model, 3)
