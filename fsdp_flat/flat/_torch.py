"""Private names of torch that the flat floor needs, each with its reason."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["accumulate_grad_node", "in_backward", "num_nodes_that_will_run", "swap_memory"]

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
