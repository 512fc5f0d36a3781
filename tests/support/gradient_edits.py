"""A layer whose custom backward does something to ``.grad`` of the layer's parameters, as tiled layers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

Edit = Callable[["Edited", Sequence[nn.Parameter], torch.Tensor, torch.Tensor], torch.Tensor]


class Edited(nn.Module):
    """Computes ``tanh(x @ weight + bias)``; its backward is an edit of :data:`EDITS`, of the trained parameters.

    It has no modules inside, which could become units.
    """

    def __init__(self, width: int, edit: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.bias = nn.Parameter(torch.randn(width))
        self.edit = edit

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.compute(x)
        # Without an input that requires a gradient autograd would not call the function.
        return _Edited.apply(self, x if x.requires_grad else x.detach().requires_grad_())


class _Edited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Edited, x: torch.Tensor) -> torch.Tensor:
        # Attributes: of flat parameters none is registered.
        held = [getattr(layer, name, None) for name in ("weight", "bias")]
        ctx.layer, ctx.params = layer, [param for param in held if param is not None and param.requires_grad]
        ctx.save_for_backward(x)
        return layer.compute(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, EDITS[ctx.layer.edit](ctx.layer, ctx.params, x.detach(), grad)


def _nested(layer: Edited, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Run a backward inside the backward; return the gradient of ``x``."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = layer.compute(x)
    torch.autograd.backward(y, grad)
    assert x.grad is not None
    return x.grad


def _last_tile_returns_the_sum(
    layer: Edited, params: Sequence[nn.Parameter], x: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    totals = [torch.zeros_like(param) for param in params]

    def add(index: int, is_last: bool, new: torch.Tensor) -> torch.Tensor | None:
        totals[index].add_(new)
        if is_last:
            params[index].grad = None
            return totals[index]
        return None

    grads = []
    tiles = list(zip(x.chunk(2), grad.chunk(2), strict=True))
    for number, tile in enumerate(tiles):
        with ExitStack() as stack:
            for index, param in enumerate(params):
                handle = param.register_hook(partial(add, index, number == len(tiles) - 1))
                stack.callback(handle.remove)
            grads.append(_nested(layer, *tile))
    return torch.cat(grads)


def _after_nested(change: Callable[[nn.Parameter], None]) -> Edit:
    def run(layer: Edited, params: Sequence[nn.Parameter], x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        found = _nested(layer, x, grad)
        for param in params:
            change(param)
        return found

    return run


def _in_accumulate_hook(change: Callable[[nn.Parameter], None]) -> Edit:
    def run(layer: Edited, params: Sequence[nn.Parameter], x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        with ExitStack() as stack:
            for param in params:
                stack.callback(param.register_post_accumulate_grad_hook(change).remove)
            return _nested(layer, x, grad)

    return run


def _with_grads(give: Callable[[nn.Parameter, torch.Tensor], None]) -> Edit:
    def run(layer: Edited, params: Sequence[nn.Parameter], x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = layer.compute(x)
        found, *grads = torch.autograd.grad(y, [x, *params], grad)
        for param, new in zip(params, grads, strict=True):
            give(param, new)
        return found

    return run


def _set(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    param.grad = grad


def _scale(param: nn.Parameter) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


def _replace(param: nn.Parameter) -> None:
    if param.grad is not None:
        param.grad = param.grad * 0.25


def _add(param: nn.Parameter, grad: torch.Tensor) -> None:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    param.grad.add_(grad)


EDITS: dict[str, Edit] = {
    "last tile returns the sum": _last_tile_returns_the_sum,
    "scales": _after_nested(_scale),
    "replaces": _after_nested(_replace),
    "clears": _after_nested(lambda param: _set(param, None)),
    "clears a matrix": _after_nested(lambda param: _set(param, None) if param.ndim > 1 else None),
    "scales when accumulated": _in_accumulate_hook(_scale),
    "replaces when accumulated": _in_accumulate_hook(_replace),
    "sets": _with_grads(_set),
    "sets a matrix": _with_grads(lambda param, grad: _set(param, grad) if param.ndim > 1 else None),
    "adds": _with_grads(_add),
    "adds a copy": _with_grads(lambda param, grad: _set(param, grad if param.grad is None else param.grad + grad)),
}
