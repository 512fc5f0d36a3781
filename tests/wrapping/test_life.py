"""The life of a wrapped model: unwrapping, wrapping twice, conversions, toggled requires_grad."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, fully_shard, unshard_for, unwrap
from fsdp_flat.errors import OptionError, PhaseError, UsageError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.kit import square_loss, train_on
from tests.support.lives import KINDS, assert_same, make, train, train_reference
from tests.support.reference import replicated_step
from tests.support.wrapper_models import batch, message, seeded, shard

# ------------------------------------------------------------------------------------------------------- unwrap


@KINDS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["plain", "tied"])
@on_ranks(2)
def test_unwrapping_gives_the_plain_module_back_and_it_trains(use_orig_params: bool, strategy: str, kind: str) -> None:
    plain = make(kind)
    model = shard(make(kind), strategy, use_orig_params=use_orig_params)
    train(model, range(2), kind)
    train_reference(plain, range(2), kind)
    bare = unwrap(model)
    assert type(bare) is type(plain)
    assert [type(child) for child in bare.modules()] == [type(child) for child in plain.modules()]
    assert [name for name, _ in bare.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert_close(dict(bare.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
    if kind == "tied":
        assert bare.head.weight is bare.embed.weight
    for child, other in zip(bare.modules(), plain.modules(), strict=True):
        assert child.__dict__.keys() == other.__dict__.keys()
        assert not child._forward_pre_hooks
    for param in bare.parameters():
        assert type(param) is nn.Parameter
        assert param.is_leaf
        assert param.__dict__ == {}
        assert param.untyped_storage().nbytes() == param.nbytes
    train_reference(bare, range(2, 4), kind)
    train_reference(plain, range(2, 4), kind)
    assert_same(bare, plain)


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
    assert "Block" in text


# ------------------------------------------------------------------------------------------------- conversions


@KINDS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_a_model_converted_between_steps_trains_as_a_converted_plain_model(
    use_orig_params: bool, strategy: str
) -> None:
    model, plain = shard(seeded(), strategy, use_orig_params=use_orig_params), seeded()
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    rank = dist.get_rank()
    for step, dtype in enumerate([torch.float32, torch.float64, torch.float64, torch.float32]):
        model.to(dtype)
        plain.to(dtype)
        train_on(model, optimizer, [batch(rank, step).to(dtype)])
        replicated_step(plain, plain_optimizer, [batch(r, step).to(dtype) for r in range(2)], square_loss)
        assert {p.dtype for p in model.parameters()} == {dtype}
    assert [name for name, _ in model.named_parameters()] == names
    assert_same(model, plain)


@on_ranks(2)
def test_converting_keeps_the_order_of_managed_and_ignored_parameters() -> None:
    layer = nn.Linear(3, 2)
    model = FSDP(layer, use_orig_params=True, ignored_states=[layer.bias])
    before = [name for name, _ in model.named_parameters()]
    model.double()
    assert [name for name, _ in model.named_parameters()] == before


@KINDS
@on_ranks(2)
def test_a_conversion_that_changes_nothing_is_allowed_anywhere(use_orig_params: bool) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.last.register_forward_pre_hook(lambda _module, _args: model.to("cpu") and None)
    loss = square_loss(model, batch(dist.get_rank()))
    model.float().to("cpu")
    loss.backward()
    optimizer.step()
    replicated_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [batch(0), batch(1)], square_loss)
    assert_same(model, plain)


@KINDS
@on_ranks(2)
def test_a_conversion_in_the_middle_of_a_step_is_an_error_and_the_next_step_is_right(use_orig_params: bool) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    rank = dist.get_rank()
    loss = square_loss(model, batch(rank))
    model.double()
    assert "converted" in message(UsageError, RuntimeError, loss.backward)
    plain.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square_loss(model, batch(rank).double()).backward()
    optimizer.step()
    batches = [batch(r).double() for r in range(2)]
    replicated_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches, square_loss)
    assert_same(model, plain)
    with FSDP.summon_full_params(model):
        message(PhaseError, RuntimeError, model.float)


@KINDS
@on_ranks(2)
def test_a_converted_model_with_param_dtype_goes_on_computing_in_it(use_orig_params: bool) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).bfloat16()
    model = FSDP(layers, mixed_precision=precision, use_orig_params=use_orig_params, sync_module_states=True)
    model.float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(batch(0)).dtype == torch.bfloat16


@KINDS
@on_ranks(2)
def test_a_model_in_shared_memory_trains(use_orig_params: bool) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    train(model, range(1))
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    train(model, range(1, 3))
    train_reference(plain, range(1))
    train_reference(plain, range(1, 3))
    assert_same(model, plain)


# ------------------------------------------------------------------------------------ requires_grad, train, eval


@KINDS
@on_ranks(2)
def test_parameters_frozen_and_freed_between_steps_train_as_plain_ones(use_orig_params: bool) -> None:
    model, plain = shard(seeded(), use_orig_params=use_orig_params), seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    rank = dist.get_rank()

    def freeze(target: nn.Module, inner: Any, on: bool) -> None:
        # A whole unit either way; with original parameters also one parameter of a unit.
        inner.blocks[0].requires_grad_(on)
        if use_orig_params:
            inner.last.weight.requires_grad_(on)

    for step in range(6):
        if step in (1, 3, 5):
            on = step == 3
            freeze(model, model.module, on)
            freeze(plain, plain, on)
        train_on(model, optimizer, [batch(rank, step)])
        replicated_step(plain, plain_optimizer, [batch(r, step) for r in range(2)], square_loss)
        assert_same(model, plain)


@KINDS
@on_ranks(2)
def test_a_model_frozen_from_the_start_can_be_freed_and_frozen_again(use_orig_params: bool) -> None:
    model, plain = shard(seeded().requires_grad_(False), use_orig_params=use_orig_params), seeded()
    model.module.first.requires_grad_(True)
    plain.requires_grad_(False)
    for step, on in enumerate([True, False, True]):
        model.requires_grad_(on)
        plain.requires_grad_(on)
        if on:
            train(model, range(step, step + 1))
            train_reference(plain, range(step, step + 1))
        else:
            assert not square_loss(model, batch(0)).requires_grad
        assert_same(model, plain)


@on_ranks(2)
def test_requires_grad_set_on_gathered_parameters_counts() -> None:
    model, plain = shard(seeded(), "SHARD_GRAD_OP", use_orig_params=True), seeded()
    # A forward with gradients leaves the parameters gathered until a backward that does not come here.
    model(batch(0))
    for target, inner in ((model, model.module), (plain, plain)):
        inner.last.weight.requires_grad_(False)
        (train if target is model else train_reference)(target, range(2))
    assert_same(model, plain)
    for inner in (model.module, plain):
        inner.last.weight.requires_grad_(True)
    train(model, range(2, 4))
    train_reference(plain, range(2, 4))
    assert_same(model, plain)


@KINDS
@on_ranks(2)
def test_an_optimizer_built_while_parameters_are_still_gathered_trains_them(use_orig_params: bool) -> None:
    model, plain = shard(seeded(), "SHARD_GRAD_OP", use_orig_params=use_orig_params), seeded()
    before = list(model.parameters())
    model(batch(0))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    train(model, range(2))
    train_reference(plain, range(2))
    assert_same(model, plain)


@KINDS
@on_ranks(2)
def test_train_and_eval_switch_every_wrapped_module(use_orig_params: bool) -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), use_orig_params=use_orig_params)
    x = batch(0)
    assert_equal(model.eval()(x), model(x))
    assert not any(child.training for child in model.modules())
    assert model.train()(x).eq(0).any()
    with torch.no_grad(), unshard_for(model):
        assert tuple(model.module[0].weight.shape) == (4, 3)


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
