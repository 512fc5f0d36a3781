"""The cases of torch's suite of gradient accumulation.

Covered: any sequence of backwards with and without ``no_sync`` gives the gradients of one step over all batches, for
every strategy, prefetch and kind of parameters, and in a second step after the first.

Not covered: accumulation with offloaded parameters, which torch's class cannot do on a CPU; the memory that gathered
gradients take.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import assert_close
from tests.support.beside import average_gradients
from tests.support.both_sides import PLAIN, TOLERANCE, Layout, batch_of, build
from tests.support.torch_and_ours import BLOCKS, FULL, STRATEGIES, Side, on_both_sides, sgd, state_of

# For each backward of a step whether it runs inside ``no_sync``.
SEQUENCES = {
    "unsynced, synced": (True, False),
    "three unsynced, synced": (True, True, True, False),
    "unsynced, synced, unsynced, synced": (True, False, True, False),
    "all synced": (False, False, False),
    "synced, two unsynced, synced": (False, True, True, False),
}


@on_both_sides(layouts=STRATEGIES)
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST"])
def test_accumulated_gradients_are_those_of_all_batches(
    side: Side, layout: Layout, use_orig_params: bool, sequence: str, prefetch: str
) -> Any:
    if prefetch == "BACKWARD_POST" and not sequence.startswith("unsynced"):
        return None
    case = BLOCKS
    model = side.wrap_case(
        case, layout, use_orig_params=use_orig_params, backward_prefetch=side.api.BackwardPrefetch[prefetch]
    )
    plain = build(case)
    ours, theirs = sgd(model), sgd(plain)
    flags = SEQUENCES[sequence]
    for step in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        for micro, unsynced in enumerate(flags):
            index = step * len(flags) + micro
            case.loss_of(plain, batch_of(case, dist.get_rank(), index)).backward()
            average_gradients(plain)
            with model.no_sync() if unsynced else nullcontext():
                case.loss_of(model, batch_of(case, dist.get_rank(), index)).backward()
        ours.step()
        theirs.step()
    state = state_of(model)
    assert_close(state, {name: value.detach() for name, value in plain.state_dict().items()}, **TOLERANCE)
    return state


@on_both_sides(layouts=PLAIN)
def test_zeroing_between_steps_clears_what_no_sync_kept(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    case = BLOCKS
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    with model.no_sync():
        case.loss_of(model, batch_of(case, dist.get_rank(), 0)).backward()
    case.loss_of(model, batch_of(case, dist.get_rank(), 1)).backward()
    model.zero_grad()
    case.loss_of(model, batch_of(case, dist.get_rank(), 2)).backward()
    sgd(model).step()
    return state_of(model)


@on_both_sides(layouts=FULL)
def test_only_the_root_gives_no_sync(side: Side, layout: Layout, use_orig_params: bool) -> None:
    model = side.wrap_case(BLOCKS, layout, use_orig_params=use_orig_params)
    assert model.check_is_root()
    with pytest.raises(RuntimeError), side.units(model)[1].no_sync():
        pass


@on_both_sides(layouts=FULL)
def test_no_sync_ends_with_an_exception_inside_it(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    case = BLOCKS
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError("inside")
    case.loss_of(model, batch_of(case, dist.get_rank(), 0)).backward()
    sgd(model).step()
    assert isinstance(model, nn.Module)
    return state_of(model)


class Either(nn.Module):
    """Calls one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.one = nn.Linear(5, 1)
        self.two = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return getattr(self, name)(x)


@on_both_sides(layouts=PLAIN, torch_cannot="it asserts in the backward of the unit that was not in the last one")
def test_a_unit_outside_the_synced_backward_keeps_what_no_sync_gave_it_until_its_next(
    side: Side, layout: Layout, use_orig_params: bool
) -> None:
    model = side.wrap(Either(), layout, units=(nn.Linear,), use_orig_params=use_orig_params)
    plain = Either()
    x = torch.ones(2, 5)
    with model.no_sync():
        model(x, "one").sum().backward()
    for name in ("two", "one"):
        model(x, name).sum().backward()
    for name in ("one", "two", "one"):
        plain(x, name).sum().backward()
    for each in (model, plain):
        sgd(each).step()
    assert_close(state_of(model), {name: value.detach() for name, value in plain.state_dict().items()}, **TOLERANCE)
