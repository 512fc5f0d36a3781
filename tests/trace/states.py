"""Defines the state dicts and checkpoints that :mod:`tests.trace` compares, byte by byte; with public functions alone.

The file runs on older checkouts too, so it imports nothing of ``tests``.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_flat import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from fsdp_flat.checkpoint import load_checkpoint, load_full, save_checkpoint, save_full
from fsdp_flat.wrap import ModuleWrapPolicy

WIDTH = 5


class Block(nn.Module):
    """Two layers of odd sizes with a scalar, and a norm whose buffers change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 2), nn.Linear(2 * WIDTH + 2, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.norm(self.down(self.up(x).relu()))


class Model(nn.Module):
    """Two blocks between an embedding and a tied head; a rank may have no elements of a small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Hooked(Block):
    """Changes its state dict when it is saved, and changes it back when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self.change)
        self._register_load_state_dict_pre_hook(self.take_back)

    @staticmethod
    def change(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        raise NotImplementedError

    @staticmethod
    def take_back(state: dict[str, Any], prefix: str, *_: Any) -> None:
        raise NotImplementedError


class Renaming(Hooked):
    """Saves a layer under another name, and adds an alias of it and a value of its own."""

    @staticmethod
    def change(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "lift.weight"] = state.pop(prefix + "up.weight")
        state[prefix + "lift.alias"] = state[prefix + "lift.weight"].detach()
        state[prefix + "note"] = torch.ones(2)

    @staticmethod
    def take_back(state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "up.weight"] = state.pop(prefix + "lift.weight")
        del state[prefix + "lift.alias"], state[prefix + "note"]


class Computing(Hooked):
    """Saves a layer negated, as it only can if hooks see full values."""

    @staticmethod
    def change(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "up.weight"] = -state[prefix + "up.weight"]

    @staticmethod
    def take_back(state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "up.weight"] = -state[prefix + "up.weight"]


class Extra(Block):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def of(kind: type[Block]) -> Callable[[], Model]:
    """Return a function that makes a model with blocks of one class."""

    def make() -> Model:
        model = Model()
        model.blocks = nn.ModuleList(kind() for _ in range(2))
        return model

    return make


def frozen() -> Model:
    model = Model()
    model.blocks[0].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


def low() -> Model:
    model = Model()
    model.blocks[1].to(torch.bfloat16)
    model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
    model.blocks[1].register_forward_hook(lambda _, args, out: out.to(torch.float32))
    return model


@dataclass(frozen=True)
class Saved:
    """Holds one case: a model that is trained, saved, and loaded into another one.

    Attributes:
        front: ``"flat"``, ``"originals"`` or ``"rows"``, as in ``programs.py``.
        kind: name of the state-dict type.
        make: makes the model.
        num_ranks: number of ranks.
        strategy: name of the sharding strategy.
        has_mesh: the wrapper is given a device mesh.
        tensor_parallel: the model's layers are split over two ranks first.
        on_meta: the model is made on the meta device, and gets memory and values while it is sharded.
        config, optim_config: those of ``state_dict_type``.
        takes_files: checkpoints and files are saved too, which three ranks load.
    """

    front: str
    kind: str
    make: Callable[[], Model] = Model
    num_ranks: int = 2
    strategy: str = "FULL_SHARD"
    has_mesh: bool = False
    tensor_parallel: bool = False
    on_meta: bool = False
    config: Any = None
    optim_config: Any = None
    takes_files: bool = False

    def built(self, seed: int) -> Any:
        """Return the sharded model. Every rank must call this."""
        torch.manual_seed(seed)
        with torch.device("meta" if self.on_meta else "cpu"):
            model = self.make()
        is_hybrid, ranks = "HYBRID" in self.strategy, dist.get_world_size()
        options: dict[str, Any] = {"param_init_fn": materialize} if self.on_meta else {}
        if self.tensor_parallel:
            whole = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
            for block in model.blocks:
                parallelize_module(block, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            options["device_mesh"] = whole["dp"]
        elif is_hybrid or self.has_mesh or self.front == "rows":
            options["device_mesh"] = init_device_mesh("cpu", (2, ranks // 2) if is_hybrid else (ranks,))
        if self.front == "rows":
            for block in model.blocks:
                fully_shard(block, mesh=options["device_mesh"])
            fully_shard(model, mesh=options["device_mesh"])
            if self.on_meta:
                for module in model.modules():
                    materialize(module)
            return model
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[self.strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=self.front == "originals",
            **options,
        )


def materialize(module: nn.Module) -> None:
    """Give the parameters and buffers of one module memory and values."""
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.normal_(std=0.3)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(1)


def trained(case: Saved, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model and its optimizer after two steps."""
    model = case.built(seed)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + (0 if case.tensor_parallel else dist.get_rank()))
        model(torch.randint(7, (4,), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def described(value: Any) -> str:
    """Describe a value with its type and every byte that this rank holds."""
    if isinstance(value, ShardedTensor):
        parts = [f"{shard.metadata} {described(shard.tensor)}" for shard in value.local_shards()]
        return f"ShardedTensor {value.metadata()} {parts}"
    if isinstance(value, DTensor):
        return f"DTensor {tuple(value.shape)} {value.device_mesh} {value.placements} {described(value.to_local())}"
    if hasattr(value, "boxes"):
        return f"{type(value).__name__} {tuple(value.shape)} {value.boxes} {[described(part) for part in value.parts]}"
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        digest = hashlib.sha256(data).hexdigest()[:16]
        return f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.device} {value.stride()} {digest}"
    return f"{type(value).__name__} {value!r}"


def lines_of(state: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a line for each entry, in order."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from lines_of(value, f"{prefix}{key}/")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for at, each in enumerate(value):
                yield from lines_of(each, f"{prefix}{key}/{at}/")
        else:
            yield f"{prefix}{key} {described(value)}"


def whole(model: Any, optimizer: torch.optim.Optimizer) -> list[str]:
    """Describe the full states of model and optimizer."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return [*lines_of({name: _full(value) for name, value in state.items()}), *lines_of(states)]


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def record(case: Saved, name: str, folder: Path) -> dict[str, Any]:
    """Train, save, and load into another model; return what was saved and what was loaded."""
    model, optimizer = trained(case, 0)
    found: dict[str, Any] = {}
    kind = StateDictType[case.kind]
    configs = {} if case.config is None else {"state_dict_config": case.config}
    configs |= {} if case.optim_config is None else {"optim_state_dict_config": case.optim_config}
    with FullyShardedDataParallel.state_dict_type(model, kind, **configs):
        state = model.state_dict()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    versions = getattr(state, "_metadata", {})
    found["model"] = [*lines_of(state), *(f"{key} {version}" for key, version in versions.items())]
    found["optimizer"] = list(lines_of(states))
    if case.takes_files:
        save_checkpoint(folder / name / "directory", model, optimizer, {"step": 2})
        save_full(model, folder / name / "full")
        dcp.save({"model": state, "optimizer": states}, checkpoint_id=str(folder / name / "dcp"))
    other, its_optimizer = trained(case, 1)
    if not getattr(case.config, "rank0_only", False):
        with FullyShardedDataParallel.state_dict_type(other, kind, **configs):
            keys = other.load_state_dict(state)
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(other, its_optimizer, states)
        its_optimizer.load_state_dict(loaded)
        found["loaded"] = [str(keys), *whole(other, its_optimizer)]
    return found


def loaded(case: Saved, name: str, folder: Path) -> dict[str, Any]:
    """Load the files of a case at this number of ranks; return what was loaded."""
    found = []
    model, optimizer = trained(case, 2)
    extra = load_checkpoint(folder / name / "directory", model, optimizer)
    found += [f"step {extra.step}", *whole(model, optimizer)]
    model, optimizer = trained(case, 3)
    load_full(model, folder / name / "full")
    found += whole(model, optimizer)
    model, optimizer = trained(case, 4)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[case.kind], case.config, case.optim_config):
        state = {
            "model": model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
        dcp.load(state, checkpoint_id=str(folder / name / "dcp"))
        model.load_state_dict(state["model"])
        states = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optimizer"])
    optimizer.load_state_dict(states)
    return {"files": [*found, *whole(model, optimizer)]}


FRONTS = ("flat", "originals", "rows")
OFFLOADED = {
    "FULL_STATE_DICT": (FullStateDictConfig(True, True), FullOptimStateDictConfig(True, True)),
    "SHARDED_STATE_DICT": (ShardedStateDictConfig(True), ShardedOptimStateDictConfig(True)),
    "LOCAL_STATE_DICT": (LocalStateDictConfig(True), None),
}
BOXES = {
    "config": ShardedStateDictConfig(boxes=True),
    "optim_config": ShardedOptimStateDictConfig(boxes=True, offload_to_cpu=False),
}


def _all() -> dict[str, Saved]:
    found: dict[str, Saved] = {}

    def add(name: str, case: Saved) -> None:
        found[f"states {case.front} {case.strategy} {case.kind} {name} on {case.num_ranks}"] = case

    full, sharded, local = OFFLOADED
    for front, kind, ranks in itertools.product(FRONTS, OFFLOADED, (2, 4)):
        if (front, kind) != ("rows", local):
            add("saved", Saved(front, kind, num_ranks=ranks))
    for front, kind in itertools.product(("flat", "originals"), OFFLOADED):
        config, optim_config = OFFLOADED[kind]
        add("offloaded", Saved(front, kind, config=config, optim_config=optim_config))
        if front == "originals":
            add("frozen", Saved(front, kind, frozen))
        add("from meta", Saved(front, kind, on_meta=True))
        add("extra", Saved(front, kind, of(Extra)))
        if (front, kind) != ("flat", local):  # whose state dicts have no entries by name
            add("renamed", Saved(front, kind, of(Renaming)))
        if kind == full:
            add("computed", Saved(front, kind, of(Computing)))
        add("two blocks of other dtypes", Saved(front, kind, low))
        add("saved", Saved(front, kind, strategy="NO_SHARD"))
        add("saved", Saved(front, kind, strategy="SHARD_GRAD_OP"))
        if kind != local:
            add("on a mesh", Saved(front, kind, has_mesh=True, num_ranks=4))
            add("on two", Saved(front, kind, strategy="HYBRID_SHARD", num_ranks=4))
            if front == "originals":
                add("tensor parallel", Saved(front, kind, tensor_parallel=True, num_ranks=4))
    for front, ranks in itertools.product(("flat", "originals"), (2, 4)):
        add("boxes", Saved(front, sharded, num_ranks=ranks, takes_files=True, **BOXES))
        add("files", Saved(front, sharded, num_ranks=ranks, has_mesh=True, takes_files=True))
    for ranks in (2, 4):
        add("files", Saved("rows", sharded, num_ranks=ranks, takes_files=True))
        add("from meta, files", Saved("rows", sharded, num_ranks=ranks, takes_files=True, on_meta=True))
    return found


STATES = _all()
