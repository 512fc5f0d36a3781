"""Where torch.compile stops: our code runs between its graphs and never in one.

dynamo knows torch's own FSDP by file path. Another package has to mark its functions.
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
    """``function`` and everything that it calls run eagerly; a graph breaks where it is called."""
    disabled = torch.compiler.disable(function, reason=_REASON)

    # torch's wrapper costs time at every call, also where nothing is compiled, and gradients come one by one.
    @dynamo_disabled_here
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if active_compiler() is None:
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    return cast(_Function, run)


def dynamo_disabled_here(function: _Function) -> _Function:
    """As :func:`dynamo_disabled`, but what ``function`` calls is compiled again. It returns the same function, marked.

    The public way, ``torch.compiler.disable(recursive=False)``, leaves the function's own frame to be looked at anew
    in every call, which is slow and counts as a recompilation (torch 2.13).
    """
    torch._dynamo.decorators.skip(function)
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function


# Returns a function while torch.compile would compile what is called from here, else None or False. A C function
# has no frame, which would itself be compiled; the public is_compiling() is true inside of a trace only.
active_compiler: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
