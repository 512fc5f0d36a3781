"""Exchanges gradient flags and collective digests between ranks at the end of each backward.

The exchange is one small all-reduce of bytes over each group, on the host. It answers these questions:

* which parameters got a gradient on any rank. A parameter that no rank used keeps ``.grad`` None, as in plain torch;
  one that only some ranks used gets the mean with zeros, as under DDP;
* which parameter groups hold gradients on any rank that their unit's post-backward did not reduce (from ``no_sync``, or
  because a weight was used outside of its unit's forward), so that all ranks reduce them;
* whether all ranks issued the same reductions, and those of each shard group the same all-gathers too, in the same
  order, train the same parameters, and are to average the same gradients that no unit manages;
* whether the graph is retained, so that ranks agree on the forwards that a later backward may go through.

Ranks of a shard group agree on forwards, replicas on reductions alone: a forward that no backward reaches may be that
of one replica.

A rank that needs no answer does not wait for the hosts of other ranks: all its trainable parameters have gradients, all
of these are reduced, and autograd has freed the graph. It reads the answers before the next forward, before a save, or
where ranks meet anyway; a difference is then raised on all ranks. Once a rank has needed an answer, all ranks wait in
the next backward, since such a rank may hold gradients that all have to reduce. So they do in the first backward.

The tensors are on the CPU for every compute device, so the host never waits for compute.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import compress

import torch

from fsdp_flat.comm import (
    CollectiveLog,
    Pending,
    RankGroup,
    ShardingGroups,
    begin_all_reduce,
    host_group,
    keep,
    true_on_any_rank,
)
from fsdp_flat.core.param_group import ParamGroup
from fsdp_flat.core.unit import Unit

_DOING = "the exchange of ranks in a backward"
_DIGEST_NBYTES = 8
_POLL_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the result of an exchange.

    Attributes:
        used: for each parameter group on several ranks, one byte per parameter: 1 if it got a gradient on any rank.
        unreduced: parameter groups that hold unreduced gradients on any rank.
        differing: groups whose ranks issued different collectives, or train or average different parameters; else None.
        retains_graph: autograd keeps the graph of this backward on any rank.
        is_needed: a rank has needed an answer.
        went_on: a rank has not waited for the answers.
    """

    used: Mapping[ParamGroup, bytes]
    unreduced: Collection[ParamGroup]
    differing: ShardingGroups | None
    retains_graph: bool
    is_needed: bool
    went_on: bool


class BackwardExchange:
    """Exchanges flags and digests between the ranks of one tree. Every rank must make the same calls.

    ``param_groups`` are those on more than one rank, by their groups, in the same order on every rank.
    """

    def __init__(self, units: Sequence[Unit], log: CollectiveLog) -> None:
        self._log = log
        self.param_groups: dict[ShardingGroups, list[ParamGroup]] = {}
        for unit in units:
            for param_group in unit.param_groups:
                groups = param_group.comm.options.groups
                if groups.num_ranks > 1:
                    self.param_groups.setdefault(groups, []).append(param_group)
        if units and not self.param_groups and units[0].options.groups.num_ranks > 1:
            # Everything is ignored; gradients that no unit manages may still be averaged.
            self.param_groups[units[0].options.groups] = []
        self._host_groups_of: dict[ShardingGroups, list[RankGroup]] = {}
        # Kept until the next exchange: a thread of gloo that drops the last reference to a tensor needs the GIL for
        # it, and aborts the process if the interpreter is ending (pytorch issue 190489).
        self._in_flight: dict[ShardingGroups, Pending] = {}
        # The memory of their tensors, which no dispatch mode of a caller (FakeTensorMode) sees read.
        self._messages: dict[ShardingGroups, bytearray] = {}

    def any_rank(self, flags: Sequence[bool], over: ShardingGroups) -> list[bool]:
        """Return for each flag whether it is true on any rank of ``over``."""
        return true_on_any_rank(flags, self._host_groups(over), collective=_DOING)

    def any_rank_of_replica(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is true on any rank of the shard groups that this rank is in.

        They alone all-gather together, so one replica may ask while others, which ran other forwards, do not.
        """
        shard_groups = [groups.shard for groups, some in self.param_groups.items() if some]
        return true_on_any_rank(flags, shard_groups, collective=_DOING)

    def begin(
        self,
        used: Mapping[ParamGroup, bytes],
        unreduced: Collection[ParamGroup],
        *,
        same: bytes,
        retains_graph: bool,
        is_needed: bool,
        waits: bool,
    ) -> None:
        """Begin the exchange, which :meth:`finish` ends.

        Args:
            used: for each parameter group, one byte per parameter: 1 if it got a gradient on this rank. A missing
                group has no gradients.
            unreduced: parameter groups that hold unreduced gradients.
            same: bytes that must be equal on all ranks.
            retains_graph, is_needed: see :class:`Outcome`, here of this rank.
            waits: this rank calls :meth:`finish` in this backward.
        """
        for groups, param_groups in self.param_groups.items():
            flags = [
                used.get(param_group) or bytes(len(param_group.layout.param_infos)) for param_group in param_groups
            ]
            is_unreduced = bytes([param_group in unreduced for param_group in param_groups])
            trained = bytes([trains for param_group in param_groups for trains in param_group.slots.requires_grad()])
            issued, reductions = self._log.digests(groups)
            # The all-reduce takes maxima; that of the complement shows the minimum of a digest.
            of_replicas = _by_replica(issued + _complement(issued), groups)
            of_all = (reductions if of_replicas else issued) + trained + same
            digest = hashlib.blake2b(of_all, digest_size=_DIGEST_NBYTES).digest()
            digests = [digest + _complement(digest), *of_replicas]
            facts = bytes([retains_graph, is_needed, not waits])
            message = bytearray(b"".join([*flags, is_unreduced, facts, *digests]))
            pending = Pending((), torch.frombuffer(message, dtype=torch.uint8))
            for rank_group in self._host_groups(groups):
                pending = begin_all_reduce(pending.wait(), rank_group, largest=True, collective=_DOING, is_flags=True)
            self._in_flight[groups], self._messages[groups] = pending, message

    def abort(self) -> None:
        """Leave exchanges to themselves, as their backward is aborted."""
        for pending in self._in_flight.values():
            keep(pending)

    def _host_groups(self, groups: ShardingGroups) -> list[RankGroup]:
        if groups not in self._host_groups_of:
            self._host_groups_of[groups] = list(map(host_group, groups.as_one))
        return self._host_groups_of[groups]

    @property
    def can_be_read_later(self) -> bool:
        """True if an exchange needs nothing of this rank once it has begun: it is one all-reduce over each groups.

        Where two follow each other, the second begins when the first has ended. Where units have several groups, ranks
        of one may need what those of another do not.
        """
        return len(self.param_groups) < 2 and all(len(self._host_groups(groups)) < 2 for groups in self.param_groups)

    def finish(self) -> Outcome:
        """Wait for the other ranks, and return their answers."""
        used: dict[ParamGroup, bytes] = {}
        unreduced: set[ParamGroup] = set()
        differing, found = None, bytes(3)
        for groups, pending in self._in_flight.items():
            pending.wait()
            message = BytesIO(self._messages[groups])
            param_groups = self.param_groups[groups]
            for param_group in param_groups:
                used[param_group] = message.read(len(param_group.layout.param_infos))
            unreduced.update(compress(param_groups, message.read(len(param_groups))))
            found = bytes(map(max, found, message.read(3)))
            while place := message.read(2 * _DIGEST_NBYTES):
                # Without other ranks (a plan) the places of other replicas are empty.
                if any(place) and place[:_DIGEST_NBYTES] != _complement(place[_DIGEST_NBYTES:]):
                    differing = differing or groups
        return Outcome(used, unreduced, differing, *map(bool, found))

    def finish_by(self, until: float) -> Outcome | None:
        """Return what :meth:`finish` does, or None if not all ranks have begun by ``until`` (``time.monotonic``)."""
        while not all(pending.is_completed() for pending in self._in_flight.values()):
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_INTERVAL_S)
        return self.finish()


def _by_replica(own: bytes, groups: ShardingGroups) -> list[bytes]:
    """Return a place in a message for each of several replicas that all-gather; this rank fills that of its own."""
    if 1 in (groups.shard.size, groups.replicate.size):
        return []
    return [own if rank == groups.replicate.rank else bytes(len(own)) for rank in range(groups.replicate.size)]


def _complement(digest: bytes) -> bytes:
    return bytes([255 - byte for byte in digest])
