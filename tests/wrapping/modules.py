"""Models of every shape that a policy may meet, a wrapper that only wraps, and the peer's answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from fsdp_flat.wrap import plan_units


class Wrapper(nn.Module):
    """What a wrapper is to this layer: a module that holds another one, and its arguments."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.inner = module
        self.options = kwargs

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


class Mixin:
    """A class that is no module, but a base of one."""


class Block(Mixin, nn.Module):
    """Attention, normalisation and two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class Transformer(nn.Module):
    """Blocks in a ModuleList between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight


class Dictionary(nn.Module):
    """Modules in a ModuleDict, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"left": nn.Linear(4, 4), "right": Block(), "none": nn.Identity()})
        self.scale = nn.Parameter(torch.ones(4))


class Convolutions(nn.Module):
    """Batch normalisation inside and beside containers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.ModuleList([nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)])
        self.norm = nn.BatchNorm1d(4)


class Pair(nn.Module):
    """Two children."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second


def shared_leaf_in_two_parents() -> nn.Module:
    leaf = nn.Linear(4, 4)
    return Pair(Pair(leaf, nn.Linear(4, 4)), Pair(nn.Linear(4, 4), leaf))


def shared_leaf_in_one_parent() -> nn.Module:
    leaf = nn.Linear(4, 4)
    return Pair(Pair(leaf, leaf), nn.Linear(4, 4))


def shared_block_in_two_parents() -> nn.Module:
    block = Pair(nn.Linear(4, 4), nn.Linear(4, 4))
    return Pair(Pair(block, nn.Linear(4, 4)), Pair(nn.Linear(4, 4), block))


TREES: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "dictionary": Dictionary,
    "convolutions": Convolutions,
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), nn.ReLU()),
    "one layer": lambda: nn.Linear(4, 4),
    "no parameters": lambda: nn.Sequential(nn.ReLU(), nn.Identity()),
    "one leaf under two names": shared_leaf_in_one_parent,
}
SHARED: dict[str, Callable[[], nn.Module]] = {
    "leaf in two parents": shared_leaf_in_two_parents,
    "block in two parents": shared_block_in_two_parents,
}

Units = list[tuple[str, dict[str, Any]]]


def root_kwargs(**changes: Any) -> dict[str, Any]:
    """The arguments that a constructor hands on."""
    return {"mixed_precision": None, "use_orig_params": True, "forward_prefetch": False, **changes}


def ignored_of(root: nn.Module, *paths: str) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Ignored modules (with all below them) and their parameters, as the constructor makes them."""
    tops = [root.get_submodule(path) for path in paths]
    return {m for top in tops for m in top.modules()}, {p for top in tops for p in top.parameters()}


def our_units(root: nn.Module, policy: Any, *ignored: str, **changes: Any) -> Units:
    """Path and arguments of each unit that we plan, in order."""
    modules, params = ignored_of(root, *ignored)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = plan_units(
            root, policy, ignored_modules=modules, ignored_params=params, root_kwargs=root_kwargs(**changes)
        )
    return [(unit.fqn, unit.kwargs) for unit in plan.units]


def peer_units(root: nn.Module, policy: Any, *ignored: str, **changes: Any) -> Units:
    """The same from torch, which changes ``root`` in doing so."""
    modules, params = ignored_of(root, *ignored)
    paths = {module: path for path, module in root.named_modules()}
    wrapped: Units = []

    class Recorder(Wrapper):
        def __init__(self, module: nn.Module, **kwargs: Any) -> None:
            super().__init__(module, **kwargs)
            wrapped.append((paths[module], kwargs))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _auto_wrap(root, policy, modules, params, root_kwargs(**changes), Recorder)
    return wrapped
