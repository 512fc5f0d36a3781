"""Goes on from its last checkpoint after a rank, a machine or the whole job has ended, with as many ranks as there are.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # else ranks that start again may meet addresses of those that ended
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py       one machine
    torchrun --nnodes 1:4 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        examples/elastic.py --out /shared/run                             one to four: the same line on each of them

torchrun ends all ranks if one fails, or if a machine comes or goes, and starts them again, up to three times.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import load_checkpoint, save_checkpoint
from fsdp_flat.wrap import ModuleWrapPolicy


class Block(nn.Sequential):
    """A block, one unit: its unsharded parameters exist only while it computes."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", default="runs/elastic", help="folder of the checkpoints, which all machines see")
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU for each rank of this machine
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
else:
    dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank starts from the same weights
model = FSDP(nn.Sequential(*[Block(16) for _ in range(4)]), auto_wrap_policy=ModuleWrapPolicy({Block}))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
found = load_checkpoint(args.out, model, optimizer)  # None on the first start
start = 0 if found is None else found.step + 1
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks begin at step {start}", flush=True)

device = next(model.parameters()).device
torch.manual_seed(1000 * start + dist.get_rank())  # every rank draws its own data
for step in range(start, args.steps):
    numbers = torch.randn(256, 16, device=device)
    loss = nn.functional.mse_loss(model(numbers), numbers.sort().values)  # learn to sort sixteen numbers
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 49:
        save_checkpoint(args.out, model, optimizer, step=step)  # what a crash in the middle leaves does not count
        if dist.get_rank() == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
