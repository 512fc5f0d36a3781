"""A trainer in the style of the official FSDP tutorial: spawned ranks, size policy, full state dict on rank 0."""

import argparse
import functools
import json
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import BackwardPrefetch, CPUOffload
from torch.distributed.fsdp.wrap import enable_wrap, size_based_auto_wrap_policy, wrap
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.dropout1 = nn.Dropout(0.0)
        self.fc1 = nn.Linear(144, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 1)
        x = self.dropout1(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(args, model, rank, loader, optimizer, epoch, sampler):
    model.train()
    ddp_loss = torch.zeros(2)
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target, reduction="sum")
        loss.backward()
        optimizer.step()
        ddp_loss[0] += loss.item()
        ddp_loss[1] += len(data)
    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    return (ddp_loss[0] / ddp_loss[1]).item()


def train_all(rank, world_size, args):
    """What a rank does between setup and cleanup."""
    torch.manual_seed(1)
    dataset = TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,)))
    sampler = DistributedSampler(dataset, rank=rank, num_replicas=world_size, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    my_auto_wrap_policy = functools.partial(size_based_auto_wrap_policy, min_num_params=400)
    model = FSDP(
        Net(),
        auto_wrap_policy=my_auto_wrap_policy,
        cpu_offload=CPUOffload(offload_params=False),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
    )
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(1, args.epochs + 1):
        losses.append(train(args, model, rank, loader, optimizer, epoch, sampler))
        scheduler.step()
    states = model.state_dict()
    if rank == 0:
        names = {name: list(value.shape) for name, value in states.items()}
        with open(args.out, "w") as file:
            json.dump({"losses": losses, "names": names, "class": f"{FSDP.__module__}.{type(model).__name__}"}, file)


def fsdp_main(rank, world_size, args):
    setup(rank, world_size, args.out + ".store")
    train_all(rank, world_size, args)
    dist.barrier()
    cleanup()


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--out", default="out.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    assert callable(enable_wrap)
    assert callable(wrap)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(fsdp_main, args=(2, parse()), nprocs=2, join=True)
