"""Finds tensors that no unit manages and that drift apart on the ranks: ignored and added parameters, and buffers."""

from __future__ import annotations

from weakref import WeakSet

from fsdp_flat.runtime import Guard, RankZeroTensors, Step, rank_groups_of, warn_of_unsynchronized


class UnmanagedTensors(Guard):
    """Warns, once the first reduced gradients exist, of what differs between ranks or nothing reduces."""

    def __init__(self) -> None:
        self._checked: WeakSet[Step] = WeakSet()

    def after_reduce(self, step: Step) -> None:
        """Compare the tensors of ranks, and warn. Every rank of the tree must call this."""
        if step in self._checked:
            return
        self._checked.add(step)
        options, root_module = step.root.options, step.root_module()
        if root_module is not None:
            groups = dict.fromkeys(handle.comm.options.groups for unit in step.units for handle in unit.handles)
            tensors = RankZeroTensors(root_module)
            tensors.compare(rank_groups_of(groups or [options.groups]), options.device)
            tensors.warn()
        warn_of_unsynchronized(step.units)
