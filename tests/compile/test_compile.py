"""torch.compile of wrapped models and of blocks inside units: as the reference, no compilation after step two."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.core import unit_of, units_of
from fsdp_flat.wrap.plan import plan_units
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import CLOSE, Beside, assert_idle, batch, sgd
from tests.support.kit import BLOCKS, seeded, square_loss, wrapped
from tests.support.models import Block, Stack
from tests.support.steps import traced

FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


def compiled(target: Any, **kwargs: Any) -> Any:
    return torch.compile(target, backend="aot_eager", **kwargs)


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Compiled code and counters of other tests are forgotten before, and ours after."""
    torch._dynamo.reset()
    counters.clear()
    try:
        with warnings.catch_warnings():
            # Said by torch's compiler about itself, whatever it compiles.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
            yield
    finally:
        torch._dynamo.reset()
        counters.clear()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def through(run: Callable[..., Any], model: nn.Module) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A loss that calls ``run`` in place of the sharded ``model``, and the plain model as it is."""
    return lambda called, x: square_loss(run if called is model else called, x)


def train(beside: Beside, run: Callable[..., Any] | None = None) -> None:
    """Four steps; the third and fourth must not compile anything, not even look at a new frame."""
    loss_of = through(beside.ours if run is None else run, beside.ours)
    for step in range(4):
        with torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile"):
            beside.train(loss_of)


@on_ranks(2)
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, ShardingStrategy.NO_SHARD])
def test_a_compiled_wrapper_trains_as_the_reference_and_compiles_nothing_after_two_steps(
    strategy: ShardingStrategy,
) -> None:
    with fresh_compiler():
        beside = Beside(Stack(), "originals", sharding_strategy=strategy, note_outputs=False)
        train(beside, compiled(beside.ours))
        assert num_graphs() > 0


def compile_before(stack: Stack) -> None:
    for block in stack.blocks:
        block.compile(backend="aot_eager")


def replace_before(stack: Stack) -> None:
    for index in range(len(stack.blocks)):
        stack.blocks[index] = compiled(stack.blocks[index])


def compile_after(model: FSDP) -> None:
    for block in model.module.blocks:
        block.module.compile(backend="aot_eager", fullgraph=True)


@on_ranks(2)
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP])
@pytest.mark.parametrize("how", ["block.compile() before", "torch.compile(block) before", "block.compile() after"])
def test_blocks_compiled_inside_units_train_as_the_reference(how: str, strategy: ShardingStrategy) -> None:
    with fresh_compiler():

        def shard(stack: Stack, apply: Callable[..., Any]) -> FSDP:
            if how == "block.compile() before":
                compile_before(stack)
            elif how == "torch.compile(block) before":
                replace_before(stack)
            model = apply(stack, auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
            if how == "block.compile() after":
                compile_after(model)
            return model

        beside = Beside(Stack(), "originals", shard=shard, note_outputs=False)
        assert len(units_of(beside.ours)) == 4
        train(beside)
        assert num_graphs() == 1, "the blocks share their code, and parameters are inputs of the graph"
        assert_close(beside.ours.state_dict(), beside.plain.state_dict(), **CLOSE, what="state dict")


@on_ranks(2)
def test_compiled_forms_have_clean_names_and_state_dicts_go_both_ways() -> None:
    with fresh_compiler():
        stack = Stack().double()
        expected = {name: value.clone() for name, value in stack.state_dict().items()}
        replace_before(stack)
        stack.head = compiled(stack.head)
        model = wrapped(stack, auto_wrap_policy=BLOCKS, use_orig_params=True)
        run = compiled(model)
        x = batch(0)
        before = run(x)
        assert [unit.name for unit in units_of(run)] == ["Stack", "blocks.0", "blocks.1", "blocks.2"]
        assert_equal(model.state_dict(), expected, what="the wrapper's state dict")
        saved = {name: value.clone() for name, value in run.state_dict().items()}
        # As for any module, what torch.compile() returns puts its own word in front.
        assert_equal({name.removeprefix("_orig_mod."): value for name, value in saved.items()}, expected)
        with FSDP.summon_full_params(run):
            for param in run.parameters():
                param.data.zero_()
        assert not run(x).any()
        run.load_state_dict(saved)
        assert_equal(run(x), before)
        as_fsdp1 = {name.replace(".up.", "._orig_mod.up."): value + 1 for name, value in expected.items()}
        assert not model.load_state_dict(as_fsdp1).missing_keys
        model.load_state_dict(expected)
        assert_equal(run(x), before)
        with FSDP.summon_full_params(model):
            assert [name for name, _ in model.named_parameters()] == list(expected)


@on_ranks(2)
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP])
def test_a_compiled_model_gathers_and_reduces_in_the_order_of_the_eager_one(strategy: ShardingStrategy) -> None:
    with fresh_compiler():
        traces = []
        for compile_it in (False, True):
            model = wrapped(
                seeded().double(), auto_wrap_policy=BLOCKS, use_orig_params=True, sharding_strategy=strategy
            )
            run = compiled(model) if compile_it else model
            trace = traced(model)
            for step in range(3):
                square_loss(run, batch(dist.get_rank(), step)).backward()
            traces.append(trace)
            assert_idle(model)
        assert traces[1] == traces[0]


@on_ranks(2)
def test_evaluation_between_steps_compiles_once_and_training_goes_on() -> None:
    with fresh_compiler():
        beside = Beside(Stack(), "originals", note_outputs=False)
        run = compiled(beside.ours)
        loss_of = through(run, beside.ours)
        x = batch(dist.get_rank())
        for step in range(4):
            with torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile"):
                beside.train(loss_of)
                beside.ours.eval()
                beside.plain.eval()
                with torch.no_grad():
                    assert_close(run(x), beside.plain(x), rtol=1e-5, atol=1e-6)
                assert_idle_but_root(beside.ours)
                beside.ours.train()
                beside.plain.train()


def assert_idle_but_root(model: FSDP) -> None:
    root = unit_of(model)
    assert all(unit.is_sharded for unit in units_of(model) if unit is not root)


@on_ranks(2)
def test_a_compiled_training_step_with_backward_in_it_is_the_eager_one() -> None:
    with fresh_compiler():
        model, eager = (wrapped(seeded().double(), auto_wrap_policy=BLOCKS, use_orig_params=True) for _ in range(2))

        def step(model: FSDP, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            loss = square_loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = compiled(step)
        optimizer, twins = sgd(model), sgd(eager)
        for number in range(4):
            x = batch(dist.get_rank(), number)
            # The optimizer's own state appears in the first step, so its code is compiled in the second one too.
            with torch.compiler.set_stance("default" if number < 3 else "fail_on_recompile"):
                loss = run(model, optimizer, x)
            assert_close(loss, step(eager, twins, x), rtol=1e-5, atol=1e-6)
        assert_close(model.state_dict(), eager.state_dict(), rtol=1e-5, atol=1e-6)
        assert_idle(model)


@on_ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_compiled_optimizer_step_takes_sharded_gradients_as_plain_ones(kind: type[torch.optim.Optimizer]) -> None:
    with fresh_compiler():
        model, eager = (wrapped(seeded().double(), auto_wrap_policy=BLOCKS, use_orig_params=True) for _ in range(2))
        optimizer, twins = (kind(each.parameters(), lr=0.01) for each in (model, eager))
        for step in range(3):
            for each, take_step in ((model, compiled(optimizer.step)), (eager, twins.step)):
                square_loss(each, batch(dist.get_rank(), step)).backward()
                take_step()
                each.zero_grad()
        assert num_graphs() > 0
        assert_close(model.state_dict(), eager.state_dict(), rtol=1e-5, atol=1e-6)
        held = [value for state in optimizer.state.values() for value in state.values()]
        assert {type(value) for value in held if isinstance(value, torch.Tensor)} <= {torch.Tensor}


class PartlyFrozen(Block):
    """A block with a frozen bias and an unused layer: its unit waits for the gradients of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up.bias.requires_grad_(False)
        self.spare = nn.Linear(2, 2)


class FrozenStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PartlyFrozen() for _ in range(2)])
        self.order = [0, 1, 0]


@on_ranks(2)
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP])
def test_compiled_units_with_frozen_and_unused_parameters_run_twice_in_a_forward(strategy: ShardingStrategy) -> None:
    with fresh_compiler():
        beside = Beside(
            FrozenStack(), "originals", units=(PartlyFrozen,), sharding_strategy=strategy, note_outputs=False
        )
        train(beside, compiled(beside.ours))


class CheckpointedBlock(Block):
    """A block that recomputes its inner part in backward."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


@on_ranks(2)
@pytest.mark.parametrize("inside", [False, True])
def test_activation_checkpointing_inside_compiled_blocks_trains_as_the_reference(inside: bool) -> None:
    with fresh_compiler():
        beside = Beside(Stack(block=CheckpointedBlock), "originals", units=(CheckpointedBlock,), note_outputs=False)
        if inside:
            compile_after(beside.ours)
        train(beside, None if inside else compiled(beside.ours))
        assert num_graphs() > 0


@on_ranks(2)
def test_mixed_precision_in_a_compiled_model_is_that_of_the_eager_one() -> None:
    with fresh_compiler():
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        models = []
        for compile_it in (False, True):
            model = wrapped(seeded().double(), auto_wrap_policy=BLOCKS, use_orig_params=True, mixed_precision=precision)
            run, optimizer = (compiled(model) if compile_it else model), sgd(model)
            for step in range(4):
                with torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile"):
                    output = run(batch(dist.get_rank(), step))
                    assert output.dtype is torch.bfloat16
                    output.float().pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        assert num_graphs() > 0
        assert_close(models[1].state_dict(), models[0].state_dict(), rtol=1e-2, atol=1e-3)


@pytest.mark.of_guards
@on_ranks(2)
@pytest.mark.parametrize("what", ["the wrapper", "the blocks"])
def test_without_original_parameters_one_warning_says_that_nothing_is_compiled(what: str) -> None:
    with fresh_compiler():
        beside = Beside(Stack(), "flat", note_outputs=False)
        run: Any = beside.ours
        if what == "the wrapper":
            run = compiled(beside.ours)
        else:
            for block in beside.ours.module.blocks:
                block.module.compile(backend="aot_eager")
        with pytest.warns(UserWarning, match="use_orig_params=True") as caught:
            run(batch(0))
        assert len([w for w in caught if "torch.compile leaves modules" in str(w.message)]) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of = through(run, beside.ours)
            beside.train(loss_of, num_steps=3)
        assert num_graphs() == 0


@on_ranks(2)
def test_a_full_graph_over_units_is_refused_at_once_with_a_way_out() -> None:
    with fresh_compiler():
        model = wrapped(Stack().double(), auto_wrap_policy=BLOCKS, use_orig_params=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the modules inside the units"):
            compiled(model, fullgraph=True)(batch(0))
        torch._dynamo.reset()
        square_loss(model, batch(0)).backward()
        assert_idle(model)


@on_ranks(2, timeout=180)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: no g++ here")
def test_inductor_trains_as_the_reference() -> None:
    with fresh_compiler():
        import torch._inductor.config as inductor

        beside = Beside(Stack(1), "originals", note_outputs=False)
        # What costs most of a first compilation: a pool of processes, trial programs, precompiled headers.
        cheap = {"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
        with inductor.patch(cheap):
            train(beside, torch.compile(beside.ours, backend="inductor"))
        assert num_graphs() > 0


def test_a_policy_chooses_the_compiled_form_of_a_module() -> None:
    stack = Stack()
    replace_before(stack)
    plan = plan_units(stack, BLOCKS, ignored_modules=set(), ignored_params=set(), root_kwargs={})
    assert [unit.fqn for unit in plan.units] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [unit.module for unit in plan.units] == list(stack.blocks)
