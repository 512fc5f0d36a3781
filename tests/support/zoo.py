"""Models of every kind that training has to get right, each with its batches, its loss and its units."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and how it is trained.

    Attributes:
        build: makes the model; called under a fixed seed.
        batch: ``batch(generator, rank)``, the batch of one rank.
        loss_of: ``loss_of(model, batch)``, a scalar, the mean over the batch's own elements.
        units: classes of which each instance becomes a unit.
        kinds: the values of ``use_orig_params`` with which the model can be wrapped.
        zero_if_flat: starts of names of unused parameters that share a unit with used ones. With
            ``use_orig_params=False`` the optimizer sees one tensor a unit, so plain maths gives them a zero
            gradient (and with it weight decay) instead of none.
        peer_cannot: for a value of ``use_orig_params`` why torch's FSDP1 is no reference.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    loss_of: Callable[[nn.Module, Batch], torch.Tensor]
    units: tuple[type[nn.Module], ...]
    kinds: tuple[bool, ...] = (True, False)
    zero_if_flat: tuple[str, ...] = ()
    peer_cannot: dict[bool, str] = field(default_factory=dict)


def both(reason: str) -> dict[bool, str]:
    return {True: reason, False: reason}


# -- batches and losses --------------------------------------------------------------------------------------------


def vectors(generator: torch.Generator, rank: int, *, width: int = 5, rows: int = 6) -> Batch:
    return {
        "x": torch.randn(rows, width, generator=generator) + 0.3 * rank,
        "target": torch.randn(rows, 1, generator=generator),
    }


def squared_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]) - batch["target"]).square().mean()


def tokens(generator: torch.Generator, rank: int) -> Batch:
    return {"tokens": torch.randint(0, 11, (3, 4), generator=generator)}


def next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(tokens=batch["tokens"])
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


# -- models --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """What most models use as a unit."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Uneven(nn.Module):
    """Sizes that no number of ranks divides; on 4 ranks some hold nothing of the last unit and of ``scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(5, 7)
        self.second = Layer(7, 3)
        self.last = Layer(3, 1)
        self.scale = nn.Parameter(torch.tensor([1.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.last(self.second(self.first(x)))


class Block(nn.Module):
    """A unit with units inside and a parameter between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Layer(width, width + 2)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width + 2))
        self.second = Layer(width + 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.gain * self.first(x))


class Nested(nn.Module):
    """Units three deep, the middle level in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(5), Block(5)])
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Transformer(nn.Module):
    """torch's own encoder layers, whose attention uses ``out_proj.weight`` without calling ``out_proj``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, dim_feedforward=9, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TiedInside(nn.Module):
    """Two linears of one unit with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 5)
        self.down = nn.Linear(5, 5)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class TiedEnds(nn.Module):
    """A language model's embedding and head, two units with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.body = Layer(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


class TiedBlock(nn.Module):
    """Two units inside a unit that share a weight; the outer one has to take it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(5, 5)
        self.second = Layer(5, 5)
        self.second.linear.weight = self.first.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


class Chain(nn.Module):
    """Modules one after the other, and a linear head."""

    def __init__(self, *stages: nn.Module, width: int = 5) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


class Centred(nn.Module):
    """Buffers of every kind: persistent and not, floating and integer, changed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("num_calls", torch.tensor(0))
        self.register_buffer("table", torch.linspace(-1.0, 1.0, 5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.8).add_(0.2 * x.detach().mean(0))
        self.num_calls += 1
        return self.linear(x - self.mean) * self.table


class Normed(nn.Module):
    """A linear and its batch norm, whose statistics are those of the rank's own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


class Outside(nn.Module):
    """A tree below a plain parent that has a parameter of its own."""

    def __init__(self, hidden: int = 6, outputs: int = 4) -> None:
        super().__init__()
        self.tree = nn.Sequential(Layer(5, hidden), nn.Linear(hidden, 5))
        self.own = nn.Linear(5, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.tree(x))


class Branches(nn.Module):
    """A unit of which a part is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.used(x))


class Unused(nn.Module):
    """Unused are a branch inside a unit, a whole unit, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()
        self.spare = Layer(5, 4)
        self.head = nn.Linear(5, 1)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.branches(x))


class Routed(nn.Module):
    """A unit whose branches are for some ranks only; the first also when it is not the rank's turn."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return torch.tanh(self.experts[route](x))


class RoutedModel(nn.Module):
    """Ranks go different ways through one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(5, 5)
        self.routed = Routed()
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, route: int) -> torch.Tensor:
        return self.head(self.routed(self.first(x), route=route))


def routed_vectors(generator: torch.Generator, rank: int) -> Batch:
    return {**vectors(generator, rank), "route": min(rank, 2)}


def routed_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"], route=batch["route"]) - batch["target"]).square().mean()


class Twice(nn.Module):
    """One unit called twice, with another one between the calls, then a third time at once."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated = Layer(5, 5)
        self.between = Layer(5, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.repeated(self.between(self.repeated(x)))
        return self.head(self.repeated(x))


class TwoNames(nn.Module):
    """One unit that is registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Layer(5, 5)
        self.decoder = self.encoder
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.encoder(x)))


# -- outputs in containers -----------------------------------------------------------------------------------------

PairTuple = namedtuple("PairTuple", ["hidden", "gate"])


@dataclass
class PairData:
    hidden: torch.Tensor
    gate: torch.Tensor


class PairObject:
    """A result class that no library knows."""

    def __init__(self, hidden: torch.Tensor, gate: torch.Tensor) -> None:
        self.hidden = hidden
        self.gate = gate


PACKINGS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "dict": (lambda hidden, gate: {"hidden": hidden, "gate": gate}, lambda pair: (pair["hidden"], pair["gate"])),
    "tuple": (lambda hidden, gate: (hidden, gate), lambda pair: pair),
    "namedtuple": (PairTuple, lambda pair: (pair.hidden, pair.gate)),
    "dataclass": (PairData, lambda pair: (pair.hidden, pair.gate)),
    "custom object": (PairObject, lambda pair: (pair.hidden, pair.gate)),
    "list in tuple in dict": (
        lambda hidden, gate: {"pair": (3, [hidden, None], {"gate": gate})},
        lambda pair: (pair["pair"][1][0], pair["pair"][2]["gate"]),
    ),
}


class Packing(nn.Module):
    """Takes and returns two tensors in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 5)
        self.gate = nn.Linear(5, 5)
        self.kind = kind

    def forward(self, pair: Any) -> Any:
        pack, unpack = PACKINGS[self.kind]
        hidden, gate = unpack(pair)
        return pack(torch.tanh(self.hidden(hidden)) * gate, torch.sigmoid(self.gate(gate)))


class PackingModel(nn.Module):
    """Containers between units and as the root's own output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = Packing(kind)
        self.second = Packing(kind)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        pack, _ = PACKINGS[self.kind]
        return self.second(self.first(pack(x, torch.ones_like(x))))


def packing_case(kind: str) -> Case:
    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        hidden, gate = PACKINGS[kind][1](model(batch["x"]))
        return (hidden - batch["target"]).square().mean() + 0.3 * gate.square().mean()

    opaque = both("its hooks do not reach tensors in a class that it does not know")
    return Case(
        build=partial(PackingModel, kind),
        batch=vectors,
        loss_of=loss_of,
        units=(Packing,),
        peer_cannot=opaque if kind == "custom object" else {},
    )


# -- frozen parts --------------------------------------------------------------------------------------------------


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen linear and a small trainable path beside it, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = frozen(nn.Linear(5, 5))
        self.down = nn.Linear(5, 2, bias=False)
        self.up = nn.Linear(2, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class AdapterUnit(Layer):
    """A trainable unit of its own beside a frozen one."""


class AdaptedByUnits(nn.Module):
    """The same, with the frozen and the trainable part in different units."""

    def __init__(self) -> None:
        super().__init__()
        self.base = frozen(Layer(5, 5))
        self.adapter = AdapterUnit(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.3 * self.adapter(x)


class BiasOnly(nn.Module):
    """Only biases train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 5)
        for linear in (self.first, self.second):
            linear.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class MixedDtypes(nn.Module):
    """fp32, fp64, an integer table and a scalar, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.precise = nn.Linear(5, 3, dtype=torch.float64)
        self.order = nn.Parameter(torch.tensor([2, 0, 4, 1, 3]), requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.out = nn.Parameter(torch.linspace(-1.0, 1.0, 15, dtype=torch.float64).reshape(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x[:, self.order]) * self.temperature)
        return (torch.tanh(self.precise(x.double())) @ self.out).float()


def two_forwards(model: nn.Module, batch: Batch) -> torch.Tensor:
    first = squared_error(model, batch)
    second = squared_error(model, {"x": batch["x"].flip(0) * 0.5, "target": batch["target"]})
    return first + second


class Stored(nn.Module):
    """A unit that keeps a tensor for an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.router = nn.Linear(5, 3)
        self.penalty: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = self.router(x).square().mean()
        return torch.tanh(self.linear(x))


def with_penalties(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss = squared_error(model, batch)
    for module in model.modules():
        if isinstance(module, Stored):
            loss = loss + 0.2 * module.penalty
    return loss


def chain(*stages: Callable[[], nn.Module], units: tuple[type[nn.Module], ...] = (Layer,), **changes: Any) -> Case:
    """A chain of freshly built stages with a head, trained on vectors."""
    changes = {"batch": vectors, "loss_of": squared_error, **changes}
    return Case(build=lambda: Chain(*[stage() for stage in stages]), units=units, **changes)


def layer() -> nn.Module:
    return Layer(5, 5)


def frozen_layer() -> nn.Module:
    return frozen(Layer(5, 5))


MIXED = both("it refuses units of several dtypes")
UNTIES = both("it unties across units, or fails in forward")

CASES: dict[str, Case] = {
    "uneven sizes": Case(build=Uneven, batch=vectors, loss_of=squared_error, units=(Layer,)),
    "nested units": Case(build=Nested, batch=vectors, loss_of=squared_error, units=(Layer, Block)),
    "transformer": Case(build=Transformer, batch=tokens, loss_of=next_token, units=(nn.TransformerEncoderLayer,)),
    "tied inside a unit": chain(TiedInside, TiedInside, units=(TiedInside,)),
    "tied across units": Case(
        build=TiedEnds,
        batch=tokens,
        loss_of=next_token,
        units=(nn.Embedding, Layer, nn.Linear),
        peer_cannot=UNTIES,
    ),
    "tied across units of a unit": chain(TiedBlock, TiedBlock, units=(Layer, TiedBlock), peer_cannot=UNTIES),
    "buffers": chain(Centred, layer, Centred, units=(Centred, Layer)),
    "batch norm": chain(Normed, Normed, units=(Normed,)),
    "batch norm as units": chain(Normed, Normed, units=(nn.Linear, nn.BatchNorm1d)),
    "unused branch": Case(
        build=Unused,
        batch=vectors,
        loss_of=squared_error,
        units=(Layer, Branches),
        zero_if_flat=("branches.unused.", "never"),
        peer_cannot={True: "it gives unused parameters zero gradients, so weight decay moves them"},
    ),
    "branch that some ranks use": Case(
        build=RoutedModel,
        batch=routed_vectors,
        loss_of=routed_error,
        units=(Layer, Routed),
        # On 2 ranks nobody goes the third way.
        zero_if_flat=("routed.experts.2.",),
        peer_cannot={True: "it gives unused parameters zero gradients, so weight decay moves them"},
    ),
    "unit used three times": Case(build=Twice, batch=vectors, loss_of=squared_error, units=(Layer,)),
    "unit under two names": Case(
        build=TwoNames,
        batch=vectors,
        loss_of=squared_error,
        units=(Layer,),
        peer_cannot=both("its forward runs one of the two names on shards, or its state dict meets the unit twice"),
    ),
    "two forwards and one backward": chain(layer, layer, loss_of=two_forwards),
    "loss on a stored tensor": chain(Stored, Stored, units=(Stored,), loss_of=with_penalties),
    **{f"output in {kind}": packing_case(kind) for kind in PACKINGS},
    "frozen first units": chain(frozen_layer, frozen_layer, layer),
    "frozen middle unit": chain(layer, frozen_layer, layer),
    "frozen units beside adapter units": chain(
        frozen_layer, AdaptedByUnits, frozen_layer, AdaptedByUnits, units=(Layer, AdapterUnit)
    ),
    "adapters inside units": chain(Adapted, Adapted, units=(Adapted,), kinds=(True,)),
    "trainable biases": chain(BiasOnly, frozen_layer, BiasOnly, units=(BiasOnly, Layer), kinds=(True,)),
    "mixed dtypes": chain(
        MixedDtypes, layer, MixedDtypes, units=(MixedDtypes, Layer), kinds=(True,), peer_cannot=MIXED
    ),
}
