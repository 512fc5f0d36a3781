"""Traverses module trees and replaces a module wherever it is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from fsdp_flat.errors import PhaseError
from fsdp_flat.layout import clean_fqn, join_fqn


def describe_module(module: nn.Module, path: str) -> str:
    """Return the path and the class of a module, for messages."""
    kind = type(module).__name__
    return f"'{clean_fqn(path)}' ({kind})" if path else f"the root module ({kind})"


def named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of ``module``, each once and under its first name."""
    for name, child in module.named_children():
        if child is not None:  # only where a class overrides named_children
            yield name, child


def post_order(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of each module once, children before parents, ``root`` last.

    A module that is registered at several places has the first of its paths, and precedes every module that holds it.
    """
    ordered: list[tuple[str, nn.Module]] = []
    visited = {root}

    def visit(path: str, module: nn.Module) -> None:
        for name, child in named_children(module):
            if child not in visited:
                visited.add(child)
                visit(join_fqn(path, name), child)
        ordered.append((path, module))

    visit("", root)
    return ordered


def compiled_forms(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Map each module that ``torch.compile(module)`` was called on to the result of that call, one of ``modules``.

    The result keeps calling the original module, even if that is replaced in the tree later.
    """
    return {
        inner: module
        for module in modules
        if isinstance(module, OptimizedModule) and (inner := module._modules.get("_orig_mod")) is not None
    }


@dataclass(frozen=True, slots=True)
class Places:
    """Maps each module of a tree to its registrations: every (parent, name), repeated registrations included."""

    of: dict[nn.Module, list[tuple[nn.Module, str]]]

    @classmethod
    def find(cls, root: nn.Module) -> Places:
        """Return the current places below ``root``."""
        of: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in root.modules():
            # named_children() hides a second name of the same child, so the dictionary itself is read.
            for name, child in parent._modules.items():
                if child is not None:
                    of.setdefault(child, []).append((parent, name))
        return cls(of)

    def replace(self, module: nn.Module, replacement: nn.Module) -> None:
        """Register ``replacement`` wherever ``module`` was registered when the places were found."""
        for parent, name in self.of[module]:
            setattr(parent, name, replacement)


def require_module(value: object, where: str) -> nn.Module:
    """Return ``value`` if it is a module.

    Raises:
        PhaseError: if it is not (an ``AssertionError`` in FSDP1).
    """
    if not isinstance(value, nn.Module):
        raise PhaseError(f"Wrapping {where} gave {value!r}; the wrapper has to return an nn.Module.")
    return value


def _post_order_apply(root_module: nn.Module, fn: Callable[[nn.Module], nn.Module | None]) -> None:
    """Call ``fn`` on every module, children first; its result replaces the module at all its places.

    Args:
        root_module: the tree; the root itself cannot be replaced.
        fn: returns the replacement, or None to leave the module as it is.

    Raises:
        PhaseError: if ``fn`` returns a replacement for the root, or neither None nor a module.
    """
    places = Places.find(root_module)
    for path, module in post_order(root_module):
        replacement = fn(module)
        if replacement is None:
            continue
        if module is root_module:
            raise PhaseError(
                f"The function returned {type(replacement).__name__} for {describe_module(module, path)}, which has no "
                "parent to register it with. Return None for the root and wrap it yourself."
            )
        places.replace(module, require_module(replacement, describe_module(module, path)))


def wrap_overrides(module: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments in the ``_wrap_overrides`` of ``module``, if any."""
    return dict(getattr(module, "_wrap_overrides", None) or {})


def _wrap(module: nn.Module, wrapper_cls: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """Return ``wrapper_cls(module, **kwargs)``; a ``_wrap_overrides`` dict on the module takes priority.

    Raises:
        PhaseError: if ``wrapper_cls`` is None.
    """
    if wrapper_cls is None:
        raise PhaseError(f"No wrapper for {type(module).__name__}: wrapper_cls is None. Pass the class to wrap with.")
    return wrapper_cls(module, **{**kwargs, **wrap_overrides(module)})


def _construct_wrap_fn(
    root_module: nn.Module,
    target_module_to_kwargs: dict[nn.Module, dict[str, Any]],
    fsdp_fn: Callable[..., nn.Module],
) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function for ``_post_order_apply`` that wraps the given modules, except the root.

    Args:
        root_module: the tree; wrapping the root is left to the caller.
        target_module_to_kwargs: the modules to wrap, each with its keyword arguments.
        fsdp_fn: called as ``fsdp_fn(module, **kwargs)``.
    """

    def wrap_target(module: nn.Module) -> nn.Module | None:
        if module is root_module or module not in target_module_to_kwargs:
            return None
        return fsdp_fn(module, **target_module_to_kwargs[module])

    return wrap_target
