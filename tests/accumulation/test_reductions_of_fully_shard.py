"""Controls of the reduction of gradients in fully_shard, beside torch's fully_shard and a replica."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_flat.composable import MixedPrecisionPolicy
from fsdp_flat.core import units_of
from tests.support import assert_equal, on_ranks
from tests.support.fully_shard_beside import Beside, grads_of, whole
from tests.support.kit import Stack, batch, mesh, square_loss


def hybrid_mesh(shards: bool) -> Any:
    """Two replicas of a sharded model, or only replicas."""
    num_ranks = dist.get_world_size()
    return mesh(2, num_ranks // 2) if shards else mesh(num_ranks, 1)


def partial_grads(model: Any) -> list[Any]:
    return [handle.grads.partial.shard for unit in units_of(model) for handle in unit.param_groups]


@pytest.mark.filterwarnings("ignore:.*is sharded in torch.float16")
@on_ranks(2, 4)
@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_without_all_reduce_partial_shards_wait_for_the_next_one(shards: bool, dtype: torch.dtype) -> None:
    models = Beside.of(dtype=dtype, mesh=hybrid_mesh(shards))
    tolerance = {} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    number = 0
    for _ in range(2):
        for is_last in (False, False, True):
            before = grads_of(models.ours)
            for model in models.both:
                model.set_requires_all_reduce(is_last)
            models.backward(number)
            models.plain_backward(number)
            number += 1
            if not is_last:
                assert_equal(
                    {name: grad for name, grad in grads_of(models.ours).items() if grad is not None},
                    {name: grad for name, grad in before.items() if grad is not None},
                )
                assert all(partial.dtype == dtype for partial in partial_grads(models.ours))
        # The gradients of both rounds add up.
        models.check_grads(**tolerance)
        assert partial_grads(models.ours) == [None] * 4


@on_ranks(4)
def test_reductions_are_set_for_some_units_only() -> None:
    models = Beside.of(mesh=mesh(2, 2))
    for model in models.both:
        model.set_requires_all_reduce(False, recurse=False)
        model.blocks[1].set_requires_gradient_sync(False)
    models.backward(0)
    assert {name.partition(".")[0] for name, grad in grads_of(models.ours).items() if grad is None} == {
        "first",
        "head",
        "blocks",
    }
    for model in models.both:
        model.set_requires_gradient_sync(True)
    models.backward(1)
    for number in range(2):
        models.plain_backward(number)
    models.check_grads()


@on_ranks(4)
def test_gradient_sync_is_the_switch_of_both_reductions() -> None:
    models = Beside.of(mesh=mesh(2, 2))
    for number, (method, value) in enumerate(
        [
            ("set_requires_gradient_sync", False),
            ("set_requires_all_reduce", False),
            ("set_requires_gradient_sync", True),
        ]
    ):
        for model in models.both:
            if number == 1:
                model.set_requires_gradient_sync(True)
            getattr(model, method)(value)
        models.backward(number)
        models.plain_backward(number)
    models.check_grads()


@on_ranks(2, 4)
def test_a_parameter_used_before_the_all_reduce_only_has_its_gradient_after_it() -> None:
    models = Beside.of(mesh=hybrid_mesh(shards=True))
    for is_last in (False, True):
        for model in (*models.both, models.plain):
            # The second backward neither runs the first block nor reaches the last one.
            model.order = [1] if is_last else [0, 1, 2]
        for model in models.both:
            model.set_requires_all_reduce(is_last)
        models.backward(int(is_last))
        models.plain_backward(int(is_last))
    expected = grads_of(models.plain)
    ours = grads_of(models.ours)
    assert all(grad is not None for grad in expected.values())
    torch.testing.assert_close(ours, expected)


@on_ranks(2, 4)
@pytest.mark.parametrize("pattern", ["pp a", "pa a", "ap a", "p a", "pp ap a"])
def test_partial_shards_and_open_ends_of_backwards_go_together(pattern: str) -> None:
    models = Beside.of(mesh=hybrid_mesh(shards=True))
    ours = models.ours
    number = 0
    # Backwards with an all-reduce (a) or without; the last one of each group sets gradients.
    for group in pattern.split():
        for index, kind in enumerate(group):
            ours.set_requires_all_reduce(kind == "a")
            ours.set_is_last_backward(index == len(group) - 1)
            models.backward(number, models=[ours])
            models.plain_backward(number)
            number += 1
    torch.testing.assert_close(grads_of(ours), grads_of(models.plain))
    assert partial_grads(ours) == [None] * 4


@on_ranks(2, 4)
def test_partial_shards_are_dropped_with_the_step_that_failed() -> None:
    models = Beside.of(mesh=hybrid_mesh(shards=True))
    ours = models.ours
    ours.set_requires_all_reduce(False)
    models.backward(0, models=[ours])
    hook = ours.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        models.backward(1, models=[ours])
    hook.remove()
    assert partial_grads(ours) == [None] * 4
    ours.set_requires_all_reduce(True)
    models.backward(2)
    models.plain_backward(2)
    models.check_grads()


@on_ranks(2, 4)
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_partial_shards_stay_in_the_reduce_dtype(reduce_dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    models = Beside.of(mesh=hybrid_mesh(shards=True), mp_policy=policy)
    ours = models.ours
    for is_last in (False, True):
        ours.set_requires_all_reduce(is_last)
        models.backward(int(is_last), models=[ours])
        models.plain_backward(int(is_last))
        if not is_last:
            assert {partial.dtype for partial in partial_grads(ours)} == {reduce_dtype}
    torch.testing.assert_close(grads_of(ours), grads_of(models.plain), atol=3e-2, rtol=3e-2)
    assert {param.grad.dtype for param in ours.parameters()} == {torch.float32}


def rank_grads(model: Stack, number: int) -> list[dict[str, torch.Tensor]]:
    """Each rank's gradients of a plain model."""
    found = []
    for rank in range(dist.get_world_size()):
        names, params = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(square_loss(model, batch(rank, number)), params)
        found.append(dict(zip(names, grads, strict=True)))
    return found


@on_ranks(2, 4)
@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("force_sum", [False, True])
def test_a_divide_factor_divides_the_sum_of_one_unit_once(replicas: bool, force_sum: bool) -> None:
    num_ranks = dist.get_world_size()
    models = Beside.of(mesh=mesh(num_ranks, 1) if replicas else None)
    for model in models.both:
        model.blocks[0].set_gradient_divide_factor(3.0)
    for own, other in models.units():
        own.set_force_sum_reduction_for_comms(force_sum)
        # gloo has no other operation for it.
        other.set_force_sum_reduction_for_comms(True)
    models.backward(0)
    grads = rank_grads(models.plain, 0)
    for name, grad in grads_of(models.ours).items():
        total = grads[0][name]
        for other in grads[1:]:
            total = total + other[name]
        divisor = 3.0 if name.startswith("blocks.0.") else num_ranks
        if num_ranks == 2 or not replicas:
            assert_equal(grad, total / divisor)
        torch.testing.assert_close(grad, total / divisor)
    # The factor of one step does not stay in the gradients of the next.
    models.ours.zero_grad()
    models.theirs.zero_grad()
    for model in models.both:
        model.blocks[0].set_gradient_divide_factor(float(num_ranks))
    models.backward(1)
    models.plain_backward(1)
    torch.testing.assert_close(grads_of(models.ours), grads_of(models.plain))
    if not replicas:
        # With replicas only, torch 2.13 divides by the factor twice.
        models.check_grads()


@on_ranks(2, 4)
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
def test_a_divide_factor_is_applied_after_the_sum_in_low_precision(reduce_dtype: torch.dtype) -> None:
    models = Beside.of(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    ours = models.ours
    sums = {}
    for factor in (1.0, 4096.0):
        for own, _ in models.units():
            own.set_gradient_divide_factor(factor)
        models.backward(0, models=[ours])
        sums[factor] = grads_of(ours)
        ours.zero_grad()
    # Division by a power of two is exact, so a division before the sum would differ only by an underflow.
    for name, grad in sums[1.0].items():
        assert_equal(sums[4096.0][name] * 4096, grad)


@on_ranks(2, 4)
@pytest.mark.parametrize("shape", ["shards", "hybrid", "replicas"])
@pytest.mark.parametrize("dtypes", [(None, None), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_training_with_a_divide_factor_equals_torch(shape: str, dtypes: tuple[torch.dtype | None, ...]) -> None:
    num_ranks = dist.get_world_size()
    on = {"shards": None, "hybrid": mesh(2, num_ranks // 2), "replicas": mesh(num_ranks, 1)}[shape]
    models = Beside.of(mesh=on, mp_policy=MixedPrecisionPolicy(*dtypes))
    factor, given = 2.0 * num_ranks, 2.0 * num_ranks
    if on is not None and on.shape[1] == 1:
        # torch divides by the factor twice where there are replicas only.
        given = math.sqrt(factor)
    for own, other in models.units():
        own.set_gradient_divide_factor(factor)
        other.set_gradient_divide_factor(given)
        for unit in (own, other):
            unit.set_force_sum_reduction_for_comms(True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.both]
    exact = torch.bfloat16 not in dtypes
    tolerance = {} if exact else {"atol": 2e-3, "rtol": 2e-2}
    for number in range(2):
        models.zero_grad()
        losses = [square_loss(model, batch(dist.get_rank(), number)) for model in models.both]
        torch.testing.assert_close(*losses, **tolerance)
        for loss in losses:
            loss.backward()
        models.check_grads(replica=False, **tolerance)
        if number == 0 and exact:
            models.plain_backward(0, factor)
            models.check_grads()
        for optimizer in optimizers:
            optimizer.step()
    for own, other in zip(models.ours.parameters(), models.theirs.parameters(), strict=True):
        torch.testing.assert_close(whole(own), whole(other), **tolerance)


@on_ranks(2)
def test_the_older_name_of_the_divide_factor_warns(rank: int) -> None:
    models = Beside.of()
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        models.ours.head.weight.grad = models.ours.set_reduce_scatter_divide_factor(2.0)
    models.ours.set_gradient_divide_factor(2.0)
    models.backward(0)
    models.plain_backward(0)
    models.check_grads()


class Operations:
    """Records the operations of collectives on floating-point tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fsdp_flat.comm import torch_comm

        self.found: list[tuple[str, Any]] = []
        for owner, name in [
            (dist, "all_reduce"),
            (torch_comm, "reduce_scatter_single"),
            (dist, "all_to_all_single"),
        ]:
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            if tensors[0].is_floating_point():
                self.found.append((name, kwargs.get("op", dist.ReduceOp.SUM)))
            return original(*args, **kwargs)

        return call


@on_ranks(2, 4)
@pytest.mark.parametrize("enable", [None, False, True])
@pytest.mark.parametrize("factor", [None, 3.0])
def test_backends_get_sums_only(enable: bool | None, factor: float | None) -> None:
    num_ranks = dist.get_world_size()
    models = Beside.of(mesh=mesh(2, 2) if num_ranks == 4 else None)
    for own, other in models.units():
        if enable is not None:
            own.set_force_sum_reduction_for_comms(enable)
        other.set_force_sum_reduction_for_comms(True)
        if factor is not None:
            own.set_gradient_divide_factor(factor)
            other.set_gradient_divide_factor(factor)
    models.ours.set_backend_collectives()
    with pytest.MonkeyPatch.context() as patch:
        operations = Operations(patch)
        models.backward(0, models=[models.ours])
    names = [name for name, _ in operations.found]
    assert names.count("reduce_scatter_single") == 4
    assert names.count("all_reduce") == (4 if num_ranks == 4 else 0)
    assert {str(op) for _, op in operations.found} == {str(dist.ReduceOp.SUM)}
    models.backward(0, models=[models.theirs])
    models.plain_backward(0, factor)
    models.check_grads()
