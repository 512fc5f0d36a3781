"""Groups that span hosts exchange tensors in two levels: within each host, and once between hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.collectives import QuantizedAllGather, QuantizedReduceScatter, use_collectives
from fsdp_flat.comm import CollectiveOverrides, RankGroup
from fsdp_flat.comm.failures import REPORT_TIMEOUT_S
from fsdp_flat.comm.shm import SharedMemoryCollectives, connect, transport_of
from fsdp_flat.errors import OptionError, PeerFailureError
from tests.comm.test_collectives import DTYPES, contribution
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside, sgd
from tests.support.hosts import on_hosts, train_fully_shard_beside_a_replica
from tests.support.kit import BLOCKS, batch, full_grads, full_params, mesh, square_loss, wrapped
from tests.support.models import Stack
from tests.support.patience import give_up_soon, impatient
from tests.support.steps import MESSAGES, recorded

# The host of each rank: pairs in order, and interleaved.
PLACES = ["aabb", "abab", "abba"]


def sum_by_host(places: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add parts by rank in the documented order: within each host first, rounded once for each host."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype

    def total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        first, second = (tensor.to(wide) for tensor in tensors)
        return (first + second).to(parts[0].dtype)

    return total([total([part for place, part in zip(places, parts) if place == host]) for host in "ab"])


@on_ranks(4)
@pytest.mark.parametrize("places", PLACES)
def test_a_gather_is_the_concatenation_of_the_slices_wherever_ranks_are(places: str, rank: int) -> None:
    with on_hosts(places):
        rank_group = RankGroup.of(dist.new_group())
        assert isinstance(connect.connect(rank_group), connect.Hosts)
        for dtype in [*DTYPES, torch.bool]:
            slices = [contribution(other, 5, dtype) for other in range(4)]
            full = torch.zeros(20, dtype=dtype)
            full[5 * rank : 5 * (rank + 1)] = slices[rank]
            assert SharedMemoryCollectives(rank_group).begin_all_gather(full).wait() is full
            assert_equal(full, torch.cat(slices), what=f"{dtype}")


@on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("places", PLACES)
def test_a_reduction_adds_within_each_host_in_order_of_ranks_and_then_over_hosts(
    places: str, dtype: torch.dtype, rank: int
) -> None:
    with on_hosts(places):
        collectives = SharedMemoryCollectives(RankGroup.of(dist.new_group()))
        parts = [
            (100 * torch.randn(4 * 33, generator=torch.Generator().manual_seed(other))).to(dtype) for other in range(4)
        ]
        for late in range(4):
            if rank == late:
                time.sleep(0.01)
            result = collectives.begin_reduce_scatter(parts[rank].clone()).wait()
            assert_equal(result, sum_by_host(places, parts)[33 * rank : 33 * (rank + 1)], what=f"rank {late} late")


@on_ranks(6)
@pytest.mark.parametrize("places", ["aabbcc", "cabbca", "aaabbb"])
def test_three_hosts_and_hosts_of_three_ranks_gather_and_add_also_nothing(places: str, rank: int) -> None:
    with on_hosts(places):
        rank_group = RankGroup.of(dist.new_group())
        assert isinstance(connect.connect(rank_group), connect.Hosts)
        unit = SharedMemoryCollectives(rank_group)
        for numel in (0, 1, 5):
            slices = [contribution(other, numel, torch.float32) for other in range(6)]
            full = torch.zeros(6 * numel)
            full[numel * rank : numel * (rank + 1)] = slices[rank]
            assert_equal(unit.begin_all_gather(full).wait(), torch.cat(slices))
            parts = [contribution(other, 6 * numel, torch.float32) for other in range(6)]
            total = torch.stack(parts).sum(0)[numel * rank : numel * (rank + 1)]
            assert_equal(unit.begin_reduce_scatter(parts[rank].clone()).wait(), total)


@on_ranks(4)
@pytest.mark.parametrize("places", ["abcd", "aaab", "aabc"])
def test_hosts_of_one_rank_or_of_unequal_numbers_use_gloo(places: str) -> None:
    with on_hosts(places):
        rank_group = RankGroup.of(dist.new_group())
        assert transport_of(rank_group) is None
        assert not isinstance(connect.connect(rank_group), connect.Hosts)


@on_ranks(4)
def test_collectives_of_several_units_may_be_waited_for_in_any_order_over_hosts(rank: int) -> None:
    with on_hosts("aabb"):
        rank_group = RankGroup.of(dist.new_group())
        units = [SharedMemoryCollectives(rank_group, number, f"unit {number}") for number in (1, 2, 3)]
        pendings = []
        for number, unit in enumerate(units, 1):
            full = torch.zeros(4 * number)
            full[number * rank : number * (rank + 1)] = rank + number
            pendings.append((unit.begin_all_gather(full), torch.arange(4.0).repeat_interleave(number) + number))
            gradient = torch.full((4 * number,), float(rank + number))
            pendings.append((unit.begin_reduce_scatter(gradient), torch.full((number,), 6.0 + 4 * number)))
        for pending, expected in reversed(pendings):
            assert_equal(pending.wait(), expected)
            assert pending.is_completed()


@on_ranks(4)
def test_a_collective_completes_without_a_wait_once_all_ranks_have_looked(rank: int) -> None:
    with on_hosts("aabb"):
        unit = SharedMemoryCollectives(RankGroup.of(dist.new_group()))
        pendings = [unit.begin_all_gather(torch.full((4,), float(rank))), unit.begin_reduce_scatter(torch.ones(8))]
        until = time.monotonic() + 30
        while [pending for pending in pendings if not pending.is_completed()]:
            assert time.monotonic() < until, "the collectives do not proceed"
            time.sleep(0.001)
        assert_equal(pendings[0].wait(), torch.arange(4.0))
        assert_equal(pendings[1].wait(), torch.full((2,), 4.0))


@on_ranks(4)
def test_a_failed_collective_between_hosts_and_those_behind_it_are_complete_without_an_error(rank: int) -> None:
    with on_hosts("aabb"):
        rank_group = RankGroup.of(dist.new_group())
        unit, hosts = SharedMemoryCollectives(rank_group), connect.connect(rank_group)
        assert isinstance(hosts, connect.Hosts)
        unit.begin_all_gather(torch.full((4,), float(rank))).wait()
        for crossing in {id(each.group): each.group for each in hosts.gather_groups}.values():
            give_up_soon(crossing)
        dist.barrier()
        if rank < 2:
            pendings = [unit.begin_all_gather(torch.full((4,), float(rank))) for _ in range(2)]
            until = time.monotonic() + 30
            while any(not pending._works[0].is_completed() for pending in pendings):  # gloo's timeout
                assert time.monotonic() < until, "not complete"
                time.sleep(0.05)
            begun = time.monotonic()
            assert all(pending._works[0].is_completed() for pending in pendings)
            assert time.monotonic() - begun < REPORT_TIMEOUT_S, "waited for reports"
            with pytest.raises(PeerFailureError):
                pendings[1].wait()
    dist.barrier()


@on_ranks(4)
def test_each_byte_crosses_between_two_hosts_once(rank: int) -> None:
    with on_hosts("aabb"):
        unit = SharedMemoryCollectives(RankGroup.of(dist.new_group()))
        unit.begin_all_gather(torch.zeros(4 * 100)).wait()
        with recorded() as record:
            unit.begin_all_gather(torch.zeros(4 * 100)).wait()
            unit.begin_reduce_scatter(torch.zeros(4 * 100)).wait()
        crossing = [call for call in record.calls if call.name not in MESSAGES]
        assert {(call.name, call.size) for call in crossing} == {("all_to_all_single", 2)}, "with a rank of each host"
        to_higher, to_lower = ([call.nbytes for call in crossing[first::2]] for first in (0, 1))
        # This rank's slice, and its host's sum of one.
        assert [to_higher, to_lower] == ([[400, 400], [0, 0]] if rank < 2 else [[0, 0], [400, 400]])


@on_ranks(4)
def test_the_log_says_once_how_a_group_that_spans_hosts_exchanges_tensors(rank: int) -> None:
    with on_hosts("aabb"), mock.patch.object(connect, "_logger") as logger:
        rank_group = RankGroup.of(dist.new_group())
        for number in (1, 2):
            SharedMemoryCollectives(rank_group, number).begin_all_gather(torch.zeros(4)).wait()
    lines = [call.args[0] % call.args[1:] for call in logger.info.call_args_list]
    assert lines == [
        f"rank {rank} of a group of 4: tensors on the CPU move by shared memory within each of 2 hosts, and by "
        "gloo once between them"
    ]


def layouts(strategy: ShardingStrategy) -> list[dict[str, Any]]:
    """The groups of a strategy: none, or for a hybrid one meshes that replicate over pairs and over single ranks."""
    if "HYBRID" not in strategy.name:
        return [{}]
    return [{"device_mesh": mesh(2, 2)}, {"device_mesh": mesh(1, 4)}]


@on_ranks(4)
@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_every_strategy_trains_as_a_plain_replica_over_hosts(strategy: ShardingStrategy, front: str) -> None:
    with on_hosts("aabb"):
        for layout in layouts(strategy):
            layout.setdefault("process_group", None if "device_mesh" in layout else dist.new_group())
            beside = Beside(Stack(), front, sharding_strategy=strategy, **layout)
            beside.train(num_steps=3)


@on_ranks(4)
@pytest.mark.parametrize("places", ["abba", "aaab"])
def test_uneven_shards_train_as_a_plain_replica(places: str) -> None:
    with on_hosts(places):
        beside = Beside(nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1)), units=())
        beside.train(num_steps=3)


@on_ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4)])
def test_fully_shard_trains_as_a_plain_replica_over_hosts(shape: tuple[int, ...]) -> None:
    with on_hosts("aabb"):
        train_fully_shard_beside_a_replica(shape)


class Moody(Stack):
    """Raises in the middle while it is ``bad``: in its forward, or in its backward."""

    bad = ""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        if self.bad == "forward":
            raise ValueError("an odd batch")
        if self.bad == "backward":
            x.register_hook(self.fail)
        return super().features(x)

    @staticmethod
    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("an odd batch")


@on_ranks(4, timeout=90)
@pytest.mark.parametrize("bad", [0, 3])
def test_ranks_of_both_hosts_name_the_one_that_raised(bad: int, rank: int) -> None:
    with on_hosts("aabb"), impatient():
        model = wrapped(Moody(), auto_wrap_policy=BLOCKS, process_group=dist.new_group(timeout=timedelta(seconds=60)))
        square_loss(model, batch(rank)).backward()
        model.module.bad = "forward" if rank == bad else ""
        error, text = ValueError, "an odd batch"
        if rank != bad:
            error, text = PeerFailureError, f"rank {bad} raised ValueError: an odd batch"
        with pytest.raises(error, match=text):
            square_loss(model, batch(rank)).backward()
        dist.barrier()


@on_ranks(4)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ranks_of_both_hosts_train_on_after_an_error_that_each_has_caught(where: str, rank: int) -> None:
    with on_hosts("aabb"):
        beside = Beside(Moody(), process_group=dist.new_group())
        for _ in range(2):
            beside.ours.module.bad = where
            with pytest.raises(ValueError, match="an odd batch"):
                square_loss(beside.ours, beside.batch()).backward()
            beside.ours.module.bad = ""
            beside.train()


@on_ranks(4)
def test_bf16_gradients_over_hosts_are_as_close_to_a_plain_replica_as_on_one(rank: int) -> None:
    def gradients(places: str) -> dict[str, torch.Tensor]:
        with on_hosts(places):
            torch.manual_seed(0)
            precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            model = wrapped(Stack(), mixed_precision=precision, process_group=dist.new_group())
            square_loss(model, batch(rank)).backward()
            return full_grads(model)

    one, two = gradients("aaaa"), gradients("aabb")
    # The sum is rounded to 8 bits once more for each host.
    assert_close(two, one, atol=max(float(grad.abs().max()) for grad in one.values()) * 2**-7, rtol=2**-7)


@on_ranks(4)
def test_collectives_in_8_bits_train_over_hosts_as_on_one(rank: int) -> None:
    def weights(places: str) -> dict[str, torch.Tensor]:
        with on_hosts(places):
            torch.manual_seed(0)
            model = wrapped(Stack(), auto_wrap_policy=BLOCKS, process_group=dist.new_group())
            use_collectives(model, all_gather=QuantizedAllGather(), reduce_scatter=QuantizedReduceScatter())
            optimizer = sgd(model)
            for step in range(3):
                optimizer.zero_grad()
                square_loss(model, batch(rank, step)).backward()
                optimizer.step()
            return full_params(model)

    assert_close(weights("aabb"), weights("aaaa"), atol=1e-6, rtol=1e-5)


def trained_between(places: str, rank: int, **dtypes: torch.dtype) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Take one step with dtypes between hosts; return the model, and the full gradients."""
    torch.manual_seed(0)
    model = wrapped(Stack(), auto_wrap_policy=BLOCKS, process_group=dist.new_group())
    use_collectives(model, **dtypes)
    square_loss(model, batch(rank)).backward()
    return model, full_grads(model)


# Of the largest magnitude in a block, the largest error of an element.
ERRORS = {torch.bfloat16: 1 / 256, torch.int8: 1 / 254}


@on_ranks(4)
@pytest.mark.parametrize("dtype", list(ERRORS))
def test_gradients_are_rounded_between_hosts_alone(dtype: torch.dtype, rank: int) -> None:
    with on_hosts("aabb"):
        _, exact = trained_between("aabb", rank)
        _, rounded = trained_between("aabb", rank, reduce_dtype_between_hosts=dtype)
        # Each host's sum of one slice is rounded once; it is at most as large as both together here.
        largest = 2 * max(float(value.abs().max()) for value in exact.values())
        assert_close(rounded, exact, atol=largest * ERRORS[dtype], rtol=0)
        assert any(not torch.equal(rounded[name], exact[name]) for name in exact)
    with on_hosts("aaaa"):
        _, on_one = trained_between("aaaa", rank, reduce_dtype_between_hosts=dtype)
        _, exact = trained_between("aaaa", rank)
        assert_equal(on_one, exact, what="on one host")


@on_ranks(4)
@WRAPPER_FRONTS
@pytest.mark.parametrize("dtype", list(ERRORS))
def test_all_ranks_compute_with_the_same_rounded_parameters_and_keep_exact_ones(
    dtype: torch.dtype, front: str, rank: int
) -> None:
    with on_hosts("abba"):
        torch.manual_seed(0)
        module = Stack()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        seen: dict[str, torch.Tensor] = {}
        names = [name for name, _ in module.blocks[0].named_parameters()]

        def note(block: nn.Module, *_: Any) -> None:
            found = [getattr(block.get_submodule(path), name) for path, _, name in (n.rpartition(".") for n in names)]
            seen["whole"] = torch.cat([value.detach().flatten() for value in found])

        module.blocks[0].register_forward_hook(note)
        model = wrapped(
            module, auto_wrap_policy=BLOCKS, use_orig_params=front == "originals", process_group=dist.new_group()
        )
        use_collectives(model, param_dtype_between_hosts=dtype)
        square_loss(model, batch(rank)).backward()
        everywhere = [torch.empty_like(seen["whole"]) for _ in range(4)]
        dist.all_gather(everywhere, seen["whole"])
        for other in everywhere:
            assert_equal(other, everywhere[0], what="the parameters of a forward on another rank")
        exact = torch.cat([value.flatten() for name, value in before.items() if name.startswith("blocks.0.")])
        assert_close(seen["whole"], exact, atol=float(exact.abs().max()) * ERRORS[dtype], rtol=0)
        assert not torch.equal(seen["whole"], exact)
        assert_equal(full_params(model), before, what="summon_full_params")


@on_ranks(4)
def test_values_that_are_not_finite_stay_so_between_hosts_and_integers_and_empty_slices_stay_as_they_are(
    rank: int,
) -> None:
    with on_hosts("aabb"):
        rank_group = RankGroup.of(dist.new_group())
        for dtype in ERRORS:
            choice = CollectiveOverrides(gathered_between_hosts=dtype, reduced_between_hosts=dtype)
            ours = SharedMemoryCollectives(rank_group, choice=choice)
            full = torch.ones(20)
            full[3] = float("inf") if rank == 3 else 1.0
            result = ours.begin_reduce_scatter(full).wait()
            assert bool(result.isfinite().all()) == (rank != 0)
            ours.begin_reduce_scatter(torch.ones(0)).wait()
            for kept in (torch.arange(4), torch.zeros(0), torch.ones(4, dtype=torch.bool)):
                slices = kept.clone()
                assert_equal(ours.begin_all_gather(slices).wait(), kept)


@on_ranks(4)
@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.bfloat16, 2000), (torch.int8, 1024 + 16)])
def test_fewer_bytes_cross_between_hosts(dtype: torch.dtype, nbytes: int, rank: int) -> None:
    with on_hosts("aabb"):
        choice = CollectiveOverrides(gathered_between_hosts=dtype, reduced_between_hosts=dtype)
        unit = SharedMemoryCollectives(RankGroup.of(dist.new_group()), choice=choice)
        unit.begin_all_gather(torch.zeros(4 * 1000)).wait()
        with recorded() as record:
            unit.begin_all_gather(torch.zeros(4 * 1000)).wait()
            unit.begin_reduce_scatter(torch.zeros(4 * 1000)).wait()
        crossing = [call.nbytes for call in record.calls if call.name not in MESSAGES]
        assert sorted(crossing) == [0, 0, nbytes, nbytes]


@pytest.mark.parametrize("name", ["param_dtype_between_hosts", "reduce_dtype_between_hosts"])
def test_a_dtype_between_hosts_is_one_of_two_and_of_the_librarys_collectives(name: str) -> None:
    with pytest.raises(OptionError, match=rf"{name} is torch.bfloat16, torch.int8 or None; got torch.float16"):
        use_collectives(nn.Linear(2, 2), **{name: torch.float16})
    own = {"param_dtype_between_hosts": "all_gather", "reduce_dtype_between_hosts": "reduce_scatter"}[name]
    replaced = QuantizedAllGather() if own == "all_gather" else QuantizedReduceScatter()
    with pytest.raises(OptionError, match=f"{name} is for the library's own collectives"):
        use_collectives(nn.Linear(2, 2), **{name: torch.int8, own: replaced})
