"""Private names of torch that the flat floor needs, each with its reason."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

__all__ = ["accumulate_grad_node", "in_backward", "num_nodes_that_will_run", "swap_memory", "take_as_parameter"]

_taken: dict[type, bool] = {}

# Exchanges the memory of two storages of which one is empty; there is no public way. None before torch 2.12.
swap_memory: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


def accumulate_grad_node(leaf: torch.Tensor) -> Any:
    """The autograd node that accumulates into ``leaf``, which must be a leaf that requires a gradient."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def in_backward() -> int:
    """Id of the running backward pass on this thread, or -1 outside of one.

    It tells an activation recomputation from an ordinary forward; there is no public way to ask.
    """
    return torch._C._current_graph_task_id()


def num_nodes_that_will_run(nodes: list[Any]) -> int:
    """How many of ``nodes`` the running backward pass executes, once each.

    ``register_multi_grad_hook`` asks the same question by the same name.
    """
    return sum(map(torch._C._will_engine_execute_node, nodes))


def take_as_parameter(kind: type[torch.nn.Parameter]) -> bool:
    """Have optimizers treat ``kind`` as Parameters, and pass its ``__torch_function__`` by inside their steps.

    Optimizers take their foreach and fused forms for listed classes only; DTensor puts itself on the same lists.

    Returns:
        False if this torch has no such list, so that optimizers would become slow.
    """
    if kind not in _taken:
        listed = getattr(torch_optimizer, "_foreach_supported_types", None)
        _taken[kind] = listed is not None
        if listed is not None:
            listed.append(kind)
            getattr(_foreach_utils, "_foreach_supported_types", listed).append(kind)
            _pass_by_in_steps(kind)
    return _taken[kind]


def _pass_by_in_steps(kind: Any) -> None:
    function = kind.__dict__["__torch_function__"]

    def before(*_: Any) -> None:
        kind.__torch_function__ = torch._C._disabled_torch_function_impl

    def after(*_: Any) -> None:
        kind.__torch_function__ = function

    torch_optimizer.register_optimizer_step_pre_hook(before)
    torch_optimizer.register_optimizer_step_post_hook(after)
