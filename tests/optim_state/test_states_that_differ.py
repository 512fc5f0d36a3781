"""States of one value for a whole parameter that differ between ranks, and containers of tensors, are not saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, fully_shard, load_checkpoint, save_checkpoint
from fsdp_flat.errors import LoadError, UnsupportedError
from tests.state_dict.kit import FULL, LOCAL, SHARDED
from tests.support import assert_equal, on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning"),
]
FRONTS = pytest.mark.parametrize("front", ["originals", "flat", "fully_shard"])
# A state of each parameter, by this rank's number.
Value = Callable[[int], Any]


class Keeping(torch.optim.SGD):
    """Keeps a state of each parameter that this rank has elements of."""

    def __init__(self, params: Any, value: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.value = value

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None and param.numel():
                self.state[param]["kept"] = self.value(param)


def trained(front: str, value: Callable[[torch.Tensor], Any], **options: Any) -> tuple[nn.Module, Keeping]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 4))
    if front == "fully_shard":
        fully_shard(model)
    else:
        model = FSDP(model, use_orig_params=front == "originals", **options)
    optimizer = Keeping(model.parameters(), value)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def saves(model: nn.Module, optimizer: Keeping, path: Path) -> list[Callable[[], Any]]:
    def in_form(kind: Any) -> Callable[[], Any]:
        def run() -> Any:
            with FSDP.state_dict_type(model, kind):
                return FSDP.optim_state_dict(model, optimizer)

        return run

    return [
        lambda: save_checkpoint(path, model, optimizer),
        lambda: save_checkpoint(path, model, optimizer, background=True).wait(),
        *map(in_form, (FULL, SHARDED, LOCAL)),
    ]


DIFFERING: dict[str, tuple[Value, str]] = {
    "tensor": (lambda rank: torch.tensor(1.5 + rank), "1.5 on rank 0, 2.5 on rank 1"),
    "float": (lambda rank: 1.5 + rank, "1.5 on rank 0, 2.5 on rank 1"),
    "int": (lambda rank: 1 + rank, "1 on rank 0, 2 on rank 1"),
    "complex": (lambda rank: torch.tensor(complex(0, rank)), "on rank 0"),
    "dict": (lambda rank: {"scales": (1.0, float(rank))}, r"\{'scales': \(1.0, 0.0\)\} on rank 0"),
    "nan": (lambda rank: math.nan if rank else 1.0, "1.0 on rank 0, nan on rank 1"),
}


@FRONTS
@pytest.mark.parametrize("kind", DIFFERING)
@on_ranks(2)
def test_a_number_that_differs_between_ranks_is_an_error_with_ranks_and_values(
    kind: str, front: str, tmp_path: Path, rank: int
) -> None:
    value, expected = DIFFERING[kind]
    model, optimizer = trained(front, lambda param: value(rank))
    for save in saves(model, optimizer, tmp_path):
        # FSDP1 raises an AssertionError.
        with pytest.raises(AssertionError, match=rf"'kept' of '0\.(weight|bias)'.* {expected}"):
            save()
    assert load_checkpoint(tmp_path, model, optimizer) is None


class Opaque:
    """Is not equal to a copy of itself."""


EQUAL: dict[str, Callable[[], Any]] = {
    "nan": lambda: math.nan,
    "nan in a tensor": lambda: torch.tensor(math.nan),
    "complex": lambda: torch.tensor(2 + 1j),
    "numbers": lambda: [{"a": 1, "b": (math.nan, None, "x")}, torch.tensor(2.0)],
}


@FRONTS
@pytest.mark.parametrize("kind", EQUAL)
@on_ranks(2)
def test_equal_values_are_saved_also_if_no_value_equals_itself(kind: str, front: str, tmp_path: Path) -> None:
    model, optimizer = trained(front, lambda param: EQUAL[kind]())
    for save in saves(model, optimizer, tmp_path):
        save()
    for row in FSDP.optim_state_dict(model, optimizer)["state"].values():
        assert repr(row["kept"]) == repr(EQUAL[kind]())


@FRONTS
@on_ranks(2)
def test_objects_that_cannot_be_compared_are_saved(front: str) -> None:
    model, optimizer = trained(front, lambda param: Opaque())
    assert FSDP.optim_state_dict(model, optimizer)["state"]


@on_ranks(4)
def test_ranks_without_elements_of_a_parameter_may_lag(tmp_path: Path, rank: int) -> None:
    # The bias has elements on one rank, or under fully_shard on each of four.
    model: Any = FSDP(nn.Linear(6, 1), use_orig_params=True)
    optimizer = Keeping(model.parameters(), lambda param: 3)
    model(torch.ones(2, 6)).sum().backward()
    for param in model.parameters():
        optimizer.state[param]["kept"] = 3 if param.numel() else 1
    for save in saves(model, optimizer, tmp_path):
        save()
    sharded = fully_shard(nn.Linear(6, 1))
    lagging = Keeping(sharded.parameters(), lambda param: 3 if param.to_local().numel() else 1)
    sharded(torch.ones(2, 6)).sum().backward()
    lagging.step()
    for save in saves(sharded, lagging, tmp_path / "sharded"):
        save()


@on_ranks(2)
def test_tensors_that_fully_shard_does_not_shard_must_be_equal_on_all_ranks(tmp_path: Path, rank: int) -> None:
    model, optimizer = trained("fully_shard", lambda param: torch.full((3,), float(rank)))
    for save in saves(model, optimizer, tmp_path):
        with pytest.raises(
            AssertionError, match=r"'kept' of '0\.(weight|bias)'.*a tensor of torch.float32 and shape \(3,\)"
        ):
            save()


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda param: [torch.zeros_like(param), torch.zeros_like(param)],
    "dict": lambda param: {"m": torch.zeros_like(param)},
    "nested": lambda param: ({"m": [torch.zeros_like(param)]}, 1),
}


@FRONTS
@pytest.mark.parametrize("kind", CONTAINERS)
@on_ranks(2)
def test_containers_of_tensors_of_a_sharded_parameter_are_refused(kind: str, front: str, tmp_path: Path) -> None:
    model, optimizer = trained(front, CONTAINERS[kind])
    *full, sharded, local = saves(model, optimizer, tmp_path)
    for save in full if front == "fully_shard" else (*full, sharded, local):
        with pytest.raises(UnsupportedError, match=r"'kept' of '0\.(weight|bias)'.* of tensors"):
            save()
    assert load_checkpoint(tmp_path, model, optimizer) is None
    if front == "fully_shard":
        # DTensors are those of every rank, also in containers.
        sharded()
        local()


@on_ranks(2)
def test_containers_of_tensors_of_an_unsharded_parameter_are_copies_and_load_into_no_shard(
    tmp_path: Path, rank: int
) -> None:
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    model, optimizer = trained("originals", lambda param: [torch.ones_like(param), torch.zeros_like(param)], **options)
    for save in saves(model, optimizer, tmp_path):
        save()
    other, loaded = trained("originals", lambda param: None, **options)
    load_checkpoint(tmp_path, other, loaded)
    for row, expected in zip(loaded.state.values(), optimizer.state.values(), strict=True):
        assert_equal(row["kept"], expected["kept"])
    state = FSDP.optim_state_dict(model, optimizer)
    sharded, fresh = trained("originals", lambda param: None)
    with pytest.raises(LoadError, match=r"'kept' of '0\.weight'.* list of tensors"):
        FSDP.optim_state_dict_to_load(sharded, fresh, state)
    dist.barrier()
