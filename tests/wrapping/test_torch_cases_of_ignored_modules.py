"""Cases of torch's suite of ignored modules that are tested nowhere else: local gradients, and unlike ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import OWN_PARAMETERS
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
