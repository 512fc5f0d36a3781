"""Wraps a model by hand with enable_wrap and wrap, freezes a part of it, and accumulates gradients. For torchrun."""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp.wrap import enable_wrap, wrap

WIDTH = 12


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x + self.scale * self.body(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = wrap(nn.Linear(4, WIDTH))
        self.layers = nn.Sequential(*(wrap(Residual()) for _ in range(3)))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.out(self.layers(self.features(x)))


def build(device):
    torch.manual_seed(0)
    options = {
        "device_id": device,
        "use_orig_params": True,
        "sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP,
        "backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_POST,
        "forward_prefetch": True,
    }
    with enable_wrap(wrapper_cls=fsdp.FullyShardedDataParallel, **options):
        model = wrap(Model())
    for parameter in model.features.parameters():
        parameter.requires_grad = False
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, Residual)
    )
    return model


def train(steps=4, accumulate=2):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    model = build(device)
    if rank == 0:
        print(f"model of {type(model).__module__.partition('.')[0]}", flush=True)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9)
    numbers = torch.randn(steps, accumulate, world_size, 8, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(steps):
        total = torch.zeros((), device=device)
        for part in range(accumulate):
            x = numbers[step, part, rank].to(device)
            with contextlib.nullcontext() if part == accumulate - 1 else model.no_sync():
                loss = nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True)) / accumulate
                loss.backward()
            total += loss.detach()
        model.clip_grad_norm_(5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
        if rank == 0:
            print(f"step {step} loss {losses[-1]:.7f}", flush=True)
    with fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        size = sum(parameter.norm().item() for parameter in model.parameters())
    if rank == 0:
        print(f"sum of norms {size:.5f}", flush=True)
    return losses


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train()
    dist.destroy_process_group()
