"""Describes a planned step of training: bytes of a rank by phase and kind, bytes sent, and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fsdp_flat.errors import OptionError, counted
from fsdp_flat.extras.describe import ModelDescription, aligned
from fsdp_flat.sizes import size_text
from fsdp_flat.tools.step_memory import BytesByKind, Moment

_MOST_LISTED = 12


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """Describes one of the plans that a search compares.

    Attributes:
        strategy: name of the ``ShardingStrategy``.
        wrapping: how units were chosen.
        checkpointing: what is recomputed in backward.
        offloads: shards, gradients and optimizer states are in host memory.
        offloads_optimizer: the optimizer's states alone are there between its steps.
        arguments: the arguments of :func:`fsdp_flat.plan` that the search has chosen.
        num_units: units with parameters.
        peak_nbytes, host_nbytes, sent_nbytes, flops, seconds: as ``StepPlan``'s.
    """

    strategy: str
    wrapping: str
    checkpointing: str
    offloads: bool
    offloads_optimizer: bool
    arguments: dict[str, Any] = field(repr=False)
    num_units: int
    peak_nbytes: int
    host_nbytes: int
    sent_nbytes: float
    flops: int
    seconds: float | None

    def __str__(self) -> str:
        strategy, wrapping, checkpointing, offloaded = self.words()
        return ", ".join(filter(None, (strategy, wrapping, f"recomputing {checkpointing}", offloaded)))

    def words(self) -> tuple[str, str, str, str]:
        """Return the four choices as text; the last is empty without offloading."""
        offloaded = "offloaded" if self.offloads else "optimizer offloaded" if self.offloads_optimizer else ""
        return self.strategy, self.wrapping, self.checkpointing, offloaded

    def cost(self) -> tuple[Any, ...]:
        """Return the key by which plans that fit are sorted, the best first.

        Plans without offloading, whose copies to and from the host a plan does not time, come first; then those that
        take the least time by the speeds given, or else compute and then send the least; then those of several units,
        which overlap communication and compute; then the smallest.
        """
        work = (self.flops, self.sent_nbytes) if self.seconds is None else (self.seconds,)
        return self.offloads, self.offloads_optimizer, *work, self.num_units == 1, self.peak_nbytes


@dataclass(frozen=True, slots=True)
class StepPlan(ModelDescription):
    """Describes the units of a model before it is wrapped, and what a step of training needs; ``str`` is two tables.

    Bytes are those of tensors that exist at one time on one rank. Memory that a library keeps besides (the context and
    the kernels of an accelerator, and what its allocator cannot use) comes on top.

    Attributes:
        phases: the largest moment of each phase; empty without a batch.
        moments: the memory after each operator, all-gather and reduction, in order; empty without a batch.
        sent_nbytes: bytes that a rank sends in a step.
        flops: floating-point operations of a rank in a step, recomputation included.
        seconds: time of forward and backward by the speeds given; None without.
        exposed_seconds: the part of ``seconds`` in which compute waits for communication.
        host_nbytes: bytes in host memory with ``cpu_offload`` or ``offload_activations``: of shards, gradients,
            optimizer states and activations.
        limit_nbytes: the bytes that the search was to stay below; None for a plan that was not searched for. Without
            ``choices`` the search was for the largest batch.
        choices: the plans that the search has compared, the best first; this is the first.
    """

    phases: tuple[Moment, ...] = ()
    moments: tuple[Moment, ...] = field(default=(), repr=False)
    sent_nbytes: float = 0.0
    flops: int = 0
    seconds: float | None = None
    exposed_seconds: float | None = None
    host_nbytes: int = 0
    limit_nbytes: int | None = None
    choices: tuple[PlanChoice, ...] = field(default=(), repr=False)

    @property
    def description(self) -> ModelDescription:
        """The units alone, as ``describe`` gives them once the model is wrapped."""
        return ModelDescription(self.units, self.num_shards, self.num_replicas, self.most_gathered_nbytes)

    @property
    def fits(self) -> bool:
        """True if the step stays within the limit of the search."""
        return self.limit_nbytes is None or self.peak_nbytes <= self.limit_nbytes

    @property
    def peak(self) -> Moment:
        """The largest moment of the step; raises an OptionError for a plan without a batch."""
        if not self.phases:
            raise OptionError("This plan has no batch, so it knows no activations. Pass plan(batch=...).")
        return max(self.phases, key=lambda moment: moment.nbytes.total)

    @property
    def peak_nbytes(self) -> int:
        """Bytes of the largest moment of the step; raises an OptionError for a plan without a batch."""
        return self.peak.nbytes.total

    def __str__(self) -> str:
        units = ModelDescription.__str__(self)
        return f"{units}\n\n{self.step_text()}" if self.phases else units

    def step_text(self) -> str:
        """Return the step as text, without the units: bytes by phase and kind, what is sent, and the search.

        Raises an OptionError for a plan without a batch.
        """
        peak = self.peak
        kinds = [each.name for each in fields(BytesByKind)]
        rows = [("peak in", *kinds, "total")]
        for moment in self.phases:
            numbers = [*[getattr(moment.nbytes, kind) for kind in kinds], moment.nbytes.total]
            rows.append((moment.phase.value, *map(size_text, numbers)))
        lines = aligned(rows, left=range(1))
        lines.append(f"peak of a rank: {size_text(peak.nbytes.total)}, in {peak.phase.value}, at {peak.unit}")
        lines.append(f"a step of a rank: sends {size_text(self.sent_nbytes)}, computes {self.flops:.3g} FLOP")
        if self.host_nbytes:
            lines.append(f"in host memory: {size_text(self.host_nbytes)}")
        if self.seconds is not None and self.exposed_seconds is not None:
            lines.append(
                f"forward and backward: {self.seconds:.3g} s, of which {self.exposed_seconds:.3g} s waiting for "
                "communication"
            )
        return "\n".join([*lines, *self._search_lines()])

    def _search_lines(self) -> list[str]:
        if self.limit_nbytes is None or not self.choices:
            return []
        best, limit = self.choices[0], self.limit_nbytes
        num_fitting = sum(choice.peak_nbytes <= limit for choice in self.choices)
        if not num_fitting:
            why = f"Nothing fits {size_text(limit)}: of {len(self.choices)} plans the smallest is {best}."
        else:
            work = "computes and sends the least" if best.seconds is None else "takes the least time"
            why = f"{num_fitting} of {len(self.choices)} plans fit {size_text(limit)}; it {work}."
            why = f"Take {best}: {why}"
        columns = ("strategy", "units", "recomputed", "", "fits", "peak", "host", "sends", "FLOP", "seconds")
        rows: list[tuple[str, ...]] = [columns if best.seconds is not None else columns[:-1]]
        for choice in self.choices[:_MOST_LISTED]:
            fits = "yes" if choice.peak_nbytes <= limit else "no"
            sizes = map(size_text, (choice.peak_nbytes, choice.host_nbytes, choice.sent_nbytes))
            times = [] if choice.seconds is None else [f"{choice.seconds:.3g}"]
            rows.append((*choice.words(), fits, *sizes, f"{choice.flops:.3g}", *times))
        num_more = len(self.choices) - len(rows) + 1
        more = [f"and {num_more} more"] if num_more else []
        return ["", *aligned(rows, left=range(5)), *more, why]

    def save(self, path: str | Path) -> None:
        """Draw the memory of a step into a picture, of the format that the suffix of ``path`` names.

        Raises:
            OptionError: the plan has no batch, the suffix is no picture's, or matplotlib is not installed.
        """
        from fsdp_flat.tools.pictures import draw_plan

        peak = self.peak
        ranks = f"{counted(self.num_shards, 'shards')} x {counted(self.num_replicas, 'replicas')}"
        title = f"{self.units[0].name}, {self.units[0].strategy}, {ranks}: {size_text(self.peak_nbytes)} a rank"
        title += f", in {peak.phase.value}, at {peak.unit}"
        draw_plan(self.moments, Path(path), title=title, limit_nbytes=self.limit_nbytes)
