"""Saves and loads a sharded model in every way, and checks each result.

Run `torchrun --nproc-per-node 2 examples/checkpoints.py`, then again with another number of ranks: the second run
resumes from the checkpoint of the first. The example also exchanges checkpoints with torch's FSDP1 and FSDP2.
"""

import argparse
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import compute_device, process_group
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard

from fsdp_flat import (
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    iter_full_state_dict,
    list_checkpoints,
    load_checkpoint,
    load_full,
    save_checkpoint,
    save_full,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.wrap import ModuleWrapPolicy


class Block(nn.Sequential):
    """A block of the model, wrapped as one unit."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


# Where everything computes: this rank's GPU, or the CPU.
DEVICE = compute_device()


def plain_model(seed: int = 0) -> nn.Module:
    """Creates the plain model, before it is wrapped."""
    torch.manual_seed(seed)
    return nn.Sequential(*[Block(16) for _ in range(2)]).to(DEVICE)


def sharded_model(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Creates a wrapped model and its optimizer."""
    model = FSDP(plain_model(seed), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Takes one training step on data that depends on its number; returns the mean loss over all ranks."""
    numbers = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
    own = numbers.chunk(dist.get_world_size())[dist.get_rank()].to(DEVICE)
    loss = nn.functional.mse_loss(model(own), own.sort().values)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def say(text: str) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def check(what: str, mine: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Checks that two dicts of full tensors are equal on this rank, and prints the result."""
    if sorted(mine) != sorted(others) or not all(torch.equal(mine[name].cpu(), others[name].cpu()) for name in mine):
        raise SystemExit(f"{what}: other values on rank {dist.get_rank()}")
    say(f"{what}: same values")


def train_and_resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Trains in a run that may be killed at any moment and resumed with any number of ranks."""
    found = load_checkpoint(folder, model, optimizer)
    first = 0 if found is None else found.step + 1  # nothing there: the first run
    if found is not None:
        say(f"went on from {found.path.name} with {dist.get_world_size()} ranks")
    for number in range(first, first + 10):
        loss = step(model, optimizer, number)
    saving = save_checkpoint(folder, model, optimizer, step=first + 9, background=True)
    say(f"step {first + 9}: loss {loss:.4f}")  # training may continue while the files are written
    saving.wait()
    newest = list_checkpoints(folder)[0]  # without a model; verify_checkpoint(newest.path) compares checksums too
    say(f"newest checkpoint: step {newest.step}, {newest.nbytes:,} bytes, {newest.problem or 'complete'}")


def whole_in_files(folder: Path, model: nn.Module) -> None:
    """Saves the full model for inference or another library: safetensors, one parameter in memory at a time."""
    save_full(model, folder, dtype=torch.float32)
    other, _ = sharded_model(seed=1)
    load_full(other, folder)
    check("safetensors", model.state_dict(), other.state_dict())


def whole_on_one_rank(model: nn.Module) -> None:
    """Gets a full state dict on rank 0, as FSDP1 does, and loads it into a plain model."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        full = model.state_dict()
    if dist.get_rank() == 0:
        plain = plain_model(seed=1)
        plain.load_state_dict(full)
        check("full, in a plain model", plain.state_dict(), full)


def sharded_in_files(folder: Path, model: nn.Module) -> None:
    """Saves shards as chunks for torch.distributed.checkpoint, without communication (`boxes=True`).

    Files written by another number of ranks or another wrapping load the same way.
    """
    boxes = ShardedStateDictConfig(boxes=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, boxes):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = FSDP(plain_model(seed=2), use_orig_params=False)  # one unit for everything
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT, boxes):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
    check("sharded, with another wrapping", model.state_dict(), other.state_dict())


def to_and_from_torch(folder: Path, model: nn.Module) -> None:
    """Loads the files from above into torch's FSDP2, and loads state dicts of torch's FSDP1 and FSDP2."""
    full = model.state_dict()
    theirs = plain_model(seed=3)
    for block in theirs:
        fully_shard(block, mesh=init_device_mesh(DEVICE.type, (dist.get_world_size(),)))
    state = {"model": get_model_state_dict(theirs)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(theirs, state["model"])
    check("read by torch's fully_shard", full, {name: value.full_tensor() for name, value in state["model"].items()})

    dcp.save({"model": get_model_state_dict(theirs)}, checkpoint_id=folder.with_name("from_fsdp2"))
    ours, _ = sharded_model(seed=4)
    with FSDP.state_dict_type(ours, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(boxes=True)):
        state = {"model": ours.state_dict()}
        dcp.load(state, checkpoint_id=folder.with_name("from_fsdp2"))
        ours.load_state_dict(state["model"])
    check("written by torch's fully_shard", full, ours.state_dict())

    fsdp1 = FSDP1(plain_model(seed=5), device_id=DEVICE, use_orig_params=True)
    fsdp1.load_state_dict(full)
    ours, _ = sharded_model(seed=7)
    ours.load_state_dict(fsdp1.state_dict())
    check("to torch's FSDP1 and back", full, ours.state_dict())


def optimizer_by_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Saves the full optimizer state under parameter names; it fits any wrapping, and torch's FSDP1."""
    states = FSDP.optim_state_dict(model, optimizer)
    other = FSDP(plain_model(seed=6), use_orig_params=False)
    other.load_state_dict(model.state_dict())
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    its_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, its_optimizer, states))
    mine, others = (
        {f"{name}.{key}": value for name, row in found["state"].items() for key, value in row.items()}
        for found in (states, FSDP.optim_state_dict(other, its_optimizer))
    )
    check("optimizer, with another wrapping", mine, others)


def local(model: nn.Module) -> None:
    """Saves this rank's flat shards: the fastest type, for the same wrapping and number of ranks only."""
    before = model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(offload_to_cpu=True)):
        shards = model.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(shards)
    check("local", before, model.state_dict())


def one_by_one(model: nn.Module) -> None:
    """Iterates over the full parameters, one at a time, for any other use."""
    check("one by one", model.state_dict(), dict(iter_full_state_dict(model, dst=None)))


def run(folder: Path) -> None:
    """Trains for a few steps, then saves and loads in every way."""
    model, optimizer = sharded_model()
    train_and_resume(folder / "run", model, optimizer)
    whole_in_files(folder / "hub", model)
    whole_on_one_rank(model)
    sharded_in_files(folder / "sharded", model)
    to_and_from_torch(folder / "sharded", model)
    optimizer_by_names(model, optimizer)
    local(model)
    one_by_one(model)


def main() -> None:
    """Parses the command line and runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="folder for all files")
    options = parser.parse_args()
    # torch.distributed.checkpoint uses names that torch has deprecated.
    warnings.filterwarnings("ignore", module="torch")
    with process_group(DEVICE):
        run(options.out)


if __name__ == "__main__":
    main()
