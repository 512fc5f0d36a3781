"""A state dict of the module inside a wrapper has this rank's parts: a warning says so, once, where it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy, save_full, unwrap
from tests.support import assert_equal, on_ranks
from tests.support.beside import WRAPPER_FRONTS
from tests.support.kit import BLOCKS, Stack, batch, seeded, wrapped

OF_PARTS = r"state_dict\(\) of the Stack inside a wrapper.*this rank's part.*save_pretrained\(.*state_dict="


def sharded(front: str, **kwargs: Any) -> Any:
    return wrapped(seeded(lambda: Stack(2)), auto_wrap_policy=BLOCKS, use_orig_params=front == "originals", **kwargs)


def save_pretrained(model: nn.Module, path: Path, state_dict: dict[str, Any] | None = None) -> None:
    """Save as transformers does: what ``wrapper.save_pretrained`` calls with the module inside."""
    torch.save(model.state_dict() if state_dict is None else state_dict, path)


@WRAPPER_FRONTS
@on_ranks(2)
def test_the_state_dict_of_the_module_inside_a_wrapper_warns_once(front: str, rank: int, tmp_path: Path) -> None:
    model = sharded(front)
    with pytest.warns(UserWarning, match=OF_PARTS) as said:
        _ = [save_pretrained(model.module, tmp_path / str(rank)) for _ in range(2)]
    assert [(len(said), Path(each.filename).name) for each in said] == [(1, Path(__file__).name)]
    with pytest.warns(UserWarning, match=r"the Block inside a wrapper \(unit 'blocks\.0'\)"):
        model.module.blocks[0].module.state_dict()


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_checkpointed_module_inside_a_wrapper_warns_too(front: str) -> None:
    inner = checkpoint_wrapper(seeded(lambda: Stack(2)))
    with pytest.warns(UserWarning, match=OF_PARTS):
        wrapped(inner, use_orig_params=front == "originals").module.state_dict()


@WRAPPER_FRONTS
@on_ranks(2)
def test_state_dicts_that_are_whole_warn_of_nothing(front: str, rank: int, tmp_path: Path) -> None:
    """Of the wrapper, of one around it, inside ``summon_full_params`` or a forward, and where nothing is sharded."""
    model, plain = sharded(front), seeded(lambda: Stack(2))
    expected = dict(plain.state_dict())
    assert_equal(dict(model.state_dict()), expected)
    assert_equal(dict(nn.Sequential(model).state_dict()), {f"0.{name}": value for name, value in expected.items()})
    save_pretrained(model.module, tmp_path / str(rank), model.state_dict())
    save_full(model, tmp_path / "full")
    with FSDP.summon_full_params(model):
        save_pretrained(model.module, tmp_path / str(rank))
    assert_equal(torch.load(tmp_path / str(rank)), expected)
    held: list[Any] = []
    one_unit = wrapped(seeded(lambda: Stack(2)), use_orig_params=True)
    one_unit.module.register_forward_hook(lambda module, *_: held.append(module.state_dict()))
    one_unit(batch(rank))
    assert [value.shape for value in held[0].values()] == [value.shape for value in expected.values()]
    # All parameters are in wrappers further inside, which save themselves.
    inner = FSDP(nn.Sequential(seeded(lambda: Stack(2))), auto_wrap_policy=lambda recurse, **_: True)
    assert inner.module.state_dict()["0.blocks.0.up.weight"].dim() == 2
    sharded(front, sharding_strategy=ShardingStrategy.NO_SHARD).module.state_dict()
    assert_equal(dict(unwrap(model).state_dict()), dict(unwrap(sharded(front)).state_dict()))
