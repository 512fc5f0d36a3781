"""Cases of torch's suite of communication hooks that are tested nowhere else: sizes, and gradients of ``no_sync``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support import assert_close
from tests.support.beside import adamw
from tests.support.both_sides import TOLERANCE, Layout, batch_of
from tests.support.torch_and_ours import BLOCKS, Side, on_both_sides, state_of

CASE = BLOCKS


class Calls:
    """The state of a hook, which notes the arguments of its calls."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.sizes: list[Any] = []


def mean(state: Calls, grad: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """The mean over ranks, times the state's factor."""
    state.sizes.append([grad.numel(), None if shard is None else shard.numel()])
    grad.mul_(state.factor / dist.get_world_size())
    if shard is None:
        dist.all_reduce(grad)
    else:
        dist.reduce_scatter_tensor(shard, grad)


@on_both_sides()
def test_a_hook_runs_once_for_what_no_sync_gathered(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    model, default = (side.wrap_case(CASE, layout, use_orig_params=use_orig_params) for _ in range(2))
    calls = Calls()
    model.register_comm_hook(calls, mean)
    for each in (model, default):
        with each.no_sync():
            CASE.loss_of(each, batch_of(CASE, dist.get_rank(), 0)).backward()
        assert calls.sizes == []
        if each is model:
            CASE.loss_of(each, batch_of(CASE, dist.get_rank(), 1)).backward()
            num_calls = len(calls.sizes)
            calls.sizes.clear()
        else:
            CASE.loss_of(each, batch_of(CASE, dist.get_rank(), 1)).backward()
        adamw(each).step()
    assert_close(state_of(model), state_of(default), **TOLERANCE)
    return [num_calls, state_of(model)]
