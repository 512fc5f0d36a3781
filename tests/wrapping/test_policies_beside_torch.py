"""The units that a policy gives equal torch FSDP1's: which, in which order, with which arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as peer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecision as PeerMixedPrecision

import fsdp_flat.wrap as ours
from fsdp_flat.api import MixedPrecision
from tests.wrapping.modules import SHARED, TREES, Block, Mixin, our_units, peer_units

CLASSES = {nn.Linear, Block, nn.ModuleList, nn.Embedding}


def custom(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, nn.Linear):
        return {"forward_prefetch": True, "extra": 1}
    return {} if isinstance(module, nn.Embedding) else isinstance(module, (Block, nn.BatchNorm2d))


POLICIES: dict[str, Callable[[ModuleType], Any]] = {
    "always": lambda lib: lib.always_wrap_policy,
    "lambda": lambda lib: functools.partial(
        lib.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, (Block, nn.ReLU))
    ),
    "transformer": lambda lib: functools.partial(lib.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "module function": lambda lib: functools.partial(lib._module_wrap_policy, module_classes=CLASSES),
    "or": lambda lib: functools.partial(
        lib._or_policy,
        policies=[
            functools.partial(lib.transformer_auto_wrap_policy, transformer_layer_cls={nn.Embedding}),
            functools.partial(lib.size_based_auto_wrap_policy, min_num_params=100),
        ],
    ),
    "size 20": lambda lib: functools.partial(lib.size_based_auto_wrap_policy, min_num_params=20),
    "size 200": lambda lib: functools.partial(lib.size_based_auto_wrap_policy, min_num_params=200),
    "size by default": lambda lib: lib.size_based_auto_wrap_policy,
    "size with classes": lambda lib: functools.partial(
        lib.size_based_auto_wrap_policy,
        min_num_params=10,
        force_leaf_modules={Block},
        exclude_wrap_modules={nn.Linear},
    ),
    "module classes": lambda lib: lib.ModuleWrapPolicy(CLASSES),
    "module mixin": lambda lib: lib.ModuleWrapPolicy([Mixin]),
    "module union": lambda lib: lib.ModuleWrapPolicy([nn.Linear | Block]),
    "custom": lambda lib: lib.CustomPolicy(custom),
}
PRECISIONS: dict[str, Callable[[type], Any]] = {
    "full": lambda cls: None,
    "bf16": lambda cls: cls(param_dtype=torch.bfloat16),
    "bf16 without LayerNorm": lambda cls: cls(
        param_dtype=torch.bfloat16, _module_classes_to_ignore=(nn.LayerNorm, nn.Embedding)
    ),
    "bf16 without exceptions": lambda cls: cls(param_dtype=torch.bfloat16, _module_classes_to_ignore=()),
}
IGNORED = {
    "transformer": ["blocks.1", "head"],
    "dictionary": ["branches.left"],
    "convolutions": ["stem.1", "body"],
    "sequential": ["1.0"],
}


def without_precision(units: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any], bool]]:
    """Units with the precision's presence only: the two libraries' classes differ."""
    return [
        (path, {k: v for k, v in kwargs.items() if k != "mixed_precision"}, kwargs["mixed_precision"] is None)
        for path, kwargs in units
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tree", TREES)
def test_units_order_and_arguments_equal_the_peers(tree: str, policy: str, precision: str) -> None:
    for ignored in [[], IGNORED.get(tree, [])]:
        got = our_units(
            TREES[tree](), POLICIES[policy](ours), *ignored, mixed_precision=PRECISIONS[precision](MixedPrecision)
        )
        expected = peer_units(
            TREES[tree](), POLICIES[policy](peer), *ignored, mixed_precision=PRECISIONS[precision](PeerMixedPrecision)
        )
        assert without_precision(got) == without_precision(expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_made_from_the_peers_functions_and_classes_are_understood(policy: str) -> None:
    for tree in TREES.values():
        assert our_units(tree(), POLICIES[policy](peer)) == our_units(tree(), POLICIES[policy](ours))


@pytest.mark.parametrize("policy", ["module classes", "custom"])
@pytest.mark.parametrize("tree", SHARED)
def test_policy_objects_choose_a_shared_module_once_like_the_peer(tree: str, policy: str) -> None:
    got = our_units(SHARED[tree](), POLICIES[policy](ours))
    assert got == peer_units(SHARED[tree](), POLICIES[policy](peer))


def test_a_shared_leaf_under_a_function_policy_is_one_unit_where_the_peer_makes_two() -> None:
    tree = SHARED["leaf in two parents"]
    expected = [path for path, _ in peer_units(tree(), peer.always_wrap_policy)]
    assert sorted(expected) != sorted(set(expected))
    assert [path for path, _ in our_units(tree(), ours.always_wrap_policy)] == list(dict.fromkeys(expected))


def test_a_shared_block_under_a_function_policy_works_where_the_peer_raises() -> None:
    tree = SHARED["block in two parents"]
    with pytest.raises(AssertionError):
        peer_units(tree(), peer.always_wrap_policy)
    paths = [path for path, _ in our_units(tree(), ours.always_wrap_policy)]
    assert paths == [
        "first.first.first",
        "first.first.second",
        "first.first",
        "first.second",
        "first",
        "second.first",
        "second",
    ]


@st.composite
def trees(draw: st.DrawFn) -> tuple[Callable[[], nn.Module], list[str]]:
    """How to build a random tree (as often as wanted) and the paths of some ignored modules."""
    unsharded_params = st.sampled_from([(nn.Linear, 2, 3), (nn.Linear, 5, 5), (nn.BatchNorm1d, 4), (nn.ReLU,)])
    containers = st.sampled_from(["sequential", "list", "dict", "tied"])
    recipe = draw(
        st.recursive(
            unsharded_params,
            lambda inner: st.tuples(containers, st.lists(inner, min_size=1, max_size=4)),
            max_leaves=12,
        )
    )

    def build(node: Any) -> nn.Module:
        if isinstance(node[0], str):
            children = [build(child) for child in node[1]]
            if node[0] == "tied":
                linears = [child for child in children if isinstance(child, nn.Linear)]
                for other in linears[1:]:
                    other.weight = linears[0].weight
            if node[0] == "dict":
                return nn.ModuleDict({f"key{index}": child for index, child in enumerate(children)})
            return nn.ModuleList(children) if node[0] == "list" else nn.Sequential(*children)
        return node[0](*node[1:])

    paths = [path for path, _ in build(recipe).named_modules() if path]
    ignored = draw(st.lists(st.sampled_from(paths), max_size=2, unique=True)) if paths else []
    return lambda: build(recipe), ignored


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(0, 80), st.sampled_from(sorted(POLICIES)), st.booleans())
def test_random_trees_give_the_peers_units(
    tree: tuple[Callable[[], nn.Module], list[str]], size: int, name: str, low_precision: bool
) -> None:
    build, ignored = tree
    units = []
    for lib, run, cls in ((ours, our_units, MixedPrecision), (peer, peer_units, PeerMixedPrecision)):
        policy = POLICIES[name](lib)
        if name == "size 20":
            policy = functools.partial(lib.size_based_auto_wrap_policy, min_num_params=size)
        precision = cls(param_dtype=torch.bfloat16) if low_precision else None
        units.append(without_precision(run(build(), policy, *ignored, mixed_precision=precision)))
    assert units[0] == units[1]
