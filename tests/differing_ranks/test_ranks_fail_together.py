"""What one rank finds, or has, reaches every rank of the model, also those outside of a nested unit's smaller group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, StateDictType
from fsdp_flat.errors import PeerFailureError, PhaseError, RankMismatchError, UsageError
from tests.support import assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import BLOCKS, batch, full_params, seeded, square_loss, wrapped
from tests.support.models import Stack


class Branch(nn.Module):
    """A layer that every rank runs, and one that only some do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, uses: bool = True) -> torch.Tensor:
        x = self.first(x)
        return self.inner(x) if uses else x


def pair() -> dist.ProcessGroup:
    """The group of ranks 0 and 1, or of 2 and 3. Every rank must call this."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return groups[dist.get_rank() // 2]


def nested(model: Any, *, inner: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Shard the outer layer over all ranks and the inner one over pairs."""
    model.inner = wrapped(model.inner, process_group=pair(), **(inner or {}), **kwargs)
    return wrapped(model, **kwargs)


@ORIG_PARAMS
@pytest.mark.parametrize("last", [False, True], ids=["first pair", "last pair"])
@on_ranks(4)
def test_full_gradients_are_refused_on_every_rank_if_a_nested_unit_of_some_ranks_has_unreduced_ones(
    last: bool, use_orig_params: bool, rank: int
) -> None:
    model = nested(seeded(Branch), use_orig_params=use_orig_params)
    with model.module.inner.no_sync():
        model(batch(rank), uses=(rank >= 2) == last).pow(2).mean().backward()
    with (
        pytest.raises(PhaseError, match=r"gradients (of unit 'inner'|on another rank) are not reduced"),
        FSDP.summon_full_params(model, with_grads=True),
    ):
        pass
    full_params(model)


@ORIG_PARAMS
@on_ranks(4)
def test_values_that_a_nested_unit_of_some_ranks_lacks_stop_every_rank(use_orig_params: bool, rank: int) -> None:
    model: Any = seeded(Branch)
    model.inner = nn.Linear(8, 8, device="meta")

    def init(module: Any) -> None:
        module.to_empty(device="cpu", recurse=False)
        if rank >= 2:
            torch.manual_seed(0)
            module.reset_parameters()

    model = nested(model, inner={"param_init_fn": init}, use_orig_params=use_orig_params)
    kind = PeerFailureError if rank >= 2 else UsageError
    with pytest.raises(kind, match="left the meta device and were never written"):
        model(batch(rank))


@ORIG_PARAMS
@on_ranks(4)
def test_a_frozen_parameter_of_a_nested_unit_of_some_ranks_stops_every_rank(use_orig_params: bool, rank: int) -> None:
    strategy = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    model = nested(seeded(Branch), inner=strategy, use_orig_params=use_orig_params)
    if rank == 3:
        model.module.inner.requires_grad_(False)
    with pytest.raises(RankMismatchError, match="freeze the same parameters"):
        square_loss(model, batch(rank)).backward()


def parts(state: dict[str, Any]) -> dict[str, Any]:
    """Copies of this rank's tensors of a state dict."""
    return {
        name: [part.tensor.clone() for part in value.local_shards()]
        if hasattr(value, "local_shards")
        else value.clone()
        for name, value in state.items()
    }


@ORIG_PARAMS
@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
@on_ranks(2)
def test_a_state_dict_pre_hook_of_one_rank_alone_changes_no_messages(
    kind: StateDictType, use_orig_params: bool, rank: int
) -> None:
    model = FSDP(seeded(Stack), auto_wrap_policy=BLOCKS, use_orig_params=use_orig_params)
    calls: list[str] = []
    with FSDP.state_dict_type(model, kind):
        expected = parts(model.state_dict())
        if rank == 1:
            model.module.blocks[1].register_state_dict_pre_hook(lambda _, prefix, keep_vars: calls.append(prefix))
        assert_equal(parts(model.state_dict()), expected)
    assert len(calls) == rank
