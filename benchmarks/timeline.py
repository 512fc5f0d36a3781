"""Computes the schedule of a step on a simulated accelerator, beside torch's FSDP2: ``python -m benchmarks.timeline``.

Training runs on the fake accelerator of ``tests/rehearsal``, torch's FSDP2 too. Each operation takes a time by its
arithmetic and its bytes, and begins when those have ended that its stream, the events that this waited for, or the
collectives before it in its group make it wait for. So the figures are of an order of work: the host is infinitely
fast, and streams do not slow each other down. They say what can overlap, not how long a step takes on a device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_init,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fsdp_flat
import fsdp_flat.composable.fully_sharding
from benchmarks.tables import markdown
from fsdp_flat.wrap import ModuleWrapPolicy
from tests.rehearsal.fake_device import DEVICE
from tests.rehearsal.kit import Rehearsal, rehearsal
from tests.rehearsal.streams import Clock, Machine, Queue, RecordingEvent

# Of an H200: floating-point operations of matrix products and bytes of memory a second, and the least time of a kernel.
FLOPS, MEMORY, LAUNCH = 620e12, 3.4e12, 2e-6
HOST_LINK, LATENCY = 50e9, 10e-6
NUM_STEPS = 3
LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@dataclass(frozen=True)
class Row:
    """Describes a model, its batch, and the links between ranks.

    Attributes:
        layers, width, hidden, kv, vocab: sizes of the decoder.
        seq, batch: tokens of a sequence, sequences of a rank.
        gbps, replicate_gbps: GB/s of a rank in its shard group and in its replicate group.
        shards, replicas: sizes of these groups.
        recomputes: compute each block's activations again in backward.
        is_nested: two blocks and a layer are a unit, with a unit for each block inside.
        reshards: free parameters after the forward.
        num_prefetched: units that ``set_modules_to_forward_prefetch`` and its like name; 0 names none.
    """

    title: str
    layers: int = 16
    width: int = 2048
    hidden: int = 8192
    kv: int = 2048
    vocab: int = 32768
    seq: int = 2048
    batch: int = 2
    gbps: float = 150.0
    replicate_gbps: float = 25.0
    shards: int = 8
    replicas: int = 1
    recomputes: bool = False
    is_nested: bool = False
    reshards: bool = True
    num_prefetched: int = 0


_LARGE = {"layers": 32, "width": 4096, "hidden": 14336, "kv": 1024, "vocab": 128256, "seq": 8192, "batch": 1}
_SMALL = Row("5 blocks of 134 MB, few activations", layers=5, vocab=2048, seq=128, batch=1)
ROWS = {
    "1.2B": Row("1.2B, 150 GB/s"),
    "1.2B-60": Row("1.2B, 60 GB/s", gbps=60.0),
    "1.2B-60-zero2": Row("1.2B, 60 GB/s, SHARD_GRAD_OP", gbps=60.0, reshards=False),
    "8B": Row("8B, recomputed, 350 GB/s", gbps=350.0, recomputes=True, **_LARGE),  # type: ignore[arg-type]
    "hybrid": Row("1.2B, HYBRID_SHARD 8 x 4, 150 and 25 GB/s", replicas=4),
    "nested": Row("1.2B, units in units, 150 GB/s", is_nested=True),
    "memory": _SMALL,
    "memory-prefetch": replace(_SMALL, title=f"{_SMALL.title}, explicit prefetch of two", num_prefetched=2),
}
IMPLEMENTATIONS = {"fsdp2": "torch FSDP2", "originals": "wrapper", "fully_shard": "fully_shard"}


class Figures(NamedTuple):
    """Holds what a step takes: seconds, the largest number of bytes on the device, and kernels launched."""

    seconds: float
    nbytes: int
    launches: int


class Block(nn.Module):
    """Has the matrix products and elementwise operations of a decoder's block; ``cumsum`` stands for attention."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.recomputes = row.recomputes
        self.norms = nn.ParameterList(torch.ones(row.width) for _ in range(2))
        sizes = [(row.width, row.width), (row.width, row.kv), (row.width, row.kv), (row.width, row.width)]
        self.attention = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        sizes = [(row.width, row.hidden), (row.width, row.hidden), (row.hidden, row.width)]
        self.mlp = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value, out = self.attention
        gate, up, down = self.mlp
        normed = x * self.norms[0]
        mixed = (query(normed) + key(normed).sum() + value(normed).sum()).cumsum(1)
        x = x + out(mixed)
        normed = x * self.norms[1]
        return x + down(nn.functional.silu(gate(normed)) * up(normed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._compute, x, use_reentrant=False) if self.recomputes else self._compute(x)


class Pair(nn.Module):
    """Applies two blocks and a layer of its own."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(row) for _ in range(2))
        self.last = nn.Linear(row.width, row.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Decoder(nn.Module):
    """Applies an embedding, blocks or pairs of blocks, and a head."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.tokens = nn.Embedding(row.vocab, row.width)
        kind, num = (Pair, row.layers // 2) if row.is_nested else (Block, row.layers)
        self.blocks = nn.ModuleList(kind(row) for _ in range(num))
        self.norm, self.head = nn.Parameter(torch.ones(row.width)), nn.Linear(row.width, row.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.norm)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class Schedule:
    """Times each operation that the recorder of ``run`` notes, and counts the bytes on the device.

    Attributes:
        end: when the last operation so far has ended, in seconds.
        peak: the largest number of bytes that were allocated at once.
        launches: operations on the device, without collectives.
    """

    def __init__(self, run: Rehearsal, row: Row) -> None:
        self._machine, self._row = run.machine, row
        self._ends: dict[tuple[int, int], float] = {}
        self._nbytes_of: dict[int, int] = {}
        self._alive = 0
        self.end, self.peak, self.launches = 0.0, 0, 0
        recorder: Any = run.recorder
        self._note, self._allocate = recorder.note, recorder._allocate
        self._died, self._resize = recorder._died, recorder.resize_storage
        recorder.note, recorder._allocate = self._noted, self._allocated
        recorder._died, recorder.resize_storage = self._freed, self._resized

    def _noted(self, op: str, queue: Queue, reads: Sequence[Any] = (), writes: Sequence[Any] = ()) -> None:
        reads, writes = list(reads), list(writes)
        self._note(op, queue, reads, writes)
        if queue is self._machine.host:
            return
        clock: Clock = queue.clock
        number = clock[queue.id]
        before = [(each, at if each != queue.id else number - 1) for each, at in clock.items()]
        begin = max(self._ends.get(each, 0.0) for each in before)
        end = self._ends[queue.id, number] = begin + self.seconds(op, reads, writes)
        self.end = max(self.end, end)
        self.launches += not queue.name.startswith("group")

    def seconds(self, op: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> float:
        """Return the time of an operation, from its begin."""
        row, read, written = self._row, _nbytes(reads), _nbytes(writes)
        if op.startswith(("all_gather", "reduce_scatter")):
            nbytes = written if op.startswith("all_gather") else read
            return LATENCY + nbytes * (row.shards - 1) / row.shards / (row.gbps * 1e9)
        if op.startswith("all_reduce"):
            return LATENCY + 2 * written * (row.replicas - 1) / row.replicas / (row.replicate_gbps * 1e9)
        if op.endswith(("to the host", "to the accelerator")):
            return LAUNCH + max(read, written) / HOST_LINK
        if op in ("aten::mm", "aten::addmm", "aten::bmm"):
            a, b = [tensor for tensor in reads if tensor.dim() > 1][-2:]
            return LAUNCH + 2 * a.size(-2) * a.size(-1) * b.size(-1) / FLOPS
        if op == "aten::cumsum":  # causal attention, 0.6 as fast as matrix products; its backward is 2.5 forwards
            flops = 2 * row.batch * row.seq**2 * row.width / 0.6
            return flops * (1 if torch.is_grad_enabled() else 2.5) / FLOPS
        return LAUNCH + (0 if op in ("aten::sum", "aten::expand") else (read + written) / MEMORY)

    def _set(self, key: int, nbytes: int) -> None:
        self._alive += nbytes - self._nbytes_of.pop(key, 0)
        self._nbytes_of[key] = nbytes
        self.peak = max(self.peak, self._alive)

    def _allocated(self, storage: torch.UntypedStorage, owner: Queue, label: str) -> Any:
        if owner is not self._machine.host:
            self._set(storage._cdata, storage.nbytes())
        return self._allocate(storage, owner, label)

    def _freed(self, key: int) -> None:
        self._set(key, 0)
        self._died(key)

    def _resized(self, resize: Callable[..., Any], storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes == 0:
            self._set(storage._cdata, 0)
        return self._resize(resize, storage, nbytes)


@contextmanager
def _fsdp2_on(machine: Machine) -> Iterator[None]:
    """Have torch's FSDP2 use the streams of the fake accelerator inside the block."""

    class Handle:
        Stream = staticmethod(lambda **_: machine.new_stream())
        Event = staticmethod(lambda **_: RecordingEvent(machine))
        current_stream = staticmethod(lambda *_: machine.current)
        stream = staticmethod(lambda stream: stream)
        current_device = staticmethod(lambda: 0)

    with ExitStack() as stack:
        for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
            stack.enter_context(mock.patch.object(module, "_get_device_handle", return_value=Handle))
        for module in (_fsdp_init, _fully_shard):
            stack.enter_context(mock.patch.object(module, "_get_device_from_mesh", return_value=DEVICE, create=True))
        group = _fsdp_param_group.FSDPParamGroup
        stack.enter_context(mock.patch.object(group, "_validate_no_meta_params", return_value=None))
        ours = fsdp_flat.composable.fully_sharding
        stack.enter_context(mock.patch.object(ours, "current_accelerator", return_value=DEVICE))
        yield


def _sharded(name: str, row: Row) -> nn.Module:
    """Return the row's model, sharded by an implementation."""
    with DEVICE:
        model: Any = Decoder(row)
    is_hybrid = row.replicas > 1
    sizes, names = ((row.replicas, row.shards), ("replicate", "shard")) if is_hybrid else ((row.shards,), ("shard",))
    mesh = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=names)
    kinds = {Block, Pair} if row.is_nested else {Block}
    if name == "originals":
        strategies = fsdp_flat.ShardingStrategy
        full = strategies.HYBRID_SHARD if is_hybrid else strategies.FULL_SHARD
        return fsdp_flat.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(kinds),
            device_mesh=mesh,
            use_orig_params=True,
            sharding_strategy=full if row.reshards else strategies.SHARD_GRAD_OP,
            mixed_precision=fsdp_flat.MixedPrecision(**LOW),
        )
    api: Any = fsdp if name == "fsdp2" else fsdp_flat
    given = {"mesh": mesh, "mp_policy": api.MixedPrecisionPolicy(**LOW)}
    given |= {} if row.reshards else {"reshard_after_forward": False}
    units = [module for module in model.modules() if type(module) in kinds]
    for module in (*reversed(units), model):
        api.fully_shard(module, **given)
    for at, unit in enumerate(units if row.num_prefetched else ()):
        unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + row.num_prefetched])
        unit.set_modules_to_backward_prefetch(units[max(0, at - row.num_prefetched) : at][::-1])
    return model


@torch.no_grad()
def _update(model: nn.Module) -> None:
    """Update local tensors, since DTensor has no operations for the fake accelerator, and drop the gradients."""
    for param in model.parameters():
        if param.grad is not None:
            getattr(param, "_local_tensor", param).sub_(getattr(param.grad, "_local_tensor", param.grad))
            param.grad = None


def measure(name: str, row: Row) -> Figures:
    """Return what the last of a few steps of an implementation takes."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=row.shards * row.replicas)
    try:
        with rehearsal() as run, _fsdp2_on(run.machine):
            run.checker.is_on = False
            schedule = Schedule(run, row)
            model = _sharded(name, row)
            for _ in range(NUM_STEPS):
                begin, schedule.peak, schedule.launches = schedule.end, 0, 0
                tokens = torch.zeros(row.batch, row.seq, dtype=torch.long, device=DEVICE)
                model(tokens).float().mean().backward()
                launches = schedule.launches
                _update(model)
            return Figures(schedule.end - begin, schedule.peak, launches)
    finally:
        dist.destroy_process_group()


def lines(figures: dict[str, dict[str, Figures]]) -> list[list[str]]:
    """Return a line of the table for each row: milliseconds, with ratios to FSDP2, and peaks in GB."""
    found = []
    for key, by_name in figures.items():
        torchs = by_name["fsdp2"]
        cells = [f"{1e3 * torchs.seconds:.1f} / {torchs.nbytes / 1e9:.2f}"]
        for name in list(IMPLEMENTATIONS)[1:]:
            own = by_name.get(name)
            ratio = "" if own is None else f", {own.seconds / torchs.seconds:.2f}"
            cells.append("" if own is None else f"{1e3 * own.seconds:.1f}{ratio} / {own.nbytes / 1e9:.2f}")
        found.append([ROWS[key].title, *cells])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    chosen = parser.parse_args(arguments)
    figures = {}
    for key in chosen.rows:
        names = [name for name in IMPLEMENTATIONS if name != "originals" or not ROWS[key].num_prefetched]
        figures[key] = {name: measure(name, ROWS[key]) for name in names}
    titles = [f"{title}, ms / GB" for title in IMPLEMENTATIONS.values()]
    print(markdown(["schedule on a simulated accelerator", *titles], lines(figures)), end="")


if __name__ == "__main__":
    main()
