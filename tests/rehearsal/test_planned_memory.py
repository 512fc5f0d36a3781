"""The memory of a step on an accelerator is what ``plan`` says, on both fronts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fsdp_flat import CPUOffload, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, offload_activations, plan
from tests.rehearsal import seam
from tests.rehearsal.fake_device import DEVICE
from tests.rehearsal.kit import NUM_RANKS, rehearsal
from tests.rehearsal.test_fully_shard import LocalUpdates, sharded
from tests.support.kit import BLOCKS, square_loss
from tests.support.models import Block, Stack

TOLERANCE = 0.03
WIDTH = 64


class DeviceCounter(TorchDispatchMode):
    """Counts the bytes of storages on the accelerator before and after each operator that takes or returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def note(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            tensor = getattr(leaf, "_local_tensor", leaf)
            if isinstance(tensor, torch.Tensor) and tensor.device.type == DEVICE.type:
                storage = tensor.untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def alive(self) -> int:
        total = 0
        for key, ref in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(tree_leaves((args, kwargs)))
        before = self.alive()
        result = func(*args, **(kwargs or {}))
        self.note(tree_leaves(result))
        self.peak = max(self.peak, before, self.alive())
        return result


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def counted(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_rows: int = 16,
    forward: Callable[[nn.Module], AbstractContextManager[None]] = nullcontext,
) -> list[int]:
    rows = torch.zeros(num_rows, WIDTH, device=DEVICE)
    for _ in range(2):
        with forward(model):
            loss = square_loss(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del loss
    peaks = []
    with DeviceCounter() as counter:
        grads = [param.grad for param in model.parameters()]
        counter.note([*model.parameters(), *grads, *seam.unsharded_buffers(model), rows])
        counter.note(tree_leaves(list(optimizer.state.values())))
        with forward(model):
            loss = square_loss(model, rows)
        peaks.append(counter.peak)
        counter.peak = 0
        loss.backward()
        peaks.append(counter.peak)
    return peaks


class Idle(torch.optim.Optimizer):
    """Updates nothing, and drops gradients or keeps them."""

    def __init__(self, model: nn.Module, *, keeps: bool) -> None:
        super().__init__(model.parameters(), {})
        self._keeps = keeps

    def step(self, closure: Any = None) -> None:
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not self._keeps:
            super().zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize("front", ["flat parameters", "original parameters", "fully_shard"])
def test_planned_bytes_are_those_of_an_accelerator(front: str, strategy: ShardingStrategy, low: bool) -> None:
    arguments: dict[str, Any] = {"auto_wrap_policy": BLOCKS, "sharding_strategy": strategy}
    kind = MixedPrecisionPolicy if front == "fully_shard" else MixedPrecision
    if low:
        arguments["mixed_precision"] = kind(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    build = partial(Stack, 8, WIDTH)
    if front != "fully_shard":
        arguments["use_orig_params"] = front == "original parameters"
    with DEVICE:
        module, rows = build(), torch.zeros(16, WIDTH)
    planned = plan(
        module,
        NUM_RANKS,
        batch=rows,
        loss=square_loss,
        optimizer=None,
        api="fully_shard" if front == "fully_shard" else "FullyShardedDataParallel",
        **arguments,
    )
    with rehearsal() as run:
        if front == "fully_shard":
            policy = {"mp_policy": arguments["mixed_precision"]} if low else {}
            reshards = strategy is ShardingStrategy.FULL_SHARD or False
            model = sharded(run, build, reshard_after_forward=None if reshards else False, **policy)
            optimizer: torch.optim.Optimizer = LocalUpdates(model.parameters())
        else:
            with DEVICE:
                module = build()
            model = run.wrap(module, **arguments)
            optimizer = sgd(model.parameters())
        run.checker.is_on = False
        peaks = counted(model, optimizer)
    assert [moment.nbytes.total for moment in planned.phases[:2]] == pytest.approx(peaks, rel=TOLERANCE)


@pytest.mark.parametrize("front", ["flat parameters", "original parameters", "fully_shard"])
def test_a_backward_holds_two_units_the_gradients_of_one_and_one_flat_gradient(front: str) -> None:
    build = partial(Stack, 8, WIDTH)
    kind = MixedPrecisionPolicy if front == "fully_shard" else MixedPrecision
    low = kind(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with rehearsal() as run:
        if front == "fully_shard":
            model = sharded(run, build, mp_policy=low)
            optimizer: torch.optim.Optimizer = LocalUpdates(model.parameters())
        else:
            with DEVICE:
                module = build()
            model = run.wrap(module, mixed_precision=low, use_orig_params=front == "original parameters")
            optimizer = sgd(model.parameters())
        run.checker.is_on = False
        _, peak = counted(model, optimizer, num_rows=1)
    numel = sum(param.numel() for param in Block(WIDTH).parameters())
    shards_and_gradients = 2 * 4 * 8 * numel / NUM_RANKS
    assert peak == pytest.approx(shards_and_gradients + (2 * 2 + 2 + 4) * numel, rel=0.06)


@pytest.mark.parametrize("activations", [False, True], ids=["activations stay", "activations leave"])
@pytest.mark.parametrize("states", [False, True], ids=["states stay", "states leave"])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat parameters", "original parameters"])
def test_planned_bytes_are_those_of_an_accelerator_that_offloads(
    use_orig_params: bool, states: bool, activations: bool
) -> None:
    build, num_rows = partial(Stack, 8, WIDTH), 1024
    with DEVICE:
        module, rows = build(), torch.zeros(num_rows, WIDTH)
    arguments: dict[str, Any] = {
        "auto_wrap_policy": BLOCKS,
        "use_orig_params": use_orig_params,
        "cpu_offload": CPUOffload(offload_optimizer=states),
    }
    planned = plan(module, NUM_RANKS, batch=rows, loss=square_loss, offload_activations=activations, **arguments)
    with rehearsal() as run:
        model = run.wrap(module, **arguments)
        run.checker.is_on = False
        optimizer = torch.optim.AdamW(model.parameters())
        peaks = counted(model, optimizer, num_rows, offload_activations if activations else nullcontext)
    assert [moment.nbytes.total for moment in planned.phases[:2]] == pytest.approx(peaks, rel=TOLERANCE)


def recomputed(module: nn.Module) -> nn.Module:
    """Recompute the forwards of the blocks in backward, and return the module."""
    for block in [child for child in module.modules() if isinstance(child, Block)]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    return module


@pytest.mark.parametrize("front", ["flat parameters", "original parameters", "fully_shard"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_planned_bytes_are_those_of_an_accelerator_that_recomputes_and_accumulates(
    front: str, accumulates: bool
) -> None:
    build = partial(Stack, 8, WIDTH)
    with DEVICE:
        module, rows = build(), torch.zeros(16, WIDTH)
    is_rows = front == "fully_shard"
    kind = MixedPrecisionPolicy if is_rows else MixedPrecision
    precision = kind(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    arguments = {} if is_rows else {"use_orig_params": front == "original parameters"}
    planned = plan(
        module,
        NUM_RANKS,
        auto_wrap_policy=BLOCKS,
        mixed_precision=precision,
        batch=rows,
        loss=square_loss,
        optimizer=None,
        checkpointing=True,
        accumulates=accumulates,
        api="fully_shard" if is_rows else "FullyShardedDataParallel",
        **arguments,
    )
    with rehearsal() as run:
        if is_rows:
            model = recomputed(sharded(run, build, mp_policy=precision))
        else:
            with DEVICE:
                module = recomputed(build())
            model = run.wrap(module, mixed_precision=precision, **arguments)
        run.checker.is_on = False
        peaks = counted(model, Idle(model, keeps=accumulates))
    assert [moment.nbytes.total for moment in planned.phases[:2]] == pytest.approx(peaks, rel=TOLERANCE)
