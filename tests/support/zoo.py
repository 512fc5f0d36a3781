"""Models of every kind that training has to get right, each with its batches, its loss and its units."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.support.models import (
    Adapted,
    AdaptedByUnits,
    AdapterUnit,
    BiasOnly,
    Branches,
    Centred,
    Chain,
    Layer,
    MixedDtypes,
    Nested,
    NestedBlock,
    Normed,
    Routed,
    RoutedModel,
    Stored,
    TiedBlock,
    TiedEnds,
    TiedInside,
    Transformer,
    Twice,
    TwoNames,
    Uneven,
    Unused,
    frozen,
)

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
        dtype: of the parameters and batches beside a replica; None where they have several.
        peer_cannot: for a value of ``use_orig_params`` why torch's FSDP1 is no reference.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    loss_of: Callable[[nn.Module, Batch], torch.Tensor]
    units: tuple[type[nn.Module], ...]
    kinds: tuple[bool, ...] = (True, False)
    dtype: torch.dtype | None = torch.float64
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


def routed_vectors(generator: torch.Generator, rank: int) -> Batch:
    return {**vectors(generator, rank), "route": min(rank, 2)}


def routed_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"], route=batch["route"]) - batch["target"]).square().mean()


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


def two_forwards(model: nn.Module, batch: Batch) -> torch.Tensor:
    first = squared_error(model, batch)
    second = squared_error(model, {"x": batch["x"].flip(0) * 0.5, "target": batch["target"]})
    return first + second


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
    "nested units": Case(build=Nested, batch=vectors, loss_of=squared_error, units=(Layer, NestedBlock)),
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
        peer_cannot={True: "it gives unused parameters zero gradients, so weight decay moves them"},
    ),
    "branch that some ranks use": Case(
        build=RoutedModel,
        batch=routed_vectors,
        loss_of=routed_error,
        units=(Layer, Routed),
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
        MixedDtypes, layer, MixedDtypes, units=(MixedDtypes, Layer), kinds=(True,), dtype=None, peer_cannot=MIXED
    ),
}
