"""``zero_grad(set_to_none=False)`` before a reduction: zeros on every rank, also where only some had a gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat.composable import fully_shard
from tests.support import assert_close, on_ranks
from tests.support.kit import full_params, wrapped
from tests.support.pairs import WIDTH


class Branches(nn.Module):
    """Adds the outputs of the branches that the caller names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return sum((self.branches[index](self.stem(x)) for index in chosen), torch.zeros_like(x))


def _rows(module: nn.Module) -> nn.Module:
    return fully_shard(module)


def _originals(module: nn.Module) -> nn.Module:
    return wrapped(module, use_orig_params=True)


def _accumulate(model: nn.Module, x: torch.Tensor, chosen: list[int]) -> None:
    if isinstance(model, Branches) and hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        model(x, chosen).pow(2).mean().backward()
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            model(x, chosen).pow(2).mean().backward()


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, Branches):
        return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return full_params(model)


@on_ranks(2, 4)
@pytest.mark.parametrize(
    "front, by",
    [(_rows, "model"), (_originals, "model"), (_originals, "optimizer")],
    ids=["rows", "model", "optimizer"],
)
def test_parameters_without_a_later_gradient_are_stepped_with_zeros_on_every_rank(
    front: Callable[[nn.Module], nn.Module], by: str, rank: int
) -> None:
    torch.manual_seed(0)
    plain = Branches().double()
    model = front(copy.deepcopy(plain))
    optims = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (model, plain)]
    torch.manual_seed(rank)
    _accumulate(model, torch.randn(3, WIDTH, dtype=torch.float64), [0, 1] if rank == 0 else [1, 2])
    (model if by == "model" else optims[0]).zero_grad(set_to_none=False)
    for param in plain.parameters():  # on some rank, each of them had a gradient
        param.grad = torch.zeros_like(param)
    for step in range(2):
        x = torch.randn(3, WIDTH, dtype=torch.float64)
        model(x, [1]).pow(2).mean().backward()
        plain(x, [1]).pow(2).mean().backward()
        for param in plain.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        for optim in optims:
            optim.step()
            optim.zero_grad(set_to_none=step == 0)
        assert_close(_full(model), dict(plain.named_parameters()), rtol=1e-9, atol=1e-11)
