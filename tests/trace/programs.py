"""Defines the programs of which :mod:`tests.trace` compares what they do; with public functions of fsdp_flat alone.

The file runs on older checkouts too, so it imports nothing of ``tests``.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_flat import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    unshard_for,
)
from fsdp_flat.wrap import ModuleWrapPolicy

WIDTH = 9
ROWS = 3


class Block(nn.Module):
    """A residual block of odd sizes; ``recompute`` runs it inside an activation checkpoint of that kind."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recompute or not torch.is_grad_enabled():
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.recompute == "reentrant")

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Three blocks between two layers; the last one may have the first one's weight, and blocks may be skipped."""

    def __init__(self, *, recompute: str = "", tied: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(3))
        if tied:
            self.last.weight = self.first.weight
        self.order = [0, 1, 2]
        self.fails_at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index in self.order:
            if index == self.fails_at:
                raise ArithmeticError("as the program wants it")
            x = self.blocks[index](x)
        return self.last(x)


@dataclass(frozen=True)
class Program:
    """Holds one program.

    Attributes:
        front: ``"flat"`` and ``"originals"`` are the wrapper's, ``"rows"`` is ``fully_shard``.
        strategy: name of a sharding strategy; of ``fully_shard`` those that reshard after forward or do not.
        train: runs the steps.
        make: makes the model.
        num_ranks: number of ranks.
        options: further arguments of the wrapper, or of ``fully_shard``.
    """

    front: str
    strategy: str
    train: Callable[[Any, torch.optim.Optimizer], None]
    make: Callable[[], Model] = Model
    num_ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def built(self) -> Any:
        """Return the sharded model. Every rank must call this."""
        torch.manual_seed(0)
        model, is_hybrid = self.make(), "HYBRID" in self.strategy
        mesh = init_device_mesh("cpu", (2, self.num_ranks // 2) if is_hybrid else (self.num_ranks,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.front != "rows":
                return FullyShardedDataParallel(
                    model,
                    sharding_strategy=ShardingStrategy[self.strategy],
                    auto_wrap_policy=ModuleWrapPolicy({Block}),
                    use_orig_params=self.front == "originals",
                    device_mesh=mesh,
                    **self.options,
                )
            resharding = self.strategy in ("FULL_SHARD", "HYBRID_SHARD")
            options = {"mesh": mesh, "reshard_after_forward": resharding, **self.options}
            for block in model.blocks:
                fully_shard(block, **options)
            return fully_shard(model, **options)


def loss_of(model: Any, step: int) -> torch.Tensor:
    """Compute this rank's loss of a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return model(torch.randn(ROWS, WIDTH, generator=generator)).square().mean()


def finish(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def without_sync(model: Any) -> Any:
    if hasattr(model, "no_sync"):
        return model.no_sync()
    model.set_requires_gradient_sync(False)
    return nullcontext()


def with_sync(model: Any) -> None:
    if not hasattr(model, "no_sync"):
        model.set_requires_gradient_sync(True)


# -- what programs do --------------------------------------------------------------------------------------------------


def steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        loss_of(model, step).backward()
        finish(optimizer)


def accumulation(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        with without_sync(model):
            for micro in range(2):
                loss_of(model, 3 * step + micro).backward()
        with_sync(model)
        loss_of(model, 3 * step + 2).backward()
        finish(optimizer)


def sharded_accumulation(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        loss_of(model, step).backward()
        if step % 2:
            finish(optimizer)


def several_forwards(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        losses = [loss_of(model, 3 * step + index) for index in range(3)]
        losses[1].backward()
        (losses[0] + losses[2]).backward()
        finish(optimizer)


def repeated_unit(model: Any, optimizer: torch.optim.Optimizer) -> None:
    inner_of(model).order = [0, 1, 0, 2, 1]
    steps(model, optimizer)


def skipped_unit(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step, order in enumerate(([0, 1, 2], [2, 0], [0, 1, 2])):
        inner_of(model).order = order
        loss_of(model, step).backward()
        finish(optimizer)


def failures(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        inner_of(model).fails_at = 1 if step == 1 else None
        try:
            loss_of(model, step).backward()
        except ArithmeticError:
            continue
        finish(optimizer)


def evaluation(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        model.eval()
        with torch.no_grad():
            loss_of(model, 10 + step)
        model.train()
        loss_of(model, step).backward()
        finish(optimizer)
        loss_of(model, 20 + step)  # no backward follows


def second_root(model: Any, optimizer: torch.optim.Optimizer) -> None:
    block = inner_of(model).blocks[0]
    for step in range(2):
        block(torch.ones(ROWS, WIDTH)).sum().backward()
        finish(optimizer)
        loss_of(model, step).backward()
        finish(optimizer)


def unsharded_block(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        with unshard_for(model):
            loss = inner_of(model).last.weight.square().sum()
            (loss_of(model, step) + 0.1 * loss).backward()
        finish(optimizer)


def retained_graph(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        finish(optimizer)


def state_dicts(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        loss_of(model, step).backward()
        finish(optimizer)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)


def clipped(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        loss_of(model, step).backward()
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        finish(optimizer)


def inner_of(model: Any) -> Any:
    """Return the model inside a wrapper."""
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def tied() -> Model:
    return Model(tied=True)


def frozen() -> Model:
    model = Model()
    model.blocks[1].requires_grad_(False)
    model.last.bias.requires_grad_(False)
    return model


def recomputed() -> Model:
    return Model(recompute="non-reentrant")


def recomputed_by_reentrance() -> Model:
    return Model(recompute="reentrant")


FRONTS = ("flat", "originals", "rows")


def _all() -> dict[str, Program]:
    found: dict[str, Program] = {}

    def add(name: str, program: Program) -> None:
        found[f"{program.front} {program.strategy} {name} on {program.num_ranks}"] = program

    for front, strategy in itertools.product(FRONTS, ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")):
        ranks = 4 if strategy == "HYBRID_SHARD" else 2
        add("steps", Program(front, strategy, steps, num_ranks=ranks))
        add("accumulation", Program(front, strategy, accumulation, num_ranks=ranks))
    for front in ("flat", "originals"):
        for strategy in ("NO_SHARD", "_HYBRID_SHARD_ZERO2"):
            ranks = 4 if "HYBRID" in strategy else 2
            add("accumulation", Program(front, strategy, accumulation, num_ranks=ranks))
    others: tuple[tuple[str, Callable[..., None], Callable[[], Model]], ...] = (
        ("accumulation of reduced gradients", sharded_accumulation, Model),
        ("several forwards", several_forwards, Model),
        ("a unit several times", repeated_unit, Model),
        ("a unit left out", skipped_unit, Model),
        ("a tie", steps, tied),
        ("checkpoints", steps, recomputed),
        ("checkpoints and accumulation", accumulation, recomputed),
        ("a failure", failures, Model),
        ("evaluation", evaluation, Model),
        ("a unit as root", second_root, Model),
        ("a retained graph", retained_graph, Model),
        ("state dicts", state_dicts, Model),
        ("clipping", clipped, Model),
    )
    for front, (name, train, make) in itertools.product(FRONTS, others):
        add(name, Program(front, "FULL_SHARD", train, make))
    for front in ("originals", "rows"):
        add("frozen parts", Program(front, "FULL_SHARD", steps, frozen))
    for front in ("flat", "originals"):
        add("reentrant checkpoints", Program(front, "FULL_SHARD", steps, recomputed_by_reentrance))
        add("unshard_for", Program(front, "FULL_SHARD", unsharded_block))
        low = MixedPrecision(torch.bfloat16, torch.float32)
        add("bf16", Program(front, "FULL_SHARD", steps, options={"mixed_precision": low}))
        add("offload", Program(front, "FULL_SHARD", steps, options={"cpu_offload": CPUOffload(offload_params=True)}))
        add("evaluation", Program(front, "SHARD_GRAD_OP", evaluation))
        add("several forwards", Program(front, "SHARD_GRAD_OP", several_forwards))
    low_rows = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    add("bf16", Program("rows", "FULL_SHARD", steps, options={"mp_policy": low_rows}))
    add("offload", Program("rows", "FULL_SHARD", steps, options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}))
    of_two = Program("rows", "FULL_SHARD", steps, num_ranks=4, options={"reshard_after_forward": 2})
    add("smaller groups", of_two)
    add("smaller groups and accumulation", replace(of_two, train=accumulation))
    return found


PROGRAMS = _all()
