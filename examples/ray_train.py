"""Trains on workers of Ray Train, saves checkpoints that survive a lost worker, and goes on from the last one.

Run it with ``pip install 'ray[train]'``, then ``python examples/ray_train.py``: two workers on this machine's CPUs. For
a cluster give ``--storage`` a folder that all of its machines see; for GPUs ``--gpu``.
"""

import argparse

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import load_checkpoint, save_checkpoint
from fsdp_flat.wrap import ModuleWrapPolicy


class Block(nn.Sequential):
    """A block, one unit: its unsharded parameters exist only while it computes."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def train(config: dict) -> None:
    """Train on one rank; Ray Train has made the process group and chosen the device."""
    torch.manual_seed(0)  # every rank starts from the same weights
    model = nn.Sequential(*[Block(16) for _ in range(4)]).to(get_device())
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))  # not ray.train.torch.prepare_model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = load_checkpoint(config["checkpoints"], model, optimizer)  # None on the first start
    start = 0 if found is None else found.step + 1

    torch.manual_seed(1000 * start + dist.get_rank())  # every rank draws its own data
    for step in range(start, config["steps"]):
        numbers = torch.randn(256, 16, device=get_device())
        loss = nn.functional.mse_loss(model(numbers), numbers.sort().values)  # learn to sort sixteen numbers
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            save_checkpoint(config["checkpoints"], model, optimizer, step=step)
            ray.train.report({"step": step, "loss": loss.item()})
            if dist.get_rank() == 0:
                print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Start the workers, and wait for their end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--storage", default="/tmp/ray_train", help="folder for the results and the checkpoints")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps, "checkpoints": f"{args.storage}/checkpoints"},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(storage_path=args.storage, failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
