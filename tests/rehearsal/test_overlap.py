"""All-gathers run beside compute; none waits for the unit before its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_flat import BackwardPrefetch, ShardingStrategy, offload_activations
from fsdp_flat.comm.streams import Streams
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.rehearsal.kit import Rehearsal, batch, rehearsal, train
from tests.rehearsal.models import BOTH_KINDS, LOW, OFFLOAD, Checkpointed, Tied, on_device
from tests.rehearsal.overlap import Overlap, watched
from tests.rehearsal.streams import Stamp, is_ordered
from tests.rehearsal.test_fully_shard import LocalUpdates, sharded
from tests.support.kit import WIDTH
from tests.support.models import Block, Stack
from tests.support.steps import mesh_for

# Units with unsharded buffers at once besides the root: the one that computes, and the next or the one before.
MOST_IN_FORWARD, MOST_IN_BACKWARD = 2, 3
DEEP = functools.partial(Stack, 5)


# torch's operator that places gathered shards takes memory of its own. So it waits for the last use of buffers that a
# backward has freed before it; the all-gather does not.
GATHERS, PLACES = "all_gather_single", "aten::split_with_sizes_copy"
PLACES_IN_BACKWARD = f"{PLACES} for the backward"


def exposed(overlap: Overlap) -> list[str]:
    """Return what is exposed, except copies to parameters in a backward."""
    return [text for text in overlap.exposed() if not text.startswith(PLACES_IN_BACKWARD)]


def check(overlap: Overlap, *, num_levels: int = 1) -> None:
    """Raise if an all-gather is exposed, nothing was recorded, or more buffers were alive than that takes."""
    assert overlap.runs, "nothing was recorded"
    assert overlap.gatherings, "no all-gather was recorded"
    assert exposed(overlap) == []
    assert overlap.most_alive["forward"] <= MOST_IN_FORWARD * num_levels
    assert overlap.most_alive["backward"] <= MOST_IN_BACKWARD * num_levels


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "forward_prefetch": {"forward_prefetch": True},
    "backward_prefetch_post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "low precision": {"mixed_precision": LOW},
    "shards on the host": {"cpu_offload": OFFLOAD},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "no reshard after forward": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
}


@BOTH_KINDS
@pytest.mark.parametrize("name", OPTIONS)
def test_no_all_gather_of_a_step_waits_for_the_unit_before(name: str, use_orig_params: bool) -> None:
    options = dict(OPTIONS[name])
    if strategy := options.get("sharding_strategy"):
        options.update(mesh_for(strategy))
    with rehearsal() as run:
        model = run.wrap(
            DEEP() if "cpu_offload" in options else on_device(DEEP), use_orig_params=use_orig_params, **options
        )
        with watched(run, model) as overlap:
            train(run, model, num_steps=3)
    if options.get("sharding_strategy") is ShardingStrategy.SHARD_GRAD_OP:
        assert overlap.exposed() == []  # every buffer of the forward stays alive for backward
    else:
        check(overlap)
        # The begin of a backward frees nothing, and holds one more unit than the rest.
        holds_one_more = name != "backward_prefetch_post"
        assert overlap.most_alive["backward"] == MOST_IN_BACKWARD - (not holds_one_more)


@BOTH_KINDS
@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_no_all_gather_of_a_forward_without_gradients_waits_for_the_unit_before(
    no_grad: Callable[[], Any], use_orig_params: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(DEEP), use_orig_params=use_orig_params)
        with watched(run, model) as overlap, no_grad():
            for _ in range(3):
                model(batch())
    run.check()
    check(overlap)
    assert overlap.most_alive["forward"] == MOST_IN_FORWARD


class Nested(nn.Module):
    """Units in units, with layers after the inner ones, and before them with ``computes_first``."""

    def __init__(self, computes_first: bool) -> None:
        super().__init__()
        self.groups = nn.ModuleList([Group(computes_first) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups:
            x = group(x)
        return x


class Group(nn.Module):
    def __init__(self, computes_first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if computes_first else nn.Identity()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize("computes_first", [False, True])
@pytest.mark.parametrize("front", ["flat", "orig", "fully_shard"])
def test_no_all_gather_of_units_inside_units_waits_for_the_unit_before(front: str, computes_first: bool) -> None:
    build = functools.partial(Nested, computes_first)
    with rehearsal() as run:
        if front == "fully_shard":
            model = sharded(run, build, units=lambda model: [m for g in model.groups for m in (*g.blocks, g)])
        else:
            policy = ModuleWrapPolicy({Block, Group})
            model = run.wrap(on_device(build), use_orig_params=front == "orig", auto_wrap_policy=policy)
        with watched(run, model) as overlap:
            train(run, model, num_steps=3, optimizer=LocalUpdates if front == "fully_shard" else torch.optim.SGD)
    run.check()
    check(overlap, num_levels=2)


@BOTH_KINDS
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved_hooks", "reentrant"])
def test_no_all_gather_of_a_recomputed_step_waits_for_the_unit_before(
    use_reentrant: bool, use_orig_params: bool
) -> None:
    with rehearsal() as run:
        model = run.wrap(on_device(lambda: Checkpointed(use_reentrant)), use_orig_params=use_orig_params)
        with watched(run, model) as overlap:
            train(run, model, num_steps=3)
    check(overlap)


def _prefetch_two(model: nn.Module) -> None:
    blocks: Any = model.blocks
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch([blocks[at] for at in range(index - 1, max(-1, index - 3), -1)])


@pytest.mark.parametrize("reshards", [True, None, 2])
def test_no_all_gather_of_fully_shard_waits_for_the_unit_before(reshards: Any) -> None:
    with rehearsal() as run:
        model = sharded(run, DEEP, reshard_after_forward=reshards)
        with watched(run, model) as overlap:
            train(run, model, num_steps=3, optimizer=LocalUpdates)
    check(overlap)


def test_prefetched_units_of_fully_shard_do_not_wait_for_the_unit_before() -> None:
    with rehearsal() as run:
        model = sharded(run, DEEP)
        _prefetch_two(model)
        with watched(run, model) as overlap:
            train(run, model, num_steps=3, optimizer=LocalUpdates)
    assert exposed(overlap) == []


def test_an_all_gather_to_staging_memory_waits_for_nothing_that_uses_other_memory() -> None:
    begins: list[int] = []
    ends: list[tuple[int, Stamp]] = []
    with rehearsal() as run:
        model = sharded(run, Tied, reshard_after_forward=True)
        compute = run.machine.compute
        with watched(run, model) as overlap:
            gatherings = overlap.gatherings
            model.register_forward_pre_hook(lambda *_: begins.append(len(gatherings)))
            model.blocks[-1].register_forward_hook(
                lambda *_: ends.append((len(gatherings), (compute.id, compute.clock[compute.id])))
            )
            train(run, model, num_steps=3, optimizer=LocalUpdates)
    run.check()
    assert len(begins) == len(ends) == 3
    for begin, (end, last_of_forward) in zip(begins, ends, strict=True):
        of_root = next(each for each in gatherings[end:] if (each.unit, each.op) == ("Tied", GATHERS))
        assert not is_ordered(last_of_forward, of_root.clock), "the root's in backward waits for the forward"
        in_forward = [each for each in gatherings[begin:end] if each.op in (GATHERS, PLACES)]
        assert len(in_forward) >= 4
        for copy, following in pairwise(in_forward):
            if copy.op == PLACES:
                assert not is_ordered(copy.stamp, following.clock), f"that of {following.unit} waits for a copy"


def _after_compute(streams: Streams) -> Any:
    if streams._all_gather is None:
        streams._all_gather = streams._new_stream(streams._device)
    streams._all_gather.wait_stream(streams._current())
    return streams._all_gather


def _watched_step(run: Rehearsal, **kwargs: Any) -> Overlap:
    model = run.wrap(on_device(DEEP), **kwargs)
    with watched(run, model) as overlap:
        train(run, model, num_steps=2)
    return overlap


def test_an_all_gather_that_waits_for_all_compute_is_found() -> None:
    with rehearsal() as run, mock.patch.object(Streams, "_enter_all_gathers", _after_compute):
        overlap = _watched_step(run)
    assert any("for the forward of 'blocks.2' waits for that of 'blocks.1'" in text for text in overlap.exposed())


def test_streams_of_collectives_come_before_compute_and_copies_to_the_host_do_not() -> None:
    with rehearsal() as run:
        model = sharded(run, DEEP)
        with offload_activations(model, min_nbytes=0):
            loss = model(batch()).sum()
        loss.backward()
    sides = [stream.priority for stream in run.machine.streams if stream.name.startswith("side")]
    assert sorted(sides) == [-1, -1, -1, 0, 0]  # staging, all-gathers and reductions; to the host and back
