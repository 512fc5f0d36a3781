"""Sets the collectives of a unit and the memory they use, by methods of the wrapper and of FSDP2's front."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NoReturn

from torch import nn

from fsdp_flat.comm import AllGather, ReduceScatter, memory_of_group, second_group
from fsdp_flat.errors import OptionTypeError, PhaseError, UnsupportedError
from fsdp_flat.runtime.unit import own_unit, units_of


def set_custom_all_gather(self: nn.Module, comm: AllGather) -> None:
    """Replace the all-gather of this module's unit in later steps. Every rank must replace it.

    Args:
        comm: an object of FSDP2's interface: ``allocate(size, *, dtype, device)`` returns the output (1-D), in which
            this rank's slice is then the input; ``comm(output_tensor, input_tensor, group, async_op=True)`` returns
            the work, or None if the output is ready. Two may be in flight, so ``allocate`` must not return memory that
            is in use. The output is copied to the unit's buffer; for objects that may write there themselves see
            :func:`fsdp_flat.collectives.use_collectives`.

    Raises:
        OptionTypeError: ``comm`` is not callable or has no ``allocate``.
        PhaseError: a step is under way.
    """
    _check_comm(comm)
    memory: Any = comm
    _replace(self, all_gather=comm, gather_memory=memory.allocate)


def set_custom_reduce_scatter(self: nn.Module, comm: ReduceScatter) -> None:
    """Replace the reduce-scatter of this module's unit in later steps. Every rank must replace it.

    Args:
        comm: an object of FSDP2's interface: ``allocate(size, *, dtype, device)`` returns the input and the output
            (1-D); ``comm(output_tensor, input_tensor, group, op, async_op=True)`` sums, since ``op`` is always
            ``ReduceOp.SUM``, and returns the work, or None if the output is ready.

    Raises:
        OptionTypeError: ``comm`` is not callable or has no ``allocate``.
        PhaseError: a step is under way.
    """
    _check_comm(comm)
    memory: Any = comm
    _replace(self, reduce_scatter=comm, reduce_memory=memory.allocate)


def set_allocate_memory_from_process_group_for_comm(self: nn.Module, enable: bool) -> None:
    """Take the memory of this unit's all-gathers and reduce-scatters from the allocator of the group's backend.

    NCCL then communicates without copies of its own on some networks. Tensors are copied between that memory and the
    unit's buffers.

    Args:
        enable: use the allocator; False uses the unit's buffers again.

    Raises:
        PhaseError: (an AssertionError) a custom all-gather or reduce-scatter is set, which allocates by itself; or a
            step is under way.
        UnsupportedError: the backend has no allocator, as gloo.
    """
    unit = own_unit(self)
    choice, groups = unit.collective_choice, unit.options.groups
    if choice.all_gather is not None or choice.reduce_scatter is not None:
        raise PhaseError(
            f"Unit {unit.name!r} has a custom all-gather or reduce-scatter, whose memory its own allocate returns. Use "
            "either those or set_allocate_memory_from_process_group_for_comm."
        )
    if not enable:
        _replace(self, gather_memory=None, reduce_memory=None)
    elif groups.shard.group is not None:
        gather_memory = memory_of_group(groups.shard.group, unit.options.device)
        reduce_group = choice.reduce_group or groups.shard
        assert reduce_group.group is not None
        reduce_memory = memory_of_group(reduce_group.group, unit.options.device)
        _replace(self, gather_memory=gather_memory, reduce_memory=reduce_memory)


def set_separate_reduce_scatter_group(self: nn.Module, enable: bool = True, *, recurse: bool = True) -> None:
    """Run reduce-scatters in a process group of their own, so that NCCL runs them beside all-gathers.

    Every rank of the shard groups must call this, because it creates a group for each.

    Args:
        enable: use that group; False uses the shard group again.
        recurse: set it for the units below too.

    Raises:
        PhaseError: a step is under way.
    """
    units = [unit for unit in units_of(self, recurse=recurse) if unit.options.groups.shard.size > 1]
    second = {
        unit.options.groups.shard: unit.collective_choice.reduce_group
        for unit in units_of(self)
        if enable and unit.collective_choice.reduce_group is not None
    }
    for unit in units:
        shard = unit.options.groups.shard
        if enable and shard not in second:
            second[shard] = second_group(shard)
        unit.use_collectives(replace(unit.collective_choice, reduce_group=second.get(shard)))


def set_symm_mem_for_comm(self: nn.Module, backend: Literal["NCCL"] = "NCCL") -> NoReturn:
    """Refuse symmetric memory, which the library does not allocate.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"Unit {own_unit(self).name!r} cannot take its memory for communication from {backend}'s symmetric memory. "
        "Call set_allocate_memory_from_process_group_for_comm(True) for memory that the backend has registered, or "
        "pass an object whose allocate returns symmetric memory to set_custom_all_gather."
    )


def _replace(module: nn.Module, **changes: Any) -> None:
    unit = own_unit(module)
    unit.use_collectives(replace(unit.collective_choice, **changes))


def _check_comm(comm: Any) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise OptionTypeError(
            f"comm must be callable and have a method allocate(size, *, dtype, device); got {type(comm).__name__}."
        )
