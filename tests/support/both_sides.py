"""Cases of the zoo: wrapped, beside a replica, and beside torch's FSDP1; for functions that run on worker ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support.beside import Beside, adamw
from tests.support.kit import no_shard_allowed
from tests.support.peer import peer_warnings_silenced
from tests.support.transport import mesh_type
from tests.support.zoo import CASES, Batch, Case

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
NUM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """A sharding strategy and, for the hybrid ones, the shape of its mesh: replicas by shards."""

    strategy: str
    mesh: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.strategy if self.mesh is None else f"{self.strategy} {self.mesh[0]}x{self.mesh[1]}"


PLAIN = [Layout("FULL_SHARD"), Layout("SHARD_GRAD_OP"), Layout("NO_SHARD")]
# The five strategies at each number of ranks, and the other shapes that a mesh of that many ranks can have.
LAYOUTS = {
    2: [*PLAIN, Layout("HYBRID_SHARD", (1, 2)), Layout("_HYBRID_SHARD_ZERO2", (2, 1))],
    4: [*PLAIN, Layout("HYBRID_SHARD", (2, 2)), Layout("_HYBRID_SHARD_ZERO2", (2, 2))],
}
EVERY_LAYOUT = pytest.mark.parametrize(
    "num_ranks, layout",
    [pytest.param(num, layout, id=f"{num}ranks-{layout}") for num, some in LAYOUTS.items() for layout in some],
)
OTHER_MESHES = {
    2: [Layout("HYBRID_SHARD", (2, 1)), Layout("_HYBRID_SHARD_ZERO2", (1, 2))],
    4: [Layout(name, mesh) for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2") for mesh in ((4, 1), (1, 4))],
}


def options_for(layout: Layout, strategies: Any = ShardingStrategy) -> dict[str, Any]:
    """The constructor's arguments; makes the mesh, so every rank must call this."""
    options: dict[str, Any] = {"sharding_strategy": strategies[layout.strategy]}
    if layout.mesh is not None:
        options["device_mesh"] = init_device_mesh(mesh_type(), layout.mesh, mesh_dim_names=("replicate", "shard"))
    return options


def wrapped(module: nn.Module, units: Sequence[type[nn.Module]], **options: Any) -> FSDP:
    """``module`` with each instance of ``units``, and itself, as a unit."""
    with no_shard_allowed():
        return FSDP(module, auto_wrap_policy=ModuleWrapPolicy(units) if units else None, **options)


def build(case: Case) -> nn.Module:
    """The case's model with the weights that every rank and every reference starts from."""
    torch.manual_seed(7)
    return case.build()


def batch_of(case: Case, rank: int, index: int) -> Batch:
    """Batch ``index`` of one rank."""
    return case.batch(torch.Generator().manual_seed(1000 * index + rank), rank)


def beside_case(name: str, fronts: str | Sequence[str] = "flat", layout: Layout = PLAIN[0], **options: Any) -> Beside:
    """Make a case's model beside a plain one, with AdamW."""
    case = CASES[name]
    return Beside(
        build(case),
        fronts,
        units=case.units,
        optimizer=adamw,
        batch=functools.partial(batch_of, case),
        body=case.loss_of,
        dtype=case.dtype,
        tolerance=None if case.dtype else TOLERANCE,
        **options_for(layout),
        **options,
    )


def train_case(name: str, layout: Layout, *fronts: str) -> None:
    """Train one cell of the grid by some fronts beside a replica."""
    beside = beside_case(name, fronts, layout)
    beside.train(num_steps=NUM_STEPS)
    with peer_warnings_silenced():
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``", category=UserWarning)
        beside.check_state_dict()
