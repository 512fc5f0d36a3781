"""``plan`` and ``describe`` count parameters of other tensor classes as the engine gathers them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, describe, fully_shard, plan
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.extended_tensors import Holder, NewPair, Sealed, SentInBfloat16, SentInInt8, held_by

WIDTH = 64


class Base(nn.Linear):
    """A linear whose weight is of a class of its own, without a bias."""


class Adapted(nn.Module):
    def __init__(self, make: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.base = make(Base(WIDTH, WIDTH, bias=False))
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)  # type: ignore[no-any-return]


def model_of(kind: type[Holder] | None, *, frozen: bool = False) -> nn.Module:
    model = nn.Sequential(*[Adapted(lambda base: base if kind is None else held_by(base, kind)) for _ in range(2)])
    for layers in model:
        layers.base.weight.requires_grad_(not frozen)  # type: ignore[union-attr, operator]
    return model


POLICY = ModuleWrapPolicy({Base, Adapted})
KINDS = pytest.mark.parametrize("kind", [SentInBfloat16, SentInInt8, NewPair])
FRONTS = pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
BATCH = torch.empty(8, WIDTH, device="meta")


def planned_of(front: str, model: nn.Module, num_ranks: int, **kwargs: Any) -> Any:
    if front == "fully_shard":
        kwargs.update(api="fully_shard", auto_wrap_policy=ModuleWrapPolicy({Adapted}))
    else:
        kwargs.update(auto_wrap_policy=POLICY, use_orig_params=True)
    return plan(model, num_ranks, **kwargs)


def sizes_of(described: Any) -> list[tuple[int, int]]:
    return [(unit.shard_nbytes, unit.gathered_nbytes) for unit in described.units]


def held_by_gathers(model: nn.Module) -> list[int]:
    """Return the bytes of the memory that each unit allocates for its unsharded parameters."""
    found = []
    for unit in units_of(model):
        unit.unshard()
        tensors = [each for group in unit.param_groups for each in group.buffer_tensors]
        found.append(sum(each.untyped_storage().nbytes() for each in tensors))
        unit.reshard()
    return [nbytes for nbytes in found if nbytes]


@KINDS
@FRONTS
@on_ranks(2, 4)
def test_the_bytes_of_all_gathers_are_told_before_the_first_one(kind: type[Holder], front: str) -> None:
    num_ranks = dist.get_world_size()
    replicated: dict[str, Any] = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD} if num_ranks == 4 else {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if replicated else None
    model = model_of(kind)
    planned = planned_of(front, model, num_ranks, num_replicas=num_ranks // 2, **replicated)
    if front == "fully_shard":
        for layers in model:  # type: ignore[attr-defined]
            fully_shard(layers, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = FSDP(model, auto_wrap_policy=POLICY, use_orig_params=True, device_mesh=mesh, **replicated)
    before = sizes_of(describe(model))
    gathered = held_by_gathers(model)
    assert [nbytes for _, nbytes in before] == gathered
    assert sizes_of(planned) == before == sizes_of(describe(model))
    model(torch.ones(8, WIDTH))
    assert before == sizes_of(describe(model))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@FRONTS
def test_a_planned_step_sends_and_holds_what_extensions_make(front: str, device: str) -> None:
    """Of two tensors each all-gather sends both; in bf16 half; and whole parameters are not held beside their parts."""
    sent, frozen = {}, {}
    for kind in (None, NewPair, SentInBfloat16):
        found = planned_of(front, model_of(kind, frozen=True), 2, device_type=device, batch=BATCH)
        sent[kind], frozen[kind] = found.sent_nbytes, found.units
        assert {moment.nbytes.parameters for moment in found.phases} == {found.shard_nbytes}
        assert max(moment.nbytes.gathered for moment in found.phases) >= max(u.gathered_nbytes for u in found.units)
    nbytes = 4 * WIDTH * WIDTH
    # Halves of two weights are sent for the forward. For the backward the last is kept, and the first is sent with the
    # adapter of its unit; the wrapper has it in a unit of its own, whose input needs no gradient.
    num_sent = 3 if front == "fully_shard" else 2
    assert sent[NewPair] - sent[None] == num_sent * nbytes / 2
    assert sent[None] - sent[SentInBfloat16] == num_sent * nbytes / 4


@on_ranks(2)
def test_a_plan_refuses_what_the_wrapper_refuses_in_the_same_words() -> None:
    texts = []
    for make in (partial(plan, num_ranks=2), FSDP):
        with pytest.raises(UnsupportedError, match=r"'0.base.weight' is a NewPair.*unit of its own") as refused:
            make(model_of(NewPair), use_orig_params=True)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]


def test_a_search_leaves_out_wrappings_that_the_wrapper_refuses() -> None:
    model = nn.Sequential(
        *[held_by(Base(WIDTH, WIDTH, bias=False), SentInBfloat16) for _ in range(2)], nn.Linear(WIDTH, 1)
    )
    found = plan(model, 2, use_orig_params=True, batch=BATCH, fit="1GB")
    assert {choice.wrapping for choice in found.choices} == {"units of Base"}
    with pytest.raises(UnsupportedError, match="unit of its own"):
        plan(model_of(NewPair), 2, use_orig_params=True, batch=BATCH, fit="1GB")


def test_a_class_that_is_not_made_from_others_cannot_be_planned() -> None:
    with pytest.raises(OptionError, match=r"a Sealed of shape \(64, 64\).*__tensor_unflatten__"):
        plan(model_of(Sealed), 2, api="fully_shard")
