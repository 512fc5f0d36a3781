"""Modules that touch their weights in forward: replace and restore, change, return, or hand them to numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import fully_shard, unshard_for
from fsdp_flat.errors import UsageError
from tests.support import assert_close, on_ranks
from tests.support.beside import APPLY, FRONTS, WIDTH, WRAPPER_FRONTS, Beside, batch, children_and_root, placed
from tests.support.kit import full_params, square_loss, wrapped

LAYOUTS = pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD 2x1"])


class Rounded(nn.Linear):
    """Computes with rounded weights, which it puts in the place of its own meanwhile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        saved = self.weight.data.clone()
        self.weight.data = (self.weight.data * 8).round() / 8
        y = super().forward(x)
        self.weight.data = saved
        return y


class Normalized(nn.Linear):
    """Normalizes its weights in place while it trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(self.weight / self.weight.norm())
        return super().forward(x)


class Table(nn.Module):
    """Returns a part of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 10 * WIDTH).view(10, WIDTH))

    def forward(self, num_rows: int) -> dict[str, torch.Tensor]:
        return {"rows": self.table[:num_rows]}


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(len(x))["rows"]
        return self.layers(x) + rows


class Functional(nn.Sequential):
    """Calls a module below a unit with other values of its weights, by torch.func."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](torch.func.functional_call(self[0], {"weight": 2 * self[0].weight}, (x,)))


def layers(kind: type[nn.Linear]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(WIDTH, WIDTH), nn.Tanh(), kind(WIDTH, WIDTH))


@LAYOUTS
@FRONTS
@on_ranks(2)
def test_weights_that_a_forward_replaces_and_puts_back_train_as_in_a_plain_module(layout: str, front: str) -> None:
    Beside(layers(Rounded), front, shard=children_and_root, **placed(layout, front)).train(num_steps=3)


@pytest.mark.of_guards
@pytest.mark.parametrize("layout", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD 1x2"])
@WRAPPER_FRONTS
@on_ranks(2)
def test_weights_changed_in_a_forward_raise_and_the_next_step_is_right(layout: str, front: str) -> None:
    beside = Beside(layers(Normalized), front, shard=children_and_root, **placed(layout))
    with pytest.raises(UsageError, match=r"'weight' of unit '0' was changed in forward.*on rank \d.*would be lost"):
        beside.ours(batch(0))
    beside.ours.eval()
    beside.plain.eval()
    beside.train()


def change_in_block(model: nn.Module) -> None:
    with unshard_for(model), torch.no_grad():
        model[0].weight.add_(1)
        model[0].bias.add_(1)


def change_by_hand(model: nn.Module) -> None:
    model[0].unshard()
    with torch.no_grad():
        model[0].weight.add_(1)
        model[0].bias.add_(1)
    model[0].reshard()


@pytest.mark.parametrize("change", [change_in_block, change_by_hand])
@on_ranks(2)
def test_weights_changed_while_a_caller_has_unsharded_them_raise(change: Callable[[nn.Module], None]) -> None:
    model = children_and_root(layers(nn.Linear), APPLY["originals"])
    x = torch.ones(3, WIDTH)
    before = model(x).detach()
    with pytest.raises(UsageError, match=r"'weight' of unit '0' was changed .*while it was unsharded by hand"):
        change(model)
    assert torch.equal(model(x), before)


@WRAPPER_FRONTS
@on_ranks(2)
def test_weights_changed_in_a_forward_stay_so_where_nothing_is_sharded(front: str) -> None:
    beside = Beside(layers(Normalized), front, shard=children_and_root, **placed("NO_SHARD"))
    beside.train(num_steps=3)


@LAYOUTS
@WRAPPER_FRONTS
@on_ranks(2)
def test_an_output_that_is_a_view_of_a_weight_is_used_after_later_units(layout: str, front: str) -> None:
    beside = Beside(Tabled(), front, shard=children_and_root, **placed(layout))
    beside.train(num_steps=2)


@LAYOUTS
@WRAPPER_FRONTS
@on_ranks(2)
def test_functional_call_inside_a_unit_trains_as_in_a_plain_module(layout: str, front: str) -> None:
    beside = Beside(Functional(*layers(nn.Linear)[::2]), front, units=(), **placed(layout))
    beside.train(num_steps=2)
    assert full_params(beside.ours).keys() == dict(beside.plain.named_parameters()).keys()


@LAYOUTS
@WRAPPER_FRONTS
@on_ranks(2)
def test_a_numpy_array_of_a_weight_keeps_its_values_while_other_units_run(layout: str, front: str) -> None:
    beside = Beside(layers(nn.Linear), front, shard=children_and_root, **placed(layout))
    taken: list[tuple[np.ndarray, np.ndarray]] = []

    def take(module: nn.Linear, *_: object) -> None:
        array = module.weight.detach().numpy()
        taken.append((array, array.copy()))

    hooks = [layer.register_forward_hook(take) for layer in beside.ours.modules() if isinstance(layer, nn.Linear)]
    beside.ours(batch(0))
    assert len(taken) == 2
    for array, expected in taken:
        np.testing.assert_array_equal(array, expected)
    # Memory that an array shows is not freed, so that units are not idle.
    for _ in range(2):
        beside.backward()
        beside.check_gradients()
        beside.step()
        for hook in hooks:
            hook.remove()
    beside.check_parameters()


@pytest.mark.parametrize("reentrant", [False, True])
@LAYOUTS
@WRAPPER_FRONTS
@on_ranks(2)
def test_weights_that_a_recomputed_forward_replaces_train_as_in_a_plain_module(
    layout: str, front: str, reentrant: bool
) -> None:
    def checkpointed(module: nn.Module, apply: Any, **options: object) -> nn.Module:
        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for index in (0, 2):
            module[index] = checkpoint_wrapper(module[index], checkpoint_impl=impl)
        return children_and_root(module, apply, **options)

    beside = Beside(layers(Rounded), front, shard=checkpointed, **placed(layout))
    beside.train(lambda model, x: square_loss(model, x.clone().requires_grad_()), num_steps=3)


class Failing(Rounded):
    """Raises once, with other weights in the place of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "has_failed", False):
            self.has_failed = True
            self.weight.data = self.weight.data * 0
            raise ArithmeticError
        return super().forward(x)


@LAYOUTS
@WRAPPER_FRONTS
@on_ranks(2)
def test_weights_that_a_failed_forward_has_replaced_are_the_old_ones_in_the_next(layout: str, front: str) -> None:
    beside = Beside(layers(Failing), front, shard=children_and_root, **placed(layout))
    for layer in beside.plain:
        layer.has_failed = True
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            beside.ours(batch(0))
    beside.train(num_steps=2)


@pytest.mark.parametrize("write", ["in place", "data"])
@LAYOUTS
@on_ranks(2)
def test_weights_written_with_their_own_values_or_nan_raise_nothing(layout: str, write: str) -> None:
    class Same(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if write == "data":
                self.weight.data = self.weight.data.clone()
            elif not self.weight.isnan().any():
                with torch.no_grad():
                    self.weight.clamp_(-100, 100)
            return super().forward(x)

    beside = Beside(layers(Same), "originals", shard=children_and_root, **placed(layout))
    beside.train(num_steps=2)
    with torch.no_grad():
        for param in beside.ours.parameters():
            param.fill_(torch.nan)
    assert beside.ours(batch(0)).isnan().all()


@on_ranks(2)
def test_outputs_with_cycles_and_shared_parts_are_returned_as_they_are() -> None:
    class Cyclic(nn.Linear):
        def forward(self, x: torch.Tensor) -> list[object]:
            found: list[object] = [super().forward(x)]
            found.append(found)
            return found

    model = wrapped(Cyclic(WIDTH, WIDTH), use_orig_params=True)
    found = model(torch.ones(2, WIDTH))
    assert found[1] is found
    found[0].sum().backward()


@on_ranks(2)
def test_parameters_that_two_modules_of_a_unit_exchange_are_exchanged() -> None:
    model, plain = fully_shard(layers(nn.Linear)), layers(nn.Linear)
    x = torch.ones(2, WIDTH)
    for each in (model, plain):
        first, last = each[0], each[2]
        first.weight, last.weight = last.weight, first.weight
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            square_loss(each, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)


@pytest.mark.of_guards
@on_ranks(2)
def test_an_optimizer_of_unsharded_parameters_raises_at_its_first_step() -> None:
    model = fully_shard(layers(nn.Linear))
    model(torch.ones(2, WIDTH))  # without a backward, so the parameters stay unsharded
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square_loss(model, torch.ones(2, WIDTH)).backward()
    with pytest.raises(UsageError, match=r"SGD holds an unsharded parameter of shape \(8, 8\)"):
        optimizer.step()


@pytest.mark.of_guards
@on_ranks(2)
def test_an_optimizer_that_was_built_inside_summon_full_params_raises_at_its_first_step() -> None:
    """Of a flat parameter it held views, and its steps changed nothing."""
    model = FSDP(layers(nn.Linear))
    with FSDP.summon_full_params(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square_loss(model, torch.ones(2, WIDTH)).backward()
    with pytest.raises(UsageError, match=r"an unsharded parameter of shape \(8, 8\).* inside summon_full_params"):
        optimizer.step()
