"""Training of a wrapped model beside its reference, for functions that run on worker ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as PeerModuleWrapPolicy

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close
from tests.support.kit import full_grads, full_params, no_shard_allowed, train_on
from tests.support.peer import peer_fsdp, peer_warnings_silenced
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


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW whose steps depend on the size of the gradients.

    With a small ``eps`` the steps are the same for gradients of any scale, so a gradient that is wrong by a
    factor (a sum in place of a mean) would go unseen.
    """
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2, eps=0.1)


class Reference:
    """The replicated model on the global batch: weights once, buffers once for each rank.

    Buffers are a rank's own (statistics of batch norm are those of its batches), so the loss is the mean over
    ranks of losses that each rank computes with its own buffers.

    Args:
        case: what to train.
        zero: starts of names of parameters that have a zero gradient where they have none.
    """

    def __init__(self, case: Case, *, zero: Sequence[str] = ()) -> None:
        self.case = case
        self.num_ranks = dist.get_world_size()
        self.model = build(case)
        self.optimizer = adamw(self.model)
        self._zero = tuple(zero)
        self._buffers = [
            {name: buffer.clone() for name, buffer in self.model.named_buffers()} for _ in range(self.num_ranks)
        ]

    @contextmanager
    def buffers_of(self, rank: int) -> Iterator[None]:
        """Let the model have the buffers of ``rank``, and keep what it makes of them."""
        named = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, buffer in named.items():
                buffer.copy_(self._buffers[rank][name])
        yield
        for name, buffer in named.items():
            self._buffers[rank][name] = buffer.clone()

    def backward(self, index: int) -> torch.Tensor:
        """Add the gradients of the mean loss over all ranks' batches; returns this rank's own loss."""
        losses = []
        for rank in range(self.num_ranks):
            with self.buffers_of(rank):
                loss = self.case.loss_of(self.model, batch_of(self.case, rank, index))
                (loss / self.num_ranks).backward()
                losses.append(loss.detach())
        for name, param in self.model.named_parameters():
            if param.grad is None and self._zero and name.startswith(self._zero):
                param.grad = torch.zeros_like(param)
        return losses[dist.get_rank()]

    def state(self) -> dict[str, torch.Tensor]:
        """The state dict that this rank should have."""
        with self.buffers_of(dist.get_rank()):
            return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def params(self) -> dict[str, torch.Tensor]:
        """Every parameter by name."""
        return {name: param.detach() for name, param in self.model.named_parameters()}


def reference_for(case: Case, use_orig_params: bool) -> Reference:
    return Reference(case, zero=() if use_orig_params else case.zero_if_flat)


def assert_same_gradients(model: nn.Module, reference: Reference) -> None:
    """Every gradient equals the reference's; None where it has none."""
    expected = {name: param.grad for name, param in reference.model.named_parameters()}
    assert_close(full_grads(model), expected, **TOLERANCE, what="gradients")


def assert_same_training(model: nn.Module, reference: Reference) -> None:
    """Every parameter and buffer equals the reference's, by both ways of looking at them."""
    assert_close(dict(model.state_dict()), reference.state(), **TOLERANCE, what="state_dict")
    assert_close(full_params(model), reference.params(), **TOLERANCE, what="summon_full_params")


def train_beside_reference(
    model: nn.Module,
    reference: Reference,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    num_steps: int = NUM_STEPS,
    num_micro_batches: int = 1,
    no_sync: Sequence[bool] = (),
    before_step: Callable[[], None] = lambda: None,
) -> None:
    """Train both and compare each loss, then every parameter and buffer.

    Args:
        model: the wrapped model, with the weights that the reference started from.
        reference: what to compare with.
        optimizer: that of ``model``; by default AdamW.
        num_steps: optimizer steps.
        num_micro_batches: backward passes a step.
        no_sync: for each backward pass of a step whether it runs inside ``no_sync``.
        before_step: called between backward and the optimizers' steps.
    """
    optimizer = adamw(model) if optimizer is None else optimizer
    case, rank = reference.case, dist.get_rank()
    flags = [*no_sync, *[False] * (num_micro_batches - len(no_sync))]
    for step in range(num_steps):
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        for micro, unsynced in enumerate(flags):
            index = step * num_micro_batches + micro
            expected = reference.backward(index)
            context: AbstractContextManager[Any] = model.no_sync() if unsynced else nullcontext()
            with context:
                loss = case.loss_of(model, batch_of(case, rank, index))
                loss.backward()
            assert_close(loss.detach(), expected, **TOLERANCE, what=f"loss {index}")
        before_step()
        optimizer.step()
        reference.optimizer.step()
    assert_same_training(model, reference)


def train_case(name: str, layout: Layout, use_orig_params: bool) -> None:
    """One cell of the grid, against the replicated model."""
    case = CASES[name]
    model = wrapped(build(case), case.units, use_orig_params=use_orig_params, **options_for(layout))
    train_beside_reference(model, reference_for(case, use_orig_params))


def wrapped_by_peer(case: Case, layout: Layout, use_orig_params: bool) -> nn.Module:
    """The same model in torch's FSDP1."""
    options = options_for(layout, peer.ShardingStrategy)
    policy = PeerModuleWrapPolicy(case.units)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
        return peer_fsdp(build(case), auto_wrap_policy=policy, use_orig_params=use_orig_params, **options)


def train_case_beside_peer(name: str, layout: Layout, use_orig_params: bool) -> None:
    """One cell of the grid, against torch's FSDP1: the same calls on both."""
    case, rank = CASES[name], dist.get_rank()
    model = wrapped(build(case), case.units, use_orig_params=use_orig_params, **options_for(layout))
    with peer_warnings_silenced():
        theirs = wrapped_by_peer(case, layout, use_orig_params)
        ours_optimizer, their_optimizer = adamw(model), adamw(theirs)
        for index in range(NUM_STEPS):
            losses = []
            for trained, optimizer in ((model, ours_optimizer), (theirs, their_optimizer)):
                losses += train_on(trained, optimizer, [batch_of(case, rank, index)], case.loss_of)
            assert_close(losses[0], losses[1], **TOLERANCE, what=f"loss {index}")
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``", category=UserWarning)
        expected = theirs.state_dict()
    assert_close(dict(model.state_dict()), dict(expected), **TOLERANCE, what="state_dict")
