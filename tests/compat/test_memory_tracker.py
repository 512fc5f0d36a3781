"""torch's ``FSDPMemTracker`` on models of ``fully_shard``: it runs their forwards by hooks, and their backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import fsdp_flat
from fsdp_flat.core import units_of
from fsdp_flat.errors import UsageError
from tests.support import on_ranks

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def made(fully_shard: Any, *, checkpoints: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 3))
    if checkpoints:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    for module in [model[0], model[1], model]:
        fully_shard(module)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def step(model: Any, optimizer: torch.optim.Optimizer, num: int) -> float:
    torch.manual_seed(num + 10 * dist.get_rank())
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def hooks(model: nn.Module) -> list[int]:
    return [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]


@pytest.mark.parametrize("kind", ["plain", "checkpoints"])
@on_ranks(2)
def test_a_tracked_model_trains_as_one_that_is_not_and_afterwards_too(kind: str) -> None:
    """Snapshots are taken at each moment of which the tracker has one for torch's own ``fully_shard``."""
    options = {} if kind == "plain" else {kind: True}
    with fsdp_flat.installed(fully_shard=True):
        plain, tracked = made(fsdp_flat.fully_shard, **options), made(fsdp_flat.fully_shard, **options)
        before = hooks(tracked[0])
        for num in range(3):
            tracker = FSDPMemTracker(*tracked)
            with tracker:
                loss = step(*tracked, num)
            assert loss == step(*plain, num)
            # Freed all-gather outputs are seen to be freed, although a pool keeps their memory elsewhere.
            assert tracker.get_tracker_snapshot("current")[CPU][_FSDPRefType.UNSHARDED_PARAM] == 0
            peak = tracker.get_tracker_snapshot("peak")[CPU]
            sharded = sum(param.to_local().untyped_storage().nbytes() for param in tracked[0].parameters())
            assert peak["Total"] > sharded
        assert hooks(tracked[0]) == before
        assert [unit.forward_hooks for unit in units_of(tracked[0])] == [None] * len(units_of(tracked[0]))
        assert step(*tracked, 3) == step(*plain, 3)
    moments = {module: set(stats.snapshots) for module, stats in tracker.memory_tracking.items()}
    groups = [each._get_fsdp_state()._fsdp_param_group for each in moments]
    assert None not in groups
    assert len(groups) == 3
    # With activation checkpoints two more.
    assert all(len(found) >= 10 for found in moments.values()), moments


@on_ranks(2)
def test_a_tracked_forward_that_raises_leaves_the_model_as_another_one_does() -> None:
    with fsdp_flat.installed(fully_shard=True):
        plain, tracked = made(fsdp_flat.fully_shard), made(fsdp_flat.fully_shard)
        with FSDPMemTracker(*tracked) as tracker:
            for place in (tracked[0][1].up, tracked[0]):
                handle = place.register_forward_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    tracked[0](torch.ones(4, 8))
                handle.remove()
                assert all(unit.is_sharded for unit in units_of(tracked[0]))
                tracker.reset_mod_stats()
            assert step(*tracked, 0) == step(*plain, 0)
        assert step(*tracked, 1) == step(*plain, 1)


@on_ranks(2)
def test_functions_of_a_forward_raise_while_the_modules_own_call_runs_it() -> None:
    model, _ = made(fsdp_flat.fully_shard)
    state = model._get_fsdp_state()
    for call in (lambda: state._pre_forward(model, (), {}), lambda: state._post_forward(model, (), None)):
        with pytest.raises(UsageError, match="own call unshards the unit"):
            call()
    assert state._root_pre_forward(model, (1,), {"a": 2}) == ((1,), {"a": 2})
    assert state._is_root
