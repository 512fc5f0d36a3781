"""Removes the name component that ``torch.compile`` adds from state dicts."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from fsdp_flat.layout import COMPILED_MODULE

_WORD = COMPILED_MODULE + "."


def hide_compiled_name(module: nn.Module) -> None:
    """Make a module returned by ``torch.compile`` save and load under original names; ignore other modules."""
    if isinstance(module, OptimizedModule):
        module.register_state_dict_post_hook(_without_word)
        module.register_load_state_dict_pre_hook(_with_word)


def show_compiled_name(module: nn.Module) -> None:
    """Undo :func:`hide_compiled_name`."""
    for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in (_without_word, _with_word)]:
            del hooks[key]


def _without_word(_module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix + _WORD)]:
        state_dict[prefix + key[len(prefix + _WORD) :]] = state_dict.pop(key)


def _with_word(_module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(prefix + _WORD)]:
        state_dict[prefix + _WORD + key[len(prefix) :]] = state_dict.pop(key)
