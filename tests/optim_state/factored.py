"""An optimizer whose states are no slices of parameters, and the handler that puts them together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from tests.support.kit import train_on
from tests.support.wrapper_models import batch


class Factored(torch.optim.Optimizer):
    """Adafactor-like: of a matrix one mean square a row, of everything else elementwise; for sharded slices.

    A rank has the rows that its slice touches; of a row that two ranks share each has what its own elements give.
    """

    def __init__(self, params: Any, shapes: dict[nn.Parameter, tuple[torch.Size, int]]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.shapes = shapes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is None or param not in self.shapes or param.numel() == 0:
                continue
            shape, start = self.shapes[param]
            rows = torch.arange(start, start + param.numel()) // shape[-1]
            rows = rows - int(rows[0])
            sums = torch.zeros(int(rows[-1]) + 1).index_add_(0, rows, param.grad.square())
            state = self.state[param]
            state["row_sums"] = state.get("row_sums", torch.zeros_like(sums)) + sums
            param.sub_(param.grad * 0.01)


def merge_rows(parts: Any, shape: torch.Size) -> torch.Tensor:
    whole = torch.zeros(shape[:-1])
    for part in parts:
        first = part.start // shape[-1]
        whole[first : first + part.tensor.numel()] += part.tensor
    return whole


def split_rows(whole: torch.Tensor, shape: torch.Size, start: int, stop: int) -> torch.Tensor:
    if stop == start:
        return whole[:0]
    # A row that ranks share counts where it begins.
    first, last = start // shape[-1], (stop - 1) // shape[-1]
    rows = whole[first : last + 1].clone()
    if start % shape[-1]:
        rows[0] = 0
    return rows


def factored(model: Any) -> Factored:
    shapes = {}
    for module in FSDP.fsdp_modules(model):
        for handle in module._unit.param_groups:
            params, pieces = handle.slots.visible_params, handle.local_shards
            for param, param_info, piece in zip(params, handle.layout.param_infos, pieces, strict=True):
                if len(param_info.shape) == 2:
                    shapes[param] = (torch.Size(param_info.shape), piece.in_param.start)
    optimizer = Factored(model.parameters(), shapes)
    train_on(model, optimizer, [batch(0)])
    return optimizer
