"""The shortest complete program. Run it with `torchrun --nproc-per-node 2 examples/minimal.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullStateDictConfig, StateDictType
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.wrap import ModuleWrapPolicy


class Block(nn.Sequential):
    """A block, wrapped as one unit: its unsharded parameters exist only while it computes."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU for each rank of this machine
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # NCCL, whose tensors are on GPUs: a model on the CPU moves to this rank's
else:
    dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank starts from the same weights
model = FSDP(nn.Sequential(*[Block(16) for _ in range(4)]), auto_wrap_policy=ModuleWrapPolicy({Block}))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after wrapping: its state is sharded too

device = next(model.parameters()).device  # where the model computes
torch.manual_seed(dist.get_rank())  # every rank draws its own data
for step in range(201):
    numbers = torch.randn(256, 16, device=device)
    loss = nn.functional.mse_loss(model(numbers), numbers.sort().values)  # learn to sort sixteen numbers
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}")

with FSDP.state_dict_type(
    model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
):
    full = model.state_dict()  # every rank must call this; rank 0 gets the full tensors, on the CPU
if dist.get_rank() == 0:
    torch.save(full, "minimal.pt")
dist.destroy_process_group()
