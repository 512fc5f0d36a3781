"""The cases of torch's suite of ``use_orig_params=True``.

Covered: parameter groups of unlike hyperparameters, frozen parameters within units, several optimizers, forwards
before a backward, ``summon_full_params`` between two forwards, names and shapes outside and inside forward, this
rank's slices, writing parameters and gradients through ``.data`` and ``.grad`` and by assigning new ones, shapes that
do not fit, ``no_sync`` with and without mixed precision, units of unlike ``requires_grad``, empty slices in foreach
optimizers, and that both kinds of parameters train alike.

Not covered: compiled models (tests/compile); parameters read between a forward and its backward, which torch leaves
whole there with SHARD_GRAD_OP and which are always slices here (differences.md); internal state of ``FlatParamHandle``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import assert_close, assert_equal
from tests.support.beside import adamw, average_gradients
from tests.support.both_sides import PLAIN, TOLERANCE, Layout, batch_of, build
from tests.support.models import Layer
from tests.support.torch_and_ours import (
    BLOCKS,
    ORIG,
    SHARDED,
    STRATEGIES,
    Side,
    beside_replica,
    on_both_sides,
    sgd,
    state_of,
    train,
)
from tests.support.zoo import CASES

UNEVEN = CASES["uneven sizes"]


def batch(rank: int, step: int) -> Any:
    return batch_of(UNEVEN, rank, step)


# -- hyperparameters -----------------------------------------------------------------------------------------------


def grouped(optimizer: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """Weights and biases with unlike weight decay and learning rate."""
    named = list(model.named_parameters())
    weights = [param for name, param in named if name.endswith("weight")]
    others = [param for name, param in named if not name.endswith("weight")]
    return optimizer([{"params": weights, "weight_decay": 0.3}, {"params": others, "lr": 0.01, "weight_decay": 0.0}])


OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.05, eps=0.1),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.05, eps=0.1, foreach=True),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "momentum foreach": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
}


@on_both_sides(layouts=STRATEGIES, kinds=ORIG)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_parameter_groups_of_unlike_hyperparameters_train_as_unwrapped(
    side: Side, layout: Layout, use_orig_params: bool, optim: str
) -> Any:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    optimizer = partial(grouped, OPTIMIZERS[optim])
    return beside_replica(model, build(UNEVEN), UNEVEN.loss_of, batch, optimizer=optimizer)


@on_both_sides(kinds=ORIG)
@pytest.mark.parametrize("frozen", ["biases", "one weight", "last unit"])
def test_frozen_parameters_of_a_unit_keep_their_values(
    side: Side, layout: Layout, use_orig_params: bool, frozen: str
) -> Any:
    def freeze(model: nn.Module) -> nn.Module:
        for name, param in model.named_parameters():
            fits = {"biases": "bias" in name, "one weight": name == "first.linear.weight", "last unit": "last." in name}
            param.requires_grad_(not fits[frozen])
        return model

    model = side.wrap(freeze(build(UNEVEN)), layout, units=UNEVEN.units, use_orig_params=use_orig_params)
    return beside_replica(model, freeze(build(UNEVEN)), UNEVEN.loss_of, batch)


@on_both_sides(kinds=ORIG)
def test_several_optimizers_of_which_some_skip_steps_train_as_unwrapped(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        named = list(model.named_parameters())
        return [
            torch.optim.AdamW([param for name, param in named if "weight" in name], lr=0.05, eps=0.1),
            torch.optim.SGD([param for name, param in named if "weight" not in name], lr=0.1, momentum=0.5),
        ]

    rank = dist.get_rank()
    model, plain = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params), build(UNEVEN)
    ours, theirs = optimizers(model), optimizers(plain)
    # In the second step only the first optimizer clears and steps, so that the others' gradients add up.
    for step, active in enumerate([(0, 1), (0,), (0, 1)]):
        for index in active:
            ours[index].zero_grad()
            theirs[index].zero_grad()
        UNEVEN.loss_of(plain, batch(rank, step)).backward()
        average_gradients(plain)
        UNEVEN.loss_of(model, batch(rank, step)).backward()
        for index in active:
            ours[index].step()
            theirs[index].step()
    state = state_of(model)
    assert_close(state, {name: value.detach() for name, value in plain.state_dict().items()}, **TOLERANCE)
    return state


# -- forwards and backwards ----------------------------------------------------------------------------------------


@on_both_sides()
def test_both_kinds_train_alike_through_two_forwards_and_a_summon_between_them(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    optimizer = adamw(model)
    rank = dist.get_rank()
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            first = model(batch(rank, step)["x"])
        with side.FSDP.summon_full_params(model):
            seen.append([param.detach().clone() for param in model.parameters()])
        loss = UNEVEN.loss_of(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        seen.append([first, loss.detach()])
    # A second round: the forward that is differentiated is the first of two.
    loss = UNEVEN.loss_of(model, batch(rank, 7)) + UNEVEN.loss_of(model, batch(rank, 8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"seen": seen, "state": state_of(model)}


class NameWatcher(nn.Module):
    """Notes names and shapes of its parameters in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.ones(5))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append([(name, tuple(param.shape)) for name, param in self.named_parameters()])
        return self.linear(x) * self.gain


@on_both_sides(kinds=ORIG)
def test_names_and_shapes_inside_forward_are_the_plain_model_s(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    watcher = NameWatcher()
    expected = [(name, tuple(param.shape)) for name, param in watcher.named_parameters()]
    model = side.wrap(nn.Sequential(watcher, nn.Linear(5, 1)), layout, units=(NameWatcher,), use_orig_params=True)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    assert watcher.seen == [expected, expected]
    return watcher.seen


@on_both_sides(layouts=PLAIN)
def test_names_and_slices_outside_forward_are_the_same(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(BLOCKS, layout, use_orig_params=use_orig_params)

    def parameters() -> Any:
        if use_orig_params:
            return {name: param.detach().clone() for name, param in model.named_parameters()}
        return [name for name, _ in model.named_parameters()]

    before = parameters()
    train(model, BLOCKS, sgd(model))
    return {"before": before, "after": parameters()}


@on_both_sides(kinds=ORIG)
def test_gradients_are_slices_like_their_parameters(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    UNEVEN.loss_of(model, batch(dist.get_rank(), 0)).backward()
    grads = {}
    for name, param in model.named_parameters():
        if param.numel() > 0:
            assert param.grad.shape == param.shape, name
            grads[name] = param.grad.clone()
    return grads


# -- write-back ----------------------------------------------------------------------------------------------------


@on_both_sides(kinds=ORIG)
@pytest.mark.parametrize("how", ["in place", "data", "new parameter", "copy under no_grad"])
@pytest.mark.parametrize("stepped", [False, True], ids=["before the first step", "between steps"])
def test_changed_parameters_are_those_of_the_next_forward(
    side: Side, layout: Layout, use_orig_params: bool, how: str, stepped: bool
) -> Any:
    rank = dist.get_rank()
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    if stepped:
        train(model, UNEVEN, sgd(model), range(1))
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            if "bias" not in name:
                continue
            changed = torch.full_like(param, 0.5)
            if how == "in place":
                param.data.copy_(changed)
            elif how == "data":
                param.data = changed
            elif how == "new parameter":
                setattr(module, name, nn.Parameter(changed))
            else:
                with torch.no_grad():
                    param.copy_(changed)
    output = model(batch(rank, 0)["x"])
    state = state_of(model)
    for name, value in state.items():
        if name.endswith("bias"):
            assert_equal(value, torch.full_like(value, 0.5), what=name)
    return {"output": output.detach(), "state": state}


@on_both_sides(kinds=ORIG)
@pytest.mark.parametrize("how", ["in place", "data", "assigned", "none"])
def test_changed_gradients_are_those_of_the_optimizer_s_step(
    side: Side, layout: Layout, use_orig_params: bool, how: str
) -> Any:
    case = BLOCKS
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    optimizer = sgd(model)
    # The second backward adds to what was written after the first.
    for step in range(2):
        case.loss_of(model, batch_of(case, dist.get_rank(), step)).backward()
        for name, param in [] if step else model.named_parameters():
            if param.grad is None or param.numel() == 0 or "weight" not in name:
                continue
            if how == "in place":
                param.grad.fill_(0.25)
            elif how == "data":
                param.grad.data = torch.full_like(param, 0.25)
            elif how == "assigned":
                param.grad = torch.full_like(param, 0.25)
            else:
                param.grad = None
        optimizer.step()
    return state_of(model)


@on_both_sides(layouts=SHARDED, kinds=ORIG)
def test_a_new_parameter_of_a_wrong_size_is_refused_in_the_next_forward(
    side: Side, layout: Layout, use_orig_params: bool
) -> None:
    model = side.wrap(nn.Linear(4, 4, bias=False), layout, use_orig_params=use_orig_params)
    model.module.weight = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 4))


# -- no_sync -------------------------------------------------------------------------------------------------------


@on_both_sides(layouts=PLAIN)
def test_gradients_accumulate_in_no_sync_as_in_one_step_over_all_batches(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    # A unit of one element would not do: torch takes its shard for the whole of it.
    case, rank = BLOCKS, dist.get_rank()
    model, reference = (side.wrap_case(case, layout, use_orig_params=use_orig_params) for _ in range(2))
    with model.no_sync():
        case.loss_of(model, batch_of(case, rank, 0)).backward()
        case.loss_of(model, batch_of(case, rank, 1)).backward()
    case.loss_of(model, batch_of(case, rank, 2)).backward()
    for step in range(3):
        case.loss_of(reference, batch_of(case, rank, step)).backward()
    for each in (model, reference):
        sgd(each).step()
    assert_close(state_of(model), state_of(reference), **TOLERANCE)
    return state_of(model)


@on_both_sides(layouts=SHARDED, tolerance={"rtol": 1e-2, "atol": 1e-2})
@pytest.mark.parametrize("reduced", [None, torch.float32], ids=["reduce bf16", "reduce fp32"])
def test_no_sync_goes_with_mixed_precision(
    side: Side, layout: Layout, use_orig_params: bool, reduced: torch.dtype | None
) -> Any:
    precision = side.api.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params, mixed_precision=precision)
    optimizer = sgd(model)
    rank = dist.get_rank()

    def loss(step: int) -> torch.Tensor:
        return model(batch(rank, step)["x"]).float().square().mean()

    with model.no_sync():
        loss(0).backward()
    loss(1).backward()
    dtypes = sorted({str(param.grad.dtype) for param in model.parameters() if param.grad is not None})
    assert dtypes == ["torch.float32"]
    optimizer.step()
    return {"dtypes": dtypes, "state": state_of(model)}


# -- construction --------------------------------------------------------------------------------------------------


def half_frozen() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(5, 5), nn.Linear(5, 1))
    model[0].linear.weight.requires_grad_(False)
    return model


@on_both_sides(layouts=SHARDED)
def test_a_unit_of_frozen_and_trained_parameters_needs_original_parameters(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    if not use_orig_params:
        with pytest.raises(ValueError):
            side.wrap(half_frozen(), layout, use_orig_params=False)
        return None
    model = side.wrap(half_frozen(), layout, use_orig_params=True)
    optimizer = sgd(model)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return {"requires": [p.requires_grad for p in model.parameters()], "state": state_of(model)}


@on_both_sides(num_ranks=4, layouts=SHARDED, kinds=ORIG)
@pytest.mark.parametrize("optim", ["adamw foreach", "momentum foreach", "adam"])
def test_optimizers_step_over_ranks_that_hold_nothing_of_a_parameter(
    side: Side, layout: Layout, use_orig_params: bool, optim: str
) -> Any:
    model = side.wrap_case(UNEVEN, layout, use_orig_params=use_orig_params)
    train(model, UNEVEN, OPTIMIZERS[optim](model.parameters()), range(2))
    return state_of(model)
