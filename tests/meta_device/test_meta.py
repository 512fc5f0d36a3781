"""Modules that were built on the meta device get memory and values while they are wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision
from fsdp_flat.errors import MaterializeError, OptionError, RankMismatchError, UsageError
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_equal, on_ranks
from tests.support.wrapper_models import message, whole_state


class Layer(nn.Module):
    """Initialises itself, its buffer included, to values that tell which way it went."""

    def __init__(self, width: int = 3, device: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, device=device))
        self.register_buffer("scale", torch.empty(width, device=device))
        self.calls = 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.calls += 1
        with torch.no_grad():
            self.weight.copy_(torch.arange(self.weight.numel(), dtype=self.weight.dtype).view_as(self.weight))
            self.scale.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.scale


def stack(device: str | None = "meta") -> nn.Sequential:
    return nn.Sequential(Layer(device=device), nn.Sequential(Layer(device=device), nn.ReLU()), Layer(device=device))


def by_policy(model: nn.Sequential, **kwargs: Any) -> Any:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), **kwargs)


def by_hand(model: nn.Sequential, **kwargs: Any) -> Any:
    model[0] = FSDP(model[0], **kwargs)
    model[1] = FSDP(model[1], **kwargs)
    return FSDP(model, **kwargs)


def as_one(model: nn.Sequential, **kwargs: Any) -> Any:
    return FSDP(model, **kwargs)


WAYS: dict[str, Callable[..., Any]] = {"by policy": by_policy, "by hand": by_hand, "as one unit": as_one}


def fill(module: nn.Module) -> None:
    """A ``param_init_fn`` that allocates a module's own tensors and sets them to constants."""
    module.to_empty(device="cpu", recurse=False)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 2.0)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_reset_parameters_gives_the_weights_of_a_model_built_on_the_cpu(way: str, use_orig_params: bool) -> None:
    model = WAYS[way](stack(), use_orig_params=use_orig_params)
    assert_equal(whole_state(model), dict(stack(None).state_dict()))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    x = torch.ones(2, 3)
    assert_equal(model(x), stack(None)(x))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_param_init_fn_initialises_in_place_of_reset_parameters(way: str) -> None:
    model = WAYS[way](stack(), param_init_fn=fill)
    state = whole_state(model)
    assert sorted(state) == sorted(stack(None).state_dict())
    assert all(bool((value == 2.0).all()) for value in state.values())
    assert [layer.calls for layer in model.modules() if isinstance(layer, Layer)] == [1, 1, 1]


@on_ranks(2)
def test_param_init_fn_is_called_once_with_every_module_of_a_unit_parents_first() -> None:
    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        fill(module)

    FSDP(stack(), param_init_fn=init)
    assert seen == ["Sequential", "Layer", "Sequential", "Layer", "Layer", "ReLU"]


@on_ranks(2)
def test_param_init_fn_is_not_called_where_nothing_is_on_meta() -> None:
    def init(module: nn.Module) -> None:
        raise AssertionError("called")

    model = FSDP(stack(None), param_init_fn=init)
    assert_equal(whole_state(model), dict(stack(None).state_dict()))


@pytest.mark.parametrize("way", ["by policy", "as one unit"])
@on_ranks(2)
def test_sync_module_states_makes_random_initial_weights_equal(way: str, rank: int) -> None:
    torch.manual_seed(rank)

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.normal_(tensor)

    model = WAYS[way](stack(), param_init_fn=init, sync_module_states=True)
    ours = whole_state(model)
    theirs: list[Any] = [None, None]
    torch.distributed.all_gather_object(theirs, ours)
    assert_equal(theirs[0], theirs[1])
    assert ours["0.weight"].std() > 0


@on_ranks(2)
def test_random_initial_weights_that_differ_are_told_or_refused(rank: int) -> None:
    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, float(rank))

    text = message(
        RankMismatchError,
        ValueError,
        lambda: FSDP(Layer(device="meta"), param_init_fn=init, sync_module_states="raise"),
    )
    assert "rank 1 has another 'weight'" in text
    if rank == 0:
        with pytest.warns(UserWarning, match="rank 1 has another 'weight'"):
            FSDP(Layer(device="meta"), param_init_fn=init)
    else:
        FSDP(Layer(device="meta"), param_init_fn=init)
    model = FSDP(Layer(device="meta"), param_init_fn=init, sync_module_states="auto")
    assert bool((whole_state(model)["weight"] == 0.0).all())


class Bare(nn.Module):
    """Cannot initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


class Failing(Bare):
    """Fails to initialise itself."""

    def reset_parameters(self) -> None:
        raise KeyError("no such initialiser")


@on_ranks(2)
def test_a_module_without_reset_parameters_is_an_error_that_names_it() -> None:
    text = message(MaterializeError, AttributeError, lambda: FSDP(nn.Sequential(nn.ReLU(), Bare())))
    assert "'1' (Bare)" in text
    assert "param_init_fn" in text


@on_ranks(2)
def test_a_failing_reset_parameters_passes_its_error_on_with_a_warning_that_names_the_module() -> None:
    with pytest.warns(UserWarning, match=r"'1' \(Failing\)"), pytest.raises(KeyError, match="no such initialiser"):
        FSDP(nn.Sequential(nn.ReLU(), Failing()))
    with pytest.warns(UserWarning, match=r"param_init_fn, called with module '' \("), pytest.raises(AttributeError):
        FSDP(stack(), param_init_fn=nn.init.zeros_)


@pytest.mark.parametrize("init", ["zeros", 3, {}])
@on_ranks(2)
def test_an_init_fn_that_cannot_be_called_is_an_error(init: Any) -> None:
    assert repr(init) in message(OptionError, ValueError, lambda: FSDP(stack(), param_init_fn=init))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_an_init_fn_that_leaves_parameters_on_meta_is_an_error_that_names_them(way: str) -> None:
    text = message(OptionError, ValueError, lambda: WAYS[way](stack(), param_init_fn=lambda module: None))
    assert "meta device" in text
    assert "weight" in text


class Head(nn.Module):
    """Two layers that share a weight, on meta."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.a = Layer(device=device)
        self.b = Layer(device=device)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("init", [None, fill])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("way", ["by policy", "as one unit"])
@on_ranks(2)
def test_tied_weights_stay_tied_when_they_leave_the_meta_device(
    way: str, use_orig_params: bool, init: Callable[[nn.Module], None] | None
) -> None:
    model = WAYS[way](Head("meta"), use_orig_params=use_orig_params, param_init_fn=init)
    with FSDP.summon_full_params(model):
        assert model.a.weight is model.b.weight
        numbers = [param.numel() for param in model.parameters()]
    assert numbers == [9]
    expected = Head()
    if init is not None:
        for module in expected.modules():
            init(module)
    x = torch.ones(2, 3)
    assert_equal(model(x), expected(x))


@on_ranks(2)
def test_ignored_modules_stay_on_the_meta_device() -> None:
    model = stack()
    FSDP(model, ignored_modules=[model[2]])
    assert model[2].weight.is_meta
    assert model[2].scale.is_meta
    assert not model[0].scale.is_meta


class Rotary(nn.Module):
    """A layer with buffers that no state dict holds, of several dtypes, and a scratch buffer nobody fills."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, device=device)
        self.gate = nn.Parameter(torch.ones(4, device=device))
        self.register_buffer("inv_freq", torch.arange(4.0, device=device), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool, device=device).tril(), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.gate * self.inv_freq


def leave_empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def leave_buffers_empty(module: nn.Module) -> None:
    leave_empty(module)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if isinstance(module, Rotary):
        module.gate.fill_(1.0)


def rotary(**kwargs: Any) -> FSDP:
    """Wrapped from the meta device, the projection as a unit of its own."""
    return FSDP(Rotary("meta"), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **kwargs)


@pytest.mark.of_guards
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
@on_ranks(2)
def test_tensors_that_left_the_meta_device_without_values_are_named_at_the_first_forward(
    use_orig_params: bool, rank: int
) -> None:
    kinds = {"use_orig_params": use_orig_params}
    precisions = (None, MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16))
    state = Rotary().state_dict()
    x = torch.ones(2, 4)
    for precision in precisions:
        model = rotary(param_init_fn=leave_empty, mixed_precision=precision, **kinds)
        model.load_state_dict({name: value for name, value in state.items() if name != "gate"}, strict=False)
        for _ in range(2):
            with pytest.warns(UserWarning, match="inv_freq"):
                text = message(UsageError, RuntimeError, lambda: model(x))  # noqa: B023
            assert "'gate' of unit 'Rotary'" in text
            assert "proj" not in text
        model.load_state_dict(state)
        with pytest.warns(UserWarning, match=r"'inv_freq' of unit 'Rotary', 'mask' of unit 'Rotary'\."):
            model(x)
        model(x)  # once
    # Weights that init functions write, and buffers that a caller fills after the load, are no one's concern.
    model = rotary(param_init_fn=leave_buffers_empty, **kinds)
    for name, buffer in Rotary().named_buffers():
        model.module._buffers[name].copy_(buffer)
    model(x)
    # On some ranks from the meta device, and broadcast from one that has values: all have.
    built = Rotary() if rank == 0 else Rotary("meta")
    FSDP(built, param_init_fn=leave_empty, sync_module_states=True, **kinds)(x)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
@on_ranks(2)
def test_a_forward_after_a_move_to_the_meta_device_is_an_error_until_values_are_loaded(use_orig_params: bool) -> None:
    model = by_policy(stack("cpu"), use_orig_params=use_orig_params)
    x = torch.ones(2, 3)
    expected, state = model(x), whole_state(model)
    model.to("meta")
    for _ in range(2):
        text = message(UsageError, RuntimeError, lambda: model(x))
        assert "are on the meta device, without values, since model.to('meta')" in text
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    assert_equal(model(x), expected)


@on_ranks(2, 3)
@pytest.mark.parametrize("sync", [False, "auto", "raise", True])
@pytest.mark.parametrize("part", ["all", "first"])
def test_a_model_on_the_meta_device_on_some_ranks_only_is_compared_on_all(sync: Any, part: str, rank: int) -> None:
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    if rank == 1:
        (module if part == "all" else module[0]).to("meta")
    else:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    if part == "first":
        nn.init.ones_(module[1].weight)
        nn.init.ones_(module[1].bias)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    wrap = partial(FSDP, module, sync_module_states=sync, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    if sync == "raise":
        with pytest.raises(RankMismatchError, match=r"different weights\. .*, rank 1 has another"):
            wrap()
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = wrap()
    told = [str(each.message) for each in caught if "different weights" in str(each.message)]
    assert bool(told) == (sync is False and rank == 0), told
    found = model.state_dict()
    if sync is not False and rank != 1:
        assert_equal(dict(found), expected)


@pytest.mark.parametrize("sync", ["auto", True])
@on_ranks(2)
def test_tensors_that_initialise_to_another_shape_on_one_rank_are_named(sync: Any, rank: int) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.ones(2, 4))
            module.bias = nn.Parameter(torch.ones(2))

    model = nn.Linear(3, 2, device="meta" if rank else "cpu")
    with pytest.raises(RankMismatchError, match=r"'weight' of torch.float32 \(2, 3\), rank 1 has .* \(2, 4\)"):
        FSDP(model, param_init_fn=init, sync_module_states=sync)


class Hides(nn.Module):
    """Lists its trained parameter only, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Layer(device="meta")
        self.trained = nn.Parameter(torch.ones(3))

    def parameters(self, recurse: bool = True) -> Any:
        return iter([self.trained])

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter([("trained", self.trained)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.trained


@on_ranks(2)
def test_parameters_that_a_module_does_not_list_leave_the_meta_device() -> None:
    model = FSDP(Hides(), use_orig_params=True)
    assert not any(param.is_meta for param in nn.Module.parameters(model))
    assert_equal(model(torch.ones(1, 3)), torch.tensor([[4.5, 6.0, 7.5]]))
