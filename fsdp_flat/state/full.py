"""Encodes full tensors. Every rank sends its part directly to its place in the results, so that peak memory is the
result; a load copies this rank's part out of the given tensors and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.overrides import is_tensor_like

from fsdp_flat.api import OptimStateDictConfig, StateDictConfig
from fsdp_flat.errors import LoadError
from fsdp_flat.flat import PLAIN, TensorAdapter
from fsdp_flat.state._torch import shape_of
from fsdp_flat.state.shards import LoadPlan, StateDictCodec, StateShard, TensorTransfer, redistribute


class FullCodec(StateDictCodec):
    """Encodes full tensors, on every rank or on rank 0 of each shard group.

    While a model is saved, its modules and their hooks see full parameters, and :meth:`stored` encodes each as the
    modules then hold it. A subclass that overrides ``stored`` stores full tensors in another form.
    """

    def gather(
        self, shards: Iterable[StateShard], config: StateDictConfig | OptimStateDictConfig
    ) -> list[torch.Tensor]:
        """Return the unsharded tensors; with ``config.rank0_only`` they are empty except on rank 0 of the groups.

        Tensors that tensor parallelism has split are this rank's parts. Every rank must call this.
        """
        dst = 0 if config.rank0_only else None
        found: list[torch.Tensor] = []

        def transfers() -> Iterator[TensorTransfer]:
            # Results are allocated one by one, as earlier transfers release their memory.
            for shard in shards:
                shape = shard.shape if dst in (None, shard.param.rank_group.rank) else (0,)
                target = torch.empty(shape, dtype=shard.local.dtype, device=shard.param.unit.options.device)
                found.append(target)
                yield shard.transfer_to(dst, target)

        with torch.no_grad():
            redistribute(transfers())
        return found

    @final
    def encode(self, shards: Sequence[StateShard], config: StateDictConfig | OptimStateDictConfig) -> list[Any]:
        return [
            None
            if config.rank0_only and shard.param.rank_group.rank
            else self.stored(shard.param.adapter.from_local(unsharded), shard.param.adapter, config)
            for shard, unsharded in zip(shards, self.gather(shards, config), strict=True)
        ]

    def stored(
        self, tensor: torch.Tensor, adapter: TensorAdapter, config: StateDictConfig | OptimStateDictConfig
    ) -> torch.Tensor:
        """Return the value of an unsharded tensor; it may share memory with it.

        Every rank of the adapter's mesh must call this.

        Args:
            tensor: a module's parameter, or an optimizer state; a DTensor under tensor parallelism.
            adapter: the parameter's.
            config: the options.
        """
        full = adapter.full_tensor(tensor)
        return full.cpu() if config.offload_to_cpu else full

    def decode(self, value: Any, target: StateShard, plan: LoadPlan) -> None:
        """Plan the copy of this rank's part of a full tensor, or of a proxy of one."""
        is_read, run = isinstance(value, torch.Tensor), target.run.to_slice()
        if not is_read and not is_tensor_like(value):
            raise LoadError(
                f'While copying the parameter named "{target.label}", expected a tensor, but got {type(value)}.'
            )
        if isinstance(value, ShardedTensor):
            raise LoadError(
                f"{target.label}: a sharded tensor, where this load of unit {target.param.unit.name!r} expects a full "
                "one. Load a SHARDED_STATE_DICT inside FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)."
            )
        if run.start == run.stop and not is_read:
            return
        # Slicing a DTensor may communicate, so every rank does it now; plain tensors are only viewed.
        full = value if is_read else torch.empty(shape_of(value), dtype=value.dtype).copy_(value)
        adapter = target.param.adapter
        if adapter is not PLAIN:
            full = adapter.local_slice(full.detach().reshape(target.full_shape))
        local = full.reshape(-1)[run]
        # A proxy of a tensor in a file (Lightning's lazy loading) is read here; only this rank's part is kept.
        plan.copy(target.local, local if is_read else local.clone())
