"""A unit: one wrapped module, its handles, and the collectives that gather and reduce them.

The unit joins what the flat floor knows (tensors) with what the comm floor knows (groups). It is
told when to act: by the forward of the wrapper, by autograd hooks, by the tree's prefetch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_flat.comm import (
    AllGather,
    CustomCollectives,
    Pending,
    ReduceScatter,
    Streams,
    collectives_for,
    streams_for,
)
from fsdp_flat.errors import PhaseError, UsageError
from fsdp_flat.flat import FlatParamHandle, ShardState, in_backward, modules_of
from fsdp_flat.runtime.options import Ignored, UnitOptions
from fsdp_flat.runtime.precision import BufferCasts, InputCast
from fsdp_flat.runtime.reduction import Reduction
from fsdp_flat.runtime.tensors import StoredTensors
from fsdp_flat.runtime.use import Phase, Use

if TYPE_CHECKING:
    from fsdp_flat.runtime.tree import Tree

__all__ = ["Unit", "unit_of", "units_of"]


class Unit:
    """One wrapped module and what is needed to run it sharded.

    Args:
        module: the wrapped module.
        name: what errors call the unit until the tree knows its place.
        options: what it was asked for.
        handles: one per flat parameter; none if the module has no parameters of its own.
        ignored: what the unit leaves alone.
        buffers: buffers that compute in another dtype.
        stored: tensors that the module keeps in forward.
        number: stands for the unit between ranks, the same on all of them; 0 if it has none.

    Attributes:
        phase: what the step is doing with it; written by this class and by ``summon_full_params``.
        sync_gradients: False inside ``no_sync``.
        tree: what it shares with the other units of its root; None until the first use.
        gate_inputs: the end of backward is told by the gradients of the inputs, because some parameter
            here gets none of its own (frozen, unused).
        last_use: the use whose backward is running, for prefetch.
        gathered_version: that of the weights that are gathered, or were last.
        whole: what ``whole_params`` gathered, while it is open.
        forward_methods: names of methods that ``register_forward_method`` put on the wrapper.
        saver: what saves checkpoints of this unit's tree in the background, once one was saved so.
        optim_state_handlers: by name of an optimizer state, how a caller has it saved and loaded.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        options: UnitOptions,
        handles: list[FlatParamHandle],
        ignored: Ignored,
        buffers: BufferCasts,
        stored: StoredTensors,
        number: int,
    ) -> None:
        self.module = module
        self.number = number
        self.ignored = ignored
        self.buffers = buffers
        self.stored = stored
        dtype = options.precision.param_dtype
        self.cast_inputs = None if dtype is None else InputCast(module, dtype, options.precision.uncast_inputs)
        self.name = name
        self.options = options
        self.handles = handles
        self.phase = Phase.IDLE
        self.sync_gradients = True
        self.tree: Tree | None = None
        self.streams: Streams = streams_for(options.device)
        self._collectives = collectives_for(options.groups.shard, options.device, unit=number, name=name)
        # What a step moves data by; state dicts and summon_full_params always have the library's own, which is exact.
        self._step_collectives = self._collectives
        self._gathers: list[Pending] = []
        # Of which generation the buffers still hold the parameters, although the unit is sharded.
        self._kept: int | None = None
        self._depth = 0
        self.gathered_version = 0
        self._active: set[Use] = set()
        self._expected: dict[int, int] = {}
        self._used: dict[FlatParamHandle, bytes] = {}
        self._has_reduced = False
        self._keeps_graph = False
        self.last_use: Use | None = None
        self.whole: object | None = None
        self.forward_methods: set[str] = set()
        self.saver: object | None = None
        self.optim_state_handlers: dict[str, object] = {}
        self.gate_inputs = any(handle.num_trainable < len(handle.layout.slots) for handle in handles)
        for handle in handles:
            handle.on_landed = self._on_landed

    def use_collectives(self, all_gather: AllGather | None, reduce_scatter: ReduceScatter | None) -> None:
        """Gather and reduce by these from the next step on; None is the library's own. See ``fsdp_flat.collectives``.

        Raises:
            PhaseError: a step is under way.
        """
        if self._collectives is None:
            return
        if self._gathers or self.phase is not Phase.IDLE:
            raise PhaseError(
                f"Collectives of unit {self.name!r} were replaced while it is {self.phase.value}, with a gather or a "
                "reduction under way. Replace them between steps."
            )
        self._step_collectives = CustomCollectives(
            self.options.groups.shard, self._collectives, all_gather, reduce_scatter
        )

    def rename(self, name: str) -> None:
        """The unit's place in its tree is known."""
        self.name = name
        for handle in self.handles:
            handle.rename(name)

    # -- where the data is ---------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether nothing is gathered and nothing is on its way."""
        return not self.handles or self.handles[0].state is ShardState.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """Whether the parameters are there."""
        return not self.handles or self.handles[0].state is ShardState.UNSHARDED

    @property
    def gathers(self) -> bool:
        """Whether an unshard communicates, so that beginning it early helps."""
        return bool(self.handles) and self._collectives is not None

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter is to get a gradient."""
        return any(handle.is_trainable for handle in self.handles)

    @property
    def generation(self) -> int:
        """How often shards were replaced (``.to(dtype)``), so that gathered buffers were as well."""
        return sum([handle.generation for handle in self.handles])

    def _trace(self, event: str) -> None:
        if self.tree is not None and self.tree.trace is not None:
            self.tree.trace.append((event, self.name))

    def begin_unshard(self) -> None:
        """Begin to gather, if nothing is gathered yet. Every rank of the shard group must call this."""
        if not self.handles or not self.is_sharded or self._reuse_kept():
            return
        self._trace("begin_unshard")
        # Buffers and shards must be ordinary tensors even if the first forward runs in inference mode.
        with torch.inference_mode(False), torch.no_grad(), self.streams.gathering():
            for handle in self.handles:
                handle.adopt_changes()
                full = handle.begin_unshard()
                if self._step_collectives is not None:
                    self._gathers.append(self._step_collectives.begin_all_gather(full))

    def _reuse_kept(self) -> bool:
        """Be unsharded with what was kept, if this is the backward that it was kept for."""
        if self._kept is None:
            return False
        for handle in self.handles:
            handle.adopt_changes()
        if in_backward() == -1 or self._kept != self.generation:
            self.drop_kept()
            return False
        self._kept = None
        for handle in self.handles:
            handle.reuse()
        # Where weights have changed since the forward, activate() sees it by this and raises. A rank on which they
        # have must not gather: the others do not.
        self.gathered_version = self._version()
        return True

    def finish_unshard(self) -> None:
        """Wait until what was begun is there."""
        if self.is_unsharded:
            return
        gathers, self._gathers = self._gathers, []
        with self.streams.gathering():
            for pending in gathers:
                pending.wait()
        self.streams.gathered()
        for handle in self.handles:
            handle.finish_unshard()
        self.gathered_version = self._version()
        self._trace("finish_unshard")

    def _version(self) -> int:
        return sum([handle.views.version() for handle in self.handles])

    def unshard(self) -> None:
        """Have the parameters gathered and current, and show them to the modules."""
        if self.is_unsharded and not self.gathers:
            self.gathered_version = self._version()
        elif self.is_unsharded and not self._active and self.gathered_version != self._version():
            # Kept from an earlier forward, and somebody has changed the shards since.
            self.reshard()
        if self.is_sharded:
            self.begin_unshard()
        self.finish_unshard()
        if self.tree is not None:
            self.tree.arrived(self)
        self.show_full()

    @property
    def wants_full_precision(self) -> bool:
        """Whether a forward now would run in full precision (eval mode and the switch for it)."""
        return self.options.precision.full_in_eval and not self.module.training

    def use_full_precision(self, full: bool) -> None:
        """Compute in the original dtype, or in the low one again; what is gathered in the other one is freed."""
        if any(h.computes_low and (h.compute_dtype == h.orig_dtype) != full for h in self.handles):
            self.reshard()
            for handle in self.handles:
                handle.use_full_precision(full)

    def params_kept(self) -> dict[nn.Parameter, nn.Parameter]:
        """For what the modules show while nothing is computed and parameters are gathered: what an optimizer holds."""
        if self.is_sharded or self._depth > 0 or in_backward() != -1:
            return {}
        return {shown: kept for handle in self.handles for shown, kept in handle.views.kept().items()}

    def show_full(self) -> None:
        """Point the modules at the gathered parameters."""
        for handle in self.handles:
            handle.show_full()

    def show_shard(self) -> None:
        """Point the modules at this rank's pieces."""
        for handle in self.handles:
            handle.views.show_shard()

    def reshard(self, *, keep_memory: bool = False) -> None:
        """Free the gathered parameters; a gather on its way is waited for first.

        With ``keep_memory`` the unit is sharded to everybody, but the next backward finds its parameters where they
        were, unless :meth:`drop_kept` comes before.
        """
        if self.is_sharded:
            self.drop_kept()
            return
        self.finish_unshard()
        for handle in self.handles:
            handle.views.show_shard()
            handle.reshard()
        self._kept = self.generation
        if not keep_memory:
            self.drop_kept()

    def drop_kept(self) -> None:
        """Free what :meth:`reshard` has kept."""
        if self._kept is None:
            return
        self._kept = None
        self._trace("reshard")
        for handle in self.handles:
            handle.free()
        self.streams.freed()

    def gather_whole(self, of: Callable[[FlatParamHandle], torch.Tensor]) -> list[torch.Tensor]:
        """Gather a shard-shaped tensor of every handle (1-D, ``shard_numel``) into a whole one (``layout.numel``).

        The result is memory of its own, except where nothing is sharded: there it is the given tensor.
        Every rank of the shard group must call this.
        """
        with torch.inference_mode(False), torch.no_grad(), self.streams.gathering():
            pendings = [self._begin_gather(handle, of(handle)) for handle in self.handles]
            wholes = [pending.wait() for pending in pendings]
        self.streams.gathered()
        return wholes

    def _begin_gather(self, handle: FlatParamHandle, shard: torch.Tensor) -> Pending:
        if self._collectives is None:
            return Pending((), shard)
        whole = shard.new_empty(handle.layout.numel, device=handle.spec.device)
        whole[handle.layout.shard(self.options.groups.shard.rank).to_slice()].copy_(shard)
        return self._collectives.begin_all_gather(whole)

    # -- forward -------------------------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """The module's forward begins."""
        if self.phase is Phase.SUMMONED:
            raise PhaseError(
                f"The forward of unit {self.name!r} was called inside summon_full_params on rank "
                f"{self.options.groups.shard.rank} of its shard group. Leave the context before running the model."
            )
        self._depth += 1
        if self.phase is Phase.IDLE:
            self.phase = Phase.FORWARD
        if self._depth == 1 and not self._active:
            self.use_full_precision(self.wants_full_precision)
        self.unshard()

    def exit_forward(self, *, keep: bool, keep_memory: bool = False) -> None:
        """The module's forward is over; ``keep`` leaves the parameters gathered for backward.

        For ``keep_memory`` see :meth:`reshard`.
        """
        self._depth -= 1
        if self._depth == 0 and self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
        if self._depth == 0 and not keep and not self._active:
            self.reshard(keep_memory=keep_memory)

    # -- backward ------------------------------------------------------------------------------------------------

    def activate(self, use: Use) -> None:
        """Backward has reached the outputs of ``use``: the parameters are needed from here on.

        Raises:
            UsageError: what the forward used is gone.
            PhaseError: the weights are not those of the forward any more.
        """
        if self.is_sharded:
            for handle in self.handles:
                handle.adopt_changes()
        if use.generation != self.generation:
            raise UsageError(
                f"Unit {self.name!r} was converted (.to, .float, .cuda, or an assignment to its flat parameter) after "
                "the forward of this backward, whose buffers are gone. Convert between steps."
            )
        self.phase = Phase.BACKWARD
        self._keeps_graph = torch.is_grad_enabled()
        self._active.add(use)
        self._trace("pre_backward")
        self.use_full_precision(use.full_precision)
        self.unshard()
        if use.version != self.gathered_version:
            raise PhaseError(
                f"The weights of unit {self.name!r} were changed after the forward of this backward (by an optimizer "
                "step, load_state_dict, summon_full_params or an assignment), so its gradients would mix two sets of "
                "weights. Run backward before changing weights, or forward again after it."
            )
        if self.is_trainable and use.task not in self._expected:
            self._expect(use.task)

    def _expect(self, task: int) -> None:
        self._expected[task] = sum([handle.num_expected() for handle in self.handles])

    def _on_landed(self, _handle: FlatParamHandle) -> None:
        assert self.tree is not None
        task = in_backward()
        if self._expected.get(task, 0) == 0:
            # No output of this unit was on the way here (its parameters, or something it kept, were used
            # directly), or this is the inner pass of a re-entrant checkpoint.
            self.tree.queue_end_of_backward()
            self.phase = Phase.BACKWARD
            self._keeps_graph = torch.is_grad_enabled()
            self._expect(task)
        self._expected[task] -= 1
        if self._expected[task] == 0:
            self._complete_if_done(task)
        elif not self.streams.is_accelerator:
            self.tree.reductions.finish_done()

    def inputs_complete(self, use: Use) -> None:
        """The gradients of the inputs of ``use`` are there, so its backward is over."""
        use.waits_for_inputs = False
        if use in self._active:
            self._complete_if_done(use.task)

    def _complete_if_done(self, task: int) -> None:
        if any(self._expected.values()) or any(use.waits_for_inputs for use in self._active):
            return
        all_landed = sum([h.num_landed for h in self.handles]) == sum([len(h.layout.slots) for h in self.handles])
        watched = self.gate_inputs
        # Something here gets no gradient, so "all gradients came" does not mean "nothing is needed any more":
        # from the next forward on, the gradients of the inputs say so.
        self.gate_inputs = watched or not all_landed
        began_here = any(use.task == task for use in self._active)
        if self._active and not began_here and not all_landed:
            # An inner pass of a re-entrant checkpoint that covers a part of the unit: more is to come.
            return
        self._expected.clear()
        if watched or all_landed:
            self._active.clear()
        # In this order the memory of the parameters serves the reduction.
        self._reshard_after_backward()
        self._begin_reductions()
        assert self.tree is not None
        self.tree.gradients_are_complete(self)

    def _reshard_after_backward(self) -> None:
        if self._active or self._depth > 0 or self._keeps_graph:
            return
        self.phase = Phase.IDLE
        if self.sync_gradients or self.options.strategy.reshard_after_forward:
            self.reshard()

    def _begin_reductions(self) -> None:
        if not self.sync_gradients:
            return
        assert self.tree is not None
        self._has_reduced = True
        for handle in self.handles:
            if not handle.is_trainable:
                continue
            landed = handle.landed
            before = self._used.get(handle)
            self._used[handle] = landed if before is None else bytes(map(max, landed, before))
            self._trace("begin_reduce")
            self.tree.reductions.add(
                partial(Reduction, handle, self.options.groups, self._step_collectives, self.streams, self.tree.policy)
            )

    def take_used(self) -> dict[FlatParamHandle, bytes]:
        """For each handle reduced in this backward, which of its parameters got a gradient on this rank."""
        used, self._used = self._used, {}
        return used

    def close_backward(self) -> None:
        """Backward is over: reduce what is still here."""
        reached = bool(self._active or self._expected)
        landed = any(handle.num_landed for handle in self.handles)
        # A unit that backward reached reduces even if nothing landed: another rank may have used it.
        if landed or (reached and not self._has_reduced):
            self._begin_reductions()

    def settle(self) -> None:
        """A pass is over: nothing is active or on its way any more."""
        self._active.clear()
        self._expected.clear()
        self._has_reduced = False
        self.last_use = None
        if not self.sync_gradients:
            for handle in self.handles:
                handle.show_partial()
        self.phase = Phase.IDLE if self._depth == 0 else Phase.FORWARD
        if self._keeps_graph:
            # create_graph=True: a second backward may follow, through what this one computed with the parameters.
            self._keeps_graph = False
            self.show_shard()
        elif self._depth == 0 and (self.sync_gradients or self.options.strategy.reshard_after_forward):
            self.reshard()
        elif self._depth == 0 and not self.is_sharded:
            self.show_shard()

    def abort(self) -> None:
        """An exception ended the step: back to the sharded, idle state, without partial gradients."""
        if self.phase is Phase.SUMMONED:
            # Its forward was refused, so there is nothing to undo, and the block that shows its parameters goes on.
            return
        self._depth = 0
        self._kept = None
        self._keeps_graph = False
        self._used.clear()
        gathers, self._gathers = self._gathers, []
        for pending in gathers:
            pending.wait()
        for handle in self.handles:
            handle.abandon()
        self.settle()

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Set the phase for a while."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a wrapper, or None for any other module."""
    unit = module.__dict__.get("_unit")
    return unit if isinstance(unit, Unit) else None


def units_of(module: nn.Module) -> list[Unit]:
    """Every unit at or below ``module``, parents before children."""
    return [unit for child in modules_of(module) if (unit := unit_of(child)) is not None]
