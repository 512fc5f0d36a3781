"""A torchrun script that saves sharded checkpoints, loads them into a fresh model and goes on."""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).tanh()


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), Layer(8), Layer(8), nn.Linear(8, 2))
    model = FSDP(
        model,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer}),
        sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.03)


def steps(model, optimizer, seed, num):
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    losses = []
    for _ in range(num):
        loss = model(torch.randn(6, 4, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(model):
    return FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


def save(model, optimizer, path):
    with sharded(model):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def load(model, optimizer, path):
    with sharded(model):
        # A step makes the states that the checkpoint is read into.
        steps(model, optimizer, 99, 1)
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        model.load_state_dict(state["model"])
        flat = FSDP.optim_state_dict_to_load(model, optimizer, state["optim"])
        optimizer.load_state_dict(flat)


def main(out):
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo")
    model, optimizer = build()
    losses = steps(model, optimizer, 1, 3)
    path = os.path.join(os.path.dirname(out), f"checkpoint-{os.path.basename(out)}")
    save(model, optimizer, path)
    fresh, fresh_optimizer = build()
    load(fresh, fresh_optimizer, path)
    losses += steps(fresh, fresh_optimizer, 2, 3)
    straight = steps(model, optimizer, 2, 3)
    assert straight == losses[3:], (straight, losses[3:])
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump({"losses": losses, "class": f"{FSDP.__module__}.{type(model).__name__}"}, file)
    if mine:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
