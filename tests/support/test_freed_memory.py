"""The check of freed memory finds what it is there for."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fsdp_flat.core.buffers import FlatBuffer, MemoryPool
from fsdp_flat.core.torch_core import swap_memory
from tests.support.freed_memory import checked, is_checked

pytestmark = pytest.mark.skipif(swap_memory is None, reason="torch before 2.12 moves no memory between storages")


def test_a_write_to_freed_memory_is_found_once_with_the_place_where_it_was_freed() -> None:
    with (
        pytest.raises(AssertionError, match=r"(?s)^400 freed bytes were written to, freed at:.*in frees_a_buffer"),
        checked(),
    ):
        ctypes.memset(frees_a_buffer(), 0, 1)
    with checked():
        pass


def frees_a_buffer() -> int:
    buffer = FlatBuffer(torch.zeros(100))
    address = buffer.tensor.data_ptr()
    MemoryPool().empty(buffer.tensor.untyped_storage())
    assert not buffer.nbytes
    return address


def test_memory_that_is_not_freed_may_be_written_to() -> None:
    with checked():
        buffer = FlatBuffer(torch.zeros(100))
        block = buffer.take_memory()
        assert block is not None
        ctypes.memset(block.data_ptr(), 0, 400)
        pool = MemoryPool()
        assert buffer.alloc(pool)
        buffer.tensor.fill_(1)


def test_tests_of_faults_run_under_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_FLAT_CHECK_FREED", raising=False)
    assert is_checked("tests.differing_ranks.test_agreement")
    assert is_checked("tests.errors.test_texts")
    assert not is_checked("tests.training.test_training")
    monkeypatch.setenv("FSDP_FLAT_CHECK_FREED", "1")
    assert is_checked("tests.training.test_training")
