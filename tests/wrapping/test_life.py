"""The life of a wrapped model: unwrapping, wrapping twice, conversions, toggled requires_grad."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, fully_shard, unwrap
from fsdp_flat.errors import OptionError, PhaseError, UsageError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import CLOSE, WRAPPER_FRONTS, Beside, placed, sgd
from tests.support.kit import square_loss, train_on
from tests.support.models import BufferedBlock, Model, Tied
from tests.support.wrapper_models import batch, message, seeded, shard


def beside_plain(front: str, layout: str = "FULL_SHARD", make: type[nn.Module] = Model, **options: Any) -> Beside:
    """Make a model with each block as a unit, beside a plain one."""
    return Beside(seeded(make), front, units=(BufferedBlock,), batch=DATA[make], **placed(layout), **options)


def tokens(rank: int, step: int = 0) -> torch.Tensor:
    """Return a rank's input of a tied model."""
    return torch.randint(7, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


DATA: dict[type[nn.Module], Any] = {Model: batch, Tied: tokens}

# ------------------------------------------------------------------------------------------------------- unwrap


@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("make", [Model, Tied])
@on_ranks(2)
def test_unwrapping_gives_the_plain_module_back_and_it_trains(front: str, strategy: str, make: type) -> None:
    beside = beside_plain(front, strategy, make)
    beside.train(num_steps=2)
    plain, bare = beside.plain, unwrap(beside.ours)
    assert type(bare) is type(plain)
    assert [type(child) for child in bare.modules()] == [type(child) for child in plain.modules()]
    assert [name for name, _ in bare.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert_close(dict(bare.state_dict()), dict(plain.state_dict()), **CLOSE)
    if make is Tied:
        assert bare.head.weight is bare.embed.weight
    for child, other in zip(bare.modules(), plain.modules(), strict=True):
        assert child.__dict__.keys() == other.__dict__.keys()
        assert not child._forward_pre_hooks
    for param in bare.parameters():
        assert type(param) is nn.Parameter
        assert param.is_leaf
        assert param.__dict__ == {}
        assert param.untyped_storage().nbytes() == param.nbytes
    for each in (bare, plain):
        train_on(each, sgd(each), [beside.batch(step) for step in range(2, 4)])
    assert_close(dict(bare.state_dict()), dict(plain.state_dict()), **CLOSE)


@on_ranks(2)
def test_unwrapping_keeps_original_parameter_objects() -> None:
    inner = seeded()
    before = list(inner.parameters())
    bare = unwrap(shard(inner, use_orig_params=True))
    assert bare is inner
    assert all(a is b for a, b in zip(bare.parameters(), before, strict=True))


@on_ranks(2)
def test_unwrapping_takes_precision_hooks_away_and_restores_buffers() -> None:
    precision = MixedPrecision(
        param_dtype=torch.bfloat16,
        buffer_dtype=torch.bfloat16,
        full_precision_modules=(nn.LayerNorm,),
        _module_classes_to_ignore=(),
    )
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)).eval()
    model = FSDP(
        copy.deepcopy(plain),
        mixed_precision=precision,
        use_orig_params=True,
        sync_module_states=True,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    model(batch(0))
    bare = unwrap(model)
    for child in bare.modules():
        assert not child._forward_pre_hooks
        assert not child._forward_hooks
        assert not child._forward_pre_hooks_with_kwargs
    dtypes = {name: value.dtype for name, value in plain.state_dict().items()}
    assert {name: value.dtype for name, value in bare.state_dict().items()} == dtypes


@on_ranks(2)
def test_an_unwrapped_model_can_be_wrapped_again_and_the_old_wrapper_says_that_it_is_dead() -> None:
    model = shard(seeded())
    bare = unwrap(model)
    assert unwrap(bare) is bare
    assert "unwrap" in message(UsageError, RuntimeError, lambda: model(batch(0)))
    again = shard(bare, use_orig_params=True)
    x = batch(dist.get_rank())
    assert_close(again(x), seeded()(x), rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_unwrapping_a_holder_of_wrappers_changes_it_in_place_and_a_nested_wrapper_is_refused() -> None:
    shared = FSDP(nn.Linear(3, 3))
    holder = nn.ModuleList([shared, nn.ReLU(), shared])
    assert unwrap(holder) is holder
    assert type(holder[0]) is nn.Linear
    assert holder[0] is holder[2]

    model = shard(seeded())
    model(batch(0))
    text = message(UsageError, RuntimeError, lambda: unwrap(model.module.blocks[0]))
    assert "'blocks.0'" in text
    with FSDP.summon_full_params(model):
        message(PhaseError, RuntimeError, lambda: unwrap(model))


# ------------------------------------------------------------------------------------------------ wrapping twice


@on_ranks(2)
def test_wrapping_what_is_sharded_is_an_error_that_says_what_to_do() -> None:
    model = FSDP(seeded(), use_orig_params=True)
    text = message(OptionError, ValueError, lambda: FSDP(fully_shard(seeded())))
    assert "sharded by fully_shard already" in text
    assert "unwrap" in text
    text = message(OptionError, ValueError, lambda: FSDP(model.module))
    assert "This Model is part of unit 'Model' already" in text
    text = message(OptionError, ValueError, lambda: FSDP(model.module.blocks[0]))
    assert "BufferedBlock" in text


# ------------------------------------------------------------------------------------------------- conversions


@on_ranks(2)
def test_converting_keeps_the_order_of_managed_and_ignored_parameters() -> None:
    layer = nn.Linear(3, 2)
    model = FSDP(layer, use_orig_params=True, ignored_states=[layer.bias])
    before = [name for name, _ in model.named_parameters()]
    model.double()
    assert [name for name, _ in model.named_parameters()] == before


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_conversion_that_changes_nothing_is_allowed_anywhere(front: str) -> None:
    beside = beside_plain(front)
    model = beside.ours
    model.module.last.register_forward_pre_hook(lambda _module, _args: model.to("cpu") and None)

    def body(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = square_loss(model, x)
        model.double().to("cpu")
        return loss

    beside.train(body)


@pytest.mark.of_guards
@WRAPPER_FRONTS
@on_ranks(2)
def test_a_conversion_in_the_middle_of_a_step_is_an_error_and_the_next_step_is_right(front: str) -> None:
    beside = beside_plain(front, dtype=None)
    model = beside.ours
    loss = square_loss(model, beside.batch())
    model.double()
    assert "converted" in message(UsageError, RuntimeError, loss.backward)
    beside.plain.double()
    beside.train(lambda each, x: square_loss(each, x.double()))
    with FSDP.summon_full_params(model):
        message(PhaseError, RuntimeError, model.float)


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_converted_model_with_param_dtype_goes_on_computing_in_it(front: str) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()
    model = FSDP(layers, mixed_precision=precision, use_orig_params=front == "originals", sync_module_states=True)
    model.float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(batch(0)).dtype == torch.bfloat16


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_model_in_shared_memory_trains(front: str) -> None:
    beside = beside_plain(front)
    beside.train()
    beside.ours.share_memory()
    assert all(p.is_shared() for p in beside.ours.parameters())
    beside.train(num_steps=2)


# ------------------------------------------------------------------------------------ requires_grad, train, eval


@WRAPPER_FRONTS
@on_ranks(2)
def test_parameters_frozen_and_freed_between_steps_train_as_plain_ones(front: str) -> None:
    beside = beside_plain(front)
    for step in range(6):
        for model in beside.models:
            on = step in (0, 3, 4)
            # A whole unit either way; with original parameters also one parameter of a unit.
            model.blocks[0].requires_grad_(on)
            if front == "originals":
                model.last.weight.requires_grad_(on)
        beside.train()


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_model_frozen_from_the_start_can_be_freed_and_frozen_again(front: str) -> None:
    beside = Beside(seeded().requires_grad_(False), front, units=(BufferedBlock,), batch=batch)
    beside.ours.module.first.requires_grad_(True)
    for on in (True, False, True):
        for model in beside.models:
            model.requires_grad_(on)
        if on:
            beside.train()
        else:
            assert not square_loss(beside.ours, beside.batch()).requires_grad


@on_ranks(2)
def test_requires_grad_set_on_gathered_parameters_counts() -> None:
    beside = beside_plain("originals", "SHARD_GRAD_OP")
    # A forward with gradients leaves the parameters gathered until a backward that does not come here.
    beside.ours(beside.batch())
    for on in (False, True):
        for model in beside.models:
            model.last.weight.requires_grad_(on)
        beside.train(num_steps=2)


@WRAPPER_FRONTS
@on_ranks(2)
def test_an_optimizer_built_while_parameters_are_still_gathered_trains_them(front: str) -> None:
    beside = beside_plain(front, "SHARD_GRAD_OP")
    before = list(beside.ours.parameters())
    beside.ours(beside.batch())
    assert all(a is b for a, b in zip(beside.ours.parameters(), before, strict=True))
    beside.optimizers[front] = sgd(beside.ours)
    beside.train(num_steps=2)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_weight_assigned_before_a_conversion_is_converted(strategy: str, rank: int) -> None:
    model = shard(seeded(), strategy, use_orig_params=True)
    square_loss(model, batch(rank)).backward()
    value = torch.full((5, 3), 0.25)
    model.module.first.weight = nn.Parameter(value.clone())
    model.double()
    with FSDP.summon_full_params(model, writeback=False):
        assert_equal(model.module.first.weight.detach(), value.double())
