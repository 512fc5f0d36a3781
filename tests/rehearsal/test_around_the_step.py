"""Uses of a model around and inside of steps on a fake accelerator are ordered and do not stop the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, unshard_for, unwrap
from fsdp_flat.collectives import QuantizedAllGather, QuantizedReduceScatter, use_collectives
from tests.rehearsal import seam
from tests.rehearsal.fake_device import DEVICE
from tests.rehearsal.kit import batch, rehearsal, train
from tests.rehearsal.models import (
    BOTH_KINDS,
    EVERY_STRATEGY,
    PAIRS,
    on_device,
)
from tests.support.kit import WIDTH
from tests.support.steps import mesh_for


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
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            assert grads
            for grad in grads:
                grad.add_(1)

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


@PAIRS
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


@EVERY_STRATEGY
@pytest.mark.parametrize("hook", ["own", "bf16"])
def test_communication_hooks_are_ordered(strategy: ShardingStrategy, hook: str) -> None:
    with rehearsal() as run:
        model = run.wrap(sharding_strategy=strategy, **mesh_for(strategy))
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
def test_gradients_are_clipped_by_as_many_operations_for_20_parameters_as_for_2(use_orig_params: bool) -> None:
    issued = []

    def clip(model: nn.Module) -> None:
        run.recorder.log.clear()
        model.clip_grad_norm_(1.0)  # type: ignore[operator]
        issued.append([op for op in run.recorder.log if op != "aten::promote_types"])

    for num_layers in (1, 10):
        with rehearsal() as run:
            layers = on_device(lambda n=num_layers: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(n)]))
            model = run.wrap(layers, use_orig_params=use_orig_params, auto_wrap_policy=None)
            train(run, model, num_steps=1, before_step=clip)
    few, many = issued
    assert few == many
    assert {"aten::_foreach_norm", "all_reduce", "aten::_foreach_mul_"} <= set(many)
    assert len(many) <= 11, many


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


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_an_optimizer_that_runs_in_backward_is_ordered() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    with rehearsal() as run:
        model = run.wrap(use_orig_params=True)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        for _ in range(3):
            model(batch()).sum().backward()
    run.check()
