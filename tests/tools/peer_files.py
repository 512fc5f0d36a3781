"""Checkpoints of one trained model that torch's FSDPs, this library and plain torch write, each into its own folder."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import save_checkpoint, save_full


def build() -> nn.Sequential:
    """A model with rows that 2 ranks do not divide, buffers, and a scalar."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Take two steps, on the same numbers on every rank, and return the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def write_peer_files(folder: Path) -> None:
    """Write all of them. Every rank must call this."""
    with warnings.catch_warnings():
        # FSDP1 says of each of its state-dict types that it is deprecated.
        warnings.simplefilter("ignore")
        _write_fsdp2(folder)
        _write_fsdp1(folder)
    model = FSDP(build(), use_orig_params=True)
    optimizer = trained(model)
    save_checkpoint(folder / "run", model, optimizer, {"seed": dist.get_rank()}, step=3)
    save_full(model, folder / "hub")
    save_full(model, folder / "hub_of_two", max_file_bytes=200)


def _write_fsdp2(folder: Path) -> None:
    model = build()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = trained(model)
    states, optim_states = sd.get_state_dict(model, optimizer)
    dcp.save({"model": states, "optim": optim_states, "step": 7}, checkpoint_id=folder / "fsdp2")
    _save_of_rank(model.state_dict(), folder / "fsdp2_files")
    full = sd.StateDictOptions(full_state_dict=True)
    states, optim_states = sd.get_state_dict(model, optimizer, options=full)
    if dist.get_rank() == 0:
        torch.save(states, folder / "model.pt")
        torch.save({"model": states, "optim": optim_states, "step": 7}, folder / "all.pt")


def _write_fsdp1(folder: Path) -> None:
    policy = ModuleWrapPolicy({nn.Linear})
    for kind, use_orig_params in (("sharded", True), ("local", False), ("full", False)):
        model = TorchFSDP(
            build(),
            auto_wrap_policy=policy,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
        )
        optimizer = trained(model)
        with TorchFSDP.state_dict_type(model, StateDictType[f"{kind.upper()}_STATE_DICT"]):
            state = {"model": model.state_dict()}
            if kind != "local":
                state["optim"] = TorchFSDP.optim_state_dict(model, optimizer)
        if kind == "sharded":
            dcp.save(state, checkpoint_id=folder / "fsdp1")
        _save_of_rank(state, folder / f"fsdp1_{kind}_files")


def _save_of_rank(state: dict[str, object], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
