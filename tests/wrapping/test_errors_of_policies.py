"""Every error and warning of the wrap layer, with the type that FSDP1 raises and what its text names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.fsdp.wrap as peer
from torch import nn

from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError, UnsupportedError
from fsdp_flat.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _module_wrap_policy,
    _or_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    plan_units,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.wrapping.modules import Block, Pair, Transformer, Wrapper, peer_units, root_kwargs


def plan(root: nn.Module, policy: Any, *, ignored: set[nn.Module] | None = None, **changes: Any) -> Any:
    modules = ignored or set()
    return plan_units(
        root,
        policy,
        ignored_modules=modules,
        ignored_params={param for module in modules for param in module.parameters()},
        root_kwargs=root_kwargs(**changes),
        is_wrapped=lambda module: isinstance(module, Wrapper),
    )


def message(kind: type[Exception], builtin: type[Exception], call: Callable[[], object]) -> str:
    """The text of the error that ``call`` raises, which is of our kind and of the built-in type."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, builtin)
    return str(caught.value)


def test_the_first_mixed_unit_is_the_one_the_peer_names() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))) for _ in range(2)])
        for path, param in made.named_parameters():
            param.requires_grad_("bias" in path)
        return made

    with pytest.raises(ValueError) as caught:
        peer_units(model(), peer.ModuleWrapPolicy({nn.Sequential}), use_orig_params=False)
    assert str(caught.value).startswith("0.1 ")
    text = message(
        OptionError, ValueError, lambda: plan(model(), ModuleWrapPolicy({nn.Sequential}), use_orig_params=False)
    )
    assert text.startswith("'0.1' (Sequential)")


def test_a_mixed_root_without_original_parameters_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    model[0].requires_grad_(False)
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.ReLU))
    text = message(OptionError, ValueError, lambda: plan(model, policy, use_orig_params=False))
    assert "root module (Sequential)" in text


def test_long_lists_of_parameters_are_cut_with_their_count() -> None:
    model = nn.Sequential(nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)]))
    for layer in model[0]:
        layer.bias.requires_grad_(False)
    text = message(
        OptionError, ValueError, lambda: plan(model, ModuleWrapPolicy({nn.Sequential}), use_orig_params=False)
    )
    assert "and 2 more" in text


@pytest.mark.parametrize("answer", [None, 1, "yes", [True]])
def test_a_custom_policy_function_that_answers_neither_bool_nor_dict_is_an_error(answer: object) -> None:
    policy = CustomPolicy(lambda module: answer if isinstance(module, nn.Linear) else False)  # type: ignore[arg-type,return-value]
    text = message(OptionError, ValueError, lambda: plan(nn.Sequential(nn.Linear(2, 2)), policy))
    assert "'0' (Linear)" in text
    assert repr(answer) in text
    assert ("return missing" in text) == (answer is None)


def test_a_custom_policy_needs_a_function() -> None:
    assert "{'a'}" in message(OptionTypeError, TypeError, lambda: CustomPolicy({"a"}))  # type: ignore[arg-type]


def test_no_wrapper_is_an_error() -> None:
    def call() -> None:
        with enable_wrap(wrapper_cls=None):
            wrap(nn.ReLU())

    assert "wrapper_cls" in message(PhaseError, AssertionError, call)
    assert type(wrap(nn.ReLU())) is nn.ReLU


def test_a_nested_enable_wrap_is_an_error_and_the_outer_context_goes_on() -> None:
    def nest() -> None:
        with enable_wrap(wrapper_cls=Wrapper):
            pytest.fail("entered")

    with enable_wrap(wrapper_cls=Wrapper, outer=1):
        assert "wrapper_cls=Wrapper" in message(UnsupportedError, NotImplementedError, nest)
        made = wrap(nn.ReLU())
    assert isinstance(made, Wrapper)
    assert made.options == {"outer": 1}
    assert type(wrap(nn.ReLU())) is nn.ReLU


@pytest.mark.parametrize("policy", [{Block}, "size", 3, ModuleWrapPolicy, Block])
def test_what_is_no_policy_is_an_error(policy: object) -> None:
    text = message(OptionTypeError, TypeError, lambda: plan(Transformer(), policy))
    assert "ModuleWrapPolicy" in text


@pytest.mark.parametrize(
    "policy", [transformer_auto_wrap_policy, functools.partial(lambda_auto_wrap_policy), lambda m, r, n: True]
)
def test_a_policy_that_does_not_take_the_three_keywords_is_an_error_that_says_what_to_bind(policy: Any) -> None:
    text = message(OptionTypeError, TypeError, lambda: plan(Transformer(), policy))
    assert "functools.partial(" in text
    assert "missing a required" in text


def test_a_type_error_inside_a_policy_is_left_alone() -> None:
    def broken(module: nn.Module) -> bool:
        raise TypeError("from inside")

    with pytest.raises(TypeError, match="from inside") as caught:
        plan(Transformer(), functools.partial(lambda_auto_wrap_policy, lambda_fn=broken))
    assert type(caught.value) is TypeError


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["Block"], "of type str"),
        ("Block", "expects a set"),
        (Block, "got the class Block"),
        (3, "got 3"),
        ([nn.ReLU()], "a module, not its class"),
        ([(nn.Linear, "Block")], "of type str"),
        ([int], "builtins.int"),
        ({dict}, "which is no subclass"),
    ],
)
def test_entries_that_can_match_nothing_are_errors_on_construction(entries: Any, words: str) -> None:
    assert words in message(OptionTypeError, TypeError, lambda: ModuleWrapPolicy(entries))
    for policy in (
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=entries),
        functools.partial(_module_wrap_policy, module_classes=entries),
    ):
        assert words in message(OptionTypeError, TypeError, functools.partial(plan, Transformer(), policy))


class TransformerBlok(nn.Module):
    """A class that no model is made of, with a name close to another's."""


CLASS_POLICIES: dict[str, Callable[[set[type]], Any]] = {
    "object": ModuleWrapPolicy,
    "peer's object": peer.ModuleWrapPolicy,
    "transformer": lambda classes: functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
    "peer's transformer": lambda classes: functools.partial(
        peer.transformer_auto_wrap_policy, transformer_layer_cls=classes
    ),
    "function": lambda classes: functools.partial(_module_wrap_policy, module_classes=classes),
    "or": lambda classes: functools.partial(
        _or_policy,
        policies=[
            ModuleWrapPolicy(classes),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes),
        ],
    ),
}


@pytest.mark.parametrize("kind", CLASS_POLICIES)
def test_classes_that_match_nothing_are_a_warning_with_the_nearest_names_and_counts(kind: str) -> None:
    with pytest.warns(UserWarning, match="matches no module") as caught:
        made = plan(Transformer(), CLASS_POLICIES[kind]({TransformerBlok, nn.Conv2d}))
    assert made.units == ()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    text = str(caught[0].message)
    assert "matches no module of Transformer" in text
    assert "TransformerBlok: nearest in the model: tests.wrapping.modules.Transformer (1 module)" in text
    assert "torch.nn.modules.conv.Conv2d: nothing like it in the model, which has mostly" in text
    assert "torch.nn.modules.linear.Linear (7 modules)" in text


def test_a_class_of_the_same_name_from_another_module_is_named_in_full() -> None:
    namesake = type("Block", (nn.Module,), {})
    with pytest.warns(UserWarning, match=r"nearest in the model: tests\.wrapping\.modules\.Block \(3 modules\)"):
        plan(Transformer(), ModuleWrapPolicy({namesake}))


@pytest.mark.parametrize("kind", CLASS_POLICIES)
def test_of_several_classes_the_one_that_matches_nothing_is_named(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"Transformer has no module(.|\n)*TransformerBlok: nearest"):
        chosen = plan(Transformer(), CLASS_POLICIES[kind]({TransformerBlok, Block}))
    assert len(chosen.units) == 3


def test_a_policy_that_matches_only_the_root_does_not_warn() -> None:
    assert plan(Transformer(), ModuleWrapPolicy({Transformer})).units == ()


@pytest.mark.parametrize("kind", CLASS_POLICIES)
def test_a_policy_without_classes_warns_for_a_model_that_could_be_split(kind: str) -> None:
    with pytest.warns(UserWarning, match="names no class of Transformer"):
        plan(Transformer(), CLASS_POLICIES[kind](set()))
    assert plan(nn.Sequential(nn.Linear(2, 2)), CLASS_POLICIES[kind](set())).units == ()


def test_a_policy_that_matches_only_ignored_modules_warns_for_a_model_that_could_be_split() -> None:
    model = Pair(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Conv2d(1, 1, 1))
    with pytest.warns(UserWarning, match="matches only ignored modules of Pair"):
        plan(model, ModuleWrapPolicy({nn.Conv2d}), ignored={model.second})
    model = Pair(nn.Linear(2, 2), nn.Conv2d(1, 1, 1))
    assert plan(model, ModuleWrapPolicy({nn.Conv2d}), ignored={model.second}).units == ()
