"""Finds conflicting accesses without order, and accesses to freed memory, among recorded operations.

The unit is a block: a storage between the moment it gets memory and the moment it gives it back. Two accesses to one
block conflict if they are on different queues, at least one writes, and neither is ordered before the other. Ranges
inside a block are not told apart.

The allocator is the worst one that CUDA's caching allocator may be: memory that a block allocated on stream S gives
back may serve the very next block allocated on S, whatever its size. Every access to that next block must therefore be
ordered after every access to all blocks that S has taken back before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.rehearsal.streams import Clock, Machine, Queue, Stamp, is_ordered, join

_MOST_FREED = 4000


@dataclass(frozen=True, slots=True)
class Finding:
    """Describes one defect.

    Attributes:
        kind: ``"conflict"``, ``"freed memory"``, ``"host wait: ..."`` or ``"device mismatch"``.
        text: the operations, the memory, the streams and the lines of the library.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class Access:
    """Records one operation on one block."""

    op: str
    queue: str
    stamp: Stamp
    writes: bool
    where: str

    def __str__(self) -> str:
        return f"{self.op} {'writes' if self.writes else 'reads'} on {self.queue} ({self.where})"


@dataclass(slots=True, eq=False)
class Block:
    """Holds the accesses to the memory of one storage, from allocation to the moment it is given back.

    Attributes:
        label: name for reports.
        owner: the queue whose memory it is.
        after: what every access has to come after, since the memory may have served other blocks before.
        came_after: queues whose accesses come after ``after``.
        is_pinned: it is host memory that the device can copy from and to without the host.
    """

    label: str
    owner: Queue
    after: Clock
    is_pinned: bool = False
    is_freed: bool = False
    came_after: set[int] = field(default_factory=set)
    reads: dict[int, Access] = field(default_factory=dict)
    writes: dict[int, Access] = field(default_factory=dict)

    def accesses(self) -> list[Access]:
        """Return the last read and the last write of each queue."""
        return [*self.reads.values(), *self.writes.values()]


class Checker:
    """Takes allocations, accesses and frees in the order in which the host issues them.

    Attributes:
        findings: the defects so far, each once.
        is_on: whether findings are kept; order is followed at any rate.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.findings: list[Finding] = []
        self.is_on = True
        self.num_accesses = 0
        self._seen: set[object] = set()
        self._given_back: dict[int, Clock] = {}
        self._freed: dict[int, list[tuple[Block, str]]] = {}

    def report(self, kind: str, text: str, key: object = None) -> None:
        """Keep a finding, unless one with the same key was kept before."""
        key = (kind, text if key is None else key)
        if self.is_on and key not in self._seen:
            self._seen.add(key)
            self.findings.append(Finding(kind, text))

    def allocate(self, owner: Queue, label: str) -> Block:
        """Give out memory of ``owner``."""
        return Block(label, owner, dict(self._given_back.get(owner.id, {})))

    def free(self, block: Block, where: str) -> None:
        """Take memory back; its owner may give it out again at once."""
        if block.is_freed or block.owner is self._machine.host:
            return
        block.is_freed = True
        clock = self._given_back.setdefault(block.owner.id, {})
        for access in block.accesses():
            join(clock, dict([access.stamp]))
        freed = self._freed.setdefault(block.owner.id, [])
        freed.append((block, where))
        del freed[:-_MOST_FREED]

    def access(self, block: Block, queue: Queue, *, op: str, writes: bool, where: str, stamp: Stamp) -> None:
        """Check one access, and remember it."""
        self.num_accesses += 1
        access = Access(op, queue.name, stamp, writes, where)
        if block.is_freed:
            self.report(
                "freed memory", f"{access} {block.label} after its memory was given back", (block.label, op, where)
            )
        self._check_reuse(block, queue, access)
        earlier = list(block.writes.values())
        if writes:
            earlier += block.reads.values()
        for other in earlier:
            if not is_ordered(other.stamp, queue.clock):
                self.report(
                    "conflict",
                    f"{access} {block.label} without order after {other}",
                    (block.label, op, where, other.op, other.where, queue.name, other.queue),
                )
        (block.writes if writes else block.reads)[queue.id] = access

    def _check_reuse(self, block: Block, queue: Queue, access: Access) -> None:
        if queue.id in block.came_after:
            return
        if all(is_ordered(stamp, queue.clock) for stamp in block.after.items()):
            block.came_after.add(queue.id)
            return
        for freed, where in reversed(self._freed.get(block.owner.id, [])):
            for other in freed.accesses():
                if is_ordered(other.stamp, block.after) and not is_ordered(other.stamp, queue.clock):
                    self.report(
                        "freed memory",
                        f"{access} {block.label}, memory of the {block.owner.name} stream that {freed.label} may have "
                        f"had until it was freed ({where}), without order after {other}",
                        (block.label, freed.label, access.op, access.where, other.op, other.where, queue.name),
                    )
                    return
