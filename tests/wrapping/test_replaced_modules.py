"""What a wrapper holds may be replaced after wrapping, as activation checkpointing does: then that is what runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import StateDictType, clean_tensor_name, register_forward_method
from tests.compile.test_compile import fresh_compiler
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import WRAPPER_FRONTS, Beside, batch, by_hand, by_policy, placed
from tests.support.kit import square_loss
from tests.support.models import Block, Stack

IMPLS = pytest.mark.parametrize("impl", ["NO_REENTRANT", "REENTRANT"])
WRAPS = pytest.mark.parametrize("wrap", [by_policy, by_hand])
WHEN = pytest.mark.parametrize("steps_before", [0, 2], ids=["before the first step", "after two steps"])


def checkpointed(model: nn.Module, impl: str, kind: type[nn.Module] = Block) -> None:
    """FSDP1's documented order: wrap, then apply checkpoints."""
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl[impl]),
        check_fn=lambda module: isinstance(module, kind),
    )


def calls_of_a_step(beside: Beside, loss_of: Any = square_loss) -> dict[str, int]:
    """How often each counting module's forward ran in one step of the sharded model."""
    counting = {name: module for name, module in beside.ours.named_modules() if isinstance(module, Block)}
    before = {name: module.calls for name, module in counting.items()}
    beside.train(loss_of)
    return {name: module.calls - before[name] for name, module in counting.items()}


@IMPLS
@WRAPPER_FRONTS
@WHEN
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD 2x1"])
@on_ranks(2)
def test_checkpoints_applied_after_wrapping_run_each_block_twice_a_step(
    layout: str, steps_before: int, front: str, impl: str
) -> None:
    beside = Beside(Stack(), front, **placed(layout))
    beside.train(num_steps=steps_before)
    assert list(calls_of_a_step(beside).values()) == [1, 1, 1]
    checkpointed(beside.ours, impl)
    for _ in range(2):
        assert list(calls_of_a_step(beside).values()) == [2, 2, 2]


@WRAPPER_FRONTS
@WHEN
@on_ranks(2)
def test_a_checkpoint_of_what_the_root_holds_runs_all_of_it_twice_a_step(steps_before: int, front: str) -> None:
    beside = Beside(nn.Sequential(Stack()), front)
    beside.train(num_steps=steps_before)
    inner = beside.ours.module
    beside.ours._fsdp_wrapped_module = checkpoint_wrapper(inner, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    assert list(calls_of_a_step(beside).values()) == [2, 2, 2]
    assert beside.ours.module is inner


@IMPLS
@WRAPPER_FRONTS
@pytest.mark.parametrize("order", ["registered first", "replaced first"])
@on_ranks(2)
def test_methods_of_the_root_run_checkpoints_that_were_applied_after_wrapping(
    order: str, front: str, impl: str
) -> None:
    beside = Beside(Stack(), front)
    if order == "registered first":
        register_forward_method(beside.ours, "features")
    checkpointed(beside.ours, impl)
    if order == "replaced first":
        register_forward_method(beside.ours, "features")

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.features(x).pow(2).mean()

    # The head is the root's own, and nobody uses it.
    assert list(calls_of_a_step(beside, loss_of).values()) == [2, 2, 2]


class Speaking(Block):
    """A block with a second method."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


class Recording(nn.Module):
    """A user's wrapper around a module, with a method of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.recorded: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recorded.append("forward")
        return self.inner(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.recorded.append("encode")
        return self.inner.encode(x)


@IMPLS
@WRAPPER_FRONTS
@pytest.mark.parametrize("order", ["registered first", "replaced first"])
@on_ranks(2)
def test_a_registered_method_of_a_block_inside_a_checkpoint_equals_the_replica(
    order: str, front: str, impl: str
) -> None:
    module = nn.Sequential(Speaking(), Speaking())
    beside = Beside(module, front)
    if order == "registered first":
        register_forward_method(beside.ours[1], "encode")
    checkpointed(beside.ours, impl)
    if order == "replaced first":
        register_forward_method(beside.ours[1], "encode")

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model[1].encode(x).pow(2).mean() + model(x.clone().requires_grad_()).pow(2).mean()

    beside.train(loss_of, num_steps=2)


@WRAPPER_FRONTS
@pytest.mark.parametrize("order", ["registered first", "replaced first"])
@on_ranks(2)
def test_a_registered_method_is_that_of_the_module_that_the_wrapper_holds_now(
    order: str, front: str, rank: int
) -> None:
    beside = Beside(nn.Sequential(Speaking(), Speaking()), front)
    if order == "registered first":
        register_forward_method(beside.ours[1], "encode")
    recording = beside.ours[1]._fsdp_wrapped_module = Recording(beside.ours[1]._fsdp_wrapped_module)
    if order == "replaced first":
        register_forward_method(beside.ours[1], "encode")
    with torch.no_grad():
        assert_close(beside.ours[1].encode(batch(rank)), beside.plain[1].encode(batch(rank)), rtol=1e-9, atol=1e-11)
    assert recording.recorded == ["encode"]


def without_recording(name: str) -> str:
    """Return the name of a parameter without the part of a :class:`Recording`."""
    return clean_tensor_name(name).replace("inner.", "")


WHICH = pytest.mark.parametrize("which", ["", "blocks.0", "blocks.2"], ids=["root", "first unit", "last unit"])


@WHICH
@WRAPPER_FRONTS
@WHEN
@WRAPS
@on_ranks(2)
def test_a_module_that_a_user_put_around_the_wrapped_one_runs_once_a_step(
    wrap: Callable[..., FSDP], steps_before: int, front: str, which: str
) -> None:
    beside = Beside(Stack(), front, shard=wrap)
    beside.train(num_steps=steps_before)
    wrapper = beside.ours._fsdp_wrapped_module.get_submodule(which) if which else beside.ours
    recording = wrapper._fsdp_wrapped_module = Recording(wrapper._fsdp_wrapped_module)
    beside.clean_name = without_recording
    beside.train(num_steps=3)
    assert recording.recorded == ["forward"] * 3


# -- torch.compile -----------------------------------------------------------------------------------------------------


class Backend:
    """A compiler that compiles nothing and counts how often what it returned runs."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return graph.forward(*args)

        return run


class Still(Block):
    """A block without anything that compiled code would have to watch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def still_stack() -> Stack:
    stack = Stack()
    stack.blocks = nn.ModuleList([Still() for _ in range(3)])
    return stack


@WHEN
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_compiled_module_assigned_to_a_unit_runs_compiled_once_a_step(layout: str, steps_before: int) -> None:
    with fresh_compiler():
        beside = Beside(still_stack(), "originals", **placed(layout))
        beside.train(num_steps=steps_before)
        backend = Backend()
        unit = beside.ours.blocks[1]
        unit._fsdp_wrapped_module = torch.compile(unit._fsdp_wrapped_module, backend=backend)
        beside.train(num_steps=3)
        assert backend.num_graphs >= 1
        assert backend.num_runs == 3


@pytest.mark.of_guards
@on_ranks(2)
def test_a_compiled_module_in_a_unit_of_a_flat_parameter_is_warned_about_at_the_first_use() -> None:
    with fresh_compiler():
        beside = Beside(still_stack(), "flat")
        unit = beside.ours.blocks[1]
        unit._fsdp_wrapped_module = torch.compile(unit._fsdp_wrapped_module, backend=Backend())
        with pytest.warns(UserWarning, match="use_orig_params=True only"):
            beside.train(num_steps=2)


# -- state dicts -------------------------------------------------------------------------------------------------------

AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "re-entrant checkpoint": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "compiled": partial(torch.compile, backend="eager"),
}


@WRAPPER_FRONTS
@pytest.mark.parametrize("around", list(AROUND))
@pytest.mark.parametrize("runs", [False, True], ids=["idle", "after a step"])
@on_ranks(2)
def test_full_state_dicts_have_plain_names_and_load_after_every_unit_was_replaced(
    runs: bool, around: str, front: str
) -> None:
    with fresh_compiler(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.compile leaves modules of unit")
        beside = Beside(still_stack(), front)
        for block in beside.ours.blocks:
            block._fsdp_wrapped_module = AROUND[around](block._fsdp_wrapped_module)
        if runs:
            beside.train()
        with FSDP.state_dict_type(beside.ours, StateDictType.FULL_STATE_DICT):
            state = beside.ours.state_dict()
            assert_close(dict(state), dict(beside.plain.state_dict()), rtol=1e-9, atol=1e-11)
            halved = {name: value / 2 for name, value in state.items()}
            beside.ours.load_state_dict(halved)
            assert_equal(dict(beside.ours.state_dict()), halved)
        beside.plain.load_state_dict(halved)
        beside.train(num_steps=2)
