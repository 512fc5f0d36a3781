"""Runs an optimizer on parameters without memory, and counts what it allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import OptionError
from fsdp_flat.tools.model_run import LiveBytes

MakeOptimizer = Callable[[list[nn.Parameter]], Any]


def optimizer_nbytes(make: MakeOptimizer, params: Iterable[torch.Tensor], *, foreach: bool) -> tuple[int, int]:
    """Return the bytes of an optimizer's states, and the most that its step allocates besides.

    Args:
        make: called with the parameters of one rank; returns the optimizer.
        params: their shapes and dtypes.
        foreach: choose torch's implementation for many parameters at once where the optimizer leaves the choice open,
            as torch does on accelerators.

    Raises:
        OptionError: the optimizer reads values, which tensors on the meta device do not have.
    """
    held = [nn.Parameter(torch.empty_like(param, device="meta")) for param in params]
    if not held:
        return 0, 0
    for param in held:
        param.grad = torch.empty_like(param) if param.numel() else None  # as units leave it
    peak = 0

    def note(nbytes: int, _flops: int) -> None:
        nonlocal peak
        peak = max(peak, nbytes)

    optimizer = make(held)
    for group in getattr(optimizer, "param_groups", ()):
        if foreach and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    try:
        with LiveBytes([*held, *[param.grad for param in held if param.grad is not None]], note) as counter:
            optimizer.step()
            state_nbytes = counter.alive()
            peak = 0
            optimizer.step()
    except (NotImplementedError, RuntimeError) as error:
        raise OptionError(
            f"{type(optimizer).__name__} cannot run on the meta device, so plan cannot count its states: {error} Pass "
            "optimizer=None, and add the states of your optimizer by hand."
        ) from error
    return state_nbytes, max(0, peak - state_nbytes)
