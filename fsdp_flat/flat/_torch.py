"""Collects the private names of torch that this package needs, each with its reason."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils, _pytree

__all__ = [
    "check_before_first_step",
    "enable_torch_function",
    "forbid_steps_on",
    "in_backward",
    "is_in_a_graph",
    "node_will_run",
    "pytree_children",
    "register_as_plain_tensor",
    "set_versions",
    "swap_memory",
]

# The ``__torch_function__`` of each registered class. Registration with torch is process-wide.
_functions: dict[Any, Any] = {}
_refused: set[Any] = set()
_looks: list[Callable[[torch.optim.Optimizer], None]] = []
# By id, optimizers that were checked and have not loaded a state dict since.
_looked_at: dict[int, weakref.ref[torch.optim.Optimizer]] = {}

# Swaps the memory of two storages of which one is empty; there is no public equivalent. None before torch 2.12.
swap_memory: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


# Sets the version counters of tensors, which autograd compares with those of the tensors that it has saved.
# ``torch.autograd._unsafe_preserve_version_counter`` does so, inside a block.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)

# Id of this thread's running autograd graph task, or -1 outside of backward. Distinguishes an activation recomputation
# from an ordinary forward; there is no public equivalent.
in_backward: Callable[[], int] = torch._C._current_graph_task_id


def node_will_run(node: Any) -> bool:
    """Return whether the running backward executes an autograd node.

    ``register_multi_grad_hook`` uses the same private function.
    """
    return bool(torch._C._will_engine_execute_node(node))


def pytree_children(value: Any) -> Iterable[Any]:
    """Return the children of an object of a class registered with torch's pytree; none for any other object.

    The functions that flatten a whole tree call a leaf any class that they do not know, dataclasses for example.
    """
    node = _pytree.SUPPORTED_NODES.get(type(value))
    return () if node is None else node.flatten_fn(value)[0]


def is_in_a_graph(unsharded_param: torch.Tensor) -> bool:
    """Return whether ``unsharded_param`` is in an autograd graph, whose accumulator holds a second reference to it."""
    return bool(unsharded_param._use_count() > 1)  # type: ignore[attr-defined]


def register_as_plain_tensor(kind: type[torch.Tensor]) -> bool:
    """Have optimizers treat ``kind`` as plain tensors, and disable its ``__torch_function__`` inside their steps.

    Optimizers use their foreach and fused implementations only for classes on one list, clipping and averaging only
    for those on another; DTensor adds itself to both. Hooks disable ``__torch_function__`` before each step and enable
    it afterwards.

    Returns:
        False if this torch has no such list, so that optimizers would be slow.
    """
    supported_types = getattr(torch_optimizer, "_foreach_supported_types", None)
    if supported_types is None:
        return False
    if kind not in _functions:
        if not _functions:
            torch_optimizer.register_optimizer_step_pre_hook(lambda *_: _torch_function_disabled())
            torch_optimizer.register_optimizer_step_post_hook(lambda *_: enable_torch_function())
        supported_types.append(kind)
        others = getattr(_foreach_utils, "_foreach_supported_types", supported_types)
        if others is not supported_types:
            others.append(kind)
        _functions[kind] = kind.__dict__["__torch_function__"]
    return True


def check_before_first_step(look: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call ``look`` before the next step of each optimizer, and before its first step after it loads a state dict.

    torch's hook for this covers all optimizers of the process.
    """
    if look not in _looks:
        _looks.append(look)
        if len(_looks) == 1:
            torch_optimizer.register_optimizer_step_pre_hook(_before_step)
    _looked_at.clear()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    known = _looked_at.get(id(optimizer))
    if known is not None and known() is optimizer:
        return
    for look in _looks:
        look(optimizer)
    key = id(optimizer)
    # A later optimizer may reuse the id of a deleted one, so the entry is removed with it.
    _looked_at[key] = weakref.ref(optimizer, lambda _: _looked_at.pop(key, None))
    if _loaded not in optimizer._optimizer_load_state_dict_post_hooks.values():
        optimizer.register_load_state_dict_post_hook(_loaded)


def _loaded(optimizer: torch.optim.Optimizer) -> None:
    _looked_at.pop(id(optimizer), None)


def forbid_steps_on(kind: type[torch.Tensor]) -> None:
    """Make every optimizer's step raise before it writes anything if a gradient is of class ``kind``.

    torch's hook for this covers all optimizers of the process; it is registered with the first gradient of the class.
    ``kind.refuse`` raises the error.
    """
    if kind not in _refused:
        _refused.add(kind)
        torch_optimizer.register_optimizer_step_pre_hook(lambda optimizer, *_: _refuse(optimizer, kind))


def _refuse(optimizer: torch.optim.Optimizer, kind: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for group in optimizer.param_groups:
            for param in group["params"]:
                if isinstance(param.grad, kind):
                    kind.refuse(param.grad, type(optimizer).__name__ + ".step")


def _torch_function_disabled() -> None:
    for kind in _functions:
        kind.__torch_function__ = torch._C._disabled_torch_function_impl


def enable_torch_function() -> None:
    """Enable ``__torch_function__`` again for the classes of :func:`register_as_plain_tensor`.

    A step that raises skips its post hook, so every forward calls this too.
    """
    for kind, function in _functions.items():
        kind.__torch_function__ = function
