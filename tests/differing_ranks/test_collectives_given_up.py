"""Collectives that a rank gave up: their memory stays theirs, and their group is refused until ranks compare calls.

Every test here runs where freed memory is kept and checked (``tests/support/freed_memory.py``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.comm import RankGroup, collectives_for, failures, given_up
from fsdp_flat.composable import fully_shard
from fsdp_flat.core.unit import units_of
from fsdp_flat.errors import PeerFailureError, RankMismatchError
from tests.support import on_ranks
from tests.support.beside import FRONTS
from tests.support.hosts import on_hosts
from tests.support.kit import RaisesInBackward, Trouble, batch, seeded, wrapped
from tests.support.patience import LATE_S, SECONDS, impatient, tell, wait_until

WIDTH = 64
TRANSPORTS = pytest.mark.parametrize("transport", ["gloo", "shared", "hosts"])


class Layers(nn.Sequential):
    """Layers of one size, so that the all-gather of one can be taken for that of another; raises before layer ``bad``.

    Attributes:
        bad: index of the layer, or the number of layers to raise after them all, or None.
        in_backward: raise in the backward of that layer, not in its forward.
    """

    bad: int | None = None
    in_backward = False

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self):
            if index == self.bad and not self.in_backward:
                raise Trouble("an odd batch")
            x = RaisesInBackward.apply(layer(x)) if index == self.bad else layer(x)
        if self.bad == len(self):
            raise Trouble("an odd batch")
        return x


@contextmanager
def looking_soon(transport: str, places: str = "ab") -> Iterator[None]:
    """Move tensors by ``transport``, and look early whether a rank that is waited for has failed.

    Args:
        transport: "gloo", "shared" memory of all ranks, or "hosts": shared memory between the ranks of a host.
        places: the host of each rank.
    """
    os.environ["FSDP_FLAT_SHARED_MEMORY"] = str(int(transport != "gloo"))
    with impatient(), on_hosts(places) if transport == "hosts" else nullcontext():
        yield


def sharded(front: str, *, num_replicas: int = 1, timeout_s: float = 20) -> Any:
    """Shard layers, one a unit, over groups of their own."""
    model, ranks = seeded(Layers), list(range(dist.get_world_size()))
    timeout, size = timedelta(seconds=timeout_s), len(ranks) // num_replicas
    shards = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    shard, _ = dist.new_subgroups_by_enumeration(shards, timeout=timeout)
    replicate, _ = dist.new_subgroups_by_enumeration(
        [list(each) for each in zip(*shards, strict=True)], timeout=timeout
    )
    if front == "fully_shard":
        groups, dims = ([replicate, shard], ("replicate", "shard")) if num_replicas > 1 else (shard, ("shard",))
        by_mesh = torch.tensor(shards) if num_replicas > 1 else None
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=by_mesh, mesh_dim_names=dims)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    strategy = ShardingStrategy.HYBRID_SHARD if num_replicas > 1 else ShardingStrategy.FULL_SHARD
    return wrapped(
        model,
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear),
        process_group=(shard, replicate) if num_replicas > 1 else shard,
        sharding_strategy=strategy,
        use_orig_params=front == "originals",
    )


def layers_of(model: Any) -> Layers:
    layers: Layers = model.module if isinstance(model, FSDP) else model
    return layers


def goes_on(model: Any, x: torch.Tensor, right: torch.Tensor, *, trains: bool = False) -> BaseException | None:
    """Run a forward, and a backward if it ``trains``; return the error, or None if the result is right."""
    with torch.set_grad_enabled(trains):
        try:
            out = model(x)
            assert torch.equal(out, right), "a wrong value, without an error"
            if trains:
                out.sum().backward()
        except (RankMismatchError, PeerFailureError, Trouble) as error:
            return error
    return None


def is_named(error: BaseException | None) -> bool:
    """Return whether an error says that ranks differ, with the first error."""
    own = "an odd batch" in str(error) or "do not run the same units" in str(error)
    return isinstance(error, RankMismatchError) and own


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("bad", [0, 1])
@on_ranks(2, timeout=50)
def test_after_one_rank_raised_alone_no_rank_goes_on_with_what_another_has_given_up(
    bad: int, transport: str, front: str, rank: int
) -> None:
    x = batch(0, width=WIDTH)
    with looking_soon(transport), torch.no_grad():
        model = sharded(front)
        right = model(x)
        layers_of(model).bad = bad if rank == 0 else None
        with pytest.raises(Trouble if rank == 0 else PeerFailureError, match="an odd batch"):
            model(x)
        layers_of(model).bad = None
        time.sleep(0 if rank else 2 * LATE_S)
        assert all(is_named(goes_on(model, x, right)) for _ in range(2))
    dist.barrier()


@FRONTS
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@on_ranks(4, timeout=50)
def test_after_one_rank_of_a_replica_raised_alone_no_rank_computes_wrong_values(
    transport: str, front: str, rank: int
) -> None:
    x = batch(0, width=WIDTH)
    with looking_soon(transport):
        model = sharded(front, num_replicas=2)
        right = model(x).detach()
        right_again = model(x)
        right_again.sum().backward()
        layers_of(model).bad = 1 if rank == 0 else None
        kind = Trouble if rank == 0 else PeerFailureError
        with pytest.raises(kind, match="an odd batch"):
            model(x).sum().backward()
        layers_of(model).bad = None
        time.sleep(0 if rank else 2 * LATE_S)
        found = [goes_on(model, x, right) for _ in range(2)]
        assert all(map(is_named, found)) if rank < 2 else found == [None, None]
    dist.barrier()


@FRONTS
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@on_ranks(2, timeout=50)
def test_a_rank_that_left_a_backward_alone_does_not_go_on(transport: str, front: str, rank: int) -> None:
    x = batch(0, width=WIDTH)
    with looking_soon(transport):
        model = sharded(front)
        right = model(x).detach()
        layers = layers_of(model)
        layers.bad, layers.in_backward = 1 if rank == 0 else None, True
        out = model(x).sum()
        with pytest.raises(Trouble if rank == 0 else (PeerFailureError, RankMismatchError)):
            out.backward()
        layers.bad = None
        for _ in range(2):
            error = goes_on(model, x, right)
            assert error is not None
        assert "left a backward by an exception" in str(error) or "do not run the same units" in str(error), str(error)
    dist.barrier()


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@on_ranks(2, timeout=50)
def test_ranks_that_raise_at_one_point_go_on(in_backward: bool, transport: str, front: str, rank: int) -> None:
    x = batch(0, width=WIDTH)
    with looking_soon(transport):
        model = sharded(front)
        model(x).sum().backward()
        right = model(x).detach()
        for late in (0, 1):
            layers = layers_of(model)
            layers.bad, layers.in_backward = 1, in_backward
            time.sleep(LATE_S if rank == late else 0)
            with pytest.raises(Trouble):
                model(x).sum().backward()
            layers.bad = None
            assert torch.equal(model(x), right)
    dist.barrier()


@pytest.mark.parametrize("front", ["flat", "originals"])
@on_ranks(2, timeout=50)
def test_what_is_given_up_is_written_and_sent_from_memory_of_its_own(front: str, rank: int) -> None:
    x = batch(0, width=WIDTH)
    with looking_soon("gloo"), torch.no_grad():
        model = sharded(front)
        model(x)
        unit = units_of(model)[2]
        (param_group,) = unit.param_groups
        group, shard = param_group.comm.state_collectives.group, param_group.flat_shard()
        shards = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(shards, shard.clone())
        layers_of(model).bad = 0 if rank == 0 else None
        with pytest.raises(Trouble if rank == 0 else PeerFailureError):
            model(x)
        assert not param_group.output.nbytes
        assert unit.is_sharded
        dist.barrier()
        if rank == 0:
            # The program's own collectives: gloo takes them for the two halves of the all-gather.
            dist.broadcast(torch.full_like(shard, 5), 0, group=group)
            received = torch.empty_like(shard)
            dist.broadcast(received, 1, group=group)
            assert torch.equal(received, shards[1])
        else:
            (pending,) = [each for each in given_up._kept if each.result is param_group.output.tensors[0]]
            held = torch.empty(0).set_(given_up._kept[pending][0])
            taken = [torch.full_like(held, 7) for _ in range(20)]
            while not pending.is_completed():
                time.sleep(0.05)
            assert torch.equal(held, torch.cat([torch.full_like(shard, 5), shards[1]]))
            assert all(each.eq(7).all() for each in taken)
            given_up.drop_completed()
            assert pending not in given_up._kept
    dist.barrier()


class Stuck:
    """The work of a caller's collective that fails while a thread still writes its output."""

    def __init__(self) -> None:
        self.is_complete = False

    def is_completed(self) -> bool:
        return self.is_complete

    def wait(self) -> None:
        raise dist.DistBackendError("the network is gone")


@pytest.mark.parametrize("front", ["flat", "fully_shard"])
@on_ranks(2, timeout=50)
def test_memory_of_a_callers_collective_that_failed_is_kept_until_its_work_is_complete(front: str, rank: int) -> None:
    x, work, outputs = batch(0, width=WIDTH), Stuck(), list[torch.Tensor]()

    def all_gather(output: torch.Tensor, *_: Any, **__: Any) -> Stuck:
        outputs.append(output)
        return work

    model = sharded(front)
    model(x)
    for unit in units_of(model)[1:]:
        for param_group in unit.param_groups:
            comm = param_group.comm
            comm.use(comm.options, type(comm.choice)(all_gather=all_gather))
    settling_soon = mock.patch.object(given_up, "_SETTLE_S", LATE_S)
    with impatient(), settling_soon, pytest.raises(PeerFailureError, match="the network is gone"):
        model(x)
    assert all(not param_group.output.nbytes for unit in units_of(model) for param_group in unit.param_groups)
    kept = [each for each in given_up._kept if work in [getattr(w, "work", None) for w in getattr(each, "_works", ())]]
    assert len(kept) == 1
    # A thread writes to the output: to what was the buffer of a flat parameter, or to memory beside the buffer.
    (block,) = [each for each in given_up._kept[kept[0]] if isinstance(each, torch.UntypedStorage)]
    is_in_place = outputs[0].untyped_storage().nbytes() == 0
    assert is_in_place is (front == "flat")
    (torch.empty(0).set_(block) if is_in_place else outputs[0]).fill_(1)
    work.is_complete = True
    given_up.drop_completed()
    assert kept[0] not in given_up._kept
    dist.barrier()


@on_ranks(2, timeout=50)
def test_a_wait_that_failed_fails_again_or_ends_once_the_works_are_complete(rank: int) -> None:
    with looking_soon("gloo"):
        group = RankGroup.of(dist.new_group(timeout=timedelta(seconds=20)))
        collectives = collectives_for(group, torch.device("cpu"))
        assert collectives is not None
        collectives.begin_all_gather(torch.zeros(4)).wait()
        whole = torch.full((4,), -1.0)
        whole[2 * rank : 2 * rank + 2] = rank
        if rank == 1:
            failures.report_failure(group, "raised Trouble: an odd batch")
            wait_until("rank 0 has raised")
            # As no rank of the library would: it would compare its calls first.
            with mock.patch.object(given_up, "_compare"):
                collectives.begin_all_gather(whole).wait()
        else:
            pending = collectives.begin_all_gather(whole)
            with pytest.raises(PeerFailureError, match="an odd batch"):
                pending.wait()
            tell("rank 0 has raised")
            while not pending.is_completed():
                time.sleep(0.05)
            pending.wait()
        assert whole.tolist() == [0, 0, 1, 1]
    dist.barrier()


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("trains", [False, True], ids=["evaluates", "trains"])
@on_ranks(2, timeout=50)
def test_a_rank_that_goes_on_at_once_after_it_raised_in_mid_forward_is_paired_with_no_other_unit(
    trains: bool, transport: str, front: str, rank: int
) -> None:
    x = batch(0, width=WIDTH)
    with looking_soon(transport), torch.set_grad_enabled(trains):
        model = sharded(front)
        right = model(x)
        if trains:
            right.sum().backward()
        layers_of(model).bad = 1 if rank == 0 else None
        for _ in range(3):
            error = goes_on(model, x, right.detach(), trains=trains)
            layers_of(model).bad = None
        assert is_named(error)
    dist.barrier()


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("trains", [False, True], ids=["evaluates", "trains"])
@on_ranks(2, timeout=50)
def test_a_rank_that_raises_after_its_last_unit_goes_on(trains: bool, transport: str, front: str, rank: int) -> None:
    """In training all ranks skip the batch, by a flag that they exchange."""
    x = batch(0, width=WIDTH)
    with looking_soon(transport), torch.set_grad_enabled(trains):
        model = sharded(front)
        expected = model(x).detach()
        for at in (0, 1, 0):
            layers_of(model).bad = len(layers_of(model)) if rank == at else None
            try:
                found = model(x)
                assert torch.equal(found, expected)
                assert rank != at
            except Trouble:
                assert rank == at
            layers_of(model).bad = None
            if trains:
                has_failed = torch.tensor(float(rank == at))
                dist.all_reduce(has_failed)
                assert has_failed
            found = model(x)
            assert torch.equal(found, expected)
            if trains:
                found.sum().backward()
    dist.barrier()


@FRONTS
@pytest.mark.parametrize("transport", ["gloo", "shared"])
@on_ranks(2, timeout=50)
def test_a_rank_that_had_failed_before_and_gone_on_is_told_of_anothers_first_failure(
    transport: str, front: str, rank: int
) -> None:
    x = batch(0, width=WIDTH)
    with looking_soon(transport), torch.no_grad():
        model = sharded(front)
        layers_of(model).bad = 0
        for _ in range(3 if rank == 0 else 0):  # before its first all-gather
            with pytest.raises(Trouble):
                model(x)
        layers_of(model).bad = None
        model(x)
        layers_of(model).bad = 1 if rank == 1 else None
        begun = time.monotonic()
        with pytest.raises(Trouble if rank == 1 else PeerFailureError, match="an odd batch"):
            model(x)
        assert time.monotonic() - begun < SECONDS, "waited for the timeout of the group"
    dist.barrier()
