"""The buffer that is freed and filled again under its views, and the window in which gradients land."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fsdp_flat.core import FlatLayout, PerParamLayout
from fsdp_flat.core.buffers import FlatBuffer, MemoryPool
from fsdp_flat.core.gradients import FlatGradBuffer
from fsdp_flat.core.torch_core import swap_memory
from tests.support import assert_equal

CPU = torch.device("cpu")
POOL = MemoryPool()


def idle_nbytes(pool: MemoryPool) -> int:
    """Number of bytes that the pool keeps."""
    return sum(nbytes * len(idle) for nbytes, idle in pool.idle.items())


def filled(values: torch.Tensor) -> FlatBuffer:
    buffer = FlatBuffer(torch.empty_like(values))
    buffer.alloc(POOL)
    buffer.tensor.copy_(values)
    return buffer


def free(buffer: FlatBuffer, pool: MemoryPool) -> None:
    pool.empty(buffer.tensor.untyped_storage())


def test_what_autograd_saved_is_valid_again_after_a_refill() -> None:
    values = torch.arange(1.0, 7.0)
    buffer = filled(values)
    leaf = nn.Parameter(buffer.tensor[2:6].view(2, 2).data)
    version = leaf._version
    x = torch.ones(2, 2, requires_grad=True)
    loss = (x * leaf).pow(2).sum()
    free(buffer, POOL)
    buffer.alloc(POOL)
    buffer.tensor.copy_(values)
    assert leaf._version == version, "a refill is no change"
    loss.backward()
    assert leaf.grad is not None
    assert_equal(leaf.grad, 2 * values[2:6].view(2, 2))
    assert_equal(x.grad, 2 * values[2:6].view(2, 2).pow(2))


def test_a_change_of_a_leaf_by_the_user_is_still_noticed_by_autograd() -> None:
    buffer = filled(torch.arange(1.0, 5.0))
    leaf = nn.Parameter(buffer.tensor.data)
    x = torch.ones(4, requires_grad=True)
    loss = (x * leaf).sum()
    with torch.no_grad():
        leaf.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


LAYOUT = FlatLayout.build([("a", (2, 2)), ("b", (3,)), ("c", ())], world_size=2, align_numel=4)


def test_closing_zeroes_paddings_and_what_never_came_but_nothing_else() -> None:
    grad_buffer = FlatGradBuffer(LAYOUT, torch.float32, CPU)
    pool = MemoryPool()
    used = filled(torch.full((LAYOUT.numel,), float("nan")))
    free(used, pool)
    grad_buffer.add_grad(1, torch.tensor([1.0, 2.0, 3.0]))
    flat = grad_buffer.close(pool)
    expected = torch.zeros(LAYOUT.numel)
    expected[LAYOUT.param_infos[1].interval.to_slice()] = torch.tensor([1.0, 2.0, 3.0])
    assert_equal(flat, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, 0, 1)])
@pytest.mark.parametrize("num_given", [2, 3])
@pytest.mark.parametrize("rows", [1, 5, 0, 50000])
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_gradients_of_rows_are_laid_out_rank_by_rank(
    on_accelerator: bool, rows: int, num_given: int, dims: tuple[int, ...], dtype: torch.dtype
) -> None:
    shapes = [(rows, 3), (7,), (3, 8)]
    layout = PerParamLayout.build(list(zip("abc", shapes, strict=True)), dims, world_size=4)
    grad_buffer = FlatGradBuffer(layout, torch.float32, CPU, on_accelerator=on_accelerator)
    pool = MemoryPool()
    free(filled(torch.full((layout.numel,), float("nan"))), pool)
    grads = [torch.randn(shape[::-1]).t() if len(shape) > 1 else torch.randn(shape) for shape in shapes]
    grads = [grad.to(dtype) if index < num_given else torch.zeros(grad.shape) for index, grad in enumerate(grads)]
    for index in reversed(range(num_given)):
        grad_buffer.add_grad(index, grads[index])
    by_rank: list[list[torch.Tensor]] = [[], [], [], []]
    for grad, dim in zip(grads, dims, strict=True):
        step = math.ceil(grad.shape[dim] / 4)
        padded = torch.zeros([4 * step if index == dim else size for index, size in enumerate(grad.shape)])
        padded.narrow(dim, 0, grad.shape[dim]).copy_(grad)
        for rank, parts in enumerate(by_rank):
            parts.append(padded.narrow(dim, rank * step, step).reshape(-1))
    assert_equal(grad_buffer.close(pool), torch.cat([part for parts in by_rank for part in parts]))


@pytest.mark.parametrize(
    ("shapes", "dims", "can", "can_there"),
    [
        ([(8, 3), (4,)], (0, 0), True, True),
        ([(8, 3), (5,)], (0, 0), True, True),
        ([(8, 3), (50257, 4)], (0, 0), False, True),  # on the CPU a padded copy takes longer than copies of its parts
        ([(8, 4), (4,)], (1, 0), False, False),
        ([(8, 3), (0, 2)], (0, 0), False, False),
    ],
)
def test_one_operation_lays_out_rows_that_need_little_padding_and_all_on_accelerators(
    shapes: list[tuple[int, ...]], dims: tuple[int, ...], can: bool, can_there: bool
) -> None:
    names = [f"weight{index}" for index in range(len(shapes))]
    layout = PerParamLayout.build(list(zip(names, shapes, strict=True)), dims, world_size=4)
    assert layout.can_chunk_cat(on_accelerator=False) == can
    assert layout.can_chunk_cat(on_accelerator=True) == can_there
    assert not LAYOUT.can_chunk_cat(on_accelerator=True)


def test_gradients_are_cast_to_the_windows_dtype_and_sparse_ones_spread_out() -> None:
    grad_buffer = FlatGradBuffer(LAYOUT, torch.float64, CPU)
    grad_buffer.add_grad(0, torch.full((2, 2), 0.5, dtype=torch.bfloat16))
    grad_buffer.add_grad(0, torch.sparse_coo_tensor([[1], [0]], [2.0], (2, 2), check_invariants=True))
    flat = grad_buffer.close(POOL)
    assert flat.dtype is torch.float64
    assert_equal(flat[:4], torch.tensor([0.5, 0.5, 2.5, 0.5], dtype=torch.float64))
    assert grad_buffer.nbytes == 8 * LAYOUT.numel


# -- memory that moves from buffer to buffer -------------------------------------------------------------------------


@pytest.mark.skipif(swap_memory is None, reason="torch moves no memory between storages before 2.12")
def test_a_freed_buffers_memory_serves_the_next_one_and_its_views_see_nothing_of_it() -> None:
    pool = MemoryPool()
    first, second = (FlatBuffer(torch.empty(6)) for _ in range(2))
    free(second, MemoryPool())
    view = first.tensor[2:]
    place = first.tensor.data_ptr()
    free(first, pool)
    assert idle_nbytes(pool) == 24
    second.alloc(pool)
    assert second.tensor.data_ptr() == place
    assert idle_nbytes(pool) == 0
    second.tensor.fill_(7)
    assert view.untyped_storage().nbytes() == 0, "there is nothing to read through a view of a freed buffer"
    first.alloc(pool)
    assert first.tensor.data_ptr() != place
    first.tensor.fill_(1)
    assert_equal(second.tensor, torch.full((6,), 7.0))
    assert_equal(view, torch.ones(4))


def test_blocks_serve_buffers_of_their_own_size_in_bytes_whatever_the_dtype() -> None:
    pool = MemoryPool()
    free(FlatBuffer(torch.empty(6)), pool)
    kept = idle_nbytes(pool)
    assert pool.empty_like(torch.empty(5)).untyped_storage().nbytes() == 20
    assert idle_nbytes(pool) == kept
    other = pool.empty_like(torch.empty(3, 2, 2, dtype=torch.bfloat16))
    assert (other.shape, other.dtype) == ((3, 2, 2), torch.bfloat16)
    assert other.untyped_storage().nbytes() == 24
    assert idle_nbytes(pool) == 0
