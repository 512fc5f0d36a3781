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
from tests.support.fully_shard_beside import Beside, grads_of
from tests.support.fully_shard_sides import blocks_and_root
from tests.support.kit import Stack, mesh


def set_hooks(model: Any, hook: Any, **kwargs: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(hook, **kwargs)


@on_ranks(4)
def test_a_hook_replicates_a_mesh_of_one_dim_as_torch_does() -> None:
    whole_mesh = mesh(2, 2)
    models = Beside.of(mesh=whole_mesh["shard"])
    seen: dict[int, list[int]] = {}

    for key, model in enumerate(models.both):

        def mean_over_replicas(shard: torch.Tensor, key: int = key) -> None:
            seen.setdefault(key, []).append(shard.numel())
            dist.all_reduce(shard, group=whole_mesh.get_group("replicate"))
            shard /= 2

        set_hooks(model, mean_over_replicas)
    for number in range(3):
        models.backward(number)
        models.plain_backward(number)
        models.check_grads()
    # Once a unit and backward, in the order of the backward, with the padding of rows.
    assert seen[0] == seen[1]
    assert len(seen[0]) == 3 * 4


@on_ranks(2, 4)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_hook_gets_the_mean_of_all_ranks_in_the_reduce_dtype(replicas: int) -> None:
    models = Beside.of(mesh=mesh(replicas, dist.get_world_size() // replicas))
    for unit_of_ours, unit_of_theirs in models.units():
        for unit in (unit_of_ours, unit_of_theirs):
            unit.set_all_reduce_hook(lambda shard: shard.clamp_(-1e-3, 1e-3))
    models.backward(0)
    models.plain_backward(0)
    for param in models.plain.parameters():
        param.grad.clamp_(-1e-3, 1e-3)
    models.check_grads()
    assert max(grad.abs().max() for grad in grads_of(models.ours).values()) == pytest.approx(1e-3)


@on_ranks(2, 4)
def test_a_hook_sees_the_sum_divided_by_the_factor_and_not_partial_shards() -> None:
    models = Beside.of(mesh=mesh(2, dist.get_world_size() // 2))
    ours, shards = models.ours, []
    ours.set_all_reduce_hook(lambda shard: shards.append(shard.clone()))
    ours.set_gradient_divide_factor(2.0)
    ours.set_requires_all_reduce(False)
    models.backward(0, models=[ours])
    assert not shards
    ours.set_requires_all_reduce(True)
    models.backward(1, models=[ours])
    (shard,) = shards
    grads = [param.grad.to_local().flatten() for name, param in ours.named_parameters() if "blocks" not in name]
    assert shard.norm() == pytest.approx(torch.cat(grads).norm().item())


@on_ranks(2)
def test_hooks_are_checked(rank: int) -> None:
    ours = Beside.of(mesh=mesh(2, 1)).ours
    with pytest.raises(OptionTypeError, match="hook must be callable"):
        ours.set_all_reduce_hook(None)
    with pytest.raises(OptionError, match="hybrid mesh"):
        ours.set_all_reduce_hook(print, stream=object())


@on_ranks(2)
def test_a_failed_step_calls_no_hooks(rank: int) -> None:
    ours = Beside.of().ours
    calls: list[int] = []
    set_hooks(ours, lambda shard: calls.append(1))
    handle = ours.first.weight.register_hook(lambda grad: 1 / 0)
    models = Beside(ours, ours, Stack())
    with pytest.raises(ZeroDivisionError):
        models.backward(0, models=[ours])
    before = len(calls)
    handle.remove()
    models.backward(1, models=[ours])
    assert before < 4
    assert len(calls) == before + 4


@on_ranks(2)
def test_a_gradient_hook_that_changes_the_shape_raises(rank: int) -> None:
    ours = Beside.of().ours
    shape = ours.first.weight.shape
    handle = ours.first.weight.register_hook(lambda grad: grad.sum(0))
    models = Beside(ours, ours, Stack())
    expected = rf"first.weight' .*\({shape[1]},\) on rank {rank} .*\({shape[0]}, {shape[1]}\)"
    with pytest.raises(UsageError, match=expected):
        models.backward(0, models=[ours])
    handle.remove()
    models.backward(1, models=[ours])


@on_ranks(2)
def test_an_event_after_the_optimizer_is_accepted_on_the_cpu(rank: int) -> None:
    models = Beside.of()
    for number in range(2):
        models.ours.set_post_optim_event(torch.Event())
        models.backward(number)
        models.plain_backward(number)
    models.check_grads()


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
    models = Beside.of()
    ours = models.ours
    ours.set_reduce_scatter_max_input_buffers(max_input_buffers)
    most = 0
    models.backward(0)
    step = units_of(ours)[0].step
    reduce = step._reduce

    def note(*args: Any) -> None:
        nonlocal most
        reduce(*args)
        most = max(most, len(step._in_flight))

    with mock.patch.object(step, "_reduce", note), mock.patch.object(Reduction, "is_done", False):
        models.backward(1)
    models.check_grads(replica=False)
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
    models = Beside.of(model)
    models.ours.set_reduce_scatter_unused_params(zeros)
    models.ours.first.bias.requires_grad_(False)
    models.backward(0, models=[models.ours])
    grads = grads_of(models.ours)
    assert grads["first.bias"] is None
    if zeros:
        assert_equal(grads["spare.weight"], torch.zeros(3, 3))
    else:
        assert grads["spare.weight"] is None
