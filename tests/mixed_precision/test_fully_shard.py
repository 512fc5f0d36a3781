"""Mixed precision of fully_shard, beside torch's fully_shard on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_flat.composable import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fsdp_flat.errors import OptionTypeError
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import BOTH, Beside, grads_of, whole
from tests.support.kit import batch, mesh, seeded, square_loss, train_on
from tests.support.models import Block, Stack
from tests.support.peer import peer_fully_shard

LOW = {"atol": 2e-3, "rtol": 2e-2}


def both(policy: MixedPrecisionPolicy, *, dtype: torch.dtype = torch.float32, **options: Any) -> Beside:
    """Models of the library and of torch; the replica computes in the dtype of the parameters."""
    tolerance = {"atol": 5e-2, "rtol": 5e-2}
    return Beside(Stack(), BOTH, mp_policy=policy, dtype=dtype, tolerance=tolerance, **options)


def check_same_gradients(beside: Beside, **tolerance: float) -> None:
    """Gradients are torch's, whose low precision is the same."""
    assert_close(grads_of(beside.ours), grads_of(beside.theirs), **tolerance)


class Seen:
    """Records the dtypes of a block's weight, input and output in each forward."""

    def __init__(self, block: Block) -> None:
        self.dtypes: list[tuple[torch.dtype, ...]] = []
        block.up.register_forward_hook(self._note)

    def _note(self, module: Any, args: Any, output: torch.Tensor) -> None:
        self.dtypes.append((module.weight.dtype, args[0].dtype, output.dtype))


@on_ranks(2, 4)
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16, torch.float32])
def test_training_in_mixed_precision_equals_torch(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    beside = both(MixedPrecisionPolicy(param_dtype, reduce_dtype))
    seen = [Seen(model.blocks[1]) for model in beside.sharded.values()]
    # The compute is the same; only sums over ranks round in another order.
    exact = dist.get_world_size() == 2 or torch.bfloat16 not in (param_dtype, reduce_dtype)
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if exact else LOW
    for _ in range(3):
        losses = beside.backward()
        assert_close(losses["fully_shard"], losses["fsdp2"], **tolerance)
        check_same_gradients(beside, **tolerance)
        for own, other in zip(beside.ours.parameters(), beside.theirs.parameters(), strict=True):
            assert isinstance(own.grad, DTensor)
            assert own.dtype == own.grad.dtype == other.grad.dtype == torch.float32
            assert own.grad.placements == other.grad.placements
            assert own.grad.to_local().shape == other.grad.to_local().shape
        beside.step()
        for own, other in zip(beside.ours.parameters(), beside.theirs.parameters(), strict=True):
            assert_close(whole(own), whole(other), **tolerance)
    assert seen[0].dtypes == seen[1].dtypes
    assert set(seen[0].dtypes) == {(param_dtype or torch.float32,) * 3}


@on_ranks(2, 4)
@pytest.mark.parametrize("output_dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, None])
def test_outputs_are_cast(output_dtype: torch.dtype | None, param_dtype: torch.dtype | None) -> None:
    policy, outputs, grads = MixedPrecisionPolicy(param_dtype, torch.float32, output_dtype), [], []
    for shard in (fully_shard, peer_fully_shard):
        model = shard(seeded(), mp_policy=policy)
        outputs.append(model(batch(dist.get_rank(), 0)))
        outputs[-1].pow(2).mean().backward()
        grads.append(grads_of(model))
    assert outputs[0].dtype == outputs[1].dtype == (output_dtype or param_dtype or torch.float32)
    assert_equal(outputs[0], outputs[1])
    torch.testing.assert_close(grads[0], grads[1])


class Nested(nn.Module):
    """Returns its inputs, in containers, beside a product with its weight; records the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, more: list[torch.Tensor], *, index: torch.Tensor) -> dict[str, Any]:
        self.dtypes += [x.dtype, more[0].dtype, index.dtype]
        return {"product": x * self.weight, "others": (more[0], [index])}


@on_ranks(2)
@pytest.mark.parametrize("cast_forward_inputs", [True, False])
def test_inputs_in_containers_are_cast_or_left(cast_forward_inputs: bool, rank: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, None, torch.float16, cast_forward_inputs)
    found = []
    for shard in (fully_shard, peer_fully_shard):
        module = shard(Nested(), mp_policy=policy)
        output = module(torch.ones(4), [torch.ones(2)], index=torch.arange(3))
        others = output["others"]
        found.append((module.dtypes, output["product"].dtype, others[0].dtype, others[1][0].dtype))
    assert found[0] == found[1]
    first = torch.bfloat16 if cast_forward_inputs else torch.float32
    assert found[0] == ([first, first, torch.int64], torch.float16, torch.float16, torch.int64)


class FirstOfSet(nn.Module):
    """Multiplies the only tensor of a set by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, some: set[torch.Tensor]) -> dict[str, set[torch.Tensor]]:
        (one,) = some
        assert one.dtype == torch.bfloat16
        return {"products": {one * self.weight}}


@on_ranks(2)
@pytest.mark.parametrize("function", [fully_shard, peer_fully_shard])
def test_tensors_in_sets_are_cast(function: Callable[..., Any]) -> None:
    module = function(FirstOfSet(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    (product,) = module({torch.ones(4)})["products"]
    assert product.dtype == torch.float64


@on_ranks(2, 4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("hybrid", [False, True])
def test_gradients_accumulate_in_the_reduce_dtype(reduce_dtype: torch.dtype | None, hybrid: bool) -> None:
    given = {"mesh": mesh(2, dist.get_world_size() // 2)} if hybrid else {}
    beside = both(MixedPrecisionPolicy(torch.bfloat16, reduce_dtype), **given)
    for number in range(4):
        for model in beside.sharded.values():
            model.set_requires_gradient_sync(number == 3)
        beside.backward()
        assert (grads_of(beside.ours)["head.bias"] is None) is (number < 3)
    exact = reduce_dtype is torch.float32
    check_same_gradients(beside, **({"atol": 1e-6, "rtol": 1e-5} if exact else {"atol": 1e-2, "rtol": 5e-2}))


@pytest.mark.filterwarnings("ignore:.*is sharded in torch.bfloat16")
@on_ranks(2, 4)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_gradients_have_the_dtype_of_low_precision_parameters(reduce_dtype: torch.dtype | None) -> None:
    beside = both(MixedPrecisionPolicy(None, reduce_dtype), dtype=torch.bfloat16)
    beside.backward()
    assert {param.grad.dtype for param in beside.ours.parameters()} == {torch.bfloat16}
    check_same_gradients(beside, **LOW)


@on_ranks(2)
def test_units_have_policies_of_their_own_and_buffers_stay(rank: int) -> None:
    models = []
    for shard in (fully_shard, peer_fully_shard):
        model = seeded()
        model.first.register_buffer("scale", torch.ones(3))
        shard(model.blocks[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
        shard(model.blocks[1], mp_policy=MixedPrecisionPolicy())
        shard(model.blocks[2], mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32, torch.float32))
        models.append(shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64)))
        square_loss(model, batch(rank, 0)).backward()
    assert models[0].first.scale.dtype == torch.float32
    torch.testing.assert_close(grads_of(models[0]), grads_of(models[1]))


@on_ranks(2, 4)
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_offloading_on_the_cpu_is_as_no_offloading(pin_memory: bool, param_dtype: torch.dtype | None) -> None:
    found = []
    for offload_policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=pin_memory)):
        model: Any = seeded()
        policy = MixedPrecisionPolicy(param_dtype, torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy, offload_policy=offload_policy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train_on(model, optimizer, [batch(dist.get_rank(), number) for number in range(3)])
        assert {param.device.type for param in model.parameters()} == {"cpu"}
        found.append({name: whole(param) for name, param in model.named_parameters()})
    assert_equal(found[0], found[1])
    assert CPUOffloadPolicy().pin_memory == TorchCPUOffloadPolicy().pin_memory


@on_ranks(2)
def test_a_policy_may_be_given_as_the_class_whose_defaults_it_has() -> None:
    """torchao's own test does; torch reads attributes of the class."""
    found = []
    for policies in (
        {},
        {"offload_policy": OffloadPolicy, "mp_policy": MixedPrecisionPolicy},
        {"offload_policy": TorchOffloadPolicy, "mp_policy": TorchMixedPrecisionPolicy},
    ):
        model: Any = seeded()
        for module in (*model.blocks, model):
            fully_shard(module, **policies)
        square_loss(model, batch(dist.get_rank(), 0)).backward()
        found.append({name: whole(param.grad) for name, param in model.named_parameters()})
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
    # Without the parentheses torch would not offload.
    with pytest.raises(OptionTypeError, match=r"must be an OffloadPolicy; got <class .*CPUOffloadPolicy"):
        fully_shard(seeded(), offload_policy=CPUOffloadPolicy)
