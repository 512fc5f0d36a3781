"""Excludes functions from torch.compile: this library runs between compiled graphs and never inside one.

dynamo recognizes torch's own FSDP by file path. Another package has to mark its functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch._dynamo.decorators

__all__ = ["active_compiler", "dynamo_disabled", "dynamo_disabled_here"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_REASON = (
    "fsdp_flat gathers and frees parameters here, outside of any graph. What the wrapped module runs is compiled; for "
    "fullgraph=True compile the modules inside the units instead of what holds them."
)


def dynamo_disabled(function: _Function) -> _Function:
    """Run ``function`` and everything that it calls eagerly; each call is a graph break."""
    disabled = torch.compiler.disable(function, reason=_REASON)

    # torch's wrapper costs time at every call even if nothing is compiled, and there is one call per gradient.
    @dynamo_disabled_here
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if active_compiler() is None:
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    return cast(_Function, run)


def dynamo_disabled_here(function: _Function) -> _Function:
    """Run ``function`` eagerly but allow its callees to be compiled; returns the same function, marked.

    With the public ``torch.compiler.disable(recursive=False)``, dynamo examines the function's own frame in every
    call, which is slow and counts as a recompilation (torch 2.13).
    """
    torch._dynamo.decorators.skip(function)
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function


# Returns a function while torch.compile would compile functions called from here, else None or False. As a C function
# it has no frame that dynamo could compile; the public is_compiling() is true only inside a trace.
active_compiler: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
