"""The cases of torch's suite of modules on the meta device.

Covered: ``reset_parameters`` and ``param_init_fn``, with and without a policy, with units inside units by hand, with
buffers, with mixed precision; which modules ``param_init_fn`` is called for; a module without ``reset_parameters``; a
``param_init_fn`` that is no function; synchronisation of ranks afterwards.

Not covered: modules deferred by torchdistX, a package that is no longer made.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.both_sides import Layout
from tests.support.torch_and_ours import FULL, SHARDED, Side, on_both_sides, sgd, state_of
from tests.support.transport import rank_device


class Filled(nn.Linear):
    """A linear whose initial weights depend on its shape alone."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, self.weight.numel()).reshape(self.weight.shape))
            self.bias.fill_(0.5)


class WithBuffer(nn.Module):
    """A layer, and a parameter and a buffer of its own."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.layer = Filled(5, 5, device=device)
        self.gain = nn.Parameter(torch.empty(5, device=device))
        self.register_buffer("table", torch.empty(5, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.fill_(2.0)
            self.table.copy_(torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.gain + self.table


def stack(device: str | None = None) -> nn.Sequential:
    return nn.Sequential(WithBuffer(device), Filled(5, 3, device=device), nn.ReLU(), Filled(3, 1, device=device))


def fill(module: nn.Module) -> None:
    """Materialise, then initialise, as torch's documentation has it for ``param_init_fn``."""
    if any(tensor.is_meta for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]):
        module.to_empty(device=rank_device(), recurse=False)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


HOW = {"reset_parameters": None, "param_init_fn": fill}


def end_of(model: nn.Module) -> Any:
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    before = state_of(model)
    optimizer = sgd(model)
    loss = model(torch.ones(2, 5) + dist.get_rank()).square().mean()
    loss.backward()
    optimizer.step()
    return [before, loss.detach(), state_of(model)]


@on_both_sides()
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("auto", [True, False], ids=["policy", "one unit"])
def test_a_model_on_meta_starts_as_one_that_was_built_on_the_cpu(
    side: Side, layout: Layout, use_orig_params: bool, how: str, auto: bool
) -> Any:
    units = (WithBuffer, Filled) if auto else ()
    options: dict[str, Any] = {"units": units, "use_orig_params": use_orig_params}
    result = end_of(side.wrap(stack("meta"), layout, param_init_fn=HOW[how], **options))
    assert all(map(torch.equal, result[0].values(), stack().state_dict().values()))
    return [result, end_of(side.wrap(stack(), layout, **options))]


@on_both_sides()
@pytest.mark.parametrize("how", HOW)
def test_units_on_meta_can_be_nested_by_hand(side: Side, layout: Layout, use_orig_params: bool, how: str) -> Any:
    options: dict[str, Any] = {"param_init_fn": HOW[how], "use_orig_params": use_orig_params}
    model = stack("meta")
    model[0].layer = side.wrap(model[0].layer, layout, **options)
    model[0] = side.wrap(model[0], layout, **options)
    return end_of(side.wrap(model, layout, **options))


@on_both_sides(layouts=SHARDED, tolerance={"rtol": 1e-2, "atol": 1e-2})
@pytest.mark.parametrize("how", HOW)
def test_meta_goes_with_mixed_precision(side: Side, layout: Layout, use_orig_params: bool, how: str) -> Any:
    precision = side.api.MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    model = side.wrap(
        stack("meta"),
        layout,
        units=(WithBuffer,),
        param_init_fn=HOW[how],
        mixed_precision=precision,
        use_orig_params=use_orig_params,
    )
    before = state_of(model)
    loss = model(torch.ones(2, 5)).float().square().mean()
    loss.backward()
    sgd(model).step()
    return [before, loss.detach(), state_of(model)]


@on_both_sides(layouts=FULL)
def test_the_init_function_is_called_for_each_module_once(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    called: list[str] = []

    def note(module: nn.Module) -> None:
        called.append(type(module).__name__)
        fill(module)

    side.wrap(stack("meta"), layout, param_init_fn=note, units=(WithBuffer,), use_orig_params=use_orig_params)
    return sorted(called)


class Silent(nn.Module):
    """A parameter, and nothing that initialises it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))


@on_both_sides(layouts=FULL)
def test_a_module_that_nothing_initialises_is_an_error(side: Side, layout: Layout, use_orig_params: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*reset_parameters")  # torch says it twice
        with pytest.raises((AttributeError, ValueError), match="reset_parameters"):
            side.wrap(Silent(), layout, use_orig_params=use_orig_params)


@on_both_sides(layouts=FULL)
def test_an_init_function_must_be_callable(side: Side, layout: Layout, use_orig_params: bool) -> None:
    with pytest.raises(ValueError):
        side.wrap(stack("meta"), layout, param_init_fn=42, use_orig_params=use_orig_params)


@on_both_sides(torch_cannot="it wants an accelerator for sync_module_states")
def test_ranks_that_initialised_at_random_are_made_equal(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapped = side.wrap(model, layout, sync_module_states=True, use_orig_params=use_orig_params)
    state = state_of(wrapped)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {name: value.tolist() for name, value in state.items()})
    assert gathered[0] == gathered[1]
    return state
