"""Cases of torch's core suite that are tested nowhere else: an expert of one rank, and whole weights in forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import assert_close
from tests.support.both_sides import TOLERANCE, Layout, batch_of
from tests.support.models import Layer
from tests.support.torch_and_ours import SHARDED, Side, on_both_sides, state_of
from tests.support.zoo import CASES


class Experts(nn.Module):
    """A shared layer before and after an expert that is this rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = Layer(5, 5)
        self.last = Layer(5, 1)
        torch.manual_seed(100 + rank)
        self.expert = Layer(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.expert(self.first(x)))


@on_both_sides(layouts=SHARDED)
def test_an_expert_of_one_rank_trains_alone_beside_shared_units(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    rank, case = dist.get_rank(), CASES["uneven sizes"]
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    replicas = [Experts(each) for each in range(dist.get_world_size())]
    for replica in replicas[1:]:
        replica.first, replica.last = replicas[0].first, replicas[0].last
    model = Experts(rank)
    with pytest.warns(UserWarning, match="NO_SHARD|world size|one rank") if side.is_torch else side.quiet():
        model.expert = side.wrap(model.expert, layout, process_group=groups[rank], use_orig_params=use_orig_params)
    model.first = side.wrap(model.first, layout, use_orig_params=use_orig_params)
    model = side.wrap(model, layout, use_orig_params=use_orig_params)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = [*replicas[0].first.parameters(), *replicas[0].last.parameters()]
    plain = torch.optim.SGD([*shared, *[p for replica in replicas for p in replica.expert.parameters()]], lr=0.1)
    for step in range(2):
        ours.zero_grad()
        plain.zero_grad()
        for source, replica in enumerate(replicas):
            (case.loss_of(replica, batch_of(case, source, step)) / len(replicas)).backward()
        for replica in replicas:
            for param in replica.expert.parameters():
                param.grad.mul_(len(replicas))  # an expert's loss is its own rank's alone
        case.loss_of(model, batch_of(case, rank, step)).backward()
        ours.step()
        plain.step()
    state = state_of(model)
    assert_close(state, {name: p.detach() for name, p in replicas[rank].state_dict().items()}, **TOLERANCE)
    return state


class TypeWatcher(nn.Module):
    """Notes the kind of its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        self.seen.append([tuple(weight.shape), weight.requires_grad])
        return self.linear(x)


@on_both_sides()
def test_a_module_holds_whole_weights_under_autograd_in_forward(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    model = side.wrap(
        nn.Sequential(TypeWatcher(), TypeWatcher()), layout, units=(TypeWatcher,), use_orig_params=use_orig_params
    )
    watchers = [module for module in model.modules() if isinstance(module, TypeWatcher)]
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 4))
    for watcher in watchers:
        assert [shape for shape, *_ in watcher.seen] == [(4, 4)] * 2
    return [watcher.seen for watcher in watchers]
