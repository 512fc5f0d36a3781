"""Reports a training run: bytes per rank, and a picture of loss and memory."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
from matplotlib.figure import Figure
from torch import Tensor, nn

KINDS = ("parameters", "gradients", "optimizer state")


@dataclass(slots=True)
class Part:
    """The record of one run, from its start or resume to its end.

    Attributes:
        num_ranks: world size of this part.
        strategy: name of the sharding strategy.
        training: (step, loss) pairs; the loss is the mean over ranks and over the steps since the previous pair.
        validation: (step, loss) pairs; the first is the loss before the part's first step.
        sharded: bytes of each kind on the rank that holds most.
        replicated: bytes of each kind that every rank would hold without sharding.
    """

    num_ranks: int
    strategy: str
    training: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    sharded: dict[str, int] = field(default_factory=dict)
    replicated: dict[str, int] = field(default_factory=dict)


def count_ranks(num_ranks: int) -> str:
    """Returns "1 rank", "2 ranks" and so on."""
    return f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"


# -------------------------------------------------------------------------------------------------- bytes per rank


def bytes_of_replication(model: nn.Module) -> dict[str, int]:
    """Returns the bytes that AdamW training of the plain, replicated `model` holds on every rank."""
    parameters = list(model.parameters())
    values = _nbytes(parameters)
    counters = 4 * len(parameters)  # AdamW stores two moments and a step counter per parameter
    return dict(zip(KINDS, (values, values, 2 * values + counters), strict=True))


def bytes_per_rank(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Returns the bytes held on the rank that holds most, after a step and before `zero_grad`.

    Every rank must call this.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    held = torch.tensor([_nbytes(parameters), _nbytes(gradients), _nbytes(state)], device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return dict(zip(KINDS, held.tolist(), strict=True))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memory_table(part: Part) -> str:
    """Returns the bytes per rank of a part as text, compared with replication."""
    rows = [f"{'bytes per rank':<16} {part.strategy + f' over {part.num_ranks}':>20} {'replicated':>12} {'share':>7}"]
    for kind in KINDS:
        sharded, replicated = part.sharded[kind], part.replicated[kind]
        rows.append(f"{kind:<16} {sharded / 1e6:>17.2f} MB {replicated / 1e6:>9.2f} MB {sharded / replicated:>7.0%}")
    return "\n".join(rows)


# --------------------------------------------------------------------------------------------------------- picture


def draw(parts: list[Part], path: Path) -> None:
    """Writes the losses of all parts and the bytes per rank as a PNG."""
    figure = Figure(figsize=(11, 4.5), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    loss_axes, memory_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    for axes in (loss_axes, memory_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    _draw_losses(loss_axes, parts)
    _draw_memory(memory_axes, parts)
    figure.savefig(path)


def _draw_losses(axes: Any, parts: list[Part]) -> None:
    for index, part in enumerate(parts):
        label = {"label": "training"} if index == 0 else {}
        axes.plot(*zip(*part.training, strict=True), color="tab:blue", alpha=0.5, linewidth=1.2, **label)
        label = {"label": "validation"} if index == 0 else {}
        axes.plot(*zip(*part.validation, strict=True), color="tab:red", marker="o", markersize=3.5, **label)
        start = part.validation[0][0]
        if index:
            axes.axvline(start, color="0.4", linestyle="--", linewidth=1)
        axes.annotate(
            f"{'resumed on ' if index else ''}{count_ranks(part.num_ranks)}",
            xy=(start, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            va="top",
            color="0.3",
            fontsize=9,
        )
    axes.set(title="Loss", xlabel="step", ylabel="nats per byte")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.95))


def _draw_memory(axes: Any, parts: list[Part]) -> None:
    last = parts[-1]
    series = [("replicated", last.replicated, "0.75")]
    colors = ("tab:blue", "tab:green", "tab:orange", "tab:purple")
    shown = {(part.strategy, part.num_ranks): part for part in parts}  # resumed at the same size: one bar
    for index, ((strategy, num_ranks), part) in enumerate(list(shown.items())[-len(colors) :]):
        series.append((f"{strategy}, {count_ranks(num_ranks)}", part.sharded, colors[index]))
    width = 0.8 / len(series)
    for index, (label, nbytes, color) in enumerate(series):
        places = [kind + (index - (len(series) - 1) / 2) * width for kind in range(len(KINDS))]
        bars = axes.bar(places, [nbytes[kind] / 1e6 for kind in KINDS], width * 0.94, label=label, color=color)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    axes.set_xticks(range(len(KINDS)), KINDS)
    axes.set(title="Bytes per rank", ylabel="MB")
    axes.legend(frameon=False, loc="upper left")
