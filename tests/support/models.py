"""Models that tests share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WIDTH, ROWS = 8, 3


# -- blocks between two layers ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two layers and a residual connection; counts its forwards in ``calls``."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        # An odd number, so that there is padding between parameters.
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks between two layers that belong to the root.

    Attributes:
        order: indices of the blocks to run, in order.
        calls: number of forwards.
    """

    def __init__(
        self, num_blocks: int = 3, width: int = 8, num_outputs: int = 5, *, block: Callable[[int], nn.Module] = Block
    ) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([block(width) for _ in range(num_blocks)])
        self.head = nn.Linear(width, num_outputs)
        self.order = list(range(num_blocks))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.features(x))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Run everything but the head."""
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x)
        return x


# -- blocks with buffers, of odd sizes --------------------------------------------------------------------------------


class BufferedBlock(nn.Module):
    """Odd sizes, so that shards cut through parameters, and a buffer of each kind."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("scratch", torch.ones(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) + self.shift * self.scratch


class Model(nn.Module):
    """Blocks between two layers of the outermost unit; ``config`` is what callers read off a model."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.config = {"width": 5}
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(BufferedBlock() for _ in range(num_blocks))
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def greet(self) -> str:
        """Something that a wrapper has to forward."""
        return f"model of width {self.config['width']}"


class Tied(nn.Module):
    """One weight under two names, in the outermost unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.block = BufferedBlock()
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(x)))


# -- blocks with a norm -----------------------------------------------------------------------------------------------


class NormedBlock(nn.Module):
    """A residual block with odd sizes, so that shards cut through parameters."""

    def __init__(self, width: int = 7, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x)).relu()
        return x + self.dropout(self.down(hidden)) + self.shift.to(x.dtype)


# -- one of each kind that training has to get right ------------------------------------------------------------------


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


class NestedBlock(nn.Module):
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
        self.blocks = nn.ModuleList([NestedBlock(5), NestedBlock(5)])
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


# -- a mixture of experts of which each rank has some -----------------------------------------------------------------


class Experts(nn.Module):
    """Runs each expert on its tokens; after :meth:`split` on those of all ranks that share the experts."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, 12) / 3)
        self.down = nn.Parameter(torch.randn(num_experts, 12, WIDTH) / 3)
        self.mesh: DeviceMesh | None = None

    def split(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts: the parameters become DTensors over the mesh."""
        self.mesh = mesh
        for name, param in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute outputs of tokens, (expert, token, width)."""
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        num_ranks = 1 if self.mesh is None else self.mesh.size()
        if num_ranks == 1:
            return torch.bmm(torch.bmm(x, up).relu(), down)
        assert self.mesh is not None
        group, shape = self.mesh.get_group(), (-1, up.shape[0], x.shape[1], WIDTH)
        x = all_to_all_single_autograd(x.contiguous(), None, None, group).view(shape).transpose(0, 1)
        x = torch.bmm(torch.bmm(x.reshape(up.shape[0], -1, WIDTH), up).relu(), down)
        x = x.view(up.shape[0], num_ranks, -1, WIDTH).transpose(0, 1).reshape(self.num_experts, -1, WIDTH)
        return all_to_all_single_autograd(x, None, None, group)


class MoeBlock(nn.Module):
    """A residual block with parameters beside those of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.gate(self.norm(x)).view(4, -1, WIDTH)
        return x + self.experts(tokens).reshape(x.shape)


class Moe(nn.Module):
    """Layers around two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([MoeBlock() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
