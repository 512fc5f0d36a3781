"""Hooks on reduced shards, and what the next all-gather waits for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_flat.comm.streams import Streams
from fsdp_flat.core import units_of
from fsdp_flat.core.reduction import Reduction
from fsdp_flat.errors import OptionError, OptionTypeError, UsageError
from tests.rehearsal.streams import Machine, RecordingEvent, is_ordered
from tests.support import assert_equal, on_ranks
from tests.support.beside import BOTH, NEAR, Beside, blocks_and_root, grads_of
from tests.support.kit import mesh
from tests.support.models import Stack


def set_hooks(model: Any, hook: Any, **kwargs: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(hook, **kwargs)


@on_ranks(4)
def test_a_hook_replicates_a_mesh_of_one_dim_as_torch_does() -> None:
    whole_mesh = mesh(2, 2)
    beside = Beside(Stack(), BOTH, mesh=whole_mesh["shard"])
    seen: dict[int, list[int]] = {}

    for key, model in enumerate(beside.sharded.values()):

        def mean_over_replicas(shard: torch.Tensor, key: int = key) -> None:
            seen.setdefault(key, []).append(shard.numel())
            dist.all_reduce(shard, group=whole_mesh.get_group("replicate"))
            shard /= 2

        set_hooks(model, mean_over_replicas)
    for _ in range(3):
        beside.backward()
        beside.check_gradients()
    # Once a unit and backward, in the order of the backward, with the padding of rows.
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3 * 4


@on_ranks(2, 4)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_gets_the_mean_of_all_ranks_in_the_reduce_dtype(replicas: int) -> None:
    # With float64, torch divides by a part of the factor after the hook.
    options = {"dtype": torch.float32, "tolerance": NEAR, "mesh": mesh(replicas, dist.get_world_size() // replicas)}
    beside = Beside(Stack(), BOTH, **options)
    for both in beside.units():
        for unit in both:
            unit.set_all_reduce_hook(lambda shard: shard.clamp_(-1e-3, 1e-3))
    beside.backward()
    for param in beside.plain.parameters():
        param.grad.clamp_(-1e-3, 1e-3)
    beside.check_gradients()
    assert max(grad.abs().max() for grad in grads_of(beside.ours).values()) == pytest.approx(1e-3)


@on_ranks(2, 4)
def test_a_hook_sees_the_sum_divided_by_the_factor_and_not_partial_shards() -> None:
    beside = Beside(Stack(), "fully_shard", mesh=mesh(2, dist.get_world_size() // 2))
    ours, shards = beside.ours, []
    ours.set_all_reduce_hook(lambda shard: shards.append(shard.clone()))
    ours.set_gradient_divide_factor(2.0)
    ours.set_requires_all_reduce(False)
    beside.backward()
    assert not shards
    ours.set_requires_all_reduce(True)
    beside.backward()
    (shard,) = shards
    grads = [param.grad.to_local().flatten() for name, param in ours.named_parameters() if "blocks" not in name]
    assert shard.norm() == pytest.approx(torch.cat(grads).norm().item())


@on_ranks(2)
def test_hooks_are_checked(rank: int) -> None:
    ours = blocks_and_root(Stack(), mesh=mesh(2, 1))
    with pytest.raises(OptionTypeError, match="hook must be callable"):
        ours.set_all_reduce_hook(None)
    with pytest.raises(OptionError, match="hybrid mesh"):
        ours.set_all_reduce_hook(print, stream=object())


@on_ranks(2)
def test_a_failed_step_calls_no_hooks(rank: int) -> None:
    beside = Beside(Stack(), "fully_shard")
    ours = beside.ours
    calls: list[int] = []
    set_hooks(ours, lambda shard: calls.append(1))
    handle = ours.first.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        beside.backward()
    before = len(calls)
    handle.remove()
    beside.backward()
    assert before < 4
    assert len(calls) == before + 4


@on_ranks(2)
def test_a_gradient_hook_that_changes_the_shape_raises(rank: int) -> None:
    beside = Beside(Stack(), "fully_shard")
    ours = beside.ours
    shape = ours.first.weight.shape
    handle = ours.first.weight.register_hook(lambda grad: grad.sum(0))
    expected = rf"first.weight' .*\({shape[1]},\) on rank {rank} .*\({shape[0]}, {shape[1]}\)"
    with pytest.raises(UsageError, match=expected):
        beside.backward()
    handle.remove()
    beside.backward()


@on_ranks(2)
def test_an_event_after_the_optimizer_is_accepted_on_the_cpu(rank: int) -> None:
    beside = Beside(Stack(), BOTH)
    for _ in range(2):
        beside.ours.set_post_optim_event(torch.Event())
        beside.backward()
    beside.check_gradients()


@pytest.fixture
def fake_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, Streams]:
    machine = Machine(torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "current_stream", machine.current_stream)
    return machine, Streams(torch.device("meta"), new_stream=machine.new_stream)


@pytest.mark.parametrize("given", [False, True])
def test_the_next_all_gather_waits_for_the_event_instead_of_all_compute(
    given: bool, fake_streams: tuple[Machine, Streams]
) -> None:
    machine, streams = fake_streams
    optimizer = machine.launch(machine.compute)
    event = RecordingEvent(machine)
    event.record()
    other_work = machine.launch(machine.compute)
    if given:
        streams.set_post_optim_event(event)
    streams.optimizer_stepped()
    with streams.all_gathers:
        assert is_ordered(optimizer, machine.current.clock)
        assert is_ordered(other_work, machine.current.clock) is not given
    # The event counts once.
    streams.optimizer_stepped()
    with streams.all_gathers:
        assert is_ordered(other_work, machine.current.clock)


def test_a_hooks_stream_comes_between_the_reduction_and_what_follows(
    fake_streams: tuple[Machine, Streams],
) -> None:
    machine, streams = fake_streams
    hook_stream = machine.new_stream(name="hook")
    with streams.reduce_scatters:
        reduction = machine.launch(machine.current)
        with streams.also_on(hook_stream):
            assert machine.current is hook_stream
            hook = machine.launch(machine.current)
            assert is_ordered(reduction, machine.current.clock)
        assert is_ordered(hook, machine.current.clock)
        with streams.also_on(None):
            assert machine.current is not hook_stream


@on_ranks(2, 4)
@pytest.mark.parametrize("max_input_buffers", [1, 2, 3])
def test_so_many_reductions_are_in_flight(max_input_buffers: int) -> None:
    beside = Beside(Stack(), BOTH)
    ours = beside.ours
    ours.set_reduce_scatter_max_input_buffers(max_input_buffers)
    most = 0
    beside.backward()
    step = units_of(ours)[0].step
    reduce = step.reductions.begin

    def note(*args: Any) -> None:
        nonlocal most
        reduce(*args)
        most = max(most, len(step.reductions._in_flight))

    with mock.patch.object(step.reductions, "begin", note), mock.patch.object(Reduction, "is_done", False):
        beside.backward()
    beside.check_gradients()
    assert most == max_input_buffers
    ours.set_reduce_scatter_max_input_buffers(1, recurse=False)
    assert [unit.policy.max_in_flight for unit in units_of(ours)] == [1] + [max_input_buffers] * 3


@on_ranks(2)
def test_numbers_of_reductions_in_flight_are_checked(rank: int) -> None:
    ours = blocks_and_root(Stack())
    for value in (True, 1.5, None):
        with pytest.raises(OptionTypeError, match="must be an int"):
            ours.set_reduce_scatter_max_input_buffers(value)
    with pytest.raises(OptionError, match="at least 1; got 0"):
        ours.set_reduce_scatter_max_input_buffers(0)


@on_ranks(2, 4)
@pytest.mark.parametrize("zeros", [False, True])
def test_parameters_that_no_rank_uses_get_no_gradients_or_zeros(zeros: bool) -> None:
    model = Stack()
    model.spare = torch.nn.Linear(3, 3)
    beside = Beside(model, "fully_shard")
    beside.ours.set_reduce_scatter_unused_params(zeros)
    beside.ours.first.bias.requires_grad_(False)
    beside.backward()
    grads = grads_of(beside.ours)
    assert grads["first.bias"] is None
    if zeros:
        assert_equal(grads["spare.weight"], torch.zeros(3, 3, dtype=torch.float64))
    else:
        assert grads["spare.weight"] is None
