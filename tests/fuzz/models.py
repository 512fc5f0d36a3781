"""The modules that cases are made of: each maps (rows, width) to (rows, width), in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.gradient_edits import Edited
from tests.support.kit import RaisesInBackward, Trouble

from .case import Case, Node


@dataclass
class Current:
    """What modules compute depends on: the rank that they compute for, and where to raise."""

    rank: int = 0
    trouble: tuple[int, str] = (-1, "")


CURRENT = Current()


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Compute for ``rank`` inside the block."""
    before, CURRENT.rank = CURRENT.rank, rank
    try:
        yield
    finally:
        CURRENT.rank = before


class Part(nn.Module):
    """Base of all modules of a case."""

    def __init__(self, node: Node, width: int, children: list[nn.Module]) -> None:
        super().__init__()
        self.node_id = node.id
        for index, child in enumerate(children):
            self.add_module(f"c{index}", child)
        self.num_parts = len(children)
        self.make(node, width)

    def make(self, node: Node, width: int) -> None:
        """Make the module's own parameters and buffers."""

    def part(self, index: int) -> nn.Module:
        return getattr(self, f"c{index}")

    def parts(self) -> list[nn.Module]:
        return [self.part(index) for index in range(self.num_parts)]

    def forward(self, x: torch.Tensor) -> Any:
        trouble = CURRENT.trouble[1] if CURRENT.trouble[0] == self.node_id else ""
        if trouble == "before":
            raise Trouble("before")
        if trouble == "backward":
            x = RaisesInBackward.apply(x)
        y = self.compute(x)
        if trouble == "after":
            raise Trouble("after")
        if trouble == "backward at the end" and isinstance(y, torch.Tensor):
            y = RaisesInBackward.apply(y)
        return y

    def compute(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


# -- containers ------------------------------------------------------------------------------------------------------


class Seq(Part):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts():
            x = part(x)
        return x


class Twice(Part):
    """Calls its part twice."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(0)(self.part(0)(x))


class Residual(Part):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * (x + self.part(0)(x))


class Recompute(Part):
    """Recomputes its part in backward."""

    def make(self, node: Node, width: int) -> None:
        self.reentrant = node.reentrant

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part(0), x, use_reentrant=self.reentrant)


class Branch(Part):
    """Calls its part on every rank; only some ranks use the output."""

    def make(self, node: Node, width: int) -> None:
        self.ranks = node.ranks

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part(0)(x)
        return 0.5 * (x + y) if CURRENT.rank in self.ranks else x


class Root(Part):
    """The body, then parts that see its output; all outputs are returned."""

    def compute(self, x: torch.Tensor) -> dict[str, Any]:
        first, *sides = self.parts()
        x = first(x)
        return {"out": x, "sides": [side(x) for side in sides]}


# -- parts with parameters -------------------------------------------------------------------------------------------


class Linear(Part):
    """One layer without a residual path, so that its input needs a gradient only from below."""

    def make(self, node: Node, width: int) -> None:
        self.layer = nn.Linear(width, width)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Mlp(Part):
    def make(self, node: Node, width: int) -> None:
        self.up = nn.Linear(width, node.size)
        self.down = nn.Linear(node.size, width, bias=False)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x + self.down(torch.tanh(self.up(x)))


class Tied(Part):
    """Uses the first weight of an ``Mlp`` of another place."""

    def make(self, node: Node, width: int) -> None:
        self.scale = nn.Parameter(torch.randn(node.size))

    def tie(self, other: Mlp) -> None:
        self.weight = other.up.weight
        if self.scale.numel() != self.weight.shape[0]:
            self.scale = nn.Parameter(torch.linspace(-1.0, 1.0, self.weight.shape[0]))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x + torch.tanh(F.linear(x, self.weight) * self.scale) @ self.weight


class Scalar(Part):
    """A parameter without dimensions."""

    def make(self, node: Node, width: int) -> None:
        self.gain = nn.Parameter(torch.randn(()))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * (1.0 + self.gain))


class Empty(Part):
    """A parameter without elements, and one with."""

    def make(self, node: Node, width: int) -> None:
        self.nothing = nn.Parameter(torch.randn(0, width))
        self.shift = nn.Parameter(torch.randn(width))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum(0) + 0.1 * self.shift


class Norm(Part):
    def make(self, node: Node, width: int) -> None:
        self.norm = nn.LayerNorm(width)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Ints(Part):
    """A parameter of integers, which is never trained."""

    def make(self, node: Node, width: int) -> None:
        self.numbers = nn.Parameter(torch.arange(node.size), requires_grad=False)
        self.shift = nn.Parameter(torch.randn(1, width))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift * self.numbers.sum() * 0.01


class Mixed(Part):
    """Parameters in fp64 and fp32."""

    def make(self, node: Node, width: int) -> None:
        self.wide = nn.Parameter(torch.randn(width))
        self.narrow = nn.Parameter(torch.randn(width, dtype=torch.float32))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.wide + self.narrow.to(x.dtype))


class Unused(Part):
    """Has parameters that no rank uses, one of them in a module of its own."""

    def make(self, node: Node, width: int) -> None:
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.spare = nn.Linear(width, node.size)
        self.extra = nn.Parameter(torch.randn(node.size))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) + 0.5 * x


class RankPart(Part):
    """Has a parameter that some ranks use."""

    def make(self, node: Node, width: int) -> None:
        self.ranks = node.ranks
        self.shift = nn.Parameter(torch.randn(width))
        self.sometimes = nn.Parameter(torch.randn(width))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x + self.shift)
        return x * self.sometimes if CURRENT.rank in self.ranks else x


class Counter(Part):
    """Has buffers that each training forward changes."""

    def make(self, node: Node, width: int) -> None:
        self.bias = nn.Parameter(torch.randn(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
                self.calls.add_(1)
                self.passing.add_(0.5)
        return x + self.bias - self.mean.clone()


class EditedPart(Part):
    """Has a layer whose backward sets, changes or clears ``.grad`` of its parameters, some in a nested backward."""

    def make(self, node: Node, width: int) -> None:
        self.edited = Edited(width, node.edit)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.edited(x)


CLASSES: dict[str, type[Part]] = {
    "root": Root,
    "seq": Seq,
    "twice": Twice,
    "residual": Residual,
    "recompute": Recompute,
    "branch": Branch,
    "linear": Linear,
    "mlp": Mlp,
    "tied": Tied,
    "scalar": Scalar,
    "empty": Empty,
    "norm": Norm,
    "ints": Ints,
    "mixed": Mixed,
    "unused": Unused,
    "rankpart": RankPart,
    "counter": Counter,
    "edited": EditedPart,
}


class ScaleOutput:
    """A forward hook that changes the output."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output * 0.75


class ScaleGradient:
    """A hook on a parameter."""

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return grad * 1.5


def build(case: Case, seed: int | None = None) -> Root:
    """Build the model of a case, with the weights that the seed gives."""
    torch.manual_seed(case.seed if seed is None else seed)
    made: dict[int, Part] = {}
    model = _build(case.model, case.width, made)
    assert isinstance(model, Root)
    return model


def _build(node: Node, width: int, made: dict[int, Part]) -> Part:
    if node.kind == "alias":
        return made[node.refers]
    children: list[nn.Module] = [_build(child, width, made) for child in node.children]
    part = CLASSES[node.kind](node, width, children)
    if isinstance(part, Tied):
        other = made[node.refers]
        assert isinstance(other, Mlp)
        part.tie(other)
    own = [p for name, p in part.named_parameters() if not name.startswith("c") and p.is_floating_point()]
    if node.frozen:
        for param in own if node.frozen == "all" else own[:1]:
            param.requires_grad_(False)
    if node.hook == "forward":
        part.register_forward_hook(ScaleOutput())
    elif node.hook == "parameter":
        for param in own[-1:]:
            if param.requires_grad:
                param.register_hook(ScaleGradient())
    made[node.id] = part
    return part
