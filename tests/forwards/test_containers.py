"""Inputs in containers: modules write to them, and containers may have state of their own."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import MixedPrecision, fully_shard
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.support import assert_close, on_ranks
from tests.support.beside import WIDTH, WRAPPER_FRONTS, Beside
from tests.support.models import Block


@dataclasses.dataclass
class Record:
    """Computes when it is made, and has an attribute that is no field."""

    hidden: torch.Tensor
    scale: float = 1.0
    offset: dataclasses.InitVar[float] = 2.0

    def __post_init__(self, offset: float) -> None:
        self.scale *= 2
        self.moved = offset


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    hidden: torch.Tensor
    others: dict[str, torch.Tensor]


class Marked(list[Any]):
    """A list with an attribute."""

    scale = 1.0


class Both(tuple[Any, Any]):
    """A tuple whose constructor takes two arguments, with an attribute."""

    scale: float

    def __new__(cls, hidden: torch.Tensor, other: float) -> Both:
        made = super().__new__(cls, (hidden, other))
        made.scale = 3.0
        return made


def _marked(hidden: torch.Tensor) -> Marked:
    made = Marked([hidden])
    made.scale = 3.0
    return made


# How an input holds a tensor, and how the module reads it.
HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "a dataclass": (Record, lambda held: held.hidden * held.scale + held.moved),
    "a frozen dataclass": (lambda h: Frozen(h, {"y": 2 * h}), lambda held: held.hidden + held.others["y"]),
    "a list with an attribute": (_marked, lambda held: held[0] * held.scale),
    "a tuple of another constructor": (lambda h: Both(h, 2.0), lambda held: held[0] * held[1] * held.scale),
    "a mapping to read": (lambda h: types.MappingProxyType({"x": h}), lambda held: held["x"]),
    "a result of torch.max": (lambda h: h[None].max(0), lambda held: held.values),
}


class Reader(Block):
    """Reads its input by a function."""

    read: Callable[[Any], torch.Tensor]

    def forward(self, held: Any) -> torch.Tensor:
        return super().forward(self.read(held))


class Holding(nn.Module):
    """Puts the inputs of its readers into a holder."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.hold, read = HOLDERS[name]
        self.first, self.readers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Reader(), Reader()])
        for reader in self.readers:
            reader.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for reader in self.readers:
            x = reader(self.hold(x))
        return x


@WRAPPER_FRONTS
@pytest.mark.parametrize("name", HOLDERS)
@on_ranks(2)
def test_containers_reach_a_unit_with_their_own_state(name: str, front: str) -> None:
    beside = Beside(Holding(name), front, units=(Reader,))
    beside.train(num_steps=2)


class Caching(Block):
    """Changes, adds and removes entries of a cache, and appends a loss to a list; may return nothing."""

    returns = True

    def forward(self, x: torch.Tensor, cache: dict[str, Any], *, losses: list[torch.Tensor]) -> torch.Tensor | None:
        x = super().forward(x) + cache["key"]
        cache["key"] = cache["key"] * 2 + x
        cache["previous"] = cache.pop("next")
        cache["next"] = x
        losses.append(x.pow(2).mean())
        return x if self.returns else None


class Cached(nn.Module):
    """Passes a cache and a list of losses through its blocks."""

    def __init__(self, *, returns: bool = True) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Caching(), Caching()])
        for block in self.blocks:
            block.returns = returns

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = self.first(x)
        losses: list[torch.Tensor] = []
        kept = x + 1
        cache: dict[str, Any] = {"key": x, "next": x, "kept": kept, "tuple": (kept, x)}
        for block in self.blocks:
            returned = block(x, cache, losses=losses)
            x = cache["next"] if returned is None else returned
        assert cache["kept"] is kept
        assert cache["tuple"][0] is kept
        return x + cache["key"] + cache["previous"] + cache["kept"], losses


@WRAPPER_FRONTS
@pytest.mark.parametrize("returns", [True, False])
@on_ranks(2)
def test_a_caller_sees_what_units_write_into_their_inputs(returns: bool, front: str) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out, losses = model(x)
        return sum(losses, out.pow(2).mean())

    model = Cached(returns=returns)
    beside = Beside(model, front, units=(Caching,))
    beside.train(loss_of, num_steps=3)


class Lending(Block):
    """Gives its weights away, one as it is, and one as a view."""

    def forward(self, x: torch.Tensor, lent: dict[str, torch.Tensor]) -> torch.Tensor:
        lent["up"], lent["down"] = self.up.weight, self.down.weight.t()
        return super().forward(x)


class Borrowing(nn.Module):
    """Computes with the weights of a unit after another unit has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lending, self.block = nn.Linear(WIDTH, WIDTH), Lending(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        lent: dict[str, torch.Tensor] = {}
        x = self.block(self.lending(x, lent))
        return x @ lent["up"].t() @ lent["down"]


@WRAPPER_FRONTS
@on_ranks(2)
def test_weights_that_a_unit_writes_into_its_inputs_keep_their_values(front: str) -> None:
    beside = Beside(Borrowing(), front, units=(Block, Lending))
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        assert_close({"output": beside.ours(x)}, {"output": beside.plain(x)}, rtol=1e-5, atol=1e-6)
    beside.train(num_steps=2)


class Raising(Block):
    def forward(self, held: dict[str, torch.Tensor]) -> torch.Tensor:
        held["x"], held["moved"] = held["x"] * 2, held["x"]
        raise ValueError("in a unit")


class Catching(nn.Module):
    """Goes on after an exception in a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.raising = Block(), Raising()

    def forward(self, held: dict[str, torch.Tensor]) -> torch.Tensor:
        held["sum"] = self.block(held["x"])
        with pytest.raises(ValueError, match="in a unit"):
            self.raising(held)
        return held["sum"]


@WRAPPER_FRONTS
@on_ranks(2)
def test_a_container_has_its_own_tensors_again_after_a_forward(front: str) -> None:
    policy = ModuleWrapPolicy({Block, Raising})
    model = FSDP(Catching(), auto_wrap_policy=policy, use_orig_params=front == "originals")
    given = torch.randn(3, WIDTH, requires_grad=True)
    held = {"x": given}
    out = model(held)
    assert held["moved"] is given
    assert held["sum"] is out
    out.sum().backward()
    assert given.grad is not None


class FromDict(Block):
    def forward(self, held: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(held["x"])


class Chain(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block({"x": x})
        return x


@WRAPPER_FRONTS
@pytest.mark.parametrize("cast", [False, True], ids=["as they are", "cast"])
@pytest.mark.parametrize("inside", [False, True], ids=["around units", "inside units"])
@on_ranks(2)
def test_a_checkpoint_recomputes_with_the_inputs_of_the_forward(
    inside: bool, cast: bool, front: str, rank: int
) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True) if cast else None

    def shard(module: nn.Module) -> nn.Module:
        return FSDP(module, mixed_precision=precision, use_orig_params=front == "originals")

    def model_of(*, recomputes: bool) -> nn.Module:
        torch.manual_seed(0)
        blocks: list[nn.Module] = [FromDict(), FromDict()]
        if recomputes and inside:
            blocks = [checkpoint_wrapper(block) for block in blocks]
        blocks = [shard(block) for block in blocks]
        if recomputes and not inside:
            blocks = [checkpoint_wrapper(block) for block in blocks]
        return shard(Chain(blocks))

    grads = []
    for recomputes in (False, True):
        model = model_of(recomputes=recomputes)
        torch.manual_seed(rank)
        model(torch.randn(3, WIDTH)).float().square().mean().backward()
        grads.append([param.grad for param in model.parameters()])
    for kept, recomputed in zip(*grads, strict=True):
        assert (kept is None) == (recomputed is None)
        assert kept is None or torch.equal(kept, recomputed)


class Noting(Block):
    def forward(self, x: torch.Tensor, noted: dict[str, torch.Tensor]) -> torch.Tensor:
        x = super().forward(x)
        noted[f"{len(noted)}"] = super().forward(x)
        return x


@on_ranks(2)
def test_each_module_of_a_unit_may_write_into_its_inputs(rank: int) -> None:
    """With ``fully_shard([one, two])``."""
    torch.manual_seed(0)
    plain = nn.ModuleList([Noting(), Noting(), Block()])
    model = copy.deepcopy(plain)
    fully_shard([model[0], model[1]])
    fully_shard(model[2])
    losses = []
    for one, two, three in (plain, model):
        torch.manual_seed(rank)
        noted: dict[str, torch.Tensor] = {}
        three(two(one(torch.randn(3, WIDTH), noted), noted))
        assert list(noted) == ["0", "1"]
        losses.append(noted["1"].square().mean() + noted["0"].mean())
        losses[-1].backward()
    for param in plain.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
    for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
        assert (param.grad is None) == (sharded.grad is None)
        if param.grad is not None:
            full = sharded.grad.full_tensor()
            assert_close({"gradient": full}, {"gradient": param.grad / 2}, rtol=1e-5, atol=1e-6)
