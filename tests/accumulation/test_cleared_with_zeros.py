"""``zero_grad(set_to_none=False)`` before a reduction: zeros on every rank, also where only some had a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support import on_ranks
from tests.support.beside import WIDTH, Beside


class Branches(nn.Module):
    """Adds the outputs of the branches that the caller names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return sum((self.branches[index](self.stem(x)) for index in chosen), torch.zeros_like(x))


@on_ranks(2, 4)
@pytest.mark.parametrize(
    "front, by",
    [("fully_shard", "model"), ("originals", "model"), ("originals", "optimizer")],
    ids=["fully_shard", "model", "optimizer"],
)
def test_parameters_without_a_later_gradient_are_stepped_with_zeros_on_every_rank(
    front: str, by: str, rank: int
) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    beside = Beside(Branches(), front, units=(), optimizer=optimizer_of)
    with beside.no_sync():
        beside.backward(lambda model, x: model(x, [0, 1] if rank == 0 else [1, 2]).pow(2).mean())
    (beside.ours if by == "model" else beside.optimizer).zero_grad(set_to_none=False)
    for param in beside.plain.parameters():  # on some rank, each of them had a gradient
        param.grad = torch.zeros_like(param)
    for step in range(2):
        beside.backward(lambda model, x: model(x, [1]).pow(2).mean())
        for optimizer in beside.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        beside.check_parameters()
