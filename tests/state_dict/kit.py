"""Trains, saves and loads models, with state dicts of model and optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedOptimStateDictConfig, StateDictType
from fsdp_flat.api import FullOptimStateDictConfig, LocalOptimStateDictConfig, OptimStateDictConfig
from tests.support import wrapper_models as models
from tests.support.models import BufferedBlock, Model, Tied
from tests.support.peer import peer_warnings_silenced
from tests.support.wrapper_models import WIDTH, batch, shard

FULL, LOCAL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
ON_DEVICE: dict[StateDictType, OptimStateDictConfig] = {
    FULL: FullOptimStateDictConfig(offload_to_cpu=False),
    LOCAL: LocalOptimStateDictConfig(),
    SHARDED: ShardedOptimStateDictConfig(offload_to_cpu=False),
}


class Normed(nn.Module):
    """Batch norm, whose buffers change in training, in the outermost unit and between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.Sequential(BufferedBlock(), nn.BatchNorm1d(WIDTH, affine=False), BufferedBlock())
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.norm(self.first(x))))


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(7, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


@dataclass(frozen=True)
class Task:
    """Holds a model's factory and its data."""

    make: Callable[[], nn.Module]
    data: Callable[[int, int], torch.Tensor]


TASKS = {"uneven": Task(Model, batch), "tied": Task(Tied, tokens), "batch norm": Task(Normed, batch)}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, steps: range) -> list[float]:
    """Take steps on this rank's data; return the losses."""
    return models.train(model, optimizer, dist.get_rank(), steps, task.data)


@contextmanager
def unsharded_allowed() -> Iterator[None]:
    """Ignore the warning that entries of units without sharding are full tensors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Unit .* is not sharded, so its entries")
        yield


def save(model: nn.Module, optimizer: torch.optim.Optimizer, kind: StateDictType) -> tuple[Any, Any]:
    """Return state dicts of model and optimizer that do not alias either."""
    with unsharded_allowed(), FSDP.state_dict_type(model, kind, None, ON_DEVICE[kind]):
        state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    for name, value in state.items():
        if kind is LOCAL and isinstance(value, ShardedTensor):
            # These alias the live shards, as in FSDP1.
            for part in value.local_shards():
                part.tensor = part.tensor.clone()
        elif not isinstance(value, ShardedTensor):
            state[name] = value.clone()
    return state, states


def load(model: nn.Module, optimizer: torch.optim.Optimizer, kind: StateDictType, saved: tuple[Any, Any]) -> None:
    """Load the state dicts of model and optimizer."""
    with FSDP.state_dict_type(model, kind, None, ON_DEVICE[kind]):
        keys = model.load_state_dict(saved[0])
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved[1]))


def seeded_task(task: Task, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return task.make()


def groups_of(how: str) -> dict[str, Any]:
    """Return the process-group arguments for a way to shard. Every rank must call this."""
    if how == "mesh":
        return {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if how == "HYBRID_SHARD mesh":
        return {"device_mesh": init_device_mesh("cpu", (2, 2))}
    if how == "HYBRID_SHARD":
        rank = dist.get_rank()
        shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        return {"process_group": (shards[rank // 2], replicas[rank % 2])}
    return {}


def wrapped(task: Task, how: str, groups: dict[str, Any], *, seed: int = 0, **kwargs: Any) -> Any:
    strategy = "FULL_SHARD" if how == "mesh" else how.removesuffix(" mesh")
    return shard(seeded_task(task, seed), strategy, **groups, **kwargs)


def group_of(size: int) -> dist.ProcessGroup | None:
    """Create a process group of the first ranks; None on the others. Every rank must call this."""
    group = dist.new_group(list(range(size)))
    return group if dist.get_rank() < size else None


@contextmanager
def peer_quiet() -> Iterator[None]:
    """Ignore deprecation warnings of torch's FSDP1 while it saves and loads sharded state dicts."""
    with peer_warnings_silenced():
        for message in ("`_get_pg_default_device` will be deprecated", "Multiple backends are registered"):
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def single_rank_allowed() -> Iterator[None]:
    """Ignore the warning that a single rank has nothing to shard."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".* over a single rank has nothing to shard")
        yield
