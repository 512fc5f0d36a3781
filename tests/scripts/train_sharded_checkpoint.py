"""Saves and resumes with sharded state dicts through torch.distributed.checkpoint. For torchrun."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import fully_sharded_data_parallel, wrap

FSDP = fully_sharded_data_parallel.FullyShardedDataParallel


class Block(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


def build(device):
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(Block(10), Block(10), nn.Linear(10, 6)),
        auto_wrap_policy=wrap.ModuleWrapPolicy({Block}),
        device_id=device,
        use_orig_params=True,
    )
    FSDP.set_state_dict_type(
        model,
        torch.distributed.fsdp.StateDictType.SHARDED_STATE_DICT,
        torch.distributed.fsdp.ShardedStateDictConfig(offload_to_cpu=False),
        torch.distributed.fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False),
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def steps(model, optimizer, numbers):
    rank = dist.get_rank()
    losses = []
    for batch in numbers:
        loss = nn.functional.cross_entropy(model(batch[rank]), batch[rank].argmax(1) % 6)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if rank == 0:
            print(f"loss {losses[-1]:.7f}", flush=True)
    return losses


def save(folder, model, optimizer):
    state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def load(folder, model, optimizer):
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    saved = load_sharded_optimizer_state_dict(
        model_state_dict=state["model"], optimizer_key="optim", storage_reader=dcp.FileSystemReader(folder)
    )
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optim"]))


def numbers_for(device, start, stop):
    everything = torch.randn(6, dist.get_world_size(), 5, 10, generator=torch.Generator().manual_seed(2))
    return everything[start:stop].to(device)


def first(folder, device):
    model, optimizer = build(device)
    if dist.get_rank() == 0:
        print(f"model of {type(model).__module__.partition('.')[0]}", flush=True)
    losses = steps(model, optimizer, numbers_for(device, 0, 3))
    save(folder, model, optimizer)
    return losses


def resumed(folder, device):
    model, optimizer = build(device)
    load(folder, model, optimizer)
    return steps(model, optimizer, numbers_for(device, 3, 6))


def train(folder):
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    return first(folder, device) + resumed(folder, device)


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(sys.argv[1])
    dist.destroy_process_group()
