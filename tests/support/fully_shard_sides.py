"""Trains a plain model, torch's fully_shard and ours side by side, on the same batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.utils import _pytree as pytree

from fsdp_flat.composable import fully_shard
from fsdp_flat.core import units_of
from tests.support import assert_close
from tests.support.kit import batch, square_loss
from tests.support.peer import peer_fully_shard
from tests.support.steps import assert_idle

Shard = Callable[[Any, Callable[..., Any]], Any]
# Torch's gradients are zeros where ours are None: what some steps do not use trains alike without other states.
SGD = functools.partial(torch.optim.SGD, lr=0.05)
# Fused: one operation a step. DTensor derives the sharding of each operation anew in each test.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.05, fused=True)
Run = Callable[[Any, int], Any]


def blocks_and_root(model: Any, shard: Callable[..., Any] = fully_shard, **kwargs: Any) -> Any:
    """Shard every block of a ``Stack``, then the model."""
    for block in model.blocks:
        shard(block, **kwargs)
    return shard(model, **kwargs)


def children_and_root(model: nn.Module, shard: Callable[..., Any] = fully_shard, **kwargs: Any) -> Any:
    """Shard every child of a module, then the module."""
    for child in model.children():
        shard(child, **kwargs)
    return shard(model, **kwargs)


def batch_of(step: int, width: int = 8, num_rows: int = 3) -> torch.Tensor:
    """Return this rank's rows of a step."""
    return batch(dist.get_rank(), step, width, num_rows)


def one_backward(model: Any, step: int) -> None:
    square_loss(model, batch_of(step)).backward()


class Sides:
    """Holds the three models and their optimizers.

    Args:
        model: the plain model.
        shard: shards a model by the function that it is given.
        with_torch: also train torch's; it cannot run every case.
        optimizer: makes an optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        shard: Shard = blocks_and_root,
        *,
        with_torch: bool = True,
        optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    ) -> None:
        self.plain: Any = copy.deepcopy(model)
        self.ours: Any = copy.deepcopy(model)
        self.theirs: Any = copy.deepcopy(model) if with_torch else None
        shard(self.ours, fully_shard)
        if with_torch:
            shard(self.theirs, peer_fully_shard)
        sides = [side for side in (self.plain, self.ours, self.theirs) if side is not None]
        self._optimizers = {side: optimizer(side.parameters()) for side in sides}
        self._outputs: dict[nn.Module, list[torch.Tensor]] = {side: [] for side in sides}
        for side in sides:
            side.register_forward_hook(self._note_outputs)
        self.num_steps = 0

    def step(self, run: Run = one_backward, run_torch: Run | None = None, *, num_steps: int = 1) -> None:
        """Run ``run(model, step)`` on each side, step the optimizers, and compare outputs, gradients and parameters."""
        for _ in range(num_steps):
            for outputs in self._outputs.values():
                outputs.clear()
            for side in self._optimizers:
                (run_torch or run if side is self.theirs else run)(side, self.num_steps)
            self.num_steps += 1
            average_gradients(self.plain)
            self.check_outputs()
            self.check_gradients()
            for optimizer in self._optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            self.check_parameters()
            assert_no_step_runs(self.ours)

    def _note_outputs(self, side: nn.Module, _args: Any, output: Any) -> None:
        """Keep the outputs, of which losses are functions, of a forward of a model."""
        self._outputs[side] += [each.detach().clone() for each in pytree.tree_leaves(output)]

    def check_outputs(self) -> None:
        """Compare the outputs of this step."""
        expected, *others = self._outputs.values()
        for found in others:
            assert_close(found, expected, atol=1e-5, rtol=1e-4)

    def check_gradients(self) -> None:
        expected = {name: param.grad for name, param in _named(self.plain).items() if param.grad is not None}
        actual = {name: param.grad for name, param in _named(self.ours).items() if param.grad is not None}
        assert_parts(actual, expected, atol=1e-6, rtol=1e-5)

    def check_parameters(self) -> None:
        expected = {name: param.detach() for name, param in _named(self.plain).items()}
        for side in list(self._optimizers)[1:]:
            actual = {name: param.detach() for name, param in _named(side).items()}
            assert_parts(actual, expected, atol=1e-5, rtol=1e-4)


def assert_no_step_runs(model: nn.Module) -> None:
    """Assert that nothing is in flight; units may be unsharded if they were told to stay so."""
    if all(unit.control.reshard_after_backward for unit in units_of(model)):
        assert_idle(model)
    for unit in units_of(model):
        assert unit.step.backward is None
        assert unit.step.iteration is None
        assert all(handle.kept_shards is None for handle in unit.param_groups)


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without those of checkpoint wrappers."""
    return {name.replace("_checkpoint_wrapped_module.", ""): param for name, param in model.named_parameters()}


def assert_parts(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerances: float) -> None:
    """Assert that this rank's parts of tensors, most of them DTensors, are those of full ones; nothing is sent."""
    assert set(actual) == set(expected)
    parts = {name: _part_of(full, actual[name]) for name, full in expected.items()}
    locals_ = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in actual.items()}
    assert_close(locals_, parts, **tolerances)


def _part_of(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor that is the same on every rank, sharded as a DTensor is."""
    if not isinstance(like, DTensor):
        return full
    assert like.shape == full.shape
    mesh, (placement, *others) = like.device_mesh, like.placements
    if not others and isinstance(placement, ShardPlacement):
        # As below, without an operation on DTensors.
        chunks = full.chunk(mesh.size(), placement.dim)
        rank = mesh.get_local_rank()
        return chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


def average_gradients(plain: nn.Module) -> None:
    """Average gradients over ranks; one that only some ranks have is averaged with zeros."""
    params = list(plain.parameters())
    # One collective for all, in float64, which no order of the ranks rounds differently in float32: a flag for each
    # parameter, then all gradients.
    flags = torch.tensor([float(param.grad is not None) for param in params])
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    flat = torch.cat([flags, *[grad.reshape(-1) for grad in grads]]).double()
    dist.all_reduce(flat)
    means = (flat[len(params) :] / dist.get_world_size()).split([param.numel() for param in params])
    for param, has_grad, mean in zip(params, flat[: len(params)], means, strict=True):
        if has_grad:
            param.grad = mean.to(param.dtype).view(param.shape)
