"""Gradients that a program reads, sets, changes and clears in the middle of a backward: hooks, custom functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp_flat
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, ShardingStrategy
from fsdp_flat.composable import MixedPrecisionPolicy
from tests.support import assert_close, assert_equal, on_ranks
from tests.support.beside import BOTH, FRONTS, FRONTS_AND_TORCH, WRAPPER_FRONTS, Beside, grads_of, placed
from tests.support.gradient_edits import EDITS, Edited
from tests.support.kit import wrapped
from tests.support.models import WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD keeps full parameters:FutureWarning")
EACH_EDIT = pytest.mark.parametrize("edit", list(EDITS))
NOT_ALL_DROPPED = pytest.mark.parametrize("edit", [edit for edit in EDITS if edit != "clears"])


class EditedBlock(nn.Module):
    """A unit with an edited layer between others; ``runs`` says how it calls the layer."""

    def __init__(self, edit: str, runs: str = "once") -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.edited = Edited(WIDTH, edit)
        self.runs = runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.runs == "checkpoint":
            return checkpoint(self.edited, x, use_reentrant=False)
        if self.runs == "reentrant checkpoint":
            return checkpoint(self.edited, x, use_reentrant=True)
        if self.runs == "twice":
            x = self.edited(x)
        if self.runs == "also plainly":
            x = x + self.edited.compute(x)
        return self.edited(x)


def edited_model(edit: str, runs: str = "once") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), EditedBlock(edit, runs), EditedBlock("replaces"), nn.Linear(WIDTH, 5))


def beside(edit: str, fronts: Any, runs: str = "once", **options: Any) -> Beside:
    return Beside(edited_model(edit, runs), fronts, units=(EditedBlock,), **options)


# ------------------------------------------------------------------------------------------- what is reduced


@FRONTS_AND_TORCH
@EACH_EDIT
@on_ranks(2, 4)
def test_what_grad_holds_at_the_end_of_a_units_backward_is_reduced(edit: str, fronts: Any) -> None:
    beside(edit, fronts).train(num_steps=2)


@FRONTS_AND_TORCH
@EACH_EDIT
@pytest.mark.parametrize("runs", ["twice", "also plainly", "checkpoint", "reentrant checkpoint"])
@on_ranks(2)
def test_a_layer_that_runs_twice_or_is_recomputed_edits_the_same_gradient(edit: str, runs: str, fronts: Any) -> None:
    beside(edit, fronts, runs).train(num_steps=2)


@FRONTS
@EACH_EDIT
@pytest.mark.parametrize("first", ["recomputed", "plain"])
@on_ranks(2)
def test_a_unit_that_runs_in_a_reentrant_checkpoint_and_outside_of_it_edits_one_gradient(
    first: str, edit: str, front: str
) -> None:
    class Again(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for recomputes in (first == "recomputed", first == "plain"):
                x = checkpoint(self[1], self[0](x), use_reentrant=True) if recomputes else self[1](x)
            return self[2](x)

    torch.manual_seed(0)
    model = Again(nn.Linear(WIDTH, WIDTH), EditedBlock(edit), nn.Linear(WIDTH, 5))
    Beside(model, front, units=(EditedBlock,)).train(num_steps=2)


@WRAPPER_FRONTS
@EACH_EDIT
@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD 2x1", "_HYBRID_SHARD_ZERO2 1x2"])
@on_ranks(2)
def test_every_strategy_reduces_what_grad_holds(edit: str, strategy: str, front: str) -> None:
    beside(edit, front, **placed(strategy)).train(num_steps=2)


@FRONTS_AND_TORCH
@EACH_EDIT
@pytest.mark.parametrize("accumulates", [1, 2])
@on_ranks(2)
def test_an_edit_sees_the_gradients_of_earlier_backwards_of_an_accumulation(
    accumulates: int, edit: str, fronts: Any
) -> None:
    both = beside(edit, fronts)
    for _ in range(2):
        with both.no_sync():
            for _ in range(accumulates):
                both.backward()
        both.train()


@FRONTS
@EACH_EDIT
@on_ranks(2)
def test_gradients_inside_no_sync_are_cleared_between_backwards_too(edit: str, front: str) -> None:
    both = beside(edit, front)
    with both.no_sync():
        both.backward()
        both.zero_grad()
        both.backward()
    both.train()


@FRONTS
@EACH_EDIT
@on_ranks(2)
def test_an_edit_does_not_see_what_earlier_backwards_have_reduced_over_shards(edit: str, front: str) -> None:
    both = beside(edit, front, **placed("HYBRID_SHARD 2x1", front))
    # The replica's gradients of each backward alone.
    total: dict[str, torch.Tensor] = {}
    for step in range(3):
        both.plain.zero_grad()
        with reduced_over_shards(both.ours) if step < 2 else nullcontext():
            both.backward()
        for name, param in both.plain.named_parameters():
            if param.grad is not None:
                total[name] = total.get(name, 0) + param.grad
    for name, param in both.plain.named_parameters():
        param.grad = total.get(name)
    both.check_gradients()


@contextmanager
def reduced_over_shards(model: Any) -> Iterator[None]:
    """Leave gradients as sums over the shard group inside the block."""
    if isinstance(model, FSDP):
        with model.no_sync(mode="sharded"):
            yield
        return
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)


@pytest.mark.parametrize("fronts", ["originals", BOTH], ids=["originals", "fully_shard"])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
@NOT_ALL_DROPPED
@on_ranks(2)
def test_frozen_parameters_beside_edited_ones_get_no_gradient(edit: str, frozen: str, fronts: Any) -> None:
    model = edited_model(edit)
    model[1].edited.get_parameter(frozen).requires_grad_(False)
    Beside(model, fronts, units=(EditedBlock,)).train(num_steps=2)


@FRONTS_AND_TORCH
@EACH_EDIT
@on_ranks(2)
def test_a_weight_that_two_layers_share_is_edited_by_both(edit: str, fronts: Any) -> None:
    model = edited_model(edit)
    model[1].before.weight = model[1].edited.weight
    Beside(model, fronts, units=(EditedBlock,)).train(num_steps=2)


@FRONTS_AND_TORCH
@on_ranks(2)
def test_parameters_that_one_rank_edits_get_the_mean_with_zeros(fronts: Any) -> None:
    class OnOneRank(EditedBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.edited.edit = "sets" if dist.get_rank() else "clears"
            return super().forward(x)

    torch.manual_seed(0)
    # torch's fully_shard sums gradients of different sizes there.
    fronts = "fully_shard" if isinstance(fronts, tuple) else fronts
    Beside(nn.Sequential(OnOneRank("sets"), nn.Linear(WIDTH, 5)), fronts, units=(OnOneRank,)).train(num_steps=2)


@FRONTS
@on_ranks(2)
def test_a_gradient_set_after_its_units_backward_counts_in_the_same_backward(front: str) -> None:
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
            ctx.weight = weight
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            # The unit of the weight runs after this one, so its backward is over.
            for weight in ctx.weight:
                old = 0 if weight.grad is None else weight.grad
                weight.grad = old + torch.full_like(weight, 1.0 + dist.get_rank())
            return None, grad

    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights: list[nn.Parameter] = []
            note = inner(self[1]).before.register_forward_hook(lambda module, *_: weights.append(module.weight))
            y = super().forward(Late.apply(weights, x.requires_grad_()))
            note.remove()
            return y

    def inner(module: Any) -> Any:
        return module.module if isinstance(module, FSDP) else module

    torch.manual_seed(0)
    model = Model(nn.Linear(WIDTH, WIDTH), EditedBlock("scales"), nn.Linear(WIDTH, 5))
    Beside(model, front, units=(EditedBlock,)).train(num_steps=2)


# --------------------------------------------------------------------------------------------- dtypes


class Whole(nn.Module):
    """An edited layer of small whole numbers, without a bias or a nonlinear function: gradients are exact in bf16."""

    def __init__(self, edit: str) -> None:
        super().__init__()
        self.edited = edited = Edited(4, edit)
        del edited.bias
        edited.compute = lambda x: x @ edited.weight
        nn.init.constant_(edited.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.edited(x)


@pytest.mark.parametrize("num_backwards", [1, 2, 3])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@EACH_EDIT
@on_ranks(2)
def test_low_precision_gradients_are_edited_as_torchs(edit: str, reduce_dtype: torch.dtype, num_backwards: int) -> None:
    """With a wider reduce dtype an edit sees the gradients of its own backward alone."""
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    models: dict[str, Any] = {
        "torch": torch.distributed.fsdp.fully_shard(
            Whole(edit), mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(**precision)
        ),
        "fully_shard": fsdp_flat.fully_shard(Whole(edit), mp_policy=MixedPrecisionPolicy(**precision)),
        "originals": wrapped(Whole(edit), use_orig_params=True, mixed_precision=MixedPrecision(**precision)),
        "flat": wrapped(Whole(edit), use_orig_params=False, mixed_precision=MixedPrecision(**precision)),
    }
    found: dict[str, Any] = {}
    for name, model in models.items():
        for number in range(num_backwards):
            is_last = number == num_backwards - 1
            context: Any = nullcontext() if is_last or not isinstance(model, FSDP) else model.no_sync()
            if not isinstance(model, FSDP):
                model.set_requires_gradient_sync(is_last)
            with context:
                x = torch.arange(16.0).view(4, 4) + number + dist.get_rank()
                model(x).sum().backward()
        (found[name],) = grads_of(model).values()
    for name in ("fully_shard", "originals", "flat"):
        if found["torch"] is None and name == "flat":
            assert found[name] is None or not found[name].any()
        else:
            assert_equal(found[name], found["torch"], what=name)


# ------------------------------------------------------------------------------- hooks of the user's parameters


@FRONTS
@on_ranks(2)
def test_a_hook_that_a_forward_sets_runs_once(front: str) -> None:
    calls: list[torch.Size] = []

    class Hooks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            handle = self.weight.register_hook(lambda grad: calls.append(grad.shape) or grad * 2)
            y = super().forward(x)
            y.register_hook(lambda _grad: None)
            self.handles = [handle]
            return y

    torch.manual_seed(0)
    both = Beside(nn.Sequential(Hooks(WIDTH, WIDTH), nn.Linear(WIDTH, 5)), front, units=(Hooks,))
    both.backward()
    both.check_gradients()
    assert calls == [torch.Size((WIDTH, WIDTH))] * 2


@on_ranks(2)
def test_where_nothing_is_sharded_a_hook_of_the_users_parameter_sees_and_clears_the_gradient_so_far() -> None:
    def run(shard: Callable[[nn.Module], Any]) -> tuple[list[Any], torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4, bias=False)
        weight, total, seen = layer.weight, torch.zeros(4, 4), []

        def hook(new: torch.Tensor) -> torch.Tensor | None:
            total.add_(new)
            seen.append(None if weight.grad is None else weight.grad.sum().item())
            if len(seen) == 2:
                weight.grad = None
                return total.clone()
            return None

        class Tiles(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return layer(x)

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> Any:
                (x,) = ctx.saved_tensors
                for tile in range(2):
                    with torch.enable_grad():
                        y = layer(x.chunk(2)[tile].detach())
                    torch.autograd.backward(y, grad.chunk(2)[tile])
                return None

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return Tiles.apply(x.requires_grad_())

        model = shard(Model())
        weight.register_hook(hook)
        model(torch.arange(16.0).view(4, 4)).sum().backward()
        return seen, weight.grad.clone()

    expected = run(lambda module: module)
    found = run(lambda module: wrapped(module, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD))
    assert_equal(found, expected)


@FRONTS
@on_ranks(2)
def test_none_met_in_a_backward_is_explained_with_the_unit(front: str) -> None:
    class Meets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            held[0].grad.add_(1)
            return grad

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Meets.apply(super().forward(x))

    torch.manual_seed(0)
    both = Beside(nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(WIDTH, 5)), front, units=(Block,))
    held = [next(iter(both.ours[1].parameters()))]
    with pytest.raises(
        AttributeError,
        match=r"'NoneType' object .*\. It was raised in the backward of units .*'1'.*\.grad of a sharded parameter",
    ):
        both.ours(both.batch()).sum().backward()
    held[0] = nn.Parameter(torch.ones(1))
    held[0].grad = torch.ones(1)
    both.train()


# ----------------------------------------------------------------------------------------------- reduced by hand


class Chunked(nn.Module):
    """Returns hidden states; its head is called in chunks from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def train_head(fully_shard: Any, chunks: list[int], *, trains_body: bool) -> list[Any]:
    """Train a head in as many chunks as a rank has; return its gradients and all weights of each step."""
    torch.manual_seed(0)
    model: Any = Chunked()
    for module in (model.body, model.head, model):
        fully_shard(module)
    head, found = model.head, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    head.set_reshard_after_forward(False)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        hidden = model(torch.randn(6, WIDTH))
        leaf = hidden.detach().requires_grad_()
        head.set_requires_gradient_sync(False)
        head.set_reshard_after_backward(False)
        head.unshard()
        for chunk in leaf.split(2)[: chunks[dist.get_rank()]]:
            head(chunk).square().mean().backward()
        head.set_requires_gradient_sync(True)
        head.set_reshard_after_backward(True)
        head._get_fsdp_state()._fsdp_param_group.post_backward()
        found.append({name: param.grad.full_tensor() for name, param in head.named_parameters()})
        if trains_body:
            hidden.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: param.full_tensor().detach() for name, param in model.named_parameters()})
    return found


@pytest.mark.parametrize("trains_body", [False, True])
@pytest.mark.parametrize("chunks", [[3, 3], [1, 3]])
@on_ranks(2)
def test_gradients_reduced_by_hand_are_torchs_though_ranks_ran_other_numbers_of_backwards(
    chunks: list[int], trains_body: bool
) -> None:
    expected = train_head(torch.distributed.fsdp.fully_shard, chunks, trains_body=trains_body)
    found = train_head(fsdp_flat.fully_shard, chunks, trains_body=trains_body)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_gradient_set_between_backwards_is_reduced_by_hand() -> None:
    """As a pipeline that computes the gradients of weights after those of inputs."""

    def run(fully_shard: Any) -> torch.Tensor:
        torch.manual_seed(0)
        head: Any = nn.Linear(WIDTH, 3, bias=False)
        fully_shard(head)
        head.set_requires_gradient_sync(False)
        head.set_reshard_after_backward(False)
        head(torch.ones(2, WIDTH)).sum().backward()
        (param,) = head._get_fsdp_state()._fsdp_param_group.fsdp_params
        weight = param.unsharded_param
        weight.grad = (0 if weight.grad is None else weight.grad) + torch.full((3, WIDTH), 1.0 + dist.get_rank())
        head.set_requires_gradient_sync(True)
        head.set_reshard_after_backward(True)
        head._get_fsdp_state()._fsdp_param_group.post_backward()
        return head.weight.grad.full_tensor()

    assert_equal(run(fsdp_flat.fully_shard), run(torch.distributed.fsdp.fully_shard))
    assert_equal(run(fsdp_flat.fully_shard), torch.full((3, WIDTH), 3.5))


@on_ranks(2)
def test_a_rank_without_gradients_may_end_a_backward_by_hand_alone(rank: int) -> None:
    head: Any = fsdp_flat.fully_shard(nn.Linear(WIDTH, 3))
    head(torch.ones(2, WIDTH)).sum().backward()
    if rank == 0:
        head._get_fsdp_state()._fsdp_param_group.post_backward()
    head(torch.ones(2, WIDTH)).sum().backward()
