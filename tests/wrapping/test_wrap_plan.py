"""What a plan holds, and what applying it does to a tree."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.api import MixedPrecision
from fsdp_flat.core import units_of
from fsdp_flat.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    WrapPlan,
    _Policy,
    always_wrap_policy,
    apply_plan,
    enable_wrap,
    lambda_auto_wrap_policy,
    plan_units,
    size_based_auto_wrap_policy,
    wrap,
)
from tests.support import on_ranks
from tests.wrapping.modules import (
    Block,
    Pair,
    Transformer,
    Wrapper,
    root_kwargs,
    shared_leaf_in_one_parent,
    shared_leaf_in_two_parents,
)


def plan(root: nn.Module, policy: Any, **changes: Any) -> WrapPlan:
    return plan_units(root, policy, ignored_modules=set(), ignored_params=set(), root_kwargs=root_kwargs(**changes))


def wrapper(module: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
    return Wrapper(module, **kwargs)


class Names(_Policy):
    """Gives each of two modules the arguments that it names, and leaves the others at their defaults."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        first, second, third = root_module.children()
        return {first: {"use_orig_params": True}, second: {"forward_prefetch": True}, third: {}}


@on_ranks(2)
def test_arguments_that_a_policy_names_are_those_of_its_unit() -> None:
    model = FSDP(nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]), auto_wrap_policy=Names())
    options = [unit.options for unit in units_of(model)[1:]]
    assert [(each.use_orig_params, each.forward_prefetch) for each in options] == [
        (True, False),
        (False, True),
        (False, False),
    ]


def test_the_plan_lists_every_module_that_stays_in_full_precision() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match=r"BatchNorm1d \(2 modules\)") as caught:
        made = plan_units(
            model,
            ModuleWrapPolicy({nn.Linear}),
            ignored_modules={model[2]},
            ignored_params=set(model[2].parameters()),
            root_kwargs=root_kwargs(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
        )
    assert made.full_precision == (model[0], model[2])
    assert [unit.fqn for unit in made.units] == ["0", "1"]
    assert caught[0].filename == __file__


def test_overrides_on_a_module_reach_the_units_of_a_function_policy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1]._wrap_overrides = {"forward_prefetch": True}
    assert [unit.kwargs["forward_prefetch"] for unit in plan(model, always_wrap_policy).units] == [False, True]


def test_unit_names_leave_out_wrapper_components() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    assert [unit.fqn for unit in plan(model, ModuleWrapPolicy({nn.Linear})).units] == ["0"]


def test_a_module_at_two_places_becomes_the_same_unit_at_both() -> None:
    for policy in (ModuleWrapPolicy({nn.Linear}), always_wrap_policy):
        model = shared_leaf_in_two_parents()
        apply_plan(model, plan(model, policy), wrapper)
        first, second = (model.first, model.second)
        if isinstance(first, Wrapper):
            first, second = first.inner, second.inner
        assert isinstance(first.first, Wrapper)
        assert first.first is second.second

        model = shared_leaf_in_one_parent()
        apply_plan(model, plan(model, policy), wrapper)
        pair = model.first.inner if isinstance(model.first, Wrapper) else model.first
        assert isinstance(pair.first, Wrapper)
        assert pair.first is pair.second


def test_a_shared_unit_comes_before_every_unit_that_holds_it() -> None:
    leaf = nn.Linear(4, 4)
    model = Pair(Pair(nn.Sequential(leaf), nn.ReLU()), Pair(leaf, nn.ReLU()))

    def not_below_the_sequential(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return not (recurse and isinstance(module, nn.Sequential))

    assert [unit.fqn for unit in plan(model, not_below_the_sequential).units] == [
        "first.first.0",
        "first.second",
        "first",
        "second.second",
        "second",
    ]


def test_a_module_whose_children_are_hidden_or_missing_is_walked_like_any_other() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Linear(2, 2)
            self.hidden = nn.Linear(2, 2)
            self.register_module("absent", None)

        def named_children(self) -> Any:
            return iter([("seen", self.seen), ("absent", None)])

    model = Hides()
    for policy in (always_wrap_policy, ModuleWrapPolicy({nn.Linear})):
        assert [unit.fqn for unit in plan(model, policy).units] == ["seen"]
    apply_plan(model, plan(model, always_wrap_policy), wrapper)
    assert isinstance(model.seen, Wrapper)


def test_a_custom_policy_overrides_arguments_per_unit() -> None:
    policy = CustomPolicy(lambda module: {"use_orig_params": True} if isinstance(module, Block) else False)
    frozen = Transformer()
    for block in frozen.blocks:
        block.norm.requires_grad_(False)
    units = plan(frozen, policy, use_orig_params=False).units
    assert [unit.kwargs["use_orig_params"] for unit in units] == [True] * 3


def test_frozen_modules_in_units_of_their_own_are_allowed_without_original_parameters() -> None:
    model = Transformer()
    for block in model.blocks:
        block.norm.requires_grad_(False)
    for policy in (
        ModuleWrapPolicy({Block, nn.LayerNorm}),
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, (Block, nn.LayerNorm))),
    ):
        assert len(plan(model, policy, use_orig_params=False).units) == 6


def test_ignored_parameters_do_not_make_a_unit_mixed() -> None:
    model = Transformer()
    model.blocks[0].norm.requires_grad_(False)
    made = plan_units(
        model,
        ModuleWrapPolicy({Block}),
        ignored_modules=set(),
        ignored_params=set(model.blocks[0].norm.parameters()),
        root_kwargs=root_kwargs(use_orig_params=False),
    )
    assert len(made.units) == 3


def test_changed_function_attributes_of_the_size_policy_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert [unit.fqn for unit in plan(model, policy).units] == ["0", "1.0"]
    monkeypatch.setattr(size_based_auto_wrap_policy, "EXCLUDE_WRAP_MODULES", {nn.Linear})
    assert [unit.fqn for unit in plan(model, policy).units] == ["1"]


def test_wrap_inside_a_context_uses_its_arguments_and_the_calls_own_first() -> None:
    layer = nn.Linear(2, 2)
    layer._wrap_overrides = {"c": 30}
    with enable_wrap(wrapper_cls=Wrapper, a=1, b=2, c=3):
        wrapped = wrap(layer, b=20)
    assert isinstance(wrapped, Wrapper)
    assert wrapped.inner is layer
    assert wrapped.options == {"a": 1, "b": 20, "c": 30}


def test_an_exception_ends_the_context() -> None:
    with pytest.raises(ZeroDivisionError), enable_wrap(wrapper_cls=Wrapper):
        _ = 1 / 0
    assert type(wrap(nn.ReLU())) is nn.ReLU
    with enable_wrap(wrapper_cls=Wrapper):
        assert isinstance(wrap(nn.ReLU()), Wrapper)


def test_two_threads_may_wrap_at_the_same_time() -> None:
    both_inside = threading.Barrier(2, timeout=20)
    results: dict[int, Any] = {}

    def build(number: int) -> None:
        with enable_wrap(wrapper_cls=Wrapper, number=number):
            both_inside.wait()
            results[number] = wrap(nn.ReLU())
            both_inside.wait()

    threads = [threading.Thread(target=build, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: made.options["number"] for number, made in results.items()} == {0: 0, 1: 1}
