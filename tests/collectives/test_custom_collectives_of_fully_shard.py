"""Communication objects of FSDP2's interface, and the memory and groups of collectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_flat.collectives import QuantizedReduceScatter, use_collectives
from fsdp_flat.comm import custom, torch_comm
from fsdp_flat.composable import MixedPrecisionPolicy
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionTypeError, PhaseError
from tests.support import assert_close, on_ranks
from tests.support.beside import BOTH, WRAPPER_FRONTS, Beside, blocks_and_root, grads_of
from tests.support.kit import mesh
from tests.support.models import Stack
from tests.support.patience import logged
from tests.support.peer import needs_of_torch
from tests.support.steps import recorded, shared_memory


class Memory:
    """Allocates for communication, and checks that a collective gets this memory.

    Attributes:
        sizes: number of elements of each tensor that was allocated.
        num_calls: number of collectives.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_calls = 0
        self._storages: set[int] = set()
        self._tensors: list[torch.Tensor] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.sizes.append(math.prod(size))
        # Filled, so that elements that were not communicated show.
        tensor = torch.full(tuple(size), float("nan"), dtype=dtype, device=device)
        self._tensors.append(tensor)
        return tensor

    def check(self, *tensors: torch.Tensor) -> None:
        """Count a collective and check its tensors."""
        self.num_calls += 1
        known = {tensor.untyped_storage().data_ptr() for tensor in self._tensors}
        assert all(tensor.untyped_storage().data_ptr() in known for tensor in tensors)


class Gathers(Memory):
    """An all-gather of FSDP2's interface."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.check(output_tensor, input_tensor)
        numel = input_tensor.numel()
        start = dist.get_rank(group) * numel
        assert input_tensor.data_ptr() == output_tensor[start:].data_ptr()
        return torch_comm.all_gather_single(output_tensor, input_tensor.clone(), group=group, async_op=async_op)


class Reductions(Memory):
    """A reduce-scatter of FSDP2's interface, which has finished when it returns."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        self.check(output_tensor, input_tensor)
        torch_comm.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


@needs_of_torch("set_custom_all_gather")
@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("hybrid", [False, True])
def test_custom_objects_communicate_in_their_own_memory(dtype: torch.dtype | None, hybrid: bool) -> None:
    num_shards = dist.get_world_size() // (2 if hybrid else 1)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    low = {"dtype": torch.float32, "tolerance": {"atol": 3e-2, "rtol": 3e-2}} if dtype else {}
    beside = Beside(Stack(), BOTH, mesh=mesh(2, num_shards) if hybrid else None, mp_policy=policy, **low)
    sets: list[tuple[Memory, Memory]] = []
    for model in beside.sharded.values():
        gathers, reductions = Gathers(), Reductions()
        for block in model.blocks:
            block.set_custom_all_gather(gathers)
            block.set_custom_reduce_scatter(reductions)
        sets.append((gathers, reductions))
    for _ in range(2):
        beside.backward()
        beside.check_gradients()
        assert_close(grads_of(beside.ours), grads_of(beside.theirs), rtol=1e-5, atol=1e-6)
        beside.zero_grad()
    (gathers, reductions), (their_gathers, their_reductions) = sets
    if num_shards == 1:
        assert not gathers.sizes
        assert not reductions.sizes
        return
    # The last block's buffer is kept for backward.
    assert gathers.num_calls == 2 * 5
    assert their_gathers.num_calls == 2 * 6
    assert set(gathers.sizes) == set(their_gathers.sizes)
    assert reductions.num_calls == their_reductions.num_calls == 2 * 3
    assert reductions.sizes == their_reductions.sizes


@needs_of_torch("set_custom_all_gather")
@on_ranks(4)
def test_a_backward_over_a_smaller_group_uses_the_same_objects() -> None:
    beside = Beside(Stack(), BOTH, reshard_after_forward=2)
    memory = (Gathers(), Gathers())
    for model, gathers in zip(beside.sharded.values(), memory, strict=True):
        for block in model.blocks:
            block.set_custom_all_gather(gathers)
    beside.train(num_steps=2)
    ours, theirs = memory
    assert set(ours.sizes) == set(theirs.sizes)
    assert ours.num_calls > 2 * 3


@on_ranks(2)
def test_one_buffer_for_all_reductions_is_enough_and_is_not_the_gradient(rank: int) -> None:
    class Persistent(Reductions):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            key = (math.prod(size), dtype)
            if key not in kept:
                kept[key] = super().allocate(size, dtype=dtype, device=device)
            return kept[key]

    kept: dict[Any, torch.Tensor] = {}
    beside, reductions = Beside(Stack(), BOTH), Persistent()
    for block in beside.ours.blocks:
        block.set_custom_reduce_scatter(reductions)
    beside.train(num_steps=2)
    assert (reductions.num_calls, len(reductions.sizes)) == (6, 2)


@on_ranks(2, 4)
def test_one_of_both_is_replaced_and_state_dicts_use_neither() -> None:
    beside = Beside(Stack(), BOTH)
    gathers = Gathers()
    beside.ours.set_custom_all_gather(gathers)
    beside.train(num_steps=2)
    before = gathers.num_calls
    assert before == 2
    beside.ours.state_dict()
    assert gathers.num_calls == before


@on_ranks(2)
def test_objects_are_checked_and_are_replaced_between_steps(rank: int) -> None:
    ours = blocks_and_root(Stack())
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        for wrong in (None, Memory(), lambda *_: None):
            with pytest.raises(OptionTypeError, match="callable and have a method allocate"):
                getattr(ours, method)(wrong)
    ours.first.register_forward_pre_hook(lambda *_: ours.set_custom_all_gather(Gathers()))
    with pytest.raises(PhaseError, match="between steps"):
        ours(torch.randn(3, 8))


@on_ranks(2, 4)
@WRAPPER_FRONTS
def test_the_wrapper_takes_custom_objects_too(front: str) -> None:
    beside = Beside(Stack(), front)
    gathers, reductions = Gathers(), Reductions()
    for wrapper in beside.ours.fsdp_modules(beside.ours):
        wrapper.set_custom_all_gather(gathers)
        wrapper.set_custom_reduce_scatter(reductions)
    for step in range(1, 3):
        beside.train()
        assert (gathers.num_calls, reductions.num_calls) == (6 * step, 4 * step)
    # The module-wide function replaces both, and does not allocate.
    before = len(reductions.sizes)
    use_collectives(beside.ours, reduce_scatter=reductions.__class__.__call__.__get__(Unchecked()))
    beside.train()
    assert (gathers.num_calls, len(reductions.sizes)) == (12, before)


class Unchecked(Reductions):
    """Accepts any memory."""

    def check(self, *tensors: torch.Tensor) -> None:
        self.num_calls += 1


# -- memory of the backend ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_where_there_is_no_such_memory_the_log_says_so_and_steps_go_on(rank: int) -> None:
    beside = Beside(Stack(), "fully_shard")
    custom.warn_once.cache_clear()
    with logged() as texts:
        for module in (beside.ours, *beside.ours.blocks):
            module.set_allocate_memory_from_process_group_for_comm(True)
            module.set_symm_mem_for_comm()
        beside.ours.set_allocate_memory_from_process_group_for_comm(False)
    assert len(texts) == 2
    assert "'gloo' cannot allocate memory for communication on cpu" in texts[0]
    assert "not in symmetric memory of NCCL: cpu has none" in texts[1]
    beside.train(num_steps=2)


@on_ranks(2, 4)
@pytest.mark.parametrize("front", ["flat", "fully_shard"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_collectives_use_the_memory_of_a_backend(front: str, symmetric: bool) -> None:
    memory = Memory()

    def allocator(group: Any, device: torch.device) -> Callable[..., torch.Tensor]:
        return lambda numel, *, dtype, device: memory.allocate((numel,), dtype=dtype, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_comm, "tensor_allocator", allocator)
        patch.setattr(torch_comm, "symmetric_allocator", lambda *_: memory.allocate)
        beside = Beside(Stack(), front)
        if symmetric:
            beside.ours.set_symm_mem_for_comm("NCCL")
        else:
            beside.ours.set_allocate_memory_from_process_group_for_comm(True)
        beside.train()
        # One all-gather of the root, and the input and output of its reduce-scatter.
        assert len(memory.sizes) == 3
        assert memory.sizes[0] == memory.sizes[1] == memory.sizes[2] * dist.get_world_size()
        if front == "fully_shard":
            beside.ours.set_allocate_memory_from_process_group_for_comm(False)
            beside.train()
            assert len(memory.sizes) == 3


@on_ranks(2)
def test_memory_of_the_backend_and_custom_objects_exclude_each_other(rank: int) -> None:
    ours = blocks_and_root(Stack())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_comm, "tensor_allocator", lambda *_: torch.empty)
        ours.set_allocate_memory_from_process_group_for_comm(True)
        # An object set afterwards is used in place of the backend's memory.
        ours.set_custom_all_gather(Gathers())
        with pytest.raises(AssertionError, match="custom all-gather or reduce-scatter"):
            ours.set_allocate_memory_from_process_group_for_comm(True)
        with pytest.raises(AssertionError, match="custom all-gather or reduce-scatter"):
            ours.set_symm_mem_for_comm()
        ours.blocks[0].set_custom_reduce_scatter(Reductions())
        with pytest.raises(PhaseError, match="custom all-gather or reduce-scatter"):
            ours.blocks[0].set_allocate_memory_from_process_group_for_comm(True)


# -- groups ------------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_reduce_scatters_have_a_group_of_their_own(hybrid: bool, shared: bool) -> None:
    with shared_memory(shared):
        beside = Beside(Stack(), BOTH, mesh=mesh(2, dist.get_world_size() // 2) if hybrid else None)
        ours = beside.ours
        ours.set_separate_reduce_scatter_group()
        groups = {unit.param_groups[0].comm.choice.reduce_group for unit in units_of(ours)}
        assert len(groups) == 1
        (group,) = groups
        shard = units_of(ours)[0].options.groups.shard
        if shard.size == 1:
            assert group is None
            return
        assert group is not None
        assert group.group is not shard.group
        assert (group.rank, group.size) == (shard.rank, shard.size)
        beside.train(num_steps=2)
        ours.blocks[0].set_separate_reduce_scatter_group(False, recurse=False)
        beside.train(num_steps=2)
        ours.set_separate_reduce_scatter_group()
        assert {unit.param_groups[0].comm.choice.reduce_group for unit in units_of(ours)} == {group}


@on_ranks(2)
def test_a_separate_group_and_custom_reductions_go_together(rank: int) -> None:
    beside = Beside(Stack(), BOTH)
    groups: list[Any] = []

    class Noting(Reductions):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            groups.append(group)
            super().__call__(output_tensor, input_tensor, group, op, async_op)

    beside.ours.set_custom_reduce_scatter(Noting())
    beside.ours.set_separate_reduce_scatter_group()
    use_collectives(beside.ours.blocks[0], reduce_scatter=QuantizedReduceScatter())
    with recorded() as record:
        beside.backward()
    beside.check_gradients(atol=1e-2, rtol=1e-1)
    separate = units_of(beside.ours)[0].param_groups[0].comm.choice.reduce_group
    assert separate is not None
    assert groups == [separate.group]
    assert record.count("all_to_all_single") == 1
