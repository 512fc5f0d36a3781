"""Runs an optimizer on parameters without memory, and counts what it allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fsdp_flat.errors import OptionError
from fsdp_flat.tools.model_run import LiveBytes
from fsdp_flat.tools.torch_tools import DataDependentOutputException, FakeTensorMode

MakeOptimizer = Callable[[list[nn.Parameter]], Any]

# What optimizers raise that read values, want a closure, or refuse parameters of such a shape or on such a device.
_REFUSALS = (AssertionError, DataDependentOutputException, RuntimeError, TypeError, ValueError)


class _OptimizerBytes(LiveBytes):
    """Counts what an optimizer allocates; a fused update, which has no kernel without memory, allocates nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith("_fused_") and not func._schema.returns:
            return None
        return super().__torch_dispatch__(func, types, args, kwargs)


def optimizer_nbytes(make: MakeOptimizer, params: Iterable[torch.Tensor], *, foreach: bool) -> tuple[int, int]:
    """Return the bytes of an optimizer's states, and the most that its step allocates besides.

    Args:
        make: called with the parameters of one rank; returns the optimizer.
        params: their shapes and dtypes.
        foreach: choose torch's implementation for many parameters at once where the optimizer leaves the choice open,
            as torch does on accelerators.

    Raises:
        OptionError: the optimizer reads values, which these parameters do not have, or cannot be made for them.
    """
    # Fused implementations refuse parameters on the meta device, and take these, which have no memory either.
    with FakeTensorMode():
        held = [nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="cpu")) for param in params]
        for param in held:
            param.grad = torch.empty_like(param) if param.numel() else None  # as units leave it
    if not held:
        return 0, 0
    peak = 0

    def note(nbytes: int, _flops: int) -> None:
        nonlocal peak
        peak = max(peak, nbytes)

    name = getattr(make, "__name__", type(make).__name__)
    try:
        with _OptimizerBytes([*held, *[param.grad for param in held if param.grad is not None]], note) as counter:
            optimizer = make(held)
            name = type(optimizer).__name__
            for group in getattr(optimizer, "param_groups", ()):
                if foreach and group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
                if group.get("capturable"):
                    group["capturable"] = False  # it needs a real accelerator, and has the same states
            optimizer.step()
            state_nbytes = counter.alive()
            peak = 0
            optimizer.step()
    except _REFUSALS as error:
        raise OptionError(
            f"{name} cannot run on parameters without values, so plan cannot count its states: "
            f"{type(error).__name__}: {error} Pass optimizer=None, and add the states of your optimizer by hand."
        ) from error
    return state_nbytes, max(0, peak - state_nbytes)
