"""The communication-free form of sharded state dicts, and what torch.distributed.checkpoint makes of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from fsdp_flat.errors import OptionError, UnsupportedError
from fsdp_flat.state import BoxedTensor
from tests.support import Ranks, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.models import Tied
from tests.support.peer import peer_warnings_silenced
from tests.support.steps import recorded
from tests.support.wrapper_models import seeded, shard, shard_by_peer, train, whole_state

RanksOf = Callable[..., Ranks]

BOXES = (ShardedStateDictConfig(boxes=True), ShardedOptimStateDictConfig(boxes=True))


def boxed(model: nn.Module, *, to_cpu: bool = False) -> dict[str, Any]:
    config = ShardedStateDictConfig(boxes=True, offload_to_cpu=to_cpu)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        return model.state_dict()


def load_boxed(model: nn.Module, state: dict[str, Any]) -> None:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state)


def boxed_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *BOXES):
        return FSDP.optim_state_dict(model, optimizer)


def trained(model: nn.Module, rank: int, steps: range = range(2)) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, rank, steps)
    return optimizer


@ORIG_PARAMS
@on_ranks(2, 4)
def test_boxes_are_made_without_communication_and_without_copies(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    optimizer = trained(model, rank)
    with recorded() as record:
        state = boxed(model)
        states = boxed_optimizer(model, optimizer)
    assert record.calls == []
    shards = {h.flat_param.untyped_storage().data_ptr() for m in FSDP.fsdp_modules(model) for h in m._unit.param_groups}
    managed = {name: value for name, value in state.items() if isinstance(value, BoxedTensor)}
    assert [name for name in state if name not in managed] == ["blocks.0.shift", "blocks.1.shift"]
    for name, value in managed.items():
        assert all(part.untyped_storage().data_ptr() in shards for part in value.parts), name
    assert all(isinstance(row["exp_avg"], BoxedTensor) for row in states["state"].values())


def save_boxes(path: str, use_orig_params: bool, strategy: str, rank: int) -> tuple[dict[str, Any], list[float]]:
    options = {} if "HYBRID" not in strategy else {"device_mesh": init_device_mesh("cpu", (2, 2))}
    model = shard(seeded(), strategy, use_orig_params=use_orig_params, **options)
    optimizer = trained(model, rank % 2)
    dcp.save({"model": boxed(model), "optim": boxed_optimizer(model, optimizer)}, checkpoint_id=path)
    whole = whole_state(model)
    return whole, train(model, optimizer, rank % 2, range(2, 4))


def load_boxes(path: str, use_orig_params: bool, by_blocks: bool, rank: int) -> tuple[dict[str, Any], list[float]]:
    model = shard(seeded(seed=1), use_orig_params=use_orig_params, by_blocks=by_blocks)
    optimizer = trained(model, rank)
    state = {"model": boxed(model), "optim": boxed_optimizer(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    load_boxed(model, state["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
    whole = whole_state(model)
    return whole, train(model, optimizer, rank, range(2, 4))


@pytest.mark.parametrize(
    "saved_by, loaded_by, strategy, saved_orig, loaded_orig, by_blocks",
    [
        (2, 2, "FULL_SHARD", True, True, True),
        (4, 2, "FULL_SHARD", True, False, False),
        (2, 4, "FULL_SHARD", False, True, True),
        (4, 2, "HYBRID_SHARD", True, True, False),
        (2, 2, "NO_SHARD", False, True, True),
    ],
)
def test_a_checkpoint_of_boxes_is_loaded_at_any_number_of_ranks_and_wrapping(
    ranks: RanksOf,
    tmp_path: Path,
    saved_by: int,
    loaded_by: int,
    strategy: str,
    saved_orig: bool,
    loaded_orig: bool,
    by_blocks: bool,
) -> None:
    saved = ranks(saved_by).run(_on_rank, save_boxes, str(tmp_path), saved_orig, strategy)
    loaded = ranks(loaded_by).run(_on_rank, load_boxes, str(tmp_path), loaded_orig, by_blocks)
    for state, _ in loaded:
        assert_equal(state, saved[0][0])
    if saved_by == loaded_by:
        # The global batch is the same, so training goes on as it would have.
        for (_, here), (_, there) in zip(loaded, saved, strict=True):
            assert here == pytest.approx(there, abs=1e-6)


def _on_rank(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args, torch.distributed.get_rank())


@ORIG_PARAMS
@on_ranks(2)
def test_torch_fsdp1_reads_boxes_and_its_checkpoints_are_read_into_them(
    use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    import torch.distributed.fsdp as peer

    model = shard(seeded(), use_orig_params=use_orig_params)
    theirs = shard_by_peer(seeded(seed=1), use_orig_params=use_orig_params)
    dcp.save(boxed(model), checkpoint_id=tmp_path / "ours")
    with peer_warnings_silenced():
        warnings.filterwarnings("ignore", message="`_get_pg_default_device`|Multiple backends are registered")
        with peer.FullyShardedDataParallel.state_dict_type(theirs, peer.StateDictType.SHARDED_STATE_DICT):
            state = theirs.state_dict()
            dcp.load(state, checkpoint_id=tmp_path / "ours")
            theirs.load_state_dict(state)
        assert_equal(whole_state(theirs), whole_state(model))
        with peer.FullyShardedDataParallel.state_dict_type(theirs, peer.StateDictType.SHARDED_STATE_DICT):
            trained(theirs, rank)
            dcp.save(theirs.state_dict(), checkpoint_id=tmp_path / "theirs")
        expected = whole_state(theirs)
    state = boxed(model)
    dcp.load(state, checkpoint_id=tmp_path / "theirs")
    load_boxed(model, state)
    assert_equal(whole_state(model), expected)


@on_ranks(2)
def test_fsdp2_and_plain_models_read_boxes_and_theirs_are_read_into_them(tmp_path: Path) -> None:
    model = shard(seeded(), use_orig_params=True)
    dcp.save(boxed(model), checkpoint_id=tmp_path / "ours")
    expected = whole_state(model)

    plain = seeded(seed=1)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    assert_equal(dict(state), expected)

    second = seeded(seed=2)
    for module in (*second.blocks, second):
        fully_shard(module)
    state = second.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    second.load_state_dict(state)
    assert_equal({k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in second.state_dict().items()}, expected)

    third = shard(seeded(seed=3), use_orig_params=False)
    for name, source in (("plain", seeded(seed=4).state_dict()), ("fsdp2", second.state_dict())):
        dcp.save(source, checkpoint_id=tmp_path / name)
        state = boxed(third)
        dcp.load(state, checkpoint_id=tmp_path / name)
        load_boxed(third, state)
        assert_equal(
            whole_state(third), {k: getattr(v, "full_tensor", lambda v=v: v)().detach() for k, v in source.items()}
        )


@on_ranks(2)
def test_boxes_on_the_cpu_are_a_copy_that_training_does_not_change(rank: int) -> None:
    model = shard(seeded(), use_orig_params=True)
    state = boxed(model, to_cpu=True)
    before = {k: [part.clone() for part in v.parts] for k, v in state.items() if isinstance(v, BoxedTensor)}
    trained(model, rank)
    for name, parts in before.items():
        assert all(torch.equal(a, b) for a, b in zip(parts, state[name].parts, strict=True))
    load_boxed(model, state)
    fresh = boxed(model)
    for name, parts in before.items():
        assert all(torch.equal(a, b) for a, b in zip(parts, fresh[name].parts, strict=True))


@on_ranks(2)
def test_tied_and_scalar_and_empty_parameters_have_boxes_that_go_round(tmp_path: Path) -> None:
    class Odd(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.empty(0, 3))

    model = shard(seeded(Odd), use_orig_params=True)
    dcp.save(boxed(model), checkpoint_id=tmp_path)
    other = shard(seeded(Odd, seed=5), use_orig_params=True, by_blocks=False)
    state = boxed(other)
    assert {"head.weight", "embed.weight", "scale", "nothing"} <= set(state)
    dcp.load(state, checkpoint_id=tmp_path)
    load_boxed(other, state)
    assert_equal(whole_state(other), whole_state(model))
    assert other.module.head.weight is other.module.embed.weight


@on_ranks(2)
def test_arithmetic_on_boxes_says_what_they_are_for() -> None:
    model = shard(seeded(), by_blocks=False)
    value = boxed(model)["blocks.0.up.weight"]
    with pytest.raises(UnsupportedError, match=r"boxes=True"):
        value + 1
    assert "boxes=[" in repr(value)


@on_ranks(2)
def test_boxes_of_another_sharding_are_refused_with_a_name() -> None:
    one = shard(seeded(), use_orig_params=True)
    other = shard(seeded(), use_orig_params=True, by_blocks=False)
    before = whole_state(other)
    with pytest.raises(RuntimeError, match="Boxes fit the sharding that they were made for"):
        load_boxed(other, boxed(one))
    assert whole_state(other).keys() == before.keys()


@on_ranks(2)
def test_a_rank_without_an_optimizer_state_dict_fails_alone_since_boxes_are_loaded_alone(rank: int) -> None:
    model = shard(seeded())
    optimizer = trained(model, rank)
    states = boxed_optimizer(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *BOXES):
        if rank == 0:
            FSDP.optim_state_dict_to_load(model, optimizer, states)
        else:
            with pytest.raises(OptionError, match="An optimizer state dict has 'state'"):
                FSDP.optim_state_dict_to_load(model, optimizer, {})
    dist.barrier()
