"""Sets how units accumulate and reduce gradients, and their collectives: methods of the wrapper and FSDP2's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_flat.api import flag
from fsdp_flat.comm import (
    AllGather,
    Allocate,
    CollectiveOverrides,
    ReduceScatter,
    memory_of_group,
    second_group,
    symmetric_memory,
)
from fsdp_flat.core.group_collectives import GroupCollectives
from fsdp_flat.core.memory import MemoryState
from fsdp_flat.core.options import Phase, ReductionPolicy
from fsdp_flat.core.step import step_of
from fsdp_flat.core.torch_core import LOW_PRECISION_HOOKS
from fsdp_flat.core.unit import Unit, own_unit, units_of
from fsdp_flat.errors import OptionError, OptionTypeError, PhaseError, UsageError
from fsdp_flat.runtime.unit_record import unit_record


@contextmanager
def without_reduction(units: Sequence[Unit], mode: str) -> Iterator[None]:
    """Accumulate gradients inside the block: unreduced ones (``"local"``), or reduced shards (``"sharded"``)."""
    if mode not in ("local", "sharded"):
        raise OptionError(f'no_sync takes mode="local" or mode="sharded"; got {mode!r}.')
    off = next((unit for unit in units if not unit.control.sync_gradients), None)
    if off is not None:
        raise PhaseError(
            f"no_sync was entered where gradients of unit {off.name!r} are not reduced already: inside no_sync, of "
            "which one level is enough, or after set_requires_gradient_sync(False), which does the same until it is "
            "called with True."
        )
    for unit in units:
        unit.control.sync_gradients = mode == "sharded"
    try:
        yield
    finally:
        for unit in units:
            unit.control.sync_gradients = True


def register_comm_hook(self: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """Replace the reduction of gradients by a function of the caller; only on the root, once.

    Args:
        state: passed to the hook.
        hook: called as ``hook(state, full_gradient, output_shard)``; with NO_SHARD as ``hook(state, gradient)``,
            which changes the gradient in place. Both are 1-D, in the reduction's dtype. The hook divides by itself.
            Hybrid strategies call it over the shard group and average over the replicate group themselves. torch's
            ``fp16_compress_hook`` and ``bf16_compress_hook`` stand for a reduction in that dtype.

    Raises:
        PhaseError: (an AssertionError) not the root, or a second hook.
        OptionError: (a ValueError) the hook is not callable.
    """
    unit = own_unit(self)
    if unit_record(unit).is_nested or step_of(self, unit).root is not unit:
        raise PhaseError(f"register_comm_hook must be called on the root; {unit.name!r} is nested.")
    policies = [each.policy for each in units_of(self)]
    if any(policy.hook is not None or policy.dtype is not None for policy in policies):
        raise PhaseError("A communication hook is registered already; there can be one.")
    for policy in policies:
        set_comm_hook(policy, hook)
        policy.hook_state = state


def set_comm_hook(policy: ReductionPolicy, hook: Callable[..., Any] | None) -> None:
    """Have ``hook`` replace the reductions of a unit; None restores the library's own."""
    if hook is not None and not callable(hook):
        raise OptionError(f"A communication hook must be callable; got {hook!r}.")
    policy.dtype = None if hook is None else LOW_PRECISION_HOOKS.get(hook)
    policy.hook = hook if policy.dtype is None else None


def set_divide_factor_of_tree(self: nn.Module, factor: float | torch.Tensor | None) -> None:
    """Divide the sum of gradients over ranks by ``factor`` instead of the number of ranks, here and in units below.

    With losses summed over tokens, ``factor`` is the number of tokens of all ranks; 1.0 leaves the sum. It is read
    when gradients are set, at the end of a backward, so it may be set again for every step. It then divides the sum of
    all backwards whose gradients are set together (:meth:`set_is_last_backward`).

    Args:
        factor: a number, a scalar tensor on the gradients' device, or None for the mean.

    Raises:
        UsageError: a communication hook is registered, which divides by itself.
        OptionTypeError: neither a number nor a scalar tensor.
        OptionError: zero.
    """
    _divide_by(factor, units_of(self))


def _divide_by(factor: float | torch.Tensor | None, units: Sequence[Unit]) -> None:
    if factor is not None:
        if isinstance(factor, bool) or not isinstance(factor, (int, float, torch.Tensor)):
            raise OptionTypeError(f"factor must be a number, a scalar tensor or None; got {factor!r}.")
        if not isinstance(factor, torch.Tensor) and factor == 0:
            raise OptionError("factor must not be zero: the sum of gradients is divided by it.")
        if any(unit.policy.hook is not None for unit in units):
            raise UsageError(
                "A communication hook divides gradients by itself, so a factor would do nothing. Divide in the hook, "
                "or do without it."
            )
    for unit in units:
        unit.policy.divide_factor = factor


class UnitSettings(nn.Module):
    """Sets how the unit of a module accumulates and reduces gradients, and its collectives.

    Settings are read in later steps, and every rank must make the same ones. With ``recurse`` a setting is made for the
    units below the module too.
    """

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in later backwards, over all ranks, or accumulate unreduced ones (gradient accumulation).

        With True it also undoes :meth:`set_requires_all_reduce`.
        """
        syncs = flag(requires_gradient_sync, "requires_gradient_sync")
        for unit in units_of(self, recurse=recurse):
            unit.control.sync_gradients = unit.policy.all_reduce = syncs

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sum gradients over the replicate group in later backwards, or over the shard group only (hybrid sharding).

        With False a backward reduce-scatters, sets no gradients, and keeps each rank's shard. The next backward with
        True adds it before the all-reduce. Without a replicate group it has no effect.
        """
        for unit in units_of(self, recurse=recurse):
            unit.policy.all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by ``factor`` instead of the number of ranks, for this module.

        Raises:
            OptionTypeError: ``factor`` is not a number.
            OptionError: it is zero.
        """
        _divide_by(factor, units_of(self, recurse=False))

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], object], *, stream: Any = None) -> None:
        """Call ``hook`` with each reduced gradient of this module's unit, for example to all-reduce it over more ranks.

        Every rank calls it in the same order.

        Args:
            hook: gets the rank's shard (1-D, in the reduce dtype, with padding) and changes it in place. It is divided
                already: after the reduce-scatter, or on a hybrid mesh after the all-reduce.
            stream: accelerator stream that is current in the hook; None for the stream of the reduce-scatters.

        Raises:
            OptionTypeError: ``hook`` is not callable.
            OptionError: ``stream`` was given on a hybrid mesh, or the module's parameters are on several meshes.
        """
        unit = own_unit(self)
        _check_one_mesh(unit, "An all-reduce hook")
        if not callable(hook):
            raise OptionTypeError(f"hook must be callable as hook(reduced_shard); got {hook!r}.")
        if stream is not None and any(
            options.strategy.replicates for options, param_groups in unit.by_mesh() if param_groups
        ):
            raise OptionError(
                f"Unit {unit.name!r} is on a hybrid mesh, whose all-reduce has a stream of its own: leave stream out. "
                "It is for a hook that does the all-reduce of a mesh of one dim."
            )
        unit.policy.all_reduce_hook, unit.policy.all_reduce_hook_stream = hook, stream

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next all-gather wait for ``event`` in place of everything issued on the compute stream.

        By default the first all-gather of a forward waits for all compute issued before, which includes the optimizer's
        step. ``event``, recorded after that step, counts once, for the next forward of the outermost module. On the CPU
        there is nothing to wait for.
        """
        step_of(self, own_unit(self)).streams.set_post_optim_event(event)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may be in flight, each with its flat gradient, while backward goes on.

        More of them hide a slow network, and take the memory of more gradients. The default is 2 on accelerators and 1
        on the CPU.

        Raises:
            OptionTypeError: not an int.
            OptionError: less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise OptionTypeError(f"max_input_buffers must be an int; got {max_input_buffers!r}.")
        if max_input_buffers < 1:
            raise OptionError(f"max_input_buffers must be at least 1; got {max_input_buffers}.")
        for unit in units_of(self, recurse=recurse):
            unit.policy.max_in_flight = max_input_buffers

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Give parameters of a reduced unit that no rank has used gradients of zeros, or None.

        In either case a unit's ranks reduce zeros for parameters that only other ranks have used.
        """
        for unit in units_of(self, recurse=recurse):
            unit.policy.zeros_for_unused = reduce_scatter_unused_params

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take the memory of this module's all-gathers and reduce-scatters from the allocator of the group's backend.

        NCCL then communicates without copies of its own on some networks. Flat buffers of the wrapper are in that
        memory themselves, from torch 2.12 on; of ``fully_shard`` it is where all-gathers arrive and gradients are sent
        from. A backend without an allocator, as gloo, is named in the log, and the unit's buffers stay where they are,
        as with ``enable=False``.

        Raises:
            PhaseError: (an AssertionError) a custom all-gather or reduce-scatter is set, which allocates by itself; or
                a step is under way.
        """
        _use_memory(own_unit(self), memory_of_group if enable else lambda *_: None)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Take the memory of this module's all-gathers and reduce-scatters from symmetric memory of the ranks.

        From NCCL 2.27 on the backend has faster collectives in such memory between GPUs joined by NVLink. Buffers use
        it as that of :meth:`set_allocate_memory_from_process_group_for_comm`, which with False returns to ordinary
        memory. Where there is none (a CPU, another backend, an older torch or NCCL) the log says why, and the unit's
        buffers stay where they are. Every rank must call this.

        Raises:
            PhaseError: (an AssertionError) a custom all-gather or reduce-scatter is set; or a step is under way.
        """
        _use_memory(own_unit(self), lambda group, device: symmetric_memory(group, device, backend))

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Replace the all-gather of this module's unit in later steps. Every rank must replace it.

        Args:
            comm: an object of FSDP2's interface: ``allocate(size, *, dtype, device)`` returns the output (1-D), in
                which this rank's slice is then the input; ``comm(output_tensor, input_tensor, group, async_op=True)``
                returns the work, or None if the output is ready. Two may be in flight, so ``allocate`` must not return
                memory that is in use. The output is copied to the unit's buffer; for objects that may write there
                themselves see :func:`fsdp_flat.collectives.use_collectives`.

        Raises:
            OptionTypeError: ``comm`` is not callable or has no ``allocate``.
            OptionError: the module's parameters are on several meshes.
            PhaseError: a step is under way.
        """
        _use_custom(own_unit(self), comm, "A custom all-gather", "all_gather", "gather_memory")

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Replace the reduce-scatter of this module's unit in later steps. Every rank must replace it.

        Args:
            comm: an object of FSDP2's interface: ``allocate(size, *, dtype, device)`` returns the input and the output
                (1-D); ``comm(output_tensor, input_tensor, group, op, async_op=True)`` sums, since ``op`` is always
                ``ReduceOp.SUM``, and returns the work, or None if the output is ready.

        Raises:
            OptionTypeError: ``comm`` is not callable or has no ``allocate``.
            OptionError: the module's parameters are on several meshes.
            PhaseError: a step is under way.
        """
        _use_custom(own_unit(self), comm, "A custom reduce-scatter", "reduce_scatter", "reduce_memory")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Run reduce-scatters in a process group of their own, so that NCCL runs them beside all-gathers.

        Every rank of the shard groups must call this, because it creates a group for each. ``enable=False`` returns to
        the shard group.

        Raises:
            PhaseError: a step is under way.
        """
        units = units_of(self, recurse=recurse)
        _check_between_steps(units)  # before a group is created
        every = [param_group.comm for unit in units_of(self) for param_group in unit.param_groups]
        given = [comm for comm in every if comm.choice.reduce_group is not None]
        second = {comm.options.groups.shard: comm.choice.reduce_group for comm in given}
        choices = {}
        for comm in [
            param_group.comm
            for unit in units
            for param_group in unit.param_groups
            if param_group.comm.state_collectives is not None
        ]:
            shard = comm.options.groups.shard
            if enable and shard not in second:
                second[shard] = second_group(shard)
            choices[comm] = replace(comm.choice, reduce_group=second[shard] if enable else None)
        replace_collectives(units, choices)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Have backends sum gradients of this module's unit only, and divide them by an operation of its own.

        NCCL averages fp32 and bf16 gradients over a power of two ranks itself, by numbers that are equal to the bit;
        it has zero-copy transfers and in-switch reductions for sums only.
        """
        own_unit(self).policy.sums_only = bool(enable)

    # -- switches of FSDP2 that the library has no use for -----------------------------------------------------------

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept FSDP2's switch: all-gathers are always asynchronous here."""


def _check_one_mesh(unit: Unit, what: str) -> None:
    """Raise an OptionError if the parameters of a unit are on several meshes: ``what`` communicates over one."""
    num_meshes = sum(bool(param_groups) for _, param_groups in unit.by_mesh())
    if num_meshes > 1:
        raise OptionError(
            f"{what} communicates over one mesh, but the parameters of unit {unit.name!r} are on "
            f"{num_meshes}, by its shard_placement_fn. Call fully_shard(module, mesh=...) on the modules that "
            "hold those of another mesh, and set it for each."
        )


def replace_collectives(units: Iterable[Unit], choices: Mapping[GroupCollectives, CollectiveOverrides]) -> None:
    """Have parameter groups of ``units`` use other collectives in later steps, all of them or none."""
    _check_between_steps(units)
    for comm, choice in choices.items():
        comm.use(comm.options, choice)


def _check_between_steps(units: Iterable[Unit]) -> None:
    for unit in units:
        if unit.phase is not Phase.IDLE or unit.state is MemoryState.GATHERING:
            raise PhaseError(
                f"Collectives of unit {unit.name!r} were replaced while it is {unit.phase.value}, with an all-gather "
                "or a reduce-scatter under way. Replace them between steps."
            )


def _use_memory(unit: Unit, memory: Callable[[ProcessGroup, torch.device], Allocate | None]) -> None:
    """Have the backend's collectives of a unit use other memory in later steps, by group and device."""
    _check_between_steps([unit])  # before ranks meet
    choices = {}
    for comm in [param_group.comm for param_group in unit.param_groups]:
        choice, shard, device = comm.choice, comm.options.groups.shard, comm.options.device
        if choice.all_gather is not None or choice.reduce_scatter is not None:
            raise PhaseError(
                f"Unit {comm.name!r} has a custom all-gather or reduce-scatter, whose memory its own allocate returns. "
                "Use either those or memory of the process group, or symmetric memory."
            )
        groups = [shard.group, (choice.reduce_group or shard).group]
        gather, reduce = (memory(group, device) if group is not None else None for group in groups)
        choices[comm] = replace(choice, gather_memory=gather, reduce_memory=reduce)
    replace_collectives([unit], choices)


def _use_custom(unit: Unit, comm: Any, what: str, collective: str, memory: str) -> None:
    """Replace a collective of a unit by one of the caller's, whose memory its own method allocates."""
    _check_one_mesh(unit, what)
    allocate = getattr(comm, "allocate", None)
    if not callable(comm) or not callable(allocate):
        raise OptionTypeError(
            f"comm must be callable and have a method allocate(size, *, dtype, device); got {type(comm).__name__}."
        )
    fields: dict[str, Any] = {collective: comm, memory: allocate}
    comms = [param_group.comm for param_group in unit.param_groups]
    replace_collectives([unit], {comm: replace(comm.choice, **fields) for comm in comms})
