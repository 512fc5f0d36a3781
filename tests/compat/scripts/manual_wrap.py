"""A torchrun script that wraps by hand, accumulates, clips, scales losses and recomputes activations."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.inp = nn.Linear(4, width)
        self.blocks = nn.ModuleList([wrap(Block(width)) for _ in range(3)])
        self.out = wrap(nn.Linear(width, 2), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def main(out):
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **options):
        model = wrap(Model())
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: isinstance(module, Block),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = ShardedGradScaler(device="cpu", init_scale=16.0)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(4):
        total = 0.0
        batches = torch.randn(2, 5, 4, generator=generator)
        with model.no_sync():
            loss = model(batches[0]).square().mean()
            scaler.scale(loss).backward()
            total += loss.item()
        loss = model(batches[1]).square().mean()
        scaler.scale(loss).backward()
        total += loss.item()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append([total, norm.item()])
    with FullyShardedDataParallel.summon_full_params(model):
        weights = {name: value.sum().item() for name, value in model.named_parameters()}
    if rank == 0:
        with open(out, "w") as file:
            kind = f"{FullyShardedDataParallel.__module__}.{type(model).__name__}"
            json.dump({"losses": losses, "weights": weights, "class": kind}, file)
    if mine:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
