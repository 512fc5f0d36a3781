"""Describes tensors of which each rank holds a part, and moves them between partitions.

A model's parameters and an optimizer's states are both such tensors: a codec (:class:`StateDictCodec`) turns them into
the values of one state-dict type, and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_flat.api import OptimStateDictConfig, StateDictConfig
from fsdp_flat.comm import P2PChannels, RankGroup
from fsdp_flat.flat import PLAIN
from fsdp_flat.layout import Interval, Partition, ReplicatedPartition, plan_transfer
from fsdp_flat.state._torch import dtype_of
from fsdp_flat.state.param_index import IndexedParam


@dataclass(frozen=True, slots=True, eq=False)
class StateShard:
    """Holds this rank's part of one tensor: of a parameter, of an optimizer state of one, or of a flat parameter.

    Attributes:
        param: the parameter.
        local: this rank's elements (1-D), the source of a save or the target of a load.
        label: the tensor's name in error texts.
        shape: shape of the tensor; like ``param.shape``, that of this rank's part under tensor parallelism.
        owner: the rank of the shard group that has all elements; None if they are sharded as the parameter is.
    """

    param: IndexedParam
    local: torch.Tensor
    label: str
    shape: tuple[int, ...]
    owner: int | None = None

    @classmethod
    def of_state(
        cls, param: IndexedParam, local: torch.Tensor, name: str, shape: Sequence[int], owner: int | None
    ) -> StateShard:
        """Describe an optimizer state; without an owner it has the parameter's shape, whatever ``shape`` is."""
        label = f"State {name!r} of {param.fqn!r}"
        return cls(param, local, label, param.shape if owner is None else tuple(shape), owner)

    @property
    def held(self) -> Partition:
        """Partition of the flattened tensor over the shard group."""
        if self.owner is None:
            return self.param.partition
        return ReplicatedPartition(math.prod(self.shape), self.owner, self.param.rank_group.size)

    @property
    def run(self) -> Interval:
        """Elements of this rank."""
        return self.param.local_shard.in_param if self.owner is None else self.held[self.param.rank_group.rank]

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the full tensor in a state dict."""
        adapter = self.param.adapter
        return self.shape if adapter is PLAIN else adapter.full_shape(self.shape)

    def transfer_to(self, dst: int | None, target: torch.Tensor | None) -> TensorTransfer:
        """Describe the transfer of the tensor to rank ``dst`` of the shard group; None for every rank.

        Args:
            dst: the rank.
            target: receives the tensor, of :attr:`shape`; empty or None on other ranks.
        """
        rank_group, numel = self.param.rank_group, math.prod(self.shape)
        return TensorTransfer(
            rank_group,
            self.param.unit.options.device,
            held=self.held,
            wanted=ReplicatedPartition(numel, dst, rank_group.size),
            source=self.local,
            target=None if target is None else target.view(-1),
            nbytes=numel * self.local.itemsize,
        )


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """Describes the transfer of one tensor between two partitions over the ranks of a group.

    Attributes:
        rank_group: the ranks.
        device: the compute device.
        held, wanted: the partitions.
        source, target: this rank's elements before and after (1-D); None if it has none.
        nbytes: bytes of the full tensor, equal on every rank.
    """

    rank_group: RankGroup
    device: torch.device
    held: Partition
    wanted: Partition
    source: torch.Tensor | None
    target: torch.Tensor | None
    nbytes: int


def redistribute(transfers: Iterable[TensorTransfer], channels: P2PChannels | None = None) -> None:
    """Transfer tensors, each rank's elements directly from their source to their target.

    Every rank of the groups must call this with the same tensors in the same order.

    Args:
        transfers: the transfers.
        channels: those of earlier calls, to create none; they are free again afterwards.
    """
    channels = P2PChannels() if channels is None else channels
    for each in transfers:
        transfer_plan = plan_transfer(each.held, each.wanted, each.rank_group.rank)
        channels.add(each.rank_group, each.device, transfer_plan, each.source, each.target, nbytes=each.nbytes)
    channels.wait()


class LoadPlan:
    """Collects the copies and transfers of one load, to run once every value fits.

    Attributes:
        lines: one line per tensor that ranks exchange, the same on every rank.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._copies: list[Callable[[], object]] = []
        self._stages: tuple[list[TensorTransfer], ...] = ([], [])
        self._last: list[Callable[[], object]] = []

    def call(self, function: Callable[[], object], *, last: bool = False) -> None:
        """Plan a call, before all transfers or after them (``last``)."""
        (self._last if last else self._copies).append(function)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Plan the copy of this rank's elements out of a tensor on this rank."""
        self._copies.append(lambda: target.copy_(source))

    def transfer(self, first: TensorTransfer | None, second: TensorTransfer | None) -> None:
        """Plan a transfer in up to two groups; the second begins when all first ones have ended."""
        for stage, each in zip(self._stages, (first, second), strict=True):
            if each is not None:
                stage.append(each)

    def commit(self) -> None:
        """Run all copies and transfers; every rank that has planned transfers must call this."""
        with torch.no_grad():
            for copied in self._copies:
                copied()
            for stage in self._stages:
                redistribute(stage)
            for function in self._last:
                function()


class StateDictCodec:
    """Defines the values of one state-dict type; base of all codecs.

    Attributes:
        communicates: encoding takes every rank of the shard groups.
        exchanges: decoding takes every rank of the shard groups.
        is_flat: model state dicts have one value for each flat parameter, not for each parameter.
    """

    communicates = True
    exchanges = False
    is_flat = False

    def encode(self, shards: Sequence[StateShard], config: StateDictConfig | OptimStateDictConfig) -> list[Any]:
        """Return the values of a state dict, one per shard; None: the state dict of this rank has no such value.

        Like tensors, values have the attributes ``shape`` (of the full tensor) and ``dtype``. If ``communicates``,
        every rank of the shard groups must call this with the same tensors.

        Args:
            shards: this rank's parts.
            config: the options.
        """
        raise NotImplementedError

    def reads(self, value: Any) -> bool:
        """Return whether ``value`` is of this codec's own kind; values of no codec's kind are decoded as full."""
        return False

    def decoded_dtype(self, value: Any) -> torch.dtype:
        """Return the dtype of the optimizer state that ``value`` is decoded into, by default its own."""
        return dtype_of(value)

    def decode(self, value: Any, target: StateShard, plan: LoadPlan) -> None:
        """Plan how ``target`` gets its elements of ``value``.

        If ``exchanges``, every rank of the shard group must call this with the same tensor. The target has the dtype
        of the model's parameter, or :meth:`decoded_dtype` for an optimizer state.

        Raises:
            LoadError: the value does not fit.
        """
        raise NotImplementedError
