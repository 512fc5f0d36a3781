"""The cases of torch's suite of ``summon_full_params``.

Covered: values, shapes and buffers inside, on all ranks or on rank 0, on the CPU or in place; written changes that are
kept or dropped; a parameter of one element; ``recurse``; one unit of a tree; which units are sharded after it; names
inside; gradients inside (read, written, none); several trees below a plain module; calls between
forward and backward, from forward and from backward; arguments that exclude each other.

Not covered: gradients of flat parameters and offloading with NO_SHARD, which torch refuses and ours gives;
the shape of the padded internal tensor and of ``FlatParamHandle``'s storage; prefetch of the internal
gather. Names inside as seen from a plain parent (docs/differences.md).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import assert_close, assert_equal
from tests.support.beside import average_gradients
from tests.support.both_sides import PLAIN, TOLERANCE, Layout, batch_of, build
from tests.support.models import Layer
from tests.support.torch_and_ours import BLOCKS, ORIG, SHARDED, STRATEGIES, Side, on_both_sides, sgd, state_of, train
from tests.support.zoo import CASES

CASE = BLOCKS
UNEVEN = CASES["uneven sizes"]


def copies(named: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in named}


@on_both_sides(layouts=STRATEGIES)
@pytest.mark.parametrize("rank0_only", [False, True], ids=["all ranks", "rank 0"])
@pytest.mark.parametrize("offload", [False, True], ids=["in place", "offloaded"])
def test_parameters_and_buffers_inside_are_the_plain_model_s(
    side: Side, layout: Layout, use_orig_params: bool, rank0_only: bool, offload: bool
) -> Any:
    if offload and layout.strategy == "NO_SHARD":
        return None  # refused by torch, allowed here
    found = []
    for case in (UNEVEN, CASES["buffers"]):
        model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
        plain = build(case)
        with side.FSDP.summon_full_params(model, rank0_only=rank0_only, offload_to_cpu=offload, writeback=False):
            inside = copies(model.named_parameters())
            buffers = copies(model.named_buffers())
        assert_equal(buffers, copies(plain.named_buffers()))
        if not rank0_only or dist.get_rank() == 0:
            assert_equal(inside, copies(plain.named_parameters()))
        elif layout.strategy == "NO_SHARD" or not use_orig_params:
            inside = {}
        found.append([inside, buffers])
    return found


@on_both_sides(layouts=PLAIN)
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("changer", ["all ranks", "each rank its own"])
def test_written_changes_are_kept_with_writeback_alone(
    side: Side, layout: Layout, use_orig_params: bool, writeback: bool, changer: str
) -> Any:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    before = state_of(model)
    with side.FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
        for param in model.parameters():
            param.add_(1 if changer == "all ranks" else 1 + dist.get_rank())
    if layout.strategy == "NO_SHARD":
        # Nothing is sharded, so that the parameters themselves are changed; each rank then has its own.
        return state_of(model) if writeback else None
    after = state_of(model)
    if not writeback:
        assert_equal(after, before)
    elif changer == "all ranks":
        assert_equal(after, {name: value + 1 for name, value in before.items()})
    return after


@on_both_sides(layouts=PLAIN)
@pytest.mark.parametrize("writeback", [True, False])
def test_a_parameter_of_one_element_belongs_to_the_first_rank(
    side: Side, layout: Layout, use_orig_params: bool, writeback: bool
) -> Any:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(1))
    model = side.wrap(module, layout, use_orig_params=use_orig_params)
    with side.FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
        model.module.weight.fill_(dist.get_rank() + 2)
    with side.FSDP.summon_full_params(model, writeback=False):
        value = float(model.module.weight.detach())
    if layout.strategy != "NO_SHARD":
        assert value == (2.0 if writeback else 0.0)
        return value
    return value if writeback else None


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("stage", ["new", "after forward", "after a step"])
def test_units_are_sharded_after_it_as_before(side: Side, layout: Layout, use_orig_params: bool, stage: str) -> Any:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    batch = batch_of(CASE, dist.get_rank(), 0)
    if stage == "after forward":
        with torch.no_grad():
            CASE.loss_of(model, batch)
    elif stage == "after a step":
        train(model, CASE, sgd(model), range(1))
    assert model.check_is_root()
    before = side.sharded_units(model)
    with side.FSDP.summon_full_params(model):
        shapes = [tuple(param.shape) for param in model.parameters()]
    assert shapes == [tuple(param.shape) for param in build(CASE).parameters()]
    assert side.sharded_units(model)[1:] == before[1:]
    return state_of(model)


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("recurse", [True, False])
def test_recurse_reaches_the_units_below(side: Side, layout: Layout, use_orig_params: bool, recurse: bool) -> Any:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    plain = {name: tuple(param.shape) for name, param in build(CASE).named_parameters()}
    with side.FSDP.summon_full_params(model, recurse=recurse):
        inside = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assert inside["head.weight"] == plain["head.weight"]
    assert (inside == plain) is recurse
    return inside


@on_both_sides(layouts=SHARDED)
def test_one_unit_of_a_tree_can_be_summoned_alone(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    train(model, CASE, sgd(model), range(1))
    block = model.module.blocks[0]
    with side.FSDP.summon_full_params(block):
        inside = copies(block.named_parameters())
    expected = {name[9:]: value for name, value in state_of(model).items() if name.startswith("blocks.0.")}
    assert_equal(inside, expected)
    return inside


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("which", ["root", "unit"])
def test_names_inside_are_the_plain_model_s(side: Side, layout: Layout, use_orig_params: bool, which: str) -> Any:
    case = CASES["buffers"]
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    plain: nn.Module = build(case)
    if which == "unit":
        model, plain = model.module.stages[0], plain.stages[0]
    found = []
    for prefix in ("", "p"):
        for recurse in (True, False):
            with side.FSDP.summon_full_params(model):
                params = [name for name, _ in model.named_parameters(prefix=prefix, recurse=True)]
                buffers = [name for name, _ in model.named_buffers(prefix=prefix, recurse=True)]
            if recurse:
                assert params == [name for name, _ in plain.named_parameters(prefix=prefix)]
                assert buffers == [name for name, _ in plain.named_buffers(prefix=prefix)]
            found.append([params, buffers])
    return found


class Holder(nn.Module):
    """A plain module with two trees below."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Layer(5, 5)
        self.two = nn.Sequential(Layer(5, 5), nn.Linear(5, 1))


@on_both_sides(layouts=SHARDED)
def test_trees_below_a_plain_module_are_all_summoned(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    torch.manual_seed(1)
    model = Holder()
    expected = [param.detach().clone() for param in model.parameters()]
    model.one = side.wrap(model.one, layout, use_orig_params=use_orig_params)
    model.two = side.wrap(model.two, layout, use_orig_params=use_orig_params)
    with side.FSDP.summon_full_params(model):
        found = [param.detach().clone() for param in model.parameters()]
    assert_equal(found, expected)
    with side.FSDP.summon_full_params(nn.Linear(2, 2)):
        pass
    return found


# -- gradients -----------------------------------------------------------------------------------------------------


def mean_gradients(steps: int) -> list[torch.Tensor]:
    plain = build(UNEVEN)
    for step in range(steps):
        UNEVEN.loss_of(plain, batch_of(UNEVEN, dist.get_rank(), step)).backward()
        average_gradients(plain)
    return [param.grad for param in plain.parameters()]


@on_both_sides(layouts=PLAIN, kinds=ORIG)
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("rank0_only", [False, True], ids=["all ranks", "rank 0"])
def test_gradients_inside_are_whole_and_can_be_written(
    side: Side, layout: Layout, use_orig_params: bool, writeback: bool, rank0_only: bool
) -> Any:
    if writeback and rank0_only:
        return None
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    UNEVEN.loss_of(model, batch_of(UNEVEN, dist.get_rank(), 0)).backward()
    options = {"writeback": writeback, "rank0_only": rank0_only, "with_grads": True}
    inside, means = [], mean_gradients(1)
    with side.FSDP.summon_full_params(model, **options):
        if not rank0_only or dist.get_rank() == 0:
            inside = [param.grad.clone() for param in model.parameters()]
            assert_close(inside, means, **TOLERANCE)
            if layout.strategy != "NO_SHARD" or writeback:
                for param in model.parameters():
                    param.grad.fill_(0.5)
    with side.FSDP.summon_full_params(model, with_grads=True, writeback=False):
        after = [param.grad.clone() for param in model.parameters()]
    expected = [torch.full_like(grad, 0.5) for grad in after] if writeback else means
    assert_close(after, expected, **TOLERANCE)
    return [inside, after]


@on_both_sides(layouts=PLAIN, kinds=ORIG)
def test_absent_gradients_are_none_inside(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    with side.FSDP.summon_full_params(model, with_grads=True):
        assert [param.grad for param in model.parameters()] == [None] * 7
    UNEVEN.loss_of(model, batch_of(UNEVEN, dist.get_rank(), 0)).backward()
    for param in model.module.first.parameters():
        param.grad = None
    with side.FSDP.summon_full_params(model, with_grads=True, writeback=False):
        inside = {name: param.grad is None for name, param in model.named_parameters()}
        grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    assert [name for name, absent in inside.items() if absent] == ["first.linear.weight", "first.linear.bias"]
    return grads


@on_both_sides(layouts=SHARDED, kinds=ORIG)
def test_gradients_survive_a_summon_without_them(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    UNEVEN.loss_of(model, batch_of(UNEVEN, dist.get_rank(), 0)).backward()
    with side.FSDP.summon_full_params(model):
        pass
    sgd(model).step()
    return state_of(model)


@on_both_sides(layouts=PLAIN)
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("with_grads", [True, False], ids=["with gradients", "without"])
def test_a_summon_between_forward_and_backward_changes_no_gradient(
    side: Side, layout: Layout, use_orig_params: bool, writeback: bool, with_grads: bool
) -> Any:
    if with_grads and not use_orig_params:
        return None
    model = side.wrap_case(CASE, layout, use_orig_params=use_orig_params)
    inside = []
    for step in range(2):
        loss = CASE.loss_of(model, batch_of(CASE, dist.get_rank(), step))
        with side.FSDP.summon_full_params(model, writeback=writeback, with_grads=with_grads):
            inside.append([param.detach().clone() for param in model.parameters()])
        loss.backward()
    if layout.strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        assert all(side.sharded_units(model))
    sgd(model).step()
    return [inside, state_of(model)]


# -- refused -------------------------------------------------------------------------------------------------------


@on_both_sides(layouts=SHARDED)
def test_rank_zero_alone_cannot_write_back(side: Side, layout: Layout, use_orig_params: bool) -> None:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    with (
        pytest.raises(NotImplementedError),
        side.FSDP.summon_full_params(model, rank0_only=True, writeback=True),
    ):
        pass


@on_both_sides(layouts=SHARDED, kinds=ORIG)
def test_gradients_cannot_be_offloaded(side: Side, layout: Layout, use_orig_params: bool) -> None:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    with (
        pytest.raises(NotImplementedError),
        side.FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True, writeback=False),
    ):
        pass


class Caller(nn.Module):
    """Summons its own unit in forward, or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.summon: Any = None
        self.where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            self.summon()
        y = self.linear(x)
        if self.where == "backward":
            y.register_hook(lambda _grad: self.summon())
        return y


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_summon_inside_forward_or_backward_is_refused(
    side: Side, layout: Layout, use_orig_params: bool, where: str
) -> None:
    caller = Caller()
    model = side.wrap(nn.Sequential(caller, nn.Linear(5, 1)), layout, units=(Caller,), use_orig_params=use_orig_params)

    def summon() -> None:
        with side.FSDP.summon_full_params(model):
            pass

    caller.summon, caller.where = summon, where
    with pytest.raises((ValueError, AssertionError)):
        model(torch.ones(2, 5)).sum().backward()


@on_both_sides(layouts=SHARDED, kinds=(False,))
@pytest.mark.parametrize("inside", ["summon", "forward"])
def test_a_summon_and_a_forward_inside_a_summon_are_refused(
    side: Side, layout: Layout, use_orig_params: bool, inside: str
) -> None:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)

    def nested() -> None:
        with side.FSDP.summon_full_params(model):
            if inside == "forward":
                UNEVEN.loss_of(model, batch_of(UNEVEN, dist.get_rank(), 0))
            else:
                with side.FSDP.summon_full_params(model):
                    pass

    with pytest.raises((AssertionError, ValueError)):
        nested()
