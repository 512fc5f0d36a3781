"""Switches of reductions, beside a replica and torch's fully_shard, which has the same methods."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_flat.composable import MixedPrecisionPolicy
from fsdp_flat.core import units_of
from fsdp_flat.core.gradients import ReduceScatteredGrad
from fsdp_flat.errors import UsageError
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import BOTH, CLOSE, FRONTS, FRONTS_AND_TORCH, Beside, batch_of, grads_of, placed, whole
from tests.support.kit import mesh, square_loss
from tests.support.models import Stack

Fronts = str | tuple[str, ...]


def of_replicas(fronts: Fronts, strategy: str = "HYBRID_SHARD", **options: Any) -> Beside:
    """Two replicas of a sharded model for hybrid strategies; only replicas for NO_SHARD."""
    layout = strategy if "HYBRID" not in strategy else f"{strategy} 2x{dist.get_world_size() // 2}"
    front = fronts if isinstance(fronts, str) else fronts[0]
    return Beside(Stack(), fronts, **options, **placed(layout, front))


def partial_grads(model: Any) -> list[Any]:
    return [handle.grads.partial.shard for unit in units_of(model) for handle in unit.param_groups]


def check_sums(beside: Beside) -> None:
    """Two rounds of three backwards, of which the last one reduces, add up; the others leave ``.grad`` alone."""
    for _ in range(2):
        for is_last in (False, False, True):
            before = grads_of(beside.ours)
            for model in beside.sharded.values():
                model.set_requires_all_reduce(is_last)
            beside.backward()
            if not is_last:
                assert_equal(
                    {name: grad for name, grad in grads_of(beside.ours).items() if grad is not None},
                    {name: grad for name, grad in before.items() if grad is not None},
                )
                dtype = beside.plain.head.weight.dtype
                assert all(partial is None or partial.dtype == dtype for partial in partial_grads(beside.ours))
        beside.check_gradients()
        assert partial_grads(beside.ours) == [None] * 4


@on_ranks(2, 4)
@FRONTS_AND_TORCH
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"])
def test_without_all_reduce_partial_shards_wait_for_the_next_one(strategy: str, fronts: Fronts) -> None:
    beside = of_replicas(fronts, strategy)
    check_sums(beside)
    if "fully_shard" in beside.sharded:
        return
    beside.ours.set_requires_all_reduce(False)
    square_loss(beside.ours, batch_of(5)).backward()
    # The wrapper's zero_grad clears gradients of any kind.
    beside.zero_grad()
    beside.ours.set_requires_all_reduce(True)
    beside.backward()
    beside.check_gradients()


@pytest.mark.filterwarnings("ignore:.*is sharded in torch.float16")
@on_ranks(2, 4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
def test_partial_shards_of_half_precision_wait_for_the_next_all_reduce(strategy: str) -> None:
    check_sums(of_replicas(BOTH, strategy, dtype=torch.float16, tolerance={"atol": 2e-2, "rtol": 2e-2}))


@on_ranks(4)
@FRONTS_AND_TORCH
def test_reductions_are_set_for_some_units_only(fronts: Fronts) -> None:
    beside = of_replicas(fronts)
    for model in beside.sharded.values():
        model.set_requires_all_reduce(False, recurse=False)
        model.blocks[1].set_requires_gradient_sync(False)
    beside.backward()
    if "fully_shard" in beside.sharded:
        without = {name for name, grad in grads_of(beside.ours).items() if grad is None}
        assert {name.partition(".")[0] for name in without} == {"first", "head", "blocks"}
    for model in beside.sharded.values():
        model.set_requires_gradient_sync(True)
    beside.backward()
    beside.check_gradients()


@on_ranks(4)
@FRONTS_AND_TORCH
def test_gradient_sync_is_the_switch_of_both_reductions(fronts: Fronts) -> None:
    beside = of_replicas(fronts)
    switches = [
        ("set_requires_gradient_sync", False),
        ("set_requires_all_reduce", False),
        ("set_requires_gradient_sync", True),
    ]
    for number, (method, value) in enumerate(switches):
        for model in beside.sharded.values():
            if number == 1:
                model.set_requires_gradient_sync(True)
            getattr(model, method)(value)
        beside.backward()
    beside.check_gradients()


@on_ranks(2, 4)
@FRONTS_AND_TORCH
def test_a_parameter_that_only_an_earlier_backward_used_has_its_gradient_after_the_all_reduce(fronts: Fronts) -> None:
    beside = of_replicas(fronts)
    for is_last in (False, True):
        for model in beside.models:
            # The second backward neither runs the first block nor reaches the last one.
            getattr(model, "module", model).order = [1] if is_last else [0, 1, 2]
        for model in beside.sharded.values():
            model.set_requires_all_reduce(is_last)
        beside.backward()
    expected = grads_of(beside.plain)
    assert all(grad is not None for grad in expected.values())
    # Torch leaves out the units that its last backward did not reach.
    assert_close(grads_of(beside.ours), expected, **CLOSE)


@on_ranks(2, 4)
@FRONTS
@pytest.mark.parametrize("pattern", ["pp a", "pa a", "ap a", "p a", "pp ap a"])
def test_partial_shards_and_open_ends_of_backwards_go_together(pattern: str, front: str) -> None:
    beside = of_replicas(front)
    # Backwards with an all-reduce (a) or without; the last one of each group sets gradients.
    for group in pattern.split():
        for index, kind in enumerate(group):
            beside.ours.set_requires_all_reduce(kind == "a")
            beside.ours.set_is_last_backward(index == len(group) - 1)
            beside.backward()
    beside.check_gradients()
    assert partial_grads(beside.ours) == [None] * 4


@on_ranks(2, 4)
@FRONTS
def test_partial_shards_stay_when_a_forward_raises(front: str) -> None:
    beside = of_replicas(front)
    ours = beside.ours
    ours.set_requires_all_reduce(False)
    beside.backward()
    hook = ours.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours(batch_of(1))
    hook.remove()
    ours.set_requires_all_reduce(True)
    beside.backward()
    beside.check_gradients()
    assert partial_grads(ours) == [None] * 4


@on_ranks(2, 4)
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_partial_shards_stay_in_the_reduce_dtype(reduce_dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    tolerance = {"atol": 3e-2, "rtol": 3e-2}
    beside = of_replicas("fully_shard", dtype=torch.float32, tolerance=tolerance, mp_policy=policy)
    ours = beside.ours
    for is_last in (False, True):
        ours.set_requires_all_reduce(is_last)
        square_loss(ours, beside.batch(int(is_last))).backward()
        beside.follow(step=int(is_last))
        if not is_last:
            assert {partial.dtype for partial in partial_grads(ours)} == {reduce_dtype}
    beside.check_gradients()
    assert {param.grad.dtype for param in ours.parameters()} == {torch.float32}


@on_ranks(4)
@pytest.mark.parametrize(
    "switch", ["set_requires_all_reduce", "set_is_last_backward", "set_manual_backward_finalization"]
)
def test_gradients_that_are_not_set_yet_cannot_be_clipped(switch: str) -> None:
    beside = of_replicas("flat")
    by_hand = switch == "set_manual_backward_finalization"
    getattr(beside.ours, switch)(by_hand)
    beside.backward()
    with pytest.raises(UsageError, match=r"clip_grad_norm_ was called on unit .* are not set yet"):
        beside.ours.clip_grad_norm_(1.0)
    if by_hand:
        beside.ours.finalize_backward()
    else:
        getattr(beside.ours, switch)(True)
        beside.backward()
    norm = beside.ours.clip_grad_norm_(1.0)
    assert_close(norm, torch.nn.utils.clip_grad_norm_(beside.plain.parameters(), 1.0), **CLOSE)
    beside.check_gradients()


@on_ranks(2, 4)
def test_a_wrapper_calls_hooks_with_reduced_shards() -> None:
    beside = Beside(Stack(), "originals")
    beside.ours.set_all_reduce_hook(lambda shard: shard.mul_(2))
    beside.ours.set_post_optim_event(torch.Event())
    beside.ours.set_force_sum_reduction_for_comms(True)
    beside.ours.set_reduce_scatter_max_input_buffers(2)
    beside.ours.set_separate_reduce_scatter_group()
    beside.backward()
    for name, param in beside.plain.named_parameters():
        param.grad *= 1 if name.startswith("blocks") else 2
    beside.check_gradients()


def test_sums_of_backwards_that_were_divided_by_other_numbers_add_up() -> None:
    partial = ReduceScatteredGrad()
    for divided_by in (1.0, 4.0, 4.0):
        partial.add(torch.full((2,), 8.0 / divided_by), divided_by)
    assert_equal(partial.take(2.0), torch.full((2,), 12.0))
    assert partial.take(2.0) is None


# -- the factor that divides gradients -------------------------------------------------------------------------------


def rank_grads(beside: Beside) -> list[dict[str, torch.Tensor]]:
    """Each rank's gradients of the replica in the first step."""
    found = []
    for rank in range(dist.get_world_size()):
        names, params = zip(*beside.plain.named_parameters(), strict=True)
        x = beside._batch(rank, 0).to(params[0].dtype)
        found.append(dict(zip(names, torch.autograd.grad(square_loss(beside.plain, x), params), strict=True)))
    return found


@on_ranks(2, 4)
@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("force_sum", [False, True])
def test_a_divide_factor_divides_the_sum_of_one_unit_once(replicas: bool, force_sum: bool) -> None:
    num_ranks = dist.get_world_size()
    # With replicas only, torch 2.13 divides by the factor twice.
    fronts = ("fully_shard",) if replicas else BOTH
    beside = Beside(Stack(), fronts, mesh=mesh(num_ranks, 1) if replicas else None)
    for model in beside.sharded.values():
        model.blocks[0].set_gradient_divide_factor(3.0)
    for own, *other in beside.units():
        own.set_force_sum_reduction_for_comms(force_sum)
        for each in other:
            # gloo has no other operation for it.
            each.set_force_sum_reduction_for_comms(True)
    beside.backward()
    grads = rank_grads(beside)
    for name, grad in grads_of(beside.ours).items():
        total = grads[0][name]
        for other_grads in grads[1:]:
            total = total + other_grads[name]
        divisor = 3.0 if name.startswith("blocks.0.") else num_ranks
        if num_ranks == 2 or not replicas:
            assert_equal(grad, total / divisor)
        assert_close(grad, total / divisor, **CLOSE)
    # The factor of one step does not stay in the gradients of the next.
    beside.zero_grad()
    for model in beside.sharded.values():
        model.blocks[0].set_gradient_divide_factor(float(num_ranks))
    beside.backward()
    beside.check_gradients()


@on_ranks(2, 4)
@FRONTS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_a_divide_factor_replaces_the_number_of_ranks_in_the_units_below_too(
    strategy: str, front: str, num_ranks: int
) -> None:
    beside = of_replicas(front, strategy)
    if front == "fully_shard":
        # There each unit has its own.
        units = [unit for (unit,) in beside.units()]
    else:
        units = [beside.ours]
    for factor in (7.0, 1.0, torch.tensor(4.0), None, 0.1):
        for unit in units:
            unit.set_gradient_divide_factor(factor)
        beside.backward()
        for param in beside.plain.parameters():
            param.grad *= num_ranks / (factor or num_ranks)
        beside.check_gradients()
        beside.zero_grad()


@on_ranks(2)
@FRONTS
def test_a_factor_that_changes_in_a_backward_is_read_at_its_end(front: str) -> None:
    found = []
    for changes in (False, True):
        torch.manual_seed(0)
        model = Beside(Stack(), front).ours
        for before, after in ((None, 3.0), (5.0, 3.0), (torch.tensor(7.0), 3.0), (2.0, None), (2.0, torch.tensor(3.0))):
            loss = square_loss(model, batch_of(0))
            model.set_gradient_divide_factor(before if changes else after)
            if changes:
                # The first layer's gradient comes last, when most units are reduced.
                loss.register_hook(lambda _grad, model=model, after=after: model.set_gradient_divide_factor(after))
            loss.backward()
            found.append(grads_of(model))
            model.zero_grad()
    half = len(found) // 2
    for fixed, changed in zip(found[:half], found[half:], strict=True):
        assert_close(changed, fixed, **CLOSE)


@on_ranks(2)
@FRONTS
@pytest.mark.parametrize("by_hand", [False, True])
def test_one_factor_divides_all_backwards_whose_gradients_are_set_together(by_hand: bool, front: str) -> None:
    beside = Beside(Stack(), front)
    model = beside.ours
    units = [unit for (unit,) in beside.units()] if front == "fully_shard" else [model]
    # A factor in a tensor counts with the digits of the tensor.
    two, four = torch.tensor([2.0, 4.0], dtype=torch.float64)
    for before, after in ((None, 4.0), (3.0, None), (3.0, four), (two, 4.0), (3.0, 8.0)):
        model.set_manual_backward_finalization(by_hand)
        for number, factor in enumerate((before, after)):
            for unit in units:
                unit.set_gradient_divide_factor(factor)
            if not by_hand:
                model.set_is_last_backward(number == 1)
            beside.backward()
        if by_hand:
            model.finalize_backward()
        for param in beside.plain.parameters():
            param.grad *= 2 / (after or 2)
        beside.check_gradients()
        beside.zero_grad()


@on_ranks(2, 4)
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
def test_a_divide_factor_is_applied_after_the_sum_in_low_precision(reduce_dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    beside = Beside(Stack(), "fully_shard", dtype=torch.float32, mp_policy=policy)
    sums = {}
    for factor in (1.0, 4096.0):
        for (unit,) in beside.units():
            unit.set_gradient_divide_factor(factor)
        square_loss(beside.ours, beside.batch()).backward()
        sums[factor] = grads_of(beside.ours)
        beside.zero_grad()
    # Division by a power of two is exact, so a division before the sum would differ only by an underflow.
    for name, grad in sums[1.0].items():
        assert_equal(sums[4096.0][name] * 4096, grad)


@on_ranks(2, 4)
@pytest.mark.parametrize("shape", ["shards", "hybrid", "replicas"])
@pytest.mark.parametrize("dtypes", [(None, None), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_training_with_a_divide_factor_equals_torch(shape: str, dtypes: tuple[torch.dtype | None, ...]) -> None:
    num_ranks = dist.get_world_size()
    on = {"shards": None, "hybrid": mesh(2, num_ranks // 2), "replicas": mesh(num_ranks, 1)}[shape]
    exact = torch.bfloat16 not in dtypes
    beside = Beside(
        Stack(),
        BOTH,
        mesh=on,
        mp_policy=MixedPrecisionPolicy(*dtypes),
        dtype=torch.float64 if exact else torch.float32,
        tolerance=CLOSE if exact else {"atol": 2e-2, "rtol": 2e-2},
    )
    factor = given = 2.0 * num_ranks
    if on is not None and on.shape[1] == 1:
        # torch divides by the factor twice where there are replicas only.
        given = math.sqrt(factor)
    for own, other in beside.units():
        own.set_gradient_divide_factor(factor)
        other.set_gradient_divide_factor(given)
        for unit in (own, other):
            unit.set_force_sum_reduction_for_comms(True)
    tolerance = CLOSE if exact else {"atol": 2e-3, "rtol": 2e-2}
    for _ in range(2):
        losses = beside.backward()
        assert_close(losses["fully_shard"], losses["fsdp2"], **tolerance)
        for param in beside.plain.parameters():
            param.grad *= num_ranks / factor
        beside.check_gradients()
        assert_close(grads_of(beside.ours), grads_of(beside.theirs), **tolerance)
        beside.step()
        for own, other in zip(beside.ours.parameters(), beside.theirs.parameters(), strict=True):
            assert_close(whole(own), whole(other), **tolerance)
    beside.check_parameters()


@on_ranks(2)
def test_the_older_name_of_the_divide_factor_warns() -> None:
    beside = Beside(Stack(), BOTH)
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        beside.ours.set_reduce_scatter_divide_factor(2.0)
    beside.ours.set_gradient_divide_factor(2.0)
    beside.backward()
    beside.check_gradients()


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
    beside = Beside(Stack(), "fully_shard", mesh=mesh(2, 2) if num_ranks == 4 else None)
    for (unit,) in beside.units():
        if enable is not None:
            unit.set_force_sum_reduction_for_comms(enable)
        if factor is not None:
            unit.set_gradient_divide_factor(factor)
    beside.ours.set_backend_collectives()
    with pytest.MonkeyPatch.context() as patch:
        operations = Operations(patch)
        beside.backward()
    names = [name for name, _ in operations.found]
    assert names.count("reduce_scatter_single") == 4
    assert names.count("all_reduce") == (4 if num_ranks == 4 else 0)
    assert {str(op) for _, op in operations.found} == {str(dist.ReduceOp.SUM)}
    for param in beside.plain.parameters():
        param.grad *= num_ranks / (factor or num_ranks)
    beside.check_gradients()
