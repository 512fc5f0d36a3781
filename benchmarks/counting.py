"""Counts bytes sent and bytes alive at every operator of an untimed step."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_flat.comm.shm import transports


class Counter(TorchDispatchMode):
    """Intercepts every operator and every collective, also those that backward and DistributedDataParallel start.

    Bytes sent are those that a rank sends on average under gloo's algorithms: an all-gather or all-to-all sends (W-1)/W
    of the full tensor, and an all-reduce twice that. So does gloo's reduce_scatter, which is an all-reduce of a copy.
    Messages through shared memory count once for each rank that reads them. Bytes alive are those of every storage that
    a tensor in this process ever had, queried at every operator, so memory that a storage gets back later counts.
    Memory that a collective allocates internally does not count, nor does the shared memory through which ranks of one
    host exchange messages; ``shared`` reports the latter. Without ``counts_earlier`` a storage counts
    from the first operator on that returns it.
    """

    def __init__(self, *, counts_earlier: bool = True) -> None:
        super().__init__()
        self._sent = 0.0
        self._sent_before = self._sent_by_transports()
        self.collectives = 0
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}
        if counts_earlier:
            gc.collect()
            self._note(o for o in gc.get_objects() if isinstance(o, torch.Tensor))

    @property
    def sent(self) -> float:
        """Return the bytes sent so far."""
        return self._sent + self._sent_by_transports() - self._sent_before

    @staticmethod
    def _sent_by_transports() -> int:
        return sum(transport.sent_nbytes for transport in transports())

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory for messages to other ranks of this host."""
        return sum(transport.nbytes for transport in transports())

    def _note(self, tensors: Iterable[Any]) -> None:
        for each in tensors:
            # The storage of a DTensor itself has the size of the full tensor, and no memory.
            tensor = getattr(each, "_local_tensor", each)
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not hasattr(tensor, "untyped_storage"):
                continue
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue  # other kinds of meta tensors, and wrappers, whose inner tensors are counted on their own
            # Memory that torch did not allocate cannot be resized: mapped files, such as those of messages.
            # Tensors of FakeTensorMode have storages on meta, which are as large as those of real ones.
            has_memory = storage.device.type != "meta" or isinstance(tensor, FakeTensor)
            if has_memory and storage.resizable() and storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage)

    def alive(self) -> int:
        """Return the bytes of every storage that is alive now."""
        total = 0
        for key, ref in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__.split(".")[0], args)
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves(result)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            self._note(leaves)
            self.peak = max(self.peak, self.alive())
        return result

    def _count(self, name: str, args: Any) -> None:
        self.collectives += 1
        # An operator with a reduction has that as a further object, behind the group.
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        size, rank = group.size(), group.rank()
        share = (size - 1) / size
        first = sum(leaf.nbytes for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor))
        if name in ("_allgather_base_", "allgather_"):
            self._sent += share * first
        elif name == "alltoall_base_":
            # A rank's share for itself is not sent; without splits it is 1/W of the tensor.
            splits = args[4] or [1] * size
            self._sent += args[1].nbytes * (1 - splits[rank] / max(1, sum(splits)))
        elif name in ("allreduce_",):
            self._sent += 2 * share * first
        elif name in ("_reduce_scatter_base_", "reduce_scatter_"):
            self._sent += 2 * share * first * size
        elif name == "broadcast_":
            # One rank sends to all others: take the average over ranks.
            self._sent += share * first
        elif name == "send":
            self._sent += first
        elif name not in ("recv_", "recv_any_source_", "barrier", "monitored_barrier_"):
            raise NotImplementedError(f"no formula for the bytes of c10d::{name}")
