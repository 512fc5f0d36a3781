"""Without a ``device_id`` a unit computes where its parameters are."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import CPUOffload, fully_shard
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.comm import rank_groups
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.runtime import compute_device
from fsdp_flat.runtime.compute_device import compute_device_from, default_device
from tests.support import on_ranks
from tests.support.kit import BLOCKS, batch, square_loss
from tests.support.models import Stack

CPU, META = torch.device("cpu"), torch.device("meta")
KINDS = ["cuda", "xpu", "hpu"]
# Backends of groups by device type; "own" stands for the accelerator's type, and for a backend that was made for it.
GROUPS: dict[str, dict[str, str]] = {
    "gloo": {"cpu": "gloo", "own": "gloo"},
    "nccl": {"own": "own"},
    "cpu:gloo,cuda:nccl": {"cpu": "gloo", "own": "own"},
}


@contextmanager
def machine(kind: str | None, index: int = 1) -> Iterator[torch.device]:
    """Let the current accelerator be of a kind, with an index; none for None. Groups have the backends of GROUPS."""

    def backend_of(group: Any, device: torch.device) -> Any:
        name = GROUPS[group.backend].get("own" if device.type == kind else device.type)
        return name and SimpleNamespace(name=lambda: {"own": f"of {kind}"}.get(name, name))

    accelerator = None if kind is None else torch.device(kind)
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=kind is not None),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=accelerator),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=index),
        mock.patch.object(rank_groups, "backend_of", backend_of),
        mock.patch.object(rank_groups, "is_fake", return_value=False),
        mock.patch.object(dist, "get_backend", lambda group: group.backend),
    ):
        compute_device._log_move.cache_clear()
        yield torch.device(kind or "cpu", index)


class Group(dist.ProcessGroup):
    """A group that has a backend by name and moves nothing."""

    def __init__(self, backend: str) -> None:
        super().__init__(0, 2)
        self.backend = backend


def decided(devices: Sequence[torch.device], backend: str, *, offloads: bool = False) -> tuple[torch.device, bool]:
    return default_device(devices, [Group(backend)], offloads=offloads)


@pytest.mark.parametrize("backend", GROUPS)
@pytest.mark.parametrize("devices", [[], [CPU], [META], [CPU, META]])
@pytest.mark.parametrize("offloads", [False, True])
def test_without_an_accelerator_everything_computes_on_the_cpu(
    devices: list[torch.device], backend: str, offloads: bool
) -> None:
    with machine(None):
        assert decided(devices, backend, offloads=offloads) == (CPU, False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", GROUPS)
@pytest.mark.parametrize("others", [[], [CPU], [META]])
def test_parameters_on_an_accelerator_compute_there(kind: str, backend: str, others: list[torch.device]) -> None:
    there = torch.device(kind, 0)
    with machine(kind, index=1):
        for devices in ([there, *others], [*others, there]):
            assert decided(devices, backend) == (there, False)


# Devices of parameters, whether shards are offloaded, backend: whether they compute on the accelerator.
CASES = [
    ([CPU], False, "gloo", False),
    ([CPU], False, "nccl", True),
    ([CPU], False, "cpu:gloo,cuda:nccl", False),
    ([META], False, "gloo", False),
    ([META], False, "nccl", True),
    ([META], False, "cpu:gloo,cuda:nccl", True),
    ([CPU, META], False, "gloo", False),
    ([CPU, META], False, "cpu:gloo,cuda:nccl", True),
    ([], False, "gloo", False),
    ([], False, "nccl", True),
    ([CPU], True, "gloo", False),
    ([CPU], True, "nccl", True),
    ([CPU], True, "cpu:gloo,cuda:nccl", True),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("devices", "offloads", "backend", "on_accelerator"), CASES)
def test_parameters_elsewhere_compute_where_the_group_needs_them(
    kind: str, devices: list[torch.device], offloads: bool, backend: str, on_accelerator: bool
) -> None:
    with machine(kind) as accelerator:
        expected = (accelerator, True) if on_accelerator else (CPU, False)
        assert decided(devices, backend, offloads=offloads) == expected


def test_of_the_two_groups_of_a_hybrid_strategy_one_that_takes_no_cpu_tensors_decides() -> None:
    with machine("cuda") as accelerator:
        for backends in (("gloo", "nccl"), ("nccl", "gloo")):
            assert default_device([CPU], [Group(each) for each in backends]) == (accelerator, True)
        assert default_device([CPU], [Group("gloo"), Group("gloo")]) == (CPU, False)


def test_an_object_that_stands_for_a_group_leaves_parameters_where_they_are() -> None:
    with machine("cuda"):
        assert default_device([CPU], [SimpleNamespace(rank=lambda: 0, size=lambda: 2)]) == (CPU, False)


def test_one_line_says_that_parameters_move(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fsdp_flat"), machine("cuda"):
        for _ in range(3):
            decided([CPU], "nccl")
        decided([META], "nccl")
        decided([CPU], "gloo")
        decided([torch.device("cuda", 0)], "nccl")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "move to cuda:1, the current accelerator" in line
    assert "(nccl)" in line


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_id_is_an_index_a_device_or_a_string(kind: str) -> None:
    with machine(kind, index=1):
        for given in (3, f"{kind}:3", torch.device(kind, 3)):
            assert compute_device_from(given) == torch.device(kind, 3)
        for given in ("cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
            assert compute_device_from(given) == CPU
        assert compute_device_from(None) is None
        for given in (kind, torch.device(kind)):
            with pytest.warns(UserWarning, match=f"no index; the current device, {kind}:1, is used"):
                assert compute_device_from(given) == torch.device(kind, 1)
        other = "mtia" if kind != "mtia" else "cuda"
        with pytest.raises(OptionError, match=f"this machine has a {kind} accelerator"):
            compute_device_from(other)
        with pytest.raises(OptionError, match="names no device"):
            compute_device_from("nowhere")
        for wrong in (True, 1.0, object()):
            with pytest.raises(OptionTypeError, match="must be an int or a torch"):
                compute_device_from(wrong)


@contextmanager
def other_accelerator() -> Iterator[None]:
    """Let this machine have an accelerator, on which nothing can be allocated."""
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cuda")),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
    ):
        yield


def wrapped_by(front: str, model: Stack, **kwargs: Any) -> Any:
    if front == "FSDP":
        return FSDP(model, auto_wrap_policy=BLOCKS, **kwargs)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@on_ranks(2)
@pytest.mark.parametrize("front", ["FSDP", "fully_shard"])
def test_a_model_on_the_cpu_trains_over_gloo_on_a_machine_with_an_accelerator(front: str, rank: int) -> None:
    """README's first programs."""
    with other_accelerator():
        model = wrapped_by(front, Stack())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            x = batch(rank)
            loss = nn.functional.mse_loss(model(x), torch.ones(len(x), 5))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert all(unit.options.device == CPU for unit in units_of(model))
        model.state_dict()


@on_ranks(2)
@pytest.mark.parametrize("front", ["FSDP", "fully_shard"])
def test_a_model_without_memory_follows_a_gloo_group_to_the_cpu(front: str, rank: int) -> None:
    with other_accelerator():
        with META:
            model = Stack()
        model = wrapped_by(front, model)
        if front == "fully_shard":
            model.to_empty(device="cpu")
            for param in model.parameters():
                nn.init.constant_(param, 0.1)
        square_loss(model, batch(rank)).backward()
        assert all(unit.options.device == CPU for unit in units_of(model))


@on_ranks(2)
def test_ignored_parameters_and_units_inside_decide_as_far_as_they_should(rank: int) -> None:
    with other_accelerator():
        model = Stack()
        model.head.to(META)  # stands for another device: it is ignored
        wrapped = FSDP(model, ignored_modules=[model.head])
        assert wrapped.compute_device == CPU
        outer = FSDP(nn.Sequential(FSDP(nn.Linear(3, 3), cpu_offload=CPUOffload(offload_params=True))))
        assert outer.compute_device == CPU
    dist.barrier()


@on_ranks(2)
def test_a_model_that_moves_after_it_was_wrapped_computes_where_it_is(rank: int) -> None:
    """FSDP1's programs that wrap on the CPU and call ``.cuda()``, before the first step or between steps."""
    model: Any = FSDP(Stack(), auto_wrap_policy=BLOCKS)
    units = units_of(model)
    x = batch(rank)
    square_loss(model, x).backward()
    assert not any(unit.step.streams.is_accelerator for unit in units)
    # A device on which nothing computes stands for the accelerator, as which the unit's own table shows it.
    for unit in reversed(units):
        unit.use_device(torch.device("cuda", 0))
    assert all(unit.options.device == torch.device("cuda", 0) for unit in units)
    assert all(
        type(h.comm.state_collectives).__name__ == "GlooAcceleratorCollectives" for u in units for h in u.param_groups
    )
    model.cpu()  # and back: no handle has moved, so units follow where handles are
    assert all(unit.options.device == CPU for unit in units)
    assert all(
        type(h.comm.state_collectives).__name__ == "SharedMemoryCollectives" for u in units for h in u.param_groups
    )
    square_loss(model, x).backward()
    assert not any(unit.step.streams.is_accelerator for unit in units)


@on_ranks(2)
def test_a_device_id_is_kept_when_a_model_is_converted() -> None:
    model = FSDP(nn.Linear(3, 3), device_id="cpu")
    model._unit.use_device(torch.device("cuda", 0))
    model.double()
    assert model.compute_device == torch.device("cuda", 0)
