"""``describe`` and ``plan``: the units of a model and their bytes, after wrapping and before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy, describe, plan
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionError
from fsdp_flat.wrap import CustomPolicy, ModuleWrapPolicy
from tests.memory.test_memory import sampled
from tests.mixed_precision.test_units_of_several_dtypes import Mixed
from tests.support import assert_equal, on_ranks
from tests.support.kit import BLOCKS, batch, mesh, square_loss, wrapped
from tests.support.models import Block, Stack
from tests.support.selection import some
from tests.wrapping.test_tied_weights import Language


def frozen_stack() -> Stack:
    module = Stack()
    module.blocks[0].requires_grad_(False)
    module.blocks[1].up.requires_grad_(False)
    return module


LOW = MixedPrecision(torch.bfloat16, torch.float32, full_precision_modules=(nn.Embedding,))
BY_BLOCK = CustomPolicy(
    lambda module: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(module, Block) else False
)
ORIGINALS: dict[str, Any] = {"use_orig_params": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "flat": (Stack, {"auto_wrap_policy": BLOCKS}),
    "originals": (Stack, {"auto_wrap_policy": BLOCKS, **ORIGINALS}),
    "one unit": (Stack, {}),
    "frozen": (frozen_stack, {"auto_wrap_policy": BLOCKS, **ORIGINALS}),
    "mixed dtypes": (Mixed, ORIGINALS),
    "tied": (Language, {"auto_wrap_policy": ModuleWrapPolicy({nn.Embedding, nn.Linear, Block})}),
    "low precision": (Language, {"auto_wrap_policy": BLOCKS, "mixed_precision": LOW, **ORIGINALS}),
    "masters": (lambda: Stack().bfloat16(), {"mixed_precision": MixedPrecision(master_dtype=torch.float32)}),
    "units of their own strategy": (Stack, {"auto_wrap_policy": BY_BLOCK}),
    "SHARD_GRAD_OP": (Stack, {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "NO_SHARD": (Stack, {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy.NO_SHARD}),
}


@on_ranks(2)
def test_a_plan_on_the_meta_device_is_what_wrapping_makes_and_allocates(rank: int) -> None:
    for case, (build, kwargs) in some(CASES.items(), 1):
        module = build()
        before = dict(module.state_dict())
        planned = plan(module, 2, **kwargs)
        assert_equal(dict(module.state_dict()), before, what=f"the module after plan: {case}")
        with torch.device("meta"):
            assert plan(build(), 2, **kwargs) == planned, case
        model = wrapped(module, **kwargs)
        assert describe(model) == planned.description, case
        assert str(describe(model)) == str(planned)
        for unit, found in zip([unit for unit in units_of(model) if unit.param_groups], planned.units, strict=True):
            assert sum(handle.flat_param.nbytes for handle in unit.param_groups) == found.shard_nbytes, case
        assert sum(param.nbytes for param in model.parameters()) <= planned.shard_nbytes


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_a_step_gathers_and_keeps_the_bytes_that_a_plan_says(
    strategy: ShardingStrategy, use_orig_params: bool, rank: int
) -> None:
    kwargs: dict[str, Any] = {
        "auto_wrap_policy": BLOCKS,
        "sharding_strategy": strategy,
        "use_orig_params": use_orig_params,
    }
    planned = plan(Stack(6), 2, **kwargs)
    model = wrapped(Stack(6), **kwargs)
    for _ in range(2):
        most = max(sampled(model, lambda: square_loss(model, batch(rank)).backward()))
    assert most == planned.most_gathered_nbytes
    held = sum(param.grad.nbytes for param in model.parameters() if param.grad is not None)
    padding = 0 if not use_orig_params else 64 * len(planned.units)
    assert planned.grad_nbytes - padding <= held <= planned.grad_nbytes
    model(batch(rank))
    gathered = {unit.name for unit in describe(model).units if unit.is_gathered}
    assert "Stack" in gathered
    assert ("blocks.0" in gathered) == (strategy is ShardingStrategy.SHARD_GRAD_OP)
    assert "Stack *" in str(describe(model))


@on_ranks(4)
def test_a_plan_for_replicas_is_what_a_hybrid_mesh_makes() -> None:
    kwargs: dict[str, Any] = {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    model = FSDP(Stack(), device_mesh=mesh(2, 2), **kwargs)
    assert describe(model) == plan(Stack(), 4, num_replicas=2, **kwargs).description
    with pytest.raises(OptionError, match=r"FullyShardedDataParallel already; describe\(model\) shows it"):
        plan(model, 4)
    inner = describe(nn.ModuleList([model.blocks[0]]))
    assert [unit.name for unit in inner.units] == ["0"]


@on_ranks(2)
def test_a_unit_that_is_kept_after_forward_counts_as_kept_whatever_its_strategy() -> None:
    model = FSDP(Stack(), auto_wrap_policy=BLOCKS)
    assert [unit.reshard_after_forward for unit in describe(model).units] == [None] * 4
    for unit in units_of(model):
        unit.control.reshard_after_forward = False
    kept = describe(model)
    assert [unit.reshard_after_forward for unit in kept.units] == [False] * 4
    assert kept.most_gathered_nbytes == sum(unit.gathered_nbytes for unit in kept.units)


TABLE = """\
unit      units  strategy    dtype    parameters  elements  trainable    shard  gradient  gathered
Stack         1  FULL_SHARD  float32           4       117        117    236 B     236 B     472 B
blocks.0      1  FULL_SHARD  float32           3       289          0    584 B       0 B   1.17 kB
blocks.1      1  FULL_SHARD  float32           3       289        136    580 B     272 B   1.16 kB
blocks.2      1  FULL_SHARD  float32           3       289        289    584 B     584 B   1.17 kB
all           4                               13       984        542  1.98 kB   1.09 kB   3.97 kB
2 shards x 1 replica; sizes of one unit on one rank; gathered at one time: at most 2.81 kB"""


def test_a_plan_prints_a_table_and_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    planned = plan(frozen_stack(), 2, auto_wrap_policy=BLOCKS, use_orig_params=True)
    assert str(planned) == TABLE
    assert (planned.numel, planned.shard_nbytes, planned.grad_nbytes) == (984, 1984, 1092)
    ignoring = plan(Stack(), 2, auto_wrap_policy=BLOCKS, ignored_modules=[(stack := Stack()).head])
    assert ignoring.numel == 984, "a module of another model is not in this one"
    assert plan(stack, 2, auto_wrap_policy=BLOCKS, ignored_modules=[stack.head]).numel == 984 - 45


def test_numbers_of_ranks_that_do_not_fit_and_models_without_units_are_refused() -> None:
    with pytest.raises(OptionError, match="got num_ranks=6 and num_replicas=4"):
        plan(Stack(), 6, num_replicas=4, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(OptionError, match="num_replicas is for hybrid strategies; got num_replicas=2 with FULL_SHARD"):
        plan(Stack(), 4, num_replicas=2)
    with pytest.raises(OptionError, match=r"Stack holds no FullyShardedDataParallel to describe; plan\(module"):
        describe(Stack())
