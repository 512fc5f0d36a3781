"""The shortest program with fully_shard. Run it with `torchrun --nproc-per-node 2 examples/fully_shard.py`."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_flat import fully_shard


class Block(nn.Sequential):
    """A block, one unit: its unsharded parameters exist only while it computes."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU for each rank of this machine
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # NCCL, whose tensors are on GPUs: a model on the CPU moves to this rank's
else:
    dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank starts from the same weights
model = nn.Sequential(*[Block(16) for _ in range(4)])
for block in model:
    fully_shard(block)
fully_shard(model)  # last, the module that runs the others
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # afterwards: parameters are DTensors now

device = next(model.parameters()).device  # where the model computes
torch.manual_seed(dist.get_rank())  # every rank draws its own data
for step in range(201):
    numbers = torch.randn(256, 16, device=device)
    loss = nn.functional.mse_loss(model(numbers), numbers.sort().values)  # learn to sort sixteen numbers
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")

dcp.save({"model": model.state_dict()}, checkpoint_id="checkpoints/fully_shard")  # each rank writes its own shards
dist.destroy_process_group()
