"""The cases of torch's suite of ignored modules.

Covered: ignored modules of a transformer with and without a policy, given as ``ignored_modules`` and as
``ignored_states``; children that are ignored by their unit or by the root alone; ignored parameters under a policy;
ignored modules outside the wrapped one; unlike ignored modules on the ranks, also before managed ones; refused
arguments and warnings. Ignored parameters keep identity, shape, name and local gradient, and are whole in state dicts.

Not covered: nothing that torch's suite has on this.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import OWN_PARAMETERS, OWN_STATISTICS
from tests.support.both_sides import Layout, build
from tests.support.kit import seeded
from tests.support.models import Layer
from tests.support.torch_and_ours import SHARDED, Side, on_both_sides, sgd, state_of, train
from tests.support.zoo import CASES

# Ignored layers are trained on each rank's own batches here, as by FSDP1.
pytestmark = OWN_PARAMETERS
TRANSFORMER = CASES["transformer"]


def steps(model: nn.Module, case: Any = TRANSFORMER) -> Any:
    """A short training, after which ignored parameters differ from rank to rank."""
    losses = train(model, case, sgd(model), range(2))
    return [losses, state_of(model)]


@on_both_sides()
@pytest.mark.parametrize("auto", [True, False], ids=["policy", "one unit"])
@pytest.mark.parametrize("given", ["ignored_modules", "ignored_states of modules", "ignored_states of parameters"])
def test_an_ignored_layer_keeps_its_parameters_and_its_local_gradients(
    side: Side, layout: Layout, use_orig_params: bool, auto: bool, given: str
) -> Any:
    model = build(TRANSFORMER)
    ignored = [model.layers[1]]
    kept = [*model.layers[1].parameters()]
    managed = sum(param.numel() for param in model.parameters()) - sum(param.numel() for param in kept)
    options = {
        "ignored_modules": {"ignored_modules": ignored},
        "ignored_states of modules": {"ignored_states": ignored},
        "ignored_states of parameters": {"ignored_states": kept},
    }[given]
    units = (nn.TransformerEncoderLayer,) if auto else ()
    wrapped = side.wrap(model, layout, units=units, use_orig_params=use_orig_params, **options)
    names = [name for name, _ in wrapped.named_parameters()]
    assert {id(param) for param in kept} <= {id(param) for param in wrapped.parameters()}
    with side.FSDP.summon_full_params(wrapped):
        assert sum(param.numel() for param in wrapped.parameters()) == managed + sum(p.numel() for p in kept)
        assert all(p.shape == q.shape for p, q in zip(model.layers[1].parameters(), kept, strict=True))
    result = steps(wrapped)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, float(kept[0].detach().double().sum()))
    assert len(set(gathered)) == dist.get_world_size()
    return [names if not auto else None, result]


class Nest(nn.Module):
    """Layers inside a block inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(Layer(5, 5), nn.Linear(5, 5, bias=False), Layer(5, 5))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("pass_to", ["unit", "root", "both"])
def test_what_a_unit_or_its_root_ignores_is_managed_by_neither(
    side: Side, layout: Layout, use_orig_params: bool, pass_to: str
) -> Any:
    model = seeded(Nest)
    ignored = [model.block[1]]
    weight = model.block[1].weight
    block_options = {"ignored_modules": ignored} if pass_to in ("unit", "both") else {}
    root_options = {"ignored_modules": ignored} if pass_to in ("root", "both") else {}
    if pass_to != "root":
        model.block = side.wrap(model.block, layout, use_orig_params=use_orig_params, **block_options)
    model = side.wrap(model, layout, use_orig_params=use_orig_params, **root_options)
    assert any(param is weight for param in model.parameters())
    assert weight.shape == (5, 5)
    return steps(model, CASES["uneven sizes"])


@on_both_sides(layouts=SHARDED)
def test_ignored_parameters_of_auto_wrapped_units_are_left_alone(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    model = seeded(Nest)
    ignored = [model.block[0].linear.bias, model.head.weight]
    wrapped = side.wrap(model, layout, units=(Layer,), ignored_states=ignored, use_orig_params=use_orig_params)
    now = [*wrapped.parameters()]
    assert all(any(param is each for each in now) for param in ignored)
    sizes = [unit._flat_param.numel() if unit._has_params else 0 for unit in side.units(wrapped)]
    return [sizes, steps(wrapped, CASES["uneven sizes"])]


@on_both_sides(layouts=SHARDED)
def test_ignored_modules_may_lie_outside_the_wrapped_one(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model = seeded(Nest)
    outside = [model.head, model.block[1]]
    weight = model.block[1].weight
    model.block[0] = side.wrap(model.block[0], layout, ignored_modules=outside, use_orig_params=use_orig_params)
    model.block = side.wrap(model.block, layout, ignored_modules=outside, use_orig_params=use_orig_params)
    assert any(param is weight for param in model.parameters())
    return steps(model, CASES["uneven sizes"])


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("auto", [True, False], ids=["policy", "one unit"])
def test_ranks_may_ignore_different_modules(side: Side, layout: Layout, use_orig_params: bool, auto: bool) -> Any:
    # Each rank has an ignored layer more of its own, which no other rank has.
    model = seeded(Nest)
    extra = nn.Linear(5, 5)
    model.extra = nn.ModuleList([extra] if dist.get_rank() == 0 else [nn.Linear(5, 5), nn.Linear(5, 5)])
    options: dict[str, Any] = {"ignored_modules": list(model.extra), "use_orig_params": use_orig_params}
    wrapped = side.wrap(model, layout, units=(Layer,) if auto else (), **options)
    return train(wrapped, CASES["uneven sizes"], sgd(wrapped), range(2))


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("wrapped_by", ["policy", "hand"])
@pytest.mark.parametrize("given", ["modules", "parameters"])
def test_ranks_may_ignore_unlike_numbers_of_layers_before_managed_ones(
    side: Side, layout: Layout, use_orig_params: bool, wrapped_by: str, given: str
) -> Any:
    # The managed layers after them have other indices on each rank.
    model = seeded(Nest)
    ignored = [seeded(lambda: nn.Linear(5, 5)) for _ in range(dist.get_rank() + 1)]
    model.block = nn.Sequential(*model.block[:1], *ignored, *model.block[1:])
    chosen: dict[str, Any] = {
        "modules": {"ignored_modules": ignored},
        # An iterator, which can be read once.
        "parameters": {"ignored_states": (param for layer in ignored for param in layer.parameters())},
    }[given]
    if wrapped_by == "policy":
        wrapped = side.wrap(model, layout, units=(Layer,), use_orig_params=use_orig_params, **chosen)
    else:
        model.block = side.wrap(model.block, layout, use_orig_params=use_orig_params, **chosen)
        wrapped = side.wrap(model, layout, use_orig_params=use_orig_params, ignored_modules=[])
    return steps(wrapped, CASES["uneven sizes"])


@OWN_STATISTICS
@on_both_sides(layouts=SHARDED)
def test_an_ignored_buffer_and_module_appear_in_the_state_dict(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    case = CASES["batch norm"]
    model = build(case)
    wrapped = side.wrap(
        model, layout, units=case.units, ignored_modules=[model.stages[0].norm], use_orig_params=use_orig_params
    )
    losses = train(wrapped, case, sgd(wrapped), range(2))
    state = state_of(wrapped)
    fresh = build(case)
    fresh.load_state_dict(state)
    again = build(case)
    again = side.wrap(again, layout, units=case.units, ignored_modules=[again.stages[0].norm], use_orig_params=True)
    again.load_state_dict(state)
    return [losses, state, state_of(again)]


@on_both_sides(layouts=SHARDED)
def test_a_wrapper_cannot_be_ignored_and_ignoring_all_warns(side: Side, layout: Layout, use_orig_params: bool) -> None:
    model = seeded(Nest)
    model.block = side.wrap(model.block, layout, use_orig_params=use_orig_params)
    with pytest.raises(ValueError):
        side.wrap(model, layout, ignored_modules=[model.block], use_orig_params=use_orig_params)
    model = seeded(Nest)
    with pytest.warns(UserWarning, match="(?i)ignore"):
        side.wrap(model, layout, ignored_modules=[model], use_orig_params=use_orig_params)


@on_both_sides(layouts=SHARDED)
def test_wrong_arguments_are_refused(side: Side, layout: Layout, use_orig_params: bool) -> None:
    def refused(error: type[Exception], **options: Any) -> None:
        with pytest.raises(error):
            side.wrap(seeded(Nest), layout, use_orig_params=use_orig_params, **options)

    model = seeded(Nest)
    refused(ValueError, ignored_modules=[model.head], ignored_states=[model.head.weight])
    refused(ValueError, ignored_states=[model.head, model.head.weight])
    refused((TypeError, ValueError), ignored_modules=[model.head.weight])
    refused((TypeError, ValueError), ignored_states=[3])
