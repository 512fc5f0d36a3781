"""``clip_grad_norm_``: the norm over all ranks, whatever the tree is mixed of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import ShardingStrategy
from fsdp_flat.errors import RankMismatchError, UsageError
from tests.support import assert_close, on_ranks
from tests.support.kit import full_grads, no_shard_allowed, square_loss
from tests.support.wrapper_models import assert_same_grads, batch, mesh_options, message, seeded, shard, shard_by_peer

NORMS = pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, float("inf")])
ODD_NORMS = pytest.mark.parametrize("norm_type", [0, 0.5, 3, -1, -2.5, -float("inf")])


def uniform(strategy: str) -> Callable[[nn.Module], Any]:
    return lambda model: shard(model, strategy, **mesh_options(strategy))


def mixed_strategies(model: Any) -> Any:
    with no_shard_allowed():
        model.blocks[0] = FSDP(model.blocks[0], sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
        model.blocks[1] = FSDP(
            model.blocks[1],
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=init_device_mesh("cpu", (2, 2)),
            use_orig_params=True,
        )
    return FSDP(model, use_orig_params=True)


def frozen(model: Any) -> Any:
    model.blocks[0].requires_grad_(False)
    model.last.bias.requires_grad_(False)
    return shard(model, use_orig_params=True)


def ignored(model: Any) -> Any:
    return shard(model, ignored_states=[model.last.weight, model.blocks[1].up.bias])


TREES: dict[str, Callable[[nn.Module], Any]] = {
    "FULL_SHARD": uniform("FULL_SHARD"),
    "SHARD_GRAD_OP": uniform("SHARD_GRAD_OP"),
    "NO_SHARD": uniform("NO_SHARD"),
    "HYBRID_SHARD": uniform("HYBRID_SHARD"),
    "original parameters": lambda model: shard(model, use_orig_params=True),
    "one unit": lambda model: shard(model, by_blocks=False),
    "three strategies": mixed_strategies,
    "frozen parts": frozen,
    "ignored parts": ignored,
}


@NORMS
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
@on_ranks(4)
def test_the_norm_and_the_clipped_gradients_are_the_reference_on_every_rank(
    max_norm: float, tree: str, norm_type: float, rank: int, num_ranks: int
) -> None:
    plain = seeded()
    model = TREES[tree](seeded())
    # The same data everywhere, since nobody reduces the gradients of ignored parameters.
    (square_loss(model, batch(0)) * 5).backward()
    for (_, param), (_, other) in zip(seeded().named_parameters(), plain.named_parameters()):
        assert param.shape == other.shape
    (square_loss(plain, batch(0)) * 5).backward()
    for name, param in plain.named_parameters():
        if tree == "frozen parts" and (name.startswith("blocks.0.") or name == "last.bias"):
            param.grad = None
    norm = model.clip_grad_norm_(max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    assert_close(norm, expected, rtol=1e-5, atol=0.0)
    assert expected > 0.05
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    assert_close(full_grads(model), wanted, rtol=1e-4, atol=1e-6)


@NORMS
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_the_norm_and_the_clipped_gradients_are_the_peers(
    strategy: str, use_orig_params: bool, norm_type: float, rank: int
) -> None:
    groups = mesh_options(strategy)
    ours = shard(seeded(), strategy, use_orig_params=use_orig_params, **groups)
    theirs = shard_by_peer(seeded(), strategy, use_orig_params=use_orig_params, **groups)
    norms = []
    for model in (ours, theirs):
        square_loss(model, batch(rank)).backward()
        norms.append(model.clip_grad_norm_(0.1, norm_type))
    assert_close(norms[0], norms[1], rtol=1e-5, atol=0.0)
    assert_same_grads(ours, theirs)


@ODD_NORMS
@pytest.mark.parametrize("tree", TREES)
@on_ranks(4)
def test_norms_of_every_order_are_those_of_torch(tree: str, norm_type: float, rank: int) -> None:
    plain = seeded()
    model = TREES[tree](seeded())
    for each in (model, plain):
        (square_loss(each, batch(0)) * 5).backward()
    for name, param in plain.named_parameters():
        if tree == "frozen parts" and (name.startswith("blocks.0.") or name == "last.bias"):
            param.grad = None
    # A parameter without a gradient, and one whose gradient has no element but zeros; the largest elements are alike.
    for each in (model, plain):
        with FSDP.summon_full_params(each, with_grads=True) if each is model else nullcontext():
            for name, param in each.named_parameters():
                if param.grad is not None:
                    param.grad.add_(param.grad.sign() * 0.1).masked_fill_(param.grad == 0, 0.25)
                if name == "blocks.1.down.bias" and norm_type >= 0:
                    param.grad.zero_()
    norm = model.clip_grad_norm_(0.05, norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)
    assert expected > 0
    assert_close(norm, expected, rtol=1e-4, atol=0.0)
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    assert_close(full_grads(model), wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(4)
def test_ranks_without_elements_leave_every_norm_as_it_is(use_orig_params: bool, rank: int) -> None:
    model = FSDP(nn.Linear(1, 1), use_orig_params=use_orig_params)
    for norm_type, expected in ((0, 2.0), (-1, 2 / 3), (-float("inf"), 1.0), (1, 3.0)):
        model.zero_grad()
        model(torch.full((1, 1), 2.0)).sum().backward()
        torch.testing.assert_close(model.clip_grad_norm_(1e9, norm_type), torch.tensor(expected))
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without gradients")
        for norm_type in (0, -1, -float("inf")):
            torch.testing.assert_close(model.clip_grad_norm_(1.0, norm_type), torch.tensor(0.0))


class Complex(nn.Module):
    """A complex and a real parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = nn.Parameter(torch.randn(5, dtype=dtype))
        self.scale = nn.Parameter(torch.randn(5, dtype=dtype.to_real()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.turned * x).abs().square().sum() + (self.scale * x).sum()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@on_ranks(2)
def test_complex_gradients_are_clipped_by_their_absolute_values(dtype: torch.dtype, strategy: str) -> None:
    for norm_type in (2.0, 1.0, 0.5, 0.0, -1.0, float("inf")):
        model, plain = shard(Complex(dtype), strategy, by_blocks=False, use_orig_params=True), Complex(dtype)
        for each in (model, plain):
            each(torch.arange(1.0, 6.0, dtype=dtype.to_real())).backward()
        norm = model.clip_grad_norm_(0.1, norm_type)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        assert norm.dtype is dtype.to_real()
        assert_close(norm, expected, rtol=1e-5, atol=0.0)
        wanted = {name: param.grad for name, param in plain.named_parameters()}
        assert_close(full_grads(model), wanted, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_the_norm_has_the_dtype_that_the_gradients_promote_to(rank: int) -> None:
    def make() -> nn.Module:
        model = seeded()
        model.blocks[1].double()
        return model

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.model.blocks[0](self.model.first(x))
            return self.model.last(self.model.blocks[1](x.double()).float())

    model, plain = shard(Mixed(), use_orig_params=True), Mixed()
    square_loss(model, batch(0)).backward()
    square_loss(plain, batch(0)).backward()
    norm = model.clip_grad_norm_(0.1)
    total = torch.stack([param.grad.double().norm() for param in plain.parameters()]).norm()
    assert norm.dtype is torch.float64
    assert_close(norm, total, rtol=1e-5, atol=0.0)
    for name, grad in full_grads(model).items():
        other = dict(plain.named_parameters())[name].grad
        assert_close(grad, other * (0.1 / (total + 1e-6)).to(other.dtype), rtol=1e-4, atol=1e-6, what=name)


@on_ranks(2)
def test_bf16_gradients_give_a_bf16_norm_as_from_the_peer(rank: int) -> None:
    norms = []
    for wrapped in (shard, shard_by_peer):
        model = wrapped(seeded().to(torch.bfloat16))
        with torch.no_grad():
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.5)
        norms.append(model.clip_grad_norm_(0.1))
        assert norms[-1].dtype is torch.bfloat16
    assert_close(norms[0], norms[1], rtol=1e-2, atol=0.0)


@on_ranks(2)
def test_a_nested_wrapper_is_an_error_that_names_both(rank: int) -> None:
    model = shard(seeded())
    square_loss(model, batch(rank)).backward()
    text = message(UsageError, RuntimeError, lambda: model.blocks[1].clip_grad_norm_(1.0))
    assert "clip_grad_norm_" in text
    assert "'blocks.1'" in text
    assert "'Model'" in text


@on_ranks(2)
def test_without_gradients_the_norm_is_zero_with_a_warning_where_ranks_may_differ() -> None:
    zero = torch.tensor(0.0)
    with pytest.warns(UserWarning, match="without gradients"):
        norm = shard(seeded(), "FULL_SHARD").clip_grad_norm_(1.0)
    assert_close(norm, zero, rtol=0.0, atol=0.0)
    assert_close(shard(seeded(), "NO_SHARD").clip_grad_norm_(1.0), zero, rtol=0.0, atol=0.0)


@on_ranks(2)
def test_a_rank_without_a_piece_of_any_trained_parameter_gets_the_same_norm(rank: int) -> None:
    model = FSDP(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), use_orig_params=True)
    model(torch.ones(1, 1)).sum().backward()
    if rank == 1:
        # As an optimizer sees it that was told to leave the second layer alone.
        for param in model.parameters():
            param.grad = None
        with pytest.warns(UserWarning, match="without gradients"):
            norm = model.clip_grad_norm_(1.0)
    else:
        norm = model.clip_grad_norm_(1.0)
    norms: list[Any] = [None, None]
    dist.all_gather_object(norms, float(norm))
    assert norms[0] == norms[1] > 0


@on_ranks(2)
def test_a_gradient_that_is_not_finite_shows_in_the_norm_of_every_rank(rank: int) -> None:
    model = shard(seeded())
    square_loss(model, batch(rank)).backward()
    if rank == 1:
        model._flat_param.grad[0] = float("inf")
    assert model.clip_grad_norm_(1.0).isinf()


@on_ranks(2)
def test_a_negative_bound_is_warned_of_and_does_what_torchs_does(rank: int) -> None:
    model = shard(seeded())
    square_loss(model, batch(rank)).backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    with pytest.warns(UserWarning, match=r"max_norm=-1.0 turns gradients around"):
        model.clip_grad_norm_(-1.0)
    after = [param.grad for param in model.parameters() if param.grad is not None]
    assert all(torch.equal(a.sign(), -b.sign()) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("call", ["max_norm", "norm_type"])
@on_ranks(2)
def test_ranks_that_clip_by_another_norm_are_told_in_the_next_backward(call: str, rank: int) -> None:
    model = shard(seeded())
    values = {"max_norm": 1.0, "norm_type": 2.0}
    square_loss(model, batch(rank)).backward()
    model.clip_grad_norm_(**values)
    square_loss(model, batch(rank)).backward()
    model.clip_grad_norm_(**{**values, call: 2.0 + rank})

    def next_step() -> None:
        square_loss(model, batch(rank)).backward()
        model(batch(rank))

    with pytest.raises(
        RankMismatchError, match=rf"rank 0 .*{call}=2.0.* rank 1 has .*{call}=3.0.*Pass the same max_norm"
    ):
        next_step()
