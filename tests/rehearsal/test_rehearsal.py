"""Training steps on a fake accelerator: every access is ordered, no freed memory is used, the host does not wait."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.checkpoint import checkpoint

from fsdp_flat import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, unshard_for, unwrap
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.collectives import QuantizedAllGather, QuantizedReduceScatter, use_collectives
from tests.rehearsal import seam
from tests.rehearsal.fake_device import DEVICE
from tests.rehearsal.kit import batch, rehearsal, train
from tests.runtime.kit import STRATEGIES, WIDTH, Block, Stack, mesh_for

BOTH_KINDS = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)

LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
# Before the optimizer, which runs on the host, the host has to wait for gradients: at the end, for an event.
FOR_GRADIENTS = ("host wait: event synchronize",)
OFFLOAD = CPUOffload(offload_params=True)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed anew in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Partial(nn.Module):
    """Blocks of which one does not run, behind a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 3):
            x = self.blocks[index](x)
        return x


class Tied(nn.Module):
    """Two layers of the root with one weight, around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Twice(nn.Module):
    """A block that runs twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0):
            x = self.blocks[index](x)
        return x


def on_device(make: Callable[[], nn.Module]) -> nn.Module:
    with DEVICE:
        return make()


@BOTH_KINDS
@EVERY_STRATEGY
def test_a_step_of_every_strategy_is_ordered_and_never_stops_the_host(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
        train(run, model)
    run.check()


@BOTH_KINDS
@EVERY_STRATEGY
def test_a_step_in_mixed_precision_is_ordered(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(
            sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=LOW, **mesh_for(strategy)
        )
        train(run, model)
    run.check()


@BOTH_KINDS
@EVERY_STRATEGY
def test_accumulated_gradients_are_ordered(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
        train(run, model, micro_batches=3)
    run.check()


@BOTH_KINDS
@EVERY_STRATEGY
def test_offloaded_shards_are_copied_from_pinned_memory_and_the_host_waits_for_gradients_only(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(
            Stack(),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            cpu_offload=OFFLOAD,
            **mesh_for(strategy),
        )
        train(run, model)
    run.check(allowed=FOR_GRADIENTS)
    run.check_waits_come_last()


@BOTH_KINDS
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_offloaded_shards_in_mixed_precision_are_ordered(use_orig_params: bool, micro_batches: int) -> None:
    with rehearsal() as run:
        model = run.wrap(Stack(), use_orig_params=use_orig_params, cpu_offload=OFFLOAD, mixed_precision=LOW)
        train(run, model, micro_batches=micro_batches)
    run.check(allowed=FOR_GRADIENTS)
    run.check_waits_come_last()


@BOTH_KINDS
@pytest.mark.parametrize("make", [Twice, functools.partial(Checkpointed, True)], ids=["twice", "reentrant"])
def test_offloaded_gradients_that_are_added_up_are_there_first(
    make: Callable[[], nn.Module], use_orig_params: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(make(), use_orig_params=use_orig_params, cpu_offload=OFFLOAD)
        train(run, model)
    run.check(allowed=FOR_GRADIENTS)
    run.check_waits_come_last()


@BOTH_KINDS
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_offloaded_gradients_are_clipped_in_order(use_orig_params: bool, norm_type: float) -> None:
    """The host scales them, so it has to know the norm."""
    with rehearsal() as run:
        model = run.wrap(Stack(), use_orig_params=use_orig_params, cpu_offload=OFFLOAD)
        train(run, model, before_step=lambda model: model.clip_grad_norm_(1.0, norm_type))  # type: ignore[operator]
    run.check(allowed=["host wait"])


@BOTH_KINDS
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved_hooks", "reentrant"])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_recomputed_activations_are_ordered(
    strategy: ShardingStrategy, use_orig_params: bool, use_reentrant: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(
            on_device(lambda: Checkpointed(use_reentrant)), sharding_strategy=strategy, use_orig_params=use_orig_params
        )
        train(run, model)
    run.check()


OPTIONS: dict[str, dict[str, Any]] = {
    "forward_prefetch": {"forward_prefetch": True},
    "backward_prefetch_post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "no_backward_prefetch": {"backward_prefetch": None},
    "limited": {"limit_all_gathers": True},
    "unlimited": {"limit_all_gathers": False},
    "all_low": {"mixed_precision": ALL_LOW},
    "reduced_low": {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
    "one_unit": {"auto_wrap_policy": None},
}


@BOTH_KINDS
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_with_other_options_is_ordered(name: str, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(
            sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy), **OPTIONS[name]
        )
        train(run, model)
    run.check()


@BOTH_KINDS
@pytest.mark.parametrize("make", [Twice, Tied, functools.partial(Stack, 6)], ids=["twice", "tied", "deep"])
def test_other_models_are_ordered(make: Callable[[], nn.Module], use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(make), use_orig_params=use_orig_params)
        train(run, model, micro_batches=2)
    run.check()


def test_frozen_and_unused_units_are_ordered() -> None:
    """The unused unit is asked about, since another rank may have used it: the one value that the host waits for."""
    with rehearsal() as run:
        model = run.wrap(on_device(Partial), use_orig_params=True)
        train(run, model)
    run.check(allowed=[seam.USED_PARAMETERS])


@BOTH_KINDS
def test_gradients_are_clipped_without_a_wait(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, before_step=lambda model: model.clip_grad_norm_(1.0))  # type: ignore[operator]
    run.check()


@BOTH_KINDS
@pytest.mark.parametrize("foreach", [False, True])
def test_adam_is_ordered(use_orig_params: bool, foreach: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, optimizer=functools.partial(torch.optim.AdamW, foreach=foreach))
    run.check()


@BOTH_KINDS
def test_a_forward_without_gradients_right_after_the_optimizer_is_ordered(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, num_steps=1)
        model.eval()
        with torch.no_grad():
            model(batch())
            model(batch())
        model.train()
        train(run, model, num_steps=1)
    run.check()


@BOTH_KINDS
def test_a_nested_unit_that_runs_alone_right_after_the_optimizer_is_ordered(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, num_steps=1)
        model.module.blocks[1](batch()).pow(2).mean().backward()
        train(run, model, num_steps=1)
    run.check()


@BOTH_KINDS
def test_pinned_inputs_are_copied_without_a_wait(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        rows = torch.zeros(3, WIDTH, pin_memory=True)
        for _ in range(2):
            model(rows).pow(2).mean().backward()
    run.check()


@BOTH_KINDS
@pytest.mark.parametrize("writeback", [False, True])
def test_whole_parameters_right_after_the_optimizer_are_ordered(use_orig_params: bool, writeback: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, num_steps=1)
        with FSDP.summon_full_params(model, writeback=writeback):
            for param in model.parameters():
                param.data.mul_(2.0)
        train(run, model, num_steps=1)
    run.check()


@BOTH_KINDS
def test_whole_gradients_are_ordered(use_orig_params: bool) -> None:
    def look(model: nn.Module) -> None:
        with FSDP.summon_full_params(model, writeback=False, with_grads=True):
            for param in model.parameters():
                assert param.grad is not None
                param.grad.add_(1)

    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, before_step=look)
    run.check()


@BOTH_KINDS
def test_a_model_that_is_unwrapped_right_after_the_optimizer_is_ordered(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, num_steps=1)
        plain = unwrap(model)
        plain(batch()).sum().backward()
    run.check()


@BOTH_KINDS
def test_weights_used_outside_of_forward_are_ordered(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, num_steps=1)
        with unshard_for(model):
            loss = model.module.blocks[0].up.weight.sum() + model.module.head.weight.sum()
        loss.backward()
        train(run, model, num_steps=1)
    run.check(allowed=[seam.USED_PARAMETERS])


@BOTH_KINDS
@EVERY_STRATEGY
def test_several_forwards_before_a_backward_are_ordered(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
        train(run, model, num_steps=1)
        first, second = model(batch()).sum(), model(batch()).sum()
        first.backward()
        second.backward()
        loss = model(batch()).sum() + model(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        train(run, model, num_steps=1)
    run.check()


@BOTH_KINDS
@EVERY_STRATEGY
def test_training_on_a_stream_of_the_callers_is_ordered(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    with rehearsal() as run:
        own, compute = run.machine.new_stream(name="the caller's"), run.machine.compute
        model = run.wrap(sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
        for _ in range(2):
            own.wait_stream(compute)
            with own:
                train(run, model, num_steps=1, micro_batches=2)
            compute.wait_stream(own)
            train(run, model, num_steps=1)
    run.check()


def _average_over_ranks(strategy: ShardingStrategy) -> Callable[..., None]:
    if strategy is ShardingStrategy.NO_SHARD:
        return lambda _state, flat: dist.all_reduce(flat)
    return lambda _state, flat, out: dist.reduce_scatter_tensor(out, flat)


@BOTH_KINDS
@EVERY_STRATEGY
@pytest.mark.parametrize("hook", ["own", "bf16"])
def test_communication_hooks_are_ordered(strategy: ShardingStrategy, use_orig_params: bool, hook: str) -> None:
    with rehearsal() as run:
        model = run.wrap(sharding_strategy=strategy, use_orig_params=use_orig_params, **mesh_for(strategy))
        function = bf16_compress_hook if hook == "bf16" else _average_over_ranks(strategy)
        model.register_comm_hook(None, function)  # type: ignore[operator]
        train(run, model)
    run.check()


@BOTH_KINDS
def test_quantized_collectives_are_ordered(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        use_collectives(model, all_gather=QuantizedAllGather(), reduce_scatter=QuantizedReduceScatter())
        train(run, model)
    run.check()


@BOTH_KINDS
def test_a_divisor_on_the_accelerator_is_ordered(use_orig_params: bool) -> None:
    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        model(batch())
        divisor = torch.ones((), device=DEVICE)
        model.set_gradient_divide_factor(divisor)  # type: ignore[operator]
        train(run, model, before_step=lambda _model: divisor.add_(1))
    run.check()


@BOTH_KINDS
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_one_that_raised_is_ordered(use_orig_params: bool, where: str) -> None:
    def fail(*_args: object) -> None:
        raise ArithmeticError

    with rehearsal() as run:
        model = run.wrap(use_orig_params=use_orig_params)
        train(run, model, num_steps=1)
        if where == "forward":
            hook = model.module.blocks[1].register_forward_hook(fail)
        else:
            hook = model.module.blocks[0].register_full_backward_hook(fail)
        with pytest.raises(ArithmeticError):
            model(batch()).sum().backward()
        hook.remove()
        train(run, model, num_steps=2)
    run.check()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_an_optimizer_that_runs_in_backward_is_ordered() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    with rehearsal() as run:
        model = run.wrap(use_orig_params=True)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        for _ in range(3):
            model(batch()).sum().backward()
    run.check()
