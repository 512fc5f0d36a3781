"""``plan`` of a step: its bytes are those that are counted in a step, for each strategy and both fronts."""

from __future__ import annotations

import gc
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from benchmarks import model as gpt
from benchmarks.counting import Counter
from benchmarks.spec import Setting
from fsdp_flat import CPUOffload, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, describe, fully_shard, plan
from fsdp_flat.errors import OptionError, OptionTypeError
from fsdp_flat.sizes import nbytes_of, size_text
from fsdp_flat.tools.planned_step import APIS
from fsdp_flat.tools.step_plan import StepPlan
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import on_ranks
from tests.support.kit import BLOCKS, mesh, normal, square_loss, wrapped
from tests.support.models import Block, Stack
from tests.support.selection import some
from tests.support.steps import exchange_nbytes, recorded

TOLERANCE = 0.03
WRAPPERS = {"flat parameters": False, "original parameters": True}
FRONTS = [*WRAPPERS, "fully_shard"]
COUNTED = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD,
]
SETTING = Setting(layers=4, width=64, heads=2, vocab=128, seq=32, batch=4)


class Case(NamedTuple):
    """A model whose units are modules of some classes, one rank's batch of it, and its loss."""

    build: Callable[[], nn.Module]
    block: tuple[type[nn.Module], ...]
    batch: torch.Tensor
    loss: Callable[[nn.Module, Any], torch.Tensor]


def case_of(name: str) -> Case:
    if name == "Stack":
        return Case(partial(Stack, 4, 64), (Block,), normal(dist.get_rank(), 16, 64), square_loss)
    return Case(partial(gpt.GPT, SETTING), (gpt.Block,), gpt.batch_of(SETTING, dist.get_rank(), 0), gpt.loss_of)


def precision_for(front: str) -> Any:
    kind = MixedPrecisionPolicy if front == "fully_shard" else MixedPrecision
    return kind(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def num_replicas(strategy: ShardingStrategy) -> int:
    return 2 if strategy is ShardingStrategy.HYBRID_SHARD else 1


def planned(
    case: Case, front: str, strategy: ShardingStrategy, *, checkpointing: bool, precision: Any, **others: Any
) -> StepPlan:
    with torch.device("meta"):
        module = case.build()
    return plan(
        module,
        dist.get_world_size(),
        num_replicas=num_replicas(strategy),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy(set(case.block)),
        mixed_precision=precision,
        use_orig_params=WRAPPERS.get(front, False),
        api="fully_shard" if front == "fully_shard" else "FullyShardedDataParallel",
        batch=case.batch,
        loss=case.loss,
        checkpointing=checkpointing,
        device_type="cpu",
        **others,
    )


def made(case: Case, front: str, strategy: ShardingStrategy, *, checkpointing: bool, precision: Any) -> nn.Module:
    torch.manual_seed(0)
    module = case.build()
    if checkpointing:
        apply_activation_checkpointing(
            module,
            checkpoint_wrapper_fn=checkpoint_wrapper,
            check_fn=lambda child: isinstance(child, case.block),
        )
    num_ranks = dist.get_world_size()
    if front != "fully_shard":
        grid = {"device_mesh": mesh(2, num_ranks // 2)} if strategy is ShardingStrategy.HYBRID_SHARD else {}
        return wrapped(
            module,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy(set(case.block)),
            mixed_precision=precision,
            use_orig_params=WRAPPERS[front],
            **grid,
        )
    shape = {ShardingStrategy.HYBRID_SHARD: (2, num_ranks // 2), ShardingStrategy.NO_SHARD: (num_ranks, 1)}
    kwargs: dict[str, Any] = {"mesh": mesh(*shape[strategy])} if strategy in shape else {}
    if strategy is ShardingStrategy.SHARD_GRAD_OP:
        kwargs["reshard_after_forward"] = False
    if precision is not None:
        kwargs["mp_policy"] = precision
    for child in reversed([child for child in module.modules() if isinstance(child, case.block)]):
        fully_shard(child, **kwargs)
    fully_shard(module, **kwargs)
    return module


class PeakCounter(Counter):
    """Counts before and after each operator, since memory that a storage gets is not an operator's result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.alive()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, before, self.alive())
        return result


def uncounted_grads(model: nn.Module) -> int:
    """Return the bytes of gradients whose storages are parts of another one, of which no tensor is left."""
    grads = [getattr(param.grad, "_local_tensor", param.grad) for param in model.parameters()]
    return sum(grad.nbytes for grad in grads if grad is not None and not grad.untyped_storage().resizable())


def counted(
    case: Case,
    front: str,
    strategy: ShardingStrategy,
    *,
    checkpointing: bool,
    precision: Any,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    accumulates: bool = False,
) -> tuple[list[int], float]:
    """Return the peak bytes of forward, backward and optimizer in the third step, and the bytes sent in it."""
    gc.collect()
    others = PeakCounter().alive() - case.batch.nbytes
    model = made(case, front, strategy, checkpointing=checkpointing, precision=precision)
    updates = optimizer(model.parameters())
    for _ in range(2):
        case.loss(model, case.batch).backward()
        updates.step()
        updates.zero_grad(set_to_none=not accumulates)
    gc.collect()
    others -= uncounted_grads(model)
    peaks = []
    with recorded() as sent, PeakCounter() as counter:
        loss = case.loss(model, case.batch)
        peaks.append(counter.peak - others)
        counter.peak = 0
        loss.backward()
        peaks.append(counter.peak - others)
        counter.peak = 0
        updates.step()
        peaks.append(counter.peak - others)
    exchanged = exchange_nbytes(model)
    nbytes = sum(call.sent for call in sent.calls if call.nbytes > exchanged)
    return peaks, nbytes


def numbers_of(expected: StepPlan) -> list[float]:
    return [*[moment.nbytes.total for moment in expected.phases], expected.sent_nbytes]


def largest(numbers: list[float]) -> list[float]:
    """Return the largest number of a rank for each: when a rank frees what it has sent depends on the others.

    All ranks compare the same numbers, so that they fail together.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, numbers)
    return list(map(max, zip(*of_ranks, strict=True)))


@on_ranks(1, 2, 4, timeout=240)
@pytest.mark.parametrize("front", FRONTS)
def test_planned_bytes_are_those_counted_in_a_step(front: str, num_ranks: int) -> None:
    strategies, every = (COUNTED, 3) if num_ranks > 1 else (COUNTED[:3], 1)
    for name, strategy, checkpointing in some(itertools.product(("Stack", "GPT"), strategies, (False, True)), every):
        case, precision = case_of(name), precision_for(front) if name == "Stack" else None
        arguments: dict[str, Any] = {"checkpointing": checkpointing, "precision": precision}
        expected = planned(case, front, strategy, **arguments)
        peaks, sent = counted(case, front, strategy, **arguments)
        assert numbers_of(expected) == pytest.approx(largest([*peaks, sent]), rel=TOLERANCE), (
            name,
            strategy,
            arguments,
        )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "foreach AdamW": partial(torch.optim.AdamW, foreach=True),
    "fused Adam": partial(torch.optim.Adam, amsgrad=True, fused=True),
    "Adagrad": torch.optim.Adagrad,  # it makes its states before the first step
}


@on_ranks(2, 4, timeout=240)
@pytest.mark.parametrize("front", FRONTS)
def test_states_and_temporaries_of_each_implementation_of_an_optimizer_are_those_counted(front: str) -> None:
    case = case_of("Stack")
    for optimizer in some(OPTIMIZERS.values(), 1):
        arguments: dict[str, Any] = {"checkpointing": False, "precision": None, "optimizer": optimizer}
        expected = planned(case, front, ShardingStrategy.FULL_SHARD, **arguments)
        peaks, _ = counted(case, front, ShardingStrategy.FULL_SHARD, **arguments)
        found = [moment.nbytes.total for moment in expected.phases]
        assert found == pytest.approx(largest([float(peak) for peak in peaks]), rel=TOLERANCE), optimizer


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("front", FRONTS)
def test_gradients_of_an_earlier_backward_count_in_each_phase(front: str) -> None:
    """The 439 MB are these, beside the workspaces of matrix multiplications."""
    case = case_of("Stack")
    for strategy, checkpointing in some(itertools.product(COUNTED[:3], (False, True)), 1):
        arguments: dict[str, Any] = {"checkpointing": checkpointing, "precision": precision_for(front)}
        arguments["accumulates"] = True
        expected = planned(case, front, strategy, **arguments)
        peaks, _ = counted(case, front, strategy, **arguments)
        found = [moment.nbytes.total for moment in expected.phases]
        assert found == pytest.approx(largest([float(peak) for peak in peaks]), rel=TOLERANCE), (strategy, arguments)
        without = planned(case, front, strategy, **{**arguments, "accumulates": False})
        assert expected.phases[0].nbytes.total - without.phases[0].nbytes.total == expected.grad_nbytes


class Several(nn.Module):
    """Calls one block twice, recomputes another by hand, and has units inside a unit; the root has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(64), Block(64)
        self.inner = nn.Sequential(*[Around() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.second(self.first(x)))
        return self.inner(checkpoint(self.second, x, use_reentrant=False))


class Around(nn.Module):
    """Has a layer beside blocks, which are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.blocks = nn.Sequential(*[Block(64) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.before(x))


def frozen_stack() -> nn.Module:
    model = Stack(8, 64)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    model.blocks[5].requires_grad_(False)
    return model


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("front", ["original parameters", "fully_shard"])
def test_frozen_repeated_nested_and_recomputed_units_are_counted_too(front: str) -> None:
    models = ((Several, (Block, Around)), (frozen_stack, (Block,)))
    for (build, block), precision in some(itertools.product(models, (None, precision_for(front))), 1):
        case = Case(build, block, normal(0, 64, 64), square_loss)
        arguments: dict[str, Any] = {"checkpointing": False, "precision": precision}
        expected = planned(case, front, ShardingStrategy.FULL_SHARD, **arguments)
        peaks, sent = counted(case, front, ShardingStrategy.FULL_SHARD, **arguments)
        assert numbers_of(expected) == pytest.approx(largest([*peaks, sent]), rel=TOLERANCE), (build, precision)


@on_ranks(2)
@pytest.mark.parametrize("reshards", [None, False])
def test_the_units_of_a_plan_for_fully_shard_are_those_that_it_makes(reshards: bool | None) -> None:
    strategy = ShardingStrategy.FULL_SHARD if reshards is None else ShardingStrategy.SHARD_GRAD_OP
    model = Stack()
    expected = plan(model, 2, auto_wrap_policy=BLOCKS, sharding_strategy=strategy, api="fully_shard")
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshards)
    fully_shard(model, reshard_after_forward=reshards)
    found = describe(model)
    root = replace(found.units[0], name="Stack")  # its class is FSDPStack now
    assert replace(found, units=(root, *found.units[1:])) == expected.description


class Normed(nn.Module):
    """A batch norm, which mixed precision leaves in full precision, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:mixed_precision and auto_wrap_policy are both given")
def test_units_in_full_precision_inside_ones_in_low_precision_are_counted() -> None:
    case = Case(Normed, (nn.Linear,), normal(0, 64, 64), square_loss)  # equal statistics
    arguments: dict[str, Any] = {"checkpointing": False, "precision": precision_for("flat parameters")}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        expected = planned(case, "flat parameters", strategy, **arguments)
        peaks, _ = counted(case, "flat parameters", strategy, **arguments)
        assert [moment.nbytes.total for moment in expected.phases] == pytest.approx(peaks, rel=TOLERANCE)


def meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


WIDE: dict[str, Any] = {"auto_wrap_policy": BLOCKS, "batch": torch.empty(16, 64, device="meta")}
LONG: dict[str, Any] = {"auto_wrap_policy": BLOCKS, "batch": torch.empty(1024, 64, device="meta")}


def test_a_plan_of_a_step_prints_the_bytes_of_each_phase_by_kind() -> None:
    planned = plan(meta(partial(Stack, 4, 64)), 2, bandwidth=1e9, flops=1e12, **WIDE)
    lines = str(planned).splitlines()
    assert str(planned).startswith(f"{planned.description}\n\n")
    table = [line.split() for line in lines if line.startswith(("peak in", "forward  ", "backward  ", "optimizer  "))]
    assert [row[0] for row in table] == ["peak", "forward", "backward", "optimizer"]
    assert table[0][2:] == ["parameters", "gathered", "gradients", "optimizer", "activations", "total"]
    for moment in planned.phases:
        parts = [moment.nbytes.parameters, moment.nbytes.gathered, moment.nbytes.gradients, moment.nbytes.optimizer]
        assert moment.nbytes.total == sum(parts) + moment.nbytes.activations
    assert planned.peak_nbytes == max(moment.nbytes.total for moment in planned.moments)
    assert "peak of a rank" in str(planned)
    assert planned.seconds is not None
    assert planned.exposed_seconds is not None
    assert 0 < planned.exposed_seconds < planned.seconds


def test_a_plan_counts_the_operations_and_bytes_of_a_step_by_their_formulas() -> None:
    one_layer = partial(nn.Linear, 32, 64, bias=False)
    arguments: dict[str, Any] = {"batch": torch.empty(16, 32, device="meta", requires_grad=False)}
    planned = plan(meta(one_layer), 4, optimizer=None, **arguments)
    forward = 2 * 16 * 32 * 64
    assert planned.flops == 2 * forward, "forward, and the gradient of the weight; inputs need none"
    weight = 32 * 64 * 4
    assert planned.sent_nbytes == 2 * weight * 3 / 4, "one all-gather, kept for backward, and one reduce-scatter"
    assert all(moment.nbytes.optimizer == 0 for moment in planned.phases)
    assert planned.seconds is None
    with_states = plan(meta(one_layer), 4, **arguments)
    assert with_states.phases[0].nbytes.optimizer == pytest.approx(2 * weight / 4, abs=8), "two states of AdamW"


def test_recomputation_trades_activations_for_operations() -> None:
    plain = plan(meta(partial(Stack, 4, 64)), 2, **WIDE)
    units = plan(meta(partial(Stack, 4, 64)), 2, checkpointing=True, **WIDE)
    classes = plan(meta(partial(Stack, 4, 64)), 2, checkpointing=[Block], **WIDE)
    assert units == classes
    assert units.flops > plain.flops
    assert units.phases[0].nbytes.activations < plain.phases[0].nbytes.activations


def test_offloading_moves_shards_gradients_and_states_to_the_host() -> None:
    here = plan(meta(partial(Stack, 4, 64)), 2, **WIDE)
    offloaded = plan(meta(partial(Stack, 4, 64)), 2, cpu_offload=CPUOffload(True), **WIDE)
    assert here.host_nbytes == 0
    assert offloaded.host_nbytes > here.shard_nbytes + here.grad_nbytes
    assert all(moment.nbytes.parameters == moment.nbytes.optimizer == 0 for moment in offloaded.phases)
    assert offloaded.phases[2].nbytes.gradients == 0
    assert "in host memory" in str(offloaded)


@pytest.mark.parametrize("api", APIS)
def test_optimizer_states_on_the_host_are_on_the_device_for_the_optimizer_alone(api: str) -> None:
    here = plan(meta(partial(Stack, 4, 64)), 2, api=api, **LONG)
    offloaded = plan(meta(partial(Stack, 4, 64)), 2, api=api, cpu_offload=CPUOffload(offload_optimizer=True), **LONG)
    states = here.phases[0].nbytes.optimizer
    # The few bytes that stay are step counts.
    assert [moment.nbytes.optimizer for moment in offloaded.phases[:2]] == pytest.approx([0, 0], abs=256)
    assert offloaded.phases[2].nbytes == here.phases[2].nbytes
    assert offloaded.host_nbytes == pytest.approx(states, abs=256)
    assert offloaded.peak_nbytes == pytest.approx(here.peak_nbytes - states, abs=256)


@pytest.mark.parametrize("api", APIS)
def test_activations_on_the_host_leave_those_of_a_few_units(api: str) -> None:
    def planned(num_blocks: int, *, offload: bool) -> tuple[Any, int]:
        found = plan(meta(partial(Stack, num_blocks, 64)), 2, api=api, offload_activations=offload, **LONG)
        return found, max(moment.nbytes.activations for moment in found.phases)

    found, few = planned(8, offload=True)
    assert few == pytest.approx(planned(12, offload=True)[1], rel=0.01)
    assert few < planned(8, offload=False)[1] < planned(12, offload=False)[1]
    assert found.host_nbytes > 0
    assert "in host memory" in str(found)
    with pytest.raises(OptionError, match="one tree of several units"):
        plan(meta(partial(Stack, 4, 64)), 2, api=api, offload_activations=True, batch=LONG["batch"])


@pytest.mark.from_size("cover", "plans a step in many ways")
def test_a_search_takes_optimizer_states_to_the_host_before_everything() -> None:
    arguments: dict[str, Any] = {"batch": torch.empty(512, 64, device="meta"), "checkpointing": True}
    build = partial(Stack, 4, 64)
    kwargs: dict[str, Any] = {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy.FULL_SHARD, **arguments}
    least = plan(meta(build), 4, cpu_offload=CPUOffload(offload_optimizer=True), **kwargs)
    assert least.peak_nbytes < plan(meta(build), 4, **kwargs).peak_nbytes
    best = plan(meta(build), 4, fit=least.peak_nbytes, **arguments).choices[0]
    assert (best.offloads, best.offloads_optimizer) == (False, True)
    assert "optimizer offloaded" in str(best)
    assert plan(meta(build), 4, **{**arguments, **best.arguments}).peak_nbytes == best.peak_nbytes


def test_a_search_with_offloaded_activations_compares_plans_of_several_units() -> None:
    found = plan(
        meta(partial(Stack, 6, 64)), 4, fit="1GB", offload_activations=True, **{**WIDE, "auto_wrap_policy": None}
    )
    assert {choice.wrapping for choice in found.choices} == {"units of Block"}


@pytest.mark.from_size("cover", "plans a step in many ways")
def test_a_search_takes_the_plan_that_fits_at_the_least_cost() -> None:
    arguments: dict[str, Any] = {"batch": torch.empty(512, 64, device="meta")}
    largest = plan(meta(partial(Stack, 4, 64)), 4, fit="1TB", **arguments)
    assert largest.fits
    assert {choice.strategy for choice in largest.choices} == {"NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"}
    assert {choice.wrapping for choice in largest.choices} == {"one unit", "units of Block"}
    assert {choice.checkpointing for choice in largest.choices} == {"nothing", "every unit", "every Block"}
    assert largest.choices[0].checkpointing == "nothing"

    assert not any(choice.offloads for choice in largest.choices), "it is compared if nothing fits without it"
    without_offload = [choice.peak_nbytes for choice in largest.choices]
    tight = plan(meta(partial(Stack, 4, 64)), 4, fit=min(without_offload), **arguments)
    best = tight.choices[0]
    assert (best.offloads, best.peak_nbytes) == (False, min(without_offload))
    again = plan(meta(partial(Stack, 4, 64)), 4, **arguments, **best.arguments)
    assert again.peak_nbytes == tight.peak_nbytes, "the arguments of a choice give its plan"
    assert f"Take {best}" in str(tight)

    smallest = plan(meta(partial(Stack, 4, 64)), 4, fit=10, **arguments)
    assert not smallest.fits
    assert {choice.offloads for choice in smallest.choices} == {False, True}
    assert smallest.peak_nbytes == min(choice.peak_nbytes for choice in smallest.choices) < min(without_offload)
    assert "Nothing fits 10 B" in str(smallest)


def test_a_search_leaves_what_the_caller_has_chosen() -> None:
    found = plan(
        meta(partial(Stack, 4, 64)),
        4,
        fit="1GB",
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        checkpointing=False,
        cpu_offload=CPUOffload(False),
        **WIDE,
    )
    assert [str(choice) for choice in found.choices] == ["FULL_SHARD, the given policy, recomputing nothing"]
    hybrid = plan(meta(partial(Stack, 4, 64)), 4, num_replicas=2, fit="1GB", **WIDE)
    assert {choice.strategy for choice in hybrid.choices} == {"HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"}


class Reads(nn.Linear):
    """Takes a branch by a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Reader(torch.optim.SGD):
    """Reads a value in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        float(self.param_groups[0]["params"][0].sum())


def test_arguments_that_a_plan_cannot_use_are_refused() -> None:
    rows = torch.empty(16, 64, device="meta")
    with pytest.raises(OptionTypeError, match=r"batch must hold the tensors .* got \(16, 64\)"):
        plan(meta(Stack), 2, batch=(16, 64))
    with pytest.raises(OptionError, match="Reads or its loss reads values of tensors"):
        plan(meta(partial(Reads, 64, 64)), 2, batch=rows)
    with pytest.raises(OptionError, match="Reader cannot run on parameters without values"):
        plan(meta(partial(nn.Linear, 64, 64)), 2, batch=rows, optimizer=partial(Reader, lr=0.1))
    with pytest.raises(OptionError, match=r"needs a batch"):
        plan(meta(Stack), 2, fit="1GB")
    with pytest.raises(OptionError, match=r'bytes with a unit, as "80GB".*; got \'much\''):
        plan(meta(partial(Stack, 4, 64)), 2, fit="much", **WIDE)
    with pytest.raises(OptionError, match=r"api must be one of 'FullyShardedDataParallel', 'fully_shard'"):
        plan(meta(Stack), 2, api="ddp")
    with pytest.raises(OptionError, match="has no module of: Conv2d"):
        plan(meta(partial(Stack, 4, 64)), 2, checkpointing=[nn.Conv2d], **WIDE)
    with pytest.raises(OptionTypeError, match="checkpointing must hold True, False or module classes; got 3"):
        plan(meta(partial(Stack, 4, 64)), 2, checkpointing=[3], **WIDE)  # type: ignore[list-item]
    with pytest.raises(OptionError, match="bandwidth must be a positive number a second, or None; got 0"):
        plan(meta(Stack), 2, bandwidth=0)
    with pytest.raises(OptionError, match="device_type='gpu0' names no device"):
        plan(meta(Stack), 2, device_type="gpu0")
    with pytest.raises(OptionError, match="has no tensor that requires a gradient"):
        plan(meta(lambda: nn.Linear(64, 64).requires_grad_(False)), 2, batch=rows)
    with pytest.raises(OptionError, match="has no batch"):
        _ = plan(meta(Stack), 2).peak_nbytes


@pytest.mark.parametrize(
    "text, nbytes",
    [("80GB", 80 * 10**9), (" 80 GiB ", 80 * 2**30), ("1.5kB", 1500), (7, 7), ("12B", 12), ("2mb", 2 * 10**6)],
)
def test_sizes_are_read_with_decimal_and_binary_units(text: str | int, nbytes: int) -> None:
    assert nbytes_of(text) == nbytes


@pytest.mark.parametrize("size", ["12", "1.5k", "40Gb", "50%", "1,5GB", "-1GB", "1.2.3GB", "", "B", -1, float("nan")])
def test_a_size_without_a_unit_of_bytes_is_refused(size: str | float) -> None:
    with pytest.raises(
        OptionError, match=rf"^fit must be a number of bytes with a unit.*got {re.escape(repr(size))}\."
    ):
        nbytes_of(size, "fit")


@pytest.mark.parametrize(
    "nbytes, text", [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_600, "1.00 MB"), (12.34e9, "12.3 GB")]
)
def test_sizes_are_written_with_three_digits(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


def test_a_plan_is_drawn_and_says_what_a_picture_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need it")
    planned = plan(meta(partial(Stack, 4, 64)), 2, **WIDE)
    planned.save(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OptionError, match=r"plan\.xyz cannot be written as a picture"):
        planned.save(tmp_path / "plan.xyz")
    with pytest.raises(OptionError, match="has no batch"):
        plan(meta(Stack), 2).save(tmp_path / "empty.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"pip install matplotlib"):
        planned.save(tmp_path / "none.png")
