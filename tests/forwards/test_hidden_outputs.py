"""Outputs of a forward that are hard to find: closures, ``__slots__``, iterators, places outside of the model."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from fsdp_flat import unshard_for
from fsdp_flat.errors import UsageError
from tests.support import on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside, batch

_shelf: list[torch.Tensor] = []


class _Slotted:
    __slots__ = ("_held", "missing")

    def __init__(self, held: torch.Tensor) -> None:
        self._held = held

    def open(self) -> torch.Tensor:
        return self._held


class _BothWays(_Slotted):
    """Attributes of its own beside inherited parameters."""

    def __init__(self, held: torch.Tensor) -> None:
        super().__init__(held)
        self.note = "none"


def _on_the_shelf(y: torch.Tensor) -> None:
    _shelf.append(y)


def _later(y: torch.Tensor) -> Iterator[torch.Tensor]:
    yield y


def _identity(y: torch.Tensor) -> torch.Tensor:
    return y


# How a module hands its output over, and how the caller gets at it.
WAYS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "a closure": (lambda y: lambda: y, lambda out: out()),
    "a partial": (lambda y: functools.partial(_identity, y), lambda out: out()),
    "a default argument": (lambda y: lambda z=y: z, lambda out: out()),
    "a bound method": (lambda y: _Slotted(y).open, lambda out: out()),
    "slots": (_Slotted, lambda out: out.open()),
    "parameters and attributes": (_BothWays, lambda out: out.open()),
    "an iterator": (lambda y: iter([y]), next),
    "an iterator of values": (lambda y: iter({"y": y}.values()), next),
    "zip": (lambda y: zip([y], [0], strict=True), lambda out: next(out)[0]),
    "a generator": (_later, next),
    "a list elsewhere": (_on_the_shelf, lambda _: _shelf.pop()),
}


class Giver(nn.Module):
    """Two layers, whose weights both are needed in backward, and an output that is handed over in some way."""

    def __init__(self, give: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.give = give

    def forward(self, x: torch.Tensor) -> Any:
        return self.give(self.down(torch.tanh(self.up(x))))


class Taker(nn.Module):
    """Layers around a :class:`Giver`, in a unit of their own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        give, self.take = WAYS[way]
        self.first = nn.Linear(WIDTH, WIDTH)
        self.giver = Giver(give)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.take(self.giver(self.first(x))))


@WRAPPER_FRONTS
@on_ranks(2)
def test_outputs_wherever_they_are_train_as_the_replica(front: str) -> None:
    for way, (give, take) in WAYS.items():
        inside = Beside(Taker(way), front, units=(Giver,))
        inside.train(num_steps=2)
        outermost = Beside(Giver(give), front, units=())
        outermost.train(lambda model, x, take=take: take(model(x)).pow(2).mean(), num_steps=2)
        assert not _shelf


class Leaking(Giver):
    """Puts a part of a parameter elsewhere, whose backward needs no weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _on_the_shelf(self.down.bias * 2)
        return super().forward(x)


class Bypassed(nn.Module):
    """The loss is made of what the inner unit kept elsewhere, and none of what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.giver = Leaking(_identity)
        self.last = Giver(_identity)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.giver(self.first(x))
        return self.last(out.detach())


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_loss_around_the_outputs_of_a_unit_raises_with_its_name_while_it_is_gathered(front: str) -> None:
    beside = Beside(Bypassed(), front, units=(Giver, Leaking))
    out = beside.ours(torch.randn(3, WIDTH, dtype=torch.float64))
    with pytest.raises(UsageError, match=r"unit 'giver'.*not among.*output"):
        (out.sum() + _shelf.pop().sum()).backward()
    # A step after it is as if nothing had been.
    assert all(param.grad is None for param in beside.ours.parameters())
    beside.train()
    _shelf.clear()


def _kept_as_attribute(module: nn.Module, z: torch.Tensor) -> None:
    module.kept = z


def _kept_in_a_closure(module: nn.Module, z: torch.Tensor) -> None:
    module.kept = lambda: z


def _kept_in_slots(module: nn.Module, z: torch.Tensor) -> None:
    module.kept = _Slotted(z)


def _kept_in_a_namespace(module: nn.Module, z: torch.Tensor) -> None:
    module.kept = types.SimpleNamespace(z=z)


class _Registered(_Slotted):
    """A class of a caller's own that torch knows how to take apart."""


_pytree.register_pytree_node(_Registered, lambda value: ([value.open()], None), lambda given, _: _Registered(*given))


def _kept_in_a_registered_class(module: nn.Module, z: torch.Tensor) -> None:
    module.kept = [_Registered(z)]


def _kept_on_the_shelf(_module: nn.Module, z: torch.Tensor) -> None:
    _shelf.append(z)


FOUND = ("an attribute", "a registered class")
# How a module keeps a tensor beside its output, and how the caller gets at it.
KEEPS: dict[str, tuple[Callable[[nn.Module, torch.Tensor], None], Callable[[Any], torch.Tensor]]] = {
    "an attribute": (_kept_as_attribute, lambda module: module.kept),
    "a registered class": (_kept_in_a_registered_class, lambda module: module.kept[0].open()),
    "a closure": (_kept_in_a_closure, lambda module: module.kept()),
    "slots": (_kept_in_slots, lambda module: module.kept.open()),
    "a namespace": (_kept_in_a_namespace, lambda module: module.kept.z),
    "a list elsewhere": (_kept_on_the_shelf, lambda _: _shelf.pop()),
}


class Keeper(nn.Module):
    """Returns one output, and keeps another one of the same layers."""

    def __init__(self, keep: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        out = self.down(hidden)
        self.keep(self, self.down(hidden * 2))
        return out


class Around(nn.Module):
    """A :class:`Keeper` before other units, so that it is freed when the forward is over."""

    def __init__(self, keep: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.keeper = Keeper(keep)
        self.rest = nn.Sequential(Giver(_identity), Giver(_identity))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.keeper(self.first(x)))


def loss_of_kept(way: str, *, alone: bool) -> Callable[..., torch.Tensor]:
    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        kept = KEEPS[way][1](next(module for module in model.modules() if isinstance(module, Keeper)))
        return kept.square().mean() if alone else kept.square().mean() + out.square().mean()

    return loss_of


def around(way: str, *, front: str) -> Beside:
    return Beside(Around(KEEPS[way][0]), front, units=(Giver, Keeper))


@WRAPPER_FRONTS
@on_ranks(2)
def test_what_a_module_keeps_beside_its_output_trains_as_the_replica(front: str) -> None:
    for way in FOUND:
        beside = around(way, front=front)
        beside.train(loss_of_kept(way, alone=False), num_steps=2)
        # Alone: backward comes to none of the outputs, and not to the units after it.
        beside.train(loss_of_kept(way, alone=True), num_steps=2)


@WRAPPER_FRONTS
@pytest.mark.parametrize("before", ["absent", "None", "zero", "an empty list"])
@on_ranks(2)
def test_tensors_that_are_stored_from_a_later_step_on_train_as_in_the_replica(before: str, front: str) -> None:
    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        keeper = next(module for module in model.modules() if isinstance(module, Keeper))
        out = model(x).square().mean()
        return out + (keeper.kept[0] if isinstance(keeper.kept, list) else keeper.kept).square().mean()

    model = Around(lambda *_: None)
    if before != "absent":
        model.keeper.kept = {"None": None, "zero": 0.0, "an empty list": []}[before]
    beside = Beside(model, front, units=(Giver, Keeper))
    beside.train(num_steps=2)
    for keeper in (module for both in beside.models for module in both.modules()):
        if isinstance(keeper, Keeper):
            keeper.keep = _kept_in_a_list if before == "an empty list" else _kept_as_attribute
    beside.train(loss_of, num_steps=2)


def _kept_in_a_list(module: Any, z: torch.Tensor) -> None:
    module.kept[:] = [z]


@WRAPPER_FRONTS
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside the output"])
@pytest.mark.parametrize("way", [way for way in KEEPS if way not in FOUND])
@on_ranks(2)
def test_a_loss_of_what_was_kept_out_of_sight_raises_where_the_unit_is_sharded(
    way: str, alone: bool, front: str
) -> None:
    beside = around(way, front=front)
    for step in range(2):
        with pytest.raises(RuntimeError, match=r"needed for gradient computation has been .* is at version 1\d{9};"):
            beside.backward(loss_of_kept(way, alone=alone), step)
        # A step after it is as if nothing had been, and one inside unshard_for is right.
        assert all(param.grad is None for param in beside.ours.parameters())
        beside.train(lambda model, x: (model(x).square().mean(), _shelf.clear())[0])
    loss_of = loss_of_kept(way, alone=alone)
    with unshard_for(beside.ours):
        loss = loss_of(beside.ours, batch(torch.distributed.get_rank()))
    loss.backward()
    beside.follow(loss_of)
    beside.check_gradients()


class Equilibrium(nn.Module):
    """A fixed point, whose gradient a hook on the output computes with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(z: torch.Tensor) -> torch.Tensor:
            return torch.tanh(0.3 * self.layer(z) + x)

        with torch.no_grad():
            z = step(step(torch.zeros_like(x)))
        z = step(z)
        start = z.detach().clone().requires_grad_()
        again = step(start)
        z.register_hook(lambda grad: grad + torch.autograd.grad(again, start, grad, retain_graph=True)[0])
        return z


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_hook_that_a_module_puts_on_its_own_output_computes_with_the_weights(front: str) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Equilibrium(), Equilibrium())
    beside = Beside(module, front, units=(Equilibrium,))
    beside.train(num_steps=2)


class LocalLoss(Giver):
    """Keeps a loss of its own elsewhere, and returns its output without its graph, as greedy training does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        _on_the_shelf(y.pow(2).mean())
        return y.detach()


@WRAPPER_FRONTS
@on_ranks(2)
def test_losses_kept_elsewhere_beside_detached_outputs_train_as_the_replica(front: str) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model(x)
        losses, _shelf[:] = torch.stack(_shelf), []
        return losses.sum()

    module = nn.Sequential(LocalLoss(_identity), LocalLoss(_identity))
    beside = Beside(module, front, units=(LocalLoss,))
    beside.train(loss_of, num_steps=2)
