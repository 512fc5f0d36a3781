"""Trains a small language model with FSDP, one process a rank, in the way of PyTorch's FSDP tutorials."""

import argparse
import functools

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,  # for saving
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import CPUOffload
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, WIDTH, LENGTH = 32, 16, 8

bfSixteen = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def setup(rank, world_size, init_method):
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)


def train_epoch(args, model, device, loader, optimizer, epoch, sampler):
    model.train()
    sampler.set_epoch(epoch)
    total = torch.zeros(2, device=device)
    for tokens, targets in loader:
        optimizer.zero_grad()
        logits = model(tokens.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        model.clip_grad_norm_(args.max_norm)
        optimizer.step()
        total += torch.stack([loss.detach() * len(tokens), torch.tensor(float(len(tokens)), device=device)])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return (total[0] / total[1]).item()


def train(rank, world_size, args):
    torch.manual_seed(args.seed)
    tokens = torch.randint(VOCABULARY, (32, LENGTH))
    dataset = TensorDataset(tokens, tokens.sort().values)
    sampler = DistributedSampler(dataset, rank=rank, num_replicas=world_size, shuffle=True)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(
        Model(),
        auto_wrap_policy=policy,
        mixed_precision=bfSixteen if on_gpu else None,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=CPUOffload(offload_params=False),
        device_id=device,
    )
    if rank == 0:
        print(f"model of {type(model).__module__.partition('.')[0]}", flush=True)
    optimizer = optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    losses = []
    for epoch in range(args.epochs):
        losses.append(train_epoch(args, model, device, loader, optimizer, epoch, sampler))
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {losses[-1]:.7f}", flush=True)

    save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, args.save)
    return losses


def fsdp_main(rank, world_size, args):
    setup(rank, world_size, args.init_method)
    train(rank, world_size, args)
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="model.pt")
    parser.add_argument("--init-method", default="tcp://localhost:12355")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    args = parse()
    world_size = torch.cuda.device_count() if torch.cuda.is_available() else 2
    mp.spawn(fsdp_main, args=(world_size, args), nprocs=world_size, join=True)
