"""The wrapper's methods between steps: what is forwarded, named, applied, converted and accumulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.errors import OptionError
from tests.support import assert_equal, on_ranks
from tests.support.beside import FRONTS, WRAPPER_FRONTS, Beside, batch_of, grads_of, placed, plain_sgd
from tests.support.kit import square_loss
from tests.support.models import BufferedBlock, Model, Stack
from tests.support.wrapper_models import (
    WIDTH,
    assert_same_grads,
    batch,
    message,
    seeded,
    shard,
    shard_by_peer,
    whole_state,
)

BOTH = pytest.mark.parametrize("use_orig_params", [False, True])
PREFIX = "_fsdp_wrapped_module."


# ------------------------------------------------------------------------------------------- what is forwarded


@on_ranks(2)
def test_attributes_methods_and_items_come_from_the_wrapped_module() -> None:
    plain = seeded()
    model = shard(plain)
    assert model.config is plain.config
    assert model.greet() == "model of width 5"
    assert model.module is plain
    assert model.blocks is plain.blocks
    stack = FSDP(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert stack[1] is stack.module[1]
    assert [type(layer) for layer in stack[0:1]] == [nn.Linear]
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'missing'"):
        _ = model.missing
    assert not hasattr(model, "missing")


@on_ranks(2)
def test_module_looks_through_a_checkpoint_wrapper() -> None:
    block = BufferedBlock()
    inside = FSDP(checkpoint_wrapper(block))
    assert inside.module is block
    assert inside.up is block.up
    assert sorted(whole_state(inside)) == ["down.weight", "shift", "up.bias", "up.weight"]
    model = shard(seeded())
    wrapped = model.blocks[0].module
    model.blocks[0]._fsdp_wrapped_module = checkpoint_wrapper(wrapped)
    assert model.blocks[0].module is wrapped
    assert sorted(whole_state(model)) == sorted(seeded().state_dict())


@on_ranks(2)
def test_fsdp_modules_are_found_below_any_module() -> None:
    model = shard(seeded())
    parent = nn.Sequential(nn.Linear(2, 2), model, FSDP(nn.Linear(2, 2)))
    assert FSDP.fsdp_modules(model) == [model, model.blocks[0], model.blocks[1]]
    assert FSDP.fsdp_modules(parent) == [model, model.blocks[0], model.blocks[1], parent[2]]
    assert FSDP.fsdp_modules(parent, root_only=True) == [model, parent[2]]
    assert FSDP.fsdp_modules(nn.Linear(2, 2)) == []


# ------------------------------------------------------------------------------------------- names, shapes, dtypes


@BOTH
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_names_shapes_and_dtypes_of_parameters_are_the_peers(strategy: str, use_orig_params: bool, rank: int) -> None:
    ours = shard(seeded(), strategy, use_orig_params=use_orig_params)
    theirs = shard_by_peer(seeded(), strategy, use_orig_params=use_orig_params)

    def described(model: nn.Module) -> list[tuple[str, tuple[int, ...], torch.dtype, bool]]:
        return [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]

    assert described(ours) == described(theirs)
    assert [name for name, _ in ours.named_buffers()] == [name for name, _ in theirs.named_buffers()]
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    for model in (ours, theirs):
        square_loss(model, batch(rank)).backward()
    assert described(ours) == described(theirs)
    assert_same_grads(ours, theirs)


@BOTH
@pytest.mark.parametrize("recurse", [True, False])
@on_ranks(2)
def test_names_inside_summon_full_params_are_the_peers(recurse: bool, use_orig_params: bool) -> None:
    ours = shard(seeded(), use_orig_params=use_orig_params)
    theirs = shard_by_peer(seeded(), use_orig_params=use_orig_params)
    found = []
    for model in (ours, theirs):
        parent = nn.Sequential(model)
        with type(model).summon_full_params(model, recurse=recurse):
            found.append(
                {
                    "on the wrapper": [(name, tuple(p.shape)) for name, p in model.named_parameters()],
                    "on a child": [name for name, _ in model.blocks[0].named_parameters()],
                    "on a plain parent": [name for name, _ in parent.named_parameters()],
                    "on the wrapped module": [name for name, _ in model.module.named_parameters()],
                    "buffers": [name for name, _ in model.named_buffers()],
                }
            )
    mine, others = found
    # Around and below a unit that shows its parameters the peer keeps the wrapper's words; ours has the plain names.
    for place in ("on a plain parent", "on the wrapped module"):
        names, others_names = mine.pop(place), others.pop(place)
        assert [name.replace(PREFIX, "") for name in names] == [name.replace(PREFIX, "") for name in others_names]
        assert any(PREFIX in name for name in names) is (place == "on the wrapped module" and not recurse)
    assert mine == others
    if recurse:
        assert [name for name, _ in mine["on the wrapper"]] == [name for name, _ in seeded().named_parameters()]


@on_ranks(2)
def test_named_parameters_takes_the_arguments_of_nn_module() -> None:
    model = shard(seeded())
    with FSDP.summon_full_params(model):
        names = [name for name, _ in model.named_parameters(prefix="net", recurse=True, remove_duplicate=False)]
    assert names == [f"net.{name}" for name, _ in seeded().named_parameters()]
    assert [name for name, _ in model.named_parameters(recurse=False)] == []


# ------------------------------------------------------------------------------------------- apply


@BOTH
@on_ranks(2)
def test_apply_sees_whole_parameters_and_keeps_what_it_does_to_them(use_orig_params: bool, rank: int) -> None:
    model = shard(seeded(), use_orig_params=use_orig_params)
    shapes: dict[str, list[tuple[int, ...]]] = {}

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            shapes.setdefault("linear", []).append(tuple(module.weight.shape))
            with torch.no_grad():
                module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight) / 10)

    assert model.apply(init) is model
    plain = seeded()
    plain.apply(init)
    assert shapes["linear"][: len(shapes["linear"]) // 2] == shapes["linear"][len(shapes["linear"]) // 2 :]
    assert_equal(whole_state(model), dict(plain.state_dict()))
    assert_equal(model(batch(rank)), plain(batch(rank)))


@on_ranks(2)
def test_apply_inside_summon_full_params_is_an_error_and_the_context_goes_on() -> None:
    model = shard(seeded())
    with FSDP.summon_full_params(model):
        text = message(OptionError, ValueError, lambda: model.apply(lambda module: None))
        assert model.first.weight.shape == (WIDTH, 3)
    assert "'Model'" in text
    assert "inside summon_full_params" in text


# ------------------------------------------------------------------------------------------- conversions


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "to(float64)": (lambda model: model.to(torch.float64), torch.float64),
    "double()": (lambda model: model.double(), torch.float64),
    "to(bfloat16)": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "double().float()": (lambda model: model.double().float(), torch.float32),
}


@WRAPPER_FRONTS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("moment", ["before the first step", "after a step", "with gradients"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.* is sharded in torch.bfloat16")
def test_a_conversion_gives_what_it_gives_a_plain_model(
    conversion: str, moment: str, strategy: str, front: str
) -> None:
    convert, dtype = CONVERSIONS[conversion]
    close = 2e-2 if dtype is torch.bfloat16 else 1e-5
    beside = Beside(
        seeded(),
        front,
        units=(BufferedBlock,),
        optimizer=plain_sgd,
        batch=batch,
        dtype=None,
        tolerance={"rtol": close, "atol": close},
        **placed(strategy),
    )
    if moment != "before the first step":
        beside.backward()
    if moment == "after a step":
        beside.step()
    names = [name for name, _ in beside.ours.named_parameters()]
    for model in beside.models:
        assert convert(model) is model
    assert [name for name, _ in beside.ours.named_parameters()] == names
    if moment == "with gradients":
        beside.step()
    assert {param.dtype for param in beside.ours.parameters()} == {dtype}
    assert {buffer.dtype for buffer in beside.ours.buffers()} == {dtype}
    beside.train(lambda model, x: square_loss(model, x.to(dtype)))
    beside.check_state_dict()


@BOTH
@on_ranks(2)
def test_train_and_eval_reach_every_module_and_eval_gives_the_plain_output(use_orig_params: bool, rank: int) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Model(), nn.Dropout(0.5))

    model, plain = shard(seeded(make), use_orig_params=use_orig_params), seeded(make)
    assert model.eval() is model
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        assert_equal(model(batch(rank)), plain.eval()(batch(rank)))
    assert model.train() is model
    assert all(module.training for module in model.modules())


# ------------------------------------------------------------------------------------------- zero_grad, requires_grad


@FRONTS
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("moment", ["before any step", "between forward and backward", "in no_sync", "after backward"])
@on_ranks(2)
def test_zero_grad_drops_what_came_before_it_and_nothing_else(
    moment: str, set_to_none: bool, front: str, rank: int
) -> None:
    beside = Beside(Stack(), front)
    model = beside.ours

    def clear() -> None:
        model.zero_grad(set_to_none=set_to_none)

    if moment == "before any step":
        clear()
        loss = square_loss(model, batch_of(0))
    elif moment == "between forward and backward":
        square_loss(model, batch_of(5)).backward()
        loss = square_loss(model, batch_of(0))
        clear()
    elif moment == "in no_sync":
        with beside.no_sync():
            square_loss(model, batch_of(5)).backward()
            clear()
        loss = square_loss(model, batch_of(0))
    else:
        square_loss(model, batch_of(5)).backward()
        clear()
        if set_to_none:
            assert all(param.grad is None for param in model.parameters())
        else:
            assert not any(grad.any() for grad in grads_of(model).values())
        loss = square_loss(model, batch_of(0))
    loss.backward()
    beside.follow()
    beside.check_gradients()
