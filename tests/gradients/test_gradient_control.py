"""Accumulation, communication hooks, divide factors, optimizers in backward, hooks on parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks

from fsdp_flat import MixedPrecision
from fsdp_flat.composable import trace
from fsdp_flat.core import units_of
from fsdp_flat.errors import OptionError, UsageError
from tests.support import on_ranks
from tests.support.kit import full_params, train_on
from tests.support.surface_models import (
    ALL_STRATEGIES,
    assert_near,
    batches,
    count_events,
    grads_or_zeros,
    mean_loss,
    plain_grads,
    plain_mean_grads,
    sharded,
    sharded_by_peer,
    small_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")
KINDS = pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
STRATEGIES = pytest.mark.parametrize("strategy", ALL_STRATEGIES)


# ----------------------------------------------------------------------------------------------------- accumulation


def plain_grads_of_steps(num_steps: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """What a plain model accumulates over the batches of all ranks."""
    plain = small_model()
    for step in range(num_steps):
        for batch in batches(num_ranks, step=step):
            (mean_loss(plain, batch) / num_ranks).backward()
    return plain_grads(plain)


@KINDS
@STRATEGIES
@on_ranks(2)
def test_accumulation_under_no_sync_equals_one_large_batch(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), strategy, use_orig_params=use_orig_params)
    with trace(model) as events:
        with model.no_sync():
            for step in range(2):
                mean_loss(model, batches(num_ranks, step=step)[rank]).backward()
        assert count_events(events, "reduce_scatter") == {}
        reshards = count_events(events, "reshard")
        mean_loss(model, batches(num_ranks, step=2)[rank]).backward()
        assert set(count_events(events, "reduce_scatter").values()) == {1}
    if strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        assert reshards == {}, "parameters stay gathered between the micro batches"
    elif strategy != "NO_SHARD":
        assert reshards["1"] == 4, "freed after each forward and each backward"
    assert_near(grads_or_zeros(model), plain_grads_of_steps(3, num_ranks), 1e-5, "gradients")


@KINDS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
@on_ranks(4)
def test_accumulation_that_stays_sharded_keeps_shards_only_and_equals_one_large_batch(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    """Pain 10."""
    model = sharded(small_model(), strategy, use_orig_params=use_orig_params)
    handles = [handle for unit in units_of(model) for handle in unit.param_groups]
    with model.no_sync(mode="sharded"):
        for step in range(2):
            mean_loss(model, batches(num_ranks, step=step)[rank]).backward()
            assert not any(any(handle.grads.ready()) for handle in handles), "no whole gradient waits"
            held = sum(param.grad.numel() for param in model.parameters() if param.grad is not None)
            assert held <= sum(handle.layout.shard_numel for handle in handles)
    mean_loss(model, batches(num_ranks, step=2)[rank]).backward()
    assert_near(grads_or_zeros(model), plain_grads_of_steps(3, num_ranks), 1e-5, "gradients")


@on_ranks(2)
def test_another_mode_of_no_sync_says_which_there_are(rank: int) -> None:
    model = sharded(small_model())
    with pytest.raises(ValueError, match='mode="local" or mode="sharded"; got \'cpu\''), model.no_sync(mode="cpu"):
        pass


@KINDS
@on_ranks(2)
def test_no_sync_and_reduced_backwards_mix_in_any_order(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    model, plain = sharded(small_model(), use_orig_params=use_orig_params), small_model()
    for step, reduced in enumerate([True, False, True, True, False, True]):
        batch = batches(num_ranks, step=step)
        if reduced:
            mean_loss(model, batch[rank]).backward()
        else:
            with model.no_sync():
                mean_loss(model, batch[rank]).backward()
        for rows in batch:
            (mean_loss(plain, rows) / num_ranks).backward()
    assert_near(grads_or_zeros(model), plain_grads(plain), 1e-5, "gradients")


@on_ranks(2)
def test_no_sync_is_for_the_root_and_not_nested(rank: int, num_ranks: int) -> None:
    model = sharded(small_model())
    mean_loss(model, batches(num_ranks)[rank])
    with pytest.raises(RuntimeError, match=r"outermost.*'1' is nested"), model[1].no_sync():
        pass
    with model.no_sync(), pytest.raises(AssertionError, match="inside no_sync, of which one level"), model.no_sync():
        pass
    model[1].set_requires_gradient_sync(False)
    with pytest.raises(AssertionError, match=r"set_requires_gradient_sync\(False\)"), model.no_sync():
        pass
    model[1].set_requires_gradient_sync(True)
    # None of the errors leaves the units without reduction.
    mean_loss(model, batches(num_ranks)[rank]).backward()
    assert_near(grads_or_zeros(model), plain_mean_grads(small_model(), num_ranks), 1e-5, "gradients")


# ---------------------------------------------------------------------------------------------- communication hooks


class HookCalls:
    """A hook of the caller's own, as FSDP1's documentation describes it, that notes its arguments."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = []

    def __call__(self, state: Any, grad: torch.Tensor, out: torch.Tensor | None = None) -> None:
        assert state == "state"
        self.calls.append((tuple(grad.shape), None if out is None else tuple(out.shape)))
        size = dist.get_world_size(self.group)
        dist.all_reduce(grad, group=self.group)
        grad.div_(size)
        if out is not None:
            out.copy_(grad.chunk(size)[dist.get_rank(self.group)])


@KINDS
@STRATEGIES
@on_ranks(2, 4)
def test_a_comm_hook_replaces_the_reduction_over_the_shard_axis(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), strategy, use_orig_params=use_orig_params)
    hook = HookCalls(model.process_group)
    model.register_comm_hook("state", hook)
    for _ in range(2):
        mean_loss(model, batches(num_ranks)[rank]).backward()
    flat_sizes = [unit.param_groups[0].layout for unit in (model[2]._unit, model[1]._unit, model._unit)]
    size = 1 if strategy == "NO_SHARD" else dist.get_world_size(model.process_group)
    assert sorted(hook.calls) == sorted(
        [((layout.numel,), None if size == 1 else (layout.numel // size,)) for layout in flat_sizes] * 2
    )
    expected = plain_mean_grads(small_model(), num_ranks)
    assert_near(grads_or_zeros(model), {name: 2 * grad for name, grad in expected.items()}, 1e-5, "gradients")


@KINDS
@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
@STRATEGIES
@on_ranks(2)
def test_built_in_compression_hooks_run_on_gloo(
    strategy: str, name: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), strategy, use_orig_params=use_orig_params)
    model.register_comm_hook(None, getattr(default_hooks, name))
    mean_loss(model, batches(num_ranks)[rank]).backward()
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.float32}
    got, expected = grads_or_zeros(model), plain_mean_grads(small_model(), num_ranks)
    assert_near(got, expected, 1e-2, "gradients")
    with pytest.raises(AssertionError, match="differs"):  # it did compress
        assert_near(got, expected, 1e-6, "gradients")


@KINDS
@pytest.mark.parametrize("strategy, name", [("NO_SHARD", "allreduce_hook"), ("FULL_SHARD", "reduce_scatter_hook")])
@on_ranks(2, 4)
def test_built_in_uncompressed_hooks_give_the_mean(
    strategy: str, name: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), strategy, use_orig_params=use_orig_params)
    model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), getattr(default_hooks, name))
    with warnings.catch_warnings():
        # torch's own hooks call functions that newer torch deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        mean_loss(model, batches(num_ranks)[rank]).backward()
    assert_near(grads_or_zeros(model), plain_mean_grads(small_model(), num_ranks), 1e-5, "gradients")


@on_ranks(2)
def test_comm_hooks_are_refused_with_the_peers_error_types(rank: int, num_ranks: int) -> None:
    model, peer = sharded(small_model()), sharded_by_peer(small_model(), "FULL_SHARD")
    hook = HookCalls(None)
    for wrapped in (model, peer):
        mean_loss(wrapped, batches(num_ranks)[rank])
        with pytest.raises(AssertionError):
            wrapped[1].register_comm_hook(None, hook)
        with pytest.raises(ValueError, match="callable"):
            wrapped.register_comm_hook(None, "average")
        wrapped.register_comm_hook("state", hook)
        with pytest.raises(AssertionError):
            wrapped.register_comm_hook(None, hook)
    with pytest.raises(AssertionError, match="registered already"):
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with pytest.raises(AssertionError, match="'1' is nested"):
        model[1].register_comm_hook(None, hook)


# --------------------------------------------------------------------------------------------------- divide factors


@KINDS
@STRATEGIES
@on_ranks(2, 4)
def test_a_divide_factor_replaces_the_number_of_ranks(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    mean = plain_mean_grads(small_model(), num_ranks)
    for factor, scale in ((7.0, num_ranks / 7), (1.0, float(num_ranks)), (None, 1.0)):
        model = sharded(small_model(), strategy, use_orig_params=use_orig_params)
        model.set_gradient_divide_factor(factor)
        mean_loss(model, batches(num_ranks)[rank]).backward()
        assert_near(
            grads_or_zeros(model), {name: grad * scale for name, grad in mean.items()}, 1e-5, f"divided by {factor}"
        )


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@on_ranks(2, 4)
def test_a_token_count_known_after_backward_gives_the_single_process_gradient(
    dtype: torch.dtype, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    precision = None if dtype is torch.float32 else MixedPrecision(reduce_dtype=dtype)
    model = sharded(small_model(num_blocks=4), use_orig_params=use_orig_params, mixed_precision=precision)
    tokens = torch.zeros(())
    model.set_gradient_divide_factor(tokens)
    rows = [batches(num_ranks)[r, : r + 1] for r in range(num_ranks)]  # rank r has r + 1 rows
    inputs = rows[rank].requires_grad_()

    def count_last(_grad: torch.Tensor) -> None:
        # The gradient of the inputs comes last, when most units are reduced already.
        tokens.add_(count_tokens(len(inputs)))

    inputs.register_hook(count_last)
    model(inputs).pow(2).mean(dim=1).sum().backward()
    assert tokens.item() == num_ranks * (num_ranks + 1) / 2

    plain = small_model(num_blocks=4)
    plain(torch.cat(rows).detach()).pow(2).mean(dim=1).mean().backward()
    assert_near(grads_or_zeros(model), plain_grads(plain), 1e-5 if precision is None else 1e-2, "gradients")


def count_tokens(own: int) -> float:
    total = torch.tensor(float(own))
    dist.all_reduce(total)
    return total.item()


@on_ranks(2)
def test_a_divide_factor_that_cannot_be_used_is_refused_when_it_is_set() -> None:
    model = sharded(small_model())
    with pytest.raises(OptionError, match="factor must not be zero"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(TypeError, match="factor must be a number"):
        model.set_gradient_divide_factor("2")
    model.register_comm_hook(None, lambda _state, full, out: None)
    with pytest.raises(UsageError, match="communication hook divides gradients by itself"):
        model.set_gradient_divide_factor(2.0)


# --------------------------------------------------------------------------------------------- optimizers in backward


def step_in_backward(optimizer: Any, params: Any, arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # The package's import uses torch.jit, which torch itself deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optimizer, params, arguments)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2, 4)
def test_an_optimizer_in_backward_equals_a_normal_step(strategy: str, rank: int, num_ranks: int) -> None:
    model, normal = (sharded(small_model(), strategy, use_orig_params=True) for _ in range(2))
    step_in_backward(torch.optim.Adam, model.parameters(), {"lr": 1e-2})
    optimizer = torch.optim.Adam(normal.parameters(), lr=1e-2)
    for step in range(3):
        batch = batches(num_ranks, step=step)[rank]
        mean_loss(model, batch).backward()
        assert all(param.grad is None for param in model.parameters()), "freed as soon as they were used"
        train_on(normal, optimizer, [batch], mean_loss)
    assert_near(full_params(model), full_params(normal), 1e-6, "parameters")


@on_ranks(2)
def test_an_optimizer_in_backward_of_a_flat_parameter_is_refused_at_first_use(rank: int, num_ranks: int) -> None:
    peer = sharded_by_peer(small_model(), "FULL_SHARD", use_orig_params=False)
    model = sharded(small_model(), use_orig_params=False)
    for wrapped in (peer, model):
        step_in_backward(torch.optim.SGD, wrapped.parameters(), {"lr": 0.1})
        with pytest.raises(RuntimeError, match="use_orig_params"):
            wrapped(batches(num_ranks)[rank])


# ------------------------------------------------------------------------------------------------ hooks on parameters


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
@on_ranks(2)
def test_a_hook_on_an_original_parameter_sees_its_whole_local_gradient(
    when: str, strategy: str, rank: int, num_ranks: int
) -> None:
    plain, seen = small_model(), {}
    if when == "before wrapping":
        hook_all(plain, seen)
    model = sharded(plain, strategy, use_orig_params=True)
    if when == "after wrapping":
        hook_all(model, seen)
    mean_loss(model, batches(num_ranks)[rank]).backward()
    local = small_model()
    mean_loss(local, batches(num_ranks)[rank]).backward()
    assert_near(dict(sorted(seen.items())), dict(sorted(plain_grads(local).items())), 1e-5, "seen by the hooks")


def hook_all(model: nn.Module, seen: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        clean = name.replace("_fsdp_wrapped_module.", "")
        param.register_hook(lambda grad, clean=clean: seen.__setitem__(clean, grad.clone()))


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@on_ranks(2)
def test_a_hook_can_change_the_gradient_before_it_is_reduced(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    plain = small_model()
    plain[1].up.weight.register_hook(lambda grad: 3 * grad)  # flat parameters: only those set before wrapping exist
    plain[3].bias.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    plain[1].up.weight.register_hook(lambda grad: None)
    model = sharded(plain, use_orig_params=use_orig_params)
    mean_loss(model, batches(num_ranks)[rank]).backward()
    local = small_model()
    expected: dict[str, torch.Tensor] = {}
    for batch in batches(num_ranks):
        local.zero_grad()
        mean_loss(local, batch).backward()
        grads = plain_grads(local)
        grads["1.up.weight"] *= 3
        grads["3.bias"].clamp_(-1e-3, 1e-3)
        expected = {name: expected.get(name, 0) + grad / num_ranks for name, grad in grads.items()}
    assert_near(grads_or_zeros(model), expected, 1e-5, "gradients")


@on_ranks(2)
def test_a_hook_that_is_registered_in_a_backward_changes_the_gradients_that_follow(rank: int, num_ranks: int) -> None:
    model = sharded(small_model(), use_orig_params=True)
    block = model.module[1].module

    def triple(*_: Any) -> None:
        block.up.weight.register_hook(lambda grad: 3 * grad)

    block.down.register_full_backward_hook(triple)
    mean_loss(model, batches(num_ranks)[rank]).backward()
    expected = plain_mean_grads(small_model(), num_ranks)
    expected["1.up.weight"] *= 3
    assert_near(grads_or_zeros(model), expected, 1e-5, "gradients")


@KINDS
@on_ranks(2)
def test_a_hook_that_changes_the_shape_of_a_gradient_raises(use_orig_params: bool, rank: int, num_ranks: int) -> None:
    plain = small_model()
    plain[1].up.weight.register_hook(lambda grad: grad.sum(1, keepdim=True))
    model = sharded(plain, use_orig_params=use_orig_params)
    rows, columns = small_model()[1].up.weight.shape
    with pytest.raises(UsageError, match=rf"'up.weight'.*\({rows}, 1\) on rank {rank}.*\({rows}, {columns}\)"):
        mean_loss(model, batches(num_ranks)[rank]).backward()


@KINDS
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_a_post_accumulate_hook_fires_once_per_backward_with_the_reduced_gradient(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model = sharded(small_model(), strategy, use_orig_params=use_orig_params)
    params = list(model.parameters())
    calls = [0] * len(params)
    norms: list[float] = []

    def note(index: int) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            assert param is params[index]
            assert param.grad is not None
            assert param.grad.shape == param.shape
            calls[index] += 1
            norms.append(param.grad.norm().item())

        return hook

    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(note(index))
    for backward in range(1, 4):
        norms.clear()
        mean_loss(model, batches(num_ranks)[rank]).backward()
        assert calls == [backward if param.numel() else 0 for param in params]
        now = torch.stack([param.grad.norm() for param in params if param.grad is not None])
        assert sorted(norms) == sorted(now.tolist())


@on_ranks(2)
def test_a_removed_hook_does_not_fire(rank: int, num_ranks: int) -> None:
    model, calls = sharded(small_model(), use_orig_params=True), []
    handles = [param.register_hook(lambda grad: calls.append(1)) for param in model.parameters()]
    mean_loss(model, batches(num_ranks)[rank]).backward()
    assert len(calls) == len(handles)
    for handle in handles:
        handle.remove()
    mean_loss(model, batches(num_ranks)[rank]).backward()
    assert len(calls) == len(handles)


@on_ranks(2)
def test_a_hook_on_a_flat_parameter_sees_and_changes_the_reduced_shard(rank: int, num_ranks: int) -> None:
    model, other = (sharded(small_model(), use_orig_params=False) for _ in range(2))
    seen: list[torch.Tensor] = []
    model[1]._flat_param.register_hook(lambda grad: seen.append(grad.clone()))
    model[1]._flat_param.register_hook(lambda grad: 2 * grad)
    for _ in range(2):
        mean_loss(model, batches(num_ranks)[rank]).backward()
    mean_loss(other, batches(num_ranks)[rank]).backward()
    reduced = other[1]._flat_param.grad
    assert_near({0: seen[0], 1: seen[1]}, {0: reduced, 1: reduced}, 1e-6, "seen")
    assert_near(model[1]._flat_param.grad, 4 * reduced, 1e-6, "gradient")


@on_ranks(2)
def test_a_post_accumulate_hook_set_before_wrapping_fires_or_is_warned_about(rank: int, num_ranks: int) -> None:
    calls: list[tuple[int, ...]] = []
    for use_orig_params in (True, False):
        calls.clear()
        plain = small_model()
        plain[1].up.weight.register_post_accumulate_grad_hook(lambda param: calls.append(tuple(param.shape)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = sharded(plain, use_orig_params=use_orig_params)
            mean_loss(model, batches(num_ranks)[rank]).backward()
        texts = [str(warning.message) for warning in caught]
        if use_orig_params:
            # This rank's slice, where it has one.
            assert calls == [shape for shape in [tuple(model[1].up.weight.shape)] if shape != (0,)]
            assert texts == []
        else:
            assert calls == []
            assert len(texts) == 1
            assert "'up.weight'" in texts[0]
            assert "use_orig_params=True" in texts[0]


# ------------------------------------------------------------------------------------------------------- end to end


@KINDS
@STRATEGIES
@on_ranks(2)
def test_accumulation_clipping_and_adam_together_equal_the_replicated_model(
    strategy: str, use_orig_params: bool, rank: int, num_ranks: int
) -> None:
    model, plain = sharded(small_model(), strategy, use_orig_params=use_orig_params), small_model()
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        with model.no_sync():
            mean_loss(model, batches(num_ranks, step=2 * step)[rank]).backward()
        mean_loss(model, batches(num_ranks, step=2 * step + 1)[rank]).backward()
        for micro in (2 * step, 2 * step + 1):
            for batch in batches(num_ranks, step=micro):
                (mean_loss(plain, batch) / num_ranks).backward()
        norms = model.clip_grad_norm_(0.3), nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        assert_near(norms[0], norms[1], 1e-5, "norm")
        ours.step()
        reference.step()
        ours.zero_grad()
        reference.zero_grad()
    got = full_params(model)
    assert_near(got, {name: param.detach() for name, param in plain.named_parameters()}, 1e-4, "parameters")
