"""What a save moves, needs and looks like, and that a save on one rank is found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as peer_library
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_flat import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    save_checkpoint,
)
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.comm import RankGroup, agreement
from fsdp_flat.comm.shm import transport_of
from fsdp_flat.core import units_of
from fsdp_flat.errors import PeerFailureError, PhaseError, UsageError
from fsdp_flat.layout import clean_fqn
from fsdp_flat.user_warnings import warn_user
from tests.memory.test_memory import settled_bytes
from tests.state_dict.kit import FULL, LOCAL, OPTIMIZERS, SHARDED, TASKS, load, peer_quiet, save, train
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import square_loss
from tests.support.models import BufferedBlock
from tests.support.patience import SECONDS, alone_after, impatient, tell, wait_until
from tests.support.peer import PeerFSDP
from tests.support.steps import OBJECT_COLLECTIVES, acquaint, recorded
from tests.support.wrapper_models import batch, seeded, shard, shard_by_peer, whole_state

ITEMSIZE = 4


def shard_bytes(model: nn.Module) -> int:
    return sum(ITEMSIZE * handle.layout.shard_numel for unit in units_of(model) for handle in unit.param_groups)


def local_bytes(value: Any) -> int:
    return sum(part.tensor.nbytes for part in value.local_shards()) if isinstance(value, ShardedTensor) else 0


@ORIG_PARAMS
@on_ranks(2, 4)
def test_no_form_exchanges_objects_and_sharded_moves_at_most_a_shard(use_orig_params: bool, num_ranks: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, TASKS["uneven"], range(1))
    limit = shard_bytes(model)
    for kind in (FULL, SHARDED, LOCAL):
        with FSDP.state_dict_type(model, kind), recorded() as record:
            state = model.state_dict()
        assert not set(record.counts()) & set(OBJECT_COLLECTIVES)
        sent = sum(call.nbytes for call in record.calls if call.name == "transfer")
        assert sent <= {FULL: limit * (num_ranks - 1), SHARDED: limit, LOCAL: 0}[kind], kind
        with FSDP.state_dict_type(model, kind), recorded() as record:
            states = FSDP.optim_state_dict(model, optimizer)
        assert not set(record.counts()) & set(OBJECT_COLLECTIVES)
        sent = sum(call.nbytes for call in record.calls if call.name == "transfer")
        assert sent <= (2 * limit * (num_ranks - 1) if kind is FULL else 2 * limit), kind
        with FSDP.state_dict_type(model, kind), recorded() as record:
            model.load_state_dict(state)
            FSDP.optim_state_dict_to_load(model, optimizer, states)
        assert not set(record.counts()) & set(OBJECT_COLLECTIVES)
        # The first chunks of a few rows are larger than a shard's share.
        own = sum(local_bytes(value) for value in state.values())
        assert sum(call.nbytes for call in record.calls if call.name == "transfer") <= 3 * max(limit, own)


@ORIG_PARAMS
@on_ranks(4)
def test_rank_zero_alone_receives_with_rank0_only(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, TASKS["uneven"], range(1))
    expected = save(model, optimizer, FULL)
    with (
        FSDP.state_dict_type(
            model, FULL, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
        ),
        recorded() as record,
    ):
        state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    assert (record.count("transfer") == 0) == (rank == 0)
    assert set(record.counts()) <= {"transfer", "all_gather"}
    assert sum(call.nbytes for call in record.calls if call.name == "transfer") <= 3 * shard_bytes(model)
    if rank == 0:
        assert_equal(dict(state), dict(expected[0]))
        assert_equal(states, expected[1])
    else:
        assert (dict(state), states) == ({}, {})


@ORIG_PARAMS
@on_ranks(2)
def test_every_tensor_of_a_full_save_is_memory_of_its_own(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, TASKS["uneven"], range(1))
    state, states = save(model, optimizer, FULL)
    tensors = [*state.values(), *(value for row in states["state"].values() for value in row.values())]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


WIDTH = 1024


class Wide(nn.Module):
    """Large enough to be seen in malloc's statistics, and a unit of it larger than what messages have in use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(BufferedBlock(WIDTH) for _ in range(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


@ORIG_PARAMS
@on_ranks(2)
def test_a_full_save_needs_the_memory_of_its_result_and_no_more_than_a_unit(use_orig_params: bool) -> None:
    # Messages of a group of its own: that of all ranks may keep memory for those of earlier tasks.
    group = RankGroup.of(dist.new_group())
    model = shard(seeded(Wide), use_orig_params=use_orig_params, process_group=group.group)
    # The first save of a process imports modules and fills caches; memory of earlier tasks may be freed in any.
    model.state_dict()
    most, kept = zip(*(_bytes_of_a_save(model, group) for _ in range(3)), strict=True)
    result = sum(value.nbytes for value in model.state_dict().values())
    unit = max(ITEMSIZE * handle.layout.numel for unit in units_of(model) for handle in unit.param_groups)
    assert result > 4 * unit
    assert min(most) <= result + unit
    assert min(kept) <= result + unit // 4


def _bytes_of_a_save(model: nn.Module, group: RankGroup) -> tuple[int, int]:
    """Return the bytes that a save needs at most, and those that its result needs."""
    transport = transport_of(group)
    assert transport is not None
    peaks: list[int] = []
    before = settled_bytes()
    with recorded(on_call=lambda: peaks.append(settled_bytes(readings=2) + transport.nbytes)):
        state = model.state_dict()
    kept = settled_bytes() - before
    del state
    return max(peaks) - before, kept


@ORIG_PARAMS
@on_ranks(2, 4)
def test_the_chunks_are_those_of_the_peer(use_orig_params: bool) -> None:
    ours = shard(seeded(), use_orig_params=use_orig_params)
    theirs = shard_by_peer(seeded(), use_orig_params=use_orig_params)
    with FSDP.state_dict_type(ours, SHARDED):
        mine = ours.state_dict()
    with peer_quiet(), PeerFSDP.state_dict_type(theirs, peer_library.StateDictType.SHARDED_STATE_DICT):
        others = theirs.state_dict()
    assert list(mine) == list(others)
    for name, value in mine.items():
        other = others[name]
        if not isinstance(other, ShardedTensor):
            assert_equal(value, other, what=name)
            continue
        assert value.metadata() == other.metadata(), name
        assert value.sharding_spec() == other.sharding_spec(), name
        assert vars(value).keys() == vars(other).keys(), name
        for part, expected in zip(value.local_shards(), other.local_shards(), strict=True):
            assert_equal(part.tensor, expected.tensor, what=name)


@on_ranks(4)
def test_a_two_dimensional_mesh_is_used_whole_by_hybrid_and_by_its_first_axis_else() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    expected = dict(seeded().state_dict())
    for strategy in ("HYBRID_SHARD", "FULL_SHARD"):
        model = shard(seeded(), strategy, device_mesh=mesh)
        with FSDP.state_dict_type(model, SHARDED):
            state = model.state_dict()
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
        assert_equal(whole, expected, what=strategy)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_local_shards_are_the_live_ones_unless_they_are_offloaded(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    for offload in (False, True):
        with FSDP.state_dict_type(model, LOCAL, LocalStateDictConfig(offload_to_cpu=offload)):
            state = model.state_dict()
        shards = [
            shard.tensor
            for value in state.values()
            if isinstance(value, ShardedTensor)
            for shard in value.local_shards()
        ]
        before = [tensor.clone() for tensor in shards]
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        assert shards
        assert all(torch.equal(a, b) == offload for a, b in zip(shards, before, strict=True))


@on_ranks(2)
def test_a_local_state_dict_has_the_live_slices_under_original_names_as_in_fsdp1(rank: int) -> None:
    model, peer = shard(seeded(), use_orig_params=True), shard_by_peer(seeded(), use_orig_params=True)
    with FSDP.state_dict_type(model, LOCAL), peer_quiet():
        state = model.state_dict()
        with PeerFSDP.state_dict_type(peer, peer_library.StateDictType.LOCAL_STATE_DICT):
            expected = peer.state_dict()
    assert sorted(state) == sorted(expected)
    slices = {name: value for name, value in state.items() if not isinstance(value, ShardedTensor)}
    assert_equal(slices, {name: expected[name] for name in slices})
    for name, param in model.named_parameters():
        assert slices[clean_fqn(name)].data_ptr() == param.data_ptr()
    with FSDP.state_dict_type(model, LOCAL, LocalStateDictConfig(offload_to_cpu=True)):
        copies = model.state_dict()
    names = [name for name, _ in seeded().named_parameters()]
    with torch.no_grad():
        for name in names:
            slices[name].fill_(0.5)
    full = whole_state(model)
    assert all(bool((full[name] == 0.5).all()) for name in names)
    assert_equal({name: copies[name] for name in names}, {name: expected[name] for name in names})


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("rank0_only", [False, True])
@ORIG_PARAMS
@on_ranks(2)
def test_a_sharded_state_dict_inside_summon_has_the_changes_made_there(
    use_orig_params: bool, rank0_only: bool, boxes: bool
) -> None:
    model, other = (shard(seeded(seed=seed), use_orig_params=use_orig_params) for seed in (0, 1))
    full = whole_state(model)
    names = {name for name, _ in seeded().named_parameters()}
    options = {"writeback": False, "rank0_only": rank0_only, "offload_to_cpu": rank0_only}
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(boxes=boxes)):
        for change in (0.0,) if rank0_only else (0.0, 1.0):
            with FSDP.summon_full_params(model, **options):
                held = dict(model.named_parameters())
                with torch.no_grad():
                    for param in held.values():
                        param.add_(change)
                    if change:
                        model.last.weight.data = model.last.weight + 1
                        full["last.weight"] = full["last.weight"] + 1
                state = model.state_dict()
                assert all(param is held[name] for name, param in model.named_parameters())
            if boxes:
                assert all(type(state[name]).__name__ == "BoxedTensor" for name in names)
            expected = {name: value + change if name in names else value for name, value in full.items()}
            with FSDP.state_dict_type(other, SHARDED):
                other.load_state_dict(state)
            assert_equal(whole_state(other), expected)
    train(model, OPTIMIZERS["sgd"](model.parameters()), TASKS["uneven"], range(1))


@on_ranks(2)
def test_a_local_state_dict_inside_summon_is_an_error() -> None:
    model = shard(seeded())
    with FSDP.state_dict_type(model, LOCAL), FSDP.summon_full_params(model), pytest.raises(PhaseError):
        model.state_dict()


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2)
def test_what_a_hook_does_to_a_nested_unit_before_it_is_saved_is_saved(kind: Any) -> None:
    model = shard(seeded(), use_orig_params=True)

    def zero(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            for param in module.parameters():
                param.zero_()

    model.blocks[1].register_state_dict_pre_hook(zero)
    with FSDP.state_dict_type(model, kind):
        state = model.state_dict()
    assert not any(local_or_whole(state[name]).any() for name in ("blocks.1.up.weight", "blocks.1.down.weight"))
    assert local_or_whole(state["blocks.0.up.weight"]).any()


def local_or_whole(value: Any) -> torch.Tensor:
    return value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value


@on_ranks(2)
def test_a_nested_unit_with_a_form_of_its_own_saves_itself_in_it() -> None:
    model = shard(seeded(), use_orig_params=True)
    FSDP.set_state_dict_type(model.blocks[0], SHARDED, ShardedStateDictConfig(offload_to_cpu=False))
    state = model.state_dict()
    chunked = {name for name, value in state.items() if isinstance(value, ShardedTensor)}
    assert chunked == {"blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight"}
    plain = seeded().state_dict()
    assert_equal(
        {name: value for name, value in state.items() if name not in chunked},
        {name: value for name, value in plain.items() if name not in chunked},
    )


# ------------------------------------------------------------------------------------------- on one rank only


@contextmanager
def calls_of(kind: type, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of each call of a method inside the block."""
    found: list[tuple[Any, ...]] = []
    original = getattr(kind, name)

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        found.append(args)
        return original(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, recorded)
        yield found


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2)
def test_a_save_on_rank_zero_alone_is_found_and_the_group_goes_on(kind: Any, rank: int) -> None:
    model = shard(seeded())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, TASKS["uneven"], range(1))
    if rank == 0:
        with FSDP.state_dict_type(model, kind), alone_after(0.3):
            for what, call in (
                ("state_dict", model.state_dict),
                ("optim_state_dict", lambda: FSDP.optim_state_dict(model, optimizer)),
            ):
                begun = time.monotonic()
                with pytest.raises(UsageError, match=rf"^{what} was called on rank 0 .* rank\(s\) \[1\] have not"):
                    call()
                assert time.monotonic() - begun < SECONDS
    dist.barrier()
    other = shard(seeded(seed=1))
    other_optimizer = OPTIMIZERS["adamw"](other.parameters())
    load(other, other_optimizer, kind, save(model, optimizer, kind))
    assert_equal(whole_state(other), whole_state(model))
    assert_equal(
        train(other, other_optimizer, TASKS["uneven"], range(1)), train(model, optimizer, TASKS["uneven"], range(1))
    )


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2)
def test_other_ranks_are_told_of_a_hook_that_raises_on_one(kind: Any, rank: int) -> None:
    """A module's pre-hook may change parameters, so the all-gather comes after it."""
    model = shard(seeded(), process_group=dist.new_group())
    square_loss(model, batch(rank)).backward()
    inner = next(module for module in model.modules() if isinstance(module, BufferedBlock))

    def fail(*_: Any) -> None:
        raise ValueError("no disk")

    inner.register_state_dict_pre_hook(fail if rank == 1 else lambda *_: None)
    begun = time.monotonic()
    told = pytest.raises(ValueError if rank == 1 else PeerFailureError, match="no disk")
    with FSDP.state_dict_type(model, kind), impatient(), told:
        model.state_dict()
    assert time.monotonic() - begun < SECONDS
    dist.barrier()


@on_ranks(2)
def test_a_rank_zero_that_is_late_is_waited_for_with_a_warning(rank: int) -> None:
    model = shard(seeded())
    acquaint(model)

    def warn(text: str) -> None:
        warn_user(text)
        tell("rank 1 has warned")

    if rank == 0:
        wait_until("rank 1 has warned")
        state = model.state_dict()
    else:
        with (
            alone_after(0.2),
            mock.patch.object(agreement, "warn_user", warn),
            pytest.warns(UserWarning, match=r"state_dict on rank 1 of the group has waited .* for rank\(s\) \[0\]"),
        ):
            state = model.state_dict()
    assert_equal(dict(state), dict(seeded().state_dict()))


@on_ranks(2)
def test_a_save_meets_once_however_many_units_there_are() -> None:
    model = shard(seeded())
    acquaint(model)
    with calls_of(agreement._StoreBarrier, "__init__") as met, recorded() as record:
        model.state_dict()
        model.blocks[0].state_dict()
    assert len(met) == 2
    assert set(record.counts()) <= {"transfer"}
    model(batch(0))


@on_ranks(2)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_units_of_several_process_groups_are_saved_together(rank0_only: bool, rank: int) -> None:
    """A rank that only sends has more to send than may be unread, and the reader waits for another group first."""
    small, large = nn.Linear(4, 4), nn.Linear(3000, 3000)
    expected = {"0.weight": small.weight, "1.weight": large.weight}
    expected = {name: value.detach().clone() for name, value in expected.items()}
    for value in expected.values():
        dist.broadcast(value, src=0)
    model = FSDP(
        nn.Sequential(FSDP(small, process_group=dist.new_group()), FSDP(large, process_group=dist.new_group())),
        sync_module_states=True,
    )
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=rank0_only)):
        state = model.state_dict()
    if rank == 0 or not rank0_only:
        assert_equal({name: state[name] for name in expected}, expected)


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@on_ranks(2)
def test_a_save_on_another_rank_alone_is_found_when_rank_zero_goes_on_to_train(kind: Any, rank: int) -> None:
    model = shard(seeded())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, TASKS["uneven"], range(1))
    if rank == 1:
        begun = time.monotonic()
        with (
            FSDP.state_dict_type(model, kind),
            pytest.raises(
                UsageError, match=r"^state_dict was called on rank 1 .* rank 0 has not .* with the all-gather of unit"
            ),
        ):
            model.state_dict()
        assert time.monotonic() - begun < SECONDS
    # Rank 0's gather waits for it, and nothing is lost.
    train(model, optimizer, TASKS["uneven"], range(1, 2))
    whole_state(model)


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_gradients_of_a_lower_dtype_stay_where_they_are_during_saves_and_loads(
    strategy: str, use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    low = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = shard(seeded(), strategy, use_orig_params=use_orig_params, mixed_precision=low)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    square_loss(model, batch(rank)).backward()

    def grads() -> list[torch.Tensor | None]:
        return [None if param.grad is None else param.grad.clone() for param in model.parameters()]

    before = grads()
    assert {grad.dtype for grad in before if grad is not None} == {torch.bfloat16}
    for kind in (FULL, SHARDED, LOCAL):
        load(model, optimizer, kind, save(model, optimizer, kind))
        assert_equal(grads(), before)
    save_checkpoint(tmp_path, model)
    with FSDP.summon_full_params(model, with_grads=use_orig_params):
        pass
    assert_equal(grads(), before)
    with model.no_sync():
        square_loss(model, batch(rank)).backward()
        model.state_dict()
    square_loss(model, batch(rank)).backward()
    for grad, first in zip(grads(), before, strict=True):
        if grad is not None and first is not None:
            torch.testing.assert_close(grad, 3 * first, rtol=0.05, atol=0.01)
    model.double()


@on_ranks(2)
def test_a_type_set_on_the_root_replaces_different_ones_below_and_a_block_restores_each() -> None:
    model = shard(seeded(), use_orig_params=True)
    FSDP.set_state_dict_type(model.blocks[0], SHARDED)
    with FSDP.state_dict_type(model, LOCAL):
        assert FSDP.get_state_dict_type(model).state_dict_type is LOCAL
    assert FSDP.get_state_dict_type(model.blocks[0]).state_dict_type is SHARDED
    assert FSDP.get_state_dict_type(model.blocks[1]).state_dict_type is FULL
    assert FSDP.set_state_dict_type(model, FULL).state_dict_type is FULL
    assert FSDP.get_state_dict_type(model).state_dict_type is FULL
