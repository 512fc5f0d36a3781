"""Every way to save and load a sharded model, each checked as it goes.

Run it with `torchrun --nproc-per-node 2 examples/checkpoints.py`, then again with another number of ranks: the second
run goes on from the checkpoint of the first.
"""

import argparse
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_flat import (
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    iter_full_state_dict,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.wrap import ModuleWrapPolicy


class Block(nn.Sequential):
    """The unit in which the model is sharded."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def plain_model(seed: int = 0) -> nn.Module:
    """The model before it is wrapped."""
    torch.manual_seed(seed)
    return nn.Sequential(*[Block(16) for _ in range(2)])


def sharded_model(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A wrapped model with its optimizer."""
    model = FSDP(plain_model(seed), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One training step on data that depends on its number; the loss over all ranks."""
    numbers = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
    own = numbers.chunk(dist.get_world_size())[dist.get_rank()]
    loss = nn.functional.mse_loss(model(own), own.sort().values)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def say(text: str) -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def same(model: nn.Module, other: nn.Module) -> bool:
    """Whether two wrapped models have the same weights. Every rank must call this."""
    mine, others = model.state_dict(), other.state_dict()
    return all(torch.equal(mine[name], others[name]) for name in mine)


def run(folder: Path) -> None:
    """Train a little, and save and load in every form."""
    model, optimizer = sharded_model()

    # 1. A training run that may be killed at any moment, and started again with any number of ranks.
    found = load_checkpoint(folder / "run", model, optimizer)
    first = 0 if found is None else found.extra["next step"]
    if found is not None:
        say(f"went on from {found.path.name} with {dist.get_world_size()} ranks")
    for number in range(first, first + 10):
        loss = step(model, optimizer, number)
    saving = save_checkpoint(folder / "run", model, optimizer, {"next step": first + 10}, background=True)
    say(f"step {first + 9}: loss {loss:.4f}")  # training may go on while the files are written
    saving.wait()

    # 2. The whole model in one file, for inference or another library: safetensors, one parameter in memory at a time.
    save_full(model, folder / "hub", dtype=torch.float32)
    other, _ = sharded_model(seed=1)
    load_full(other, folder / "hub")
    say(f"safetensors: same weights {same(model, other)}")

    # 3. The whole model as a state dict on rank 0, as FSDP1 gives it; a plain model loads it.
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        full = model.state_dict()
    if dist.get_rank() == 0:
        plain_model().load_state_dict(full)

    # 4. Sharded, for torch.distributed.checkpoint: boxes of the shards as they are, without communication. FSDP2, a
    #    plain model and any other sharding read these files too.
    boxes = ShardedStateDictConfig(boxes=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, boxes):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "sharded")
    other, _ = sharded_model(seed=2)
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT, boxes):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder / "sharded")
        other.load_state_dict(state["model"])
    say(f"sharded: same weights {same(model, other)}")

    # 5. The optimizer under parameter names, whole; it fits any wrapping, and torch FSDP1.
    states = FSDP.optim_state_dict(model, optimizer)
    other, its_optimizer = sharded_model(seed=3)
    its_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, its_optimizer, states))

    # 6. Local: this rank's flat shards, for the same wrapping and number of ranks only. Nothing is faster.
    model, optimizer = sharded_model()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(model.state_dict())

    # 7. One parameter after another, for whatever else there is to do with them.
    largest = max(value.abs().max().item() for _, value in iter_full_state_dict(model, dst=None))
    say(f"largest weight {largest:.3f}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="folder of all files")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    # torch's own: torch.distributed.checkpoint asks torch for names that it has deprecated.
    warnings.filterwarnings("ignore", module="torch")
    run(options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
