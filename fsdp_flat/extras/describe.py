"""Describes the units of a wrapped model, with their bytes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from fsdp_flat.core import ParamGroup, UnitOptions, units_of, unreduced_params
from fsdp_flat.errors import OptionError, counted, some_of
from fsdp_flat.layout import clean_fqn
from fsdp_flat.sizes import size_text

_COUNTED = ("num_params", "numel", "trainable_numel")
_SIZED = ("shard_nbytes", "grad_nbytes", "gathered_nbytes")


def aligned(rows: Sequence[Sequence[str]], *, left: Container[int]) -> list[str]:
    """Return the lines of a table: the columns whose positions are in ``left`` are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    put = [str.ljust if position in left else str.rjust for position in range(len(widths))]
    return ["  ".join(each(cell, width) for each, cell, width in zip(put, row, widths)).rstrip() for row in rows]


@dataclass(frozen=True, slots=True)
class UnitDescription:
    """Describes one unit, in bytes of one rank.

    Attributes:
        name: its path; for the outermost unit the class of the model.
        strategy: name of the ``ShardingStrategy``.
        dtypes: dtypes of the unsharded parameters, by name without ``torch.``.
        num_params: parameters, a tied one counted once.
        numel: their elements, over all ranks.
        trainable_numel: elements of parameters that get gradients.
        shard_nbytes: bytes of this rank's shard of the parameters.
        grad_nbytes: bytes of this rank's shard of the gradients after a backward; 0 for frozen parameters.
        gathered_nbytes: bytes of the unsharded parameters; 0 if nothing is sharded.
        whole_grad_nbytes: bytes of the gradient before it is reduced.
        is_gathered: memory of unsharded parameters is allocated now.
        reshard_after_forward: the parameters are freed after forward; None: unless the unit is the outermost, or one
            that a memory budget keeps.
        budget_nbytes: the memory budget for all units; 0 without one.
    """

    name: str
    strategy: str
    dtypes: tuple[str, ...]
    num_params: int
    numel: int
    trainable_numel: int
    shard_nbytes: int
    grad_nbytes: int
    gathered_nbytes: int
    whole_grad_nbytes: int
    is_gathered: bool = False
    reshard_after_forward: bool | None = None
    budget_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Describes the units of a model, parents before children; ``str`` of it is a table.

    Attributes:
        units: the units that have parameters.
        num_shards: ranks that the parameters of the outermost unit are sharded over.
        num_replicas: ranks that hold the same shard of it.
        most_gathered_nbytes: maximum bytes of unsharded parameters that exist at one time in a step: with a strategy
            that frees parameters after forward the outermost unit, the two largest others and the memory budget, else
            all.
        kept_for_backward: names of the units that the memory budget keeps, once they are chosen.
        unsynchronized: names of trainable parameters that no unit manages, and whose gradients nothing averages.
    """

    units: tuple[UnitDescription, ...]
    num_shards: int
    num_replicas: int
    most_gathered_nbytes: int
    unsynchronized: tuple[str, ...] = ()
    kept_for_backward: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(unit.numel for unit in self.units)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of parameters that a rank keeps."""
        return sum(unit.shard_nbytes for unit in self.units)

    @property
    def grad_nbytes(self) -> int:
        """Bytes of gradients that a rank keeps after a backward."""
        return sum(unit.grad_nbytes for unit in self.units)

    def __str__(self) -> str:
        head = ("unit", "units", "strategy", "dtype", "parameters", "elements", "trainable")
        rows: list[tuple[str, ...]] = [(*head, "shard", "gradient", "gathered")]

        def add(name: str, num_units: int, strategy: str, dtypes: str, units: Sequence[UnitDescription]) -> None:
            numbers = [f"{sum(getattr(unit, column) for unit in units):,}" for column in _COUNTED]
            sizes = [size_text(sum(getattr(unit, column) for unit in units)) for column in _SIZED]
            rows.append((name, str(num_units), strategy, dtypes, *numbers, *sizes))

        for first, equal in groupby(self.units, lambda unit: replace(unit, name="")):
            names = [unit.name for unit in equal]
            name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            mark = " *" if first.is_gathered else ""
            add(name + mark, len(names), first.strategy, ", ".join(first.dtypes), [first])
        add("all", len(self.units), "", "", self.units)
        lines = aligned(rows, left=(0, 2, 3))
        shape = f"{counted(self.num_shards, 'shards')} x {counted(self.num_replicas, 'replicas')}"
        most = size_text(self.most_gathered_nbytes)
        lines.append(f"{shape}; sizes of one unit on one rank; gathered at one time: at most {most}")
        if any(unit.budget_nbytes for unit in self.units):
            kept = some_of(list(map(repr, self.kept_for_backward)), 8)
            none = "none so far (chosen in the second forward that trains)"
            lines.append(f"kept from forward to backward by the memory budget: {kept or none}")
        if self.unsynchronized:
            shown = some_of(list(map(repr, self.unsynchronized)), 8)
            lines.append(f"in no unit, with gradients of each rank's own: {shown}")
        return "\n".join(lines)


def describe(model: nn.Module) -> ModelDescription:
    """Describe the units of a wrapped model, with their bytes. Nothing is communicated.

    ``print(describe(model))`` shows the units of an auto-wrap policy, and marks those that hold memory of unsharded
    parameters now (``*``).

    Args:
        model: a wrapper, or any module that holds wrappers.

    Raises:
        OptionError: nothing at or below ``model`` is wrapped.
    """
    units = units_of(model)
    if not units:
        raise OptionError(
            f"{type(model).__name__} holds no FullyShardedDataParallel to describe; plan(module, num_ranks, ...) "
            "describes a model before it is wrapped."
        )
    paths = {unit: clean_fqn(path) for path, child in model.named_modules() for unit in units_of(child, recurse=False)}
    described: list[UnitDescription] = []
    kept, freed = 0, [0]
    for unit in units:
        for options, param_groups in unit.by_mesh():
            if not param_groups:
                continue
            name = (paths[unit] or type(unit.module).__name__) + options.mesh_suffix
            found = _described(name, options, param_groups, unit.control.reshard_after_forward)
            described.append(found)
            is_outermost = unit is units[0] and options is unit.options
            if is_outermost or found.reshard_after_forward is False:
                kept += found.gathered_nbytes
            else:
                freed.append(found.gathered_nbytes)
    budget = max([found.budget_nbytes for found in described], default=0)
    groups = units[0].options.groups
    is_averaged = bool(units[0].averages_ignored) or groups.num_ranks == 1
    return ModelDescription(
        tuple(described),
        groups.shard.size,
        groups.replicate.size,
        most_gathered_nbytes=kept + min(sum(freed), sum(sorted(freed)[-2:]) + budget),
        unsynchronized=() if is_averaged else tuple(unreduced_params(model, units)),
        kept_for_backward=tuple(paths[unit] for unit in units if unit in unit.step.order.kept_for_backward),
    )


def _described(
    name: str, options: UnitOptions, param_groups: Sequence[ParamGroup], reshard_after_forward: bool | None
) -> UnitDescription:
    """Describe the parameter groups of a unit that are on one mesh."""
    trainable = [group for group in param_groups if group.slots.num_trainable]
    gathered = [group for group in param_groups if group.output.owns_memory]
    grad_nbytes = 0
    trainable_numel = 0
    for group in trainable:
        dtype = group.grads.reduce_dtype if group.spec.keep_reduce_dtype else group.orig_dtype
        grad_nbytes += group.layout.shard_numel * dtype.itemsize
        flags = group.slots.requires_grad()
        trainable_numel += sum(info.numel for info, flag in zip(group.layout.param_infos, flags, strict=True) if flag)
    return UnitDescription(
        name=name,
        strategy=options.strategy.name,
        dtypes=tuple(dict.fromkeys(str(group.compute_dtype).removeprefix("torch.") for group in param_groups)),
        num_params=sum(len(group.layout.param_infos) for group in param_groups),
        numel=sum(info.numel for group in param_groups for info in group.layout.param_infos),
        trainable_numel=trainable_numel,
        shard_nbytes=sum(group.storage.nbytes for group in param_groups),
        grad_nbytes=grad_nbytes,
        gathered_nbytes=sum(group.output.gathered_nbytes() for group in gathered),
        whole_grad_nbytes=sum(group.layout.numel * group.grads.dtype.itemsize for group in trainable),
        is_gathered=any(group.output.nbytes for group in gathered),
        reshard_after_forward=reshard_after_forward,
        budget_nbytes=options.strategy.budget_nbytes or 0,
    )
