"""ShardedEMA: an average of shards is the shard of the average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardedEMA
from fsdp_flat.errors import LoadError, OptionError, PhaseError
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import ORIG_PARAMS
from tests.support.kit import train_on
from tests.support.wrapper_models import batch, message, seeded, shard, whole_state


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    train_on(model, optimizer, [batch(dist.get_rank(), number)])


def trained(model: nn.Module, steps: int, decay: float = 0.75, **kwargs: Any) -> tuple[ShardedEMA, dict[str, Any]]:
    """An average of ``steps`` steps, and the average of the gathered models computed by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = ShardedEMA(model, decay, **kwargs)
    expected = whole_state(model)
    for number in range(steps):
        step(model, optimizer, number)
        ema.update()
        for name, value in whole_state(model).items():
            expected[name] = decay * expected[name] + (1 - decay) * value
    return ema, expected


@ORIG_PARAMS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_the_average_of_shards_gathers_to_the_average_of_whole_parameters(use_orig_params: bool, strategy: str) -> None:
    model = shard(seeded(), strategy, use_orig_params=use_orig_params)
    ema, expected = trained(model, 3)
    assert ema.num_updates == 3
    own, x = whole_state(model), batch(dist.get_rank())
    # A forward that no backward follows leaves the root gathered, with the model's own values.
    before = model(x).detach()
    with ema.swap():
        assert_close(whole_state(model), expected, rtol=1e-5, atol=1e-6)
        plain = seeded()
        plain.load_state_dict(expected)
        assert_close(model(x).detach(), plain(x).detach(), rtol=1e-5, atol=1e-6)
    assert_equal(whole_state(model), own)
    assert_equal(model(x).detach(), before)


@ORIG_PARAMS
@on_ranks(2)
def test_swapping_is_undone_after_an_exception_and_training_goes_on(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    ema, _ = trained(model, 2)
    own = whole_state(model)
    with pytest.raises(KeyError), ema.swap():
        raise KeyError("in between")
    assert_equal(whole_state(model), own)
    with ema.swap():
        averaged = whole_state(model)
    with ema.swap():
        assert_equal(whole_state(model), averaged)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 7)
    assert any(not value.equal(own[name]) for name, value in whole_state(model).items())


@on_ranks(2)
def test_an_average_of_short_parameters_is_kept_in_float32_and_gives_them_back_exactly() -> None:
    model = FSDP(nn.Linear(3, 2).bfloat16(), sync_module_states=True)
    ema = ShardedEMA(model, 0.999)
    own = whole_state(model)
    assert {value.dtype for value in ema.state_dict()["averages"].values()} == {torch.float32}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    changed = whole_state(model)
    for _ in range(10):
        ema.update()
    with ema.swap():
        moved = whole_state(model)
    assert any(not value.equal(own[name]) for name, value in moved.items())
    assert_equal(whole_state(model), changed)


@on_ranks(2)
def test_parameters_outside_of_units_and_masters_are_averaged_too() -> None:
    module = seeded()
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = shard(module, ignored_modules=[module.last], mixed_precision=precision, use_orig_params=True)
    ema = ShardedEMA(model, 0.5)
    assert {name for name in ema.state_dict()["averages"] if name.startswith("last")} == {"last.weight", "last.bias"}
    before = module.last.weight.detach().clone()
    with torch.no_grad():
        module.last.weight.add_(1.0)
    ema.update()
    with ema.swap():
        assert_close(module.last.weight.detach(), before + 0.5, rtol=1e-6, atol=1e-6)
    assert_close(module.last.weight.detach(), before + 1.0, rtol=1e-6, atol=1e-6)


@ORIG_PARAMS
@on_ranks(2)
def test_an_average_goes_through_its_state_dict(use_orig_params: bool) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    ema, expected = trained(model, 3)
    other = ShardedEMA(shard(seeded(), use_orig_params=use_orig_params), 0.1)
    other.load_state_dict(torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, ema.state_dict()))
    assert (other.decay, other.num_updates) == (0.75, 3)
    with other.swap():
        got = whole_state(other._model)
    assert_close(got, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_state_dict_of_another_sharding_is_refused() -> None:
    ema = ShardedEMA(shard(seeded()), 0.5)
    whole = ShardedEMA(shard(seeded(), "NO_SHARD"), 0.5)
    assert "layout" in message(LoadError, RuntimeError, lambda: ema.load_state_dict(whole.state_dict()))
    assert "num_updates" in message(LoadError, RuntimeError, lambda: ema.load_state_dict({"decay": 0.5}))
    more = ema.state_dict()
    more["layout"]["other"] = {}
    assert "'other'" in message(LoadError, RuntimeError, lambda: ema.load_state_dict(more))


@on_ranks(2)
def test_an_average_at_the_wrong_moment_or_with_a_wrong_decay_is_refused() -> None:
    model = shard(seeded())
    ema = ShardedEMA(model, 0.5)
    with FSDP.summon_full_params(model):
        message(PhaseError, RuntimeError, ema.update)
    for decay in (1.0, -0.1):
        assert "decay" in message(OptionError, ValueError, lambda decay=decay: ShardedEMA(model, decay))
    message(OptionError, ValueError, lambda: ShardedEMA(nn.ReLU(), 0.5))
