"""Estimates the cost of a step on many GPUs from bytes and FLOPs, without measuring.

Compute is 6 FLOPs per parameter and token (8 with activations recomputed). Communication is the lower bound of full
sharding: each unit has two all-gathers and one reduce-scatter, in each of which a rank sends (W-1)/W of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Holds the assumptions about one GPU and its network, per GPU.

    Attributes:
        flops: sustained bf16 FLOP/s (half of an H100's 989e12).
        node: GPUs in a node.
        inside, across: bytes/s of a large collective, within a node and across nodes (8 links of 400 Gb/s per node).
        hop: seconds that a ring step adds to a collective.
    """

    flops: float = 0.5 * 989e12
    node: int = 8
    inside: float = 360e9
    across: float = 300e9
    hop: float = 1.5e-6


@dataclass(frozen=True)
class Model:
    """Describes a transformer: parameters, units (blocks and the outermost one), tokens per rank and step."""

    name: str
    numel: float
    units: int
    tokens: int


MACHINE = Machine()
MODELS = (Model("7B", 6.74e9, 33, 8192), Model("70B", 69e9, 81, 8192))


def bytes_sent(numel: float, ranks: int, *, gather_itemsize: int, reduce_itemsize: int) -> float:
    """Return the bytes that a rank sends in a fully sharded step: two all-gathers and one reduce-scatter per unit."""
    return numel * (2 * gather_itemsize + reduce_itemsize) * (ranks - 1) / ranks


def bytes_held(model: Model, ranks: int) -> float:
    """Return a rank's peak bytes: fp32 masters, gradients, two Adam states; three units in bf16, two in fp32."""
    unit = model.numel / model.units
    return 16 * model.numel / ranks + unit * (3 * 2 + 2 * 4)


def projection_rows(machine: Machine = MACHINE) -> list[list[str]]:
    """Return one row per model and number of GPUs: compute, communication, time of a step with overlap, memory."""
    rows = []
    for model in MODELS:
        compute = 8 * model.numel * model.tokens / machine.flops
        for ranks in (8, 64, 1024):
            sent = bytes_sent(model.numel, ranks, gather_itemsize=2, reduce_itemsize=4)
            speed = machine.inside if ranks <= machine.node else machine.across
            network = sent / speed + 3 * model.units * (ranks - 1) * machine.hop
            # The first all-gather of a step and the last reduce-scatter overlap with nothing.
            exposed = network / (3 * model.units) * 2
            step = max(compute, network) + exposed
            rows.append(
                [
                    f"{model.name}, {ranks} GPUs",
                    f"{1e3 * compute:.0f}",
                    f"{sent / 1e9:.1f}",
                    f"{1e3 * network:.0f}",
                    f"{1e3 * step:.0f}",
                    f"{compute / step:.0%}",
                    f"{bytes_held(model, ranks) / 2**30:.1f}",
                ]
            )
    return rows
